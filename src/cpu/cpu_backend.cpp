// SPDX-License-Identifier: Apache-2.0
#include "cpu/cpu_backend.h"

#include <algorithm>
#include <array>

#include "cpu/isa.h"
#include "cpu/operations.h"
#include "mla/backend.h"

namespace mla::cpu {
namespace {

using core::Executor;
using core::Reason;
using core::Verdict;

// Instruction sets, best first; the rows of every table stand in this order.
constexpr std::string_view kLevels[] = {"avx512_bf16", "avx512", "avx2", "portable"};
constexpr std::string_view kRowNames[] = {"cpu_avx512_bf16", "cpu_avx512", "cpu_avx2", "cpu_portable"};

constexpr int64_t kMaxHeadDim = 1024;

KernelSet floats_only(const TileKernels* tiles, const RowKernels* rows) { return {nullptr, tiles, rows, rows}; }

/// The kernels of a level. Only called where `built` says so and the machine has the level.
template <size_t kLevel>
const KernelSet& kernel_set() {
#if MLA_CPU_X86
  static const KernelSet set = [] {
    if constexpr (kLevel == 0)
      return KernelSet{tile_kernels_avx512_bf16_pairs(), tile_kernels_avx512(), row_kernels_avx512_bf16(),
                       row_kernels_avx512()};
    if constexpr (kLevel == 1) return floats_only(tile_kernels_avx512(), row_kernels_avx512());
    if constexpr (kLevel == 2) return floats_only(tile_kernels_avx2(), row_kernels_avx2());
    if constexpr (kLevel == 3) return floats_only(tile_kernels_portable(), row_kernels_portable());
  }();
#else
  static const KernelSet set = floats_only(tile_kernels_portable(), row_kernels_portable());
#endif
  return set;
}

/// What is missing for the level on this machine, or nothing.
Reason missing(size_t level) {
  if (!built(kLevels[level])) return Reason::format("this build has no {} code", kLevels[level]);
  const auto& isa = isa_levels();
  const auto it = std::find_if(isa.begin(), isa.end(), [&](const IsaLevel& i) { return i.name == kLevels[level]; });
  if (it == isa.end() || !it->cpu_has) return Reason::format("this processor has no {}", kLevels[level]);
  if (!it->os_allows) return Reason::format("the operating system does not enable {}", kLevels[level]);
  return {};
}

bool is_float(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32; }

/// Attention in the absorbed form, over a latent cache.
bool is_absorbed(Op op) { return op == Op::kDecode || op == Op::kDecodeSparse || op == Op::kPrefillSparse; }

/// What every level refuses alike; empty if nothing.
Reason refusal(const Problem& problem) {
  if (problem.device.type != DeviceType::kCpu)
    return Reason::format("tensors are on {}, not on the CPU", name(problem.device.type));
  const bool absorbed = is_absorbed(problem.op);
  const bool indexer = problem.op == Op::kIndexerLogits || problem.op == Op::kIndexerTopK;
  if (!is_float(problem.q_dtype) && !((absorbed || indexer) && problem.q_dtype == DType::kE4M3))
    return Reason::format("takes bf16, f16 and f32{}, not {}", absorbed || indexer ? " and e4m3" : "",
                          name(problem.q_dtype));
  if (const Reason reason = core::width_refusal(problem); !reason.empty()) return reason;
  if (problem.op == Op::kCopyPages && problem.d_qk > kMaxCopiedWidth)
    return Reason::format("takes rows of at most {} channels, not {}", kMaxCopiedWidth, problem.d_qk);
  if (problem.op == Op::kMergeStates && problem.d_v % kMaxLanes != 0)
    return Reason::format("d_v must be a multiple of {}, not {}", kMaxLanes, problem.d_v);
  if (!absorbed && problem.op != Op::kPrefill) return {};
  if (problem.d_v % kSlab != 0 || problem.d_v < kSlab || problem.d_v > kMaxHeadDim)
    return Reason::format("d_v must be a multiple of {} up to {}, not {}", kSlab, kMaxHeadDim, problem.d_v);
  const int64_t multiple = 2 * kStepChunk;
  if (problem.d_qk % multiple != 0 || problem.d_qk < multiple || problem.d_qk > kMaxHeadDim + kSlab)
    return Reason::format("d_qk must be a multiple of {} up to {}, not {}", multiple, kMaxHeadDim + kSlab,
                          problem.d_qk);
  if (absorbed && problem.d_qk < problem.d_v)
    return Reason::format("d_qk must be at least d_v, {}, not {}", problem.d_v, problem.d_qk);
  return {};
}

template <size_t kLevel>
Verdict verdict(const Problem& problem) {
  for (const Reason& reason : {refusal(problem), missing(kLevel)})
    if (!reason.empty()) return {.usable = false, .reason = reason};
  const bool absorbed = is_absorbed(problem.op);
  const bool indexer = problem.op == Op::kIndexerLogits || problem.op == Op::kIndexerTopK;
  if (!absorbed && !indexer && problem.op != Op::kPrefill) return {.usable = true, .reason = "row by row"};
  const bool bf16_keys =
      problem.op == Op::kPrefill || indexer || value_dtype(kv_layout(problem.cache).nope.element) == DType::kBF16;
  const bool bf16_queries = problem.q_dtype == DType::kBF16 || problem.q_dtype == DType::kE4M3;
  const bool pairs = kLevel == 0 && bf16_queries && bf16_keys;
  return {.usable = true,
          .reason = pairs ? "multiplies bf16 pairs, sums in f32" : "converts to f32 and multiplies in f32"};
}

template <class Args, auto kWorkspaceSize, auto kPlan, auto kRun>
struct PlannedRows {
  template <size_t kLevel>
  static constexpr core::PlannedImplementation<Args> row() {
    return {.name = kRowNames[kLevel],
            .verdict = verdict<kLevel>,
            .workspace_size =
                [](const Args& args, const Executor& executor) {
                  return kWorkspaceSize(kernel_set<kLevel>(), args, executor.pool.size());
                },
            .plan = [](const Args& args, const Executor& executor, std::span<std::byte> workspace,
                       core::PlanSummary& summary) -> Status {
              summary = kPlan(kernel_set<kLevel>(), args, executor.pool.size(), workspace);
              return {};
            },
            .run = [](const Args& args, const Executor& executor, std::span<std::byte> workspace) -> Status {
              kRun(kernel_set<kLevel>(), args, executor.pool, workspace);
              return {};
            }};
  }
  static constexpr std::array rows = {row<0>(), row<1>(), row<2>(), row<3>()};
};

template <class Args, auto kRun>
struct DirectRows {
  template <size_t kLevel>
  static constexpr core::DirectImplementation<Args> row() {
    return {.name = kRowNames[kLevel],
            .verdict = verdict<kLevel>,
            .run = [](const Args& args, const Executor& executor) -> Status {
              kRun(kernel_set<kLevel>(), args, executor.pool);
              return {};
            }};
  }
  static constexpr std::array rows = {row<0>(), row<1>(), row<2>(), row<3>()};
};

}  // namespace

bool built(std::string_view level) {
#if MLA_CPU_X86
  return std::find(std::begin(kLevels), std::end(kLevels), level) != std::end(kLevels);
#else
  return level == "portable";
#endif
}

std::span<const core::PlannedImplementation<core::DecodeArgs>> decode_rows() {
  return PlannedRows<core::DecodeArgs, decode_workspace_size, plan_decode, run_decode>::rows;
}
std::span<const core::PlannedImplementation<core::PrefillArgs>> prefill_rows() {
  return PlannedRows<core::PrefillArgs, prefill_workspace_size, plan_prefill, run_prefill>::rows;
}
std::span<const core::DirectImplementation<core::MergeStatesArgs>> merge_states_rows() {
  return DirectRows<core::MergeStatesArgs, run_merge_states>::rows;
}
std::span<const core::DirectImplementation<core::AppendArgs>> append_rows() {
  return DirectRows<core::AppendArgs, run_append>::rows;
}
std::span<const core::DirectImplementation<core::GatherArgs>> gather_rows() {
  return DirectRows<core::GatherArgs, run_gather>::rows;
}

std::span<const core::PlannedImplementation<core::DecodeSparseArgs>> decode_sparse_rows() {
  return PlannedRows<core::DecodeSparseArgs, decode_sparse_workspace_size, plan_decode_sparse, run_decode_sparse>::rows;
}
std::span<const core::DirectImplementation<core::AppendRopeArgs>> append_rope_rows() {
  return DirectRows<core::AppendRopeArgs, run_append_rope>::rows;
}
std::span<const core::DirectImplementation<core::CopyPagesArgs>> copy_pages_rows() {
  return DirectRows<core::CopyPagesArgs, run_copy_pages>::rows;
}
std::span<const core::DirectImplementation<core::BlockTableToCsrArgs>> block_table_to_csr_rows() {
  return DirectRows<core::BlockTableToCsrArgs, run_block_table_to_csr>::rows;
}
std::span<const core::DirectImplementation<core::PhysicalSlotsArgs>> physical_slots_rows() {
  return DirectRows<core::PhysicalSlotsArgs, run_physical_slots>::rows;
}
std::span<const core::DirectImplementation<core::AppendIndexerArgs>> append_indexer_rows() {
  return DirectRows<core::AppendIndexerArgs, run_append_indexer>::rows;
}
std::span<const core::DirectImplementation<core::IndexerLogitsArgs>> indexer_logits_rows() {
  return DirectRows<core::IndexerLogitsArgs, run_indexer_logits>::rows;
}
std::span<const core::DirectImplementation<core::TopKArgs>> top_k_rows() {
  return DirectRows<core::TopKArgs, run_top_k>::rows;
}
std::span<const core::DirectImplementation<core::IndexerTopKArgs>> indexer_top_k_rows() {
  return DirectRows<core::IndexerTopKArgs, run_indexer_top_k>::rows;
}

}  // namespace mla::cpu
