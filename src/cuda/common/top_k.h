// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/args.h"
#include "cuda/border/queue.h"
#include "cuda/ptx/machine.h"

namespace mla::MLA_CUDA_NAMESPACE {

/// Enqueues top_k over logits that indexer_logits has just written. It selects among the keys that each token sees, and
/// never selects another, whatever the logits are.
Status run_visible_top_k(const core::TopKArgs& args, const core::IndexerLogitsArgs& indexer, cuda::Queue& queue);

}  // namespace mla::MLA_CUDA_NAMESPACE
