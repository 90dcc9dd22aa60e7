// SPDX-License-Identifier: Apache-2.0
#include "cuda/backends/sm90_fp8/operations.h"

namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8 {

const cuda::Operations& operations() {
  static const cuda::Operations all = {
      .decode = decode(), .decode_sparse = decode_sparse(), .prefill = prefill()};
  return all;
}

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8
