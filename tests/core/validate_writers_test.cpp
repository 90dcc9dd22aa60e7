// SPDX-License-Identifier: Apache-2.0
// Tests how append into quantized caches, append_rope and copy_pages are validated.
#include "core/validate.h"
#include "writer_problems.h"

namespace mla::test {
namespace {

TEST(ValidateAppend, RefusesBadQuantizedCaches) {
  expect_refused_directly(std::vector<BadCase<QuantizingAppend>>{
      {"rows of V4",
       [](QuantizingAppend& p) {
         p.params.kv = of(p.rows, {3, 512});
       },
       "append: kv: expected shape [T, d_qk = 576], got [3, 512]"},
      {"e4m3 rows", [](QuantizingAppend& p) { p.params.kv.dtype = DType::kE4M3; },
       "append: kv: expected bf16, f16 or f32, got e4m3"},
      {"overlapping rows of the cache", [](QuantizingAppend& p) { set_stride(p.params.cache.kv, 1, 654); },
       "append: cache.kv: expected an output whose elements do not overlap, got shape [8, 4, 656] with stride 654 in "
       "dimension 1"},
      {"slot beyond the footer pages",
       [](QuantizingAppend& p) {
         p.params.kv = of(p.rows, {3, 512});
         p.params.cache = p.quantized.dsv4();
         p.slots[1] = 32;
       },
       "append: slot_mapping: expected at most 31 (the last slot of the cache), got 32 for token 1"},
      {"zero scale",
       [](QuantizingAppend& p) {
         p.params.kv = of(p.rows, {3, kCkv + kKpe});
         p.params.cache = p.quantized.fp8();
         p.quantized.scale[0] = 0.0F;
       },
       "append: cache.ckv_scale: expected a finite number above 0, got 0"},
      {"quarters of undivided rows",
       [](QuantizingAppend& p) {
         p.params.kv = of(p.rows, {3, kCkv + kKpe});
         p.params.cache = p.quantized.fp8();
         p.params.cache.ckv_scale = p.quantized.fp8_quarters().ckv_scale;
       },
       "append: cache.ckv_scale: expected shape [1], since no tensor says where kpe begins in a row of 12, got [8, 4, "
       "4]"},
      {"kpe_scale of undivided rows",
       [](QuantizingAppend& p) {
         p.params.kv = of(p.rows, {3, kCkv + kKpe});
         p.params.cache = p.quantized.fp8();
         p.params.cache.kpe_scale = p.params.cache.ckv_scale;
       },
       "append: cache.kpe_scale: expected none, since no tensor says where kpe begins in a row of 12, got a tensor"},
      {"overlapping scales",
       [](QuantizingAppend& p) {
         p.params.kv = of(p.rows, {3, kCkv + kKpe});
         p.params.cache = p.quantized.fp8_quarters();
         set_stride(p.params.cache.ckv_scale, 1, 0);
       },
       "append: cache.ckv_scale: expected an output whose elements do not overlap, got shape [8, 4, 4] with stride 0 "
       "in dimension 1"},
  });
}

TEST(ValidateAppendRope, RefusesBadInput) {
  expect_refused_directly(std::vector<BadCase<AppendRope>>{
      {"no q_pe", [](AppendRope& p) { p.params.q_pe = {}; }, "append_rope: q_pe: expected a tensor, got none"},
      {"no q_out", [](AppendRope& p) { p.params.q_out = {}; }, "append_rope: q_out: expected a tensor, got none"},
      {"q_pe alone",
       [](AppendRope& p) {
         p.params.q_nope = {};
         p.params.q_out = {};
       },
       "append_rope: q_pe: expected none, since q_nope is not given, got a tensor"},
      {"q_out alone",
       [](AppendRope& p) {
         p.params.q_nope = {};
         p.params.q_pe = {};
       },
       "append_rope: q_out: expected none, since q_nope is not given, got a tensor"},
      {"queries of two types", [](AppendRope& p) { p.params.q_pe.dtype = DType::kF16; },
       "append_rope: q_pe: expected bf16, got f16"},
      {"q_out of another width",
       [](AppendRope& p) {
         p.params.q_out = of(p.q_out, {3, kHeads, kCkv});
       },
       "append_rope: q_out: expected shape [T = 3, H = 2, d_qk = 12], got [3, 2, 8]"},
      {"e4m3 q_out without a scale", [](AppendRope& p) { p.params.q_out.dtype = DType::kE4M3; },
       "append_rope: q_scale: expected a tensor, since q_out is e4m3, got none"},
      {"bf16 q_out with a scale",
       [](AppendRope& p) { p.params.q_scale = contiguous(p.scale.data(), DType::kF32, {1}); },
       "append_rope: q_scale: expected none, since q_out is bf16, got a tensor"},
      {"negative q_scale",
       [](AppendRope& p) {
         p.params.q_out.dtype = DType::kE4M3;
         p.params.q_scale = contiguous(p.scale.data(), DType::kF32, {1});
         p.scale[0] = -2.0F;
       },
       "append_rope: q_scale: expected a finite number above 0, got -2"},
      {"no kpe", [](AppendRope& p) { p.params.kpe = {}; }, "append_rope: kpe: expected a tensor, got none"},
      {"keys of two types", [](AppendRope& p) { p.params.kpe.dtype = DType::kF16; },
       "append_rope: kpe: expected bf16, got f16"},
      {"keys of other tokens", [](AppendRope& p) { set_extent(p.params.ckv, 0, 2); },
       "append_rope: ckv: expected shape [T = 3, kv_lora_rank = 8], got [2, 8]"},
      {"odd width",
       [](AppendRope& p) {
         set_extent(p.params.q_pe, 2, 3);
         set_extent(p.params.kpe, 1, 3);
         set_extent(p.params.q_out, 2, 11);
       },
       "append_rope: qk_rope_head_dim: expected an even number, got 3"},
      {"nothing to rotate",
       [](AppendRope& p) {
         set_extent(p.params.q_pe, 2, 0);
         set_extent(p.params.kpe, 1, 0);
         set_extent(p.params.q_out, 2, 8);
       },
       "append_rope: qk_rope_head_dim: expected at least 2, got 0"},
      {"table of half the width", [](AppendRope& p) { set_extent(p.params.cos_sin, 1, 2); },
       "append_rope: cos_sin: expected shape [max_positions, qk_rope_head_dim = 4], got [10, 2]"},
      {"position beyond the table", [](AppendRope& p) { p.positions[1] = 10; },
       "append_rope: positions: expected 0 to 9 (the rows of cos_sin), got 10 for token 1"},
      {"negative position", [](AppendRope& p) { p.positions[2] = -1; },
       "append_rope: positions: expected 0 to 9 (the rows of cos_sin), got -1 for token 2"},
      {"positions in i32", [](AppendRope& p) { p.params.positions.dtype = DType::kI32; },
       "append_rope: positions: expected int64, got int32"},
      {"slot beyond the cache", [](AppendRope& p) { p.slots[2] = 32; },
       "append_rope: slot_mapping: expected at most 31 (the last slot of the cache), got 32 for token 2"},
      {"cache of another width", [](AppendRope& p) { set_extent(p.params.cache.kv, 2, 11); },
       "append_rope: cache.kv: expected shape [num_pages, page_size, d_qk = 12], got [8, 4, 11]"},
  });
}

TEST(ValidateAppendRope, RowsThatEndWithTheRotaryChannels) {
  // Queries and keys come as 448 + 64 channels, a row of the cache is 512.
  AppendRope p;
  std::vector<uint16_t> wide(3 * kHeads * 512), out(wide);
  std::vector<float> angles(10 * 64);
  std::vector<uint8_t> page(4 * 528);
  p.params.q_nope = of(wide, {3, kHeads, 448});
  p.params.q_pe = of(wide, {3, kHeads, 64});
  p.params.q_out = of(out, {3, kHeads, 512});
  p.params.ckv = of(wide, {3, 448});
  p.params.kpe = of(wide, {3, 64});
  p.params.cos_sin = contiguous(angles.data(), DType::kF32, {10, 64});
  p.params.cache = {
      .format = CacheFormat::kFP8DsV41, .kv = contiguous(page.data(), DType::kU8, {1, 4 * 528}), .page_size = 4};
  p.slots = {0, 3, -1};
  core::AppendRopeArgs args;
  Device device;
  ASSERT_EQ(core::validate(p.params, args, device).message(), "");
  EXPECT_EQ(args.cache.d_ckv, 512);
  EXPECT_EQ(args.cache.d_kpe, 0);
  EXPECT_EQ(args.cache.kpe.base, nullptr);
  EXPECT_EQ(args.cache.d_plain(), 448);
  EXPECT_EQ(args.cache.d_rotary(), 64);
  p.params.ckv = of(wide, {3, 512});
  EXPECT_EQ(core::validate(p.params, args, device).message(),
            "append_rope: ckv: expected shape [T = 3, kv_lora_rank = 448], got [3, 512]");
}

TEST(ValidateAppendRope, RowsWithoutRotaryChannels) {
  AppendRope p;
  std::vector<uint16_t> wide(3 * kHeads * 512), out(wide);
  std::vector<uint8_t> page(4 * 528);
  p.params.q_nope = of(wide, {3, kHeads, 512});
  p.params.q_out = of(out, {3, kHeads, 512});
  p.params.ckv = of(wide, {3, 512});
  p.params.cache = {.format = CacheFormat::kFP8Nope, .kv = contiguous(page.data(), DType::kU8, {1, 4, 528})};
  p.slots = {0, 3, -1};
  core::AppendRopeArgs args;
  Device device;
  const auto expect_none = [&](std::string_view field, TensorView AppendRopeParams::*tensor) {
    EXPECT_EQ(
        core::validate(p.params, args, device).message(),
        fmt::format("append_rope: {}: expected none, since the rows of cache.format have no rotary channels, got a "
                    "tensor",
                    field));
    p.params.*tensor = {};
  };
  expect_none("q_pe", &AppendRopeParams::q_pe);
  expect_none("kpe", &AppendRopeParams::kpe);
  expect_none("cos_sin", &AppendRopeParams::cos_sin);
  expect_none("positions", &AppendRopeParams::positions);
  ASSERT_EQ(core::validate(p.params, args, device).message(), "");
  EXPECT_EQ(args.cache.d_rotary(), 0);
  EXPECT_EQ(args.cache.d_plain(), 512);
  EXPECT_EQ(args.num_heads, kHeads);
  EXPECT_EQ(args.angles(2), nullptr);

  // Rows of other formats have such channels if the caller gives anything of them.
  AppendRope other;
  other.params.q_pe = other.params.kpe = other.params.positions = {};
  EXPECT_EQ(core::validate(other.params, args, device).message(), "append_rope: q_pe: expected a tensor, got none");
  other.params.cos_sin = {};
  EXPECT_EQ(core::validate(other.params, args, device).message(),
            "append_rope: q_out: expected shape [T = 3, H = 2, d_qk = 8], got [3, 2, 12]");
}

TEST(ValidateAppendRope, RefusesBadNorms) {
  static std::vector<uint16_t> weight(4097 + 12);
  expect_refused_directly(std::vector<BadCase<AppendRope>>{
      {"a norm of no queries",
       [](AppendRope& p) {
         p.params.q_nope = p.params.q_pe = p.params.q_out = {};
         p.params.q_norm = true;
       },
       "append_rope: q_norm: expected q_nope with it"},
      {"a weight of no norm", [](AppendRope& p) { p.params.q_norm_weight = of(weight, {12}); },
       "append_rope: q_norm_weight: expected none, since q_norm is not set, got a tensor"},
      {"a weight of the latent part",
       [](AppendRope& p) {
         p.params.q_norm = true;
         p.params.q_norm_weight = of(weight, {8});
       },
       "append_rope: q_norm_weight: expected shape [kv_lora_rank + qk_rope_head_dim = 12], got [8]"},
      {"a weight of another width", [](AppendRope& p) { p.params.norm_weight = of(weight, {10}); },
       "append_rope: norm_weight: expected shape [kv_lora_rank = 8] or [kv_lora_rank + qk_rope_head_dim = 12], got "
       "[10]"},
      {"an integer weight",
       [](AppendRope& p) {
         p.params.norm_weight = of(weight, {8});
         p.params.norm_weight.dtype = DType::kI32;
       },
       "append_rope: norm_weight: expected bf16, f16 or f32, got int32"},
      {"a negative epsilon", [](AppendRope& p) { p.params.norm_eps = -1; },
       "append_rope: norm_eps: expected a finite number of at least 0, got -1"}});
}

TEST(ValidateAppendRope, NormsOfWideRows) {
  // Rows of more channels than a norm takes are refused where they are normalized, and taken as they are otherwise.
  std::vector<uint16_t> rows(3 * 4096), cache(4 * (4096 + 4));
  AppendRope p;
  p.params.q_nope = p.params.q_pe = p.params.q_out = {};
  p.params.ckv = of(rows, {3, 4096});
  p.params.cache = {.kv = of(cache, {1, 4, 4096 + 4})};
  p.slots = {0, 3, -1};
  core::AppendRopeArgs args;
  Device device;
  EXPECT_EQ(core::validate(p.params, args, device).message(), "");
  EXPECT_FALSE(args.normalizes());
  p.params.norm_weight = of(rows, {4096});
  EXPECT_EQ(core::validate(p.params, args, device).message(),
            "append_rope: norm_weight: expected rows of at most 4096 channels with a norm, got 4100");
}

TEST(ValidateFinishOutput, RefusesBadInput) {
  expect_refused_directly(std::vector<BadCase<FinishOutput>>{
      {"no output of attention", [](FinishOutput& p) { p.params.o = {}; },
       "finish_output: o: expected a tensor, got none"},
      {"quantized", [](FinishOutput& p) { p.params.o.dtype = DType::kE4M3; },
       "finish_output: o: expected bf16, f16 or f32, got e4m3"},
      {"positions alone", [](FinishOutput& p) { p.params.finish.cos_sin = {}; },
       "finish_output: finish.positions: expected none, since finish.cos_sin is not given, got a tensor"},
      {"no positions", [](FinishOutput& p) { p.params.finish.positions = {}; },
       "finish_output: finish.positions: expected a tensor, got none"},
      {"a position without angles", [](FinishOutput& p) { p.positions[2] = 10; },
       "finish_output: finish.positions: expected 0 to 9 (the rows of finish.cos_sin), got 10 for token 2"},
      {"an odd number of rotary channels", [](FinishOutput& p) { set_extent(p.params.finish.cos_sin, 1, 63); },
       "finish_output: finish.cos_sin: expected an even number of rotary channels from 2 to d_v = 128, got 63"},
      {"more rotary channels than channels",
       [](FinishOutput& p) {
         p.params.finish.cos_sin = contiguous(p.cos_sin.data(), DType::kF32, {4, 130});
       },
       "finish_output: finish.cos_sin: expected an even number of rotary channels from 2 to d_v = 128, got 130"},
      {"gates of other channels", [](FinishOutput& p) { set_extent(p.params.finish.gate, 2, 64); },
       "finish_output: finish.gate: expected shape [T = 3, H = 4, d_v = 128], got [3, 4, 64]"},
      {"groups of other heads",
       [](FinishOutput& p) {
         p.params.out = contiguous(p.out.data(), DType::kE4M3, {3, 3, 1, 128});
       },
       "finish_output: out: expected G * (H / G) = 4 heads, got 3 * 1"},
      {"an integer output", [](FinishOutput& p) { p.params.out.dtype = DType::kU8; },
       "finish_output: out: expected bf16, f16, f32 or e4m3, got uint8"},
      {"e4m3 without scales", [](FinishOutput& p) { p.params.finish.scale = {}; },
       "finish_output: finish.scale: expected a tensor, got none"},
      {"scales of what is not quantized",
       [](FinishOutput& p) {
         p.params.out = of(p.out, {3, 2, 2, 64});
         p.params.o = of(p.o, {3, 4, 64});
         p.params.finish.gate = {};
       },
       "finish_output: finish.scale: expected none, since out is not e4m3, got a tensor"},
      {"scales without groups",
       [](FinishOutput& p) {
         p.params.finish.scale = contiguous(p.scale.data(), DType::kI32, {3, 4, 1});
       },
       "finish_output: finish.scale: expected shape [T = 3, G, H / G, S / 4], got [3, 4, 1]"},
      {"scales of other groups",
       [](FinishOutput& p) {
         p.params.finish.scale = contiguous(p.scale.data(), DType::kI32, {3, 1, 4, 1});
       },
       "finish_output: finish.scale: expected 2 groups as in out, got 1"},
      {"scales of 16 channels",
       [](FinishOutput& p) {
         p.params.finish.scale = contiguous(p.scale.data(), DType::kU8, {3, 2, 2, 8});
       },
       "finish_output: finish.scale: expected a scale for each 32, 64 or 128 of 128 channels, got 8 scales"},
      {"exponents of any numbers", [](FinishOutput& p) { p.params.finish.power_of_two_scales = false; },
       "finish_output: finish.power_of_two_scales: expected true for scales of int32, got false"},
      {"outputs on the input", [](FinishOutput& p) { p.params.out.data = p.o.data(); },
       "finish_output: out: expected memory apart from that of o, got ranges with 1536 bytes in common"}});
}

TEST(ValidateAppendRope, KeysAlone) {
  AppendRope p;
  p.params.q_nope = {};
  p.params.q_pe = {};
  p.params.q_out = {};
  core::AppendRopeArgs args;
  Device device;
  ASSERT_EQ(core::validate(p.params, args, device).message(), "");
  EXPECT_EQ(args.num_heads, 0);
  EXPECT_EQ(args.num_tokens, 3);
  EXPECT_EQ(args.q_out, nullptr);
  EXPECT_EQ(args.cache.d_ckv, kCkv);
  EXPECT_EQ(args.cache.d_kpe, kKpe);
}

TEST(ValidateCopyPages, RefusesBadInput) {
  expect_refused_directly(std::vector<BadCase<CopyPages>>{
      {"page beyond the source", [](CopyPages& p) { p.from_pages[1] = 8; },
       "copy_pages: from_pages: expected page numbers from 0 to 7, got 8 as entry 1"},
      {"negative page of the destination", [](CopyPages& p) { p.to_pages[3] = -1; },
       "copy_pages: to_pages: expected page numbers from 0 to 5, got -1 as entry 3"},
      {"too few pages", [](CopyPages& p) { set_extent(p.params.to_pages, 0, 3); },
       "copy_pages: to_pages: expected pages for 8 tokens (2 pages of 4), got 3 pages of 2"},
      {"rows of another width",
       [](CopyPages& p) {
         p.params.to.kv = of(p.to, {6, 2, 11});
       },
       "copy_pages: to.kv: expected shape [num_pages, page_size, d_qk = 12], got [6, 2, 11]"},
      {"format of other widths", [](CopyPages& p) { p.params.to = p.quantized.ds_mla(); },
       "copy_pages: to.format: expected rows of 12 channels, got fp8_ds_mla with 576"},
      {"two packed formats",
       [](CopyPages& p) {
         p.params.from = p.quantized.dsv4();
         p.params.to = p.quantized.ds_mla();
       },
       "copy_pages: to.format: expected rows of 512 channels, got fp8_ds_mla with 576"},
      {"unknown format", [](CopyPages& p) { p.params.from.format = static_cast<CacheFormat>(77); },
       "copy_pages: from.format: expected a cache format, got unknown value 77"},
      {"no scale for the destination",
       [](CopyPages& p) {
         p.params.to = p.quantized.fp8();
         p.params.to.ckv_scale = {};
       },
       "copy_pages: to.ckv_scale: expected a tensor, got none"},
      {"no destination", [](CopyPages& p) { p.params.to = {}; },
       "copy_pages: to.kv: expected to.kv, or to.ckv and to.kpe, got none"},
      {"pages in i64", [](CopyPages& p) { p.params.from_pages.dtype = DType::kI64; },
       "copy_pages: from_pages: expected int32, got int64"},
  });
}

TEST(ValidateCopyPages, QuantizesAndSplits) {
  CopyPages p;
  p.params.to = p.quantized.fp8_quarters();
  set_extent(p.params.to_pages, 0, 2);
  core::CopyPagesArgs args;
  Device device;
  ASSERT_EQ(core::validate(p.params, args, device).message(), "");
  EXPECT_EQ(args.num_tokens(), 8);
  EXPECT_EQ(args.from.d_ckv, kCkv);  // the destination says where kpe begins
  EXPECT_EQ(args.from.d_kpe, kKpe);
  EXPECT_TRUE(args.to.writes_scales);
}

}  // namespace
}  // namespace mla::test
