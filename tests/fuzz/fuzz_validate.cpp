// SPDX-License-Identifier: Apache-2.0
// Fuzzes the border: a valid problem of each operation, broken in a few places that the input names, goes through
// workspace_size, plan and run. Views never describe memory outside their buffers (no library could know), so the
// address sanitizer speaks up if anything accepted reads or writes where it must not.
#include <fuzzer/FuzzedDataProvider.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <limits>
#include <utility>
#include <vector>

#include "mla/mla.h"

namespace {

using namespace mla;  // NOLINT(google-build-using-namespace): a program of its own

constexpr int64_t kInteresting[] = {
    0,  1,  2,  3,  4,  7,  8,   12,  63,  64,        65,        INT32_MAX, int64_t{INT32_MAX} + 1,
    -1, -2, -8, 16, 24, 48, 512, 576, 192, INT64_MAX, INT64_MIN, INT32_MIN, int64_t{1} << 40};

int64_t any_integer(FuzzedDataProvider& input) {
  return input.ConsumeBool() ? input.PickValueInArray(kInteresting) : input.ConsumeIntegralInRange<int64_t>(-4, 80);
}

/// Holds the tensors of a problem, each over a buffer of its own, and breaks them where the input says.
class Tensors {
 public:
  TensorView make(DType dtype, std::initializer_list<int64_t> shape) {
    TensorView view = contiguous(nullptr, dtype, shape);
    buffers_.emplace_back(static_cast<size_t>(view.numel()) * size_of(dtype), uint8_t{0});
    view.data = buffers_.back().data();
    return view;
  }
  TensorView make(const std::vector<int32_t>& values) { return make_list(DType::kI32, values); }

  /// Makes a list [N] of the values.
  template <class T>
  TensorView make_list(DType dtype, const std::vector<T>& values) {
    TensorView view = make(dtype, {static_cast<int64_t>(values.size())});
    std::memcpy(view.data, values.data(), values.size() * sizeof(T));
    return view;
  }

  void break_one(FuzzedDataProvider& input, const std::vector<TensorView*>& views) {
    TensorView& view = *views[input.ConsumeIntegralInRange<size_t>(0, views.size() - 1)];
    const auto dim = input.ConsumeIntegralInRange<size_t>(0, kMaxDims - 1);
    switch (input.ConsumeIntegralInRange<int>(0, 8)) {
      case 0: view.dtype = static_cast<DType>(input.ConsumeIntegralInRange<int>(0, 9)); break;
      case 1: view.ndim = input.ConsumeIntegralInRange<int32_t>(-1, kMaxDims + 1); break;
      case 2: view.shape[dim] = any_integer(input); break;
      case 3: view.stride[dim] = any_integer(input); break;
      case 4: view.data = nullptr; break;
      case 5:
        if (view.data != nullptr) view.data = static_cast<char*>(view.data) + input.ConsumeIntegralInRange<int>(0, 3);
        break;
      case 6: view.device = {static_cast<DeviceType>(input.ConsumeIntegralInRange<int>(0, 3)), 0}; break;
      case 7: view = {}; break;
      default: set_element(view, input);
    }
  }

  /// Takes the memory away from a view that describes more than its buffer.
  void confine(TensorView& view) const {
    if (view.data == nullptr || view.ndim < 0 || view.ndim > kMaxDims) return;
    __int128 lowest = 0;
    __int128 highest = 0;
    for (int32_t d = 0; d < view.ndim; ++d) {
      const auto at = static_cast<size_t>(d);
      if (view.shape[at] <= 0) return;
      const __int128 reach = static_cast<__int128>(view.shape[at] - 1) * view.stride[at];
      (reach < 0 ? lowest : highest) += reach;
    }
    const auto bytes = static_cast<__int128>(size_of(view.dtype));
    for (const std::vector<uint8_t>& buffer : buffers_) {
      const auto offset = static_cast<__int128>(reinterpret_cast<uintptr_t>(view.data)) -
                          static_cast<__int128>(reinterpret_cast<uintptr_t>(buffer.data()));
      if (offset + lowest * bytes >= 0 && offset + (highest + 1) * bytes <= static_cast<__int128>(buffer.size()))
        return;
    }
    view.data = nullptr;
  }

 private:
  void set_element(TensorView& view, FuzzedDataProvider& input) const {
    for (const std::vector<uint8_t>& buffer : buffers_) {
      if (view.data != buffer.data() || buffer.empty()) continue;
      auto* bytes = static_cast<uint8_t*>(view.data);
      const int64_t value = any_integer(input);
      const size_t element = view.dtype == DType::kI64 ? 8 : 4;
      const size_t at = input.ConsumeIntegralInRange<size_t>(0, buffer.size() / element) * element;
      for (size_t i = 0; i < element && at + i < buffer.size(); ++i)
        bytes[at + i] = static_cast<uint8_t>(static_cast<uint64_t>(value) >> (8 * i));
      return;
    }
  }

  std::deque<std::vector<uint8_t>> buffers_;
};

void expect_status(const Status& status) {
  if (!status.ok() && (status.message().empty() || status.code() == StatusCode::kInternal)) std::abort();
}

/// Holds the widths of a row's latent and rotary channels, and of the value.
struct Widths {
  int64_t nope, rope, value;
};

Widths widths_of(CacheFormat format) {
  const KvLayout layout = kv_layout(format);
  if (!layout.is_packed()) return {8, 4, 8};
  return {layout.nope_dim, layout.rope_dim, layout.nope_dim + (layout.value_has_rope ? layout.rope_dim : 0)};
}

CacheFormat any_format(FuzzedDataProvider& input) {
  return kAllCacheFormats[input.ConsumeIntegralInRange<size_t>(0, std::size(kAllCacheFormats) - 1)];
}

float any_scale(FuzzedDataProvider& input) {
  constexpr float kScales[] = {0.25F, 0.25F, 0.25F, 0.0F, -1.0F, INFINITY, NAN, 1e-30F, 1e30F};
  return input.PickValueInArray(kScales);
}

TensorView make_scale(FuzzedDataProvider& input, Tensors& tensors) {
  return tensors.make_list(DType::kF32, std::vector<float>{any_scale(input)});
}

/// Makes a cache, mostly of eight pages of four tokens.
KvCache make_cache(FuzzedDataProvider& input, Tensors& tensors, CacheFormat format) {
  KvCache cache{.format = format, .power_of_two_scales = input.ConsumeBool()};
  const KvLayout layout = kv_layout(format);
  if (layout.has_footer()) {
    cache.page_size = input.ConsumeIntegralInRange<int>(0, 7) != 0 ? 4 : static_cast<int32_t>(any_integer(input));
    cache.kv = tensors.make(DType::kU8, {8, page_bytes(format, 0, 4, input.ConsumeBool())});
    return cache;
  }
  if (layout.is_packed()) {
    cache.kv = tensors.make(DType::kU8, {8, 4, layout.row_bytes});
    if (layout.nope.outer_scale && input.ConsumeBool()) cache.ckv_scale = make_scale(input, tensors);
    return cache;
  }
  const bool fp8 = format == CacheFormat::kFP8;
  const DType dtype = fp8 ? DType::kE4M3 : format == CacheFormat::kF16 ? DType::kF16 : DType::kBF16;
  if (input.ConsumeBool()) {
    cache.kv = tensors.make(dtype, {8, 4, 12});
  } else {
    cache.ckv = tensors.make(dtype, {8, 4, 8});
    cache.kpe = tensors.make(dtype, {8, 4, 4});
  }
  if (!fp8) return cache;
  const bool quarters = input.ConsumeBool();
  cache.ckv_scale = quarters ? tensors.make(DType::kF32, {8, 4, 4}) : make_scale(input, tensors);
  if (quarters || input.ConsumeBool()) cache.kpe_scale = make_scale(input, tensors);
  return cache;
}

PageTable make_pages(Tensors& tensors, bool csr) {
  PageTable pages{.kv_len = tensors.make({5, 9})};
  if (csr) {
    pages.kv_indptr = tensors.make({0, 2, 5});
    pages.kv_indices = tensors.make({0, 1, 2, 3, 4, -7});
  } else {
    pages.block_table = tensors.make({0, 1, 2, 3, 4, 5});
    pages.block_table.ndim = 2;
    pages.block_table.shape = {2, 3};
    pages.block_table.stride = {3, 1};
  }
  return pages;
}

std::vector<TensorView*> views_of(KvCache& cache) {
  return {&cache.kv, &cache.ckv, &cache.kpe, &cache.ckv_scale, &cache.kpe_scale};
}
std::vector<TensorView*> views_of(PageTable& pages) {
  return {&pages.kv_indptr, &pages.kv_indices, &pages.block_table, &pages.kv_len};
}
std::vector<TensorView*> operator+(std::vector<TensorView*> a, const std::vector<TensorView*>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// Makes up to four mutations, then keeps every view within its buffer.
void break_some(FuzzedDataProvider& input, Tensors& tensors, const std::vector<TensorView*>& views) {
  for (int i = input.ConsumeIntegralInRange<int>(0, 4); i > 0; --i) tensors.break_one(input, views);
  for (TensorView* view : views) tensors.confine(*view);
}

template <class Params>
void run_planned(const Context& context, const Params& params) {
  const Result<size_t> size = workspace_size(context, params);
  expect_status(size.status());
  if (!size.ok() || *size > (size_t{64} << 20)) return;
  std::vector<std::byte> workspace(*size);
  const Result<Plan> planned = plan(context, params, workspace);
  expect_status(planned.status());
  if (!planned.ok()) std::abort();  // the same checks
  expect_status(run(context, *planned, params));
  const Result<Plan> second = plan(context, params, workspace);
  if (!second.ok()) std::abort();
  if (*size > 0 && run(context, *planned, params).ok()) std::abort();  // its workspace is the second plan's
}

/// Returns options that suit some operations and not others.
AttentionOptions any_options(FuzzedDataProvider& input, Tensors& tensors) {
  AttentionOptions options;
  constexpr float kCaps[] = {0.0F, 0.0F, 30.0F, -1.0F, NAN};
  constexpr int32_t kWindows[] = {-1, -1, 0, 3, -2, INT32_MAX};
  if (input.ConsumeBool()) options.attn_sink = tensors.make(DType::kF32, {2});
  if (input.ConsumeBool()) options.logits_soft_cap = input.PickValueInArray(kCaps);
  if (input.ConsumeBool()) options.compute = static_cast<Compute>(input.ConsumeIntegralInRange<int>(0, 2));
  if (input.ConsumeBool()) options.window_left = input.PickValueInArray(kWindows);
  if (input.ConsumeBool()) options.alibi_slopes = tensors.make(DType::kF32, {2});
  return options;
}

std::vector<TensorView*> views_of(AttentionOptions& options) { return {&options.attn_sink, &options.alibi_slopes}; }

ContextParallel any_share(FuzzedDataProvider& input) {
  if (input.ConsumeBool()) return {};
  const auto small = [&] { return input.ConsumeIntegralInRange<int32_t>(-1, 5); };
  return {.rank = small(), .world = small(), .interleave = input.ConsumeBool() ? small() : INT32_MAX};
}

/// Makes queries in one of their forms, `num_tokens` of two heads; and mostly an output to match.
template <class Params>
void make_queries(FuzzedDataProvider& input, Tensors& tensors, int64_t num_tokens, Widths widths, Params& p) {
  constexpr DType kTypes[] = {DType::kBF16, DType::kF32, DType::kE4M3};
  const DType dtype = input.PickValueInArray(kTypes);
  if (input.ConsumeBool()) {
    p.q = tensors.make(dtype, {num_tokens, 2, widths.nope + widths.rope});
  } else {
    p.q_nope = tensors.make(dtype, {num_tokens, 2, widths.nope});
    p.q_pe = tensors.make(dtype, {num_tokens, 2, widths.rope});
  }
  if (dtype == DType::kE4M3) p.q_scale = make_scale(input, tensors);
  const bool narrow = input.ConsumeBool();
  p.o = tensors.make(narrow ? DType::kE4M3 : DType::kF32, {num_tokens, 2, widths.value});
  if (narrow) p.o_scale = make_scale(input, tensors);
  if (input.ConsumeBool()) p.lse = tensors.make(DType::kF32, {num_tokens, 2});
}

template <class Params>
std::vector<TensorView*> views_of_queries(Params& p) {
  return {&p.q, &p.q_nope, &p.q_pe, &p.q_scale, &p.qo_indptr, &p.o, &p.o_scale, &p.lse};
}

/// Returns whether a cache is too large to run: one broadcast over huge pages is legal and takes as long as it is
/// large.
bool is_huge(const KvCache& cache) {
  return (cache.kv.given() ? cache.kv : cache.ckv).shape[1] > 4096 || cache.page_size > 4096;
}

void fuzz_decode(FuzzedDataProvider& input, const Context& context, Tensors& tensors) {
  DecodeParams p;
  const CacheFormat format = any_format(input);
  make_queries(input, tensors, 3, widths_of(format), p);
  p.cache = make_cache(input, tensors, format);
  p.pages = make_pages(tensors, input.ConsumeBool());
  if (input.ConsumeBool()) p.qo_indptr = tensors.make({0, 1, 3});
  p.causal = input.ConsumeBool();
  if (input.ConsumeIntegralInRange<int>(0, 3) == 0) p.tree_mask = tensors.make(DType::kU8, {3, 2});
  if (input.ConsumeIntegralInRange<int>(0, 3) == 0) p.tree_parents = tensors.make({-1, -1, 0});
  p.options = any_options(input, tensors);
  p.context_parallel = any_share(input);
  p.sm_scale = any_scale(input);
  p.lse_base = static_cast<LseBase>(input.ConsumeIntegralInRange<int>(0, 2));
  p.lse_inf_without_keys = input.ConsumeBool();
  p.batch_invariant = input.ConsumeBool();
  if (input.ConsumeIntegralInRange<int>(0, 15) == 0)
    p.cache.format = static_cast<CacheFormat>(input.ConsumeIntegralInRange<int>(0, 14));
  break_some(input, tensors,
             std::vector<TensorView*>{&p.tree_mask, &p.tree_parents} + views_of_queries(p) + views_of(p.cache) +
                 views_of(p.pages) + views_of(p.options));
  if (!is_huge(p.cache)) run_planned(context, p);
}

/// Returns a tensor of finished outputs, or of their scales, [T, H, width] or [T, 2, H / 2, width].
TensorView make_grouped(Tensors& tensors, DType dtype, bool grouped, int64_t tokens, int64_t heads, int64_t width) {
  return grouped ? tensors.make(dtype, {tokens, 2, heads / 2, width}) : tensors.make(dtype, {tokens, heads, width});
}

/// Returns a way of finishing outputs [T, H, d_v], mostly a legal one.
OutputFinish any_finish(FuzzedDataProvider& input, Tensors& tensors, int64_t tokens, int64_t heads, int64_t d_v,
                        bool grouped) {
  OutputFinish finish{.interleaved = input.ConsumeBool()};
  if (input.ConsumeBool()) {
    finish.cos_sin = tensors.make(DType::kF32, {5, d_v / 4});
    finish.positions = tensors.make(DType::kI64, {tokens});
    static_cast<int64_t*>(finish.positions.data)[1] = any_integer(input);
  }
  if (input.ConsumeBool()) finish.gate = tensors.make(DType::kF32, {tokens, heads, input.ConsumeBool() ? 1 : d_v});
  if (input.ConsumeBool())
    finish.scale = make_grouped(tensors, input.ConsumeBool() ? DType::kU8 : DType::kF32, grouped, tokens, heads,
                                input.ConsumeBool() ? 1 : d_v / 32);
  finish.power_of_two_scales = input.ConsumeBool();
  return finish;
}

std::vector<TensorView*> views_of(OutputFinish& finish) {
  return {&finish.cos_sin, &finish.positions, &finish.gate, &finish.scale};
}

void fuzz_decode_sparse(FuzzedDataProvider& input, const Context& context, Tensors& tensors) {
  DecodeSparseParams p;
  const CacheFormat format = any_format(input);
  make_queries(input, tensors, 4, widths_of(format), p);
  p.pool = {.cache = make_cache(input, tensors, format), .indices = tensors.make(DType::kI32, {4, 5})};
  if (input.ConsumeBool()) p.pool.topk_length = tensors.make({1, 5, 9, -1});
  if (input.ConsumeBool()) {
    const CacheFormat extra = input.ConsumeBool() ? format : any_format(input);
    p.extra_pool = {.cache = make_cache(input, tensors, extra), .indices = tensors.make(DType::kI32, {4, 2})};
    if (input.ConsumeBool()) p.extra_pool.topk_length = tensors.make({1, 2});
  }
  if (input.ConsumeBool()) p.qo_indptr = tensors.make({0, 3, 4});
  for (SparsePool* pool : {&p.pool, &p.extra_pool})
    pool->topk_length_per = static_cast<LengthPer>(input.ConsumeIntegralInRange<int>(0, 3));
  p.options = any_options(input, tensors);
  p.sm_scale = any_scale(input);
  p.batch_invariant = input.ConsumeBool();
  if (input.ConsumeBool()) {
    const bool grouped = input.ConsumeBool();
    const int64_t d_v = widths_of(format).value;
    p.finish = any_finish(input, tensors, 4, 2, d_v, grouped);
    p.o = make_grouped(tensors, input.ConsumeBool() ? DType::kE4M3 : DType::kF32, grouped, 4, 2, d_v);
    if (input.ConsumeBool()) p.o_scale = {};
  }
  break_some(
      input, tensors,
      std::vector<TensorView*>{&p.pool.indices, &p.pool.topk_length, &p.extra_pool.indices, &p.extra_pool.topk_length} +
          views_of_queries(p) + views_of(p.pool.cache) + views_of(p.extra_pool.cache) + views_of(p.options) +
          views_of(p.finish));
  if (!is_huge(p.pool.cache) && !is_huge(p.extra_pool.cache)) run_planned(context, p);
}

void fuzz_prefill_sparse(FuzzedDataProvider& input, const Context& context, Tensors& tensors) {
  PrefillSparseParams p{.q = tensors.make(DType::kBF16, {3, 2, 12}),
                        .kv = tensors.make(DType::kBF16, {7, 12}),
                        .indices = tensors.make(DType::kI32, {3, 5})};
  if (input.ConsumeBool()) p.topk_length = tensors.make({5, 0, 77});
  p.options = any_options(input, tensors);
  p.sm_scale = any_scale(input);
  p.o = tensors.make(DType::kBF16, {3, 2, 8});
  if (input.ConsumeBool()) p.max_logits = tensors.make(DType::kF32, {3, 2});
  if (input.ConsumeBool()) p.lse = tensors.make(DType::kF32, {3, 2});
  break_some(input, tensors,
             std::vector<TensorView*>{&p.q, &p.kv, &p.indices, &p.topk_length, &p.o, &p.max_logits, &p.lse} +
                 views_of(p.options));
  run_planned(context, p);
}

void fuzz_prefill(FuzzedDataProvider& input, const Context& context, Tensors& tensors) {
  PrefillParams p{.q = tensors.make(DType::kBF16, {3, 2, 12}),
                  .k = tensors.make(DType::kBF16, {5, 2, 12}),
                  .v = tensors.make(DType::kBF16, {5, 2, 8}),
                  .qo_indptr = tensors.make({0, 1, 3}),
                  .kv_indptr = tensors.make({0, 2, 5}),
                  .causal = input.ConsumeBool(),
                  .options = any_options(input, tensors),
                  .sm_scale = any_scale(input),
                  .batch_invariant = input.ConsumeBool(),
                  .o = tensors.make(DType::kBF16, {3, 2, 8})};
  if (input.ConsumeBool()) p.lse = tensors.make(DType::kF32, {3, 2});
  break_some(
      input, tensors,
      std::vector<TensorView*>{&p.q, &p.k, &p.v, &p.qo_indptr, &p.kv_indptr, &p.o, &p.lse} + views_of(p.options));
  if (p.k.shape[0] > 4096) return;
  run_planned(context, p);
}

void fuzz_merge_states(FuzzedDataProvider& input, const Context& context, Tensors& tensors) {
  MergeStatesParams p{.partial_o = tensors.make(DType::kF32, {2, 3, 2, 8}),
                      .partial_lse = tensors.make(DType::kF32, {2, 3, 2}),
                      .in_place = input.ConsumeBool(),
                      .o = tensors.make(DType::kBF16, {3, 2, 8}),
                      .lse = tensors.make(DType::kF32, {3, 2})};
  break_some(input, tensors, {&p.partial_o, &p.partial_lse, &p.o, &p.lse});
  if (p.partial_o.shape[0] > 4096) return;
  expect_status(run(context, p));
}

void fuzz_append(FuzzedDataProvider& input, const Context& context, Tensors& tensors) {
  const CacheFormat format = any_format(input);
  const Widths widths = widths_of(format);
  AppendParams p{.cache = make_cache(input, tensors, format)};
  if (input.ConsumeBool()) {
    p.kv = tensors.make(DType::kF32, {3, widths.nope + widths.rope});
  } else {
    p.ckv = tensors.make(DType::kBF16, {3, widths.nope});
    p.kpe = tensors.make(DType::kBF16, {3, widths.rope});
  }
  p.slot_mapping = tensors.make(DType::kI64, {3});
  break_some(input, tensors, std::vector<TensorView*>{&p.kv, &p.ckv, &p.kpe, &p.slot_mapping} + views_of(p.cache));
  expect_status(run(context, p));
}

/// Makes what append_rope takes for so many tokens, 3 or 6.
AppendRopeParams make_rope(FuzzedDataProvider& input, Tensors& tensors, int64_t tokens) {
  const auto list = [&](std::vector<int64_t> values) {
    values.resize(static_cast<size_t>(tokens));
    return tensors.make_list(DType::kI64, values);
  };
  const CacheFormat format = any_format(input);
  Widths widths = widths_of(format);
  const int32_t inside = kv_layout(format).rotary_in_nope;
  widths.nope -= inside;
  widths.rope += inside;
  AppendRopeParams p{.ckv = tensors.make(DType::kF32, {tokens, widths.nope}),
                     .kpe = tensors.make(DType::kF32, {tokens, widths.rope}),
                     .cos_sin = tensors.make(DType::kF32, {5, widths.rope}),
                     .positions = list({0, 4, 2, 3, 1, 4}),
                     .interleaved = input.ConsumeBool(),
                     .slot_mapping = list({31, -1, 0, 17, 5, 9}),
                     .cache = make_cache(input, tensors, format)};
  if (input.ConsumeBool()) {
    const bool narrow = input.ConsumeBool();
    p.q_nope = tensors.make(DType::kBF16, {tokens, 2, widths.nope});
    p.q_pe = tensors.make(DType::kBF16, {tokens, 2, widths.rope});
    p.q_out = tensors.make(narrow ? DType::kE4M3 : DType::kBF16, {tokens, 2, widths.nope + widths.rope});
    if (narrow) p.q_scale = make_scale(input, tensors);
    p.q_norm = input.ConsumeBool();
    if (input.ConsumeBool()) p.q_norm_weight = tensors.make(DType::kF32, {widths.nope + widths.rope});
  }
  if (input.ConsumeBool())
    p.norm_weight = tensors.make(DType::kBF16, {widths.nope + (input.ConsumeBool() ? widths.rope : 0)});
  return p;
}

std::vector<TensorView*> views_of(AppendRopeParams& p) {
  return std::vector<TensorView*>{&p.q_nope,  &p.q_pe,      &p.q_out,        &p.q_scale,       &p.ckv,        &p.kpe,
                                  &p.cos_sin, &p.positions, &p.slot_mapping, &p.q_norm_weight, &p.norm_weight} +
         views_of(p.cache);
}

void fuzz_append_rope(FuzzedDataProvider& input, const Context& context, Tensors& tensors) {
  AppendRopeParams p = make_rope(input, tensors, 3);
  break_some(input, tensors, views_of(p));
  expect_status(run(context, p));
}

void fuzz_gather(FuzzedDataProvider& input, const Context& context, Tensors& tensors) {
  const CacheFormat format = any_format(input);
  const Widths widths = widths_of(format);
  GatherParams p{.cache = make_cache(input, tensors, format),
                 .pages = make_pages(tensors, input.ConsumeBool()),
                 .out_indptr = tensors.make({0, 4, 7})};
  if (input.ConsumeBool()) p.token_start = tensors.make({1, 6});
  if (input.ConsumeBool()) {
    p.out_kv = tensors.make(DType::kF16, {7, widths.nope + widths.rope});
  } else {
    p.out_ckv = tensors.make(DType::kBF16, {7, widths.nope});
    p.out_kpe = tensors.make(DType::kBF16, {7, widths.rope});
  }
  break_some(input, tensors,
             std::vector<TensorView*>{&p.token_start, &p.out_indptr, &p.out_kv, &p.out_ckv, &p.out_kpe} +
                 views_of(p.cache) + views_of(p.pages));
  expect_status(run(context, p));
}

void fuzz_copy_pages(FuzzedDataProvider& input, const Context& context, Tensors& tensors) {
  const CacheFormat format = any_format(input);
  CopyPagesParams p{.from = make_cache(input, tensors, format),
                    .from_pages = tensors.make({7, 0, 3}),
                    .to = make_cache(input, tensors, input.ConsumeBool() ? format : any_format(input)),
                    .to_pages = tensors.make({1, 2, 5})};
  break_some(input, tensors, std::vector<TensorView*>{&p.from_pages, &p.to_pages} + views_of(p.from) + views_of(p.to));
  if (!is_huge(p.from) && !is_huge(p.to)) expect_status(run(context, p));
}

void fuzz_finish_output(FuzzedDataProvider& input, const Context& context, Tensors& tensors) {
  FinishOutputParams p{.o = tensors.make(DType::kBF16, {3, 4, 64})};
  const bool grouped = input.ConsumeBool();
  p.finish = any_finish(input, tensors, 3, 4, 64, grouped);
  p.out = make_grouped(tensors, input.ConsumeBool() ? DType::kE4M3 : DType::kF32, grouped, 3, 4, 64);
  break_some(input, tensors, std::vector<TensorView*>{&p.o, &p.out} + views_of(p.finish));
  expect_status(run(context, p));
}

int32_t any_page_size(FuzzedDataProvider& input) {
  return input.ConsumeIntegralInRange<int>(0, 3) != 0 ? 4 : static_cast<int32_t>(any_integer(input));
}

/// Returns a size of groups or blocks, mostly one that fits.
int32_t any_size(FuzzedDataProvider& input) {
  return input.ConsumeIntegralInRange<int>(0, 3) != 0 ? input.ConsumeIntegralInRange<int>(1, 3)
                                                      : static_cast<int32_t>(any_integer(input));
}

/// Returns lists of three blocks for three tokens, real ones or not.
TensorView any_blocks(FuzzedDataProvider& input, Tensors& tensors) {
  TensorView blocks = tensors.make(DType::kI32, {3, 3});
  for (int i = 0; i < 9; ++i) static_cast<int32_t*>(blocks.data)[i] = static_cast<int32_t>(any_integer(input));
  return blocks;
}

void fuzz_index_tools(FuzzedDataProvider& input, const Context& context, Tensors& tensors) {
  if (input.ConsumeBool()) {
    const PageTable pages = make_pages(tensors, false);
    BlockTableToCsrParams p{.block_table = pages.block_table,
                            .kv_len = pages.kv_len,
                            .page_size = any_page_size(input),
                            .kv_indptr = tensors.make({0, 0, 0}),
                            .kv_indices = tensors.make({0, 0, 0, 0, 0})};
    break_some(input, tensors, {&p.block_table, &p.kv_len, &p.kv_indptr, &p.kv_indices});
    expect_status(run(context, p));
    return;
  }
  PhysicalSlotsParams p{.indices = tensors.make(DType::kI32, {3, 4}),
                        .pages = make_pages(tensors, input.ConsumeBool()),
                        .page_size = any_page_size(input),
                        .context_parallel = any_share(input),
                        .compact = input.ConsumeBool()};
  p.slots = input.ConsumeBool() ? p.indices : tensors.make(DType::kI32, {3, 4});
  if (input.ConsumeBool()) p.ratio = any_size(input);
  if (input.ConsumeBool()) {
    p.list_tokens = true;
    p.slots = tensors.make(DType::kI32, {3, 14});
  }
  if (input.ConsumeBool()) p.topk_length = tensors.make({3, -1, 9});
  if (input.ConsumeBool()) p.qo_indptr = tensors.make({0, 1, 3});
  if (input.ConsumeBool()) p.valid_count = tensors.make({0, 0, 0});
  break_some(
      input, tensors,
      std::vector<TensorView*>{&p.indices, &p.topk_length, &p.qo_indptr, &p.slots, &p.valid_count} + views_of(p.pages));
  expect_status(run(context, p));
}

IndexerCache make_indexer_cache(FuzzedDataProvider& input, Tensors& tensors) {
  const auto format = static_cast<IndexerFormat>(input.ConsumeIntegralInRange<int>(0, 2));  // the last is unknown
  return {.format = format,
          .kv = tensors.make(DType::kU8, {8, indexer_page_bytes(4, format)}),
          .page_size = any_page_size(input)};
}

constexpr DType kLogits[] = {DType::kF32, DType::kBF16, DType::kF16};

void fuzz_indexer(FuzzedDataProvider& input, const Context& context, Tensors& tensors) {
  if (input.ConsumeBool()) {
    AppendIndexerParams p{.k = tensors.make(DType::kBF16, {3, 128}),
                          .slot_mapping = tensors.make_list(DType::kI64, std::vector<int64_t>{31, -1, 0}),
                          .power_of_two_scales = input.ConsumeBool(),
                          .cache = make_indexer_cache(input, tensors)};
    break_some(input, tensors, {&p.k, &p.slot_mapping, &p.cache.kv});
    expect_status(run(context, p));
    return;
  }
  IndexerTopKParams p{.indexer = {.q = tensors.make(DType::kE4M3, {3, 2, 128}),
                                  .weights = tensors.make(DType::kF32, {3, 2}),
                                  .cache = make_indexer_cache(input, tensors),
                                  .pages = make_pages(tensors, input.ConsumeBool()),
                                  .causal = input.ConsumeBool(),
                                  .logits = tensors.make(input.PickValueInArray(kLogits), {3, 9})},
                      .pages = make_pages(tensors, input.ConsumeBool()),
                      .page_size = any_page_size(input),
                      .slots = tensors.make(DType::kI32, {3, 4})};
  IndexerLogitsParams& indexer = p.indexer;
  if (input.ConsumeBool()) indexer.qo_indptr = tensors.make({0, 1, 3});
  if (input.ConsumeBool()) indexer.ratio = any_size(input);
  if (input.ConsumeBool()) indexer.key_begin = tensors.make({-5, 2, 1 << 30});
  if (input.ConsumeBool()) indexer.key_end = tensors.make({7, 1 << 30, -1});
  if (input.ConsumeBool()) {
    indexer.blocks = any_blocks(input, tensors);
    indexer.block_size = any_size(input);
  }
  if (input.ConsumeBool()) p.valid_count = tensors.make({0, 0, 0});
  p.context_parallel = any_share(input);
  p.list_tokens = input.ConsumeBool();
  if (input.ConsumeBool()) p.topk = any_size(input);
  break_some(
      input, tensors,
      std::vector<TensorView*>{&indexer.q, &indexer.weights, &indexer.cache.kv, &indexer.qo_indptr, &indexer.key_begin,
                               &indexer.key_end, &indexer.blocks, &indexer.logits, &p.slots, &p.valid_count} +
          views_of(indexer.pages) + views_of(p.pages));
  expect_status(input.ConsumeBool() ? run(context, indexer) : run(context, p));
}

/// Gives the latents a target, or none, and returns their channels and how many of them turn.
std::pair<int64_t, int64_t> make_target(FuzzedDataProvider& input, Tensors& tensors, CompressParams& p) {
  const int target = input.ConsumeIntegralInRange<int>(0, 3);
  if (target == 0) return {7, 0};
  p.slot_mapping = tensors.make_list(DType::kI64, std::vector<int64_t>{31, -1, 0, 17, 5, 99});
  if (target == 1) {
    p.indexer = make_indexer_cache(input, tensors);
    return {128, input.ConsumeBool() ? 64 : 0};
  }
  const CacheFormat format = any_format(input);
  const Widths widths = widths_of(format);
  p.cache = make_cache(input, tensors, format);
  return {widths.nope + widths.rope, input.ConsumeBool() ? widths.rope + kv_layout(format).rotary_in_nope : 0};
}

void fuzz_compress(FuzzedDataProvider& input, const Context& context, Tensors& tensors) {
  constexpr int32_t kRatios[] = {1, 2, 2, 3, 4};
  constexpr DType kTypes[] = {DType::kBF16, DType::kF16, DType::kF32};
  CompressParams p{.kv_len = tensors.make({5, 9}),
                   .ratio = input.PickValueInArray(kRatios),
                   .norm_eps = input.ConsumeBool() ? 1e-6F : any_scale(input),
                   .interleaved = input.ConsumeBool(),
                   .power_of_two_scales = input.ConsumeBool()};
  p.overlap = p.ratio > 1 && input.ConsumeBool();
  const auto [channels, rotary] = make_target(input, tensors, p);
  const int64_t width = p.overlap ? 2 * channels : channels;
  const DType dtype = input.PickValueInArray(kTypes);
  p.kv = tensors.make(dtype, {6, width});
  if (p.ratio > 1) {
    p.score = tensors.make(dtype, {6, width});
    if (input.ConsumeBool()) p.position_bias = tensors.make(DType::kF32, {p.ratio, width});
    // One ring, or blocks, of which some keep nothing; the first entry is of the oldest tokens.
    const bool ring = input.ConsumeBool();
    p.state = tensors.make(DType::kF32, {4, ring ? 8 : 3, 2 * width});
    p.state_table = tensors.make(ring ? std::vector<int32_t>{3, 0} : std::vector<int32_t>{99, 1, -1, 3, 0, 2});
    p.state_table.ndim = 2;
    p.state_table.shape = {2, ring ? 1 : 3};
    p.state_table.stride = {ring ? 1 : 3, 1};
  }
  if (input.ConsumeBool()) p.qo_indptr = tensors.make({0, 2, 6});
  if (input.ConsumeBool()) p.norm_weight = tensors.make(input.PickValueInArray(kTypes), {channels});
  p.latent = tensors.make(input.PickValueInArray(kTypes), {6, channels});
  if (rotary > 0) p.cos_sin = tensors.make(DType::kF32, {9, rotary});
  if (input.ConsumeIntegralInRange<int>(0, 7) == 0) p.ratio = static_cast<int32_t>(any_integer(input));
  if (input.ConsumeIntegralInRange<int>(0, 7) == 0) p.overlap = !p.overlap;
  if (input.ConsumeBool()) p.append = make_rope(input, tensors, 6);
  break_some(
      input, tensors,
      std::vector<TensorView*>{&p.kv, &p.score, &p.position_bias, &p.qo_indptr, &p.kv_len, &p.state, &p.state_table,
                               &p.norm_weight, &p.latent, &p.slot_mapping, &p.cos_sin, &p.indexer.kv} +
          views_of(p.cache) + views_of(p.append));
  expect_status(run(context, p));
}

void fuzz_top_k(FuzzedDataProvider& input, const Context& context, Tensors& tensors) {
  const DType dtype = input.PickValueInArray(kLogits);
  TopKParams p{.logits = tensors.make(dtype, {3, 9}), .indices = tensors.make(DType::kI32, {3, 4})};
  for (int i = 0; i < 27; ++i) {
    if (dtype == DType::kF32)
      static_cast<float*>(p.logits.data)[i] = any_scale(input);
    else
      static_cast<uint16_t*>(p.logits.data)[i] = input.ConsumeIntegral<uint16_t>();
  }
  if (input.ConsumeBool()) p.lengths = tensors.make({0, 9, 3});
  if (input.ConsumeBool()) p.starts = tensors.make({0, 5, 3});
  if (input.ConsumeBool()) p.blocks = any_blocks(input, tensors);
  if (input.ConsumeBool()) p.block_size = any_size(input);
  break_some(input, tensors, {&p.logits, &p.lengths, &p.starts, &p.blocks, &p.indices});
  expect_status(run(context, p));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Context reference = Context::create({.num_threads = 1, .backend = "reference"}).value();
  static const Context best = Context::create({.num_threads = 2, .backend = "auto"}).value();
  FuzzedDataProvider input(data, size);
  const Context& context = input.ConsumeBool() ? reference : best;
  Tensors tensors;
  constexpr void (*kOperations[])(FuzzedDataProvider&, const Context&, Tensors&) = {
      fuzz_decode,      fuzz_prefill,       fuzz_merge_states,   fuzz_append,       fuzz_gather,
      fuzz_append_rope, fuzz_decode_sparse, fuzz_prefill_sparse, fuzz_copy_pages,   fuzz_index_tools,
      fuzz_indexer,     fuzz_top_k,         fuzz_compress,       fuzz_finish_output};
  input.PickValueInArray(kOperations)(input, context, tensors);
  return 0;
}
