// SPDX-License-Identifier: Apache-2.0
// Tests decode with shared_prefix: against the reference, which reads every request's keys, and what it refuses.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "device_test.h"

namespace mla {
namespace {

using kit::DecodeSpec;

DecodeSpec shared_spec() {
  DecodeSpec spec;
  spec.shared_prefix = true;
  spec.num_heads = 4;
  spec.cache.page_size = 16;
  return spec;
}

class SharedPrefix : public BackendTest<Op::kDecode> {
 protected:
  /// Expects the reference's results with and without shared_prefix, as far as the row takes the problem.
  void expect_both(DecodeSpec spec) const {
    for (bool shared : {true, false}) {
      spec.shared_prefix = shared;
      expect_ok_if_taken(spec);
    }
  }
};
MLA_FOR_EVERY_ROW(SharedPrefix, Op::kDecode);

TEST_P(SharedPrefix, OneGroup) {
  for (int32_t requests : {1, 2, 5, 40}) {
    DecodeSpec spec = shared_spec();
    spec.kv_len.clear();
    for (int32_t b = 0; b < requests; ++b) spec.kv_len.push_back(128 + 3 * b);
    spec.cache.shared_pages = {7};
    expect_both(spec);
  }
}

TEST_P(SharedPrefix, GroupsThatShareMoreAndLess) {
  DecodeSpec spec = shared_spec();
  spec.kv_len = {200, 210, 190, 17, 0, 300, 301, 302, 16, 15, 1};
  for (const std::vector<int32_t>& pages : {std::vector<int32_t>{0, 10, 10, 0, 0, 0, 12, 18, 1, 0, 0},
                                            {0, 1, 11, 0, 1, 1, 1, 1, 1, 1, 1},
                                            {0, 13, 12, 2, 1, 1, 19, 19, 19, 19, 19}}) {
    spec.cache.shared_pages = pages;
    for (bool block_table : {false, true}) {
      spec.cache.block_table = spec.lse_inf_without_keys = block_table;
      expect_both(spec);
    }
  }
}

TEST_P(SharedPrefix, QueriesAndTrees) {
  DecodeSpec spec = shared_spec();
  spec.q_len = {3, 0, 5, 1, 20};
  spec.kv_len = {100, 100, 103, 65, 66};
  spec.cache.shared_pages = {8};
  for (bool causal : {true, false}) {
    spec.causal = causal;
    expect_both(spec);
  }
  spec.causal = true;
  for (kit::Tree tree : {kit::Tree::kMask, kit::Tree::kParents}) {
    spec.tree = tree;
    expect_both(spec);
  }
}

TEST_P(SharedPrefix, FormatsTypesAndPages) {
  for (CacheFormat format : kAllCacheFormats)
    for (int32_t page_size : {1, 64}) {
      DecodeSpec spec = shared_spec();
      spec.cache = kit::usual_cache(format);
      spec.cache.page_size = page_size;
      spec.cache.shared_pages = {100 / page_size};
      spec.kv_len = {130, 111, 140};
      spec.q_dtype = page_size == 1 ? DType::kE4M3 : DType::kBF16;
      spec.o_dtype = page_size == 1 ? DType::kF32 : DType::kBF16;
      spec.options.logits_soft_cap = page_size == 1 ? 30.0F : 0.0F;
      spec.lse_base = page_size == 1 ? LseBase::kTwo : LseBase::kE;
      expect_ok_if_taken(spec);
    }
}

TEST_P(SharedPrefix, ManyRowsAndStrides) {
  DecodeSpec spec = shared_spec();
  spec.num_heads = 128;
  spec.q_len = {2};
  spec.kv_len = {300, 310, 290};
  spec.cache.shared_pages = {17};
  spec.q_head_extra = spec.o_head_extra = spec.lse_head_extra = 8;
  spec.q_token_extra = spec.o_token_extra = spec.lse_token_extra = 16;
  spec.workspace_misalign = 16;
  spec.cache.table_row_extra = 3;
  spec.cache.block_table = true;
  expect_both(spec);
}

class SharedPrefixOnDevice : public DeviceTest<Op::kDecode> {
 protected:
  void SetUp() override {
    DeviceTest::SetUp();
    if (!IsSkipped() && is_fp8_only()) GTEST_SKIP() << row() << ": has only compute = fp8, which is refused";
  }
};
MLA_FOR_EVERY_DEVICE(SharedPrefixOnDevice, Op::kDecode);

TEST_P(SharedPrefixOnDevice, GroupsThatShareMoreAndLess) {
  DecodeSpec spec = shared_spec();
  spec.kv_len = {100, 90, 95, 17, 0, 130, 131, 16, 1};
  for (int32_t heads : {4, 40})
    for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kFP8DsMla}) {
      spec.cache.format = format;
      spec.num_heads = heads;
      spec.cache.shared_pages = {0, 5, 5, 0, 0, 0, 8, 1, 0};
      spec.cache.block_table = spec.lse_inf_without_keys = heads == 40;
      expect_ok(spec);
    }
}

TEST_P(SharedPrefixOnDevice, Trees) {
  DecodeSpec spec = shared_spec();
  spec.q_len = {3, 0, 5};
  spec.kv_len = {60, 40, 63};
  spec.cache.shared_pages = {2};
  spec.tree = kit::Tree::kParents;
  expect_ok(spec);
}

/// Returns the error of planning `spec` after `change`.
std::string refusal(const DecodeSpec& spec, void (*change)(DecodeParams&)) {
  const Context context = Context::create({.num_threads = 1}).value();
  const kit::DecodeCase problem(spec);
  DecodeParams params = problem.params();
  change(params);
  const Result<size_t> bytes = workspace_size(context, params);
  return bytes.ok() ? "" : bytes.status().message();
}

TEST(SharedPrefixRefusals, NameWhatDoesNotGoWithIt) {
  DecodeSpec spec = shared_spec();
  spec.kv_len = {60, 70};
  spec.cache.shared_pages = {2};
  EXPECT_EQ(refusal(spec, [](DecodeParams&) {}), "");
  EXPECT_EQ(refusal(spec, [](DecodeParams& p) { p.batch_invariant = true; }),
            "decode: shared_prefix: expected false with batch_invariant, got true");
  EXPECT_EQ(refusal(spec, [](DecodeParams& p) { p.options.window_left = 9; }),
            "decode: shared_prefix: expected false with window_left, got true");
  EXPECT_EQ(refusal(spec, [](DecodeParams& p) { p.context_parallel.world = 2; }),
            "decode: shared_prefix: expected false with context_parallel, got true");
  spec.options.attn_sink = true;
  EXPECT_EQ(refusal(spec, [](DecodeParams&) {}), "decode: shared_prefix: expected false with attn_sink, got true");
  EXPECT_EQ(refusal(spec, [](DecodeParams& p) { std::swap(p.options.attn_sink, p.options.alibi_slopes); }),
            "decode: shared_prefix: expected false with alibi_slopes, got true");
  spec.options.attn_sink = false;
  spec.o_dtype = DType::kE4M3;
  EXPECT_EQ(refusal(spec, [](DecodeParams&) {}), "decode: shared_prefix: expected false with o of e4m3, got true");
  spec.o_dtype = DType::kBF16;
  spec.cache.format = CacheFormat::kFP8DsMla;
  EXPECT_EQ(refusal(spec, [](DecodeParams& p) { p.options.compute = Compute::kFP8; }),
            "decode: shared_prefix: expected false with compute, got true");
  spec.cache.block_table = true;
  EXPECT_EQ(refusal(spec, [](DecodeParams& p) { p.pages.block_table.stride[0] = 1; }),
            "decode: block_table: expected rows at least 7 apart with shared_prefix, got 1");
}

TEST(SharedPrefixRefusals, AnotherPageTableThanPlanned) {
  DecodeSpec spec = shared_spec();
  spec.kv_len = {60, 70};
  spec.cache.shared_pages = {2};
  const Context context = Context::create({.num_threads = 1}).value();
  const kit::DecodeCase problem(spec);
  const DecodeParams params = problem.params();
  std::vector<std::byte> workspace(workspace_size(context, params).value());
  const Plan plan = mla::plan(context, params, workspace).value();
  EXPECT_NE(plan.describe().find("1 group, 32 keys saved"), std::string::npos) << plan.describe();
  EXPECT_TRUE(run(context, plan, params).ok());
  auto* const pages = static_cast<int32_t*>(params.pages.kv_indices.data);
  std::swap(pages[1], pages[2]);  // request 0 has its pages in another order, and shares one alone
  EXPECT_EQ(run(context, plan, params).message(),
            "decode: shared_prefix: expected requests that share as many pages as when this was planned, got others");
  std::swap(pages[1], pages[2]);
  EXPECT_TRUE(run(context, plan, params).ok());
}

}  // namespace
}  // namespace mla
