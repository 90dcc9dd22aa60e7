// SPDX-License-Identifier: Apache-2.0
// The rows of the GPU backends, which stand first in every table: cuda_sm90 where there is one, then cuda_portable.
#pragma once

#include <vector>

#include "dispatch/tables.h"

namespace mla::dispatch {

std::vector<DecodeRow> cuda_decode_rows();
std::vector<DecodeSparseRow> cuda_decode_sparse_rows();
std::vector<PrefillRow> cuda_prefill_rows();
MergeStatesRow cuda_merge_states_row();
AppendRow cuda_append_row();
GatherRow cuda_gather_row();
AppendRopeRow cuda_append_rope_row();
CopyPagesRow cuda_copy_pages_row();
BlockTableToCsrRow cuda_block_table_to_csr_row();
PhysicalSlotsRow cuda_physical_slots_row();
AppendIndexerRow cuda_append_indexer_row();
std::vector<IndexerLogitsRow> cuda_indexer_logits_rows();
TopKRow cuda_top_k_row();
std::vector<IndexerTopKRow> cuda_indexer_top_k_rows();

}  // namespace mla::dispatch
