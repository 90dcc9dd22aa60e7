// SPDX-License-Identifier: Apache-2.0
// A pool of latent rows whose pages lie further apart than 32 bits count.
#pragma once

#include <cstdint>
#include <vector>

#include "fenced_memory.h"
#include "mla/types.h"

namespace mla {

/// A pool of more than 2^32 elements, of which only the pages in use take memory.
struct FarPool {
  static constexpr int64_t kPageElements = int64_t{64} * 576;
  static constexpr int64_t kNumPages = (int64_t{1} << 32) / kPageElements + 1000;
  FencedMemory memory{static_cast<size_t>(kNumPages * kPageElements) * 2};

  TensorView view() const { return contiguous(memory.data(), DType::kBF16, {kNumPages, 64, 576}); }
  uint16_t* page(int64_t number) const { return reinterpret_cast<uint16_t*>(memory.data()) + number * kPageElements; }
};

// Beyond 2^32 elements, just beyond 2^31 elements, just beyond 2^31 bytes, and the first.
inline const std::vector<int32_t> kFarPages = {
    static_cast<int32_t>(FarPool::kNumPages - 1), static_cast<int32_t>((int64_t{1} << 31) / FarPool::kPageElements + 1),
    static_cast<int32_t>((int64_t{1} << 30) / FarPool::kPageElements + 1), 0};

}  // namespace mla
