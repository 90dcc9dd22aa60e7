// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kit/spec_line.h"
#include "kit/specs.h"

namespace mla::kit {

std::string describe(const BlockTableToCsrSpec& spec) {
  using Spec = BlockTableToCsrSpec;
  return Line(spec)
      .always("seed", &Spec::seed)
      .always("kv_len", &Spec::kv_len)
      .always("page_size", &Spec::page_size)
      .knob("garbage_columns", &Spec::garbage_columns)
      .knob("row_extra", &Spec::row_extra)
      .take();
}

std::string describe(const PhysicalSlotsSpec& spec) {
  using Spec = PhysicalSlotsSpec;
  return Line(spec)
      .always("seed", &Spec::seed)
      .always("q_len", &Spec::q_len)
      .always("kv_len", &Spec::kv_len)
      .always("topk", &Spec::topk)
      .always("page_size", &Spec::page_size)
      .knob("topk_length", &Spec::topk_length)
      .knob("block_table", &Spec::block_table)
      .knob("omit_qo_indptr", &Spec::omit_qo_indptr)
      .knob("context_parallel", &Spec::context_parallel)
      .knob("ratio", &Spec::ratio)
      .knob("list_tokens", &Spec::list_tokens)
      .knob("slots_columns", &Spec::slots_columns)
      .knob("compact", &Spec::compact)
      .knob("in_place", &Spec::in_place)
      .knob("want_valid_count", &Spec::want_valid_count)
      .knob("invalid_share", &Spec::invalid_share)
      .knob("row_extra", &Spec::row_extra)
      .knob("slots_extra", &Spec::slots_extra)
      .knob("table_row_extra", &Spec::table_row_extra)
      .take();
}

std::string describe(const AppendIndexerSpec& spec) {
  using Spec = AppendIndexerSpec;
  return Line(spec)
      .always("seed", &Spec::seed)
      .always("num_tokens", &Spec::num_tokens)
      .always("num_pages", &Spec::num_pages)
      .always("page_size", &Spec::page_size)
      .always("dtype", &Spec::dtype)
      .knob("format", &Spec::format)
      .knob("page_stride_extra", &Spec::page_stride_extra)
      .knob("power_of_two_scales", &Spec::power_of_two_scales)
      .knob("skip_share", &Spec::skip_share)
      .knob("special_share", &Spec::special_share)
      .knob("row_extra", &Spec::row_extra)
      .take();
}

std::string describe(const IndexerLogitsSpec& spec) {
  using Spec = IndexerLogitsSpec;
  return Line(spec)
      .always("seed", &Spec::seed)
      .always("q_len", &Spec::q_len)
      .always("kv_len", &Spec::kv_len)
      .always("num_heads", &Spec::num_heads)
      .always("q_dtype", &Spec::q_dtype)
      .always("page_size", &Spec::page_size)
      .knob("format", &Spec::format)
      .knob("block_table", &Spec::block_table)
      .knob("omit_qo_indptr", &Spec::omit_qo_indptr)
      .knob("causal", &Spec::causal)
      .knob("ratio", &Spec::ratio)
      .knob("key_begin", &Spec::key_begin)
      .knob("key_end", &Spec::key_end)
      .knob("num_blocks", &Spec::num_blocks)
      .knob("block_size", &Spec::block_size)
      .knob("wild_share", &Spec::wild_share)
      .knob("compute", &Spec::compute)
      .knob("unowned_pages", &Spec::unowned_pages)
      .knob("page_stride_extra", &Spec::page_stride_extra)
      .knob("q_head_extra", &Spec::q_head_extra)
      .knob("q_token_extra", &Spec::q_token_extra)
      .knob("weights_extra", &Spec::weights_extra)
      .knob("table_row_extra", &Spec::table_row_extra)
      .knob("logits_dtype", &Spec::logits_dtype)
      .knob("logits_columns", &Spec::logits_columns)
      .knob("logits_extra", &Spec::logits_extra)
      .knob("poison", &Spec::poison)
      .take();
}

std::string describe(const TopKSpec& spec) {
  using Spec = TopKSpec;
  return Line(spec)
      .always("seed", &Spec::seed)
      .always("num_tokens", &Spec::num_tokens)
      .always("num_logits", &Spec::num_logits)
      .always("k", &Spec::k)
      .knob("lengths", &Spec::lengths)
      .knob("starts", &Spec::starts)
      .knob("num_blocks", &Spec::num_blocks)
      .knob("block_size", &Spec::block_size)
      .knob("levels", &Spec::levels)
      .knob("nan_share", &Spec::nan_share)
      .knob("infinite_share", &Spec::infinite_share)
      .knob("logits_dtype", &Spec::logits_dtype)
      .knob("logits_extra", &Spec::logits_extra)
      .knob("indices_extra", &Spec::indices_extra)
      .take();
}

std::string describe(const IndexerTopKSpec& spec) {
  using Spec = IndexerTopKSpec;
  return Line(spec)
      .append(describe(spec.indexer))
      .always("topk", &Spec::topk)
      .always("latent_page_size", &Spec::page_size)
      .knob("context_parallel", &Spec::context_parallel)
      .knob("list_tokens", &Spec::list_tokens)
      .knob("slots_columns", &Spec::slots_columns)
      .knob("want_valid_count", &Spec::want_valid_count)
      .knob("slots_extra", &Spec::slots_extra)
      .knob("latent_table_row_extra", &Spec::table_row_extra)
      .take();
}

namespace {

/// Returns the problem that `explain` judges for an operation on the indexer's keys.
Problem indexer_problem(Op op, DType dtype, int64_t num_heads, IndexerFormat format, DType logits = DType::kF32) {
  Problem problem = {.op = op,
                     .device = {},
                     .q_dtype = dtype,
                     .cache = {},
                     .num_heads = num_heads,
                     .d_qk = kIndexerLayout.head_dim,
                     .d_v = kIndexerLayout.head_dim};
  problem.indexer_format = format;
  problem.logits_dtype = logits;
  return problem;
}

double key_bytes(IndexerFormat format) { return static_cast<double>(indexer_key_bytes(format)); }

}  // namespace

Problem problem_of(const BlockTableToCsrSpec& /*spec*/) { return {.op = Op::kBlockTableToCsr}; }
Problem problem_of(const PhysicalSlotsSpec& /*spec*/) { return {.op = Op::kPhysicalSlots}; }
Problem problem_of(const AppendIndexerSpec& spec) {
  return indexer_problem(Op::kAppendIndexer, spec.dtype, 1, spec.format);
}
Problem problem_of(const IndexerLogitsSpec& spec) {
  Problem problem = indexer_problem(Op::kIndexerLogits, spec.q_dtype, spec.num_heads, spec.format, spec.logits_dtype);
  problem.compute = spec.num_blocks == 0 && !spec.key_begin && !spec.key_end ? spec.compute : Compute::kExact;
  return problem;
}
Problem problem_of(const TopKSpec& spec) {
  Problem problem{.op = Op::kTopK, .device = {}, .q_dtype = DType::kF32};
  problem.logits_dtype = spec.logits_dtype;
  return problem;
}
Problem problem_of(const IndexerTopKSpec& spec) {
  Problem problem = problem_of(spec.indexer);
  problem.op = Op::kIndexerTopK;
  return problem;
}

int64_t num_logits(const IndexerLogitsSpec& spec) {
  const int32_t longest = spec.kv_len.empty() ? 0 : *std::max_element(spec.kv_len.begin(), spec.kv_len.end());
  const int64_t computed = spec.num_blocks > 0 ? int64_t{spec.num_blocks} * spec.block_size : longest / spec.ratio;
  return std::max<int64_t>(computed + spec.logits_columns, 1);
}

Work work_of(const BlockTableToCsrSpec& spec) {
  int64_t pages = 0;
  for (int32_t kv_len : spec.kv_len) pages += (int64_t{kv_len} + spec.page_size - 1) / spec.page_size;
  return {.flops = 0, .bytes = static_cast<double>(pages) * 8 + spec.batch_size() * 8.0};
}

Work work_of(const PhysicalSlotsSpec& spec) {
  return {.flops = 0, .bytes = static_cast<double>(total_queries(spec)) * (spec.topk + spec.num_slots()) * 4};
}

Work work_of(const AppendIndexerSpec& spec) {
  const double row = kIndexerLayout.head_dim * bytes_of(spec.dtype) + key_bytes(spec.format);
  return {.flops = 0, .bytes = spec.num_tokens * (1 - spec.skip_share) * row + spec.num_tokens * 8.0};
}

Work work_of(const IndexerLogitsSpec& spec) {
  const auto tokens = static_cast<double>(total_queries(spec));
  double pairs = 0, keys = 0;  // keys that are read: each once, even if it is in several lists
  for (size_t request = 0; request < spec.kv_len.size(); ++request) {
    double of_request = 0;
    for (int64_t i = 0; i < spec.q_len_of(request); ++i) {
      const auto visible = static_cast<double>(spec.num_visible(request, i));
      of_request +=
          spec.num_blocks == 0 ? visible : std::min(visible, static_cast<double>(spec.num_blocks) * spec.block_size);
    }
    pairs += of_request;
    keys += std::min(of_request, static_cast<double>(spec.kv_len[request] / spec.ratio));
  }
  return {
      .flops = 2 * pairs * spec.num_heads * kIndexerLayout.head_dim,
      .bytes = keys * key_bytes(spec.format) +
               tokens * spec.num_heads * (kIndexerLayout.head_dim * bytes_of(spec.q_dtype) + 4) +
               tokens * (static_cast<double>(num_logits(spec)) * bytes_of(spec.logits_dtype) + spec.num_blocks * 4.0)};
}

Work work_of(const TopKSpec& spec) {
  const double share = spec.lengths ? 0.5 : 1.0;
  return {.flops = 0,
          .bytes = spec.num_tokens * (spec.num_logits * share * bytes_of(spec.logits_dtype) + spec.k * 4.0)};
}

Work work_of(const IndexerTopKSpec& spec) {
  Work work = work_of(spec.indexer);
  work.bytes += static_cast<double>(total_queries(spec.indexer)) * spec.num_slots() * 4;
  return work;
}

}  // namespace mla::kit
