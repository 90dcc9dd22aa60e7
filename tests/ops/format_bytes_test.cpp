// SPDX-License-Identifier: Apache-2.0
// Tests that append leaves the bytes of formats of 2026 (V4.1's, GLM's without rotary channels, and those in NVFP4 and
// MXFP4) on every row of its table, on emulated GPUs too. They are compared with a packer of this file's own, in
// doubles.
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

constexpr size_t kRotary = 64;
constexpr uint8_t kFill = 0xA5;
constexpr CacheFormat kFormats[] = {CacheFormat::kFP8DsV41,   CacheFormat::kFP4DsV41,      CacheFormat::kFP8Nope,
                                    CacheFormat::kNvFP4DsMla, CacheFormat::kNvFP4DsMla416, CacheFormat::kNvFP4DsMla368,
                                    CacheFormat::kNvFP4DsV4,  CacheFormat::kMxFP4DsV4};

enum class Scale { kF32, kV41, kUE8M0, kE4M3 };

/// Says where a format's bytes lie, as its publishers do.
struct Bytes {
  size_t row, footer;  // bytes of a token in the page's rows, and in its footer
  size_t latents;      // channels that are quantized in groups
  bool e2m1;           // or else e4m3
  Scale scale;         // how the scale of a group is stored and chosen
  size_t group;        // channels that share a scale
  size_t scales_at;    // bytes of the row before its scales; 0 if they lie in the footer
  size_t scale_room;   // bytes of the scales and of the zeros behind them
  size_t rope_at = 0;  // bytes of the row before its 64 rotary channels; 0 if there are none apart from the latents
  size_t rope_scale_at = 0;  // bytes before the f32 scale of e4m3 rotary channels; 0: they are bf16

  size_t width() const { return latents + (rope_at > 0 ? kRotary : 0); }
};

Bytes bytes_of(CacheFormat format) {
  switch (format) {
    case CacheFormat::kFP8DsV41: return {512, 16, 512, false, Scale::kV41, 32, 0, 16};
    case CacheFormat::kFP4DsV41: return {256, 32, 512, true, Scale::kE4M3, 16, 0, 32};
    case CacheFormat::kNvFP4DsMla: return {432, 0, 512, true, Scale::kE4M3, 16, 256, 48, 304};
    case CacheFormat::kNvFP4DsMla416: return {416, 0, 512, true, Scale::kE4M3, 16, 256, 32, 288};
    case CacheFormat::kNvFP4DsMla368: return {368, 0, 512, true, Scale::kE4M3, 16, 256, 32, 304, 288};
    case CacheFormat::kNvFP4DsV4: return {352, 32, 448, true, Scale::kE4M3, 16, 0, 32, 224};
    case CacheFormat::kMxFP4DsV4: return {368, 0, 448, true, Scale::kUE8M0, 32, 224, 16, 240};
    default: return {528, 0, 512, false, Scale::kF32, 128, 512, 16};
  }
}

using Row = std::vector<uint16_t>;  // bf16

double amax_of(const uint16_t* values, size_t n) {
  double amax = 0;
  for (size_t i = 0; i < n; ++i)
    if (std::isfinite(bf16_to_f32(values[i])))
      amax = std::max(amax, std::fabs(static_cast<double>(bf16_to_f32(values[i]))));
  return amax;
}

double any_scale(double amax) { return std::max(static_cast<double>(static_cast<float>(amax / 448.0)), 0x1p-126); }

/// Returns the scale that is stored for a group with this largest magnitude. `outer` multiplies it.
double scale_by_definition(Scale scale, bool power_of_two, double amax, double outer) {
  switch (scale) {
    case Scale::kV41: return reference::v41_scale_by_definition(static_cast<float>(amax));
    case Scale::kUE8M0: {  // 2^ceil(log2(max(amax, 1e-4) / 6))
      int exponent = 0;
      const double fraction = std::frexp(std::max(amax, static_cast<double>(1e-4F)) / 6.0, &exponent);
      return std::ldexp(1.0, fraction == 0.5 ? exponent - 1 : exponent);
    }
    case Scale::kE4M3: {
      const auto of_outer = static_cast<double>(static_cast<float>(amax / outer));
      const double wanted = std::min(std::max(of_outer / 6.0, 0x1p-9), 448.0);
      return reference::e4m3_by_definition(reference::encode_by_definition(static_cast<float>(wanted)));
    }
    default: return power_of_two ? reference::power_of_two_by_definition(static_cast<float>(amax)) : any_scale(amax);
  }
}

/// Returns a channel divided by its scale. Of two f32, the quotient in doubles rounds to that of IEEE's division in
/// f32.
float quotient_of(uint16_t channel, double scale) {
  return static_cast<float>(static_cast<double>(bf16_to_f32(channel)) / scale);
}

/// Packs a row: `data` are its bytes in the page, `scales` where its scales begin.
void pack(CacheFormat format, bool power_of_two, float outer, const Row& row, uint8_t* data, uint8_t* scales) {
  const Bytes bytes = bytes_of(format);
  std::fill_n(scales, bytes.scale_room, uint8_t{0});
  for (size_t first = 0; first < bytes.latents; first += bytes.group) {
    const double stored =
        scale_by_definition(bytes.scale, power_of_two, amax_of(&row[first], bytes.group), static_cast<double>(outer));
    const auto narrow = static_cast<float>(stored);
    const size_t at = first / bytes.group;
    switch (bytes.scale) {
      case Scale::kE4M3: scales[at] = reference::encode_by_definition(narrow); break;
      case Scale::kF32: std::memcpy(scales + 4 * at, &narrow, 4); break;
      default: scales[at] = static_cast<uint8_t>(std::ilogb(stored) + 127);
    }
    const auto scale = static_cast<double>(static_cast<float>(stored * static_cast<double>(outer)));
    for (size_t c = first; c < first + bytes.group; ++c) {
      const float quotient = quotient_of(row[c], scale);
      if (!bytes.e2m1)
        data[c] = reference::encode_by_definition(quotient);
      else if (c % 2 == 0)
        data[c / 2] = reference::encode_e2m1_by_definition(quotient);
      else
        data[c / 2] = static_cast<uint8_t>(data[c / 2] + 16 * reference::encode_e2m1_by_definition(quotient));
    }
  }
  if (bytes.rope_at == 0) return;
  const uint16_t* const rope = &row[bytes.latents];
  if (bytes.rope_scale_at == 0) {
    std::memcpy(data + bytes.rope_at, rope, 2 * kRotary);
    return;
  }
  const auto scale = static_cast<float>(any_scale(amax_of(rope, kRotary)));
  std::fill(data + bytes.rope_scale_at, data + bytes.rope_at, uint8_t{0});
  std::memcpy(data + bytes.rope_scale_at, &scale, 4);
  for (size_t c = 0; c < kRotary; ++c)
    data[bytes.rope_at + c] = reference::encode_by_definition(quotient_of(rope[c], static_cast<double>(scale)));
}

/// Holds a pool of pages, and the expected bytes of one.
struct Pool {
  CacheFormat format;
  size_t page_size, num_pages, stride;
  bool power_of_two;
  float outer;  // 1: none is given
  std::vector<uint8_t> bytes;

  Pool(CacheFormat of, size_t size, size_t pages, size_t extra, bool powers, float outer_scale)
      : format(of),
        page_size(size),
        num_pages(pages),
        stride(size * (bytes_of(of).row + bytes_of(of).footer) + extra),
        power_of_two(powers),
        outer(outer_scale),
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
    if (outer != 1) cache.ckv_scale = contiguous(&outer, DType::kF32, {1});
    return cache;
  }
  uint8_t* data(size_t slot) { return &bytes[slot / page_size * stride + slot % page_size * bytes_of(format).row]; }
  uint8_t* scales(size_t slot) {
    const Bytes of = bytes_of(format);
    if (of.footer == 0) return data(slot) + of.scales_at;
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
    std::vector<uint16_t> all;
    for (const Row& row : rows) all.insert(all.end(), row.begin(), row.end());
    params.kv = contiguous(all.data(), DType::kBF16, {count, static_cast<int64_t>(bytes_of(pool.format).width())});
    params.slot_mapping = contiguous(slots.data(), DType::kI64, {count});
    params.cache = pool.cache();
    const Status status = run(*context_, params);
    ASSERT_TRUE(status.ok()) << status.message();
  }

  void expect_bytes(CacheFormat format, const std::vector<Row>& rows, size_t page_size, size_t extra, bool powers,
                    float outer = 1) {
    SCOPED_TRACE(testing::Message() << name(format) << ", pages of " << page_size << " + " << extra << " bytes, "
                                    << (powers ? "powers of two" : "any scales") << ", outer scale " << outer);
    const size_t pages = (rows.size() + page_size - 1) / page_size;
    Pool got(format, page_size, pages, extra, powers, outer), expected = got;
    for (size_t i = 0; i < rows.size(); ++i) {
      const size_t slot = rows.size() - 1 - i;
      pack(format, powers, outer, rows[i], expected.data(slot), expected.scales(slot));
    }
    ASSERT_NO_FATAL_FAILURE(append(rows, got));
    for (size_t i = 0; i < got.bytes.size(); ++i)
      ASSERT_EQ(got.bytes[i], expected.bytes[i]) << "byte " << i % got.stride << " of page " << i / got.stride;
  }

  /// Appends one row, whose channels come again and again, and returns its bytes.
  std::vector<uint8_t> bytes_of_row(CacheFormat format, const std::vector<float>& channels, bool powers = true,
                                    float outer = 1) {
    Row row;
    for (size_t c = 0; c < bytes_of(format).width(); ++c) row.push_back(f32_to_bf16(channels[c % channels.size()]));
    Pool pool(format, 1, 1, 0, powers, outer);
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
/// group's own largest one, or a number around a step of the scale somewhat above that. The rotary channels are a
/// group.
std::vector<Row> every_bf16(CacheFormat format, uint16_t factor_bits, int above) {
  const Bytes bytes = bytes_of(format);
  std::vector<Row> rows;
  uint32_t next = 0;
  while (next < 0x10000U) {
    Row& row = rows.emplace_back(bytes.width());
    for (size_t first = 0; first < row.size();) {
      const size_t end = first < bytes.latents ? first + bytes.group : row.size();
      for (size_t c = first; c + 1 < end; ++c) row[c] = static_cast<uint16_t>(next++);
      const auto amax = static_cast<float>(amax_of(&row[first], end - first - 1));
      uint32_t bits = (f32_to_bf16(amax) & 0x7F80U) + static_cast<uint32_t>(above) * 0x80U + factor_bits;
      if (bits >= 0x7F80U) bits = 0x7F7FU;  // the largest of all
      row[end - 1] = static_cast<uint16_t>(bits);
      first = end;
    }
  }
  return rows;
}

/// Returns an outer scale for a format that takes one: none, one that rounds products, a power of two.
float some_outer_scale(CacheFormat format, size_t turn) {
  constexpr float kOuterScales[] = {1.0F, 0.0037F, 0x1p-8F};
  return kv_layout(format).nope.outer_scale ? kOuterScales[turn % std::size(kOuterScales)] : 1.0F;
}

TEST_P(FormatBytes, OfEveryBF16BesideEveryKindOfLargest) {
  // Mantissas of bf16 around 1 and 1.75, where powers of two step, and 1.5, which is that of 6.
  constexpr uint16_t kMantissas[] = {0x00, 0x01, 0x3F, 0x40, 0x41, 0x5F, 0x60, 0x61, 0x7F};
  const bool emulated = std::get<0>(GetParam()) != "cpu";
  size_t turn = 0;
  for (const CacheFormat format : kFormats)
    for (const uint16_t mantissa : kMantissas)
      for (const int above : {0, 1, 5}) {
        ++turn;
        if (emulated && above == 1) continue;  // the emulator takes its time
        const bool any = format == CacheFormat::kFP8Nope && mantissa % 2 == 1;
        ASSERT_NO_FATAL_FAILURE(
            expect_bytes(format, every_bf16(format, mantissa, above), 64, 0, !any, some_outer_scale(format, turn)));
      }
}

TEST_P(FormatBytes, OfPagesOfEverySizeAndStride) {
  size_t turn = 0;
  for (const CacheFormat format : kFormats) {
    std::vector<Row> rows = every_bf16(format, 0x30, 2);
    rows.resize(std::min<size_t>(rows.size(), 131));
    for (const size_t page_size : {1, 2, 64, 128})
      for (const size_t extra : {0, 2, 48, 4096})
        ASSERT_NO_FATAL_FAILURE(expect_bytes(format, rows, page_size, extra, true, some_outer_scale(format, turn++)));
  }
}

/// Returns the bytes of a row in a page of one token before its scales.
size_t scales_at(CacheFormat format) {
  const Bytes bytes = bytes_of(format);
  return bytes.footer > 0 ? bytes.row : bytes.scales_at;
}

constexpr CacheFormat kE2M1Formats[] = {CacheFormat::kFP4DsV41,      CacheFormat::kNvFP4DsMla,
                                        CacheFormat::kNvFP4DsMla416, CacheFormat::kNvFP4DsMla368,
                                        CacheFormat::kNvFP4DsV4,     CacheFormat::kMxFP4DsV4};

TEST_P(FormatBytes, E2M1EvenChannelsAreInLowNibbles) {
  for (const CacheFormat format : kE2M1Formats) {
    SCOPED_TRACE(name(format));
    const std::vector<uint8_t> bytes = bytes_of_row(format, {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F, -0.0F,
                                                             -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F});
    constexpr uint8_t kExpected[] = {0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE};
    const Bytes of = bytes_of(format);
    for (size_t i = 0; i < of.latents / 2; ++i) ASSERT_EQ(bytes[i], kExpected[i % 8]) << i;
    const size_t first = scales_at(format), end = first + of.latents / of.group;
    for (size_t i = first; i < end; ++i) ASSERT_EQ(bytes[i], of.scale == Scale::kUE8M0 ? 127 : 0x38) << i;  // 1
    for (size_t i = end; i < first + of.scale_room; ++i) ASSERT_EQ(bytes[i], 0) << i;
  }
}

/// Every tie of e2m1 times a scale, which bf16 holds.
void expect_ties(const std::vector<uint8_t>& bytes, float scale) {
  constexpr uint8_t kCodes[] = {0, 2, 2, 4, 4, 6, 6};
  for (size_t i = 0; i < 7; ++i) ASSERT_EQ(bytes[i], kCodes[i] | (kCodes[i] | 8) << 4) << i << " of scale " << scale;
  ASSERT_EQ(bytes[7], 0x70);
}
std::vector<float> ties_of(float scale) {
  constexpr float kTies[] = {0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5.0F};
  std::vector<float> channels(16, 0.0F);
  for (size_t i = 0; i < 7; ++i) {
    channels[2 * i] = kTies[i] * scale;
    channels[2 * i + 1] = -kTies[i] * scale;
  }
  channels[15] = 6 * scale;
  for (const float channel : channels) EXPECT_EQ(bf16_to_f32(f32_to_bf16(channel)), channel);
  return channels;
}

TEST_P(FormatBytes, E2M1TiesGoToEvenUnderEveryMantissaOfAScale) {
  for (int exponent = -6; exponent <= 8; ++exponent)
    for (int mantissa = 8; mantissa < 16; ++mantissa) {
      const float scale = std::ldexp(static_cast<float>(mantissa), exponent - 3);
      if (scale > 448) continue;
      // Formats take turns; their codecs are one. An outer scale of 2^-8 leaves scales as they are.
      const CacheFormat format = std::array{CacheFormat::kFP4DsV41, CacheFormat::kNvFP4DsV4,
                                            CacheFormat::kNvFP4DsMla}[static_cast<size_t>(mantissa + exponent + 6) % 3];
      const float outer = format == CacheFormat::kNvFP4DsMla ? 0x1p-8F : 1.0F;
      const std::vector<uint8_t> bytes = bytes_of_row(format, ties_of(scale * outer), true, outer);
      ASSERT_EQ(bytes[scales_at(format)], f32_to_e4m3(scale)) << name(format);
      ASSERT_NO_FATAL_FAILURE(expect_ties(bytes, scale)) << name(format);
    }
}

TEST_P(FormatBytes, E2M1TiesGoToEvenUnderPowersOfTwo) {
  for (int exponent = -15; exponent <= 100; exponent += 5) {
    const float scale = std::ldexp(1.0F, exponent);
    const std::vector<uint8_t> bytes = bytes_of_row(CacheFormat::kMxFP4DsV4, ties_of(scale));
    ASSERT_EQ(bytes[224], exponent + 127);
    ASSERT_NO_FATAL_FAILURE(expect_ties(bytes, scale));
  }
}

/// 432 bytes end with the rotary channels in bf16, and zeros pad the scales; 416 have no padding; 368 have the scale of
/// e4m3 rotary channels in its place. Footers of V4 have 28 scales and 4 zeros, its MXFP4 rows 14 and 2.
TEST_P(FormatBytes, PartsOfNvFP4AndMxFP4RowsLieWhereTheyAreSaid) {
  std::vector<float> channels(576, 6.0F);
  for (size_t c = 0; c < 64; ++c) channels[512 + c] = static_cast<float>(c) + 1;
  const auto rope_at = [](const std::vector<uint8_t>& bytes, size_t at, size_t c) {
    return bf16_to_f32(static_cast<uint16_t>(bytes[at + 2 * c] | bytes[at + 2 * c + 1] << 8));
  };
  for (const auto& [format, at] :
       {std::pair(CacheFormat::kNvFP4DsMla, size_t{304}), std::pair(CacheFormat::kNvFP4DsMla416, size_t{288})}) {
    const std::vector<uint8_t> bytes = bytes_of_row(format, channels);
    ASSERT_EQ(bytes.size(), at + 128);
    for (size_t i = 0; i < 256; ++i) ASSERT_EQ(bytes[i], 0x77);
    for (size_t i = 256; i < 288; ++i) ASSERT_EQ(bytes[i], 0x38);
    for (size_t i = 288; i < at; ++i) ASSERT_EQ(bytes[i], 0);
    for (size_t c = 0; c < 64; ++c) ASSERT_EQ(rope_at(bytes, at, c), static_cast<float>(c) + 1);
  }
  const std::vector<uint8_t> compact = bytes_of_row(CacheFormat::kNvFP4DsMla368, channels);
  ASSERT_EQ(compact.size(), 368);
  float scale;
  std::memcpy(&scale, &compact[288], 4);
  EXPECT_EQ(scale, 64.0F / 448.0F);
  for (size_t i = 292; i < 304; ++i) ASSERT_EQ(compact[i], 0);
  EXPECT_EQ(compact[304 + 63], 0x7E);  // 448
  EXPECT_EQ(compact[304 + 31], 0x76);  // 224
  EXPECT_EQ(compact[304 + 0], 0x4E);   // 7

  std::vector<float> of_v4(512, 3.0F);
  for (size_t c = 0; c < 64; ++c) of_v4[448 + c] = static_cast<float>(c) + 1;
  const std::vector<uint8_t> footer = bytes_of_row(CacheFormat::kNvFP4DsV4, of_v4);
  ASSERT_EQ(footer.size(), 384);
  for (size_t i = 0; i < 224; ++i) ASSERT_EQ(footer[i], 0x77);
  for (size_t c = 0; c < 64; ++c) ASSERT_EQ(rope_at(footer, 224, c), static_cast<float>(c) + 1);
  for (size_t i = 352; i < 384; ++i) ASSERT_EQ(footer[i], i < 380 ? 0x30 : 0) << i;  // 0.5
  const std::vector<uint8_t> row = bytes_of_row(CacheFormat::kMxFP4DsV4, of_v4);
  ASSERT_EQ(row.size(), 368);
  for (size_t i = 224; i < 240; ++i) ASSERT_EQ(row[i], i < 238 ? 126 : 0) << i;
  for (size_t c = 0; c < 64; ++c) ASSERT_EQ(rope_at(row, 240, c), static_cast<float>(c) + 1);
}

/// max |ckv| / (6 * 448), which calibration gives, puts the largest scale at 448; a smaller outer scale saturates.
TEST_P(FormatBytes, TheOuterScaleMovesAllScales) {
  for (const CacheFormat format :
       {CacheFormat::kNvFP4DsMla, CacheFormat::kNvFP4DsMla416, CacheFormat::kNvFP4DsMla368}) {
    SCOPED_TRACE(name(format));
    const auto with = [&](float amax, float outer) {
      const std::vector<uint8_t> bytes = bytes_of_row(format, {amax, 0.0F}, true, outer);
      return std::pair(bytes[0], bytes[256]);
    };
    using Pair = std::pair<uint8_t, uint8_t>;
    EXPECT_EQ(with(0.02F, 1.0F), Pair(0x07, 0x02));  // 0.02 / 6 is nearest to 2^-8, a subnormal: 6 is 17 % above
    EXPECT_EQ(with(0.02F, 0.02F / (6 * 448)), Pair(0x07, 0x7E));
    EXPECT_EQ(with(5.25F, 5.25F / (6 * 448)), Pair(0x07, 0x7E));
    EXPECT_EQ(with(5.25F, 1.25F / (6 * 448)), Pair(0x07, 0x7E));
    EXPECT_EQ(with(3.0F, 0.25F), Pair(0x07, 0x40));
    EXPECT_EQ(with(0.0F, 0.25F), Pair(0x00, 0x01));
  }
}

TEST_P(FormatBytes, ScalesAreClamped) {
  const float huge = bf16_to_f32(0x7F7F);
  const auto first = [&](CacheFormat format, float amax) {
    const std::vector<uint8_t> bytes = bytes_of_row(format, {amax, 0.0F});
    return std::pair(bytes[0], bytes[scales_at(format)]);
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
  constexpr CacheFormat kMx = CacheFormat::kMxFP4DsV4;
  EXPECT_EQ(first(kMx, 0.0F), Pair(0x00, 112));  // 2^-15, the power of two above 1e-4 / 6
  EXPECT_EQ(first(kMx, 0x1p-100F), Pair(0x00, 112));
  EXPECT_EQ(first(kMx, 6 * 0x1p-15F), Pair(0x07, 112));
  EXPECT_EQ(first(kMx, 6.0F), Pair(0x07, 127));
  EXPECT_EQ(first(kMx, 6.03125F), Pair(0x05, 128));  // the next bf16
  EXPECT_EQ(first(kMx, 8.0F), Pair(0x06, 128));
  EXPECT_EQ(first(kMx, huge), Pair(0x06, 253));  // 2^127.99 / 2^125 would saturate; by 2^126 it is 4
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
  for (const CacheFormat format : kE2M1Formats) {
    const std::vector<uint8_t> bytes = bytes_of_row(format, channels);
    EXPECT_EQ(std::vector<uint8_t>(bytes.begin(), bytes.begin() + 4), of_pool) << name(format);
    EXPECT_EQ(bytes[scales_at(format)], format == CacheFormat::kMxFP4DsV4 ? 127 : 0x38) << name(format);
  }
  const std::vector<uint8_t> compact = bytes_of_row(CacheFormat::kNvFP4DsMla368, channels);
  float rope_scale;
  std::memcpy(&rope_scale, &compact[288], 4);
  EXPECT_EQ(rope_scale, 6.0F / 448.0F);
  EXPECT_EQ(std::vector<uint8_t>(compact.begin() + 304, compact.begin() + 308),
            (std::vector<uint8_t>{0x7E, 0x7E, 0xFE, 0x7F}));
  const std::vector<uint8_t> nope = bytes_of_row(CacheFormat::kFP8Nope, channels);
  EXPECT_EQ(std::vector<uint8_t>(nope.begin(), nope.begin() + 4), of_window);
}

}  // namespace
}  // namespace mla
