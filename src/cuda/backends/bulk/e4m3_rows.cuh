// SPDX-License-Identifier: Apache-2.0
// Rows of quantized caches as they land, and what their codes become: e4m3 codes are exact in f16 and multiplied as
// they are; their scales come in where numbers are fewer.
#pragma once

#include "cuda/backends/bulk/block.cuh"

namespace mla::MLA_CUDA_NAMESPACE::bulk {

/// Where the parts of a landed row lie, and what they are.
struct LandedRows {
  uint32_t rope_at;                 // bytes from a row's begin
  uint32_t scales_at, scale_pitch;  // from the stage's begin to the first key's scales, from key to key
  int32_t scale_shift;              // channel / 8 >> scale_shift is the channel's scale
  int32_t num_scales, d_ckv;
  bool ue8m0, coded_rope;
  float rope_scale;  // of coded ones

  MLA_DEVICE int group_of(int channel) const { return channel / kVector >> scale_shift; }
  /// From a key's first scale to that of a group.
  MLA_DEVICE uint32_t scale_offset(int group) const {
    return static_cast<uint32_t>(group * size_of(ue8m0 ? ScaleType::kUE8M0 : ScaleType::kF32));
  }
  /// The scale of a key of the stage at `stage`.
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
  rows.coded_rope = pool.quantized_kpe;
  rows.rope_scale = rows.coded_rope ? *pool.cache.kpe_scale : 1.0F;
  return rows;
}

/// A pool chosen by an index would be read by slow loads.
template <class Config>
MLA_DEVICE LandedRows landed_rows(const cuda::KeyPool (&pools)[2], int pool) {
  return pool == 0 ? landed_rows<Config>(pools[0]) : landed_rows<Config>(pools[1]);
}

}  // namespace mla::MLA_CUDA_NAMESPACE::bulk
