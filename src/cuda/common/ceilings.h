// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/border/ceilings.h"
#include "cuda/ptx/machine.h"

namespace mla::MLA_CUDA_NAMESPACE {

/// Returns the ceiling kernels of this architecture.
const cuda::CeilingKernels& ceiling_kernels();

}  // namespace mla::MLA_CUDA_NAMESPACE
