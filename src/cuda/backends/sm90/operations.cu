// SPDX-License-Identifier: Apache-2.0
#include "cuda/backends/sm90/operations.h"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

const cuda::Operations& operations() {
  static const cuda::Operations all = {
      .decode = decode(),
      .decode_sparse = decode_sparse(),
      .prefill = prefill(),
      .indexer_logits = run_indexer_logits,
      .indexer_top_k = run_indexer_top_k,
  };
  return all;
}

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90
