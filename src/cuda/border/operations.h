// SPDX-License-Identifier: Apache-2.0
// The operations of one architecture on one machine, as the tables see them. All pointers in the arguments are the
// device's: the host side reads shapes only, never lengths.
#pragma once

#include <cstddef>
#include <span>

#include "core/args.h"
#include "cuda/border/queue.h"

namespace mla::cuda {

template <class Args>
struct PlannedOperation {
  /// For any lengths that fit the shapes.
  size_t (*workspace_size)(const Args& args, const DeviceProperties& device);
  /// Enqueues the kernel that writes the work list into the workspace.
  Status (*plan)(const Args& args, Queue& queue, std::span<std::byte> workspace);
  Status (*run)(const Args& args, Queue& queue, std::span<std::byte> workspace);
};

template <class Args>
using DirectOperation = Status (*)(const Args& args, Queue& queue);

/// What backends compute in different ways.
struct BackendOperations {
  PlannedOperation<core::DecodeArgs> decode;
  PlannedOperation<core::DecodeSparseArgs> decode_sparse;  // and prefill_sparse
  PlannedOperation<core::PrefillArgs> prefill;
  DirectOperation<core::IndexerLogitsArgs> indexer_logits;
  DirectOperation<core::IndexerTopKArgs> indexer_top_k;
};

struct Operations {
  int32_t arch;
  BackendOperations portable;     // cuda_portable
  const BackendOperations* sm90;  // cuda_sm90; null in code of other architectures
  DirectOperation<core::MergeStatesArgs> merge_states;
  DirectOperation<core::AppendArgs> append;
  DirectOperation<core::AppendRopeArgs> append_rope;
  DirectOperation<core::GatherArgs> gather;
  DirectOperation<core::CopyPagesArgs> copy_pages;
  DirectOperation<core::BlockTableToCsrArgs> block_table_to_csr;
  DirectOperation<core::PhysicalSlotsArgs> physical_slots;
  DirectOperation<core::AppendIndexerArgs> append_indexer;
  DirectOperation<core::TopKArgs> top_k;
};

}  // namespace mla::cuda
