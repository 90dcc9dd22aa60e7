// SPDX-License-Identifier: Apache-2.0
// This file declares the float64 oracle of every operation and format. It is written to be read beside the formulas,
// not to be fast.
#pragma once

#include <cstddef>
#include <span>

#include "core/args.h"

namespace mla::reference {

/// These return the bytes of workspace that decode, prefill and decode_sparse need, for any lengths.
size_t workspace_size(const core::DecodeArgs& args);
size_t workspace_size(const core::PrefillArgs& args);
size_t workspace_size(const core::DecodeSparseArgs& args);

/// These run the operations. `workspace` must be aligned for doubles.
void decode(const core::DecodeArgs& args, std::span<std::byte> workspace);
void prefill(const core::PrefillArgs& args, std::span<std::byte> workspace);
void decode_sparse(const core::DecodeSparseArgs& args, std::span<std::byte> workspace);  // also prefill_sparse
void merge_states(const core::MergeStatesArgs& args);
void finish_output(const core::FinishOutputArgs& args);
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
void compress(const core::CompressArgs& args);

}  // namespace mla::reference
