// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/args.h"
#include "cuda/border/queue.h"
#include "cuda/ptx/machine.h"

namespace mla::MLA_CUDA_NAMESPACE {

/// Enqueues what follows indexer_logits in indexer_top_k. It selects among the keys that each token sees, and never
/// selects another, whatever the logits are, and writes their slots.
Status run_visible_top_k(const core::IndexerTopKArgs& args, cuda::Queue& queue);

}  // namespace mla::MLA_CUDA_NAMESPACE
