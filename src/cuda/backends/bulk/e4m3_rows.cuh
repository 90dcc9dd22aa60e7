// SPDX-License-Identifier: Apache-2.0
// This file has the layout of quantized rows in a stage. Nobody converts whole rows: an e4m3 element is exact in f16,
// so that score and value warps convert elements while they load operands, and multiply by the scales where there are
// fewer numbers.
#pragma once

#include "cuda/backends/bulk/block.cuh"

namespace mla::MLA_CUDA_NAMESPACE::bulk {

/// Tells where the channels and the scales of the rows of one pool lie in a stage, and of what types they are.
struct LandedRows {
  uint32_t rope_at;      // bytes from a row's begin to its rotary channels
  uint32_t scales_at;    // bytes from the stage's begin to the scales of its first key
  uint32_t scale_pitch;  // bytes from the scales of a key to those of the next
  int32_t scale_shift;   // channel / 8 >> scale_shift is the number of the channel's scale
  int32_t num_scales, d_ckv;
  bool ue8m0, quantized_rope;
  float rope_scale;  // scale of quantized rotary channels; else 1

  /// Returns the number of the channel's scale. The channels that share a scale are a group.
  MLA_DEVICE int group_of(int channel) const { return channel / kVector >> scale_shift; }
  /// Returns the bytes from a key's first scale to that of a group.
  MLA_DEVICE uint32_t scale_offset(int group) const {
    return static_cast<uint32_t>(group * size_of(ue8m0 ? ScaleType::kUE8M0 : ScaleType::kF32));
  }
  /// Loads the scale of a key and a group from the stage at `stage`.
  MLA_DEVICE float scale(ptx::SharedAddress stage, int key, int group) const {
    const ptx::SharedAddress at = stage + scales_at + static_cast<uint32_t>(key) * scale_pitch + scale_offset(group);
    return ue8m0 ? ue8m0_to_f32(ptx::load_shared<uint8_t>(at)) : ptx::load_shared<float>(at);
  }
};

template <class Config>
MLA_DEVICE LandedRows landed_rows(const cuda::KeyPool& pool) {
  LandedRows rows;
  rows.rope_at = static_cast<uint32_t>(pool.landed_rope_at);
  rows.scales_at = pool.scales_inside ? static_cast<uint32_t>(pool.cache.d_ckv) : Config::kKeys * Config::kKeyPitch;
  rows.scale_pitch = pool.scales_inside ? Config::kKeyPitch : Config::kKeyScaleBytes;
  rows.scale_shift = pool.scale_shift;
  rows.num_scales = pool.cache.num_scales;
  rows.d_ckv = pool.cache.d_ckv;
  rows.ue8m0 = pool.ue8m0;
  rows.quantized_rope = pool.quantized_kpe;
  rows.rope_scale = rows.quantized_rope ? *pool.cache.kpe_scale : 1.0F;
  return rows;
}

/// Does the same for pool 0 or 1. It names both pools, because one chosen by an index would be read by slow loads.
template <class Config>
MLA_DEVICE LandedRows landed_rows(const cuda::KeyPool (&pools)[2], int pool) {
  return pool == 0 ? landed_rows<Config>(pools[0]) : landed_rows<Config>(pools[1]);
}

/// The sign bit of a step's scale reference is a flag: it says that a scale of the step is too small for the reference
/// (ScaleRole).
inline constexpr uint32_t kSmallScales = 0x80000000U;

}  // namespace mla::MLA_CUDA_NAMESPACE::bulk
