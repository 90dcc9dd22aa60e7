// SPDX-License-Identifier: Apache-2.0
// Tests rows of every format: written (append), read (gather), and copied between formats (copy_pages), byte for byte.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "reference/reference.h"
#include "test_cache.h"
#include "trace.h"

namespace mla::reference {
namespace {

using Row = std::vector<float>;

/// Returns a row of which every group is of another nature: usual, large, small, zero, with infinities and NaN among
/// them.
Row random_row(int32_t d_qk, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> kind(0, 9), channel(0, d_qk - 1);
  Row row(static_cast<size_t>(d_qk));
  float size = 1;
  for (size_t c = 0; c < row.size(); ++c) {
    if (c % 64 == 0)
      size = std::vector<float>{1, 1, 1, 1, 30, 1000, 1e-3F, 1e-6F, 1e-9F, 0}[static_cast<size_t>(kind(random))];
    row[c] = size * normal(random);
  }
  if (kind(random) < 3)
    for (float value : {INFINITY, -INFINITY, NAN}) row[static_cast<size_t>(channel(random))] = value;
  return row;
}

/// Holds values as elements of a type, and what that type makes of them.
struct Elements {
  std::vector<uint16_t> narrow;
  std::vector<float> wide, meant;
  DType dtype;

  Elements(DType type, const Row& values) : wide(values), meant(values), dtype(type) {
    for (float& value : meant) {
      if (dtype == DType::kF32) continue;
      narrow.push_back(dtype == DType::kF16 ? f32_to_f16(value) : f32_to_bf16(value));
      value = dtype == DType::kF16 ? f16_to_f32(narrow.back()) : bf16_to_f32(narrow.back());
    }
  }
  const void* at(int64_t element) const {
    if (dtype == DType::kF32) return wide.data() + element;
    return narrow.data() + element;
  }
};

void append_rows(TestCache& cache, const Elements& rows, const std::vector<int64_t>& slots) {
  core::AppendArgs args;
  args.num_tokens = static_cast<int64_t>(slots.size());
  args.dtype = rows.dtype;
  args.ckv = rows.at(0);
  args.kpe = rows.at(cache.v.d_ckv);
  args.ckv_stride_token = args.kpe_stride_token = cache.v.d_ckv + cache.v.d_kpe;
  args.slot_mapping = slots.data();
  args.cache = cache.view();
  append(args);
}

TEST(ReferenceAppend, WritesTheBytesOfTheSpecification) {
  std::mt19937 random(3);
  for (const Variant& variant : all_variants())
    for (int32_t page_size : {1, 2, 64})
      for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
        MLA_TRACE(testing::Message() << variant << " page " << page_size << " dtype " << static_cast<int>(dtype));
        TestCache cache(variant, 128 / page_size, page_size), expected(variant, 128 / page_size, page_size);
        const std::vector<int64_t> slots = {127, 0, -1, 64, 63, 5, -7, 1};
        const auto d_qk = static_cast<size_t>(variant.d_ckv + variant.d_kpe);
        Row values;
        for (size_t t = 0; t < slots.size(); ++t)
          for (float value : random_row(static_cast<int32_t>(d_qk), random)) values.push_back(value);
        const Elements rows(dtype, values);
        append_rows(cache, rows, slots);
        for (size_t t = 0; t < slots.size(); ++t)
          if (slots[t] >= 0)
            expected.pack(slots[t], {rows.meant.begin() + static_cast<int64_t>(t * d_qk),
                                     rows.meant.begin() + static_cast<int64_t>((t + 1) * d_qk)});
        ASSERT_EQ(cache.bytes, expected.bytes);
        ASSERT_EQ(cache.scales, expected.scales);
      }
}

TEST(ReferenceAppend, PacksARowByHand) {
  // fp8_ds_mla, two slots: the second. Group 0 has largest magnitude 448 * 2 (scale 2), group 1 is zero (scale 1e-4 /
  // 448 = 2^-22.1, up to 2^-22), group 2 holds an infinity beside 448, group 3 a NaN beside 1 (2^ceil(-8.8) = 2^-8).
  TestCache cache({.format = CacheFormat::kFP8DsMla, .d_ckv = 512, .d_kpe = 64, .num_scales = 4, .power_of_two = true},
                  1, 2);
  Row row(576, 0.0F);
  row[0] = -896;
  row[1] = 2;
  row[256] = INFINITY;
  row[257] = 448;
  row[258] = -INFINITY;
  row[384] = NAN;
  row[385] = 1;
  row[512] = 1.5F;
  row[575] = -2;
  append_rows(cache, Elements(DType::kF32, row), {1});
  const uint8_t* bytes = cache.bytes.data() + 656;
  EXPECT_EQ(bytes[0], 0xFE);    // -448
  EXPECT_EQ(bytes[1], 0x38);    // 1
  EXPECT_EQ(bytes[128], 0x00);  // 0
  EXPECT_EQ(bytes[256], 0x7E);  // 448: saturated
  EXPECT_EQ(bytes[257], 0x7E);  // 448
  EXPECT_EQ(bytes[258], 0xFE);
  EXPECT_EQ(bytes[384], 0x7F);  // NaN
  EXPECT_EQ(bytes[385], 0x78);  // 256
  const auto expected = std::bit_cast<std::array<uint8_t, 16>>(std::array<float, 4>{2, 0x1p-22F, 1, 0x1p-8F});
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), bytes + 512));
  EXPECT_EQ(bytes[528], 0xC0);  // 1.5 = 0x3FC0
  EXPECT_EQ(bytes[529], 0x3F);
  EXPECT_EQ(bytes[654], 0x00);  // -2 = 0xC000
  EXPECT_EQ(bytes[655], 0xC0);
  for (int i = 0; i < 656; ++i) EXPECT_EQ(cache.bytes[static_cast<size_t>(i)], TestCache::kFill);
}

TEST(ReferenceAppend, PacksAFooterByHand) {
  // fp8_dsv4 in pages of 2: rows at 0 and 576, scales at 1152 and 1160; zeros have 2^-22 = code 105, 1 has 2^-8 = 119.
  // UE8M0 holds nothing but powers of two, whatever the cache asks for.
  TestCache cache({.format = CacheFormat::kFP8DsV4, .d_ckv = 448, .d_kpe = 64, .num_scales = 7, .power_of_two = false},
                  1, 2);
  Row row(512, 0.0F);
  row[64] = 1;
  row[448] = -2;
  append_rows(cache, Elements(DType::kF32, row), {1});
  EXPECT_EQ(cache.bytes[576 + 64], 0x78);
  EXPECT_EQ(cache.bytes[576 + 449], 0xC0);
  const std::vector<uint8_t> footer(cache.bytes.begin() + 1152, cache.bytes.begin() + 1168);
  const uint8_t x = TestCache::kFill;
  EXPECT_EQ(footer, (std::vector<uint8_t>{x, x, x, x, x, x, x, x, 105, 119, 105, 105, 105, 105, 105, 0}));
}

TEST(ReferenceAppend, EqualTypesKeepTheirBits) {
  TestCache cache({.format = CacheFormat::kBF16, .d_ckv = 12, .d_kpe = 0}, 1, 1);
  Elements rows(DType::kBF16, Row(12, 1.0F));
  rows.narrow[3] = 0x7F81;  // a signalling NaN
  append_rows(cache, rows, {0});
  EXPECT_EQ(std::memcmp(cache.bytes.data(), rows.narrow.data(), 24), 0);
}

/// Fills every slot with arbitrary bytes: every code, every scale exponent, arbitrary kpe.
void scramble(TestCache& cache, std::mt19937& random) {
  std::uniform_int_distribution<int> byte(0, 255);
  for (uint8_t& value : cache.bytes) value = static_cast<uint8_t>(byte(random));
  std::uniform_real_distribution<float> scale(1e-3F, 2.0F);
  if (cache.v.num_scales > 1)
    for (float& value : cache.scales) value = scale(random);
}

void expect_same_value(float actual, float expected, size_t c) {
  if (std::isnan(expected))
    ASSERT_TRUE(std::isnan(actual)) << c;
  else
    ASSERT_EQ(std::bit_cast<uint32_t>(actual), std::bit_cast<uint32_t>(expected)) << c;
}

TEST(ReferenceGather, DequantizesEveryFormatIntoEveryType) {
  std::mt19937 random(4);
  const int32_t table[] = {2, 0, 1}, kv_len[] = {6}, start[] = {1}, out_indptr[] = {0, 5};
  for (const Variant& variant : all_variants())
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      MLA_TRACE(testing::Message() << variant << " dtype " << static_cast<int>(dtype));
      TestCache cache(variant, 3, 2);
      scramble(cache, random);
      const int32_t d_qk = variant.d_ckv + variant.d_kpe;
      std::vector<float> out(static_cast<size_t>(5 * d_qk), -1.0F);
      core::GatherArgs args;
      args.batch_size = 1;
      args.num_rows = 5;
      args.cache = cache.view();
      args.pages = {.page_size = 2, .batch_size = 1, .table = table, .table_stride_request = 3, .kv_len = kv_len};
      args.token_start = start;
      args.out_indptr = out_indptr;
      args.out_dtype = dtype;
      args.out_ckv = out.data();
      args.out_kpe = reinterpret_cast<std::byte*>(out.data()) + variant.d_ckv * static_cast<int64_t>(size_of(dtype));
      args.out_ckv_stride_token = args.out_kpe_stride_token = d_qk;
      gather(args);
      for (int64_t i = 0; i < 5; ++i) {
        const int64_t token = i + 1;
        const Row row = cache.unpack(table[token / 2] * 2 + token % 2);
        for (size_t c = 0; c < row.size(); ++c) {
          const size_t at = static_cast<size_t>(i * d_qk) + c;
          if (dtype == DType::kF32) {
            expect_same_value(out[at], row[c], c);
            continue;
          }
          uint16_t bits = 0;
          std::memcpy(&bits, reinterpret_cast<const std::byte*>(out.data()) + 2 * at, 2);
          if (dtype == DType::kBF16)
            expect_same_value(bf16_to_f32(bits), bf16_to_f32(f32_to_bf16(row[c])), c);
          else
            expect_same_value(f16_to_f32(bits), f16_to_f32(f32_to_f16(row[c])), c);
        }
      }
    }
}

TEST(ReferenceGather, EveryCodeUnderEveryExponent) {
  // One request of 64 tokens of fp8_dsv4: token t has codes t * 4 ... in every group, and exponents 7 t ... of 256.
  const int32_t page[] = {0}, kv_len[] = {64}, out_indptr[] = {0, 64};
  for (int round = 0; round < 4; ++round) {
    TestCache cache({.format = CacheFormat::kFP8DsV4, .d_ckv = 448, .d_kpe = 64, .num_scales = 7, .power_of_two = true},
                    1, 64);
    for (size_t t = 0; t < 64; ++t)
      for (size_t c = 0; c < 448; ++c) {
        cache.bytes[t * 576 + c] = static_cast<uint8_t>(c % 64 + 64 * static_cast<size_t>(round));
        cache.bytes[64 * 576 + t * 8 + c / 64] = static_cast<uint8_t>(t * 7 + c / 64);
      }
    std::vector<float> ckv(64 * 448), kpe(64 * 64);
    core::GatherArgs args;
    args.batch_size = 1;
    args.num_rows = 64;
    args.cache = cache.view();
    args.pages = {.page_size = 64, .batch_size = 1, .table = page, .table_stride_request = 1, .kv_len = kv_len};
    args.out_indptr = out_indptr;
    args.out_dtype = DType::kF32;
    args.out_ckv = ckv.data();
    args.out_ckv_stride_token = 448;
    args.out_kpe = kpe.data();
    args.out_kpe_stride_token = 64;
    gather(args);
    for (size_t t = 0; t < 64; ++t)
      for (size_t c = 0; c < 448; ++c) {
        const auto code = static_cast<int>(c % 64) + 64 * round, exponent = static_cast<int>((t * 7 + c / 64) % 256);
        const double scale = exponent == 0 ? 0 : exponent == 255 ? std::nan("") : std::ldexp(1.0, exponent - 127);
        const double value = (code & 127) == 127 ? std::nan("") : e4m3_by_definition(code) * scale;
        // e4m3 times a power of two has 4 bits: bf16 holds it but for overflow and what lies below its subnormals.
        const float expected = bf16_to_f32(f32_to_bf16(static_cast<float>(value)));
        expect_same_value(ckv[t * 448 + c], expected, c);
      }
  }
}

core::CopyPagesArgs copy_args(TestCache& from, const std::vector<int32_t>& from_pages, TestCache& to,
                              const std::vector<int32_t>& to_pages) {
  core::CopyPagesArgs args;
  args.from = from.view();
  args.to = to.view();
  args.num_from = static_cast<int64_t>(from_pages.size());
  args.num_to = static_cast<int64_t>(to_pages.size());
  args.from_pages = from_pages.data();
  args.to_pages = to_pages.data();
  return args;
}

TEST(ReferenceCopyPages, ConvertsEveryFormatIntoEveryOther) {
  std::mt19937 random(8);
  for (const Variant& a : all_variants())
    for (const Variant& b : all_variants()) {
      if (a.d_ckv != b.d_ckv || a.d_kpe != b.d_kpe) continue;
      MLA_TRACE(testing::Message() << a << " -> " << b);
      TestCache from(a, 4, 3), to(b, 5, 2), expected(b, 5, 2);
      for (int64_t slot = 0; slot < from.num_slots(); ++slot) from.pack(slot, random_row(a.d_ckv + a.d_kpe, random));
      const std::vector<int32_t> from_pages = {3, 0}, to_pages = {4, 0, 2};
      copy_pages(copy_args(from, from_pages, to, to_pages));
      for (int64_t token = 0; token < 6; ++token)
        expected.pack(to_pages[static_cast<size_t>(token / 2)] * 2 + token % 2,
                      from.unpack(from_pages[static_cast<size_t>(token / 3)] * 3 + token % 3));
      if ((a.power_of_two || !b.power_of_two) && a.format == b.format && a.num_scales == b.num_scales &&
          a.outer == b.outer && a.num_scales > 1) {
        // A second quantization may choose other scales, a copy may not: compare rows as bits below, values here.
        for (int64_t token = 0; token < 6; ++token) {
          const int64_t slot = to_pages[static_cast<size_t>(token / 2)] * 2 + token % 2;
          const Row row = to.unpack(slot),
                    source = from.unpack(from_pages[static_cast<size_t>(token / 3)] * 3 + token % 3);
          for (size_t c = 0; c < row.size(); ++c) expect_same_value(row[c], source[c], c);
        }
        continue;
      }
      ASSERT_EQ(to.bytes, expected.bytes);
      ASSERT_EQ(to.scales, expected.scales);
    }
}

TEST(ReferenceCopyPages, SplitsFooterPagesBitForBit) {
  // One page of 256 arbitrary tokens, pad bytes of the scales included, into four of 64.
  std::mt19937 random(9);
  const Variant v4 = {
      .format = CacheFormat::kFP8DsV4, .d_ckv = 448, .d_kpe = 64, .num_scales = 7, .power_of_two = true};
  TestCache from(v4, 2, 256), to(v4, 5, 64);
  scramble(from, random);
  copy_pages(copy_args(from, {1}, to, {3, 1, 4, 0}));
  const int64_t from_page = 256 * 584 + 10, to_page = 64 * 584 + 10;
  const int64_t order[] = {3, 1, 4, 0};
  for (int64_t part = 0; part < 4; ++part) {
    const uint8_t* source = from.bytes.data() + from_page;
    const uint8_t* target = to.bytes.data() + order[part] * to_page;
    EXPECT_EQ(std::memcmp(target, source + part * 64 * 576, 64 * 576), 0);
    EXPECT_EQ(std::memcmp(target + 64 * 576, source + 256 * 576 + part * 64 * 8, 64 * 8), 0);
    for (int64_t i = 0; i < 10; ++i) EXPECT_EQ(target[64 * 584 + i], TestCache::kFill);
  }
  for (int64_t i = 0; i < to_page; ++i) ASSERT_EQ(to.bytes[static_cast<size_t>(2 * to_page + i)], TestCache::kFill);
}

TEST(ReferenceCopyPages, EqualFormatsKeepArbitraryBits) {
  std::mt19937 random(10);
  for (const Variant& variant : all_variants()) {
    MLA_TRACE(testing::Message() << variant);
    TestCache from(variant, 2, 2), to(variant, 2, 2), back(variant, 2, 2);
    scramble(from, random);
    copy_pages(copy_args(from, {0}, to, {1}));
    copy_pages(copy_args(to, {1}, back, {0}));
    copy_pages(copy_args(from, {1}, back, {1}));
    for (int64_t slot = 0; slot < 4; ++slot) {
      const Row a = from.unpack(slot), b = back.unpack(slot);
      for (size_t c = 0; c < a.size(); ++c) expect_same_value(b[c], a[c], c);
    }
    size_t changed = 0;
    for (size_t i = 0; i < from.bytes.size(); ++i) {
      if (back.bytes[i] == TestCache::kFill) continue;
      ASSERT_EQ(back.bytes[i], from.bytes[i]) << i;
      ++changed;
    }
    const int32_t channels_of_byte = kv_layout(variant.format).nope.element == DType::kE2M1 ? 2 : 1;
    EXPECT_GT(changed, static_cast<size_t>(4 * (variant.d_ckv + variant.d_kpe) / channels_of_byte * 9 / 10));
  }
}

TEST(ReferenceCopyPages, OtherOuterScalesAreRequantized) {
  // 6 * 448 under an outer scale of 1 is 6 * 224 under one of 2; without one it is the first again.
  const Variant one = {.format = CacheFormat::kNvFP4DsMla416, .d_ckv = 512, .d_kpe = 64, .num_scales = 32, .outer = 1};
  Variant two = one, none = one;
  two.outer = 2;
  none.outer = 0;
  TestCache from(one, 1, 1), doubled(two, 1, 1), without(none, 1, 1), back(one, 1, 1);
  from.pack(0, Row(576, 6 * 448.0F));
  copy_pages(copy_args(from, {0}, doubled, {0}));
  copy_pages(copy_args(from, {0}, without, {0}));
  copy_pages(copy_args(without, {0}, back, {0}));
  EXPECT_EQ(doubled.bytes[0], 0x77);
  EXPECT_EQ(doubled.bytes[256], 0x76);  // 224
  EXPECT_EQ(without.bytes, from.bytes);
  EXPECT_EQ(back.bytes, from.bytes);
}

TEST(ReferenceCopyPages, OtherScalesAreRequantized) {
  // 1.5 stored with scale 0.5 is 3; under scale 0.25 it must become 6, not stay 3.
  Variant half = {.format = CacheFormat::kFP8, .d_ckv = 12, .d_kpe = 0, .num_scales = 1, .scale = 0.5F};
  Variant quarter = half;
  quarter.scale = 0.25F;
  TestCache from(half, 1, 1), to(quarter, 1, 1);
  from.pack(0, Row(12, 1.5F));
  copy_pages(copy_args(from, {0}, to, {0}));
  for (size_t c = 0; c < 12; ++c) EXPECT_EQ(to.bytes[c], encode_by_definition(6.0F));
}

}  // namespace
}  // namespace mla::reference
