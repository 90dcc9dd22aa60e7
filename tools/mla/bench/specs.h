// SPDX-License-Identifier: Apache-2.0
// Turns a case into the kit's description of its problem: the same shapes, no poison, no invalid indices.
#pragma once

#include <cstdint>
#include <vector>

#include "kit/specs.h"
#include "mla/bench/cases.h"

namespace mla::bench {

/// Returns the kit's spec of a case. These functions throw UsageError where a case has no such problem, or where a size
/// does not fit.
kit::DecodeSpec decode_spec(const Case& one, uint64_t seed);
kit::DecodeSparseSpec decode_sparse_spec(const Case& one, uint64_t seed);
kit::PrefillSpec prefill_spec(const Case& one, uint64_t seed);
kit::PrefillSparseSpec prefill_sparse_spec(const Case& one, uint64_t seed);
kit::MergeSpec merge_spec(const Case& one, uint64_t seed);
kit::AppendSpec append_spec(const Case& one, uint64_t seed);
kit::AppendRopeSpec append_rope_spec(const Case& one, uint64_t seed);
kit::GatherSpec gather_spec(const Case& one, uint64_t seed);
kit::CopyPagesSpec copy_pages_spec(const Case& one, uint64_t seed);
kit::BlockTableToCsrSpec block_table_to_csr_spec(const Case& one, uint64_t seed);
kit::PhysicalSlotsSpec physical_slots_spec(const Case& one, uint64_t seed);
kit::AppendIndexerSpec append_indexer_spec(const Case& one, uint64_t seed);
kit::IndexerLogitsSpec indexer_logits_spec(const Case& one, uint64_t seed);
kit::TopKSpec top_k_spec(const Case& one, uint64_t seed);
kit::IndexerTopKSpec indexer_top_k_spec(const Case& one, uint64_t seed);
kit::CompressSpec compress_spec(const Case& one, uint64_t seed);
kit::FinishOutputSpec finish_output_spec(const Case& one, uint64_t seed);

/// Returns the number of pages of page_size tokens that the requests fill, at least one.
int64_t pages_needed(const Case& one);

}  // namespace mla::bench
