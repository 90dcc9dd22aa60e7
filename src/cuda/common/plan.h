// SPDX-License-Identifier: Apache-2.0
// The plan of absorbed attention: sizes and places the work list, and enqueues the kernel that fills it from the
// lengths in device memory.
#pragma once

#include <cstddef>

#include "core/args.h"
#include "cuda/border/queue.h"
#include "cuda/common/work_list.h"
#include "cuda/ptx/machine.h"

namespace mla::MLA_CUDA_NAMESPACE {

/// Bytes of workspace of the work list and its partial states, for any lengths that fit the shape.
size_t work_list_bytes(const cuda::WorkShape& shape);

/// The work list in a workspace of work_list_bytes; each part is aligned to 64 bytes if `base` is.
cuda::WorkList place_work_list(const cuda::WorkShape& shape, std::byte* base);

Status plan_work(const cuda::WorkShape& shape, const core::DecodeArgs& args, const cuda::WorkList& list,
                 cuda::Queue& queue);
Status plan_work(const cuda::WorkShape& shape, const core::DecodeSparseArgs& args, const cuda::WorkList& list,
                 cuda::Queue& queue);

}  // namespace mla::MLA_CUDA_NAMESPACE
