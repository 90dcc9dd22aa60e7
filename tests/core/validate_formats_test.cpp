// SPDX-License-Identifier: Apache-2.0
// Tests quantized caches at the border: what each format needs, and where its planes lie.
#include <cmath>
#include <limits>

#include "core/validate.h"
#include "formats.h"

namespace mla::test {
namespace {

core::DecodeArgs accepted(const DecodeParams& params) {
  core::DecodeArgs args;
  Device device;
  const Status status = core::validate(params, core::Scope::kAll, args, device);
  EXPECT_EQ(status.message(), "");
  return args;
}

int64_t offset(const core::Plane& plane, const void* base) { return plane.base - static_cast<const std::byte*>(base); }

TEST(ValidateFormats, Fp8RefusesBadScales) {
  expect_refused(std::vector<BadCase<Fp8Decode>>{
      {"no scale", [](Fp8Decode& p) { p.params.cache.ckv_scale = {}; },
       "decode: cache.ckv_scale: expected a tensor, got none"},
      {"two scales", [](Fp8Decode& p) { set_extent(p.params.cache.ckv_scale, 0, 2); },
       "decode: cache.ckv_scale: expected shape [1], got [2]"},
      {"scale in bf16", [](Fp8Decode& p) { p.params.cache.ckv_scale.dtype = DType::kBF16; },
       "decode: cache.ckv_scale: expected f32, got bf16"},
      {"zero scale", [](Fp8Decode& p) { p.quantized.scale[0] = 0.0F; },
       "decode: cache.ckv_scale: expected a finite number above 0, got 0", false},
      {"negative scale", [](Fp8Decode& p) { p.quantized.scale[0] = -1.0F; },
       "decode: cache.ckv_scale: expected a finite number above 0, got -1", false},
      {"infinite scale", [](Fp8Decode& p) { p.quantized.scale[0] = INFINITY; },
       "decode: cache.ckv_scale: expected a finite number above 0, got inf", false},
      {"NaN as kpe_scale",
       [](Fp8Decode& p) {
         p.use_two_tensors();
         p.params.cache = p.quantized.fp8_parts();
         p.quantized.kpe_scale[0] = NAN;
       },
       "decode: cache.kpe_scale: expected a finite number above 0, got nan", false},
      {"kpe_scale of another shape",
       [](Fp8Decode& p) {
         p.params.cache.kpe_scale = p.params.cache.ckv_scale;
         p.params.cache.kpe_scale.ndim = 0;
       },
       "decode: cache.kpe_scale: expected shape [1], got []"},
      {"scales of other pages",
       [](Fp8Decode& p) {
         p.params.cache = p.quantized.fp8_quarters();
         set_extent(p.params.cache.ckv_scale, 0, 7);
       },
       "decode: cache.ckv_scale: expected shape [num_pages = 8, page_size = 4, 4], got [7, 4, 4]"},
      {"scales of eighths",
       [](Fp8Decode& p) {
         p.params.cache = p.quantized.fp8_quarters();
         p.params.cache.ckv_scale = contiguous(p.quantized.quarter_scales.data(), DType::kF32, {8, 2, 8});
       },
       "decode: cache.ckv_scale: expected shape [num_pages = 8, page_size = 4, 4], got [8, 2, 8]"},
      {"scales of quarters that lie apart",
       [](Fp8Decode& p) {
         p.params.cache = p.quantized.fp8_quarters();
         p.params.cache.ckv_scale.stride[2] = 2;
       },
       "decode: cache.ckv_scale: expected stride 1 in the innermost dimension, got 2"},
      {"scales of quarters, none of kpe",
       [](Fp8Decode& p) {
         p.params.cache = p.quantized.fp8_quarters();
         p.params.cache.kpe_scale = {};
       },
       "decode: cache.kpe_scale: expected a tensor, since cache.ckv_scale has shape [8, 4, 4], got none"},
      {"quarters of 6 channels",
       [](Fp8Decode& p) {
         p.params.cache.ckv_scale = contiguous(p.quantized.quarter_scales.data(), DType::kF32, {8, 4, 4});
         p.params.o = of(p.o, {3, kHeads, 6});
       },
       "decode: cache.ckv_scale: expected shape [1], since kv_lora_rank 6 is not a multiple of 4, got [8, 4, 4]"},
      {"bf16 rows", [](Fp8Decode& p) { p.params.cache.kv = p.cache.whole().kv; },
       "decode: cache.kv: expected e4m3, got bf16"},
      {"scales for bf16",
       [](Fp8Decode& p) {
         p.params.cache = p.cache.whole();
         p.params.cache.ckv_scale = p.quantized.one(p.quantized.scale);
       },
       "decode: cache.ckv_scale: expected none for bf16, got a tensor"},
      {"a page size of its own", [](Fp8Decode& p) { p.params.cache.page_size = 64; },
       "decode: cache.page_size: expected 0 or 4, as the shape says, got 64"},
  });
}

TEST(ValidateFormats, Fp8WithoutKpeTakesNoScaleOfIt) {
  Fp8Decode p;
  p.params.q = of(p.q, {3, kHeads, kCkv});
  p.params.cache = p.quantized.fp8_parts();
  p.params.cache.kpe = {};
  core::DecodeArgs args;
  Device device;
  EXPECT_EQ(core::validate(p.params, core::Scope::kAll, args, device).message(),
            "decode: cache.kpe_scale: expected none, since qk_rope_head_dim is 0, got a tensor");
  p.params.cache.kpe_scale = {};
  args = accepted(p.params);
  EXPECT_EQ(args.cache.kpe_scale, nullptr);
  EXPECT_EQ(args.cache.d_kpe, 0);
}

TEST(ValidateFormats, Fp8Planes) {
  Fp8Decode p;
  core::Cache cache = accepted(p.params).cache;
  EXPECT_EQ(offset(cache.ckv, p.quantized.codes.data()), 0);
  EXPECT_EQ(offset(cache.kpe, p.quantized.codes.data()), kCkv);
  EXPECT_EQ(cache.ckv.stride_token, kCkv + kKpe);
  EXPECT_EQ(cache.kpe.stride_page, kPageSize * (kCkv + kKpe));
  EXPECT_EQ(offset(cache.scales, p.quantized.scale.data()), 0);
  EXPECT_EQ(cache.scales.stride_page, 0);
  EXPECT_EQ(cache.scales.stride_token, 0);
  EXPECT_EQ(cache.num_scales, 1);
  EXPECT_FALSE(cache.writes_scales);
  EXPECT_EQ(cache.kpe_scale, p.quantized.scale.data());  // that of ckv, if none is given

  p.params.cache = p.quantized.fp8_quarters();
  p.params.cache.power_of_two_scales = false;
  cache = accepted(p.params).cache;
  EXPECT_EQ(cache.scales.stride_page, kPageSize * 16);
  EXPECT_EQ(cache.scales.stride_token, 16);
  EXPECT_EQ(cache.num_scales, 4);
  EXPECT_TRUE(cache.writes_scales);
  EXPECT_FALSE(cache.power_of_two_scales);
  EXPECT_EQ(cache.kpe_scale, p.quantized.kpe_scale.data());

  p.quantized.quarter_scales.resize(kPages * 2 * kPageSize * 5);
  p.params.cache.ckv_scale.data = p.quantized.quarter_scales.data();
  p.params.cache.ckv_scale.stride[0] = 2 * kPageSize * 5;
  p.params.cache.ckv_scale.stride[1] = 5;
  cache = accepted(p.params).cache;
  EXPECT_EQ(cache.scales.stride_page, 2 * kPageSize * 20);
  EXPECT_EQ(cache.scales.stride_token, 20);
}

TEST(ValidateFormats, DsMlaRefusesBadInput) {
  expect_refused(std::vector<BadCase<WideDecode>>{
      {"rows of 576 bytes", [](WideDecode& p) { set_extent(p.params.cache.kv, 2, 576); },
       "decode: cache.kv: expected shape [num_pages, page_size, row bytes = 656], got [8, 4, 576]"},
      {"not bytes", [](WideDecode& p) { p.params.cache.kv.dtype = DType::kE4M3; },
       "decode: cache.kv: expected uint8, got e4m3"},
      {"two tensors", [](WideDecode& p) { p.params.cache.kpe = p.params.cache.kv; },
       "decode: cache.kpe: expected cache.kv alone in fp8_ds_mla, got a tensor"},
      {"scales of its own", [](WideDecode& p) { p.params.cache.ckv_scale = p.quantized.one(p.quantized.scale); },
       "decode: cache.ckv_scale: expected none for fp8_ds_mla, got a tensor"},
      {"odd address",
       [](WideDecode& p) { p.params.cache.kv.data = reinterpret_cast<char*>(p.quantized.bytes.data()) + 1; },
       "decode: cache.kv: expected an address that is a multiple of 2 bytes, got an odd one"},
      {"odd stride", [](WideDecode& p) { set_stride(p.params.cache.kv, 1, 657); },
       "decode: cache.kv: expected strides that are multiples of 2 bytes, got 657 in dimension 1"},
      {"queries of other widths",
       [](WideDecode& p) {
         p.params.q = of(p.wide_q, {3, kHeads, 512});
       },
       "decode: q: expected shape [T, H, d_qk = 576], got [3, 2, 512]"},
      {"q_nope of other widths",
       [](WideDecode& p) {
         p.params.q = {};
         p.params.q_nope = of(p.wide_q, {3, kHeads, 448});
         p.params.q_pe = of(p.wide_q, {3, kHeads, 64});
       },
       "decode: q_nope: expected shape [T, H, kv_lora_rank = 512], got [3, 2, 448]"},
      {"o of the whole row",
       [](WideDecode& p) {
         p.params.o = of(p.wide_q, {3, kHeads, 576});
       },
       "decode: o: expected shape [T = 3, H = 2, kv_lora_rank = 512], got [3, 2, 576]"},
  });
}

TEST(ValidateFormats, DsMlaPlanes) {
  WideDecode p;
  set_stride(p.params.cache.kv, 0, 4096);  // pages of interleaved layers
  set_extent(p.params.cache.kv, 0, 5);
  const core::DecodeArgs args = accepted(p.params);
  EXPECT_EQ(args.d_qk, 576);
  EXPECT_EQ(args.d_v, 512);
  const core::Cache& cache = args.cache;
  for (const core::Plane& plane : {cache.ckv, cache.kpe, cache.scales}) {
    EXPECT_EQ(plane.stride_page, 4096);
    EXPECT_EQ(plane.stride_token, 656);
  }
  EXPECT_EQ(offset(cache.ckv, p.quantized.bytes.data()), 0);
  EXPECT_EQ(offset(cache.scales, p.quantized.bytes.data()), 512);
  EXPECT_EQ(offset(cache.kpe, p.quantized.bytes.data()), 528);
  EXPECT_EQ(cache.num_scales, 4);
  EXPECT_TRUE(cache.writes_scales);
  EXPECT_EQ(cache.kpe_scale, nullptr);
}

struct FooterDecode : WideDecode {
  FooterDecode() { use_dsv4(); }
};

TEST(ValidateFormats, DsV4RefusesBadInput) {
  expect_refused(std::vector<BadCase<FooterDecode>>{
      {"no page size", [](FooterDecode& p) { p.params.cache.page_size = 0; },
       "decode: cache.page_size: expected at least 1, got 0"},
      {"page size beyond any", [](FooterDecode& p) { p.params.cache.page_size = INT32_MAX; },
       "decode: cache.page_size: expected at most 1073741824, got 2147483647"},
      {"pages without a footer", [](FooterDecode& p) { set_extent(p.params.cache.kv, 1, 4 * 576); },
       "decode: cache.kv: expected pages of at least 2336 bytes (4 tokens), got 2304"},
      {"stride without a footer", [](FooterDecode& p) { set_stride(p.params.cache.kv, 0, 4 * 576); },
       "decode: cache.kv: expected a page stride of at least 2336 bytes (4 tokens), got 2304"},
      {"odd page stride",
       [](FooterDecode& p) {
         set_extent(p.params.cache.kv, 0, 7);
         set_stride(p.params.cache.kv, 0, 2337);
       },
       "decode: cache.kv: expected strides that are multiples of 2 bytes, got 2337 in dimension 0"},
      {"tokens as a dimension",
       [](FooterDecode& p) {
         p.params.cache.kv = of(p.quantized.bytes, {8, 4, 584}, DType::kU8);
       },
       "decode: cache.kv: expected shape [num_pages, page bytes], got [8, 4, 584]"},
      {"queries of V3.2",
       [](FooterDecode& p) {
         p.params.q = of(p.wide_q, {3, kHeads, 576});
       },
       "decode: q: expected shape [T, H, d_qk = 512], got [3, 2, 576]"},
      {"o of the latent part",
       [](FooterDecode& p) {
         p.params.o = of(p.wide_o, {3, kHeads, 448});
       },
       "decode: o: expected shape [T = 3, H = 2, d_v = 512], got [3, 2, 448]"},
      {"two tensors", [](FooterDecode& p) { p.params.cache.ckv = p.params.cache.kv; },
       "decode: cache.ckv: expected cache.kv alone in fp8_dsv4, got a tensor"},
  });
}

TEST(ValidateFormats, DsV4Planes) {
  FooterDecode p;
  set_extent(p.params.cache.kv, 0, 5);
  set_stride(p.params.cache.kv, 0, 2880);  // padded to a multiple of 576
  p.params.q = {};
  p.params.q_nope = of(p.wide_q, {3, kHeads, 448});
  p.params.q_pe = of(p.wide_q, {3, kHeads, 64});
  p.params.cache.power_of_two_scales = false;  // UE8M0 knows no others
  const core::DecodeArgs args = accepted(p.params);
  EXPECT_EQ(args.d_qk, 512);
  EXPECT_EQ(args.d_v, 512);
  const core::Cache& cache = args.cache;
  EXPECT_EQ(cache.d_ckv, 448);
  EXPECT_EQ(cache.d_kpe, 64);
  EXPECT_EQ(cache.page_size, 4);
  EXPECT_EQ(cache.num_pages, 5);
  EXPECT_EQ(cache.ckv.stride_page, 2880);
  EXPECT_EQ(cache.ckv.stride_token, 576);
  EXPECT_EQ(cache.kpe.stride_token, 576);
  EXPECT_EQ(offset(cache.kpe, p.quantized.bytes.data()), 448);
  EXPECT_EQ(offset(cache.scales, p.quantized.bytes.data()), 4 * 576);
  EXPECT_EQ(cache.scales.stride_page, 2880);
  EXPECT_EQ(cache.scales.stride_token, 8);
  EXPECT_EQ(cache.num_scales, 7);
  EXPECT_TRUE(cache.writes_scales);
  EXPECT_TRUE(cache.power_of_two_scales);
}

TEST(ValidateFormats, OuterScalesOfNvFP4) {
  WideDecode p;
  std::vector<uint8_t> rows(8 * 4 * 432);
  float outer = 0.0037F;
  p.params.cache = {.format = CacheFormat::kNvFP4DsMla, .kv = contiguous(rows.data(), DType::kU8, {8, 4, 432})};
  EXPECT_EQ(accepted(p.params).cache.outer_scale, nullptr);
  p.params.cache.ckv_scale = contiguous(&outer, DType::kF32, {1});
  const core::Cache cache = accepted(p.params).cache;
  EXPECT_EQ(cache.outer_scale, &outer);
  EXPECT_EQ(cache.num_scales, 32);
  EXPECT_EQ(cache.scale_bytes, 48);
  EXPECT_EQ(cache.kpe_scale, nullptr);
  EXPECT_FALSE(cache.writes_kpe_scale());
  const auto refusal = [&] {
    core::DecodeArgs args;
    Device device;
    return core::validate(p.params, core::Scope::kAll, args, device).message();
  };
  outer = INFINITY;
  EXPECT_EQ(refusal(), "decode: cache.ckv_scale: expected a finite number above 0, got inf");
  outer = 0.0037F;
  p.params.cache.ckv_scale = contiguous(&outer, DType::kF32, {1, 1, 1});
  EXPECT_EQ(refusal(), "decode: cache.ckv_scale: expected shape [1], got [1, 1, 1]");
  p.params.cache.ckv_scale = {};
  p.params.cache.kpe_scale = contiguous(&outer, DType::kF32, {1});
  EXPECT_EQ(refusal(), "decode: cache.kpe_scale: expected none for nvfp4_ds_mla, got a tensor");
  p.params.cache = {.format = CacheFormat::kNvFP4DsMla368, .kv = contiguous(rows.data(), DType::kU8, {8, 4, 368})};
  const core::Cache compact = accepted(p.params).cache;
  EXPECT_TRUE(compact.writes_kpe_scale());
  EXPECT_EQ(offset(compact.kpe_scales(), rows.data()), 288);
  EXPECT_EQ(offset(compact.kpe, rows.data()), 304);
  p.params.cache.kv.shape[2] = 432;
  p.params.cache.kv.stride = {4 * 432, 432, 1};
  EXPECT_EQ(refusal(), "decode: cache.kv: expected shape [num_pages, page_size, row bytes = 368], got [8, 4, 432]");
}

TEST(ValidateFormats, NoDataIsNeededToPlan) {
  for (const bool footer : {false, true}) {
    WideDecode p;
    if (footer) p.use_dsv4();
    p.params.cache.kv.data = nullptr;
    core::DecodeArgs args;
    Device device;
    EXPECT_EQ(core::validate(p.params, core::Scope::kShapesAndLengths, args, device).message(), "");
    EXPECT_EQ(args.cache.kpe.base, nullptr);
    EXPECT_EQ(args.cache.scales.base, nullptr);
  }
  Fp8Decode p;
  p.params.cache.ckv_scale.data = nullptr;
  core::DecodeArgs args;
  Device device;
  EXPECT_EQ(core::validate(p.params, core::Scope::kShapesAndLengths, args, device).message(), "");
  EXPECT_EQ(core::validate(p.params, core::Scope::kAll, args, device).message(),
            "decode: cache.ckv_scale: expected data, got a null pointer");
}

}  // namespace
}  // namespace mla::test
