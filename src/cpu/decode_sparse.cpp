// SPDX-License-Identifier: Apache-2.0
// This file computes decode_sparse and prefill_sparse, which are absorbed sparse attention: query rows are the heads of
// one query token, and keys are the slots that its indices name, first of one pool and then of the other.
#include <algorithm>
#include <limits>
#include <vector>

#include "cpu/absorbed.h"
#include "cpu/operations.h"

namespace mla::cpu {
namespace {

constexpr schedule::KeyRange kEverything = {.begin = 0, .end = std::numeric_limits<int32_t>::max()};

/// Returns how many entries of indices a token has in both pools. A task's keys are numbered by these entries.
int32_t num_entries(const core::DecodeSparseArgs& args) {
  return args.pools[0].topk + (args.num_pools > 1 ? args.pools[1].topk : 0);
}

std::vector<schedule::Sequence> sequences_of(const core::DecodeSparseArgs& args) {
  std::vector<schedule::Sequence> sequences;
  sequences.reserve(static_cast<size_t>(args.num_tokens));
  for (int32_t token = 0; token < args.num_tokens; ++token)
    sequences.push_back({.request = token,
                         .head = 0,
                         .q_len = 1,
                         .rows_per_token = args.num_heads,
                         .kv_len = num_entries(args),
                         .causal = false});
  return sequences;
}

AttentionSetup setup_of(const KernelSet& set, const core::DecodeSparseArgs& args, int32_t num_threads) {
  const core::Cache caches[] = {args.pools[0].cache, args.pools[args.num_pools - 1].cache};
  const TileKernels& kernels = absorbed_kernels(set, args.q_dtype, caches);
  const TileShape shape = absorbed_shape(kernels, args.d_qk, args.d_v, args.q_dtype, caches);
  return {.kernels = kernels,
          .shape = shape,
          .options = split_options(kernels, shape, num_threads, args.batch_invariant),
          .keeps_max = args.max_logits != nullptr};
}

TaskList::Capacity capacity_of(const AttentionSetup& setup, const core::DecodeSparseArgs& args) {
  return capacity_of(setup, args.num_tokens * args.num_heads, args.num_tokens, [&] { return sequences_of(args); });
}

/// Lists the valid slots among entries [begin, end) of a token's row of indices in one pool.
class IndexedRows {
 public:
  IndexedRows(const core::DecodeSparseArgs& args, int32_t pool, int64_t token, int32_t begin, int32_t end)
      : cache_(args.pools[pool].cache),
        indices_(args.pools[pool].indices + token * args.pools[pool].indices_stride_token),
        entry_(std::max(0, begin)),
        end_(std::min(end, args.topk_length(pool, token))) {}

  int32_t list(KeyStream& stream, int32_t entry, int32_t room) {
    int32_t count = 0;
    const int64_t num_slots = cache_.num_slots();
    for (; entry_ < end_ && count < room; ++entry_) {
      const int32_t slot = indices_[entry_];
      if (slot < 0 || slot >= num_slots) continue;
      stream.enter(entry + count++, slot / cache_.page_size, slot % cache_.page_size);
    }
    return count;
  }

 private:
  const core::Cache& cache_;
  const int32_t* indices_;
  int32_t entry_, end_;
};

void run_task(const AbsorbedRun& run, const Absorbed& problem, const core::DecodeSparseArgs& args,
              const schedule::Task& task, Tiles& tiles, const AttentionLayout& layout) {
  const int64_t token = task.request;
  const int32_t first_topk = args.pools[0].topk;
  const int32_t last = args.num_pools - 1;
  IndexedRows rows(args, 0, token, task.kv_begin, task.kv_end);
  KeyStream stream(args.pools[0].cache, tiles);
  IndexedRows extra_rows(args, last, token, task.kv_begin - first_topk, last == 0 ? 0 : task.kv_end - first_topk);
  KeyStream extra_stream(args.pools[last].cache, tiles);
  run.run(
      task, token, problem.scoring(), tiles, layout, [](int32_t) { return kEverything; }, [](int32_t) { return 0; },
      [&](KeyBlock& block) { return stream.next(rows, block) || extra_stream.next(extra_rows, block); });
}

}  // namespace

size_t decode_sparse_workspace_size(const KernelSet& set, const core::DecodeSparseArgs& args, int32_t num_threads) {
  const AttentionSetup setup = setup_of(set, args, num_threads);
  return attention_workspace_size(setup, capacity_of(setup, args));
}

core::PlanSummary plan_decode_sparse(const KernelSet& set, const core::DecodeSparseArgs& args, int32_t num_threads,
                                     std::span<std::byte> workspace) {
  const AttentionSetup setup = setup_of(set, args, num_threads);
  return plan_attention(setup, capacity_of(setup, args), sequences_of(args), workspace);
}

void run_decode_sparse(const KernelSet& set, const core::DecodeSparseArgs& args, core::ThreadPool& pool,
                       std::span<std::byte> workspace) {
  const AttentionSetup setup = setup_of(set, args, pool.size());
  Absorbed problem(args, args.pools[0].cache.d_ckv);
  problem.max_logits = args.max_logits;
  problem.max_logits_stride_token = args.max_logits_stride_token;
  problem.max_logits_stride_head = args.max_logits_stride_head;
  if (args.finishes) problem.finish = &args.finish;
  const AbsorbedRun run(set, problem, setup);
  run_attention(setup, pool, workspace, [&](const schedule::Task& task, Tiles& tiles, const AttentionLayout& layout) {
    run_task(run, problem, args, task, tiles, layout);
  });
}

}  // namespace mla::cpu
