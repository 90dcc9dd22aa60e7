// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstdint>

#include "cuda/ptx/machine.h"

namespace mla::MLA_CUDA_NAMESPACE {

/// A token's page and its place there. Sizes are mostly powers of two, and divisions dear. (nvcc 13.0 compiles
/// std::countr_zero to nothing; std::popcount works.)
struct PagePlace {
  int32_t page, offset;
};
MLA_DEVICE PagePlace place_in_pages(int32_t token, int32_t page_size) {
  if ((page_size & (page_size - 1)) == 0) [[likely]]
    return {token >> std::popcount(static_cast<uint32_t>(page_size - 1)), token & (page_size - 1)};
  const int32_t page = token / page_size;
  return {page, token - page * page_size};
}

}  // namespace mla::MLA_CUDA_NAMESPACE
