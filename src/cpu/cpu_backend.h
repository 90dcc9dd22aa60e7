// SPDX-License-Identifier: Apache-2.0
// These functions give the rows that the cpu backend puts into the tables, best instruction set first.
#pragma once

#include <span>

#include "core/implementation.h"

namespace mla::cpu {

std::span<const core::PlannedImplementation<core::DecodeArgs>> decode_rows();
std::span<const core::PlannedImplementation<core::PrefillArgs>> prefill_rows();
std::span<const core::DirectImplementation<core::MergeStatesArgs>> merge_states_rows();
std::span<const core::DirectImplementation<core::AppendArgs>> append_rows();
std::span<const core::DirectImplementation<core::GatherArgs>> gather_rows();
std::span<const core::PlannedImplementation<core::DecodeSparseArgs>> decode_sparse_rows();
std::span<const core::DirectImplementation<core::AppendRopeArgs>> append_rope_rows();
std::span<const core::DirectImplementation<core::CopyPagesArgs>> copy_pages_rows();
std::span<const core::DirectImplementation<core::BlockTableToCsrArgs>> block_table_to_csr_rows();
std::span<const core::DirectImplementation<core::PhysicalSlotsArgs>> physical_slots_rows();
std::span<const core::DirectImplementation<core::AppendIndexerArgs>> append_indexer_rows();
std::span<const core::DirectImplementation<core::IndexerLogitsArgs>> indexer_logits_rows();
std::span<const core::DirectImplementation<core::TopKArgs>> top_k_rows();
std::span<const core::DirectImplementation<core::IndexerTopKArgs>> indexer_top_k_rows();
std::span<const core::DirectImplementation<core::CompressArgs>> compress_rows();
std::span<const core::DirectImplementation<core::FinishOutputArgs>> finish_output_rows();

}  // namespace mla::cpu
