// SPDX-License-Identifier: Apache-2.0
// The rows of the GPU backends, which stand first in every table.
#pragma once

#include "dispatch/tables.h"

namespace mla::dispatch {

DecodeRow cuda_decode_row();
PrefillRow cuda_prefill_row();
MergeStatesRow cuda_merge_states_row();
AppendRow cuda_append_row();
GatherRow cuda_gather_row();
DecodeSparseRow cuda_decode_sparse_row();
AppendRopeRow cuda_append_rope_row();
CopyPagesRow cuda_copy_pages_row();
BlockTableToCsrRow cuda_block_table_to_csr_row();
PhysicalSlotsRow cuda_physical_slots_row();
AppendIndexerRow cuda_append_indexer_row();
IndexerLogitsRow cuda_indexer_logits_row();
TopKRow cuda_top_k_row();
IndexerTopKRow cuda_indexer_top_k_row();

}  // namespace mla::dispatch
