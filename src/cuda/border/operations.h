// SPDX-License-Identifier: Apache-2.0
// The host side of operations: what picks a kernel, sizes the launch and enqueues. All pointers in the arguments are
// the device's: shapes are read, never lengths.
#pragma once

#include <cstddef>
#include <span>

#include "core/args.h"
#include "cuda/border/queue.h"

namespace mla::cuda {

template <class Args>
struct PlannedOperation {
  /// For any lengths that fit the shapes.
  size_t (*workspace_size)(const Args& args, const DeviceProperties& device) = nullptr;
  /// Enqueues the kernel that writes the work list into the workspace.
  Status (*plan)(const Args& args, Queue& queue, std::span<std::byte> workspace) = nullptr;
  Status (*run)(const Args& args, Queue& queue, std::span<std::byte> workspace) = nullptr;

  explicit operator bool() const { return run != nullptr; }
};

template <class Args>
using DirectOperation = Status (*)(const Args& args, Queue& queue);

/// What a backend has in code for one architecture; null what it has not.
struct Operations {
  PlannedOperation<core::DecodeArgs> decode = {};
  PlannedOperation<core::DecodeSparseArgs> decode_sparse = {};  // and prefill_sparse
  PlannedOperation<core::PrefillArgs> prefill = {};
  DirectOperation<core::IndexerLogitsArgs> indexer_logits = nullptr;
  DirectOperation<core::IndexerTopKArgs> indexer_top_k = nullptr;
  DirectOperation<core::MergeStatesArgs> merge_states = nullptr;
  DirectOperation<core::AppendArgs> append = nullptr;
  DirectOperation<core::AppendRopeArgs> append_rope = nullptr;
  DirectOperation<core::GatherArgs> gather = nullptr;
  DirectOperation<core::CopyPagesArgs> copy_pages = nullptr;
  DirectOperation<core::BlockTableToCsrArgs> block_table_to_csr = nullptr;
  DirectOperation<core::PhysicalSlotsArgs> physical_slots = nullptr;
  DirectOperation<core::AppendIndexerArgs> append_indexer = nullptr;
  DirectOperation<core::TopKArgs> top_k = nullptr;
};

}  // namespace mla::cuda
