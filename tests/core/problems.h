// SPDX-License-Identifier: Apache-2.0
// Holds one small valid problem per operation, with every buffer it needs, for tests to break in one place at a time.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "mla/mla.h"

namespace mla::test {

inline constexpr int64_t kPages = 8, kPageSize = 4, kHeads = 2, kCkv = 8, kKpe = 4;
inline constexpr uint16_t kSentinel = 0x5A5A;
inline constexpr size_t kWorkspaceBytes = 1 << 20;  // enough for the reference's plan of any problem below

inline TensorView of(std::vector<uint16_t>& data, std::initializer_list<int64_t> shape, DType dtype = DType::kBF16) {
  return contiguous(data.data(), dtype, shape);
}
inline TensorView of(std::vector<int32_t>& data) {
  return contiguous(data.data(), DType::kI32, {static_cast<int64_t>(data.size())});
}

inline bool all_sentinels(std::initializer_list<const std::vector<uint16_t>*> outputs) {
  return std::all_of(outputs.begin(), outputs.end(), [](const std::vector<uint16_t>* out) {
    return std::count(out->begin(), out->end(), kSentinel) == static_cast<int64_t>(out->size());
  });
}

/// Holds a cache of one tensor, or of two.
struct CacheBuffers {
  std::vector<uint16_t> data = std::vector<uint16_t>(kPages * kPageSize * (kCkv + kKpe), kSentinel);
  std::vector<uint16_t> ckv = std::vector<uint16_t>(kPages * kPageSize * kCkv, kSentinel);
  std::vector<uint16_t> kpe = std::vector<uint16_t>(kPages * kPageSize * kKpe, kSentinel);

  KvCache whole() { return {.kv = of(data, {kPages, kPageSize, kCkv + kKpe})}; }
  KvCache parts() { return {.ckv = of(ckv, {kPages, kPageSize, kCkv}), .kpe = of(kpe, {kPages, kPageSize, kKpe})}; }
};

/// Holds two requests of 5 and 9 tokens, with 1 and 2 queries.
struct Decode {
  std::vector<uint16_t> q = std::vector<uint16_t>(3 * kHeads * (kCkv + kKpe), 0);
  std::vector<uint16_t> o = std::vector<uint16_t>(3 * kHeads * kCkv, kSentinel);
  std::vector<uint16_t> lse = std::vector<uint16_t>(3 * kHeads * 2, kSentinel);
  std::vector<int32_t> kv_len = {5, 9}, qo_indptr = {0, 1, 3};
  std::vector<int32_t> block_table = {0, 1, INT32_MAX, 2, 3, 4};
  std::vector<int32_t> kv_indptr = {0, 2, 5}, kv_indices = {0, 1, 2, 3, 4, -7};
  CacheBuffers cache;
  std::vector<std::byte> workspace = std::vector<std::byte>(kWorkspaceBytes);
  DecodeParams params;

  Decode() {
    params.q = of(q, {3, kHeads, kCkv + kKpe});
    params.cache = cache.whole();
    params.pages.block_table = contiguous(block_table.data(), DType::kI32, {2, 3});
    params.pages.kv_len = of(kv_len);
    params.qo_indptr = of(qo_indptr);
    params.sm_scale = 0.25F;
    params.o = of(o, {3, kHeads, kCkv});
    params.lse = contiguous(lse.data(), DType::kF32, {3, kHeads});
  }
  void use_csr() {
    params.pages.block_table = {};
    params.pages.kv_indptr = of(kv_indptr);
    params.pages.kv_indices = of(kv_indices);
  }
  void use_two_tensors() {
    params.q = {};
    params.q_nope = of(q, {3, kHeads, kCkv});
    params.q_pe = of(q, {3, kHeads, kKpe});
    params.cache = cache.parts();
  }
  bool untouched() const { return all_sentinels({&o, &lse}); }
};

/// Holds two requests of 1 and 2 queries over 2 and 3 keys.
struct Prefill {
  std::vector<uint16_t> q = std::vector<uint16_t>(3 * kHeads * 6, 0), k = std::vector<uint16_t>(5 * kHeads * 6, 0),
                        v = std::vector<uint16_t>(5 * kHeads * 4, 0),
                        o = std::vector<uint16_t>(3 * kHeads * 4, kSentinel),
                        lse = std::vector<uint16_t>(3 * kHeads * 2, kSentinel);
  std::vector<int32_t> qo_indptr = {0, 1, 3}, kv_indptr = {0, 2, 5};
  std::vector<float> scales = {0.5F, 0.25F, 2.0F, 0.1F};
  std::vector<std::byte> workspace = std::vector<std::byte>(kWorkspaceBytes);
  PrefillParams params;

  Prefill() {
    params = {.q = of(q, {3, kHeads, 6}),
              .k = of(k, {5, kHeads, 6}),
              .v = of(v, {5, kHeads, 4}),
              .qo_indptr = of(qo_indptr),
              .kv_indptr = of(kv_indptr),
              .sm_scale = 0.25F,
              .o = of(o, {3, kHeads, 4}),
              .lse = contiguous(lse.data(), DType::kF32, {3, kHeads})};
  }
  TensorView scale(int64_t i) { return contiguous(scales.data() + i, DType::kF32, {1}); }
  /// Makes q, k and v tensors of e4m3.
  void use_e4m3() {
    for (TensorView* view : {&params.q, &params.k, &params.v}) view->dtype = DType::kE4M3;
    params.q_scale = scale(0);
    params.k_scale = scale(1);
    params.v_scale = scale(2);
  }
  bool untouched() const { return all_sentinels({&o, &lse}); }
};

struct MergeStates {
  std::vector<uint16_t> partial_o = std::vector<uint16_t>(2 * 3 * kHeads * 4, 0),
                        partial_lse = std::vector<uint16_t>(2 * 3 * kHeads * 2, 0),
                        o = std::vector<uint16_t>(3 * kHeads * 4, kSentinel),
                        lse = std::vector<uint16_t>(3 * kHeads * 2, kSentinel);
  MergeStatesParams params;

  MergeStates() {
    params = {.partial_o = of(partial_o, {2, 3, kHeads, 4}),
              .partial_lse = contiguous(partial_lse.data(), DType::kF32, {2, 3, kHeads}),
              .o = of(o, {3, kHeads, 4}),
              .lse = contiguous(lse.data(), DType::kF32, {3, kHeads})};
  }
  bool untouched() const { return all_sentinels({&o, &lse}); }
};

struct Append {
  std::vector<uint16_t> rows = std::vector<uint16_t>(3 * (kCkv + kKpe), 0);
  std::vector<int64_t> slots = {0, -1, 31};
  CacheBuffers cache;
  AppendParams params;

  Append() {
    params = {.kv = of(rows, {3, kCkv + kKpe}),
              .slot_mapping = contiguous(slots.data(), DType::kI64, {3}),
              .cache = cache.whole()};
  }
  bool untouched() const { return all_sentinels({&cache.data, &cache.ckv, &cache.kpe}); }
};

/// Gathers tokens 1 ... 4 of a request of 5 and 6 ... 8 of a request of 9.
struct Gather {
  std::vector<int32_t> kv_len = {5, 9}, block_table = {0, 1, 999, -1, 3, 4}, token_start = {1, 6},
                       out_indptr = {0, 4, 7};
  std::vector<uint16_t> out = std::vector<uint16_t>(7 * (kCkv + kKpe), kSentinel);
  CacheBuffers cache;
  GatherParams params;

  Gather() {
    params = {.cache = cache.whole(),
              .pages = {.block_table = contiguous(block_table.data(), DType::kI32, {2, 3}), .kv_len = of(kv_len)},
              .token_start = of(token_start),
              .out_indptr = of(out_indptr),
              .out_kv = of(out, {7, kCkv + kKpe})};
  }
  bool untouched() const { return all_sentinels({&out}); }
};

/// Describes one way to break a problem, and the whole message that must come of it.
template <class Problem>
struct BadCase {
  const char* name;
  std::function<void(Problem&)> breaks;
  std::string message;
  bool seen_by_plan = true;  ///< shapes and lengths are; data pointers and page numbers are not
};

inline Context reference_context() {
  return Context::create({.num_threads = 1, .affinity = {}, .backend = "reference"}).value();
}

/// Makes a view a strided one over the same memory.
inline void set_stride(TensorView& view, int dim, int64_t stride) { view.stride[static_cast<size_t>(dim)] = stride; }
inline void set_extent(TensorView& view, int dim, int64_t extent) { view.shape[static_cast<size_t>(dim)] = extent; }

/// Runs every case of a planned operation: `run` under a plan of the valid problem, `workspace_size` and `plan`.
template <class Problem>
void expect_refused(const std::vector<BadCase<Problem>>& cases) {
  const Context context = reference_context();
  for (const BadCase<Problem>& bad : cases) {
    SCOPED_TRACE(bad.name);
    Problem valid;
    const Result<Plan> good_plan = plan(context, valid.params, valid.workspace);
    ASSERT_TRUE(good_plan.ok()) << good_plan.status().message();
    Problem problem;
    bad.breaks(problem);
    const Status ran = run(context, *good_plan, problem.params);
    EXPECT_EQ(ran.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(ran.message(), bad.message);
    EXPECT_TRUE(problem.untouched());
    const Result<size_t> size = workspace_size(context, problem.params);
    const Result<Plan> planned = plan(context, problem.params, problem.workspace);
    EXPECT_EQ(size.ok(), !bad.seen_by_plan) << size.status().message();
    EXPECT_EQ(planned.ok(), !bad.seen_by_plan) << planned.status().message();
    if (bad.seen_by_plan) {
      EXPECT_EQ(size.status().message(), bad.message);
      EXPECT_EQ(planned.status().message(), bad.message);
    }
  }
}

/// Does the same for an operation without a plan.
template <class Problem>
void expect_refused_directly(const std::vector<BadCase<Problem>>& cases) {
  const Context context = reference_context();
  for (const BadCase<Problem>& bad : cases) {
    SCOPED_TRACE(bad.name);
    Problem problem;
    bad.breaks(problem);
    const Status ran = run(context, problem.params);
    EXPECT_EQ(ran.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(ran.message(), bad.message);
    EXPECT_TRUE(problem.untouched());
  }
}

}  // namespace mla::test
