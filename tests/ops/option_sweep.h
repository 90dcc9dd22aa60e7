// SPDX-License-Identifier: Apache-2.0
// Checks that whatever field of an operation's parameters changes, on whatever row of its table, the outputs change or
// the call is refused. A field without an entry fails the sweep; a struct's field that mla/fields.h lacks does not
// compile.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "device_test.h"
#include "mla/fields.h"

namespace mla {

enum class Effect : uint8_t {
  kChanges,           ///< other outputs
  kRefused,           ///< an error, and not a byte of the outputs written
  kChangesOrRefused,  ///< one of the two: some rows compute it, and the others say that they do not
  kChangesIfTaken,    ///< other outputs, on the rows that take a problem with such a field
  kNone,              ///< the very same outputs: mla/params.h says that the field means nothing here
  kAny                ///< says how to compute or what is legal, not what comes out; tests of its own see to it
};

template <class Case>
using SpecOf = decltype(Case::spec);
template <class Case>
using ParamsOf = decltype(std::declval<const Case&>().params());

/// Describes one way to change one field.
template <class Case>
struct Option {
  using Change = std::function<void(ParamsOf<Case>&)>;
  using Prepare = std::function<void(SpecOf<Case>&)>;
  // A constructor, for an aggregate with a default crashes gcc 12.
  Option(std::string of_field, Effect has_effect, Change makes_change, Prepare prepares = nullptr)
      : field(std::move(of_field)), effect(has_effect), change(std::move(makes_change)), prepare(std::move(prepares)) {}

  std::string field;  ///< as in mla/params.h: "options.window_left"
  Effect effect;
  Change change;
  Prepare prepare;  ///< gives the problem what the field is about; or null
};

template <class Case>
using Options = std::vector<Option<Case>>;

template <class Case>
Options<Case> join(Options<Case> all, std::initializer_list<Options<Case>> more) {
  for (const Options<Case>& options : more) all.insert(all.end(), options.begin(), options.end());
  return all;
}

// Changes of data.

template <class T = int32_t>
T& at(const TensorView& view, int64_t row, int64_t column = 0) {
  return static_cast<T*>(view.data)[row * view.stride[0] + (view.ndim > 1 ? column * view.stride[1] : 0)];
}

template <class T = int32_t>
void swap_first(const TensorView& list) {
  std::swap(at<T>(list, 0), at<T>(list, 1));
}

/// Sets all indices of the first query to the first of them, which counts as often as it stands.
inline void repeat_first(const TensorView& indices) { std::fill_n(&at(indices, 0), indices.shape[1], at(indices, 0)); }

/// Returns 5 for 3, and 3 for anything else: a value that differs.
inline int32_t another(int32_t value) { return value == 3 ? 5 : 3; }

/// Calls f(element) for the first `width` elements of every row.
template <class F>
void for_each_element(TensorView view, int64_t width, const F& f) {
  if (view.ndim == 0) return f(static_cast<std::byte*>(view.data));
  const int64_t extent = view.ndim == 1 ? std::min(view.shape[0], width) : view.shape[0];
  const int64_t step = view.stride[0] * static_cast<int64_t>(size_of(view.dtype));
  --view.ndim;
  std::rotate(view.shape.begin(), view.shape.begin() + 1, view.shape.end());
  std::rotate(view.stride.begin(), view.stride.begin() + 1, view.stride.end());
  for (int64_t i = 0; i < extent; ++i, view.data = static_cast<std::byte*>(view.data) + step)
    for_each_element(view, width, f);
}

/// Flips the signs of the first channels of every row; in a tensor of bytes these are e4m3.
inline void flip(const TensorView& view) {
  constexpr int64_t kChannels = 32;
  for_each_element(view, kChannels, [&](std::byte* element) { element[size_of(view.dtype) - 1] ^= std::byte{0x80}; });
}

/// Doubles every element of a tensor of f32.
inline void twice(const TensorView& view) {
  for_each_element(view, INT64_MAX, [](std::byte* element) { *reinterpret_cast<float*>(element) *= 2; });
}

// Fields that several operations have.

/// Applies `f` to the cache of a problem, or to those that must be alike.
template <class Spec>
using CacheSpecs = std::function<void(Spec&, const std::function<void(kit::CacheSpec&)>&)>;

inline void set_format(kit::CacheSpec& cache, CacheFormat format) {
  const int32_t page_size = std::exchange(cache, kit::usual_cache(format)).page_size;
  cache.page_size = page_size;
}

/// Returns the options of a cache called `name`. `written` says that the cache is an output.
template <class Case>
Options<Case> cache_options(const std::string& name, bool written, KvCache& (*of)(ParamsOf<Case>&),
                            const CacheSpecs<SpecOf<Case>>& specs) {
  using Params = ParamsOf<Case>;
  using Spec = SpecOf<Case>;
  const auto with = [specs](const std::function<void(kit::CacheSpec&)>& f) {
    return [specs, f](Spec& spec) { specs(spec, f); };
  };
  const auto parts = with([](kit::CacheSpec& cache) {
    set_format(cache, CacheFormat::kBF16);
    cache.two_tensors = true;
  });
  const auto scales = with([written](kit::CacheSpec& cache) {  // writers choose those of tokens
    set_format(cache, CacheFormat::kFP8);
    cache.two_tensors = cache.own_kpe_scale = true;
    cache.token_scales = !written;
  });
  const auto tensor = [&](const char* field, TensorView KvCache::*member, const auto& prepare) {
    return Option<Case>{name + "." + field, written ? Effect::kRefused : Effect::kChanges,
                        [=](Params& p) { written ? void(of(p).*member = {}) : flip(of(p).*member); }, prepare};
  };
  const auto scale = [&](const char* field, TensorView KvCache::*member) {
    return Option<Case>{name + "." + field, Effect::kChanges, [=](Params& p) { twice(of(p).*member); }, scales};
  };
  return {{name + ".format", Effect::kRefused,
           [of](Params& p) {
             CacheFormat& format = of(p).format;
             format = format == CacheFormat::kF16 ? CacheFormat::kBF16 : CacheFormat::kF16;
           }},
          tensor("kv", &KvCache::kv, [](Spec&) {}),
          tensor("ckv", &KvCache::ckv, parts),
          tensor("kpe", &KvCache::kpe, parts),
          scale("ckv_scale", &KvCache::ckv_scale),
          scale("kpe_scale", &KvCache::kpe_scale),
          {name + ".page_size", Effect::kRefused, [of](Params& p) { of(p).page_size = 1000; }},
          {name + ".power_of_two_scales", written ? Effect::kChanges : Effect::kNone,
           [of](Params& p) { of(p).power_of_two_scales = false; },
           with([](kit::CacheSpec& cache) { set_format(cache, CacheFormat::kFP8DsMla); })}};
}

/// Returns the options of a page table called `name`, of two requests. `kv_len` says what becomes of outputs where the
/// first is shorter.
template <class Case>
Options<Case> page_options(const std::string& name, PageTable& (*of)(ParamsOf<Case>&), bool& (*padded)(SpecOf<Case>&),
                           Effect kv_len = Effect::kChanges) {
  using Params = ParamsOf<Case>;
  using Spec = SpecOf<Case>;
  const auto as = [padded](bool block_table) { return [=](Spec& spec) { padded(spec) = block_table; }; };
  return {{name + ".kv_indptr", Effect::kChanges,
           [of](Params& p) {  // the second request's pages begin one further, and end with its first
             const PageTable& pages = of(p);
             int32_t& begin = at(pages.kv_indptr, 1);
             int64_t last = begin;
             while (at(pages.kv_indices, last) != 2147483647) ++last;
             at(pages.kv_indices, last) = at(pages.kv_indices, begin);
             ++begin;
           },
           as(false)},
          {name + ".kv_indices", Effect::kChanges,
           [of](Params& p) { at(of(p).kv_indices, 0) = at(of(p).kv_indices, 1); }, as(false)},
          {name + ".block_table", Effect::kChanges,
           [of](Params& p) { at(of(p).block_table, 0, 0) = at(of(p).block_table, 0, 1); }, as(true)},
          {name + ".kv_len", kv_len, [of](Params& p) { at(of(p).kv_len, 0) -= 20; }}};
}

template <class Case>
Options<Case> context_parallel_options() {
  using Params = ParamsOf<Case>;
  const auto ranks = [](SpecOf<Case>& spec) { spec.context_parallel = {.rank = 0, .world = 2, .interleave = 1}; };
  return {
      {"context_parallel.rank", Effect::kChanges, [](Params& p) { p.context_parallel.rank = 1; }, ranks},
      {"context_parallel.world", Effect::kChanges, [](Params& p) { p.context_parallel.world = 3; }, ranks},
      {"context_parallel.interleave", Effect::kChanges, [](Params& p) { p.context_parallel.interleave = 2; }, ranks}};
}

// The sweep.

/// Holds every output as numbers; for operations that move and choose, all bytes as one.
using Outputs = std::vector<std::vector<double>>;

/// Says whether the operation's outputs are rounded. An option may send them another way, which rounds otherwise even
/// if it drops the option: only a change larger than any kernel's errors is one.
template <class Case>
inline constexpr bool kRounds = std::is_same_v<Case, kit::IndexerLogitsCase> || requires(const Case& c) {
  c.o;
};
/// Is a part of the largest element. kit::tolerance_of() stays below 2^-7, but for a few P that compute = fp8 rounds.
inline constexpr double kMoreThanRounding = 0x1p-6;

/// Returns whether no element differs by more than `limit` times its tensor's largest one.
inline bool are_alike(const Outputs& a, const Outputs& b, double limit) {
  for (size_t tensor = 0; tensor < a.size(); ++tensor) {
    double largest = 0;
    for (double value : a[tensor])
      if (std::isfinite(value)) largest = std::max(largest, std::abs(value));
    for (size_t i = 0; i < a[tensor].size(); ++i) {
      const double x = a[tensor][i], y = b[tensor][i];
      const bool same = x == y || (std::isnan(x) && std::isnan(y));
      if (!same && !(std::abs(x - y) <= limit * largest)) return false;
    }
  }
  return true;
}

/// Returns the outputs after a run; or why there was none.
template <class Case>
Result<Outputs> outputs_after(const Context& context, const Case& problem, const ParamsOf<Case>& host_params) {
  Result<kit::DeviceImage> image = kit::DeviceImage::create(context.device(), kit::buffers_of(problem));
  if (!image.ok()) return image.status();
  const auto params = image->there(host_params);
  Status status;
  if constexpr (requires { workspace_size(context, params); }) {
    const Result<size_t> size = workspace_size(context, params);
    if (!size.ok()) return size.status();
    const kit::Buffer workspace(*size);
    workspace.fill(0xFF);
    if (status = image->add(workspace); !status.ok()) return status;
    const Result<Plan> made = plan(context, params, image->there(workspace));
    if (!made.ok()) return made.status();
    status = run(context, *made, params);
    if (status.ok()) status = image->fetch();
  } else {
    status = run(context, params);
    if (status.ok()) status = image->fetch();
  }
  if (!status.ok()) return status;
  Outputs outputs;
  if constexpr (kRounds<Case>) {
    auto views = problem.params();
    kit::for_each_output(views, [&](const TensorView& view) {
      if (view.given()) outputs.push_back(kit::to_dense(view));
    });
  } else {
    std::vector<double>& bytes = outputs.emplace_back();
    for (const kit::Buffer* buffer : kit::outputs_of(problem))
      for (std::byte byte : buffer->bytes()) bytes.push_back(std::to_integer<int>(byte));
  }
  return outputs;
}

/// Checks that every field has an entry, and that every entry is about a field.
template <class Case>
void expect_all_fields(const Options<Case>& options) {
  std::set<std::string> fields, entries;
  ParamsOf<Case> params;
  for_each_leaf(params, [&](const std::string& path, auto&) { fields.insert(path); });
  for (const Option<Case>& option : options) entries.insert(option.field);
  for (const std::string& field : fields) EXPECT_TRUE(entries.contains(field)) << "no entry changes " << field;
  for (const std::string& entry : entries) EXPECT_TRUE(fields.contains(entry)) << "no field is called " << entry;
}

/// Checks that an entry that is about a number changes that number, and no other.
template <class Params>
void expect_number_changed(const std::string& field, Params before, Params after) {
  for_each_leaf(before, [&](const std::string& path, auto& was) {
    if constexpr (!std::is_same_v<std::remove_reference_t<decltype(was)>, TensorView>)
      for_each_leaf(after, [&](const std::string& other, auto& is) {
        if constexpr (std::is_same_v<decltype(was), decltype(is)>) {
          if (path == other) {
            EXPECT_EQ(was != is, path == field) << field << " changes " << path;
          }
        }
      });
  });
}

/// Runs a problem with the field changed. `usual` is what it gives as it is, empty until known.
template <class Case>
void expect_effect(const Context& context, const SpecOf<Case>& spec, const Option<Case>& option, Outputs& usual) {
  SCOPED_TRACE(option.field + " of " + context.backend() + " on " + context.device() + " [" + kit::describe(spec) +
               "]");
  const Case problem(spec);
  if (usual.empty()) {
    Result<Outputs> made = outputs_after(context, problem, problem.params());
    ASSERT_TRUE(made.ok()) << made.status().message();
    usual = std::move(made).value();
  }
  auto params = problem.params();
  option.change(params);
  expect_number_changed(option.field, problem.params(), params);
  problem.reset_outputs();
  const Result<Outputs> changed = outputs_after(context, problem, params);
  switch (option.effect) {
    case Effect::kAny: return;
    case Effect::kChanges:
    case Effect::kChangesIfTaken:
      ASSERT_TRUE(changed.ok()) << changed.status().message();
      EXPECT_FALSE(are_alike(usual, *changed, kRounds<Case> ? kMoreThanRounding : 0));
      return;
    case Effect::kChangesOrRefused:
      if (!changed.ok()) break;
      EXPECT_FALSE(are_alike(usual, *changed, kRounds<Case> ? kMoreThanRounding : 0));
      return;
    case Effect::kNone:
      ASSERT_TRUE(changed.ok()) << changed.status().message();
      EXPECT_TRUE(are_alike(usual, *changed, 0));
      return;
    case Effect::kRefused: break;
  }
  EXPECT_FALSE(changed.ok());
  const Case untouched(spec);
  const auto left = kit::outputs_of(problem), reset = kit::outputs_of(untouched);
  for (size_t i = 0; i < left.size(); ++i) EXPECT_EQ(bits_of(*left[i]), bits_of(*reset[i]));
}

/// Changes every field of every problem that the row takes.
template <class Case>
void sweep_options(const std::string& device, const std::string& row, const std::vector<SpecOf<Case>>& specs,
                   const Options<Case>& options) {
  expect_all_fields(options);
  const Result<Context> context = Context::create({.num_threads = 2, .affinity = {}, .backend = row, .device = device});
  ASSERT_TRUE(context.ok()) << context.status().message();
  std::map<std::string, Outputs> usual;  // by description
  for (const Option<Case>& option : options) {
    int runs = 0;
    for (SpecOf<Case> spec : specs) {
      if (option.prepare) option.prepare(spec);
      const auto is_taken = [&] { return explain(kit::on_device(kit::problem_of(spec), device), row).selected == row; };
      if (!is_taken()) spec = with_fp8(spec);
      if (!is_taken()) continue;
      expect_effect(*context, spec, option, usual[kit::describe(spec)]);
      ++runs;
    }
    const bool may_refuse_all = option.effect == Effect::kChangesOrRefused || option.effect == Effect::kChangesIfTaken;
    EXPECT_TRUE(runs > 0 || may_refuse_all)
        << row << " on " << device << " takes no problem to change " << option.field << " of";
  }
}

/// Returns why this machine cannot run a row at all; empty if it can.
inline std::string why_not(Op op, const std::string& device, const std::string& row) {
  Problem problem = usual_problem(op);
  problem.num_heads = std::max<int64_t>(problem.num_heads, 64);
  std::string why;
  for (const Problem& one : {problem, with_fp8(problem)})
    for (const BackendVerdict& verdict : explain(kit::on_device(one, device), "auto").rows) {
      if (verdict.name != row) continue;
      if (verdict.usable) return {};
      why = row + ": " + verdict.reason;
    }
  return why;
}

/// Sweeps the options on the device and the row that its parameter names.
template <class Case, Op op>
class OptionSweep : public testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  void sweep(const std::vector<SpecOf<Case>>& specs, const Options<Case>& options) const {
    const auto& [device, row] = GetParam();
    if (const std::string why = why_not(op, device, row); !why.empty()) GTEST_SKIP() << why;
    sweep_options<Case>(device, row, specs, options);
  }
};

}  // namespace mla
