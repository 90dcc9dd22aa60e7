// SPDX-License-Identifier: Apache-2.0
// The host side of the operations of cuda_sm90, in code of architecture 90 only.
#pragma once

#include <cstddef>
#include <span>

#include "cuda/border/operations.h"
#include "cuda/ptx/machine.h"

namespace mla::MLA_CUDA_NAMESPACE {

size_t sm90_decode_workspace_size(const core::DecodeArgs& args, const cuda::DeviceProperties& device);
Status sm90_plan_decode(const core::DecodeArgs& args, cuda::Queue& queue, std::span<std::byte> workspace);
Status sm90_run_decode(const core::DecodeArgs& args, cuda::Queue& queue, std::span<std::byte> workspace);

size_t sm90_decode_sparse_workspace_size(const core::DecodeSparseArgs& args, const cuda::DeviceProperties& device);
Status sm90_plan_decode_sparse(const core::DecodeSparseArgs& args, cuda::Queue& queue, std::span<std::byte> workspace);
Status sm90_run_decode_sparse(const core::DecodeSparseArgs& args, cuda::Queue& queue, std::span<std::byte> workspace);

size_t sm90_prefill_workspace_size(const core::PrefillArgs& args, const cuda::DeviceProperties& device);
Status sm90_plan_prefill(const core::PrefillArgs& args, cuda::Queue& queue, std::span<std::byte> workspace);
Status sm90_run_prefill(const core::PrefillArgs& args, cuda::Queue& queue, std::span<std::byte> workspace);

Status sm90_run_indexer_logits(const core::IndexerLogitsArgs& args, cuda::Queue& queue);
Status sm90_run_indexer_top_k(const core::IndexerTopKArgs& args, cuda::Queue& queue);

}  // namespace mla::MLA_CUDA_NAMESPACE
