// SPDX-License-Identifier: Apache-2.0
// Tests the way into the cache and out of it: every byte, and no other, is as the reference writes it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "backend_test.h"
#include "turns.h"

namespace mla {
namespace {

using kit::AppendSpec;
using kit::GatherCase;
using kit::GatherSpec;

class AppendTest : public BackendTest<Op::kAppend> {};
MLA_FOR_EVERY_ROW(AppendTest, Op::kAppend);
class GatherTest : public BackendTest<Op::kGather> {};
MLA_FOR_EVERY_ROW(GatherTest, Op::kGather);

constexpr DType kFloats[] = {DType::kBF16, DType::kF16, DType::kF32};

TEST_P(AppendTest, FormsAndTypes) {
  uint64_t turn = 0;
  for (CacheFormat format : kAllCacheFormats)
    for (DType dtype : kFloats)
      for (int form = 0; form < 4; ++form) {
        if (!has_turn(format, turn++)) continue;
        AppendSpec spec;
        spec.cache = kit::usual_cache(format);
        spec.dtype = dtype;
        spec.cache.two_tensors = (form & 1) != 0 && !spec.cache.packed();
        spec.split_rows = (form & 2) != 0;
        expect_ok(spec);
      }
}

TEST_P(AppendTest, PageSizesAndStrides) {
  for (int32_t page_size : {1, 2, 3, 16, 64, 256})
    for (int64_t extra : {0, 1, 8}) {
      AppendSpec spec;
      spec.cache.page_size = page_size;
      spec.cache.page_stride_extra = 3 * extra;
      spec.cache.token_stride_extra = extra;
      spec.row_extra = extra;
      spec.num_pages = 64 / page_size + 2;
      expect_ok(spec);
    }
}

TEST_P(AppendTest, WithoutRotaryPart) {
  AppendSpec spec;
  spec.cache.d_qk = 512;
  expect_ok(spec);
  spec.split_rows = true;
  spec.cache.two_tensors = true;
  expect_ok(spec);
}

TEST_P(AppendTest, NegativeSlotsSkip) {
  AppendSpec spec;
  spec.skip_share = 1;
  const kit::AppendCase problem(spec);
  MLA_EXPECT_OK(run(context(), problem.params()));
  EXPECT_TRUE(all_bytes_are(problem.memory.kv, kit::kUntouched));
}

TEST_P(AppendTest, MoreBytesThanTheCachesHold) {
  for (DType dtype : kFloats) {
    AppendSpec spec;
    spec.num_tokens = 15000;  // above 16 MiB
    spec.num_pages = 240;
    spec.dtype = dtype;
    expect_ok(spec);
  }
}

TEST_P(AppendTest, NoTokens) {
  AppendSpec spec;
  spec.num_tokens = 0;
  expect_ok(spec);
}

TEST_P(AppendTest, RandomProblems) {
  constexpr uint64_t kFirstSeed = 6000;
  for (uint64_t seed = kFirstSeed; seed < kFirstSeed + 40; ++seed)
    for (CacheFormat format : kAllCacheFormats)
      if (has_turn(format, seed)) expect_ok(kit::random_append_spec(seed, format));
}

TEST_P(GatherTest, FormsAndTypes) {
  uint64_t turn = 0;
  for (CacheFormat format : kAllCacheFormats)
    for (DType dtype : kFloats)
      for (int form = 0; form < 8; ++form) {
        if (!has_turn(format, turn++)) continue;
        GatherSpec spec;
        spec.cache = kit::usual_cache(format);
        spec.out_dtype = dtype;
        spec.cache.two_tensors = (form & 1) != 0 && !spec.cache.packed();
        spec.split_out = (form & 2) != 0;
        spec.cache.block_table = (form & 4) != 0;
        spec.kv_len = {200, 3, 64};
        spec.token_start = {65, 0, 64};
        spec.count = {100, 3, 0};
        expect_ok(spec);
      }
}

TEST_P(GatherTest, RangesAroundPageEdges) {
  for (int32_t page_size : {1, 3, 64})
    for (int32_t start : {0, 1, page_size - 1, page_size, page_size + 1})
      for (int32_t count : {0, 1, page_size, 2 * page_size + 1}) {
        GatherSpec spec;
        spec.cache.page_size = page_size;
        spec.kv_len = {start + count, 5};
        spec.token_start = {start, 2};
        spec.count = {count, 3};
        spec.row_extra = 5;
        expect_ok(spec);
      }
}

TEST_P(GatherTest, MoreBytesThanTheCachesHold) {
  for (DType dtype : kFloats) {
    GatherSpec spec;
    spec.out_dtype = dtype;
    spec.kv_len = {15000};  // above 16 MiB
    spec.token_start = {3};
    spec.count = {14990};
    expect_ok(spec);
  }
}

TEST_P(GatherTest, WholeRequestsWithoutTokenStart) {
  GatherSpec spec;
  spec.omit_token_start = true;
  spec.kv_len = {130, 0, 7};
  spec.token_start = {0, 0, 0};
  spec.count = {130, 0, 7};
  expect_ok(spec);
}

TEST_P(GatherTest, RandomProblems) {
  constexpr uint64_t kFirstSeed = 7000;
  for (uint64_t seed = kFirstSeed; seed < kFirstSeed + 40; ++seed)
    for (CacheFormat format : kAllCacheFormats)
      if (has_turn(format, seed)) expect_ok(kit::random_gather_spec(seed, format));
}

/// Appends random rows at the slots of a request, gathers the request back, and expects the same bits.
void expect_round_trip(const Context& context, const kit::CacheSpec& cache, DType dtype, int32_t kv_len) {
  GatherSpec spec;
  spec.cache = cache;
  spec.kv_len = spec.count = {kv_len};
  spec.token_start = {0};
  spec.out_dtype = dtype;
  const GatherCase problem(spec);
  const auto width = static_cast<int64_t>(cache.d_qk);
  const kit::Buffer rows(static_cast<size_t>(kv_len * width) * size_of(dtype));
  kit::fill_normal(rows.data(), dtype, 0, kv_len * width, 77);
  std::vector<int64_t> slots;
  for (int32_t token = 0; token < kv_len; ++token)
    slots.push_back(int64_t{problem.memory.pages_of[0][static_cast<size_t>(token / cache.page_size)]} *
                        cache.page_size +
                    token % cache.page_size);
  AppendParams append;
  append.kv = contiguous(rows.data(), dtype, {kv_len, width});
  append.slot_mapping = contiguous(slots.data(), DType::kI64, {kv_len});
  append.cache = problem.memory.cache;
  MLA_EXPECT_OK(run(context, append));
  MLA_EXPECT_OK(run(context, problem.params()));
  EXPECT_EQ(std::memcmp(rows.data(), problem.out_kv.data(), rows.size()), 0);
}

TEST_P(GatherTest, ReturnsWhatWasAppended) {
  for (bool two_tensors : {false, true})
    for (int32_t page_size : {1, 5, 64}) {
      kit::CacheSpec cache;
      cache.two_tensors = two_tensors;
      cache.page_size = page_size;
      expect_round_trip(context(), cache, DType::kBF16, 333);
      cache.format = CacheFormat::kF16;
      expect_round_trip(context(), cache, DType::kF16, 333);
    }
}

}  // namespace
}  // namespace mla
