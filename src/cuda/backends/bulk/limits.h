// SPDX-License-Identifier: Apache-2.0
// This file says which quantized rows cuda_bulk computes with. The backend's verdict and the kernel's shared memory
// depend on it.
#pragma once

#include "core/args.h"

namespace mla::cuda::bulk {

/// The kernel has room for so many scales of a row's latent channels.
inline constexpr int32_t kMostScales = 8;

/// Returns whether the kernel computes with rows of `channels` latent channels that are stored by this codec.
constexpr bool takes(const Codec& codec, int32_t channels) {
  if (!is_quantized(codec.element)) return true;
  return core::is_common_e4m3(codec.element, codec.scale_type, codec.outer_scale) &&
         (codec.channels_per_scale == 0 || channels <= kMostScales * codec.channels_per_scale);
}

}  // namespace mla::cuda::bulk
