// SPDX-License-Identifier: Apache-2.0
// The table of one architecture's operations.
#include "cuda/backends/sm90/operations.h"
#include "cuda/border/portable_operations.h"

namespace mla::MLA_CUDA_NAMESPACE {

const cuda::Operations& operations();

const cuda::Operations& operations() {
#if MLA_CUDA_ARCH == 90
  static constexpr cuda::BackendOperations kSm90 = {
      .decode = {.workspace_size = sm90_decode_workspace_size, .plan = sm90_plan_decode, .run = sm90_run_decode},
      .decode_sparse = {.workspace_size = sm90_decode_sparse_workspace_size,
                        .plan = sm90_plan_decode_sparse,
                        .run = sm90_run_decode_sparse},
      .prefill = {.workspace_size = sm90_prefill_workspace_size, .plan = sm90_plan_prefill, .run = sm90_run_prefill},
      .indexer_logits = sm90_run_indexer_logits,
      .indexer_top_k = sm90_run_indexer_top_k,
  };
  static constexpr const cuda::BackendOperations* kSm90Operations = &kSm90;
#else
  static constexpr const cuda::BackendOperations* kSm90Operations = nullptr;
#endif
  static constexpr cuda::Operations kOperations = {
      .arch = kArch,
      .portable = {.decode = {.workspace_size = decode_workspace_size, .plan = plan_decode, .run = run_decode},
                   .decode_sparse = {.workspace_size = decode_sparse_workspace_size,
                                     .plan = plan_decode_sparse,
                                     .run = run_decode_sparse},
                   .prefill = {.workspace_size = prefill_workspace_size, .plan = plan_prefill, .run = run_prefill},
                   .indexer_logits = run_indexer_logits,
                   .indexer_top_k = run_indexer_top_k},
      .sm90 = kSm90Operations,
      .merge_states = run_merge_states,
      .append = run_append,
      .append_rope = run_append_rope,
      .gather = run_gather,
      .copy_pages = run_copy_pages,
      .block_table_to_csr = run_block_table_to_csr,
      .physical_slots = run_physical_slots,
      .append_indexer = run_append_indexer,
      .top_k = run_top_k,
  };
  return kOperations;
}

}  // namespace mla::MLA_CUDA_NAMESPACE
