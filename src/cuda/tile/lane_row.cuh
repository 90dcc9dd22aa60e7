// SPDX-License-Identifier: Apache-2.0
// A lane has 16 neighbouring channels of a bf16 row of at most 512, in registers.
#pragma once

#include "cuda/tile/normalized.cuh"
#include "cuda/tile/rotated_rows.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

inline constexpr int kLaneChannels = 16;
inline constexpr int32_t kMostLaneChannels = kWarpSize * kLaneChannels;

/// Returns the first channel of the lane.
MLA_DEVICE int32_t lane_channel() { return ptx::lane() * kLaneChannels; }

struct LaneRow {
  ptx::Vec4 bits[2];

  /// Loads the lane's channels of a row that begins at `from`, at a multiple of 16 bytes.
  static MLA_DEVICE LaneRow load(const std::byte* from) {
    const auto* const own = as<ptx::Vec4>(from + lane_channel() * 2);
    // The sectors of the first load hold half of the second one, which finds them in L1.
    return {ptx::load_global(own), ptx::load_global(own + 1)};
  }
  MLA_DEVICE void store(std::byte* to) const {
    auto* const own = as<ptx::Vec4>(to + lane_channel() * 2);
    own[0] = bits[0];
    own[1] = bits[1];
  }
  MLA_DEVICE void unpack(float (&values)[kLaneChannels]) const {
#pragma unroll
    for (int i = 0; i < kLaneChannels / 2; ++i)
      ptx::unpack_bf16x2(bits[i / 4].x[i % 4], values[2 * i], values[2 * i + 1]);
  }
  /// Rounds finite values.
  static MLA_DEVICE LaneRow pack(const float (&values)[kLaneChannels]) {
    LaneRow row;
#pragma unroll
    for (int i = 0; i < kLaneChannels / 2; ++i)
      row.bits[i / 4].x[i % 4] = ptx::pack_bf16x2(values[2 * i], values[2 * i + 1]);
    return row;
  }
};

/// Returns half of a lane's values, as the functions of channels.cuh take them.
MLA_DEVICE void half_of_lane(const float (&values)[kLaneChannels], int half, float (&eight)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) eight[i] = values[half * kVector + i];
}

/// Does what encode8 and store_bits8 do with the lane's channels of a row of bf16, NaN included.
MLA_DEVICE void store_rounded(const float (&values)[kLaneChannels], std::byte* to) {
  bool nan = false;
#pragma unroll
  for (float value : values) nan = nan || value != value;
  if (!nan) [[likely]]
    return LaneRow::pack(values).store(to);
  for (int half = 0; half < 2; ++half) {
    float eight[kVector];
    half_of_lane(values, half, eight);
    store_bits8(to + (lane_channel() + half * kVector) * 2, 2, encode8(eight, DType::kBF16));
  }
}

/// Stores the lane's channels as e4m3. quantize(eight) returns the elements of eight channels.
template <class Quantize>
MLA_DEVICE void store_elements(const float (&values)[kLaneChannels], std::byte* to, const Quantize& quantize) {
  ptx::Vec4 elements;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float eight[kVector];
    half_of_lane(values, half, eight);
    const Bits8 bits = quantize(eight);
    elements.x[2 * half] = bits.w[0];
    elements.x[2 * half + 1] = bits.w[1];
  }
  *as<ptx::Vec4>(to + lane_channel()) = elements;
}

/// Quantizes the lane's channels to e4m3, by one scale.
MLA_DEVICE void store_quantized(const float (&values)[kLaneChannels], const ScaleDivisor& divide, std::byte* to) {
  store_elements(values, to, [&](const float(&eight)[kVector]) { return quantize8(eight, divide); });
}

/// Does the same to finite values, by a scale that is a power of two.
MLA_DEVICE void store_quantized_by_power_of_two(const float (&values)[kLaneChannels], float scale, std::byte* to) {
  store_elements(values, to, [&](const float(&eight)[kVector]) { return quantize8_by_power_of_two(eight, scale); });
}

/// Holds the weights of a norm for the lane's channels, and for a pair of the row's other part. Without weights they
/// are 1, which changes nothing.
struct LaneWeights {
  float channels[kLaneChannels], pair[2];

  /// `pair_channel` is the pair's first channel in a row of n channels.
  static MLA_DEVICE LaneWeights load(const void* weights, DType dtype, int32_t pair_channel, int32_t n) {
    LaneWeights own;
#pragma unroll
    for (float& weight : own.channels) weight = 1;
    own.pair[0] = own.pair[1] = 1;
    if (weights == nullptr) return own;
    if (lane_channel() < n) {
      const auto bytes = static_cast<int32_t>(size_of(dtype));
      const std::byte* const from = static_cast<const std::byte*>(weights) + int64_t{lane_channel()} * bytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float eight[kVector];
        decode8(load_bits8(from + half * kVector * bytes, bytes), dtype, eight);
#pragma unroll
        for (int i = 0; i < kVector; ++i) own.channels[half * kVector + i] = eight[i];
      }
    }
    for (int i = 0; i < 2; ++i)
      if (pair_channel + i < n) own.pair[i] = load_element(weights, dtype, pair_channel + i);
    return own;
  }
};

/// Multiplies values by the factor and the weights of a norm.
template <int kCount>
MLA_DEVICE void scale_by(float factor, const float (&weights)[kCount], float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    values[i] = Normalized::settled(ptx::mul_rn(ptx::mul_rn(values[i], factor), weights[i]));
}

/// Rotates pairs of neighbours by their angles. NaN become what x86 leaves of them.
template <int kCount>
MLA_DEVICE void turn_pairs(float (&values)[kCount], const float (&cos)[kCount / 2], const float (&sin)[kCount / 2]) {
  float turned[kCount];
  bool nan = false;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    turned[i] = ptx::add_rn(ptx::mul_rn(values[i], cos[i / 2]), -ptx::mul_rn(values[i + 1], sin[i / 2]));
    turned[i + 1] = ptx::add_rn(ptx::mul_rn(values[i], sin[i / 2]), ptx::mul_rn(values[i + 1], cos[i / 2]));
    nan = nan || turned[i] != turned[i] || turned[i + 1] != turned[i + 1];
  }
  if (nan) [[unlikely]] {
    const Rotated<Channels> rotated = {};
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      turned[i] = rotated.turned(values[i], values[i + 1], cos[i / 2], sin[i / 2], true);
      turned[i + 1] = rotated.turned(values[i + 1], values[i], cos[i / 2], sin[i / 2], false);
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = turned[i];
}

/// Rotates pairs of neighbours by their negative angles. The sign of a NaN is not defined.
template <int kCount>
MLA_DEVICE void turn_pairs_back(float (&values)[kCount], const float (&cos)[kCount / 2],
                                const float (&sin)[kCount / 2]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const float x = values[i], y = values[i + 1];
    values[i] = ptx::add_rn(ptx::mul_rn(x, cos[i / 2]), ptx::mul_rn(y, sin[i / 2]));
    values[i + 1] = ptx::add_rn(ptx::mul_rn(y, cos[i / 2]), -ptx::mul_rn(x, sin[i / 2]));
  }
}

/// Holds the angles of the lane's eight pairs, which lie at multiples of 16 bytes.
struct LaneAngles {
  float cos[kLaneChannels / 2], sin[kLaneChannels / 2];

  static MLA_DEVICE LaneAngles load(const float* cos, const float* sin) {
    LaneAngles own;
#pragma unroll
    for (int i = 0; i < kLaneChannels / 2; i += 4) {
      const ptx::Vec4 cosines = ptx::load_global(reinterpret_cast<const ptx::Vec4*>(cos + i));
      const ptx::Vec4 sines = ptx::load_global(reinterpret_cast<const ptx::Vec4*>(sin + i));
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        own.cos[i + k] = std::bit_cast<float>(cosines.x[k]);
        own.sin[i + k] = std::bit_cast<float>(sines.x[k]);
      }
    }
    return own;
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE
