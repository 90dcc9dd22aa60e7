// SPDX-License-Identifier: Apache-2.0
// This is the host side of operations: functions that choose a kernel, size the launch and enqueue it. All pointers in
// the arguments are the device's, so these functions look at shapes and never at lengths.
#pragma once

#include <cstddef>
#include <span>

#include "core/args.h"
#include "cuda/border/queue.h"

namespace mla::cuda {

template <class Args>
struct PlannedOperation {
  /// Returns the bytes of workspace that suffice for any lengths that fit the shapes.
  size_t (*workspace_size)(const Args& args, const DeviceProperties& device) = nullptr;
  /// Enqueues the kernel that writes the work list into the workspace.
  Status (*plan)(const Args& args, Queue& queue, std::span<std::byte> workspace) = nullptr;
  Status (*run)(const Args& args, Queue& queue, std::span<std::byte> workspace) = nullptr;

  explicit operator bool() const { return run != nullptr; }
};

template <class Args>
using DirectOperation = Status (*)(const Args& args, Queue& queue);

/// Limits the channels of a latent that compress makes.
inline constexpr int32_t kMostPooledChannels = 640;

/// Holds the operations of a backend in code for one architecture. An operation is null where the backend has none.
struct Operations {
  PlannedOperation<core::DecodeArgs> decode = {};
  PlannedOperation<core::DecodeSparseArgs> decode_sparse = {};  // also runs prefill_sparse
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
  DirectOperation<core::CompressArgs> compress = nullptr;
  DirectOperation<core::FinishOutputArgs> finish_output = nullptr;
  DirectOperation<core::SharedPrefixArgs> find_shared_prefixes = nullptr;  // a step of a decode's plan
};

}  // namespace mla::cuda
