// SPDX-License-Identifier: Apache-2.0
// Tests every verb of every instruction set this machine has, against plain loops in double.
#include "cpu/tile_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cpu/tile_kernels_fixture.h"
#include "mla/backend.h"
#include "mla/numeric.h"

namespace mla::cpu {
namespace {

TEST_P(TileKernelsTest, ScoresAreDotProducts) {
  const int32_t lanes = kernels_->lanes;
  for (int32_t groups = 1; groups <= kPanelGroups; ++groups)
    for (int32_t num_keys : {1, 7, 8, 21, 32, 50}) {
      const int32_t widths[] = {64, 32};
      const int32_t d = 96;
      const int32_t rows = groups * lanes;
      const auto q = random_values(static_cast<size_t>(rows * d));
      const auto k = random_values(static_cast<size_t>(num_keys * d));
      const auto q_bytes = stored(q);
      const int32_t key_tile = std::max(kKeyTile, kernels_->tile_keys);
      const int32_t padded = (num_keys + key_tile - 1) / key_tile * key_tile;
      auto k_bytes = stored(k);
      const auto element_bytes = size_of(element());
      k_bytes.resize(static_cast<size_t>(padded * d) * element_bytes);
      std::vector<uint32_t> packed(static_cast<size_t>(lane_words(rows, d / kernels_->pack)));
      for (int32_t group = 0; group < groups; ++group) {
        std::vector<const void*> group_rows;
        for (int32_t row = group * lanes; row < (group + 1) * lanes; ++row)
          group_rows.push_back(&q_bytes[static_cast<size_t>(row * d) * element_bytes]);
        kernels_->pack_queries(group_rows.data(), element(), d,
                               &packed[static_cast<size_t>(group * d / kernels_->pack * lanes)]);
      }
      std::vector<std::vector<const void*>> lists(2, std::vector<const void*>(static_cast<size_t>(padded)));
      Segment segments[2];
      size_t offset = 0;
      for (size_t i = 0; i < 2; ++i) {
        for (int32_t key = 0; key < padded; ++key)
          lists[i][static_cast<size_t>(key)] =
              &k_bytes[(static_cast<size_t>((whole_tiles() ? key : std::min(key, num_keys - 1)) * d) + offset) *
                       element_bytes];
        segments[i] = {.rows = lists[i].data(), .steps = widths[i] / kernels_->pack};
        offset += static_cast<size_t>(widths[i]);
      }
      const int64_t stride = static_cast<int64_t>(padded) * lanes;
      std::vector<float> s(static_cast<size_t>(groups * stride));
      const Prefetch prefetch{.rows = {lists[0].data(), lists[1].data()}, .lines = {3, 1}};
      const int32_t middle = num_keys > key_tile ? key_tile : 0;  // in two calls
      const int64_t q_stride = static_cast<int64_t>(d / kernels_->pack) * lanes;
      kernels_->scores(packed.data(), q_stride, groups, segments, 2, prefetch, 0, middle, s.data(), stride, {});
      kernels_->scores(packed.data(), q_stride, groups, segments, 2, prefetch, middle, num_keys, s.data(), stride, {});
      for (int32_t row = 0; row < rows; ++row)
        for (int32_t key = 0; key < num_keys; ++key) {
          double expected = 0.0;
          for (int32_t i = 0; i < d; ++i)
            expected += double{q[static_cast<size_t>(row * d + i)]} * double{k[static_cast<size_t>(key * d + i)]};
          const float got = s[static_cast<size_t>(row / lanes * stride + key * lanes + row % lanes)];
          ASSERT_NEAR(got, expected, 1e-4) << groups << " groups, row " << row << ", key " << key;
        }
    }
}

TEST_P(TileKernelsTest, MissingQueriesAreZero) {
  const int32_t lanes = kernels_->lanes;
  constexpr int32_t kWidth = 64;
  const std::vector<const void*> rows(static_cast<size_t>(lanes), nullptr);
  std::vector<uint32_t> packed(static_cast<size_t>(kWidth / kernels_->pack * lanes), 0xFFFFFFFFU);
  kernels_->pack_queries(rows.data(), element(), kWidth, packed.data());
  for (uint32_t word : packed) EXPECT_EQ(word, 0U);
}

TEST_P(TileKernelsTest, SoftmaxIsOnline) {
  const auto lanes = static_cast<size_t>(kernels_->lanes);
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  constexpr float kScale = 0.3F;
  constexpr double kSlack = 8.0;  // by which the base may stay behind the largest score
  for (int32_t keys : {48, 96, 10})
    for (bool masked : {false, true}) {
      std::vector<float> max(lanes, kLowest), base(lanes, kLowest), sum(lanes, 0.0F), alpha(lanes);
      std::vector<double> top(lanes, kLowest), total(lanes, 0.0);
      for (int block = 0; block < 3; ++block) {
        const auto s = random_values(static_cast<size_t>(keys) * lanes, 20.0F);
        std::vector<int32_t> limit(lanes);
        for (size_t lane = 0; lane < lanes; ++lane)
          limit[lane] = masked ? static_cast<int32_t>(random_() % static_cast<uint32_t>(keys + 4)) - 2 : keys;
        if (masked) limit[0] = -5;  // a row that never sees a key
        const std::vector<float> old_base = base;
        std::vector<uint32_t> p(static_cast<size_t>(padded_steps(keys)) * lanes, 0xFFFFFFFFU);
        kernels_->softmax({.s = s.data(),
                           .num_keys = keys,
                           .limit = masked ? limit.data() : nullptr,
                           .scale_log2 = kScale,
                           .max = max.data(),
                           .base = base.data(),
                           .sum = sum.data(),
                           .alpha = alpha.data(),
                           .p = p.data()});
        for (size_t lane = 0; lane < lanes; ++lane) {
          for (int32_t key = 0; key < limit[lane] && key < keys; ++key)
            top[lane] = std::max(top[lane], double{s[static_cast<size_t>(key) * lanes + lane]} * kScale);
          if (std::isinf(top[lane])) {
            ASSERT_EQ(max[lane], kLowest);
            ASSERT_EQ(base[lane], kLowest);
            continue;
          }
          ASSERT_NEAR(max[lane], top[lane], 1e-5);
          if (whole_tiles()) {
            ASSERT_LE(max[lane], base[lane] + kSlack);
            ASSERT_TRUE(base[lane] == old_base[lane] || base[lane] == max[lane]);
          } else {
            ASSERT_EQ(base[lane], max[lane]);
          }
          const double exponent = base[lane];
          const double expected_alpha = std::exp2(old_base[lane] - exponent);
          EXPECT_NEAR(alpha[lane], expected_alpha, 1e-6 * expected_alpha + 1e-30);
          total[lane] *= expected_alpha;
          for (int32_t key = 0; key < keys; ++key) {
            const double score = double{s[static_cast<size_t>(key) * lanes + lane]} * kScale;
            const double expected = key < limit[lane] ? std::exp2(score - exponent) : 0.0;
            total[lane] += expected;
            const float got = probability(p, key, static_cast<int32_t>(lane));
            ASSERT_NEAR(got, expected, expected * (kernels_->pack == 2 ? 4e-3 : 3e-6) + 1e-37) << lane << ' ' << key;
            if (expected == 0.0) {
              ASSERT_EQ(got, 0.0F);
            }
          }
          for (int32_t key = keys; whole_tiles() && key < padded_steps(keys) * kernels_->pack; ++key)
            ASSERT_EQ(probability(p, key, static_cast<int32_t>(lane)), 0.0F);
          EXPECT_NEAR(sum[lane], total[lane], 2e-6 * total[lane]);
        }
      }
      if (masked) {
        EXPECT_EQ(sum[0], 0.0F);
      }
    }
}

TEST_P(TileKernelsTest, SoftmaxKeepsNaN) {
  const auto lanes = static_cast<size_t>(kernels_->lanes);
  std::vector<float> s(8 * lanes, 1.0F);
  s[3 * lanes] = std::numeric_limits<float>::quiet_NaN();  // key 3 of row 0
  std::vector<float> max(lanes, -std::numeric_limits<float>::infinity());
  std::vector<float> base = max, sum(lanes, 0.0F), alpha(lanes);
  std::vector<uint32_t> p(32 * lanes);
  kernels_->softmax({.s = s.data(),
                     .num_keys = 8,
                     .max = max.data(),
                     .base = base.data(),
                     .sum = sum.data(),
                     .alpha = alpha.data(),
                     .p = p.data()});
  EXPECT_TRUE(std::isnan(sum[0]));
  for (size_t lane = 1; lane < lanes; ++lane) EXPECT_FLOAT_EQ(sum[lane], 8.0F);
}

TEST_P(TileKernelsTest, AccumulateIsProbabilitiesTimesValues) {
  const int32_t lanes = kernels_->lanes;
  const int32_t pack = kernels_->pack;
  for (int32_t rows : {1, 4, 15, 2 * lanes})
    for (int32_t num_keys : {1, 5, 32, 70}) {
      const int32_t steps = (num_keys + pack - 1) / pack, room = padded_steps(num_keys);
      const int32_t groups = (rows + lanes - 1) / lanes;
      const auto values = random_values(static_cast<size_t>(num_keys * 2 * kSlab));
      const auto bytes = stored(values);
      std::vector<const void*> list(static_cast<size_t>(num_keys));
      for (size_t key = 0; key < list.size(); ++key) list[key] = &bytes[key * 2 * kSlab * size_of(element())];
      std::vector<uint32_t> slabs[2] = {std::vector<uint32_t>(static_cast<size_t>(room * kSlab), 0xFFFFFFFFU),
                                        std::vector<uint32_t>(static_cast<size_t>(room * kSlab), 0xFFFFFFFFU)};
      const auto source = [&](int32_t slab) {
        return SlabSource{.rows = list.data(), .dtype = element(), .num_keys = num_keys, .channel = slab * kSlab};
      };
      const SlabSource second = source(1);
      kernels_->pack_slab(source(0), slabs[0].data());
      if (pack == 1) kernels_->pack_slab(second, slabs[1].data());

      std::vector<uint32_t> p(static_cast<size_t>(groups * room * lanes), 0U);
      std::vector<float> probability(static_cast<size_t>(rows * num_keys));
      std::uniform_real_distribution<float> uniform(0.0F, 1.0F);
      for (int32_t row = 0; row < rows; ++row)
        for (int32_t key = 0; key < num_keys; ++key) {
          const uint16_t half = f32_to_bf16(uniform(random_));
          probability[static_cast<size_t>(row * num_keys + key)] = bf16_to_f32(half);
          const KeyPlace place = key_place(key);
          uint32_t& word = p[static_cast<size_t>(row / lanes * room * lanes) + place_of(place.step, row % lanes)];
          word |= uint32_t{half} << (pack == 1 ? 16 : 16 * place.half);
        }
      const std::vector<int32_t> key_steps(static_cast<size_t>(groups), steps);
      const auto padded = static_cast<size_t>(groups * lanes);
      const std::vector<float> alpha(padded, 0.5F);
      std::vector<float> o(padded * kSlab, std::numeric_limits<float>::quiet_NaN());
      const int64_t p_stride = static_cast<int64_t>(room) * lanes;
      Background background;
      constexpr int32_t kLines = 2 * kSlab * 2 / 64;  // of a row of bf16
      std::vector<std::byte> copy(list.size() * 64);
      std::vector<std::byte> whole(list.size() * kLines * 64);
      std::vector<const void*> copied(list.size());
      for (size_t key = 0; key < list.size(); ++key) copied[key] = &whole[key * kLines * 64];
      if (whole_tiles()) {
        background = {.slab = second, .v = slabs[1].data()};
      } else if (pack == 2) {  // the second slab is packed from a copy
        background = {
            .copies = {RowCopy{.rows = list.data(), .num_rows = num_keys, .lines = 1, .to = copy.data()},
                       RowCopy{.rows = list.data(), .num_rows = num_keys, .lines = kLines, .to = whole.data()}},
            .slab = second,
            .v = slabs[1].data()};
        background.slab.rows = copied.data();
      }
      ValueProducts products = {.p = p.data(),
                                .p_group_stride = p_stride,
                                .v = slabs[0].data(),
                                .key_steps = key_steps.data(),
                                .num_rows = rows,
                                .alpha = alpha.data(),
                                .first = true,
                                .o = o.data()};
      kernels_->accumulate(products, background);
      products.v = slabs[1].data();
      products.first = false;
      kernels_->accumulate(products, {});
      for (size_t key = 0; pack == 2 && !whole_tiles() && key < list.size(); ++key)
        ASSERT_EQ(std::memcmp(&copy[key * 64], list[key], 64), 0) << rows << ' ' << num_keys;
      for (int32_t row = 0; row < rows; ++row)
        for (int32_t c = 0; c < kSlab; ++c) {
          double expected = 0.0;
          for (int32_t key = 0; key < num_keys; ++key) {
            const double weight = probability[static_cast<size_t>(row * num_keys + key)];
            const size_t at = static_cast<size_t>(key * 2 * kSlab + c);
            expected += weight * (0.5 * double{values[at]} + double{values[at + kSlab]});
          }
          ASSERT_NEAR(o[static_cast<size_t>(row * kSlab) + position(c)], expected, 1e-4) << rows << ' ' << num_keys;
        }
    }
}

TEST_P(TileKernelsTest, SlabsOfPairsHoldTwoKeysAndZerosForAMissingOne) {
  if (kernels_->pack != 2) return;
  for (int32_t num_keys : {1, 2, 5, 17, 40}) {
    std::vector<uint16_t> values(static_cast<size_t>(num_keys) * 2 * kSlab);
    for (uint16_t& value : values) value = static_cast<uint16_t>(random_());
    std::vector<const void*> list(static_cast<size_t>(num_keys));
    for (size_t key = 0; key < list.size(); ++key) list[key] = &values[key * 2 * kSlab];
    const int32_t steps = padded_steps(num_keys);
    std::vector<uint32_t> slab(static_cast<size_t>(steps) * kSlab, 0xFFFFFFFFU);
    kernels_->pack_slab({.rows = list.data(), .dtype = DType::kBF16, .num_keys = num_keys, .channel = kSlab},
                        slab.data());
    for (int32_t key = 0; key < 2 * steps; ++key)
      for (int32_t c = 0; c < kSlab; ++c) {
        const KeyPlace place = key_place(key);
        const uint32_t word = slab[static_cast<size_t>(place.step * kSlab) + position(c)];
        const uint16_t expected = key < num_keys ? values[static_cast<size_t>((2 * key + 1) * kSlab + c)] : uint16_t{0};
        ASSERT_EQ(static_cast<uint16_t>(word >> (16 * place.half)), expected)
            << num_keys << " keys, key " << key << ", channel " << c;
      }
  }
}

TEST_P(TileKernelsTest, ScoresTakeTheirShape) {
  const auto lanes = static_cast<size_t>(kernels_->lanes);
  constexpr int32_t kKeys = 10;
  constexpr float kScale = 0.25F;
  std::vector<float> slope(lanes);
  std::vector<int32_t> query_position(lanes);
  std::vector<int32_t> key_position(kKeys);
  for (size_t lane = 0; lane < lanes; ++lane) {
    slope[lane] = 0.01F * static_cast<float>(lane);
    query_position[lane] = 1000000000 - static_cast<int32_t>(lane);
  }
  for (size_t key = 0; key < kKeys; ++key) key_position[key] = 999999000 + 7 * static_cast<int32_t>(key);
  for (float cap : {0.0F, 30.0F})
    for (bool biased : {false, true}) {
      auto s = random_values(kKeys * lanes, 200.0F);
      s[0] = 0.0F;
      const auto before = s;
      kernels_->shape_scores(s.data(), kKeys, kScale, cap, biased ? slope.data() : nullptr, query_position.data(),
                             key_position.data());
      for (size_t i = 0; i < s.size(); ++i) {
        double expected = double{before[i]} * kScale;
        if (cap != 0.0F) expected = cap * std::tanh(expected / cap);
        if (biased) expected += double{slope[i % lanes]} * (key_position[i / lanes] - query_position[i % lanes]);
        ASSERT_NEAR(s[i], expected, 2e-5) << i << ' ' << cap << ' ' << biased;
      }
    }
}

TEST_P(TileKernelsTest, DecodesEveryCodeAtEveryScale) {
  std::vector<uint8_t> codes(256 + 3);  // odd tail
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 37);
  std::vector<uint8_t> finite(codes);
  for (uint8_t& code : finite) code = (code & 0x7FU) == 0x7FU ? 0 : code;
  for (const auto& row : {codes, finite})
    for (float scale :
         {0x1p-127F, 0x1p-126F, 0x1p-100F, 2.2321429e-7F, 0.0371F, 1.0F, 1.7F, 0x1p100F, 0x1p119F, 3e38F}) {
      std::vector<uint16_t> out(row.size());
      kernels_->decode_row({.element = DType::kE4M3,
                            .elements = row.data(),
                            .scales = &scale,
                            .num_groups = 1,
                            .group = static_cast<int32_t>(row.size())},
                           out.data());
      for (size_t i = 0; i < row.size(); ++i) {
        const uint16_t expected = dequantize_e4m3(row[i], scale);
        if (std::isnan(bf16_to_f32(expected)))
          ASSERT_TRUE(std::isnan(bf16_to_f32(out[i])));
        else
          ASSERT_EQ(out[i], expected) << static_cast<int>(row[i]) << " * " << scale;
      }
    }
}

TEST_P(TileKernelsTest, FindsWhatIsNotFinite) {
  constexpr size_t kWidth = 64;
  for (float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                    std::numeric_limits<float>::quiet_NaN()})
    for (size_t at = 0; at <= kWidth; ++at) {  // kWidth: nowhere
      auto values = random_values(kWidth, 1e30F);
      std::vector<uint16_t> narrow;
      if (at < kWidth) values[at] = bad;
      for (float value : values) narrow.push_back(f32_to_bf16(value));
      EXPECT_EQ(kernels_->finite(values.data(), DType::kF32, kWidth), at == kWidth);
      EXPECT_EQ(kernels_->finite(narrow.data(), DType::kBF16, kWidth), at == kWidth);
    }
}

TEST_P(TileKernelsTest, StoreRowScalesAndRounds) {
  constexpr int32_t kWidth = 2 * kSlab;
  const auto values = random_values(kWidth);
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    std::vector<std::byte> out(kWidth * size_of(dtype));
    std::vector<float> o(kWidth);
    for (size_t i = 0; i < kWidth; ++i) o[i / kSlab * kSlab + position(static_cast<int32_t>(i % kSlab))] = values[i];
    kernels_->store_row(o.data(), kSlab, kWidth, 3.0F, out.data(), dtype);
    for (size_t i = 0; i < kWidth; ++i) {
      uint32_t got = 0;
      std::memcpy(&got, &out[i * size_of(dtype)], dtype == DType::kF32 ? 4 : 2);
      const float exact = values[i] * 3.0F;
      const uint32_t narrow = dtype == DType::kBF16 ? f32_to_bf16(exact) : f32_to_f16(exact);
      EXPECT_EQ(got, dtype == DType::kF32 ? std::bit_cast<uint32_t>(exact) : narrow);
    }
  }
}

TEST_P(TileKernelsTest, StoresE4M3) {
  auto values = random_values(kSlab, 200.0F);
  values[0] = 449.0F;
  values[1] = std::numeric_limits<float>::quiet_NaN();
  std::vector<uint8_t> out(kSlab);
  std::vector<uint8_t> summed(kSlab);
  const float weight = 2.0F;
  std::vector<float> o(kSlab);
  for (int32_t i = 0; i < kSlab; ++i) o[position(i)] = values[static_cast<size_t>(i)];
  kernels_->store_row(o.data(), kSlab, kSlab, 2.0F, out.data(), DType::kE4M3);
  kernels_->weighted_sum(values.data(), 0, DType::kF32, 1, &weight, 1, kSlab, nullptr, summed.data(), DType::kE4M3);
  for (size_t i = 0; i < kSlab; ++i) {
    EXPECT_EQ(out[i] & 0x7F, f32_to_e4m3(2.0F * values[i]) & 0x7F) << values[i];
    EXPECT_EQ(out[i], summed[i]);
  }
}

TEST_P(TileKernelsTest, WeightedSumSkipsRowsOfWeightZero) {
  constexpr size_t kWidth = 48;
  auto rows = random_values(3 * kWidth);
  for (size_t i = 0; i < kWidth; ++i) rows[kWidth + i] = std::numeric_limits<float>::quiet_NaN();
  const float weight[] = {0.25F, -1.0F, 0.0F, -1.0F, 0.5F};  // stride 2
  const std::vector<float> init(kWidth, 1.0F);
  std::vector<float> out(kWidth);
  kernels_->weighted_sum(rows.data(), kWidth, DType::kF32, 3, weight, 2, kWidth, init.data(), out.data(), DType::kF32);
  for (size_t i = 0; i < kWidth; ++i) EXPECT_NEAR(out[i], 1.0F + 0.25F * rows[i] + 0.5F * rows[2 * kWidth + i], 1e-6);
}

TEST_P(TileKernelsTest, StreamCopiesAnySizeAndAlignment) {
  std::vector<uint8_t> from(400);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(1 + i % 250);
  for (size_t offset : {0U, 1U, 32U})
    for (size_t size : {0U, 1U, 63U, 64U, 100U, 257U}) {
      alignas(64) uint8_t to[400] = {};
      kernels_->stream(from.data() + 3, to + offset, static_cast<int64_t>(size));
      kernels_->finish_streams();
      EXPECT_EQ(std::memcmp(to + offset, from.data() + 3, size), 0) << offset << ' ' << size;
      EXPECT_EQ(std::count(to, to + 400, uint8_t{0}), static_cast<std::ptrdiff_t>(400 - size)) << offset << ' ' << size;
    }
}

TEST_P(TileKernelsTest, ConvertsEveryNarrowCode) {
  std::vector<uint16_t> codes(65536);
  std::iota(codes.begin(), codes.end(), uint16_t{0});
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    const auto widen = [&](uint16_t code) { return dtype == DType::kBF16 ? bf16_to_f32(code) : f16_to_f32(code); };
    std::vector<float> wide(codes.size());
    std::vector<uint16_t> back(codes.size());
    kernels_->convert(codes.data(), dtype, wide.data(), DType::kF32, static_cast<int64_t>(codes.size()));
    kernels_->convert(wide.data(), DType::kF32, back.data(), dtype, static_cast<int64_t>(codes.size()));
    for (size_t i = 0; i < codes.size(); ++i) {
      const float expected = widen(codes[i]);
      if (std::isnan(expected)) {
        EXPECT_TRUE(std::isnan(wide[i])) << i;
        EXPECT_TRUE(std::isnan(widen(back[i]))) << i;
      } else {
        EXPECT_EQ(std::bit_cast<uint32_t>(wide[i]), std::bit_cast<uint32_t>(expected)) << i;
        EXPECT_EQ(back[i], codes[i]);
      }
    }
  }
}

TEST_P(TileKernelsTest, RoundsFloatsLikeTheScalarConversions) {
  std::vector<float> values;
  for (int i = 0; i < 100003; ++i)
    values.push_back(std::bit_cast<float>(static_cast<uint32_t>(random_())));  // odd tail
  for (float special : {0.0F, -0.0F, 65504.0F, 65519.9F, 65520.0F, 1e-8F, 5.96e-8F, 3.3e38F}) values.push_back(special);
  std::vector<uint16_t> out(values.size());
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    kernels_->convert(values.data(), DType::kF32, out.data(), dtype, static_cast<int64_t>(values.size()));
    for (size_t i = 0; i < values.size(); ++i) {
      const bool bf16 = dtype == DType::kBF16;
      if (std::isnan(values[i])) {
        EXPECT_TRUE(std::isnan(bf16 ? bf16_to_f32(out[i]) : f16_to_f32(out[i])));
      } else {
        EXPECT_EQ(out[i], bf16 ? f32_to_bf16(values[i]) : f32_to_f16(values[i])) << values[i];
      }
    }
  }
}

MLA_FOR_EVERY_LEVEL(TileKernelsTest);

/// Returns words of pairs of bf16, of which `kind` says what exponents they have.
std::vector<uint32_t> random_pairs(size_t count, int kind, std::mt19937& random) {
  std::vector<uint32_t> words(count);
  for (uint32_t& word : words) {
    const auto half = [&]() -> uint32_t {
      const uint32_t sign = random() % 2 << 15, fraction = random() % 128;
      if (kind == 0) return sign | (120 + random() % 12) << 7 | fraction;  // near 1
      if (kind == 1) return sign | (30 + random() % 194) << 7 | fraction;  // far apart
      if (kind == 2) return sign | random() % 70 << 7 | fraction;          // products and inputs below the normal ones
      return random() % 65536;                                             // any bits
    };
    word = half() | half() << 16;
  }
  return words;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), [](float x, float y) {
    return (std::isnan(x) && std::isnan(y)) || std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y);
  });
}

// The software's tiles have the bits of the processor's, so that what is tested with the former holds for the latter.
TEST(EmulatedTiles, HaveTheProcessorsBits) {
  const auto find = [](std::string_view name) {
    const auto it = std::ranges::find(levels(), name, &Level::name);
    return it != levels().end() ? &*it : nullptr;
  };
  const Level *real = find("amx"), *emulated = find("amx_emulated");
  if (emulated == nullptr) GTEST_SKIP() << "not in this build";
  if (const core::Reason lack = missing(*real); !lack.empty()) GTEST_SKIP() << lack.str();
  std::mt19937 random{7};
  constexpr int32_t kGroups = 4, kKeys = 64, kSteps = 64;
  for (int kind = 0; kind < 4; ++kind)
    for (int repetition = 0; repetition < 10; ++repetition) {
      const auto q = random_pairs(kGroups * kSteps * 16, kind, random), k = random_pairs(kKeys * kSteps, kind, random);
      const auto p = random_pairs(kGroups * kKeys / 2 * 16, kind, random),
                 v = random_pairs(kKeys / 2 * kSlab, kind, random);
      std::vector<float> before(kGroups * 16 * kSlab);
      for (float& x : before) x = std::bit_cast<float>(random_pairs(1, kind, random)[0]);
      std::vector<float> s[2], o[2];
      for (const Level* level : {real, emulated}) {
        const TileKernels& kernels = *level->kernels().pairs;
        const size_t i = level == real ? 0 : 1;
        s[i].resize(kGroups * kKeys * 16);
        o[i] = before;
        std::vector<const void*> rows(kKeys);
        for (size_t key = 0; key < kKeys; ++key) rows[key] = &k[key * kSteps];
        const Segment segment{.rows = rows.data(), .steps = kSteps};
        const std::vector<int32_t> key_steps(kGroups, kKeys / 2);
        const std::vector<float> alpha(kGroups * 16, 1.0F);
        kernels.begin();
        kernels.scores(q.data(), kSteps * 16, kGroups, &segment, 1, {}, 0, kKeys, s[i].data(), kKeys * 16, {});
        kernels.accumulate({.p = p.data(),
                            .p_group_stride = kKeys / 2 * 16,
                            .v = v.data(),
                            .key_steps = key_steps.data(),
                            .num_rows = kGroups * 16,
                            .alpha = alpha.data(),
                            .o = o[i].data()},
                           {});
        kernels.end();
      }
      ASSERT_TRUE(same(s[0], s[1])) << "scores, kind " << kind;
      ASSERT_TRUE(same(o[0], o[1])) << "values, kind " << kind;
    }
}

}  // namespace
}  // namespace mla::cpu
