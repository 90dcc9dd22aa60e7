// SPDX-License-Identifier: Apache-2.0
// This is the host side of the operations that cuda_sm90_fp8 has kernels for.
#pragma once

#include "cuda/border/operations.h"
#include "cuda/ptx/machine.h"

namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8 {

cuda::PlannedOperation<core::DecodeArgs> decode();
cuda::PlannedOperation<core::DecodeSparseArgs> decode_sparse();
cuda::PlannedOperation<core::PrefillArgs> prefill();

/// Returns all operations that the backend has kernels for.
const cuda::Operations& operations();

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8
