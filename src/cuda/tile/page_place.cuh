// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cuda/ptx/machine.h"
#include "cuda/tile/fast_divisor.h"

namespace mla::MLA_CUDA_NAMESPACE {

/// Holds the number of a token's page and the token's place in that page.
struct PagePlace {
  int32_t page, offset;
};
MLA_DEVICE PagePlace place_in_pages(int32_t token, const cuda::FastDivisor& page_size) {
  const int32_t page = page_size.divide(token);
  return {page, token - page * page_size.value};
}

}  // namespace mla::MLA_CUDA_NAMESPACE
