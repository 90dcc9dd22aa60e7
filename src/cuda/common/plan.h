// SPDX-License-Identifier: Apache-2.0
// This is the host side of the plan of absorbed attention: it sizes and places the work list, and enqueues the kernel
// that fills the list from lengths in device memory.
#pragma once

#include <cstddef>

#include "core/args.h"
#include "cuda/border/queue.h"
#include "cuda/common/work_list.h"
#include "cuda/ptx/machine.h"

namespace mla::MLA_COMMON_NAMESPACE {

/// Returns the bytes of workspace that the work list and its partial states take, for any lengths that fit the shape.
size_t work_list_bytes(const cuda::WorkShape& shape);

/// Returns the work list in a workspace of work_list_bytes(); each array is aligned to 64 bytes if `base` is.
cuda::WorkList place_work_list(const cuda::WorkShape& shape, std::byte* base);

Status plan_work(const cuda::WorkShape& shape, const core::DecodeArgs& args, const cuda::WorkList& list,
                 cuda::Queue& queue);
Status plan_work(const cuda::WorkShape& shape, const core::DecodeSparseArgs& args, const cuda::WorkList& list,
                 cuda::Queue& queue);

}  // namespace mla::MLA_COMMON_NAMESPACE
