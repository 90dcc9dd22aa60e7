// SPDX-License-Identifier: Apache-2.0
// This file declares the operations of the cpu backend; each takes any set of kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/args.h"
#include "core/implementation.h"
#include "cpu/row_kernels.h"
#include "cpu/tile_kernels.h"

namespace mla::cpu {

/// Holds the kernels of one instruction set.
struct KernelSet {
  const TileKernels* pairs;  // multiply bf16 by bf16; null where the machine has no such instruction
  const TileKernels* floats;
  const RowKernels* rows;
  const RowKernels* float_rows;  // row kernels whose indexer multiplies f32

  const TileKernels& pick(DType a, DType b) const {
    return pairs != nullptr && a == DType::kBF16 && b == DType::kBF16 ? *pairs : *floats;
  }
};

size_t decode_workspace_size(const KernelSet& set, const core::DecodeArgs& args, int32_t num_threads);
core::PlanSummary plan_decode(const KernelSet& set, const core::DecodeArgs& args, int32_t num_threads,
                              std::span<std::byte> workspace);
void run_decode(const KernelSet& set, const core::DecodeArgs& args, core::ThreadPool& pool,
                std::span<std::byte> workspace);

size_t decode_sparse_workspace_size(const KernelSet& set, const core::DecodeSparseArgs& args, int32_t num_threads);
core::PlanSummary plan_decode_sparse(const KernelSet& set, const core::DecodeSparseArgs& args, int32_t num_threads,
                                     std::span<std::byte> workspace);
void run_decode_sparse(const KernelSet& set, const core::DecodeSparseArgs& args, core::ThreadPool& pool,
                       std::span<std::byte> workspace);

size_t prefill_workspace_size(const KernelSet& set, const core::PrefillArgs& args, int32_t num_threads);
core::PlanSummary plan_prefill(const KernelSet& set, const core::PrefillArgs& args, int32_t num_threads,
                               std::span<std::byte> workspace);
void run_prefill(const KernelSet& set, const core::PrefillArgs& args, core::ThreadPool& pool,
                 std::span<std::byte> workspace);

void run_merge_states(const KernelSet& set, const core::MergeStatesArgs& args, core::ThreadPool& pool);
void run_append(const KernelSet& set, const core::AppendArgs& args, core::ThreadPool& pool);
void run_gather(const KernelSet& set, const core::GatherArgs& args, core::ThreadPool& pool);
void run_append_rope(const KernelSet& set, const core::AppendRopeArgs& args, core::ThreadPool& pool);
inline constexpr int32_t kMaxCopiedWidth = 4096;  // largest d_ckv + d_kpe that copy_pages takes
void run_copy_pages(const KernelSet& set, const core::CopyPagesArgs& args, core::ThreadPool& pool);
void run_block_table_to_csr(const KernelSet& set, const core::BlockTableToCsrArgs& args, core::ThreadPool& pool);
void run_physical_slots(const KernelSet& set, const core::PhysicalSlotsArgs& args, core::ThreadPool& pool);
void run_append_indexer(const KernelSet& set, const core::AppendIndexerArgs& args, core::ThreadPool& pool);
void run_indexer_logits(const KernelSet& set, const core::IndexerLogitsArgs& args, core::ThreadPool& pool);
void run_compress(const KernelSet& set, const core::CompressArgs& args, core::ThreadPool& pool);
inline constexpr int32_t kMaxFinished = 4096;  // largest d_v that finish_output takes
void run_finish_output(const KernelSet& set, const core::FinishOutputArgs& args, core::ThreadPool& pool);
void run_top_k(const KernelSet& set, const core::TopKArgs& args, core::ThreadPool& pool);
void run_indexer_top_k(const KernelSet& set, const core::IndexerTopKArgs& args, core::ThreadPool& pool);

/// Selects the top k of logits [begin, end) of a row, as run_top_k does.
void select_top_k(const RowKernels& kernels, const core::TopKArgs& args, int64_t token, int64_t begin, int64_t end);

}  // namespace mla::cpu
