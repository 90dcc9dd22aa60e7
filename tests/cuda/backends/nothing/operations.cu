// SPDX-License-Identifier: Apache-2.0
#include "cuda/border/operations.h"
#include "cuda/common/top_k.h"

namespace mla::MLA_CUDA_NAMESPACE::nothing {

const cuda::Operations& operations();

const cuda::Operations& operations() {
  static const cuda::Operations all = {.top_k = run_top_k};
  return all;
}

}  // namespace mla::MLA_CUDA_NAMESPACE::nothing
