// SPDX-License-Identifier: Apache-2.0
// These functions store runs of neighbouring f32 values into an output of any float type, with as few stores as its
// alignment allows. They round once, to nearest even; e4m3 saturates.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "cuda/ptx/ptx.h"
#include "cuda/tile/scalar.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Stores sizeof(T) bytes if the address allows it, and returns whether it did.
template <class T>
MLA_DEVICE bool store_if_aligned(std::byte* to, T value) {
  if (reinterpret_cast<uintptr_t>(to) % sizeof(T) != 0) return false;
  *reinterpret_cast<T*>(to) = value;
  return true;
}

MLA_DEVICE uint32_t pack_e4m3x2(float low, float high) {
  return static_cast<uint32_t>(f32_to_e4m3(high)) << 8 | f32_to_e4m3(low);
}

/// Stores four elements from `index` on with one store, if the address allows it, and returns whether it did.
MLA_DEVICE bool store_four(void* base, DType dtype, int64_t index, const float (&v)[4]) {
  std::byte* to = static_cast<std::byte*>(base) + index * static_cast<int64_t>(size_of(dtype));
  switch (dtype) {
    case DType::kBF16:
      return store_if_aligned(to, uint64_t{ptx::pack_bf16x2(v[2], v[3])} << 32 | ptx::pack_bf16x2(v[0], v[1]));
    case DType::kF16:
      return store_if_aligned(to, uint64_t{ptx::pack_f16x2(v[2], v[3])} << 32 | ptx::pack_f16x2(v[0], v[1]));
    case DType::kE4M3: return store_if_aligned(to, pack_e4m3x2(v[2], v[3]) << 16 | pack_e4m3x2(v[0], v[1]));
    default: {
      ptx::Vec4 bits;
      for (int i = 0; i < 4; ++i) bits.x[i] = std::bit_cast<uint32_t>(v[i]);
      return store_if_aligned(to, bits);
    }
  }
}

/// Stores four elements from `index` on. The loop is short because it hardly ever runs.
MLA_DEVICE void store_columns(void* base, DType dtype, int64_t index, const float (&v)[4]) {
  if (store_four(base, dtype, index, v)) return;
  float rest[4] = {v[0], v[1], v[2], v[3]};
  MLA_NO_UNROLL
  for (int i = 0; i < 4; ++i) {
    store_element(base, dtype, index + i, rest[0]);
    for (int next = 1; next < 4; ++next) rest[next - 1] = rest[next];
  }
}

/// Stores two elements from `index` on: as many neighbours as an accumulator fragment holds.
MLA_DEVICE void store_two(void* base, DType dtype, int64_t index, float low, float high) {
  std::byte* to = static_cast<std::byte*>(base) + index * static_cast<int64_t>(size_of(dtype));
  bool stored = false;
  switch (dtype) {
    case DType::kBF16: stored = store_if_aligned(to, ptx::pack_bf16x2(low, high)); break;
    case DType::kF16: stored = store_if_aligned(to, ptx::pack_f16x2(low, high)); break;
    case DType::kE4M3: stored = store_if_aligned(to, static_cast<uint16_t>(pack_e4m3x2(low, high))); break;
    default:
      stored = store_if_aligned(to, uint64_t{std::bit_cast<uint32_t>(high)} << 32 | std::bit_cast<uint32_t>(low));
      break;
  }
  if (stored) return;
  store_element(base, dtype, index, low);
  store_element(base, dtype, index + 1, high);
}

}  // namespace mla::MLA_CUDA_NAMESPACE
