// SPDX-License-Identifier: Apache-2.0
// This file computes absorbed decode, where query rows are (query token, head) pairs of one request and keys are rows
// of the paged cache.
#include <algorithm>
#include <vector>

#include "cpu/absorbed.h"
#include "cpu/operations.h"

namespace mla::cpu {
namespace {

schedule::Sequence sequence_of(const core::DecodeArgs& args, int32_t request) {
  // The tree says which drafts are visible, not causality.
  const bool tree = args.tree_mask != nullptr || args.tree_parents != nullptr;
  return {.request = request,
          .head = 0,
          .q_len = args.queries.len(request),
          .rows_per_token = args.num_heads,
          .kv_len = args.pages.kv_len[request],
          .causal = args.causal && !tree,
          .window_left = args.options.window_left,
          .share = args.context_parallel};
}

std::vector<schedule::Sequence> sequences_of(const core::DecodeArgs& args) {
  std::vector<schedule::Sequence> sequences;
  sequences.reserve(static_cast<size_t>(args.batch_size));
  for (int32_t request = 0; request < args.batch_size; ++request) sequences.push_back(sequence_of(args, request));
  return sequences;
}

AttentionSetup setup_of(const KernelSet& set, const core::DecodeArgs& args, int32_t num_threads) {
  const TileKernels& kernels = absorbed_kernels(set, args.q_dtype, {&args.cache, 1});
  const TileShape shape = absorbed_shape(kernels, args.d_qk, args.d_v, args.q_dtype, {&args.cache, 1});
  return {
      .kernels = kernels, .shape = shape, .options = split_options(kernels, shape, num_threads, args.batch_invariant)};
}

TaskList::Capacity capacity_of(const AttentionSetup& setup, const core::DecodeArgs& args) {
  return capacity_of(setup, args.num_tokens * args.num_heads, args.batch_size, [&] { return sequences_of(args); });
}

/// Lists the rows of a request in the order of its page table.
class PagedRows {
 public:
  PagedRows(const core::DecodeArgs& args, const schedule::Task& task)
      : pages_(args.pages.of(task.request)), page_size_(args.pages.page_size), key_(task.kv_begin), end_(task.kv_end) {}

  int32_t list(KeyStream& stream, int32_t entry, int32_t room) {
    const int32_t count = std::min(room, end_ - key_);
    for (int32_t done = 0; done < count;) {
      const int32_t offset = key_ % page_size_;
      const int32_t run = std::min(count - done, page_size_ - offset);
      stream.enter(entry + done, pages_[key_ / page_size_], offset, run);
      done += run;
      key_ += run;
    }
    return count;
  }

 private:
  const int32_t* pages_;
  int32_t page_size_;
  int32_t key_, end_;
};

/// Says which drafts a query does not see: the last q_len tokens of a request form a tree.
class HiddenDrafts final : public HiddenKeys {
 public:
  HiddenDrafts(const core::DecodeArgs& args, const schedule::Task& task, const schedule::Sequence& sequence)
      : HiddenKeys(first_hidden(sequence)),
        args_(args),
        row_begin_(task.row_begin),
        first_token_(args.queries.begin(task.request)),
        first_draft_(sequence.kv_len - sequence.q_len),
        q_len_(sequence.q_len) {}

  bool hidden(int32_t row, int32_t key) const override {
    const int64_t draft = global_position(args_.context_parallel, key) - first_draft_;
    const int32_t query = (row_begin_ + row) / args_.num_heads;
    if (draft < 0 || draft >= q_len_) return false;
    if (args_.tree_mask != nullptr)
      return args_.tree_mask[(first_token_ + query) * args_.tree_mask_stride_token + draft] == 0;
    int32_t ancestor = query;
    while (ancestor > draft) ancestor = args_.tree_parents[first_token_ + ancestor];
    return ancestor != draft;
  }

 private:
  static int32_t first_hidden(const schedule::Sequence& sequence) {
    return static_cast<int32_t>(local_length(sequence.share, std::max(0, sequence.kv_len - sequence.q_len)));
  }

  const core::DecodeArgs& args_;
  int32_t row_begin_;
  int64_t first_token_;
  int64_t first_draft_;
  int32_t q_len_;
};

void run_task(const AbsorbedRun& run, const Absorbed& problem, const core::DecodeArgs& args, const schedule::Task& task,
              Tiles& tiles, const AttentionLayout& layout) {
  const schedule::Sequence sequence = sequence_of(args, task.request);
  const HiddenDrafts drafts(args, task, sequence);
  Scoring scoring = problem.scoring();
  scoring.share = args.context_parallel;
  if (args.tree_mask != nullptr || args.tree_parents != nullptr) scoring.hidden = &drafts;
  PagedRows rows(args, task);
  KeyStream stream(args.cache, tiles);
  run.run(
      task, args.queries.begin(task.request), scoring, tiles, layout,
      [&](int32_t row) {
        const schedule::KeyRange range = schedule::visible_keys(sequence, row);
        return schedule::KeyRange{range.begin, std::min(range.end, task.kv_end)};
      },
      [&](int32_t row) { return schedule::query_position(sequence, row); },
      [&](KeyBlock& block) { return stream.next(rows, block); });
}

}  // namespace

size_t decode_workspace_size(const KernelSet& set, const core::DecodeArgs& args, int32_t num_threads) {
  const AttentionSetup setup = setup_of(set, args, num_threads);
  return attention_workspace_size(setup, capacity_of(setup, args));
}

core::PlanSummary plan_decode(const KernelSet& set, const core::DecodeArgs& args, int32_t num_threads,
                              std::span<std::byte> workspace) {
  const AttentionSetup setup = setup_of(set, args, num_threads);
  return plan_attention(setup, capacity_of(setup, args), sequences_of(args), workspace);
}

void run_decode(const KernelSet& set, const core::DecodeArgs& args, core::ThreadPool& pool,
                std::span<std::byte> workspace) {
  const AttentionSetup setup = setup_of(set, args, pool.size());
  const Absorbed problem(args, args.cache.d_ckv);
  const AbsorbedRun run(set, problem, setup);
  run_attention(setup, pool, workspace, [&](const schedule::Task& task, Tiles& tiles, const AttentionLayout& layout) {
    run_task(run, problem, args, task, tiles, layout);
  });
}

}  // namespace mla::cpu
