// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/projector.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "mla/numeric.h"
#include "mla/replay/checker.h"

namespace mla::cli::replay {
namespace {

constexpr int64_t kHeads = 3, kRank = 64, kNope = 32, kRope = 8, kValue = 48;

ModelConfig small_model() {
  ModelConfig model;
  model.num_attention_heads = kHeads;
  model.kv_lora_rank = kRank;
  model.qk_nope_head_dim = kNope;
  model.qk_rope_head_dim = kRope;
  model.v_head_dim = kValue;
  return model;
}

// Holds values of either dtype, and reads and sets them as f32.
class Values {
 public:
  Values(DType dtype, size_t count) : dtype_(dtype), bytes_(count * size_of(dtype)) {}
  void* data() { return bytes_.data(); }
  float operator[](int64_t i) const {
    if (dtype_ == DType::kF32) return reinterpret_cast<const float*>(bytes_.data())[i];
    return bf16_to_f32(reinterpret_cast<const uint16_t*>(bytes_.data())[i]);
  }
  void set(int64_t i, float value) {
    if (dtype_ == DType::kF32)
      reinterpret_cast<float*>(bytes_.data())[i] = value;
    else
      reinterpret_cast<uint16_t*>(bytes_.data())[i] = f32_to_bf16(value);
  }

 private:
  DType dtype_;
  std::vector<std::byte> bytes_;
};

class ProjectorTest : public ::testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    if (GetParam() == DType::kBF16 && Projector::activation_dtype() != DType::kBF16)
      GTEST_SKIP() << "oneDNN cannot multiply bf16 on this machine";
  }
  Values random(int64_t count) const {
    Values values(GetParam(), static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) values.set(i, std::sin(static_cast<float>(i) * 1.7F) * 2.0F);
    return values;
  }
};

TEST_P(ProjectorTest, MatchesThePlainSums) {
  const ModelConfig model = small_model();
  const Generator generator(model, 1, GetParam());
  const Weights weights = generator.weights();
  Values w_uk(GetParam(), kHeads * kNope * kRank), w_uv(GetParam(), kHeads * kValue * kRank);
  std::copy(weights.w_uk.begin(), weights.w_uk.end(), static_cast<std::byte*>(w_uk.data()));
  std::copy(weights.w_uv.begin(), weights.w_uv.end(), static_cast<std::byte*>(w_uv.data()));
  Team team(2);
  Projector projector(model, weights, GetParam(), team);
  constexpr double kNear = 3e-2;

  const int64_t rows = 150, padded = Projector::padded_rows(rows);
  EXPECT_EQ(padded % 128, 0);
  Values latents = random(padded * (kRank + kRope));
  Values k(GetParam(), static_cast<size_t>(padded * kHeads * (kNope + kRope)));
  Values v(GetParam(), static_cast<size_t>(padded * kHeads * kValue));
  projector.keys_values(latents.data(), rows, {.begin = 1, .count = 2}, k.data(), v.data());
  for (const int64_t row : {int64_t{0}, int64_t{127}, int64_t{128}, rows - 1})
    for (int64_t head = 0; head < kHeads; ++head) {
      for (int64_t d = 0; d < kNope; ++d) {
        double sum = 0.0;
        for (int64_t c = 0; c < kRank; ++c)
          sum += double{latents[row * (kRank + kRope) + c]} * w_uk[(head * kNope + d) * kRank + c];
        EXPECT_NEAR(k[(row * kHeads + head) * (kNope + kRope) + d], head == 0 ? 0.0 : sum, kNear);
      }
      for (int64_t d = 0; d < kRope; ++d)
        EXPECT_EQ(k[(row * kHeads + head) * (kNope + kRope) + kNope + d],
                  head == 0 ? 0.0F : latents[row * (kRank + kRope) + kRank + d]);
      for (int64_t d = 0; d < kValue; ++d) {
        double sum = 0.0;
        for (int64_t c = 0; c < kRank; ++c)
          sum += double{latents[row * (kRank + kRope) + c]} * w_uv[(head * kValue + d) * kRank + c];
        EXPECT_NEAR(v[(row * kHeads + head) * kValue + d], head == 0 ? 0.0 : sum, kNear);
      }
    }

  Values q_nope = random(padded * kHeads * kNope);
  Values absorbed(GetParam(), static_cast<size_t>(padded * kHeads * kRank));
  projector.absorb(q_nope.data(), rows, absorbed.data());
  std::vector<float> out(static_cast<size_t>(padded * kHeads * kValue));
  Values o = random(padded * kHeads * kRank);
  projector.output(o.data(), rows, out.data());
  for (const int64_t row : {int64_t{0}, int64_t{127}, int64_t{128}, rows - 1})
    for (int64_t head = 0; head < kHeads; ++head) {
      for (int64_t c = 0; c < kRank; ++c) {
        double sum = 0.0;
        for (int64_t d = 0; d < kNope; ++d)
          sum += double{q_nope[(row * kHeads + head) * kNope + d]} * w_uk[(head * kNope + d) * kRank + c];
        EXPECT_NEAR(absorbed[(row * kHeads + head) * kRank + c], sum, kNear);
      }
      for (int64_t d = 0; d < kValue; ++d) {
        double sum = 0.0;
        for (int64_t c = 0; c < kRank; ++c)
          sum += double{o[(row * kHeads + head) * kRank + c]} * w_uv[(head * kValue + d) * kRank + c];
        EXPECT_NEAR(out[static_cast<size_t>((row * kHeads + head) * kValue + d)], sum, kNear);
      }
    }
}

INSTANTIATE_TEST_SUITE_P(DTypes, ProjectorTest, ::testing::Values(DType::kBF16, DType::kF32));

TEST(Team, RunsEveryTaskOnceAndPassesErrorsOn) {
  Team team(3);
  EXPECT_EQ(team.size(), 3);
  std::vector<std::atomic<int>> count(1000);
  team.run(1000, [&](int64_t task, int32_t worker) {
    EXPECT_LT(worker, 3);
    ++count[static_cast<size_t>(task)];
  });
  for (const auto& n : count) EXPECT_EQ(n, 1);
  team.run(0, [](int64_t, int32_t) { FAIL(); });
  EXPECT_THROW(team.run(10,
                        [](int64_t task, int32_t) {
                          if (task == 5) throw std::runtime_error("task");
                        }),
               std::runtime_error);
  std::atomic<int> after = 0;
  team.run(10, [&](int64_t, int32_t) { ++after; });
  EXPECT_EQ(after, 10);
}

TEST(RelativeError, IsTheDistanceOverTheLength) {
  const float a[] = {3.0F, 4.5F}, b[] = {3.0F, 4.0F}, zero[] = {0.0F, 0.0F}, nan[] = {NAN, 0.0F};
  EXPECT_NEAR(relative_error(a, b, 2), 0.1, 1e-6);
  EXPECT_EQ(relative_error(b, b, 2), 0.0);
  EXPECT_EQ(relative_error(zero, zero, 2), 0.0);
  EXPECT_TRUE(std::isinf(relative_error(b, zero, 2)));
  EXPECT_TRUE(std::isinf(relative_error(nan, b, 2)));
  EXPECT_TRUE(std::isinf(relative_error(b, nan, 2)));
}

}  // namespace
}  // namespace mla::cli::replay
