// SPDX-License-Identifier: Apache-2.0
// This is the host side of top_k, whose kernel belongs to no backend. Each architecture has its own, since a block
// takes as much shared memory as there is.
#pragma once

#include "core/args.h"
#include "cuda/border/queue.h"
#include "cuda/ptx/machine.h"

namespace mla::MLA_CUDA_NAMESPACE {

Status run_top_k(const core::TopKArgs& args, cuda::Queue& queue);

/// Enqueues what follows indexer_logits in indexer_top_k. It selects among the keys that each token sees, and never
/// selects another, whatever the logits are, and writes their slots.
Status run_visible_top_k(const core::IndexerTopKArgs& args, cuda::Queue& queue);

}  // namespace mla::MLA_CUDA_NAMESPACE
