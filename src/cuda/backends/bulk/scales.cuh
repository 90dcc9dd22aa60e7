// SPDX-License-Identifier: Apache-2.0
// The scale warp prepares the scales by which value warps multiply P of quantized rows. Lane l has keys 2 l and 2 l + 1
// of a step.
#pragma once

#include "cuda/backends/bulk/e4m3_rows.cuh"

namespace mla::MLA_CUDA_NAMESPACE::bulk {

/// P is f16, and so are the scales that it is multiplied by. They are made to fit f16 by a reference: a power of two
/// that follows the unit's largest scale so far, by which all scales are divided. If a scale of a step is too small for
/// that (below 2^-10 of the reference), the sign bit of the step's reference is set (kSmallScales), and value warps
/// multiply P by the scales themselves, in f32, and add the step's values in bf16.
template <class Config>
class ScaleRole : AbsorbedBlock<Config> {
  using Block = AbsorbedBlock<Config>;
  using Block::args_;

 public:
  using Block::next_unit;

  MLA_DEVICE explicit ScaleRole(const cuda::AbsorbedArgs& args) : Block(args) {}

  MLA_DEVICE void compute() {
    reference_ = 0;
    MLA_NO_UNROLL
    for (int pool = 0; pool < 2; ++pool) {
      const uint32_t end = Block::end_of_pool(pool);
      const auto rows = landed_rows<Config>(args_.pools, pool);
      if (rows.ue8m0)
        steps<true>(end, rows);
      else
        steps<false>(end, rows);
    }
    Block::leave_unit();
  }

 private:
  static constexpr int kKeysPerLane = 2;
  static_assert(Config::kKeys == kKeysPerLane * kWarpSize);
  // Magnitudes of f32 are compared by their bits. Scales over the reference lie in [2^-10, 2^2); see kPShift.
  static constexpr uint32_t kExponentOne = 1U << 23;  // adds 1 to the exponent
  static constexpr uint32_t kSmallest = 10 * kExponentOne, kBehindLargest = 2 * kExponentOne;
  static constexpr uint32_t kMagnitude = 0x7FFFFFFFU, kInfinity = 0x7F800000U;

  template <bool kUe8m0>
  MLA_DEVICE void steps(uint32_t end, const LandedRows& rows) {
    const uint32_t place = rows.scales_at + static_cast<uint32_t>(ptx::lane() * kKeysPerLane) * rows.scale_pitch;
    MLA_NO_UNROLL
    for (; next_ < end; ++next_) step<kUe8m0>(next_, place, rows.scale_pitch, rows.num_scales);
  }

  template <bool kUe8m0>
  MLA_DEVICE void step(uint32_t n, uint32_t place, uint32_t pitch, int32_t num_scales) {
    constexpr int kGroups = kUe8m0 ? 8 : 4;
    static_assert(kGroups <= Config::kScaleGroups);
    ptx::mbarrier_wait(Block::kv_full(n), Block::kv_parity(n));
    const uint32_t valid = Block::valid_from(n, ptx::lane() * kKeysPerLane);
    float scales[kKeysPerLane][kGroups];
    bool fits = true;
    MLA_UNROLL
    for (int i = 0; i < kKeysPerLane; ++i) {
      load_scales(scales[i], Block::stage(n) + place + static_cast<uint32_t>(i) * pitch, num_scales);
      uint32_t largest = 0, smallest = ~0U;  // magnitudes
      MLA_UNROLL
      for (int group = 0; group < kGroups; ++group) {
        const uint32_t magnitude = std::bit_cast<uint32_t>(scales[i][group]) & kMagnitude;
        largest = std::max(largest, magnitude);
        smallest = std::min(smallest, magnitude);
      }
      fits &= !has(valid, i) || (largest < reference_ + kBehindLargest && smallest >= reference_ - kSmallest);
    }
    bool marked = false;
    if (ptx::any(!fits)) [[unlikely]]
      marked = raise_reference(scales, valid);
    const float inverse =
        reference_ == 0 ? 0.0F : std::bit_cast<float>(254U * kExponentOne - reference_);  // of a power of two
    if (n >= 2) ptx::mbarrier_wait(Block::kv_empty(n - 2), Block::kv_parity(n - 2));
    MLA_UNROLL
    for (int group = 0; group < kGroups; ++group)
      ptx::store_shared(Block::value_scales(n, group) + static_cast<uint32_t>(ptx::lane() * kKeysPerLane * 2),
                        ptx::pack_f16x2(has(valid, 0) ? scales[0][group] * inverse : 0.0F,
                                        has(valid, 1) ? scales[1][group] * inverse : 0.0F));
    if (ptx::lane() == 0) ptx::store_shared(Block::scale_reference(n), reference_ | (marked ? kSmallScales : 0U));
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::p_full(n));
  }

  /// Loads the scales of a key. Where the format has fewer of them, the first scale stands for those that are missing.
  MLA_DEVICE static void load_scales(float (&scales)[8], ptx::SharedAddress from, int32_t num_scales) {
    const uint64_t known = ~uint64_t{0} >> (64 - 8 * num_scales);
    auto bytes = ptx::load_shared<uint64_t>(from);
    const uint32_t first = ptx::permute_bytes(static_cast<uint32_t>(bytes), 0);
    bytes = (bytes & known) | ((uint64_t{first} << 32 | first) & ~known);
    MLA_UNROLL
    for (int group = 0; group < 8; ++group) scales[group] = ue8m0_to_f32(static_cast<uint8_t>(bytes >> (8 * group)));
  }
  MLA_DEVICE static void load_scales(float (&scales)[4], ptx::SharedAddress from, int32_t num_scales) {
    const auto four = ptx::load_shared<ptx::Vec4>(from);
    MLA_UNROLL
    for (int group = 0; group < 4; ++group)
      scales[group] = std::bit_cast<float>(group < num_scales ? four.x[group] : four.x[0]);
  }

  /// Raises the reference if a scale of the step is too large for it, or if there is no reference yet. Returns whether
  /// a scale is then too small for the reference, infinite or NaN.
  template <int kGroups>
  MLA_DEVICE bool raise_reference(const float (&scales)[kKeysPerLane][kGroups], uint32_t valid) {
    uint32_t largest = 0;
    MLA_UNROLL
    for (int i = 0; i < kKeysPerLane; ++i) MLA_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      const uint32_t magnitude = std::bit_cast<uint32_t>(scales[i][group]) & kMagnitude;
      if (has(valid, i) && magnitude < kInfinity) largest = std::max(largest, magnitude);
    }
    largest = ptx::max_of_warp(largest);
    if (largest != 0 && (reference_ == 0 || largest >= reference_ + kBehindLargest))
      reference_ =
          std::clamp(largest >> 23, 11U, 252U) * kExponentOne;  // bounds keep sums and differences from wrapping
    if (reference_ == 0) return false;
    bool odd = false;
    MLA_UNROLL
    for (int i = 0; i < kKeysPerLane; ++i) MLA_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      const uint32_t magnitude = std::bit_cast<uint32_t>(scales[i][group]) & kMagnitude;
      odd |= has(valid, i) && magnitude != 0 &&
             (magnitude < reference_ - kSmallest || magnitude >= reference_ + kBehindLargest);
    }
    return ptx::any(odd);
  }
  MLA_DEVICE static bool has(uint32_t valid, int i) { return (valid >> i & 1U) != 0; }

  uint32_t next_ = 0;       // number of the next step
  uint32_t reference_ = 0;  // bits of an f32; 0: the unit has no reference yet
};

}  // namespace mla::MLA_CUDA_NAMESPACE::bulk
