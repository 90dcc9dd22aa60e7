// SPDX-License-Identifier: Apache-2.0
// A row of an operation's table is what a backend provides for it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "core/args.h"
#include "core/format.h"
#include "core/thread_pool.h"
#include "mla/backend.h"
#include "mla/status.h"

namespace mla::cuda {
class Queue;
struct Code;
}  // namespace mla::cuda

namespace mla::core {

/// Stores a sentence without allocation, since verdicts are asked for in `run`, where nothing may be allocated. What
/// does not fit is cut.
class Reason {
 public:
  /// While one exists, reasons of its thread are not put into words: they say only that there is a reason. Selection
  /// asks every row in every call and needs no words, which are most of what a verdict costs.
  class WithoutWords {
   public:
    WithoutWords() : before_(std::exchange(without_words_, true)) {}
    ~WithoutWords() { without_words_ = before_; }
    WithoutWords(const WithoutWords&) = delete;
    WithoutWords& operator=(const WithoutWords&) = delete;

   private:
    bool before_;
  };

  Reason() = default;
  Reason(const char* text)  // NOLINT(google-explicit-constructor): it is a string
      : Reason(*text == '\0' ? Reason() : format("{}", text)) {}

  /// Formats a text, which must not come out empty.
  template <class... Args>
  static Reason format(fmt::format_string<Args...> text, Args&&... args) {
    Reason reason;
    reason.given_ = true;
    if (!without_words_) reason.size_ = format_args_to(reason.text_, text, fmt::make_format_args(args...));
    return reason;
  }

  bool empty() const { return !given_; }
  std::string str() const { return {text_.data(), size_}; }

 private:
  static inline thread_local bool without_words_ = false;

  std::array<char, 160> text_ = {};
  size_t size_ = 0;
  bool given_ = false;
};

/// Returns why no backend can run a problem whose row width is not the one that its format fixes; empty if there is
/// nothing to refuse.
inline Reason width_refusal(const Problem& problem) {
  const KvLayout layout = kv_layout(problem.cache);
  const int32_t width = layout.nope_dim + layout.rope_dim;
  const bool cached = problem.op == Op::kDecode || problem.op == Op::kDecodeSparse || problem.op == Op::kAppend ||
                      problem.op == Op::kAppendRope || problem.op == Op::kGather || problem.op == Op::kCopyPages ||
                      problem.op == Op::kCompress;
  if (!cached || width == 0 || problem.d_qk == width) return {};
  return Reason::format("rows of {} have {} channels, not {}", name(problem.cache), width, problem.d_qk);
}

/// Returns whether the operation scores the keys of an indexer.
inline bool is_indexer(Op op) { return op == Op::kIndexerLogits || op == Op::kIndexerTopK; }

/// Returns whether a problem is computed in products of e4m3 or not at all. An indexer only allows them.
inline bool demands_compute(const Problem& problem) {
  return problem.compute == Compute::kFP8 && !is_indexer(problem.op);
}

/// Returns why no backend can run a problem in the arithmetic that it names; empty if there is nothing to refuse.
inline Reason compute_refusal(const Problem& problem) {
  if (!demands_compute(problem)) return {};
  if (problem.op == Op::kPrefill) {
    if (problem.q_dtype == DType::kE4M3) return {};
    return Reason::format("compute {} is for a prefill of e4m3 tensors, not of {}", name(problem.compute),
                          name(problem.q_dtype));
  }
  if (problem.op != Op::kDecode && problem.op != Op::kDecodeSparse)
    return Reason::format("compute {} is for decode, decode_sparse, prefill, indexer_logits and indexer_top_k only",
                          name(problem.compute));
  for (const CacheFormat cache : {problem.cache, problem.extra_cache.value_or(problem.cache)})
    if (!is_quantized(kv_layout(cache).nope.element))
      return Reason::format("compute {} is for quantized caches, not for {}", name(problem.compute), name(cache));
  const auto quantizes_rope = [](CacheFormat cache) { return is_quantized(kv_layout(cache).rope.element); };
  if (problem.extra_cache && quantizes_rope(problem.cache) != quantizes_rope(*problem.extra_cache))
    return Reason::format("compute {} takes rotary channels that are quantized in both pools or in none, not {} and {}",
                          name(problem.compute), name(problem.cache), name(*problem.extra_cache));
  return {};
}

/// Says whether a row can run a problem, and why. Selection and explain() ask the same function.
struct Verdict {
  bool usable = false;
  Reason reason;
  /// The row can run the problem, but one behind it is faster: it runs it only if those cannot, or if it is forced.
  bool yields = false;
};

/// Describes a plan. The text is made when somebody asks for it: a plan may be made in every call.
struct PlanSummary {
  size_t num_tasks = 0;
  size_t num_splits = 0;
  std::function<std::string()> text = [] { return std::string(); };
};

/// Holds what a row computes with.
struct Executor {
  ThreadPool& pool;                  // threads of the context
  cuda::Queue* queue = nullptr;      // for rows of a GPU: the stream
  const cuda::Code* code = nullptr;  // for rows of a GPU: the code that it runs
};

/// Holds a backend's implementation of a planned operation (attention). `workspace` is aligned to kWorkspaceAlignment
/// and at least workspace_size(args, executor) bytes long; `plan` writes the work list into it, and `run` reads it
/// there. `run` gets arguments of the same shapes as `plan` did and, on the CPU, of the same lengths. On a GPU both
/// enqueue kernels, and must not read what the arguments point to. They return success, or why a kernel could not be
/// enqueued. The functions hold what they need of their backend; neither a verdict nor a run allocates.
template <class Args>
struct PlannedImplementation {
  std::string_view name;
  std::function<Verdict(const Problem& problem)> verdict;
  std::function<Numerics(const Problem& problem)> numerics;
  std::function<size_t(const Args& args, const Executor& executor)> workspace_size;
  std::function<Status(const Args& args, const Executor& executor, std::span<std::byte> workspace,
                       PlanSummary& summary)>
      plan;
  std::function<Status(const Args& args, const Executor& executor, std::span<std::byte> workspace)> run;
};

inline constexpr size_t kWorkspaceAlignment = 64;

/// Holds a backend's implementation of an operation that needs no plan (all others).
template <class Args>
struct DirectImplementation {
  std::string_view name;
  std::function<Verdict(const Problem& problem)> verdict;
  std::function<Numerics(const Problem& problem)> numerics;
  std::function<Status(const Args& args, const Executor& executor)> run;
};

}  // namespace mla::core
