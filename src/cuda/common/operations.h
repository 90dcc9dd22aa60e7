// SPDX-License-Identifier: Apache-2.0
// This is the host side of the operations whose kernels belong to no backend, but for top_k (top_k.h). A backend offers
// them by naming them in its table.
#pragma once

#include "cuda/border/operations.h"
#include "cuda/ptx/machine.h"

namespace mla::MLA_COMMON_NAMESPACE {

Status run_merge_states(const core::MergeStatesArgs& args, cuda::Queue& queue);
Status run_append(const core::AppendArgs& args, cuda::Queue& queue);
Status run_append_rope(const core::AppendRopeArgs& args, cuda::Queue& queue);
/// These are its two steps. The first enqueues the kernel of the queries, if that takes them; `rest` is what is left to
/// do then. The second does that, beside the kernel in front of it or behind.
Status run_rope_queries(const core::AppendRopeArgs& args, core::AppendRopeArgs& rest, cuda::Queue& queue);
Status run_rope_rest(const core::AppendRopeArgs& rest, bool overlaps_previous, cuda::Queue& queue);
Status run_gather(const core::GatherArgs& args, cuda::Queue& queue);
Status run_copy_pages(const core::CopyPagesArgs& args, cuda::Queue& queue);
Status run_block_table_to_csr(const core::BlockTableToCsrArgs& args, cuda::Queue& queue);
Status run_physical_slots(const core::PhysicalSlotsArgs& args, cuda::Queue& queue);
Status run_append_indexer(const core::AppendIndexerArgs& args, cuda::Queue& queue);
Status find_shared_prefixes(const core::SharedPrefixArgs& args, cuda::Queue& queue);
Status run_finish_output(const core::FinishOutputArgs& args, cuda::Queue& queue);
Status run_compress(const core::CompressArgs& args, cuda::Queue& queue);

}  // namespace mla::MLA_COMMON_NAMESPACE
