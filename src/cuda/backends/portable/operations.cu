// SPDX-License-Identifier: Apache-2.0
#include "cuda/backends/portable/operations.h"

#include "cuda/common/operations.h"
#include "cuda/common/top_k.h"

namespace mla::MLA_CUDA_NAMESPACE::portable {

const cuda::Operations& operations() {
  static const cuda::Operations all = {
      .decode = decode(),
      .decode_sparse = decode_sparse(),
      .prefill = prefill(),
      .indexer_logits = run_indexer_logits,
      .indexer_top_k = run_indexer_top_k,
      .merge_states = run_merge_states,
      .append = run_append,
      .append_rope = run_append_rope,
      .gather = run_gather,
      .copy_pages = run_copy_pages,
      .block_table_to_csr = run_block_table_to_csr,
      .physical_slots = run_physical_slots,
      .append_indexer = run_append_indexer,
      .top_k = run_top_k,
      .compress = run_compress,
      .finish_output = run_finish_output,
      .find_shared_prefixes = find_shared_prefixes,
  };
  return all;
}

}  // namespace mla::MLA_CUDA_NAMESPACE::portable
