// SPDX-License-Identifier: Apache-2.0
// Tests finish_output on every row of its table: every type, gate, group and layout against the reference and a
// computation in double, and what it promises of rotations, groups and unusual values.
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "backend_test.h"
#include "mla/numeric.h"

namespace mla {
namespace {

using Gate = kit::FinishOutputSpec::Gate;

class FinishOutputTest : public BackendTest<Op::kFinishOutput> {};
MLA_FOR_EVERY_ROW(FinishOutputTest, Op::kFinishOutput);

TEST_P(FinishOutputTest, TypesGatesAndRotations) {
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32})
    for (DType out : {DType::kBF16, DType::kF16, DType::kF32, DType::kE4M3})
      for (Gate gate : {Gate::kNone, Gate::kHead, Gate::kChannel})
        for (int32_t rotary : {0, 64, 512})
          for (bool interleaved : {false, true}) {
            kit::FinishOutputSpec spec;
            spec.num_tokens = 3;
            spec.num_heads = 5;
            spec.max_positions = 50;
            spec.dtype = dtype;
            spec.out_dtype = out;
            spec.gate = gate;
            spec.d_rotary = rotary;
            spec.interleaved = interleaved;
            expect_ok(spec);
          }
}

TEST_P(FinishOutputTest, ScalesOfEveryTypeWidthAndLayout) {
  for (DType type : {DType::kF32, DType::kU8, DType::kI32})
    for (int32_t channels : {32, 64, 128})
      for (int32_t groups : {0, 1, 2, 8})
        for (bool tokens_innermost : {false, true})
          for (bool powers : {true, false}) {
            if (!powers && type != DType::kF32) continue;
            kit::FinishOutputSpec spec;
            spec.num_tokens = 5;
            spec.num_heads = 8;
            spec.max_positions = 50;
            spec.out_dtype = DType::kE4M3;
            spec.scale_dtype = type;
            spec.channels_per_scale = channels;
            spec.num_groups = groups;
            spec.tokens_innermost = tokens_innermost;
            spec.power_of_two_scales = powers;
            expect_ok(spec);
          }
}

TEST_P(FinishOutputTest, WidthsThatNoVectorFits) {
  for (int32_t d_v : {1, 7, 66, 130, 1000})
    for (int32_t rotary : {0, 2, 6}) {
      kit::FinishOutputSpec spec;
      spec.d_v = d_v;
      spec.d_rotary = rotary <= d_v ? rotary : 0;
      spec.max_positions = 20;
      spec.gate = Gate::kChannel;
      expect_ok(spec);
    }
}

TEST_P(FinishOutputTest, RandomProblems) {
  for (uint64_t seed = 26000; seed < 26060; ++seed)
    for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) expect_ok(kit::random_finish_output_spec(seed, dtype));
}

TEST_P(FinishOutputTest, NoTokens) {
  kit::FinishOutputSpec spec;
  spec.num_tokens = 0;
  expect_ok(spec);
}

/// What append_rope turns by a position, finish_output turns back: each rotation of f32 loses at most 2^-22 of a pair.
TEST_P(FinishOutputTest, TurnsBackWhatAppendRopeTurns) {
  for (bool interleaved : {false, true}) {
    kit::AppendRopeSpec rope;
    rope.q_dtype = rope.q_out_dtype = DType::kF32;
    rope.interleaved = interleaved;
    rope.max_positions = 500;
    const kit::AppendRopeCase turned(rope);
    const AppendRopeParams given = turned.params();
    MLA_EXPECT_OK(run(context(), given));

    FinishOutputParams p;
    p.o = given.q_out;
    p.finish.cos_sin = given.cos_sin;
    p.finish.positions = given.positions;
    p.finish.interleaved = interleaved;
    std::vector<float> out(static_cast<size_t>(p.o.numel()));
    p.out = contiguous(out.data(), DType::kF32, {p.o.shape[0], p.o.shape[1], p.o.shape[2]});
    MLA_EXPECT_OK(run(context(), p));
    const std::vector<double> nope = kit::to_dense(given.q_nope), pe = kit::to_dense(given.q_pe);
    for (int64_t row = 0; row < p.o.shape[0] * p.o.shape[1]; ++row)
      for (int64_t c = 0; c < 576; ++c) {
        const auto got = static_cast<double>(out[static_cast<size_t>(row * 576 + c)]);
        if (c < 512)
          ASSERT_EQ(got, nope[static_cast<size_t>(row * 512 + c)]);
        else
          ASSERT_NEAR(got, pe[static_cast<size_t>(row * 64 + c - 512)], 5 * 2 * 0x1p-22) << row << ' ' << c;
      }
  }
}

/// Runs one row of 128 channels in one group, and returns the codes.
struct OneGroup {
  std::array<float, 128> o = {};
  std::array<uint8_t, 128> codes = {};
  float scale = -1;

  FinishOutputParams params() {
    FinishOutputParams p;
    p.o = contiguous(o.data(), DType::kF32, {1, 1, 128});
    p.out = contiguous(codes.data(), DType::kE4M3, {1, 1, 128});
    p.finish.scale = contiguous(&scale, DType::kF32, {1, 1, 1});
    return p;
  }
};

TEST_P(FinishOutputTest, ScalesIgnoreWhatIsNotFinite) {
  OneGroup group;
  group.o[0] = 3;
  group.o[1] = std::numeric_limits<float>::infinity();
  group.o[2] = -std::numeric_limits<float>::infinity();
  group.o[3] = std::numeric_limits<float>::quiet_NaN();
  MLA_EXPECT_OK(run(context(), group.params()));
  EXPECT_EQ(group.scale, 0x1p-7F);  // the least power of two that 3 / 448 does not exceed
  EXPECT_EQ(e4m3_to_f32(group.codes[0]), 384.0F);
  EXPECT_EQ(e4m3_to_f32(group.codes[1]), 448.0F);
  EXPECT_EQ(e4m3_to_f32(group.codes[2]), -448.0F);
  EXPECT_TRUE(std::isnan(e4m3_to_f32(group.codes[3])));
  EXPECT_EQ(group.codes[4], 0);
}

TEST_P(FinishOutputTest, GroupOfZeros) {
  OneGroup group;
  FinishOutputParams p = group.params();
  MLA_EXPECT_OK(run(context(), p));
  EXPECT_EQ(group.scale, e4m3_power_of_two_scale(0));
  for (uint8_t code : group.codes) EXPECT_EQ(code, 0);
  p.finish.power_of_two_scales = false;
  group.o[7] = 448 * 3;
  MLA_EXPECT_OK(run(context(), p));
  EXPECT_EQ(group.scale, 3);
  EXPECT_EQ(e4m3_to_f32(group.codes[7]), 448.0F);
}

/// Gates far from 0 let all through, or nothing; those of NaN give NaN.
TEST_P(FinishOutputTest, GatesWithoutBounds) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  std::array<float, 8> o = {2, 2, 2, 2, 2, 2, 2, 2}, out = {};
  std::array<float, 8> gate = {0, 200, -200, kInf, -kInf, std::numeric_limits<float>::quiet_NaN(), 1e30F, -1e30F};
  FinishOutputParams p;
  p.o = contiguous(o.data(), DType::kF32, {1, 1, 8});
  p.finish.gate = contiguous(gate.data(), DType::kF32, {1, 1, 8});
  p.out = contiguous(out.data(), DType::kF32, {1, 1, 8});
  MLA_EXPECT_OK(run(context(), p));
  const std::array<float, 8> want = {1, 2, 0, 2, 0, 0, 2, 0};
  for (size_t i = 0; i < 8; ++i) {
    if (i == 5)
      EXPECT_TRUE(std::isnan(out[i]));
    else
      EXPECT_NEAR(out[i], want[i], 1e-20) << i;
  }
}

}  // namespace
}  // namespace mla
