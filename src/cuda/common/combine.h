// SPDX-License-Identifier: Apache-2.0
// Merges the partial states of units that several workers computed, into the outputs of the operation.
#pragma once

#include "core/args.h"
#include "cuda/border/queue.h"
#include "cuda/common/work_list.h"
#include "cuda/ptx/machine.h"

namespace mla::MLA_CUDA_NAMESPACE {

/// Enqueue behind the attention kernel, which it may overlap. Writes only rows of units that were split.
/// `next_starts_early`: the kernel behind this one may begin while it still runs.
Status combine_work(const cuda::WorkShape& shape, const core::DecodeArgs& args, const cuda::WorkList& list,
                    bool next_starts_early, cuda::Queue& queue);
Status combine_work(const cuda::WorkShape& shape, const core::DecodeSparseArgs& args, const cuda::WorkList& list,
                    bool next_starts_early, cuda::Queue& queue);

}  // namespace mla::MLA_CUDA_NAMESPACE
