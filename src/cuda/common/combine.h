// SPDX-License-Identifier: Apache-2.0
// This is the host side of combine, which merges the partial states of units that several workers computed into the
// outputs.
#pragma once

#include "core/args.h"
#include "cuda/border/queue.h"
#include "cuda/common/work_list.h"
#include "cuda/ptx/machine.h"

namespace mla::MLA_COMMON_NAMESPACE {

/// Enqueues combine, which must come right behind the attention kernel and may overlap it. It writes only the rows of
/// units that were split. `next_starts_early` allows the kernel behind combine to start while combine still runs.
Status combine_work(const cuda::WorkShape& shape, const core::DecodeArgs& args, const cuda::WorkList& list,
                    bool next_starts_early, cuda::Queue& queue);
Status combine_work(const cuda::WorkShape& shape, const core::DecodeSparseArgs& args, const cuda::WorkList& list,
                    bool next_starts_early, cuda::Queue& queue);

}  // namespace mla::MLA_COMMON_NAMESPACE
