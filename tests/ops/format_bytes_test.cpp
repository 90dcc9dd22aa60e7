// SPDX-License-Identifier: Apache-2.0
// Tests that append leaves the bytes of fp8_dsv41, fp4_dsv41 and fp8_nope on every row of its table, on emulated GPUs
// too. They are compared with a packer of this file's own, in doubles.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "device_test.h"
#include "mla/numeric.h"
#include "reference/definitions.h"

namespace mla {
namespace {

constexpr size_t kWidth = 512;
constexpr uint8_t kFill = 0xA5;
constexpr CacheFormat kFormats[] = {CacheFormat::kFP8DsV41, CacheFormat::kFP4DsV41, CacheFormat::kFP8Nope};

/// Says where a format's bytes lie, as its publishers do.
struct Bytes {
  size_t row, footer;        // bytes of a token in the page's rows, and in its footer
  size_t group, scale_size;  // channels that share a scale, and its bytes
};

Bytes bytes_of(CacheFormat format) {
  switch (format) {
    case CacheFormat::kFP8DsV41: return {512, 16, 32, 1};
    case CacheFormat::kFP4DsV41: return {256, 32, 16, 1};
    default: return {528, 0, 128, 4};
  }
}

using Row = std::array<uint16_t, kWidth>;  // bf16

double amax_of(const uint16_t* values, size_t n) {
  double amax = 0;
  for (size_t i = 0; i < n; ++i)
    if (std::isfinite(bf16_to_f32(values[i])))
      amax = std::max(amax, std::fabs(static_cast<double>(bf16_to_f32(values[i]))));
  return amax;
}

double scale_by_definition(CacheFormat format, bool power_of_two, double amax) {
  switch (format) {
    case CacheFormat::kFP8DsV41: return reference::v41_scale_by_definition(static_cast<float>(amax));
    case CacheFormat::kFP4DsV41: {
      const double wanted = std::min(std::max(amax / 6.0, 0x1p-9), 448.0);
      return reference::e4m3_by_definition(reference::encode_by_definition(static_cast<float>(wanted)));
    }
    default:
      if (power_of_two) return reference::power_of_two_by_definition(static_cast<float>(amax));
      return std::max(static_cast<double>(static_cast<float>(amax / 448.0)), 0x1p-126);
  }
}

/// Packs a row: `data` are its bytes in the page, `scales` where its scales begin.
void pack(CacheFormat format, bool power_of_two, const Row& row, uint8_t* data, uint8_t* scales) {
  const Bytes bytes = bytes_of(format);
  for (size_t first = 0; first < kWidth; first += bytes.group) {
    const double scale = scale_by_definition(format, power_of_two, amax_of(&row[first], bytes.group));
    uint8_t* const at = scales + first / bytes.group * bytes.scale_size;
    const auto narrow = static_cast<float>(scale);
    if (format == CacheFormat::kFP8DsV41) *at = static_cast<uint8_t>(std::ilogb(scale) + 127);
    if (format == CacheFormat::kFP4DsV41) *at = reference::encode_by_definition(narrow);
    if (format == CacheFormat::kFP8Nope) std::memcpy(at, &narrow, 4);
    for (size_t c = first; c < first + bytes.group; ++c) {
      // Of two f32, the quotient in doubles rounds to that of IEEE's division in f32.
      const auto quotient = static_cast<float>(static_cast<double>(bf16_to_f32(row[c])) / scale);
      if (format != CacheFormat::kFP4DsV41)
        data[c] = reference::encode_by_definition(quotient);
      else if (c % 2 == 0)
        data[c / 2] = reference::encode_e2m1_by_definition(quotient);
      else
        data[c / 2] = static_cast<uint8_t>(data[c / 2] + 16 * reference::encode_e2m1_by_definition(quotient));
    }
  }
}

/// Holds a pool of pages, and the expected bytes of one.
struct Pool {
  CacheFormat format;
  size_t page_size, num_pages, stride;
  bool power_of_two;
  std::vector<uint8_t> bytes;

  Pool(CacheFormat of, size_t size, size_t pages, size_t extra, bool powers)
      : format(of),
        page_size(size),
        num_pages(pages),
        stride(size * (bytes_of(of).row + bytes_of(of).footer) + extra),
        power_of_two(powers),
        bytes(pages * stride, kFill) {}

  KvCache cache() {
    const auto pages = static_cast<int64_t>(num_pages), size = static_cast<int64_t>(page_size);
    const auto row = static_cast<int64_t>(bytes_of(format).row), footer = static_cast<int64_t>(bytes_of(format).footer);
    KvCache cache{.format = format, .power_of_two_scales = power_of_two};
    if (footer > 0) {
      cache.kv = contiguous(bytes.data(), DType::kU8, {pages, size * (row + footer)});
      cache.page_size = static_cast<int32_t>(page_size);
    } else {
      cache.kv = contiguous(bytes.data(), DType::kU8, {pages, size, row});
    }
    cache.kv.stride[0] = static_cast<int64_t>(stride);
    return cache;
  }
  uint8_t* data(size_t slot) { return &bytes[slot / page_size * stride + slot % page_size * bytes_of(format).row]; }
  uint8_t* scales(size_t slot) {
    const Bytes of = bytes_of(format);
    if (of.footer == 0) return data(slot) + kWidth;
    return &bytes[slot / page_size * stride + page_size * of.row + slot % page_size * of.footer];
  }
};

/// Says where append runs: a device, and a row of the table.
using Place = std::tuple<std::string, std::string>;

std::vector<Place> places() {
  std::vector<Place> all;
  for (const std::string& row : backend_names(Op::kAppend))
    if (!kit::is_gpu_backend(row)) all.emplace_back("cpu", row);
  for (const Place& place : devices_and_rows(Op::kAppend))
    if (std::get<0>(place).starts_with("emulated")) all.push_back(place);
  return all;
}

class FormatBytes : public testing::TestWithParam<Place> {
 protected:
  void SetUp() override {
    const auto& [device, row] = GetParam();
    for (const BackendVerdict& verdict : explain(kit::on_device(usual_problem(Op::kAppend), device), "auto").rows)
      if (verdict.name == row && !verdict.usable) GTEST_SKIP() << device << ' ' << row << ": " << verdict.reason;
    Result<Context> made = Context::create({.num_threads = 2, .affinity = {}, .backend = row, .device = device});
    ASSERT_TRUE(made.ok()) << made.status().message();
    context_.emplace(std::move(made).value());
  }

  /// Appends rows to the slots from the last to the first.
  void append(const std::vector<Row>& rows, Pool& pool) {
    std::vector<int64_t> slots;
    for (size_t i = 0; i < rows.size(); ++i) slots.push_back(static_cast<int64_t>(rows.size() - 1 - i));
    const auto count = static_cast<int64_t>(rows.size());
    AppendParams params;
    params.kv = contiguous(const_cast<Row*>(rows.data()), DType::kBF16, {count, int64_t{kWidth}});
    params.slot_mapping = contiguous(slots.data(), DType::kI64, {count});
    params.cache = pool.cache();
    const Status status = run(*context_, params);
    ASSERT_TRUE(status.ok()) << status.message();
  }

  void expect_bytes(CacheFormat format, const std::vector<Row>& rows, size_t page_size, size_t extra, bool powers) {
    SCOPED_TRACE(testing::Message() << name(format) << ", pages of " << page_size << " + " << extra << " bytes, "
                                    << (powers ? "powers of two" : "any scales"));
    const size_t pages = (rows.size() + page_size - 1) / page_size;
    Pool got(format, page_size, pages, extra, powers), expected = got;
    for (size_t i = 0; i < rows.size(); ++i) {
      const size_t slot = rows.size() - 1 - i;
      pack(format, powers, rows[i], expected.data(slot), expected.scales(slot));
    }
    ASSERT_NO_FATAL_FAILURE(append(rows, got));
    for (size_t i = 0; i < got.bytes.size(); ++i)
      ASSERT_EQ(got.bytes[i], expected.bytes[i]) << "byte " << i % got.stride << " of page " << i / got.stride;
  }

  /// Appends one row, whose channels come again and again, and returns its bytes.
  std::vector<uint8_t> bytes_of_row(CacheFormat format, const std::vector<float>& channels, bool powers = true) {
    Row row;
    for (size_t c = 0; c < kWidth; ++c) row[c] = f32_to_bf16(channels[c % channels.size()]);
    Pool pool(format, 1, 1, 0, powers);
    append({row}, pool);
    return pool.bytes;
  }

  std::optional<Context> context_;
};

std::string name_of(const testing::TestParamInfo<Place>& info) {
  std::string text = std::get<0>(info.param) + "_" + std::get<1>(info.param);
  std::replace(text.begin(), text.end(), ':', '_');
  return text;
}
INSTANTIATE_TEST_SUITE_P(Places, FormatBytes, testing::ValuesIn(places()), name_of);

/// Returns rows that hold every bf16 in turn, each group ending with a magnitude that its scale is chosen by: the
/// group's own largest one, or a number around a step of the scale somewhat above that.
std::vector<Row> every_bf16(size_t group, uint16_t factor_bits, int above) {
  std::vector<Row> rows;
  uint32_t next = 0;
  while (next < 0x10000U) {
    Row& row = rows.emplace_back();
    for (size_t first = 0; first < kWidth; first += group) {
      for (size_t c = first; c + 1 < first + group; ++c) row[c] = static_cast<uint16_t>(next++);
      const auto amax = static_cast<float>(amax_of(&row[first], group - 1));
      uint32_t bits = (f32_to_bf16(amax) & 0x7F80U) + static_cast<uint32_t>(above) * 0x80U + factor_bits;
      if (bits >= 0x7F80U) bits = 0x7F7FU;  // the largest of all
      row[first + group - 1] = static_cast<uint16_t>(bits);
    }
  }
  return rows;
}

TEST_P(FormatBytes, OfEveryBF16BesideEveryKindOfLargest) {
  // Mantissas of bf16 around 1 and 1.75, where powers of two step, and 1.5, which is that of 6.
  constexpr uint16_t kMantissas[] = {0x00, 0x01, 0x3F, 0x40, 0x41, 0x5F, 0x60, 0x61, 0x7F};
  const bool emulated = std::get<0>(GetParam()) != "cpu";
  for (const CacheFormat format : kFormats)
    for (const uint16_t mantissa : kMantissas)
      for (const int above : {0, 1, 5}) {
        if (emulated && above == 1) continue;  // the emulator takes its time
        const bool any = format == CacheFormat::kFP8Nope && mantissa % 2 == 1;
        ASSERT_NO_FATAL_FAILURE(expect_bytes(format, every_bf16(bytes_of(format).group, mantissa, above), 64, 0, !any));
      }
}

TEST_P(FormatBytes, OfPagesOfEverySizeAndStride) {
  for (const CacheFormat format : kFormats) {
    std::vector<Row> rows = every_bf16(bytes_of(format).group, 0x30, 2);
    rows.resize(131);
    for (const size_t page_size : {1, 2, 64, 128})
      for (const size_t extra : {0, 2, 48, 4096})
        ASSERT_NO_FATAL_FAILURE(expect_bytes(format, rows, page_size, extra, true));
  }
}

TEST_P(FormatBytes, E2M1EvenChannelsAreInLowNibbles) {
  const std::vector<uint8_t> bytes = bytes_of_row(
      CacheFormat::kFP4DsV41,
      {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F, -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F});
  constexpr uint8_t kExpected[] = {0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE};
  for (size_t i = 0; i < 256; ++i) ASSERT_EQ(bytes[i], kExpected[i % 8]) << i;
  for (size_t i = 256; i < 288; ++i) ASSERT_EQ(bytes[i], 0x38) << i;  // 1
}

TEST_P(FormatBytes, E2M1TiesGoToEvenUnderEveryMantissaOfAScale) {
  constexpr float kTies[] = {0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5.0F};
  constexpr uint8_t kCodes[] = {0, 2, 2, 4, 4, 6, 6};
  for (int exponent = -6; exponent <= 8; ++exponent)
    for (int mantissa = 8; mantissa < 16; ++mantissa) {
      const float scale = std::ldexp(static_cast<float>(mantissa), exponent - 3);
      if (scale > 448) continue;
      std::vector<float> channels(16, 0.0F);
      for (size_t i = 0; i < 7; ++i) {
        channels[2 * i] = kTies[i] * scale;
        channels[2 * i + 1] = -kTies[i] * scale;
      }
      channels[15] = 6 * scale;
      for (const float channel : channels) ASSERT_EQ(bf16_to_f32(f32_to_bf16(channel)), channel);
      const std::vector<uint8_t> bytes = bytes_of_row(CacheFormat::kFP4DsV41, channels);
      ASSERT_EQ(bytes[256], f32_to_e4m3(scale));
      for (size_t i = 0; i < 7; ++i)
        ASSERT_EQ(bytes[i], kCodes[i] | (kCodes[i] | 8) << 4) << kTies[i] << " * " << scale;
      ASSERT_EQ(bytes[7], 0x70);
    }
}

TEST_P(FormatBytes, ScalesAreClamped) {
  const float huge = bf16_to_f32(0x7F7F);
  const auto first = [&](CacheFormat format, float amax) {
    const std::vector<uint8_t> bytes = bytes_of_row(format, {amax, 0.0F});
    return std::pair(bytes[0], bytes[format == CacheFormat::kFP8DsV41 ? 512 : 256]);
  };
  using Pair = std::pair<uint8_t, uint8_t>;  // element and scale
  constexpr CacheFormat kWindow = CacheFormat::kFP8DsV41, kPool = CacheFormat::kFP4DsV41;
  EXPECT_EQ(first(kWindow, 0.0F), Pair(0x00, 114));  // 2^-13, the power of two above 1e-4
  EXPECT_EQ(first(kWindow, 0x1p-100F), Pair(0x00, 114));
  EXPECT_EQ(first(kWindow, 448 * 0x1p-14F), Pair(0x76, 114));  // 224
  EXPECT_EQ(first(kWindow, 448 * 0x1p-13F), Pair(0x7E, 114));
  EXPECT_EQ(first(kWindow, 450 * 0x1p-13F), Pair(0x76, 115));
  EXPECT_EQ(first(kWindow, 256.0F), Pair(0x78, 127));
  EXPECT_EQ(first(kWindow, 448.0F), Pair(0x7E, 127));
  EXPECT_EQ(first(kWindow, 450.0F), Pair(0x76, 128));
  EXPECT_EQ(first(kWindow, 512.0F), Pair(0x78, 128));
  EXPECT_EQ(first(kWindow, huge), Pair(0x78, 247));  // 2^127.99 / 2^120 = 255, to 256
  EXPECT_EQ(first(kPool, 0.0F), Pair(0x00, 0x01));   // 2^-9, the least e4m3
  EXPECT_EQ(first(kPool, 0x1p-100F), Pair(0x00, 0x01));
  EXPECT_EQ(first(kPool, 6 * 0x1p-9F), Pair(0x07, 0x01));
  EXPECT_EQ(first(kPool, 6 * 0x1p-10F), Pair(0x05, 0x01));  // 3
  EXPECT_EQ(first(kPool, 8.0F), Pair(0x07, 0x3B));          // 8 / 6 is nearest to 1.375
  EXPECT_EQ(first(kPool, 6 * 448.0F), Pair(0x07, 0x7E));
  EXPECT_EQ(first(kPool, huge), Pair(0x07, 0x7E));
  const auto nope = [&](float amax, bool powers) {
    const std::vector<uint8_t> bytes = bytes_of_row(CacheFormat::kFP8Nope, {amax, 0.0F}, powers);
    float scale;
    std::memcpy(&scale, &bytes[512 + 12], 4);
    return scale;
  };
  EXPECT_EQ(nope(0.0F, true), 0x1p-22F);
  EXPECT_EQ(nope(0.0F, false), 0x1p-126F);
  EXPECT_EQ(nope(256.0F, true), 1.0F);
  EXPECT_EQ(nope(256.0F, false), 256.0F / 448.0F);
  EXPECT_EQ(nope(huge, false), huge / 448.0F);
}

/// Infinities and NaN have no say in a scale; infinities saturate, and NaN stays NaN in e4m3 and becomes 6 in e2m1.
TEST_P(FormatBytes, InfinitiesAndNaNInASourceRow) {
  const std::vector<float> channels = {6.0F, INFINITY, -INFINITY, NAN, 3.0F, 0.0F, 1.5F, -6.0F};
  const std::vector<uint8_t> window = bytes_of_row(CacheFormat::kFP8DsV41, channels);
  const std::vector<uint8_t> of_window(window.begin(), window.begin() + 4);
  EXPECT_EQ(of_window, (std::vector<uint8_t>{0x7C, 0x7E, 0xFE, 0x7F}));  // 6 / 2^-6 = 384
  EXPECT_EQ(window[512], 121);
  const std::vector<uint8_t> pool = bytes_of_row(CacheFormat::kFP4DsV41, channels);
  const std::vector<uint8_t> of_pool(pool.begin(), pool.begin() + 4);
  EXPECT_EQ(of_pool, (std::vector<uint8_t>{0x77, 0x7F, 0x05, 0xF3}));
  EXPECT_EQ(pool[256], 0x38);
  const std::vector<uint8_t> nope = bytes_of_row(CacheFormat::kFP8Nope, channels);
  EXPECT_EQ(std::vector<uint8_t>(nope.begin(), nope.begin() + 4), of_window);
}

}  // namespace
}  // namespace mla
