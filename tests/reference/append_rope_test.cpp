// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "reference/reference.h"
#include "test_cache.h"
#include "trace.h"

namespace mla::reference {
namespace {

/// Holds `tokens` tokens with `heads` heads, d_ckv = 12 (or the variant's), all sources f32.
struct Problem {
  TestCache cache;
  int64_t tokens;
  int32_t heads, d_ckv, d_kpe, d_qk;
  std::vector<float> q, row, cos_sin;
  std::vector<int64_t> positions, slots;
  bool interleaved;

  Problem(const Variant& variant, int64_t num_tokens, int32_t num_heads, bool pairs, std::mt19937& random)
      : cache(variant, 4, 2),
        tokens(num_tokens),
        heads(num_heads),
        d_ckv(variant.d_ckv - variant.rotary_in_ckv),
        d_kpe(variant.d_kpe + variant.rotary_in_ckv),
        d_qk(variant.d_ckv + variant.d_kpe),
        interleaved(pairs) {
    std::normal_distribution<float> normal;
    q.resize(static_cast<size_t>(tokens * heads * d_qk));
    row.resize(static_cast<size_t>(tokens * d_qk));
    for (float& value : q) value = normal(random);
    for (float& value : row) value = normal(random);
    for (int64_t position = 0; position < 9; ++position) {
      for (bool sine : {false, true})
        for (int32_t i = 0; i < d_kpe / 2; ++i) {
          const double angle = static_cast<double>(position) * std::pow(10000.0, -2.0 * i / d_kpe);
          cos_sin.push_back(
              static_cast<float>(1.1 * (sine ? std::sin(angle) : std::cos(angle))));  // as YaRN scales them
        }
    }
    for (int64_t t = 0; t < tokens; ++t) {
      positions.push_back((t * 5 + 3) % 9);
      slots.push_back(t == 1 ? -1 : (t * 3) % 8);
    }
  }

  core::AppendRopeArgs args() {
    core::AppendRopeArgs args;
    args.num_tokens = tokens;
    args.num_heads = heads;
    args.q_dtype = args.dtype = DType::kF32;
    args.q_nope = q.data();
    args.q_pe = q.data() + d_ckv;
    args.q_nope_stride_token = args.q_pe_stride_token = heads * d_qk;
    args.q_nope_stride_head = args.q_pe_stride_head = d_qk;
    args.q_out_stride_token = heads * d_qk;
    args.q_out_stride_head = d_qk;
    args.ckv = row.data();
    args.kpe = row.data() + d_ckv;
    args.ckv_stride_token = args.kpe_stride_token = d_qk;
    args.cos_sin = cos_sin.data();
    args.cos_sin_stride_position = d_kpe;
    args.positions = positions.data();
    args.interleaved = interleaved;
    args.slot_mapping = slots.data();
    args.cache = cache.view();
    return args;
  }

  /// Returns the row [nope | rope] of a token with its rotary part turned, every operation rounded to f32.
  std::vector<float> turned(const float* source, int64_t token) const {
    std::vector<float> out(source, source + d_qk);
    const float* table = &cos_sin[static_cast<size_t>(positions[static_cast<size_t>(token)] * d_kpe)];
    for (int32_t i = 0; i < d_kpe / 2; ++i) {
      const int32_t a = d_ckv + (interleaved ? 2 * i : i), b = d_ckv + (interleaved ? 2 * i + 1 : i + d_kpe / 2);
      const float cos = table[i], sin = table[d_kpe / 2 + i];
      const volatile float ac = source[a] * cos, bs = source[b] * sin, as = source[a] * sin, bc = source[b] * cos;
      out[static_cast<size_t>(a)] = ac - bs;
      out[static_cast<size_t>(b)] = as + bc;
    }
    return out;
  }
};

TEST(ReferenceAppendRope, QuarterTurnByHand) {
  // cos 0, sin 1: (x, y) -> (-y, x), by pairs (0, 1), (2, 3) or by halves (0, 2), (1, 3).
  for (bool interleaved : {true, false}) {
    const float cos_sin[] = {9, 9, 9, 9, 0, 0, 1, 1}, q[] = {5, 1, 2, 3, 4}, row[] = {6, 10, 20, 30, 40};
    const int64_t position = 1, slot = 0;
    float out[5] = {};
    TestCache cache({.format = CacheFormat::kBF16, .d_ckv = 1, .d_kpe = 4}, 1, 1);
    core::AppendRopeArgs args;
    args.num_tokens = args.num_heads = 1;
    args.q_dtype = args.dtype = args.q_out_dtype = DType::kF32;
    args.q_nope = q;
    args.q_pe = q + 1;
    args.q_out = out;
    args.ckv = row;
    args.kpe = row + 1;
    args.cos_sin = cos_sin;
    args.cos_sin_stride_position = 4;
    args.positions = &position;
    args.interleaved = interleaved;
    args.slot_mapping = &slot;
    args.cache = cache.view();
    append_rope(args);
    const std::vector<float> key = cache.unpack(0), query(out, out + 5);
    if (interleaved) {
      EXPECT_EQ(query, (std::vector<float>{5, -2, 1, -4, 3}));
      EXPECT_EQ(key, (std::vector<float>{6, -20, 10, -40, 30}));
    } else {
      EXPECT_EQ(query, (std::vector<float>{5, -3, -4, 1, 2}));
      EXPECT_EQ(key, (std::vector<float>{6, -30, -40, 10, 20}));
    }
  }
}

TEST(ReferenceAppendRope, EveryFormatAndQueryType) {
  std::mt19937 random(12);
  for (const Variant& variant : all_variants()) {
    if (variant.d_kpe + variant.rotary_in_ckv == 0) continue;
    for (bool interleaved : {true, false})
      for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kE4M3}) {
        MLA_TRACE(testing::Message() << variant << ' ' << interleaved << ' ' << static_cast<int>(dtype));
        Problem problem(variant, 4, 3, interleaved, random);
        core::AppendRopeArgs args = problem.args();
        const float q_scale = 0.01F;
        std::vector<uint8_t> out(problem.q.size() * size_of(dtype));
        args.q_out_dtype = dtype;
        args.q_out = out.data();
        args.q_scale = dtype == DType::kE4M3 ? &q_scale : nullptr;
        append_rope(args);

        TestCache expected(variant, 4, 2);
        std::vector<uint8_t> expected_q;
        for (int64_t t = 0; t < problem.tokens; ++t) {
          if (problem.slots[static_cast<size_t>(t)] >= 0) {
            std::vector<float> key = problem.turned(&problem.row[static_cast<size_t>(t * problem.d_qk)], t);
            // What is turned becomes bf16 before it is quantized, if its scale is chosen.
            const bool chosen = variant.rotary_in_ckv > 0 || variant.format == CacheFormat::kNvFP4DsMla368;
            for (int32_t c = problem.d_ckv; c < problem.d_qk && chosen; ++c)
              key[static_cast<size_t>(c)] = bf16_to_f32(f32_to_bf16(key[static_cast<size_t>(c)]));
            expected.pack(problem.slots[static_cast<size_t>(t)], key);
          }
          for (int64_t h = 0; h < problem.heads; ++h)
            for (float value :
                 problem.turned(&problem.q[static_cast<size_t>((t * problem.heads + h) * problem.d_qk)], t)) {
              uint8_t bytes[4] = {encode_by_definition(value / q_scale)};
              const uint16_t narrow = dtype == DType::kBF16 ? f32_to_bf16(value) : f32_to_f16(value);
              if (dtype == DType::kF32) std::memcpy(bytes, &value, 4);
              if (size_of(dtype) == 2) std::memcpy(bytes, &narrow, 2);
              expected_q.insert(expected_q.end(), bytes, bytes + size_of(dtype));
            }
        }
        EXPECT_EQ(out, expected_q);
        EXPECT_EQ(problem.cache.bytes, expected.bytes);
        EXPECT_EQ(problem.cache.scales, expected.scales);
      }
  }
}

TEST(ReferenceAppendRope, KeysOnly) {
  std::mt19937 random(13);
  Problem problem({.format = CacheFormat::kF16, .d_ckv = 512, .d_kpe = 64}, 3, 2, true, random);
  core::AppendRopeArgs args = problem.args();
  args.num_heads = 0;
  args.q_nope = args.q_pe = args.q_out = nullptr;
  append_rope(args);
  TestCache expected(problem.cache.v, 4, 2);
  expected.pack(problem.slots[0], problem.turned(problem.row.data(), 0));
  expected.pack(problem.slots[2], problem.turned(&problem.row[static_cast<size_t>(2 * problem.d_qk)], 2));
  EXPECT_EQ(problem.cache.bytes, expected.bytes);
}

}  // namespace
}  // namespace mla::reference
