// SPDX-License-Identifier: Apache-2.0
// The host side of every operation of cuda_portable: picks a kernel by shape, sizes the launch, enqueues.
#pragma once

#include <cstddef>
#include <span>

#include "cuda/border/operations.h"
#include "cuda/ptx/machine.h"

namespace mla::MLA_CUDA_NAMESPACE {

size_t decode_workspace_size(const core::DecodeArgs& args, const cuda::DeviceProperties& device);
Status plan_decode(const core::DecodeArgs& args, cuda::Queue& queue, std::span<std::byte> workspace);
Status run_decode(const core::DecodeArgs& args, cuda::Queue& queue, std::span<std::byte> workspace);

size_t decode_sparse_workspace_size(const core::DecodeSparseArgs& args, const cuda::DeviceProperties& device);
Status plan_decode_sparse(const core::DecodeSparseArgs& args, cuda::Queue& queue, std::span<std::byte> workspace);
Status run_decode_sparse(const core::DecodeSparseArgs& args, cuda::Queue& queue, std::span<std::byte> workspace);

size_t prefill_workspace_size(const core::PrefillArgs& args, const cuda::DeviceProperties& device);
Status plan_prefill(const core::PrefillArgs& args, cuda::Queue& queue, std::span<std::byte> workspace);
Status run_prefill(const core::PrefillArgs& args, cuda::Queue& queue, std::span<std::byte> workspace);

Status run_merge_states(const core::MergeStatesArgs& args, cuda::Queue& queue);
Status run_append(const core::AppendArgs& args, cuda::Queue& queue);
Status run_append_rope(const core::AppendRopeArgs& args, cuda::Queue& queue);
Status run_gather(const core::GatherArgs& args, cuda::Queue& queue);
Status run_copy_pages(const core::CopyPagesArgs& args, cuda::Queue& queue);
Status run_block_table_to_csr(const core::BlockTableToCsrArgs& args, cuda::Queue& queue);
Status run_physical_slots(const core::PhysicalSlotsArgs& args, cuda::Queue& queue);
Status run_append_indexer(const core::AppendIndexerArgs& args, cuda::Queue& queue);
Status run_indexer_logits(const core::IndexerLogitsArgs& args, cuda::Queue& queue);
Status run_top_k(const core::TopKArgs& args, cuda::Queue& queue);
Status run_indexer_top_k(const core::IndexerTopKArgs& args, cuda::Queue& queue);

}  // namespace mla::MLA_CUDA_NAMESPACE
