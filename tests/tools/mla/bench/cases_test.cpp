// SPDX-License-Identifier: Apache-2.0
#include "mla/bench/cases.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <numeric>

#include "mla/bench/specs.h"
#include "mla/bench/workload.h"
#include "tools/mla/expect_usage_error.h"

namespace mla::bench {
namespace {

using cli::expect_usage_error;

Settings flags(const std::map<std::string, std::string>& values) {
  Settings settings;
  for (const auto& [key, text] : values) settings[key] = Setting{.text = text, .where = "--" + key};
  return settings;
}

TEST(Expand, MakesEveryCombinationInOrder) {
  const auto groups = expand(flags({{"heads", "16,128"}, {"kv_len", "1k:4k:*2"}, {"cache", "bf16,f16"}}));
  ASSERT_EQ(groups.size(), 12U);
  EXPECT_EQ(groups[0].cases[0].cache, CacheFormat::kBF16);
  EXPECT_EQ(groups[0].cases[0].heads, 16);
  EXPECT_EQ(groups[1].cases[0].total_kv(), 2048);
  EXPECT_EQ(groups[11].cases[0].cache, CacheFormat::kF16);
  EXPECT_EQ(groups[11].cases[0].q_dtype, DType::kF16);
  EXPECT_EQ(groups[11].cases[0].heads, 128);
  EXPECT_EQ(groups[11].cases[0].total_kv(), 4096);
}

TEST(Expand, TakesDefaultsFromTheOperationAndTheModel) {
  const Case decode = expand(flags({{"model", "deepseek-v2-lite"}}))[0].cases[0];
  EXPECT_EQ(decode.heads, 16);
  EXPECT_EQ(decode.d_qk, 576);
  EXPECT_EQ(decode.d_v, 512);
  EXPECT_EQ(decode.requests, std::vector<Request>(1, Request{1, 4096}));
  const Case prefill = expand(flags({{"op", "prefill"}, {"model", "deepseek-v3"}, {"kv_len", "256"}}))[0].cases[0];
  EXPECT_EQ(prefill.d_qk, 192);
  EXPECT_EQ(prefill.d_v, 128);
  EXPECT_EQ(prefill.requests, std::vector<Request>(1, Request{256, 256}));
  EXPECT_EQ(expand(flags({{"op", "merge_states"}}))[0].cases[0].q_dtype, DType::kF32);
  EXPECT_EQ(expand(flags({{"head_dims", "320/256"}}))[0].cases[0].d_v, 256);
}

TEST(Expand, KnowsTheUsualShapesOfEveryOperation) {
  const Case v4 = expand(flags({{"op", "decode_sparse"}, {"model", "deepseek-v4-flash"}}))[0].cases[0];
  EXPECT_EQ(v4.cache, CacheFormat::kFP8DsV4);
  EXPECT_EQ(v4.heads, 64);
  EXPECT_EQ(v4.d_qk, 512);
  EXPECT_EQ(v4.d_v, 512);
  EXPECT_EQ(v4.topk, 512);
  EXPECT_EQ(v4.total_kv(), 65536);
  EXPECT_EQ(expand(flags({{"op", "decode_sparse"}, {"model", "deepseek-v4.1-flash"}}))[0].cases[0].cache,
            CacheFormat::kFP8DsV41);
  EXPECT_EQ(expand(flags({{"op", "indexer_logits"}, {"model", "glm-5"}}))[0].cases[0].heads, 32);
  const Case indexer = expand(flags({{"op", "indexer_logits"}}))[0].cases[0];
  EXPECT_EQ(indexer.q_dtype, DType::kE4M3);
  EXPECT_EQ(indexer.heads, 64);
  EXPECT_EQ(indexer.ratio, 1);
  EXPECT_EQ(indexer.blocks, 0);
  EXPECT_EQ(expand(flags({{"op", "indexer_logits"}, {"blocks", "2048"}}))[0].cases[0].block_size, 8);
  EXPECT_EQ(indexer.indexer_format, IndexerFormat::kFP8);
  const Case mxfp4 =
      expand(flags({{"op", "indexer_logits"}, {"indexer_format", "mxfp4"}, {"kv_len", "1m"}}))[0].cases[0];
  EXPECT_EQ(mxfp4.indexer_format, IndexerFormat::kMXFP4);
  EXPECT_EQ(mxfp4.logits_dtype, DType::kF32);
  for (const char* op : {"indexer_logits", "top_k", "indexer_top_k"})
    EXPECT_EQ(expand(flags({{"op", op}, {"logits_dtype", "bf16"}}))[0].cases[0].logits_dtype, DType::kBF16) << op;
  const Case fp8 = expand(flags({{"op", "indexer_logits"}, {"kv_len", "1m"}}))[0].cases[0];
  EXPECT_EQ(memory_needed(fp8) - memory_needed(mxfp4), int64_t{1 << 20} * (132 - 68));
  const Case pooled = expand(flags({{"op", "compress"}}))[0].cases[0];
  EXPECT_EQ(pooled.ratio, 4);
  EXPECT_FALSE(pooled.append.has_value());
  EXPECT_FALSE(expand(flags({{"op", "compress"}, {"append", "none"}}))[0].cases[0].append.has_value());
  const Case beside = expand(flags({{"op", "compress"}, {"append", "fp8_dsv41"}, {"q_len", "8"}}))[0].cases[0];
  EXPECT_EQ(beside.append, CacheFormat::kFP8DsV41);
  EXPECT_GT(memory_needed(beside), memory_needed(expand(flags({{"op", "compress"}, {"q_len", "8"}}))[0].cases[0]));
  const kit::CompressSpec spec = compress_spec(beside, 1);
  EXPECT_EQ(spec.append->num_tokens, 8);
  EXPECT_EQ(spec.append->num_heads, 0);
  EXPECT_EQ(spec.append->cache.d_qk, 512);
  EXPECT_EQ(spec.append->dtype, DType::kBF16);
  EXPECT_EQ(expand(flags({{"op", "top_k"}}))[0].cases[0].block_size, 1);
  EXPECT_EQ(expand(flags({{"op", "top_k"}}))[0].cases[0].topk, 2048);
  EXPECT_EQ(expand(flags({{"cache", "fp8_dsv4"}}))[0].cases[0].d_qk, 512);
  const Case copy = expand(flags({{"op", "copy_pages"}, {"cache", "fp8"}, {"page_size", "256"}}))[0].cases[0];
  EXPECT_EQ(copy.to_cache, CacheFormat::kFP8);
  EXPECT_EQ(copy.to_page_size, 256);
  EXPECT_EQ(expand(flags({{"window", "-1"}}))[0].cases[0].window, -1);
  for (Op op : kAllOps) EXPECT_GT(memory_needed(expand(flags({{"op", std::string(name(op))}}))[0].cases[0]), 0);
}

TEST(Expand, RefusesKeysThatWouldChangeNothing) {
  const auto refuse = [](const std::string& op, const std::string& key, const std::string& value) {
    expect_usage_error([&] { expand(flags({{"op", op}, {key, value}})); }, {"--" + key, op});
  };
  refuse("decode", "topk", "5");
  refuse("decode", "ratio", "4");
  refuse("top_k", "blocks", "5");
  refuse("top_k", "list_tokens", "true");
  expect_usage_error(
      [] {
        expand(flags({{"op", "indexer_logits"}, {"block_size", "8"}}));
      },
      {"--block_size", "without listed blocks"});
  refuse("top_k", "indexer_format", "mxfp4");
  refuse("physical_slots", "logits_dtype", "bf16");
  expect_usage_error(
      [] {
        expand(flags({{"op", "top_k"}, {"logits_dtype", "e4m3"}}));
      },
      {"--logits_dtype", "one of bf16, f16, f32", "e4m3"});
  expect_usage_error(
      [] {
        expand(flags({{"op", "compress"}, {"indexer_format", "mxfp4"}}));
      },
      {"--indexer_format", "compress_to"});
  expect_usage_error(
      [] {
        expand(flags({{"op", "append_indexer"}, {"indexer_format", "mxfp4"}, {"scales", "f32"}}));
      },
      {"--scales", "powers of two"});
  expect_usage_error(
      [] {
        expand(flags({{"op", "indexer_logits"}, {"indexer_format", "fp4"}}));
      },
      {"--indexer_format", "one of fp8, mxfp4", "fp4"});
  expect_usage_error([] { expand(flags({{"op", "compress"}, {"append", "fp9"}})); }, {"--append", "fp8_dsv4", "fp9"});
  refuse("decode", "pool_tokens", "5");
  refuse("decode_sparse", "window", "5");
  refuse("decode_sparse", "alibi", "true");
  refuse("decode_sparse", "kv_len", "5");
  refuse("decode_sparse", "causal", "false");
  refuse("prefill", "tree", "mask");
  refuse("prefill_sparse", "compute", "fp8");
  refuse("prefill", "dcp", "2");
  refuse("append", "sink", "true");
  refuse("append_rope", "append", "fp8_dsv4");
  refuse("append", "to_cache", "fp8");
  refuse("top_k", "scales", "f32");
}

TEST(Expand, GroupsTheComparedKey) {
  const auto groups = expand(flags({{"heads", "16,128"}, {"page_size", "64,1"}, {"compare", "page_size"}}));
  ASSERT_EQ(groups.size(), 2U);
  for (const CaseGroup& group : groups) {
    ASSERT_EQ(group.cases.size(), 2U);
    EXPECT_EQ(group.cases[0].page_size, 64);
    EXPECT_EQ(group.cases[1].page_size, 1);
    EXPECT_EQ(group.cases[0].heads, group.cases[1].heads);
  }
  expect_usage_error([] { expand(flags({{"compare", "page_size"}})); }, {"--compare", "page_size"});
}

TEST(Expand, RefusesByName) {
  expect_usage_error([] { expand(flags({{"heads", "0"}})); }, {"--heads", "at least 1"});
  expect_usage_error([] { expand(flags({{"head_dims", "576"}})); }, {"--head_dims", "d_qk/d_v"});
  expect_usage_error([] { expand(flags({{"causal", "yes"}})); }, {"--causal", "true or false", "yes"});
  expect_usage_error([] { expand(flags({{"model", "no-such-model"}})); }, {"--model", "no-such-model", "deepseek-v3"});
  expect_usage_error([] { expand(flags({{"backend", "cpu_avx3"}})); }, {"--backend", "cpu_avx2"});
  expect_usage_error([] { expand(flags({{"batch_spec", "8q1s4k"}, {"kv_len", "4k"}})); }, {"--kv_len", "--batch_spec"});
  expect_usage_error([] { expand(flags({{"clip", "4k"}})); }, {"--clip", "trace"});
  expect_usage_error([] { expand(flags({{"heads", "1:200"}, {"kv_len", "1:200"}})); }, {"more than", "cases"});
}

class Trace : public testing::Test {
 protected:
  std::string write(const std::string& text) {
    std::ofstream(path_) << text;
    return path_;
  }
  void TearDown() override { std::filesystem::remove(path_); }

 private:
  // Tests run beside each other, each in a process of its own.
  const std::string path_ = testing::TempDir() + "mla_lengths_" + std::to_string(getpid()) + ".jsonl";
};

TEST_F(Trace, GivesRaggedAndEqualLengthsOfOneTotal) {
  std::string path = write("{\"input_length\": 10}\n\n{\"input_length\": 7000}\n{\"input_length\": 3}\n");
  const auto groups = expand(flags({{"trace", path}, {"batch", "3"}, {"clip", "1k"}}));
  ASSERT_EQ(groups.size(), 1U);
  ASSERT_EQ(groups[0].cases.size(), 2U);
  const Case& equal = groups[0].cases[0];
  const Case& ragged = groups[0].cases[1];
  EXPECT_EQ(ragged.requests, (std::vector<Request>{{1, 10}, {1, 1024}, {1, 3}}));
  EXPECT_EQ(equal.requests, (std::vector<Request>{{1, 346}, {1, 346}, {1, 345}}));
  EXPECT_EQ(equal.total_kv(), ragged.total_kv());
  EXPECT_TRUE(ragged.ragged());
}

TEST_F(Trace, NamesTheBadLine) {
  const auto read = [](const std::string& path) { read_trace_lengths("--trace", path, 2, 100); };
  expect_usage_error([&] { read(write("{\"input_length\": 1}\nnot json\n")); }, {"--trace", ":2:", "JSON"});
  expect_usage_error([&] { read(write("{\"input_length\": 1}\n{\"x\": 1}\n")); }, {":2:", "input_length"});
  expect_usage_error([&] { read(write("{\"input_length\": -1}\n")); }, {":1:", "input_length"});
  expect_usage_error([&] { read(write("{\"input_length\": 5}\n")); }, {"at least 2 requests", "got 1"});
  expect_usage_error([&] { read("/no/such/file"); }, {"--trace", "/no/such/file"});
}

TEST(Memory, CountsTheCacheAndRefusesTooMuch) {
  const Case one = expand(flags({{"batch", "32"}, {"kv_len", "32k"}, {"heads", "16"}}))[0].cases[0];
  EXPECT_GE(memory_needed(one), int64_t{32} * 32768 * 1152);
  EXPECT_LE(memory_needed(one), int64_t{32} * 32768 * 1152 + (2 << 20));
  const Case huge = expand(flags({{"batch", "1024"}, {"kv_len", "100m"}}))[0].cases[0];
  expect_usage_error([&] { check_memory({huge}); }, {"memory", "available"});
}

}  // namespace
}  // namespace mla::bench
