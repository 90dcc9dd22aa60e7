// SPDX-License-Identifier: Apache-2.0
#include "mla/problems.h"

#include "kit/device.h"
#include "mla/kv_layout.h"
#include "mla/text.h"
#include "mla/values.h"

namespace mla::cli {
namespace {

std::string listed_keys_of(const Problem& problem) {
  return problem.listed_keys > 0 ? fmt::format(", {} listed keys", problem.listed_keys) : std::string();
}

std::string requests_of(const Problem& problem) {
  if (problem.num_requests == 0) return {};
  return fmt::format(", {} request{}", problem.num_requests, problem.num_requests == 1 ? "" : "s");
}

// The arithmetic, where it is not the usual one.
std::string compute_of(const Problem& problem) {
  return problem.compute != Compute::kDefault ? fmt::format(", compute {}", name(problem.compute)) : "";
}

std::string keys_of(const Problem& problem) {
  return problem.indexer_format != IndexerFormat::kFP8 ? fmt::format(", keys {}", name(problem.indexer_format)) : "";
}

std::string logits_of(const Problem& problem) {
  return problem.logits_dtype != DType::kF32 ? fmt::format(", logits {}", name(problem.logits_dtype)) : "";
}

std::string caches_of(const Problem& problem) {
  if (!problem.extra_cache) return fmt::format("cache {}", name(problem.cache));
  return fmt::format("caches {} and {}", name(problem.cache), name(*problem.extra_cache));
}

}  // namespace

bool is_indexer(Op op) { return op == Op::kAppendIndexer || op == Op::kIndexerLogits || op == Op::kIndexerTopK; }

Problem usual_problem(Op op, CacheFormat cache) {
  Problem problem{.op = op, .cache = cache};
  const KvLayout layout = kv_layout(problem.cache);
  problem.q_dtype = value_dtype(layout.nope.element);
  if (op == Op::kMergeStates || op == Op::kTopK) problem.q_dtype = DType::kF32;
  if (op == Op::kIndexerLogits || op == Op::kIndexerTopK) problem.q_dtype = DType::kE4M3;
  if (layout.is_packed()) {
    problem.d_qk = layout.nope_dim + layout.rope_dim;
    problem.d_v = layout.value_has_rope ? problem.d_qk : layout.nope_dim;
  }
  if (op == Op::kPrefill) {
    problem.d_qk = 192;
    problem.d_v = 128;
  }
  if (op == Op::kCompress && !layout.is_packed()) problem.d_qk = problem.d_v = 512;
  if (is_indexer(op)) {
    problem.num_heads = 64;
    problem.d_qk = problem.d_v = kIndexerLayout.head_dim;
  }
  return problem;
}

void set_shape(const AttentionShape& shape, int64_t tp, Problem& problem) {
  if (is_indexer(problem.op)) return;
  const bool up_projected = problem.op == Op::kPrefill;
  problem.num_heads = shape.num_attention_heads / tp;
  problem.d_qk = up_projected ? shape.prefill_d_qk() : shape.d_qk();
  problem.d_v = up_projected ? shape.v_head_dim : shape.d_v();
}

Problem asked_on(Problem problem, const std::string& device) {
  problem = kit::on_device(problem, device);
  problem.full_build = problem.gpu_arch != 0 && !problem.emulated;
  return problem;
}

std::string told_code(const Explanation& explanation) {
  return explanation.code ? fmt::format(" (code: {})", code_text(*explanation.code)) : std::string();
}

std::string short_error(const Explanation& explanation) {
  // "...: no backend can run this: a: its reason; b: its reason; c can"
  constexpr std::string_view kBeforeReasons = "run this: ", kOther = "; ", kCan = " can";
  const std::string& error = explanation.error;
  const size_t reasons = error.find(kBeforeReasons);
  if (reasons == std::string::npos) return error;
  std::string text = error.substr(0, reasons + kBeforeReasons.size() - 2) + " (the table says why)";
  if (error.ends_with(kCan)) text += error.substr(error.rfind(kOther));
  return text;
}

std::string describe(const Problem& problem) {
  const std::string_view type = name(problem.q_dtype);
  switch (problem.op) {
    case Op::kDecode:
    case Op::kDecodeSparse:
      return fmt::format("{}, queries {}{}, {} heads, head dims {}/{}{}{}{}", caches_of(problem), type,
                         problem.q_len > 1 ? fmt::format(", {} per request", problem.q_len) : "", problem.num_heads,
                         problem.d_qk, problem.d_v, listed_keys_of(problem), requests_of(problem), compute_of(problem));
    case Op::kPrefill:
      return fmt::format("q, k and v {}, {} heads, head dims {}/{}{}", type, problem.num_heads, problem.d_qk,
                         problem.d_v, compute_of(problem));
    case Op::kPrefillSparse:
      return fmt::format("keys {}, queries {}, {} heads, head dims {}/{}{}", name(problem.cache), type,
                         problem.num_heads, problem.d_qk, problem.d_v, listed_keys_of(problem));
    case Op::kFinishOutput: return fmt::format("outputs {}, {} heads, d_v {}", type, problem.num_heads, problem.d_v);
    case Op::kMergeStates: return fmt::format("states {}, {} heads, d_v {}", type, problem.num_heads, problem.d_v);
    case Op::kAppend:
    case Op::kGather:
      return fmt::format("cache {}, rows {}, head dims {}/{}", name(problem.cache), type, problem.d_qk, problem.d_v);
    case Op::kAppendRope:
      return fmt::format("cache {}, rows {}, {} heads, head dims {}/{}", name(problem.cache), type, problem.num_heads,
                         problem.d_qk, problem.d_v);
    case Op::kCopyPages:
      return fmt::format("to cache {}, head dims {}/{}", name(problem.cache), problem.d_qk, problem.d_v);
    case Op::kBlockTableToCsr: return "any page size";
    case Op::kPhysicalSlots: return "any page size, any number of indices";
    case Op::kAppendIndexer: return fmt::format("rows {}{}", type, keys_of(problem));
    case Op::kIndexerLogits:
    case Op::kIndexerTopK:
      return fmt::format("queries {}, {} heads{}{}{}", type, problem.num_heads, keys_of(problem), compute_of(problem),
                         logits_of(problem));
    case Op::kTopK: return fmt::format("any number of {} logits", name(problem.logits_dtype));
    case Op::kCompress: return fmt::format("cache {}, tokens {}, {} channels", name(problem.cache), type, problem.d_qk);
  }
  return {};
}

}  // namespace mla::cli
