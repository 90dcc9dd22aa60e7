// SPDX-License-Identifier: Apache-2.0
// This file says which quantized rows cuda_bulk computes with. The backend's verdict and the kernel's shared memory
// depend on it.
#pragma once

#include "core/args.h"

namespace mla::cuda::bulk {

/// The kernel has room for so many scales of a row's latent channels, if they are e4m3.
inline constexpr int32_t kMostScales = 8;

/// Returns whether the kernel computes with rows of this layout.
constexpr bool takes(const KvLayout& layout) {
  const Codec& latents = layout.nope;
  if (!is_quantized(latents.element)) return true;
  if (latents.element == DType::kE2M1)
    return latents.scale_type == ScaleType::kE4M3 && latents.scale_place == ScalePlace::kRow &&
           latents.channels_per_scale == 16 && layout.nope_dim == 512;
  return core::is_common_e4m3(latents.element, latents.scale_type, latents.outer_scale) &&
         (latents.channels_per_scale == 0 || layout.nope_dim <= kMostScales * latents.channels_per_scale);
}

}  // namespace mla::cuda::bulk
