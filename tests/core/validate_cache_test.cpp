// SPDX-License-Identifier: Apache-2.0
// Tests how calls of append and gather are validated.
#include "problems.h"

namespace mla::test {
namespace {

TEST(ValidateAppend, RefusesBadInput) {
  expect_refused_directly(std::vector<BadCase<Append>>{
      {"no rows", [](Append& p) { p.params.kv = {}; }, "append: kv: expected kv, or ckv and kpe, got none"},
      {"both forms",
       [](Append& p) {
         p.params.kpe = of(p.rows, {3, kKpe});
       },
       "append: kv: expected either kv or ckv and kpe, got both"},
      {"integer rows", [](Append& p) { p.params.kv.dtype = DType::kI64; },
       "append: kv: expected bf16, f16 or f32, got int64"},
      {"rows of another width", [](Append& p) { set_extent(p.params.kv, 1, 11); },
       "append: cache.kv: expected shape [num_pages, page_size, d_qk = 11], got [8, 4, 12]"},
      {"parts of another width",
       [](Append& p) {
         p.params.kv = {};
         p.params.ckv = of(p.rows, {3, kCkv});
         p.params.kpe = of(p.rows, {3, kKpe - 1});
       },
       "append: cache.kv: expected shape [num_pages, page_size, d_qk = 11], got [8, 4, 12]"},
      {"cache in parts of another width",
       [](Append& p) {
         p.params.cache = p.cache.parts();
         set_extent(p.params.cache.kpe, 2, 3);
       },
       "append: cache.kpe: expected kv_lora_rank + qk_rope_head_dim = 12, got 8 + 3"},
      {"no slots", [](Append& p) { p.params.slot_mapping = {}; }, "append: slot_mapping: expected a tensor, got none"},
      {"int32 slots", [](Append& p) { p.params.slot_mapping.dtype = DType::kI32; },
       "append: slot_mapping: expected int64, got int32"},
      {"slots of other tokens", [](Append& p) { set_extent(p.params.slot_mapping, 0, 2); },
       "append: slot_mapping: expected shape [T = 3], got [2]"},
      {"slot beyond the pool", [](Append& p) { p.slots[2] = 32; },
       "append: slot_mapping: expected at most 31 (the last slot of the cache), got 32 for token 2"},
      {"slot far beyond the pool", [](Append& p) { p.slots[0] = INT64_MAX; },
       "append: slot_mapping: expected at most 31 (the last slot of the cache), got 9223372036854775807 for token 0"},
      {"no pages",
       [](Append& p) {
         set_extent(p.params.cache.kv, 0, 0);
         p.params.cache.kv.data = nullptr;
       },
       "append: slot_mapping: expected at most -1 (the last slot of the cache), got 0 for token 0"},
      {"null slots", [](Append& p) { p.params.slot_mapping.data = nullptr; },
       "append: slot_mapping: expected data, got a null pointer"},
      {"null cache", [](Append& p) { p.params.cache.kv.data = nullptr; },
       "append: cache.kv: expected data, got a null pointer"},
      {"overlapping pages", [](Append& p) { set_stride(p.params.cache.kv, 0, 47); },
       "append: cache.kv: expected an output whose elements do not overlap, got shape [8, 4, 12] with stride 47 in "
       "dimension 0"},
      {"mixed devices", [](Append& p) { p.params.cache.kv.device.type = DeviceType::kCuda; },
       "append: cache.kv: expected on cpu:0, where kv is, got cuda:0"},
  });
}

TEST(ValidateAppend, NegativeSlotsAreSkipsAndNothingIsLegal) {
  const Context context = reference_context();
  Append p;
  p.slots = {-1, INT64_MIN, -99};
  EXPECT_EQ(run(context, p.params).message(), "");
  EXPECT_TRUE(p.untouched());
  p.params.kv = contiguous(nullptr, DType::kBF16, {0, kCkv + kKpe});
  p.params.slot_mapping = contiguous(nullptr, DType::kI64, {0});
  EXPECT_EQ(run(context, p.params).message(), "");
}

TEST(ValidateAppend, RowsInOneTensorReachACacheOfTwo) {
  const Context context = reference_context();
  Append p;
  for (size_t i = 0; i < p.rows.size(); ++i) p.rows[i] = static_cast<uint16_t>(0x3F80 + i);
  p.params.cache = p.cache.parts();
  ASSERT_EQ(run(context, p.params).message(), "");
  EXPECT_EQ(p.cache.ckv[0], p.rows[0]);
  EXPECT_EQ(p.cache.kpe[0], p.rows[8]);
  EXPECT_EQ(p.cache.kpe[31 * 4 + 3], p.rows[35]);
}

TEST(ValidateGather, RefusesBadInput) {
  expect_refused_directly(std::vector<BadCase<Gather>>{
      {"no output", [](Gather& p) { p.params.out_kv = {}; },
       "gather: out_kv: expected out_kv, or out_ckv and out_kpe, got none"},
      {"both forms", [](Gather& p) { p.params.out_ckv = p.params.out_kv; },
       "gather: out_kv: expected either out_kv or out_ckv and out_kpe, got both"},
      {"output of another width", [](Gather& p) { set_extent(p.params.out_kv, 1, 11); },
       "gather: out_kv: expected shape [S, d_qk = 12], got [7, 11]"},
      {"kpe without room",
       [](Gather& p) {
         p.params.cache = p.cache.parts();
         p.params.out_kv = {};
         p.params.out_ckv = of(p.out, {7, kCkv});
       },
       "gather: out_kpe: expected a tensor, since qk_rope_head_dim is 4, got none"},
      {"overlapping output", [](Gather& p) { set_stride(p.params.out_kv, 0, 11); },
       "gather: out_kv: expected an output whose elements do not overlap, got shape [7, 12] with stride 11 in "
       "dimension 0"},
      {"token_start of another batch", [](Gather& p) { set_extent(p.params.token_start, 0, 1); },
       "gather: token_start: expected shape [B = 2], got [1]"},
      {"negative start", [](Gather& p) { p.token_start[0] = -1; },
       "gather: token_start: expected at least 0, got -1 for request 0"},
      {"beyond kv_len", [](Gather& p) { p.token_start[1] = 7; },
       "gather: out_indptr: expected token_start + rows of at most kv_len = 9, got 7 + 3 for request 1"},
      {"beyond kv_len from the start", [](Gather& p) { p.kv_len[0] = 4; },
       "gather: out_indptr: expected token_start + rows of at most kv_len = 4, got 1 + 4 for request 0"},
      {"no out_indptr", [](Gather& p) { p.params.out_indptr = {}; }, "gather: out_indptr: expected a tensor, got none"},
      {"out_indptr not to S", [](Gather& p) { p.out_indptr[2] = 6; },
       "gather: out_indptr: expected exactly 7 (rows of the output) as the last entry, got 6"},
      {"out_indptr decreases", [](Gather& p) { p.out_indptr[1] = 8; },
       "gather: out_indptr: expected entries that never decrease, got 7 after 8 for request 1"},
      {"length beyond the table", [](Gather& p) { p.kv_len[1] = 99; },
       "gather: kv_len: expected at most 12 (3 pages of 4), got 99 for request 1"},
      {"page beyond the pool", [](Gather& p) { p.block_table[5] = 8; },
       "gather: block_table: expected page numbers from 0 to 7, got 8 as page 2 of request 1"},
      {"null output", [](Gather& p) { p.params.out_kv.data = nullptr; },
       "gather: out_kv: expected data, got a null pointer"},
  });
}

TEST(ValidateGather, OnlyPagesOfTheRangeAreLookedAt) {
  const Context context = reference_context();
  Gather p;  // the table names page -1 for tokens 0..3 of request 1, and 999 past the end of request 0
  for (uint16_t& x : p.cache.data) x = 0x3F80;
  ASSERT_EQ(run(context, p.params).message(), "");
  for (uint16_t x : p.out) EXPECT_EQ(x, 0x3F80);
}

}  // namespace
}  // namespace mla::test
