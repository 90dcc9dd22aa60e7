// SPDX-License-Identifier: Apache-2.0
// Tests absorbed attention over rows of 1024 latent channels (dots3) on GPUs, which one backend has kernels for.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>

#include "device_test.h"

namespace mla {
namespace {

using testing::HasSubstr;

class WideRows : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    Result<Context> made = Context::create({.num_threads = 2, .device = GetParam()});
    if (!made.ok()) GTEST_SKIP() << made.status().message();
    context_.emplace(std::move(made).value());
  }

  template <class Spec>
  void expect_ok(const Spec& spec) {
    const kit::Outcome outcome = kit::check(*context_, spec);
    EXPECT_TRUE(outcome.ok) << outcome.line();
    EXPECT_EQ(outcome.backend, "cuda_portable");
  }

 private:
  std::optional<Context> context_;
};
INSTANTIATE_TEST_SUITE_P(Devices, WideRows, testing::ValuesIn(tested_devices()), [](const auto& test) {
  std::string name = test.param;
  std::replace(name.begin(), name.end(), ':', '_');
  return name;
});

kit::DecodeSpec wide_decode(CacheFormat format = CacheFormat::kBF16) {
  kit::DecodeSpec spec;
  spec.cache = kit::usual_cache(format);
  spec.cache.d_qk = 1088;
  spec.cache.d_v = 1024;
  spec.q_dtype = spec.o_dtype = value_dtype(kv_layout(format).nope.element);
  spec.kv_len = {70, 0, 33};
  return spec;
}

TEST_P(WideRows, TypesAndHeads) {
  for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kF16})
    for (bool e4m3 : {false, true})
      for (int32_t d_qk : {1088, 1024}) {
        kit::DecodeSpec spec = wide_decode(format);
        spec.cache.d_qk = d_qk;
        if (e4m3) spec.q_dtype = DType::kE4M3;
        spec.o_dtype = e4m3 ? DType::kBF16 : DType::kF32;
        spec.num_heads = d_qk == 1024 ? 3 : 17;
        expect_ok(spec);
      }
}

TEST_P(WideRows, WindowsOptionsAndRanks) {
  for (int which = 0; which < 4; ++which) {
    kit::DecodeSpec spec = wide_decode();
    spec.num_heads = 20;
    spec.q_len = {2};
    spec.cache.page_size = which == 1 ? 1 : 16;
    spec.options.window_left = which == 3 ? -1 : 31;
    spec.options.attn_sink = which == 1;
    if (which == 2) spec.options.logits_soft_cap = 30.0F;
    spec.options.alibi_slopes = which == 2;
    if (which == 3) spec.context_parallel = {.rank = 1, .world = 3, .interleave = 2};
    expect_ok(spec);
  }
}

TEST_P(WideRows, LongRequestsAreSplit) {
  for (bool batch_invariant : {false, true}) {
    kit::DecodeSpec spec = wide_decode();
    spec.kv_len = {2100, 3, 500};
    spec.batch_invariant = batch_invariant;
    expect_ok(spec);
  }
}

TEST_P(WideRows, StridesAndParts) {
  for (int64_t extra : {1, 8}) {
    kit::DecodeSpec spec = wide_decode();
    spec.split_q = spec.cache.two_tensors = true;
    spec.q_head_extra = spec.q_token_extra = spec.o_head_extra = spec.o_token_extra = extra;
    spec.cache.page_stride_extra = spec.cache.token_stride_extra = extra;
    expect_ok(spec);
  }
}

TEST_P(WideRows, ListsOfOneAndTwoPools) {
  kit::DecodeSparseSpec spec;
  spec.pool.cache = wide_decode().cache;
  spec.pool.num_tokens = 200;
  spec.pool.topk = 70;
  spec.pool.empty_share = 0.3;
  spec.q_len = {1, 2};
  spec.num_heads = 20;
  expect_ok(spec);
  spec.extra_pool = spec.pool;
  spec.extra_pool->topk = 130;
  spec.options.attn_sink = true;
  expect_ok(spec);
  kit::PrefillSparseSpec prefill;
  prefill.d_qk = 1088;
  prefill.d_v = 1024;
  prefill.num_tokens = 3;
  prefill.num_keys = 150;
  prefill.topk = 90;
  expect_ok(prefill);
}

TEST(WideRowsRefusal, SaysWhichRowsAndQueriesAreTaken) {
  const auto error = [](const kit::DecodeSpec& spec) {
    return explain(kit::on_device(kit::problem_of(spec), "emulated:sm120"), "auto").error;
  };
  kit::DecodeSpec spec = wide_decode(CacheFormat::kFP8);
  EXPECT_THAT(error(spec), HasSubstr("cuda_portable: takes rows of 16 bits where d_qk/d_v are 1088/1024, not fp8"));
  spec = wide_decode();
  spec.q_dtype = DType::kF32;
  EXPECT_THAT(error(spec), HasSubstr("cuda_portable: takes bf16 and e4m3 queries with bf16 keys, not f32"));
}

}  // namespace
}  // namespace mla
