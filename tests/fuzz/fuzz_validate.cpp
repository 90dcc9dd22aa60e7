// SPDX-License-Identifier: Apache-2.0
// The border: a valid problem of each operation, broken in a few places that the input names, goes through
// workspace_size, plan and run. Views never describe memory outside their buffers (no library could know), so the
// address sanitizer speaks up if anything accepted reads or writes where it must not.
#include <fuzzer/FuzzedDataProvider.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <limits>
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

/// The tensors of a problem, each over a buffer of its own, and the places where a mutation may strike.
class Tensors {
 public:
  TensorView make(DType dtype, std::initializer_list<int64_t> shape) {
    TensorView view = contiguous(nullptr, dtype, shape);
    buffers_.emplace_back(static_cast<size_t>(view.numel()) * size_of(dtype), uint8_t{0});
    view.data = buffers_.back().data();
    return view;
  }
  TensorView make(const std::vector<int32_t>& values) {
    TensorView view = make(DType::kI32, {static_cast<int64_t>(values.size())});
    for (size_t i = 0; i < values.size(); ++i) static_cast<int32_t*>(view.data)[i] = values[i];
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

KvCache make_cache(Tensors& tensors, bool whole) {
  if (whole) return {.kv = tensors.make(DType::kBF16, {8, 4, 12})};
  return {.ckv = tensors.make(DType::kBF16, {8, 4, 8}), .kpe = tensors.make(DType::kBF16, {8, 4, 4})};
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

std::vector<TensorView*> views_of(KvCache& cache) { return {&cache.kv, &cache.ckv, &cache.kpe}; }
std::vector<TensorView*> views_of(PageTable& pages) {
  return {&pages.kv_indptr, &pages.kv_indices, &pages.block_table, &pages.kv_len};
}
std::vector<TensorView*> operator+(std::vector<TensorView*> a, const std::vector<TensorView*>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// One to four mutations, then every view within its buffer.
void break_some(FuzzedDataProvider& input, Tensors& tensors, const std::vector<TensorView*>& views) {
  for (int i = input.ConsumeIntegralInRange<int>(0, 4); i > 0; --i) tensors.break_one(input, views);
  for (TensorView* view : views) tensors.confine(*view);
}

float any_scale(FuzzedDataProvider& input) {
  constexpr float kScales[] = {0.25F, 0.25F, 0.25F, 0.0F, -1.0F, INFINITY, NAN, 1e-30F, 1e30F};
  return input.PickValueInArray(kScales);
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

void fuzz_decode(FuzzedDataProvider& input, const Context& context, Tensors& tensors) {
  DecodeParams p;
  if (input.ConsumeBool()) {
    p.q = tensors.make(DType::kBF16, {3, 2, 12});
  } else {
    p.q_nope = tensors.make(DType::kF32, {3, 2, 8});
    p.q_pe = tensors.make(DType::kF32, {3, 2, 4});
  }
  p.cache = make_cache(tensors, input.ConsumeBool());
  p.pages = make_pages(tensors, input.ConsumeBool());
  if (input.ConsumeBool()) p.qo_indptr = tensors.make({0, 1, 3});
  p.causal = input.ConsumeBool();
  p.sm_scale = any_scale(input);
  p.lse_base = static_cast<LseBase>(input.ConsumeIntegralInRange<int>(0, 2));
  p.batch_invariant = input.ConsumeBool();
  constexpr int kFormats[] = {0, 0, 0, 0, 1, 2, 3, 4, 5};
  p.cache.format = static_cast<CacheFormat>(input.PickValueInArray(kFormats));
  p.o = tensors.make(DType::kF32, {3, 2, 8});
  if (input.ConsumeBool()) p.lse = tensors.make(DType::kF32, {3, 2});
  break_some(input, tensors,
             std::vector<TensorView*>{&p.q, &p.q_nope, &p.q_pe, &p.qo_indptr, &p.o, &p.lse} + views_of(p.cache) +
                 views_of(p.pages));
  // A cache broadcast over huge pages is legal and takes as long as it is large.
  const TensorView& rows = p.cache.kv.given() ? p.cache.kv : p.cache.ckv;
  if (rows.shape[1] > 4096) return;
  run_planned(context, p);
}

void fuzz_prefill(FuzzedDataProvider& input, const Context& context, Tensors& tensors) {
  PrefillParams p{.q = tensors.make(DType::kBF16, {3, 2, 12}),
                  .k = tensors.make(DType::kBF16, {5, 2, 12}),
                  .v = tensors.make(DType::kBF16, {5, 2, 8}),
                  .qo_indptr = tensors.make({0, 1, 3}),
                  .kv_indptr = tensors.make({0, 2, 5}),
                  .causal = input.ConsumeBool(),
                  .sm_scale = any_scale(input),
                  .batch_invariant = input.ConsumeBool(),
                  .o = tensors.make(DType::kBF16, {3, 2, 8})};
  if (input.ConsumeBool()) p.lse = tensors.make(DType::kF32, {3, 2});
  break_some(input, tensors, {&p.q, &p.k, &p.v, &p.qo_indptr, &p.kv_indptr, &p.o, &p.lse});
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
  AppendParams p{.cache = make_cache(tensors, input.ConsumeBool())};
  if (input.ConsumeBool()) {
    p.kv = tensors.make(DType::kF32, {3, 12});
  } else {
    p.ckv = tensors.make(DType::kBF16, {3, 8});
    p.kpe = tensors.make(DType::kBF16, {3, 4});
  }
  p.slot_mapping = tensors.make(DType::kI64, {3});
  break_some(input, tensors, std::vector<TensorView*>{&p.kv, &p.ckv, &p.kpe, &p.slot_mapping} + views_of(p.cache));
  expect_status(run(context, p));
}

void fuzz_gather(FuzzedDataProvider& input, const Context& context, Tensors& tensors) {
  GatherParams p{.cache = make_cache(tensors, input.ConsumeBool()),
                 .pages = make_pages(tensors, input.ConsumeBool()),
                 .out_indptr = tensors.make({0, 4, 7})};
  if (input.ConsumeBool()) p.token_start = tensors.make({1, 6});
  if (input.ConsumeBool()) {
    p.out_kv = tensors.make(DType::kF16, {7, 12});
  } else {
    p.out_ckv = tensors.make(DType::kBF16, {7, 8});
    p.out_kpe = tensors.make(DType::kBF16, {7, 4});
  }
  break_some(input, tensors,
             std::vector<TensorView*>{&p.token_start, &p.out_indptr, &p.out_kv, &p.out_ckv, &p.out_kpe} +
                 views_of(p.cache) + views_of(p.pages));
  expect_status(run(context, p));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Context reference = Context::create({.num_threads = 1, .backend = "reference"}).value();
  static const Context best = Context::create({.num_threads = 2, .backend = "auto"}).value();
  FuzzedDataProvider input(data, size);
  const Context& context = input.ConsumeBool() ? reference : best;
  Tensors tensors;
  switch (input.ConsumeIntegralInRange<int>(0, 4)) {
    case 0: fuzz_decode(input, context, tensors); break;
    case 1: fuzz_prefill(input, context, tensors); break;
    case 2: fuzz_merge_states(input, context, tensors); break;
    case 3: fuzz_append(input, context, tensors); break;
    default: fuzz_gather(input, context, tensors);
  }
  return 0;
}
