// SPDX-License-Identifier: Apache-2.0
#include "mla/model_steps.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "kit/device.h"
#include "mla/problems.h"
#include "mla/text.h"

namespace mla::cli {
namespace {

/// Lists the steps of layers of one kind.
class Steps {
 public:
  Steps(const LayerKind& layer, const CachePair& caches, int64_t tp) : layer_(layer), caches_(caches), tp_(tp) {}

  std::vector<Step> list() {
    add(Op::kAppendRope);
    if (layer_.compress_ratio > 0 && layer_.owns_pool) write_pool();
    if (layer_.index_heads > 0) choose();
    if (layer_.draft_block == 0) prefill();
    decode();
    finish();
    return std::move(steps_);
  }

 private:
  bool is_sparse() const { return layer_.value_is_row || layer_.index_topk > 0; }

  void add(Op op, std::string note = {}) { add(op, caches_.cache, std::move(note)); }
  void add(Op op, CacheFormat cache, std::string note) {
    Problem problem = usual_problem(op, cache);
    set_shape(layer_, tp_, problem);
    add(problem, std::move(note));
  }
  void add(const Problem& problem, std::string note) {
    steps_.push_back({.what = std::string(name(problem.op)), .problem = problem, .note = std::move(note)});
  }
  void add_lacking(std::string what, std::string lacks) {
    steps_.push_back({.what = std::move(what), .lacks = std::move(lacks)});
  }

  /// Adds what rows of the second pool take.
  void write_pool() {
    add(Op::kCompress, caches_.extra_cache, fmt::format("second pool, groups of {}", layer_.compress_ratio));
  }

  /// Adds the choice of keys by an indexer, whose heads are not divided.
  void choose() {
    const auto of_indexer = [&](Op op, std::string note) {
      Problem problem = usual_problem(op, op == Op::kCompress ? CacheFormat::kBF16 : caches_.cache);
      problem.num_heads = layer_.index_heads;
      problem.d_qk = problem.d_v = layer_.index_head_dim;
      add(problem, std::move(note));
    };
    if (layer_.index_head_dim != kIndexerLayout.head_dim)
      return add_lacking("indexer_logits", fmt::format("keys of the indexer have {} channels, not {}",
                                                       kIndexerLayout.head_dim, layer_.index_head_dim));
    // Keys of V4 and GLM-5.3 are pooled from tokens, those of V4.1 (ratios of 1 and 2) made from its latents.
    const int32_t pooled = layer_.compress_ratio > 2 ? layer_.compress_ratio : layer_.index_pooled;
    if (pooled > 1)
      of_indexer(Op::kCompress, fmt::format("keys, groups of {}", pooled));
    else if (layer_.compress_ratio == 0 || layer_.owns_pool)
      of_indexer(Op::kAppendIndexer, {});
    const bool within = layer_.candidates == CandidateBlocks::kWithin;
    of_indexer(Op::kIndexerLogits, within ? "keys of the candidate blocks" : "");
    if (layer_.candidates == CandidateBlocks::kPicks) add(Op::kTopK, "candidate blocks");
    add(Op::kTopK, fmt::format("k {}", layer_.index_topk / layer_.index_pooled));
    add(Op::kPhysicalSlots, layer_.index_pooled > 1 ? fmt::format("all {} tokens of each key", pooled) : "");
  }

  void prefill() {
    add(Op::kGather);
    if (layer_.compress_ratio > 0) add(Op::kGather, caches_.extra_cache, "second pool");
    if (!layer_.value_is_row)
      add(Op::kPrefill,
          layer_.index_topk > 0 ? fmt::format("prompts of up to {} tokens", layer_.index_topk) : options());
    if (!is_sparse()) {
      Problem merge = usual_problem(Op::kMergeStates, caches_.cache);
      set_shape(layer_, tp_, merge);
      merge.d_v = layer_.v_head_dim;
      return add(merge, "chunks of a prompt");
    }
    const std::optional<CacheFormat> rows = format_of_elements(usual_problem(Op::kGather, caches_.cache).q_dtype);
    add(Op::kPrefillSparse, rows.value_or(CacheFormat::kBF16), options());
  }

  void decode() {
    Problem problem = usual_problem(is_sparse() ? Op::kDecodeSparse : Op::kDecode, caches_.cache);
    set_shape(layer_, tp_, problem);
    if (layer_.compress_ratio > 0) problem.extra_cache = caches_.extra_cache;
    if (problem.op == Op::kDecode) problem.q_len = std::max<int64_t>(layer_.draft_block, 1);
    add(problem, options());
  }

  /// Adds what stands between attention and the output projection, where values have rotary channels.
  void finish() {
    if (!layer_.value_is_row || layer_.qk_rope_head_dim == 0) return;
    Problem problem = usual_problem(Op::kFinishOutput, caches_.cache);
    set_shape(layer_, tp_, problem);
    add(problem, "rotary channels turned back");
  }

  /// Returns the options of attention: what bounds its keys, and the sink.
  std::string options() const {
    std::string text;
    const auto append = [&](const std::string& option) { text += (text.empty() ? "" : ", ") + option; };
    if (layer_.sliding_window > 0) append(fmt::format("window {}", layer_.sliding_window));
    if (layer_.index_topk > 0) append(fmt::format("lists of {}", layer_.list_width()));
    if (layer_.compress_ratio > 0 && layer_.index_topk == 0) append("all rows of the second pool");
    if (layer_.attn_sink) append("sink");
    if (layer_.draft_block > 0) append("not causal");
    return text;
  }

  const LayerKind& layer_;
  CachePair caches_;
  int64_t tp_;
  std::vector<Step> steps_;
};

bool is_forced(const std::string& force) {
  const char* environment = std::getenv("MLA_BACKEND");
  return !force.empty() || (environment != nullptr && *environment != '\0');
}

}  // namespace

std::vector<Step> steps_of(const LayerKind& layer, const CachePair& caches, int64_t tp) {
  return Steps(layer, caches, tp).list();
}

Answer answer_of(const Step& step, const std::string& device, const std::string& force) {
  if (!step.problem) return {.reason = step.lacks};
  const Problem problem = asked_on(*step.problem, device);
  const Explanation explanation = explain(problem, force);
  if (!explanation.selected.empty()) return {.backend = explanation.selected};
  if (is_forced(force)) return {.reason = explanation.error};
  // The last row for memory of that kind takes the most problems, so that its reason is the one that is left.
  const bool on_gpu = problem.device.type == DeviceType::kCuda;
  const auto last = std::find_if(explanation.rows.rbegin(), explanation.rows.rend(),
                                 [&](const BackendVerdict& row) { return kit::is_gpu_backend(row.name) == on_gpu; });
  return {.reason = last != explanation.rows.rend() ? last->reason : explanation.error};
}

}  // namespace mla::cli
