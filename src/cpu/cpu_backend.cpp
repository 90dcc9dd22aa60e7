// SPDX-License-Identifier: Apache-2.0
#include "cpu/cpu_backend.h"

#include <vector>

#include "cpu/levels.h"
#include "cpu/operations.h"
#include "mla/backend.h"

namespace mla::cpu {
namespace {

using core::Executor;
using core::Reason;
using core::Verdict;

constexpr int64_t kMaxHeadDim = 1024, kMaxRotaryDim = 64;

bool is_float(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32; }

/// Returns whether the operation is attention in the absorbed form, over a latent cache.
bool is_absorbed(Op op) { return op == Op::kDecode || op == Op::kDecodeSparse || op == Op::kPrefillSparse; }

/// Returns why every level refuses the problem; empty if none has to.
Reason refusal(const Problem& problem) {
  if (problem.device.type != DeviceType::kCpu)
    return Reason::format("tensors are on {}, not on the CPU", name(problem.device.type));
  if (core::demands_compute(problem))
    return Reason::format("multiplies numbers of f32 or pairs of bf16, not those of compute {}", name(problem.compute));
  const bool absorbed = is_absorbed(problem.op);
  const bool takes_e4m3 = absorbed || core::is_indexer(problem.op) || problem.op == Op::kPrefill;
  if (!is_float(problem.q_dtype) && !(takes_e4m3 && problem.q_dtype == DType::kE4M3))
    return Reason::format("takes bf16, f16 and f32{}, not {}", takes_e4m3 ? " and e4m3" : "", name(problem.q_dtype));
  if (const Reason reason = core::width_refusal(problem); !reason.empty()) return reason;
  if (problem.op == Op::kCopyPages && problem.d_qk > kMaxCopiedWidth)
    return Reason::format("takes rows of at most {} channels, not {}", kMaxCopiedWidth, problem.d_qk);
  if (problem.op == Op::kCompress && problem.d_qk > kMaxLatent)
    return Reason::format("takes latents of at most {} channels, not {}", kMaxLatent, problem.d_qk);
  if (problem.op == Op::kFinishOutput && problem.d_v > kMaxFinished)
    return Reason::format("takes outputs of at most {} channels, not {}", kMaxFinished, problem.d_v);
  if (problem.op == Op::kMergeStates && problem.d_v % kMaxLanes != 0)
    return Reason::format("d_v must be a multiple of {}, not {}", kMaxLanes, problem.d_v);
  if (!absorbed && problem.op != Op::kPrefill) return {};
  if (problem.d_v % kSlab != 0 || problem.d_v < kSlab || problem.d_v > kMaxHeadDim)
    return Reason::format("d_v must be a multiple of {} up to {}, not {}", kSlab, kMaxHeadDim, problem.d_v);
  const int64_t multiple = 2 * kStepChunk;
  if (problem.d_qk % multiple != 0 || problem.d_qk < multiple || problem.d_qk > kMaxHeadDim + kMaxRotaryDim)
    return Reason::format("d_qk must be a multiple of {} up to {}, not {}", multiple, kMaxHeadDim + kMaxRotaryDim,
                          problem.d_qk);
  if (absorbed && problem.d_qk < problem.d_v)
    return Reason::format("d_qk must be at least d_v, {}, not {}", problem.d_v, problem.d_qk);
  return {};
}

Verdict verdict(const Level& level, const Problem& problem) {
  for (const Reason& reason : {refusal(problem), missing(level)})
    if (!reason.empty()) return {.usable = false, .reason = reason};
  if (!is_absorbed(problem.op) && !core::is_indexer(problem.op) && problem.op != Op::kPrefill)
    return {.usable = true, .reason = "row by row"};
  const bool pairs = numerics(level, problem).multiplied == Arithmetic::kBF16;
  if (const Reason slower = pairs ? slower_pairs(level, isa_levels()) : Reason(); !slower.empty())
    return {.usable = true, .reason = slower, .yields = true};
  if (!pairs) return {.usable = true, .reason = "converts to f32 and multiplies in f32"};
  return {
      .usable = true,
      .reason = Reason::format("multiplies bf16, sums in f32: {:.0f} GFLOP/s a thread", gflops(level, isa_levels()))};
}

template <class Args, auto kWorkspaceSize, auto kPlan, auto kRun>
std::span<const core::PlannedImplementation<Args>> planned_rows() {
  static const std::vector<core::PlannedImplementation<Args>> rows = [] {
    std::vector<core::PlannedImplementation<Args>> all;
    for (const Level& level : levels())
      all.push_back(
          {.name = level.row,
           .verdict = [&level](const Problem& problem) { return verdict(level, problem); },
           .numerics = [&level](const Problem& problem) { return numerics(level, problem); },
           .workspace_size =
               [&level](const Args& args, const Executor& executor) {
                 return kWorkspaceSize(level.kernels(), args, executor.pool.size());
               },
           .plan = [&level](const Args& args, const Executor& executor, std::span<std::byte> workspace,
                            core::PlanSummary& summary) -> Status {
             summary = kPlan(level.kernels(), args, executor.pool.size(), workspace);
             return {};
           },
           .run = [&level](const Args& args, const Executor& executor, std::span<std::byte> workspace) -> Status {
             kRun(level.kernels(), args, executor.pool, workspace);
             return {};
           }});
    return all;
  }();
  return rows;
}

template <class Args, auto kRun, bool kMultiplies = false>
std::span<const core::DirectImplementation<Args>> direct_rows() {
  static const std::vector<core::DirectImplementation<Args>> rows = [] {
    std::vector<core::DirectImplementation<Args>> all;
    for (const Level& level : levels())
      if (level.all_operations || kMultiplies)
        all.push_back({.name = level.row,
                       .verdict = [&level](const Problem& problem) { return verdict(level, problem); },
                       .numerics = [&level](const Problem& problem) { return numerics(level, problem); },
                       .run = [&level](const Args& args, const Executor& executor) -> Status {
                         kRun(level.kernels(), args, executor.pool);
                         return {};
                       }});
    return all;
  }();
  return rows;
}

}  // namespace

std::span<const core::PlannedImplementation<core::DecodeArgs>> decode_rows() {
  return planned_rows<core::DecodeArgs, decode_workspace_size, plan_decode, run_decode>();
}
std::span<const core::PlannedImplementation<core::PrefillArgs>> prefill_rows() {
  return planned_rows<core::PrefillArgs, prefill_workspace_size, plan_prefill, run_prefill>();
}
std::span<const core::DirectImplementation<core::MergeStatesArgs>> merge_states_rows() {
  return direct_rows<core::MergeStatesArgs, run_merge_states>();
}
std::span<const core::DirectImplementation<core::AppendArgs>> append_rows() {
  return direct_rows<core::AppendArgs, run_append>();
}
std::span<const core::DirectImplementation<core::GatherArgs>> gather_rows() {
  return direct_rows<core::GatherArgs, run_gather>();
}

std::span<const core::PlannedImplementation<core::DecodeSparseArgs>> decode_sparse_rows() {
  return planned_rows<core::DecodeSparseArgs, decode_sparse_workspace_size, plan_decode_sparse, run_decode_sparse>();
}
std::span<const core::DirectImplementation<core::AppendRopeArgs>> append_rope_rows() {
  return direct_rows<core::AppendRopeArgs, run_append_rope>();
}
std::span<const core::DirectImplementation<core::CopyPagesArgs>> copy_pages_rows() {
  return direct_rows<core::CopyPagesArgs, run_copy_pages>();
}
std::span<const core::DirectImplementation<core::BlockTableToCsrArgs>> block_table_to_csr_rows() {
  return direct_rows<core::BlockTableToCsrArgs, run_block_table_to_csr>();
}
std::span<const core::DirectImplementation<core::PhysicalSlotsArgs>> physical_slots_rows() {
  return direct_rows<core::PhysicalSlotsArgs, run_physical_slots>();
}
std::span<const core::DirectImplementation<core::AppendIndexerArgs>> append_indexer_rows() {
  return direct_rows<core::AppendIndexerArgs, run_append_indexer>();
}
std::span<const core::DirectImplementation<core::IndexerLogitsArgs>> indexer_logits_rows() {
  return direct_rows<core::IndexerLogitsArgs, run_indexer_logits, true>();
}
std::span<const core::DirectImplementation<core::TopKArgs>> top_k_rows() {
  return direct_rows<core::TopKArgs, run_top_k>();
}
std::span<const core::DirectImplementation<core::IndexerTopKArgs>> indexer_top_k_rows() {
  return direct_rows<core::IndexerTopKArgs, run_indexer_top_k, true>();
}
std::span<const core::DirectImplementation<core::CompressArgs>> compress_rows() {
  return direct_rows<core::CompressArgs, run_compress>();
}
std::span<const core::DirectImplementation<core::FinishOutputArgs>> finish_output_rows() {
  return direct_rows<core::FinishOutputArgs, run_finish_output>();
}

}  // namespace mla::cpu
