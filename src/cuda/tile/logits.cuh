// SPDX-License-Identifier: Apache-2.0
// The indexer's logits are f32, bf16 or f16. Which they are is asked where they are stored and loaded, so that no
// kernel is compiled for each type: all threads take the same branch.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "cuda/ptx/ptx.h"
#include "cuda/tile/scalar.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Stores logit `index`, rounded to nearest even. What is finite stays finite, by which it differs from store_element.
MLA_DEVICE void store_logit(void* base, DType dtype, int64_t index, float logit) {
  if (dtype == DType::kF32) {
    static_cast<float*>(base)[index] = logit;
    return;
  }
  const bool f16 = dtype == DType::kF16;
  uint32_t bits = f16 ? ptx::pack_f16x2(logit, 0.0F) : ptx::pack_bf16x2(logit, 0.0F);
  if ((bits & 0x7FFFU) == (f16 ? 0x7C00U : 0x7F80U) && is_finite(logit)) --bits;  // the largest finite number
  static_cast<uint16_t*>(base)[index] = static_cast<uint16_t>(bits);
}

/// Reads a row of logits.
class LogitReader {
 public:
  /// `dtype` is a parameter of the kernel, which takes no register.
  MLA_DEVICE LogitReader(const void* row, const DType& dtype)
      : row_(static_cast<const std::byte*>(row)), dtype_(dtype) {}

  /// Returns logit i.
  MLA_DEVICE float operator[](int64_t i) const {
    return load_element(row_, dtype_, i);
  }

  /// Loads logits i ... i + 3, which begin at a multiple of their bytes, as they lie: 16-bit ones in words 0 and 1.
  MLA_DEVICE ptx::Vec4 load_four(int64_t i) const {
    if (is_wide()) return ptx::load_global(reinterpret_cast<const ptx::Vec4*>(row_ + i * 4));
    const auto bits = ptx::load_global(reinterpret_cast<const uint64_t*>(row_ + i * 2));
    return {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32), 0, 0};
  }
  /// Loads those of logits i ... i + 3 that are among the row's `length`, in the same words; the others are 0.
  MLA_DEVICE ptx::Vec4 load_some(int32_t i, int32_t length) const {
    ptx::Vec4 four = {};
    MLA_UNROLL
    for (int j = 0; j < 4; ++j) {
      if (i + j < 0 || i + j >= length) continue;
      if (is_wide())
        four.x[j] = reinterpret_cast<const uint32_t*>(row_)[i + j];
      else
        four.x[j / 2] |= static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(row_)[i + j]) << (16 * (j % 2));
    }
    return four;
  }
  /// Returns the f32 bits of four loaded logits.
  MLA_DEVICE ptx::Vec4 to_f32(const ptx::Vec4& four) const {
    if (is_wide()) return four;
    float values[4];
    if (dtype_ == DType::kF16) {
      ptx::unpack_f16x2(four.x[0], values[0], values[1]);
      ptx::unpack_f16x2(four.x[1], values[2], values[3]);
    } else {
      ptx::unpack_bf16x2(four.x[0], values[0], values[1]);
      ptx::unpack_bf16x2(four.x[1], values[2], values[3]);
    }
    ptx::Vec4 bits;
    MLA_UNROLL
    for (int j = 0; j < 4; ++j) bits.x[j] = std::bit_cast<uint32_t>(values[j]);
    return bits;
  }

 private:
  MLA_DEVICE bool is_wide() const { return dtype_ == DType::kF32; }

  const std::byte* row_;
  const DType& dtype_;
};

}  // namespace mla::MLA_CUDA_NAMESPACE
