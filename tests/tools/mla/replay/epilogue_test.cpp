// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/epilogue.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "mla/replay/row_oracle.h"
#include "trace.h"

namespace mla::cli::replay {
namespace {

Context finishing_context(const char* backend) {
  ContextOptions options;
  options.num_threads = 1;
  options.backend = backend;
  return std::move(Context::create(options)).value();
}

/// Finishes outputs of a few tokens, and judges them by an oracle that is told other positions or another head.
class Finished {
 public:
  Finished(const ModelConfig& model, const char* backend)
      : model_(model),
        context_(finishing_context(backend)),
        operations_(context_),
        generator_(model, 1, DType::kF32),
        oracle_(model, generator_, DType::kF32),
        angles_(generator_, model.qk_rope_head_dim, 100, nullptr),
        epilogue_(model, angles_) {
    const int64_t heads = model.num_attention_heads, tokens = std::ssize(positions_);
    o_.resize(static_cast<size_t>(tokens * heads * model.d_v()));
    for (int64_t row = 0; row < tokens * heads; ++row)
      generator_.projected_latent(static_cast<uint64_t>(row) + 9, static_cast<int32_t>(row + 1),
                                  o_.data() + row * model.d_v());
    const Status status = epilogue_.run(operations_, contiguous(o_.data(), DType::kF32, {tokens, heads, model.d_v()}),
                                        positions_, Phase::kDecodeFinish, nullptr);
    EXPECT_TRUE(status.ok()) << status.message();
  }

  /// Returns the largest error of all heads, where position, head and size of the truth are off by so much.
  double worst(int32_t position_shift = 0, int64_t head_shift = 0, double factor = 1.0) const {
    const int64_t heads = model_.num_attention_heads, d_v = model_.d_v();
    double worst = 0.0;
    for (int64_t token = 0; token < std::ssize(positions_); ++token)
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t row = token * heads + (head + head_shift) % heads;
        const std::span output(o_.data() + row * d_v, static_cast<size_t>(d_v));
        const auto position = static_cast<int32_t>(positions_[static_cast<size_t>(token)]) + position_shift;
        std::vector<double> truth = oracle_.turned_back(output, position);
        for (double& x : truth) x *= factor;
        worst = std::max(worst, epilogue_.error(token, head, truth));
      }
    return worst;
  }

 private:
  ModelConfig model_;
  Context context_;
  Operations operations_;
  Generator generator_;
  RowOracle oracle_;
  Angles angles_;
  Epilogue epilogue_;
  std::vector<int64_t> positions_ = {17, 0, 99};
  std::vector<float> o_;
};

ModelConfig model_of(int32_t heads, int32_t d_v) {
  ModelConfig model = *load_model("deepseek-v4-flash");
  model.num_attention_heads = heads;
  model.qk_nope_head_dim = model.kv_lora_rank = d_v - 64;
  return model;
}

// Groups of 8, 4 and 1 head; 128, 64 and 32 channels for a scale.
TEST(Epilogue, TurnsBackAndQuantizes) {
  for (const ModelConfig& model : {model_of(64, 512), model_of(12, 448), model_of(5, 288)})
    for (const char* backend : {"", "reference"}) {
      MLA_TRACE(fmt::format("{} heads, {}", model.num_attention_heads, backend));
      const Finished finished(model, backend);
      EXPECT_LE(finished.worst(), kOutputTolerance);
      EXPECT_GT(finished.worst(1), 10 * kOutputTolerance) << "the next position's angles";
      EXPECT_GT(finished.worst(0, 1), 10 * kOutputTolerance) << "the next head";
      EXPECT_EQ(finished.worst(0, 0, 2.0), std::numeric_limits<double>::infinity()) << "half the scale";
      EXPECT_GT(finished.worst(0, 0, 1.01), kOutputTolerance) << "one percent more";
    }
}

TEST(Epilogue, ScalesAreOfWhatFits) {
  EXPECT_EQ(channels_per_scale(model_of(64, 512)), 128);
  EXPECT_EQ(channels_per_scale(model_of(64, 448)), 64);
  EXPECT_EQ(channels_per_scale(model_of(64, 288)), 32);
  EXPECT_EQ(channels_per_scale(model_of(64, 208)), 0);
  EXPECT_EQ(Epilogue::memory_needed(model_of(64, 512), 3), 3 * 64 * (512 + 4 * 4));
}

TEST(Epilogue, AFailureSaysWhereAndHowMuch) {
  CheckLog log;
  log.note_outputs(64, 0.25 * kOutputTolerance, kOutputTolerance, "line 1, finished output of head 2");
  EXPECT_FALSE(log.failed());
  log.note_outputs(64, 0.5, kOutputTolerance, "line 1, finished output of head 3");
  log.note_outputs(64, std::numeric_limits<double>::quiet_NaN(), kOutputTolerance, "line 1, finished output of head 4");
  EXPECT_EQ(log.num_outputs, 3 * 64);
  ASSERT_EQ(log.failures.size(), 2U);
  EXPECT_EQ(
      log.failures[0],
      "line 1, finished output of head 3: expected at most 0.0010 from what attention's output comes to, rounding "
      "aside, got 0.5");
}

}  // namespace
}  // namespace mla::cli::replay
