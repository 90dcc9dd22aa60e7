// SPDX-License-Identifier: Apache-2.0
// The rows that the cpu backend puts into the tables, best instruction set first.
#pragma once

#include <span>

#include "dispatch/implementation.h"

namespace mla::cpu {

std::span<const dispatch::PlannedImplementation<core::DecodeArgs>> decode_rows();
std::span<const dispatch::PlannedImplementation<core::PrefillArgs>> prefill_rows();
std::span<const dispatch::DirectImplementation<core::MergeStatesArgs>> merge_states_rows();
std::span<const dispatch::DirectImplementation<core::AppendArgs>> append_rows();
std::span<const dispatch::DirectImplementation<core::GatherArgs>> gather_rows();
std::span<const dispatch::PlannedImplementation<core::DecodeSparseArgs>> decode_sparse_rows();
std::span<const dispatch::DirectImplementation<core::AppendRopeArgs>> append_rope_rows();
std::span<const dispatch::DirectImplementation<core::CopyPagesArgs>> copy_pages_rows();
std::span<const dispatch::DirectImplementation<core::BlockTableToCsrArgs>> block_table_to_csr_rows();
std::span<const dispatch::DirectImplementation<core::PhysicalSlotsArgs>> physical_slots_rows();
std::span<const dispatch::DirectImplementation<core::AppendIndexerArgs>> append_indexer_rows();
std::span<const dispatch::DirectImplementation<core::IndexerLogitsArgs>> indexer_logits_rows();
std::span<const dispatch::DirectImplementation<core::TopKArgs>> top_k_rows();
std::span<const dispatch::DirectImplementation<core::IndexerTopKArgs>> indexer_top_k_rows();

}  // namespace mla::cpu
