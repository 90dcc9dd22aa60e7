// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/checker.h"

#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <vector>

namespace mla::cli::replay {
namespace {

Context make_context(const char* backend) {
  ContextOptions options;
  options.num_threads = 1;
  options.backend = backend;
  return std::move(Context::create(options)).value();
}

// Ten tokens in a cache, the last one computed by prefill: first right, then with one wrong value.
TEST(Checker, AcceptsWhatIsRightAndNamesWhatIsWrong) {
  ModelConfig model;
  model.num_attention_heads = 2;
  model.kv_lora_rank = 256;
  model.qk_nope_head_dim = 128;
  model.qk_rope_head_dim = 64;
  model.v_head_dim = 128;
  constexpr int32_t kTokens = 10;
  const DType dtype = Projector::activation_dtype();
  const auto bytes = static_cast<int64_t>(size_of(dtype));
  const Context context = make_context(""), reference = make_context("reference");
  const Generator generator(model, 1, dtype);
  Team team(1);
  Projector projector(model, generator.weights(), dtype, team);
  const std::atomic<bool> stop = false;
  const LayerOptions options{
      .model = model, .cache = CacheFormat::kBF16, .page_size = 4, .num_pages = 3, .chunk = 4, .dtype = dtype};
  Layer layer(options, context, projector, stop);
  Checker checker(layer, context, reference, projector);

  std::vector<std::byte> latents(static_cast<size_t>(kTokens * model.d_qk() * bytes));
  for (int32_t t = 0; t < kTokens; ++t)
    generator.latent(static_cast<uint64_t>(t) * 71, t, latents.data() + t * model.d_qk() * bytes);
  std::vector<int64_t> slots(kTokens);
  std::iota(slots.begin(), slots.end(), 0);
  ASSERT_TRUE(layer.append(latents.data(), slots, nullptr).ok());

  const int64_t d_qk = model.prefill_d_qk();
  std::vector<std::byte> q(static_cast<size_t>(2 * d_qk * bytes));
  std::byte* q_pe = q.data() + model.qk_nope_head_dim * bytes;
  generator.query(5, kTokens - 1,
                  {.q_nope = q.data(), .q_nope_stride_head = d_qk, .q_pe = q_pe, .q_pe_stride_head = d_qk});
  const std::vector<int32_t> pages = {0, 1, 2};
  const TokenRange token{.pages = pages, .start = kTokens - 1, .count = 1};
  std::vector<float> out(2 * 128), lse(2);
  ASSERT_TRUE(layer
                  .prefill(contiguous(q.data(), dtype, {1, 2, d_qk}), std::span(&token, 1), {.begin = 0, .count = 2},
                           contiguous(out.data(), DType::kF32, {1, 2, 128}),
                           contiguous(lse.data(), DType::kF32, {1, 2}), nullptr)
                  .ok());
  const Checker::Sample sample{.what = "line 1, token 9",
                               .token = token,
                               .q_nope = q.data(),
                               .q_nope_stride_head = d_qk,
                               .q_pe = q_pe,
                               .q_pe_stride_head = d_qk,
                               .out = out.data()};
  ASSERT_TRUE(checker.check_prefill(sample).ok());
  EXPECT_FALSE(checker.failed()) << checker.failures()[0];
  EXPECT_GT(checker.worst_prefill_decode(), 0.0);
  EXPECT_LT(checker.worst_reference(), kTolerance);

  out[130] += 1.0F;
  ASSERT_TRUE(checker.check_prefill(sample).ok());
  ASSERT_EQ(checker.failures().size(), 1U);
  EXPECT_EQ(checker.failures()[0].find("line 1, token 9, head 1, prefill: expected an error of at most 0.0156"), 0U);
  EXPECT_GT(checker.worst_prefill_decode(), kTolerance);
  EXPECT_EQ(checker.num_checks(), 2);
}

}  // namespace
}  // namespace mla::cli::replay
