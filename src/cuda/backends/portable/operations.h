// SPDX-License-Identifier: Apache-2.0
// cuda_portable has kernels of its own for these operations.
#pragma once

#include "cuda/border/operations.h"
#include "cuda/ptx/machine.h"

namespace mla::MLA_CUDA_NAMESPACE::portable {

cuda::PlannedOperation<core::DecodeArgs> decode();
cuda::PlannedOperation<core::DecodeSparseArgs> decode_sparse();
cuda::PlannedOperation<core::PrefillArgs> prefill();
Status run_indexer_logits(const core::IndexerLogitsArgs& args, cuda::Queue& queue);
Status run_indexer_top_k(const core::IndexerTopKArgs& args, cuda::Queue& queue);

/// Returns all operations that the backend offers.
const cuda::Operations& operations();

}  // namespace mla::MLA_CUDA_NAMESPACE::portable
