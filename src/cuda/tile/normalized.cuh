// SPDX-License-Identifier: Apache-2.0
// One warp divides a row by its root mean square. Squares are summed in the order of the CPU's row kernels and of the
// reference, so that all leave the same bits.
#pragma once

#include <bit>
#include <cmath>

#include "cuda/tile/cache_rows.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Says where floats lie. Channels know scales as well, and four of them would not fit the registers of a row.
struct Floats {
  const std::byte* data = nullptr;
  DType dtype = DType::kNone;

  MLA_DEVICE float operator()(int32_t c) const { return load_element(data, dtype, c); }
  MLA_DEVICE Bits8 fetch(int32_t c) const {
    const auto bytes = static_cast<int32_t>(size_of(dtype));
    return load_bits8(data + int64_t{c} * bytes, bytes);
  }
};

/// This is a source, in the sense of cache_rows.cuh, of channels times the factor and the weights of a norm, or as they
/// are where there is none.
struct Normalized {
  Floats x;
  bool normalizes = false;
  float factor = 1.0F;
  Floats weight = {};  // without data stands for 1

  static constexpr int kBatch = 1;
  struct Fetched {
    Bits8 x, weight;
  };

  /// All NaN become one, since those of products differ between machines.
  static MLA_DEVICE float settled(float value) { return value == value ? value : std::bit_cast<float>(0x7FC00000U); }

  MLA_DEVICE float operator()(int32_t c) const {
    const float value = x(c);
    if (!normalizes) return value;
    const float scaled = ptx::mul_rn(value, factor);
    return settled(weight.data != nullptr ? ptx::mul_rn(scaled, weight(c)) : scaled);
  }
  /// For SM100 and later nvcc 13.0 compiles eight at a time with spills (1,152 bytes), and one at a time without. The
  /// rows that engines have take kernels of their own.
  static MLA_DEVICE int32_t vector_channels(int32_t n) { return kArch >= 100 ? 0 : n / kVector * kVector; }
  MLA_DEVICE Fetched fetch(int32_t c) const {
    Fetched fetched;
    fetched.x = x.fetch(c);
    if (normalizes && weight.data != nullptr) fetched.weight = weight.fetch(c);
    return fetched;
  }
  MLA_DEVICE void decode(const Fetched& fetched, float (&values)[kVector]) const {
    decode8(fetched.x, x.dtype, values);
    if (!normalizes) return;
    float weights[kVector];
    if (weight.data != nullptr) decode8(fetched.weight, weight.dtype, weights);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      values[i] = ptx::mul_rn(values[i], factor);
      if (weight.data != nullptr) values[i] = ptx::mul_rn(values[i], weights[i]);
      values[i] = settled(values[i]);
    }
  }
};

/// Returns where channels lie that have the type `dtype` already; null for those that do not.
MLA_DEVICE const std::byte* as_stored(const Normalized& source, DType dtype) {
  return source.normalizes || source.x.dtype != dtype ? nullptr : source.x.data;
}

// The order of a norm's sums: squares of neighbours, neighbours of these sums, and so on.

/// Returns the sum of the squares of neighbouring channels; kCount is a power of two.
template <int kCount>
MLA_DEVICE float sum_of_squares(const float (&values)[kCount]) {
  float sums[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = ptx::mul_rn(values[i], values[i]);
#pragma unroll
  for (int apart = 1; apart < kCount; apart *= 2)
#pragma unroll
    for (int i = 0; i < kCount; i += 2 * apart) sums[i] = ptx::add_rn(sums[i], sums[i + apart]);
  return sums[0];
}

/// Returns the sum of neighbouring lanes.
MLA_DEVICE float sum_of_lanes(float sum, int32_t lanes) {
#pragma unroll
  for (int32_t mask = 1; mask < lanes; mask *= 2) sum = ptx::add_rn(sum, ptx::shuffle_xor(sum, mask));
  return sum;
}

MLA_DEVICE float factor_of(float squares, int32_t n, float epsilon) {
  return 1.0F / std::sqrt(squares / static_cast<float>(n) + epsilon);
}

/// Returns 1 / sqrt(mean of the squares + epsilon) of the first n channels of a row of two parts, num_plain channels of
/// `plain` and behind them those of `pe`.
MLA_DEVICE float norm_factor(const Floats& plain, int32_t num_plain, const Floats& pe, int32_t n, float epsilon) {
  const bool vectors = num_plain % kVector == 0 && n % kVector == 0;
  float own = 0;  // of each 256 channels one lane keeps the sum
  int32_t block = 0;
  for (int32_t base = 0; base < n; base += kWarpChannels, ++block) {
    const int32_t first = base + ptx::lane() * kVector;
    float values[kVector] = {};
    if (vectors && first < n) {
      const bool is_plain = first < num_plain;
      const DType dtype = is_plain ? plain.dtype : pe.dtype;
      const auto bytes = static_cast<int32_t>(size_of(dtype));
      const std::byte* const from = is_plain ? plain.data : pe.data;
      decode8(load_bits8(from + int64_t{is_plain ? first : first - num_plain} * bytes, bytes), dtype, values);
    } else if (!vectors) {
      for (int i = 0; i < kVector && first + i < n; ++i)
        values[i] = first + i < num_plain ? plain(first + i) : pe(first + i - num_plain);
    }
    const float sum = sum_of_lanes(sum_of_squares(values), kWarpSize);
    if (ptx::lane() == block) own = sum;
  }
  return factor_of(sum_of_lanes(own, kWarpSize), n, epsilon);
}

}  // namespace mla::MLA_CUDA_NAMESPACE
