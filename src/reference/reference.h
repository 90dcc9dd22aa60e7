// SPDX-License-Identifier: Apache-2.0
// The float64 oracle: every operation and format, written to be read against spec formulas, never to be fast.
#pragma once

#include <cstddef>
#include <span>

#include "core/args.h"

namespace mla::reference {

/// Bytes that decode and prefill need, whatever the lengths.
size_t workspace_size(const core::DecodeArgs& args);
size_t workspace_size(const core::PrefillArgs& args);
size_t workspace_size(const core::DecodeSparseArgs& args);

/// `workspace` begins where a double may.
void decode(const core::DecodeArgs& args, std::span<std::byte> workspace);
void prefill(const core::PrefillArgs& args, std::span<std::byte> workspace);
void decode_sparse(const core::DecodeSparseArgs& args, std::span<std::byte> workspace);  // and prefill_sparse
void merge_states(const core::MergeStatesArgs& args);
void append(const core::AppendArgs& args);
void gather(const core::GatherArgs& args);
void append_rope(const core::AppendRopeArgs& args);
void copy_pages(const core::CopyPagesArgs& args);
void block_table_to_csr(const core::BlockTableToCsrArgs& args);
void physical_slots(const core::PhysicalSlotsArgs& args);
void append_indexer(const core::AppendIndexerArgs& args);
void indexer_logits(const core::IndexerLogitsArgs& args);
void top_k(const core::TopKArgs& args);
void indexer_top_k(const core::IndexerTopKArgs& args);

}  // namespace mla::reference
