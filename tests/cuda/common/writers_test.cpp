// SPDX-License-Identifier: Apache-2.0
// Tests that append, append_rope, gather and copy_pages on an emulated GPU leave the bytes that the reference leaves.

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cuda/common/memory.h"
#include "reference/reference.h"
#include "reference/scalar.h"
#include "trace.h"

namespace mla::writers_test {
namespace {

constexpr uint64_t kProblems = 150;
constexpr auto kFloatTypes = {DType::kBF16, DType::kF16, DType::kF32};

/// Returns different slots, some of them negative.
std::vector<int64_t> random_slots(Random& random, int64_t tokens, int64_t num_slots) {
  std::vector<int64_t> slots(static_cast<size_t>(num_slots));
  std::iota(slots.begin(), slots.end(), 0);
  for (size_t i = slots.size(); i > 1; --i)
    std::swap(slots[i - 1], slots[static_cast<size_t>(random.integer(0, static_cast<int32_t>(i) - 1))]);
  slots.resize(static_cast<size_t>(tokens));
  for (int64_t& slot : slots)
    if (random.chance(5)) slot = random.of<int64_t>({-1, -7, INT64_MIN});
  return slots;
}

/// Returns a random cache for rows of `dtype`; every third time one of whole rows, which kernels of bf16 may take in
/// two parts.
core::Cache random_rows(Random& random, Memory& memory, DType& dtype, int64_t num_pages, int32_t page_size) {
  if (!random.chance(3))
    return random_cache(random, memory, random_d_ckv(random), random_d_kpe(random), num_pages, page_size);
  dtype = DType::kBF16;
  return random_cache(random, memory, CacheFormat::kFP8, random.of({576, 576, 528, 640}), 0, num_pages, page_size);
}

TEST(CudaAppend, LeavesTheBytesOfTheReference) {
  for (uint64_t seed = 0; seed < kProblems; ++seed) {
    MLA_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    Memory memory(random);
    const int32_t page_size = random.of({1, 3, 16});
    const int64_t num_pages = random.integer(1, 8);
    core::AppendArgs args = {.dtype = random.of(kFloatTypes)};
    args.cache = random_rows(random, memory, args.dtype, num_pages, page_size);
    args.num_tokens = random.integer(0, static_cast<int32_t>(args.cache.num_slots()));
    args.ckv_stride_token = args.cache.d_ckv + random.of({0, 0, 8, 3});
    args.kpe_stride_token = args.cache.d_kpe + random.of({0, 0, 8, 3});
    const int64_t skew = random.of({0, 0, 1});
    args.ckv = memory.elements(args.dtype, args.num_tokens * args.ckv_stride_token, skew);
    if (args.cache.d_kpe > 0)
      args.kpe = memory.elements(args.dtype, args.num_tokens * args.kpe_stride_token, skew);
    else
      args.kpe_stride_token = 0;
    args.slot_mapping = memory.list(random_slots(random, args.num_tokens, args.cache.num_slots()));
    TestQueue queue(seed);
    ASSERT_NO_FATAL_FAILURE(expect_same_bytes(
        memory, [&] { reference::append(args); }, [&] { return run_append(args, queue); }));
  }
}

TEST(CudaAppend, SkipsSlotsBeyondThePool) {
  Random random(1);
  Memory memory(random);
  core::AppendArgs args = {.num_tokens = 2};
  args.cache = random_cache(random, memory, CacheFormat::kBF16, 512, 64, 2, 4);
  args.ckv = memory.elements(DType::kBF16, 2 * 512, 0);
  args.kpe = memory.elements(DType::kBF16, 2 * 64, 0);
  args.ckv_stride_token = 512;
  args.kpe_stride_token = 64;
  args.slot_mapping = memory.list<int64_t>({8, INT64_MAX});
  TestQueue queue(0);
  ASSERT_NO_FATAL_FAILURE(expect_same_bytes(
      memory, [] {}, [&] { return run_append(args, queue); }));
}

/// Makes rotary parts of which no pair of channels is NaN twice, however they are paired: of two NaN, compilers may
/// pass on either.
std::byte* rotary_elements(Random& random, Memory& memory, DType dtype, int64_t rows, int32_t width, int64_t stride,
                           int64_t skew) {
  std::byte* base = memory.elements(dtype, rows * stride, skew);
  for (int64_t row = 0; row < rows; ++row)
    for (int32_t c = 0; c < width; ++c)
      if ((c % 2 == 1 || c >= width / 2) && std::isnan(reference::load(base, dtype, row * stride + c)))
        reference::store(static_cast<float>(random.integer(-9, 9)), dtype, row * stride + c, base);
  return base;
}

TEST(CudaAppendRope, LeavesTheBytesOfTheReference) {
  for (uint64_t seed = 0; seed < kProblems; ++seed) {
    MLA_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    Memory memory(random);
    core::AppendRopeArgs args = {.num_heads = random.of({0, 1, 3}),
                                 .q_dtype = random.of(kFloatTypes),
                                 .q_out_dtype = random.of({DType::kBF16, DType::kF16, DType::kF32, DType::kE4M3}),
                                 .dtype = random.of(kFloatTypes),
                                 .interleaved = random.chance(2)};
    args.cache = random_cache(random, memory, random_d_ckv(random), random.of({64, 16, 6, 2, 24}), random.integer(1, 5),
                              random.of({1, 3, 16}));
    const int32_t d_ckv = args.cache.d_plain(), d_kpe = args.cache.d_rotary();
    if (d_kpe == 0) continue;
    args.num_tokens = random.integer(0, static_cast<int32_t>(std::min<int64_t>(9, args.cache.num_slots())));
    const int64_t skew = random.of({0, 0, 1}), extra = random.of({0, 0, 8, 3});
    const int64_t rows = args.num_tokens * args.num_heads;
    args.q_nope_stride_head = d_ckv + extra;
    args.q_pe_stride_head = d_kpe + extra;
    args.q_out_stride_head = d_ckv + d_kpe + extra;
    args.q_nope_stride_token = args.num_heads * args.q_nope_stride_head;
    args.q_pe_stride_token = args.num_heads * args.q_pe_stride_head;
    args.q_out_stride_token = args.num_heads * args.q_out_stride_head;
    if (args.num_heads > 0) {
      args.q_nope = memory.elements(args.q_dtype, rows * args.q_nope_stride_head, skew);
      args.q_pe = rotary_elements(random, memory, args.q_dtype, rows, d_kpe, args.q_pe_stride_head, skew);
      args.q_out = memory.elements(args.q_out_dtype, rows * args.q_out_stride_head, skew);
      if (args.q_out_dtype == DType::kE4M3) args.q_scale = memory.list<float>({random.of({0.07F, 0.5F, 3.0F})});
    }
    args.ckv_stride_token = d_ckv + extra;
    args.kpe_stride_token = d_kpe + extra;
    args.ckv = memory.elements(args.dtype, args.num_tokens * args.ckv_stride_token, skew);
    args.kpe = rotary_elements(random, memory, args.dtype, args.num_tokens, d_kpe, args.kpe_stride_token, skew);
    constexpr int32_t kMaxPositions = 11;
    args.cos_sin_stride_position = d_kpe + random.of({0, 0, 1, 4});
    std::vector<float> cos_sin;
    for (int64_t i = 0; i < kMaxPositions * args.cos_sin_stride_position; ++i)
      cos_sin.push_back(std::sin(static_cast<float>(random.integer(1, 1000))));
    args.cos_sin = memory.list(cos_sin);
    std::vector<int64_t> positions;
    for (int64_t t = 0; t < args.num_tokens; ++t) positions.push_back(random.integer(0, kMaxPositions - 1));
    args.positions = memory.list(positions);
    args.slot_mapping = memory.list(random_slots(random, args.num_tokens, args.cache.num_slots()));
    TestQueue queue(seed);
    ASSERT_NO_FATAL_FAILURE(expect_same_bytes(
        memory, [&] { reference::append_rope(args); }, [&] { return run_append_rope(args, queue); }));
  }
}

TEST(CudaGather, LeavesTheBytesOfTheReference) {
  for (uint64_t seed = 0; seed < kProblems; ++seed) {
    MLA_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    Memory memory(random);
    const int32_t page_size = random.of({1, 3, 16}), num_pages = random.integer(1, 8);
    core::GatherArgs args = {.batch_size = random.of({1, 3, 40}), .out_dtype = random.of(kFloatTypes)};
    args.cache = random_rows(random, memory, args.out_dtype, num_pages, page_size);
    std::vector<int32_t> table, kv_len, start, out_indptr = {0}, kv_indptr = {0};
    constexpr int32_t kPages = 4;
    for (int32_t b = 0; b < args.batch_size; ++b) {
      for (int32_t i = 0; i < kPages; ++i) table.push_back(random.integer(0, num_pages - 1));
      kv_len.push_back(random.integer(0, kPages * page_size));
      start.push_back(random.integer(0, kv_len.back()));
      out_indptr.push_back(out_indptr.back() + random.of({0, kv_len.back() - start.back()}));
      kv_indptr.push_back(kPages * (b + 1));
    }
    args.pages = {.page_size = page_size, .batch_size = args.batch_size, .table = memory.list(table)};
    args.pages.kv_len = memory.list(kv_len);
    if (random.chance(2))
      args.pages.kv_indptr = memory.list(kv_indptr);
    else
      args.pages.table_stride_request = kPages;
    args.token_start = memory.list(start);
    args.out_indptr = memory.list(out_indptr);
    args.num_rows = out_indptr.back() + random.of({0, 5});  // rows of a larger capacity stay as they are
    const int64_t skew = random.of({0, 0, 1});
    args.out_ckv_stride_token = args.cache.d_ckv + random.of({0, 0, 8, 3});
    args.out_ckv = memory.elements(args.out_dtype, args.num_rows * args.out_ckv_stride_token, skew);
    if (args.cache.d_kpe > 0) {
      args.out_kpe_stride_token = args.cache.d_kpe + random.of({0, 0, 8, 3});
      args.out_kpe = memory.elements(args.out_dtype, args.num_rows * args.out_kpe_stride_token, skew);
    }
    TestQueue queue(seed);
    ASSERT_NO_FATAL_FAILURE(expect_same_bytes(
        memory, [&] { reference::gather(args); }, [&] { return run_gather(args, queue); }));
  }
}

TEST(CudaCopyPages, LeavesTheBytesOfTheReference) {
  for (uint64_t seed = 0; seed < 2 * kProblems; ++seed) {
    MLA_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    Memory memory(random);
    const int32_t from_size = random.of({1, 2, 4, 8}), to_size = random.of({1, 2, 4, 8});
    const int32_t tokens = 8 * random.integer(0, 3);
    // A packed format on either side settles the widths of both.
    const auto format = [&] { return kAllCacheFormats[random.integer(0, std::size(kAllCacheFormats) - 1)]; };
    const CacheFormat from = format(), to = format();
    const KvLayout layout = kv_layout(kv_layout(from).is_packed() ? from : to), other = kv_layout(to);
    const bool packed = layout.is_packed();
    if (packed && other.is_packed() && (other.nope_dim != layout.nope_dim || other.rope_dim != layout.rope_dim))
      continue;
    const int32_t d_ckv = packed ? layout.nope_dim : random_d_ckv(random);
    const int32_t d_kpe = packed ? layout.rope_dim : random_d_kpe(random);
    core::CopyPagesArgs args = {.num_from = tokens / from_size, .num_to = tokens / to_size};
    args.from = random_cache(random, memory, from, d_ckv, d_kpe, args.num_from + 2, from_size);
    args.to = random_cache(random, memory, to, d_ckv, d_kpe, args.num_to + 2, to_size);
    const auto pages = [&](int64_t count) {
      std::vector<int32_t> list;
      for (const int64_t page : random_slots(random, count + 2, count + 2)) list.push_back(static_cast<int32_t>(page));
      std::iota(list.begin(), list.end(), 0);
      std::rotate(list.begin(), list.begin() + random.integer(0, static_cast<int32_t>(count) + 1), list.end());
      list.resize(static_cast<size_t>(count));
      return list;
    };
    args.from_pages = memory.list(pages(args.num_from));
    args.to_pages = memory.list(pages(args.num_to));
    TestQueue queue(seed);
    ASSERT_NO_FATAL_FAILURE(expect_same_bytes(
        memory, [&] { reference::copy_pages(args); }, [&] { return run_copy_pages(args, queue); }));
  }
}

}  // namespace
}  // namespace mla::writers_test
