// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "mla/numeric.h"
#include "reference/reference.h"

namespace mla::reference {
namespace {

constexpr uint16_t kUntouched = 0xABCD;

/// Holds a cache of two tensors with padded tokens and pages: 3 pages of 2 tokens, d_ckv = 2, d_kpe = 1.
struct TwoTensorCache {
  std::vector<uint16_t> ckv = std::vector<uint16_t>(3 * 9, kUntouched);
  std::vector<uint16_t> kpe = std::vector<uint16_t>(3 * 5, kUntouched);
  core::Cache view(CacheFormat format) {
    core::Cache cache = {
        .format = format,
        .num_pages = 3,
        .page_size = 2,
        .d_ckv = 2,
        .d_kpe = 1,
        .ckv = {.base = reinterpret_cast<std::byte*>(ckv.data()), .stride_page = 18, .stride_token = 6},
        .kpe = {.base = reinterpret_cast<std::byte*>(kpe.data()), .stride_page = 10, .stride_token = 4}};
    core::set_codecs(kv_layout(format), cache);
    return cache;
  }
};

TEST(ReferenceAppend, WritesTheNamedSlotsOnly) {
  TwoTensorCache memory;
  const std::vector<float> ckv = {1, 2, -1, -1, 3, 4, 5, 6}, kpe = {10, -1, 20, 30};
  const std::vector<int64_t> slots = {5, -1, 0, 2};  // page 2 offset 1, skipped, page 0 offset 0, page 1 offset 0
  core::AppendArgs args;
  args.num_tokens = 4;
  args.dtype = DType::kF32;
  args.ckv = ckv.data();
  args.ckv_stride_token = 2;
  args.kpe = kpe.data();
  args.kpe_stride_token = 1;
  args.slot_mapping = slots.data();
  args.cache = memory.view(CacheFormat::kF16);
  append(args);

  TwoTensorCache expected;
  const auto put = [](std::vector<uint16_t>& values, size_t at, float value) { values[at] = f32_to_f16(value); };
  put(expected.ckv, 2 * 9 + 3, 1);
  put(expected.ckv, 2 * 9 + 4, 2);
  put(expected.kpe, 2 * 5 + 2, 10);
  put(expected.ckv, 0, 3);
  put(expected.ckv, 1, 4);
  put(expected.kpe, 0, 20);
  put(expected.ckv, 9, 5);
  put(expected.ckv, 10, 6);
  put(expected.kpe, 5, 30);
  EXPECT_EQ(memory.ckv, expected.ckv);
  EXPECT_EQ(memory.kpe, expected.kpe);
}

TEST(ReferenceGather, TakesARangeAcrossPagesAndLeavesTheRest) {
  TwoTensorCache memory;
  std::iota(memory.ckv.begin(), memory.ckv.end(), uint16_t{100});
  std::iota(memory.kpe.begin(), memory.kpe.end(), uint16_t{200});
  const std::vector<int32_t> table = {2, 0, 2147483647, 1, 2147483647, 2147483647}, kv_len = {4, 1};
  const std::vector<int32_t> start = {1, 0}, out_indptr = {0, 2, 3};
  std::vector<uint16_t> out_ckv(3 * 4, kUntouched), out_kpe(3, kUntouched);
  core::GatherArgs args;
  args.batch_size = 2;
  args.num_rows = 3;
  args.cache = memory.view(CacheFormat::kBF16);
  args.pages = {.page_size = 2,
                .batch_size = 2,
                .table = table.data(),
                .kv_indptr = nullptr,
                .table_stride_request = 3,
                .kv_len = kv_len.data()};
  args.token_start = start.data();
  args.out_indptr = out_indptr.data();
  args.out_ckv = out_ckv.data();
  args.out_ckv_stride_token = 4;
  args.out_kpe = out_kpe.data();
  args.out_kpe_stride_token = 1;
  gather(args);
  // token 1 of request 0: page 2 slot 1; token 2: page 0 slot 0; token 0 of request 1: page 1 slot 0
  EXPECT_EQ(out_ckv, (std::vector<uint16_t>{121, 122, kUntouched, kUntouched, 100, 101, kUntouched, kUntouched, 109,
                                            110, kUntouched, kUntouched}));
  EXPECT_EQ(out_kpe, (std::vector<uint16_t>{212, 200, 205}));
}

TEST(ReferenceGather, ConvertsExactly) {
  TwoTensorCache memory;
  memory.ckv[0] = f32_to_bf16(-1.5F);
  memory.ckv[1] = 0x0001;  // the smallest subnormal
  memory.kpe[0] = f32_to_bf16(3e38F);
  const int32_t table[] = {0}, kv_len[] = {1}, out_indptr[] = {0, 1};
  float out[3] = {};
  core::GatherArgs args;
  args.batch_size = 1;
  args.num_rows = 1;
  args.cache = memory.view(CacheFormat::kBF16);
  args.pages = {.page_size = 2,
                .batch_size = 1,
                .table = table,
                .kv_indptr = nullptr,
                .table_stride_request = 1,
                .kv_len = kv_len};
  args.out_indptr = out_indptr;
  args.out_dtype = DType::kF32;
  args.out_ckv = out;
  args.out_ckv_stride_token = 3;
  args.out_kpe = out + 2;
  args.out_kpe_stride_token = 3;
  gather(args);
  EXPECT_EQ(out[0], -1.5F);
  EXPECT_EQ(out[1], bf16_to_f32(0x0001));
  EXPECT_EQ(out[2], bf16_to_f32(f32_to_bf16(3e38F)));
}

}  // namespace
}  // namespace mla::reference
