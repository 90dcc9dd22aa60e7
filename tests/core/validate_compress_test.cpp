// SPDX-License-Identifier: Apache-2.0
// Tests how calls of compress are validated.
#include <cmath>
#include <limits>

#include "core/validate.h"
#include "writer_problems.h"

namespace mla::test {
namespace {

using Bad = BadCase<Compress>;

TEST(ValidateCompress, RefusesBadTokens) {
  expect_refused_directly(std::vector<Bad>{
      {"no ratio", [](Compress& p) { p.params.ratio = 0; }, "compress: ratio: expected at least 1, got 0"},
      {"huge ratio", [](Compress& p) { p.params.ratio = 65537; }, "compress: ratio: expected at most 65536, got 65537"},
      {"overlap of tokens that are groups",
       [](Compress& p) {
         p.use_ratio_1();
         p.params.overlap = true;
       },
       "compress: overlap: expected false, since ratio is 1, got true"},
      {"no kv", [](Compress& p) { p.params.kv = {}; }, "compress: kv: expected a tensor, got none"},
      {"e4m3 kv", [](Compress& p) { p.params.kv.dtype = DType::kE4M3; },
       "compress: kv: expected bf16, f16 or f32, got e4m3"},
      {"kv of heads",
       [](Compress& p) {
         p.params.kv = of(p.kv, {5, 3, 4});
       },
       "compress: kv: expected shape [T, W], got [5, 3, 4]"},
      {"no channel", [](Compress& p) { set_extent(p.params.kv, 1, 0); }, "compress: W: expected at least 1, got 0"},
      {"too many channels",
       [](Compress& p) {
         set_extent(p.params.kv, 1, 1 << 30);
         set_stride(p.params.kv, 0, 1 << 30);
       },
       "compress: W: expected at most 1073741823, got 1073741824"},
      {"too many tokens", [](Compress& p) { set_extent(p.params.kv, 0, int64_t{1} << 31); },
       "compress: num_tokens: expected at most 2147483647, got 2147483648"},
      {"odd channels of two halves",
       [](Compress& p) {
         p.use_overlap();
         set_extent(p.params.kv, 1, 11);
       },
       "compress: kv: expected an even number of channels, since overlap is set, got 11"},
      {"no score", [](Compress& p) { p.params.score = {}; }, "compress: score: expected a tensor, got none"},
      {"scores of another type", [](Compress& p) { p.params.score.dtype = DType::kF16; },
       "compress: score: expected bf16, got f16"},
      {"scores of other tokens", [](Compress& p) { set_extent(p.params.score, 0, 4); },
       "compress: score: expected shape [T = 5, W = 12], got [4, 12]"},
      {"scores of tokens that are groups",
       [](Compress& p) {
         p.use_ratio_1();
         p.params.score = of(p.score, {5, Compress::kWidth});
       },
       "compress: score: expected none, since ratio is 1, got a tensor"},
      {"bias of another ratio", [](Compress& p) { set_extent(p.params.position_bias, 0, 1); },
       "compress: position_bias: expected shape [ratio = 2, W = 12], got [1, 12]"},
      {"bf16 bias", [](Compress& p) { p.params.position_bias.dtype = DType::kBF16; },
       "compress: position_bias: expected f32, got bf16"},
      {"bias of tokens that are groups",
       [](Compress& p) {
         p.use_ratio_1();
         p.params.position_bias = contiguous(p.bias.data(), DType::kF32, {1, Compress::kWidth});
       },
       "compress: position_bias: expected none, since ratio is 1, got a tensor"},
  });
}

TEST(ValidateCompress, RefusesBadLengths) {
  expect_refused_directly(std::vector<Bad>{
      {"no lengths", [](Compress& p) { p.params.kv_len = {}; }, "compress: kv_len: expected a tensor, got none"},
      {"lengths in i64", [](Compress& p) { p.params.kv_len.dtype = DType::kI64; },
       "compress: kv_len: expected int32, got int64"},
      {"negative length", [](Compress& p) { p.kv_len[1] = -1; },
       "compress: kv_len: expected 0 to 1073741824, got -1 for request 1"},
      {"huge length", [](Compress& p) { p.kv_len[0] = (1 << 30) + 1; },
       "compress: kv_len: expected 0 to 1073741824, got 1073741825 for request 0"},
      {"uneven tokens", [](Compress& p) { p.params.qo_indptr = {}; },
       "compress: qo_indptr: expected a tensor, since 5 query tokens are not a multiple of 2 requests, got none"},
      {"indptr of another batch", [](Compress& p) { set_extent(p.params.qo_indptr, 0, 2); },
       "compress: qo_indptr: expected shape [B + 1 = 3], got [2]"},
      {"indptr of other tokens", [](Compress& p) { p.qo_indptr[2] = 6; },
       "compress: qo_indptr: expected exactly 5 (query tokens) as the last entry, got 6"},
  });
}

TEST(ValidateCompress, RefusesBadStates) {
  expect_refused_directly(std::vector<Bad>{
      {"no state", [](Compress& p) { p.params.state = {}; }, "compress: state: expected a tensor, got none"},
      {"bf16 state", [](Compress& p) { p.params.state.dtype = DType::kBF16; },
       "compress: state: expected f32, got bf16"},
      {"state without scores", [](Compress& p) { set_extent(p.params.state, 2, Compress::kWidth); },
       "compress: state: expected shape [num_blocks, block_size, 2 W = 24], got [6, 2, 12]"},
      {"blocks without rows", [](Compress& p) { set_extent(p.params.state, 1, 0); },
       "compress: block_size: expected at least 1, got 0"},
      {"huge blocks",
       [](Compress& p) {
         set_extent(p.params.state, 1, (int64_t{1} << 30) + 1);
         set_stride(p.params.state, 0, int64_t{1} << 40);
       },
       "compress: block_size: expected at most 1073741824, got 1073741825"},
      {"overlapping rows", [](Compress& p) { set_stride(p.params.state, 1, 23); },
       "compress: state: expected an output whose elements do not overlap, got shape [6, 2, 24] with stride 23 in "
       "dimension 1"},
      {"null state", [](Compress& p) { p.params.state.data = nullptr; },
       "compress: state: expected data, got a null pointer"},
  });
}

TEST(ValidateCompress, RefusesBadStateTables) {
  expect_refused_directly(std::vector<Bad>{
      {"no table", [](Compress& p) { p.params.state_table = {}; },
       "compress: state_table: expected a tensor, got none"},
      {"table in i64", [](Compress& p) { p.params.state_table.dtype = DType::kI64; },
       "compress: state_table: expected int32, got int64"},
      {"table of another batch", [](Compress& p) { set_extent(p.params.state_table, 0, 1); },
       "compress: state_table: expected shape [B = 2, C], got [1, 3]"},
      {"table without columns", [](Compress& p) { set_extent(p.params.state_table, 1, 0); },
       "compress: state_table: expected room for at least 1 tokens of a request, got 0 blocks of 2"},
      {"a row too few",
       [](Compress& p) {
         p.use_overlap();  // needs 2 * 2 - 1 rows
         set_extent(p.params.state_table, 1, 1);
       },
       "compress: state_table: expected room for at least 3 tokens of a request, got 1 blocks of 2"},
      {"block beyond the state, of new tokens", [](Compress& p) { p.state_table[4] = 6; },
       "compress: state_table: expected block numbers below 6, got 6 for request 1"},
      {"block beyond the state, of tokens that end with new ones", [](Compress& p) { p.state_table[1] = 7; },
       "compress: state_table: expected block numbers below 6, got 7 for request 0"},
      {"block beyond the state, of the group before",
       [](Compress& p) {
         p.use_overlap();
         p.state_table[5] = 8;  // tokens 4 and 5
       },
       "compress: state_table: expected block numbers below 6, got 8 for request 1"},
      {"state of tokens that are groups",
       [](Compress& p) {
         const TensorView state = p.params.state;
         p.use_ratio_1();
         p.params.state = state;
       },
       "compress: state: expected none, since ratio is 1, got a tensor"},
      {"table of tokens that are groups",
       [](Compress& p) {
         const TensorView table = p.params.state_table;
         p.use_ratio_1();
         p.params.state_table = table;
       },
       "compress: state_table: expected none, since ratio is 1, got a tensor"},
  });
}

TEST(ValidateCompress, RefusesBadNorms) {
  expect_refused_directly(std::vector<Bad>{
      {"norm of other channels", [](Compress& p) { set_extent(p.params.norm_weight, 0, 11); },
       "compress: norm_weight: expected shape [D = 12], got [11]"},
      {"norm of both halves",
       [](Compress& p) {
         p.use_overlap();
         p.params.norm_weight = of(p.norm_weight, {Compress::kWidth});
       },
       "compress: norm_weight: expected shape [D = 6], got [12]"},
      {"e4m3 norm", [](Compress& p) { p.params.norm_weight.dtype = DType::kE4M3; },
       "compress: norm_weight: expected bf16, f16 or f32, got e4m3"},
      {"negative epsilon", [](Compress& p) { p.params.norm_eps = -1.0F; },
       "compress: norm_eps: expected a finite number of at least 0, got -1"},
      {"no epsilon", [](Compress& p) { p.params.norm_eps = std::nanf(""); },
       "compress: norm_eps: expected a finite number of at least 0, got nan"},
      {"infinite epsilon", [](Compress& p) { p.params.norm_eps = std::numeric_limits<float>::infinity(); },
       "compress: norm_eps: expected a finite number of at least 0, got inf"},
  });
}

TEST(ValidateCompress, RefusesBadTargets) {
  expect_refused_directly(std::vector<Bad>{
      {"no latents", [](Compress& p) { p.params.latent = {}; }, "compress: latent: expected a tensor, got none"},
      {"e4m3 latents", [](Compress& p) { p.params.latent.dtype = DType::kE4M3; },
       "compress: latent: expected bf16, f16 or f32, got e4m3"},
      {"latents of both halves",
       [](Compress& p) {
         p.use_overlap();
         p.params.latent = of(p.latent, {5, Compress::kWidth});
       },
       "compress: latent: expected shape [T = 5, D = 6], got [5, 12]"},
      {"latents of groups",
       [](Compress& p) {
         p.params.latent = of(p.latent, {2, Compress::kWidth});
       },
       "compress: latent: expected shape [T = 5, D = 12], got [2, 12]"},
      {"overlapping latents", [](Compress& p) { set_stride(p.params.latent, 0, 0); },
       "compress: latent: expected an output whose elements do not overlap, got shape [5, 12] with stride 0 in "
       "dimension 0"},
      {"cache without slots", [](Compress& p) { p.params.slot_mapping = {}; },
       "compress: slot_mapping: expected a tensor, since cache is given, got none"},
      {"indexer without slots",
       [](Compress& p) {
         p.use_indexer();
         p.params.slot_mapping = {};
       },
       "compress: slot_mapping: expected a tensor, since indexer is given, got none"},
      {"angles for nothing",
       [](Compress& p) {
         p.params.slot_mapping = {};
         p.params.cache = {};
       },
       "compress: cos_sin: expected none, since neither cache nor indexer is given, got a tensor"},
      {"slots of nothing", [](Compress& p) { p.params.cache = {}; },
       "compress: slot_mapping: expected either cache or indexer beside it, got none"},
      {"two targets",
       [](Compress& p) {
         const KvCache cache = p.params.cache;
         p.use_indexer();
         p.params.cache = cache;
       },
       "compress: slot_mapping: expected either cache or indexer beside it, got both"},
      {"slots in i32", [](Compress& p) { p.params.slot_mapping.dtype = DType::kI32; },
       "compress: slot_mapping: expected int64, got int32"},
      {"slots of groups", [](Compress& p) { set_extent(p.params.slot_mapping, 0, 2); },
       "compress: slot_mapping: expected shape [T = 5], got [2]"},
  });
}

TEST(ValidateCompress, RefusesBadCaches) {
  expect_refused_directly(std::vector<Bad>{
      {"slot beyond the cache", [](Compress& p) { p.slots[3] = 32; },
       "compress: slot_mapping: expected slots below 32, got 32 for token 3"},
      {"slot beyond the indexer's cache",
       [](Compress& p) {
         p.use_indexer();
         p.slots[0] = 40;
       },
       "compress: slot_mapping: expected slots below 32, got 40 for token 0"},
      {"slot of a token that is a group",
       [](Compress& p) {
         p.use_ratio_1();
         p.params.cos_sin = {};
         p.slots[4] = 33;
       },
       "compress: slot_mapping: expected slots below 32, got 33 for token 4"},
      {"cache of another width", [](Compress& p) { set_extent(p.params.cache.kv, 2, 11); },
       "compress: cache.kv: expected shape [num_pages, page_size, d_qk = 12], got [8, 4, 11]"},
      {"parts of other widths",
       [](Compress& p) {
         p.params.cache = p.cache.parts();
         p.params.cos_sin = {};
         set_extent(p.params.cache.ckv, 2, 7);
       },
       "compress: cache.kpe: expected kv_lora_rank + qk_rope_head_dim = 12, got 7 + 4"},
      {"format of other widths", [](Compress& p) { p.params.cache = p.quantized.dsv4(); },
       "compress: cache.format: expected rows of 12 channels, got fp8_dsv4 with 512"},
      {"unknown format", [](Compress& p) { p.params.cache.format = static_cast<CacheFormat>(77); },
       "compress: cache.format: expected a cache format, got unknown value 77"},
      {"no scale",
       [](Compress& p) {
         p.params.cache = p.quantized.fp8();
         p.params.cache.ckv_scale = {};
       },
       "compress: cache.ckv_scale: expected a tensor, got none"},
      {"overlapping rows of the cache", [](Compress& p) { set_stride(p.params.cache.kv, 1, 11); },
       "compress: cache.kv: expected an output whose elements do not overlap, got shape [8, 4, 12] with stride 11 in "
       "dimension 1"},
      {"wide latents for the indexer",
       [](Compress& p) {
         p.use_indexer();
         const IndexerCache indexer = p.params.indexer;
         p.widen(512);
         p.params.indexer = indexer;
       },
       "compress: indexer: expected latents of 128 channels, got 512"},
      {"pages without scales",
       [](Compress& p) {
         p.use_indexer();
         set_extent(p.params.indexer.kv, 1, 4 * 128);
       },
       "compress: indexer.kv: expected pages of at least 528 bytes (4 tokens), got 512"},
      {"unknown keys",
       [](Compress& p) {
         p.use_indexer();
         p.params.indexer.format = IndexerFormat{2};
       },
       "compress: indexer.format: expected a format of the indexer's keys, got unknown value 2"},
      {"scales that mxfp4 has not",
       [](Compress& p) {
         p.use_indexer();
         p.params.indexer.format = IndexerFormat::kMXFP4;
         p.params.power_of_two_scales = false;
       },
       "compress: power_of_two_scales: expected powers of two for mxfp4 keys, which have no other scales, got any "
       "numbers"},
      {"no page size",
       [](Compress& p) {
         p.use_indexer();
         p.params.indexer.page_size = 0;
       },
       "compress: indexer.page_size: expected at least 1, got 0"},
  });
}

TEST(ValidateCompress, RefusesBadAngles) {
  expect_refused_directly(std::vector<Bad>{
      {"bf16 angles", [](Compress& p) { p.params.cos_sin.dtype = DType::kBF16; },
       "compress: cos_sin: expected f32, got bf16"},
      {"odd rotary channels", [](Compress& p) { set_extent(p.params.cos_sin, 1, 3); },
       "compress: cos_sin: expected an even number of rotary channels from 2 to 12, got 3"},
      {"no rotary channel", [](Compress& p) { set_extent(p.params.cos_sin, 1, 0); },
       "compress: cos_sin: expected an even number of rotary channels from 2 to 12, got 0"},
      {"more rotary channels than channels",
       [](Compress& p) {
         p.params.cos_sin = contiguous(p.bias.data(), DType::kF32, {1, 14});
       },
       "compress: cos_sin: expected an even number of rotary channels from 2 to 12, got 14"},
      {"no plain channel",
       [](Compress& p) {
         p.params.cos_sin = contiguous(p.bias.data(), DType::kF32, {3, Compress::kWidth});
       },
       "compress: kv_lora_rank: expected at least 1, got 0"},
      {"angles of other channels than kpe's",
       [](Compress& p) {
         p.params.cache = p.cache.parts();
         p.params.cos_sin = contiguous(p.cos_sin.data(), DType::kF32, {14, 2});
       },
       "compress: cache.kpe: expected shape [num_pages = 8, page_size = 4, qk_rope_head_dim = 2], got [8, 4, 4]"},
      {"angles of other channels than the format's",
       [](Compress& p) {
         p.widen(512);
         p.params.cache = p.quantized.dsv4();
         p.params.cos_sin = contiguous(p.wide_angles.data(), DType::kF32, {7, 32});
       },
       "compress: cos_sin: expected 64 rotary channels, those of fp8_dsv4, got 32"},
      {"angles for a format without rotary channels",
       [](Compress& p) {
         p.widen(512);
         p.params.cache = {.format = CacheFormat::kFP8Nope,
                           .kv = of(p.quantized.bytes, {kPages, kPageSize, 528}, DType::kU8)};
         p.params.cos_sin = contiguous(p.wide_angles.data(), DType::kF32, {7, 32});
       },
       "compress: cos_sin: expected 0 rotary channels, those of fp8_nope, got 32"},
      {"too few angles", [](Compress& p) { set_extent(p.params.cos_sin, 0, 6); },
       "compress: cos_sin: expected a row for position 6, got 6 rows, for request 1"},
  });
}

/// Validates and, by the reference, runs a problem.
void expect_accepted(Compress& p, const char* name) {
  SCOPED_TRACE(name);
  core::CompressArgs args;
  Device device;
  ASSERT_EQ(core::validate(p.params, args, device).message(), "");
  EXPECT_EQ(run(reference_context(), p.params).message(), "");
}

TEST(ValidateCompress, AcceptsEveryForm) {
  const std::pair<const char*, std::function<void(Compress&)>> forms[] = {
      {"as it is", [](Compress&) {}},
      {"no bias", [](Compress& p) { p.params.position_bias = {}; }},
      {"no norm", [](Compress& p) { p.params.norm_weight = {}; }},
      {"no epsilon", [](Compress& p) { p.params.norm_eps = 0.0F; }},
      {"no angles", [](Compress& p) { p.params.cos_sin = {}; }},
      {"latents alone",
       [](Compress& p) {
         p.params.slot_mapping = {};
         p.params.cos_sin = {};
         p.params.cache = {};
       }},
      {"parts of a cache", [](Compress& p) { p.params.cache = p.cache.parts(); }},
      {"quarter scales", [](Compress& p) { p.params.cache = p.quantized.fp8_quarters(); }},
      {"two halves", [](Compress& p) { p.use_overlap(); }},
      {"tokens that are groups",
       [](Compress& p) {
         p.use_ratio_1();
         p.params.cos_sin = {};
       }},
      {"the indexer", [](Compress& p) { p.use_indexer(); }},
      {"the indexer, all of its channels turned",
       [](Compress& p) {
         p.use_indexer();
         p.params.cos_sin = contiguous(p.wide_angles.data(), DType::kF32, {7, 128});
         p.params.interleaved = false;
       }},
      {"a format that ends with rotary channels",
       [](Compress& p) {
         p.widen(512);
         p.params.cache = {.format = CacheFormat::kFP8DsV41,
                           .kv = of(p.quantized.bytes, {kPages, kPageSize * 528}, DType::kU8),
                           .page_size = kPageSize};
         p.params.cos_sin = contiguous(p.wide_angles.data(), DType::kF32, {7, 64});
       }},
      {"types of their own",
       [](Compress& p) {
         p.params.kv.dtype = p.params.score.dtype = DType::kF16;
         p.params.norm_weight.dtype = DType::kF16;
       }},
      {"no column that nobody needs",
       [](Compress& p) {
         p.state_table = {0, 0, 0, 1};
         p.params.state_table = contiguous(p.state_table.data(), DType::kI32, {2, 1});
         set_stride(p.params.state_table, 0, 3);
       }},
  };
  for (const auto& [name, change] : forms) {
    Compress p;
    change(p);
    expect_accepted(p, name);
  }
}

TEST(ValidateCompress, AcceptsStridedTensors) {
  Compress p;
  // kv and score are the halves of a row, as one projection gives them.
  std::vector<uint16_t> rows(5 * 2 * Compress::kWidth);
  p.params.kv = of(rows, {5, Compress::kWidth});
  p.params.score = of(rows, {5, Compress::kWidth});
  p.params.score.data = rows.data() + Compress::kWidth;
  for (TensorView* view : {&p.params.kv, &p.params.score}) set_stride(*view, 0, 2 * Compress::kWidth);
  set_stride(p.params.position_bias, 0, 0);
  // A state of 3 blocks, each with a block of another layer behind it.
  set_extent(p.params.state, 0, 3);
  set_stride(p.params.state, 0, 4 * 2 * Compress::kWidth);
  p.state_table = {-1, 0, 1, 2, -1, -1};
  std::vector<uint16_t> latent(5 * 13);
  p.params.latent = of(latent, {5, Compress::kWidth});
  set_stride(p.params.latent, 0, 13);
  core::CompressArgs args;
  Device device;
  ASSERT_EQ(core::validate(p.params, args, device).message(), "");
  EXPECT_EQ(args.kv_stride_token, 2 * Compress::kWidth);
  EXPECT_EQ(args.score_stride_token, 2 * Compress::kWidth);
  EXPECT_EQ(args.position_bias_stride_position, 0);
  EXPECT_EQ(args.state_stride_block, 4 * 2 * Compress::kWidth);
  EXPECT_EQ(args.state_stride_row, 2 * Compress::kWidth);
  EXPECT_EQ(args.latent_stride_token, 13);
  EXPECT_EQ(args.capacity(), 6);
  EXPECT_EQ(args.to, core::CompressArgs::To::kCache);
  EXPECT_EQ(args.d_rotary, kKpe);
  EXPECT_EQ(args.max_positions, 7);
  EXPECT_EQ(args.first_position(1), 6);
  EXPECT_EQ(run(reference_context(), p.params).message(), "");
}

TEST(ValidateCompress, RequestsOfAnyLength) {
  // Three tokens stand before the beginning, and the request is of one token: nothing ends.
  Compress p;
  p.kv_len = {5, 1};
  p.state_table = {99, 1, 2, 3, 99, 99};
  p.slots = {-1, Compress::kGarbage, Compress::kGarbage, Compress::kGarbage, Compress::kGarbage};
  expect_accepted(p, "kv_len below the number of tokens");
  EXPECT_NE(p.latent[0], kSentinel);  // of token 0, whose slot is negative
  EXPECT_TRUE(std::all_of(p.latent.begin() + Compress::kWidth, p.latent.end(),
                          [](uint16_t bits) { return bits == kSentinel; }));
  EXPECT_TRUE(all_sentinels({&p.cache.data}));

  Compress none;
  none.qo_indptr = {0, 0, 5};
  none.kv_len = {1 << 30, 5};  // the first has nothing new: no entry of its row is used
  none.state_table = {99, INT32_MAX, 99, 0, 1, -7};
  none.slots = {Compress::kGarbage, 1, Compress::kGarbage, 2, Compress::kGarbage};
  expect_accepted(none, "a request without tokens");

  Compress empty;
  for (TensorView* view : {&empty.params.kv, &empty.params.score, &empty.params.latent, &empty.params.slot_mapping})
    set_extent(*view, 0, 0);
  empty.qo_indptr = {0, 0, 0};
  expect_accepted(empty, "no token");
  EXPECT_TRUE(empty.untouched());
}

TEST(ValidateCompress, NegativeEntriesKeepNothing) {
  Compress p;
  std::fill(p.state_table.begin(), p.state_table.end(), INT32_MIN);
  expect_accepted(p, "no block");
  EXPECT_TRUE(all_sentinels({&p.state}));
  EXPECT_NE(p.latent[0], kSentinel);  // made of its last token alone
}

}  // namespace
}  // namespace mla::test
