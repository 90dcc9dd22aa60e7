// SPDX-License-Identifier: Apache-2.0
// Tests the cache formats against the numbers of their published descriptions, and the scalar conversions.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "mla/kv_layout.h"
#include "mla/numeric.h"
#include "mla/types.h"

namespace mla {
namespace {

TEST(KvLayout, RowsHaveTheirPublishedSizes) {
  EXPECT_EQ(row_bytes(CacheFormat::kBF16, 576), 1152);
  EXPECT_EQ(row_bytes(CacheFormat::kF16, 576), 1152);
  EXPECT_EQ(row_bytes(CacheFormat::kFP8, 576), 576);
  EXPECT_EQ(row_bytes(CacheFormat::kFP8DsMla, 576), 656);
  EXPECT_EQ(row_bytes(CacheFormat::kFP8DsV4, 512), 576);
  EXPECT_EQ(row_bytes(CacheFormat::kFP8DsV41, 512), 512);
  EXPECT_EQ(row_bytes(CacheFormat::kFP4DsV41, 512), 256);
  EXPECT_EQ(row_bytes(CacheFormat::kFP8Nope, 512), 528);
  EXPECT_EQ(row_bytes(CacheFormat::kNvFP4DsMla, 576), 432);
  EXPECT_EQ(row_bytes(CacheFormat::kNvFP4DsMla416, 576), 416);
  EXPECT_EQ(row_bytes(CacheFormat::kNvFP4DsMla368, 576), 368);
  EXPECT_EQ(row_bytes(CacheFormat::kNvFP4DsV4, 512), 352);
  EXPECT_EQ(row_bytes(CacheFormat::kMxFP4DsV4, 512), 368);
}

TEST(KvLayout, PartsOfARowFollowOneAnother) {
  constexpr KvLayout inline_scales = kv_layout(CacheFormat::kFP8DsMla);
  EXPECT_EQ(inline_scales.scale_offset, bytes_of(inline_scales.nope.element, inline_scales.nope_dim));
  EXPECT_EQ(inline_scales.rope_offset, inline_scales.scale_offset + inline_scales.scale_bytes_per_token);
  EXPECT_EQ(inline_scales.row_bytes,
            inline_scales.rope_offset + bytes_of(inline_scales.rope.element, inline_scales.rope_dim));
  EXPECT_EQ(inline_scales.scale_bytes_per_token, inline_scales.nope_dim / inline_scales.nope.channels_per_scale * 4);
  constexpr KvLayout footer = kv_layout(CacheFormat::kFP8DsV4);
  EXPECT_EQ(footer.rope_offset, bytes_of(footer.nope.element, footer.nope_dim));
  EXPECT_EQ(footer.row_bytes, footer.rope_offset + bytes_of(footer.rope.element, footer.rope_dim));
  EXPECT_EQ(footer.scale_bytes_per_token, footer.nope_dim / footer.nope.channels_per_scale + 1);  // and a pad byte
}

TEST(KvLayout, FooterPagesAreThoseOfDeepSeekV4) {
  EXPECT_EQ(page_bytes(CacheFormat::kFP8DsV4, 512, 256, true), 149760);
  EXPECT_EQ(page_bytes(CacheFormat::kFP8DsV4, 512, 64, true), 37440);
  EXPECT_EQ(page_bytes(CacheFormat::kFP8DsV4, 512, 2, false), 2 * 584);
  EXPECT_EQ(footer_scale_offset(kv_layout(CacheFormat::kFP8DsV4), 64, 0), 64 * 576);
  EXPECT_EQ(footer_scale_offset(kv_layout(CacheFormat::kFP8DsV4), 64, 63), 64 * 576 + 63 * 8);
  EXPECT_EQ(page_bytes(CacheFormat::kBF16, 576, 64, true), 64 * 1152);
}

TEST(KvLayout, PagesOfV41HaveAllScalesBehindAllRows) {
  constexpr KvLayout window = kv_layout(CacheFormat::kFP8DsV41), pool = kv_layout(CacheFormat::kFP4DsV41);
  for (const KvLayout& layout : {window, pool}) {
    EXPECT_EQ(layout.row_bytes, bytes_of(layout.nope.element, 512));
    EXPECT_EQ(layout.scale_bytes_per_token, 512 / layout.nope.channels_per_scale);
    EXPECT_EQ(layout.rotary_in_nope, 64);
  }
  EXPECT_EQ(page_bytes(CacheFormat::kFP8DsV41, 512, 128, true), 128 * 528);
  EXPECT_EQ(page_bytes(CacheFormat::kFP4DsV41, 512, 64, true), 64 * 288);
  EXPECT_EQ(footer_scale_offset(window, 128, 3), 128 * 512 + 3 * 16);
  EXPECT_EQ(footer_scale_offset(pool, 64, 63), 64 * 256 + 63 * 32);
  EXPECT_EQ(page_bytes(CacheFormat::kFP8Nope, 512, 64, true), 64 * 528);
}

TEST(KvLayout, PartsOfNvFP4AndMxFP4Rows) {
  for (CacheFormat format :
       {CacheFormat::kNvFP4DsMla, CacheFormat::kNvFP4DsMla416, CacheFormat::kNvFP4DsMla368, CacheFormat::kMxFP4DsV4}) {
    const KvLayout layout = kv_layout(format);
    EXPECT_EQ(layout.scale_offset, layout.nope_dim / 2) << layout.name;
    EXPECT_EQ(layout.rope_offset, layout.scale_offset + layout.scale_bytes_per_token + layout.rope_scale_bytes);
    EXPECT_EQ(layout.row_bytes, layout.rope_offset + bytes_of(layout.rope.element, layout.rope_dim)) << layout.name;
    EXPECT_EQ(layout.row_bytes % 16, 0) << layout.name;
  }
  // A row of 368 bytes is one of 432 whose rotary channels are half as long; their scale lies in the padding.
  EXPECT_EQ(kv_layout(CacheFormat::kNvFP4DsMla368).rope_offset, kv_layout(CacheFormat::kNvFP4DsMla).rope_offset);
  EXPECT_EQ(kv_layout(CacheFormat::kNvFP4DsMla368).rope_scale_offset, 288);
  EXPECT_EQ(page_bytes(CacheFormat::kNvFP4DsV4, 512, 64, true), 64 * 384);
  EXPECT_EQ(footer_scale_offset(kv_layout(CacheFormat::kNvFP4DsV4), 64, 63), 64 * 352 + 63 * 32);
  EXPECT_EQ(most_scale_bytes(DType::kE2M1), 32);  // of which kernels have room for: not the padding of 432 bytes
  EXPECT_EQ(most_scale_bytes(DType::kE4M3), 16);
}

TEST(KvLayout, CountsThatNoRowOrPageHasGiveNoBytes) {
  for (CacheFormat format : kAllCacheFormats) {
    const bool any_width = kv_layout(format).row_bytes == 0;
    for (int64_t count : {INT64_MIN, int64_t{-1}, int64_t{0}, int64_t{INT32_MAX} + 1, INT64_MAX}) {
      if (any_width) {
        EXPECT_EQ(row_bytes(format, count), 0) << name(format) << ' ' << count;
        EXPECT_EQ(page_bytes(format, count, 64, false), 0) << name(format) << ' ' << count;
      }
      EXPECT_EQ(page_bytes(format, 576, count, true), 0) << name(format) << ' ' << count;
      EXPECT_EQ(indexer_page_bytes(count), 0) << count;
    }
    EXPECT_GT(page_bytes(format, INT32_MAX, INT32_MAX, true), INT64_C(0)) << name(format);
  }
}

TEST(IndexerLayout, KeysHaveTheirPublishedSizes) {
  EXPECT_EQ(indexer_key_bytes(IndexerFormat::kFP8), 132);
  EXPECT_EQ(indexer_key_bytes(IndexerFormat::kMXFP4), 68);
  EXPECT_EQ(indexer_page_bytes(64), 64 * 132);
  EXPECT_EQ(indexer_page_bytes(64, IndexerFormat::kMXFP4), 64 * 68);
  for (IndexerFormat format : kAllIndexerFormats) {
    const IndexerLayout layout = indexer_layout(format);
    EXPECT_EQ(layout.head_dim, kIndexerLayout.head_dim);
    EXPECT_EQ(layout.key_bytes, bytes_of(layout.codec.element, layout.head_dim)) << name(format);
    EXPECT_EQ(layout.scale_bytes, layout.num_scales() * size_of(layout.codec.scale_type)) << name(format);
    EXPECT_GT(indexer_page_bytes(INT32_MAX, format), INT64_C(0)) << name(format);
    EXPECT_EQ(indexer_page_bytes(0, format), 0) << name(format);
    EXPECT_EQ(parse_indexer_format(name(format)), format);
  }
  EXPECT_EQ(parse_indexer_format("fp4"), std::nullopt);
  EXPECT_EQ(name(IndexerFormat{2}), "");
}

TEST(KvLayout, NamesParseBack) {
  for (CacheFormat format : kAllCacheFormats) EXPECT_EQ(parse_cache_format(name(format)), format);
  EXPECT_EQ(parse_cache_format("fp4"), std::nullopt);
  EXPECT_EQ(name(CacheFormat{99}), "");
}

TEST(Types, ContiguousViewsAreRowMajor) {
  const TensorView view = contiguous(nullptr, DType::kF32, {2, 3, 4});
  EXPECT_EQ(view.ndim, 3);
  EXPECT_EQ(view.numel(), 24);
  EXPECT_EQ(view.stride[0], 12);
  EXPECT_EQ(view.stride[2], 1);
  EXPECT_EQ(contiguous(nullptr, DType::kF32, {1, 1, 1, 1, 1, 1}).ndim, kMaxDims);
  EXPECT_TRUE(view.given());
  EXPECT_FALSE(TensorView{}.given());
}

TEST(Numeric, EveryNarrowValueSurvivesTheWayThroughF32) {
  for (uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const auto narrow = static_cast<uint16_t>(bits);
    if (std::isnan(bf16_to_f32(narrow)))
      EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(bf16_to_f32(narrow))))) << bits;
    else
      ASSERT_EQ(f32_to_bf16(bf16_to_f32(narrow)), narrow);
    if (std::isnan(f16_to_f32(narrow)))
      EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16(f16_to_f32(narrow))))) << bits;
    else
      ASSERT_EQ(f32_to_f16(f16_to_f32(narrow)), narrow);
  }
}

/// Expects that between two neighbours the nearer one is taken, and in the middle the even one.
template <class Narrow, class Widen>
void expect_nearest_even(uint16_t last, Narrow narrow, Widen widen) {
  for (uint16_t low = 0; low < last; ++low) {
    const float a = widen(low);
    const float b = widen(static_cast<uint16_t>(low + 1));
    const float middle = static_cast<float>((static_cast<double>(a) + b) / 2);
    ASSERT_EQ(narrow(middle), low % 2 == 0 ? low : low + 1) << low;
    ASSERT_EQ(narrow(std::nextafter(middle, a)), low) << low;
    ASSERT_EQ(narrow(std::nextafter(middle, b)), low + 1) << low;
    ASSERT_EQ(narrow(-middle), (low % 2 == 0 ? low : low + 1) | 0x8000) << low;
  }
}

TEST(Numeric, RoundsToNearestEven) {
  expect_nearest_even(0x7BFF, f32_to_f16, f16_to_f32);
  // From 1 to 8 in bf16: every mantissa and both parities of the exponent.
  for (uint16_t low = 0x3F80; low < 0x4100; ++low) {
    const float middle = (bf16_to_f32(low) + bf16_to_f32(static_cast<uint16_t>(low + 1))) / 2;
    EXPECT_EQ(f32_to_bf16(middle), low % 2 == 0 ? low : low + 1);
    EXPECT_EQ(f32_to_bf16(std::nextafter(middle, 0.0F)), low);
  }
}

TEST(Numeric, ExtremesAndSpecialValues) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(f32_to_f16(65504.0F), 0x7BFF);
  EXPECT_EQ(f32_to_f16(65519.996F), 0x7BFF);
  EXPECT_EQ(f32_to_f16(65520.0F), 0x7C00);
  EXPECT_EQ(f32_to_f16(-kInf), 0xFC00);
  EXPECT_EQ(f32_to_f16(0x1p-25F), 0);
  EXPECT_EQ(f32_to_f16(-0.0F), 0x8000);
  EXPECT_EQ(f32_to_bf16(kInf), 0x7F80);
  EXPECT_EQ(f32_to_bf16(std::numeric_limits<float>::max()), 0x7F80);
  EXPECT_EQ(f16_to_f32(0x0001), 0x1p-24F);
  EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16(std::numeric_limits<float>::quiet_NaN()))));
  // A NaN whose payload sits in the lower half only must not become infinity.
  EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(std::bit_cast<float>(0x7F800001U)))));
}

}  // namespace
}  // namespace mla
