// SPDX-License-Identifier: Apache-2.0
// Which quantized rows cuda_bulk computes with, for its verdict and for its kernel's shared memory.
#pragma once

#include "core/args.h"

namespace mla::cuda::bulk {

/// The most scales of a row's latent channels that the kernel has room for.
inline constexpr int32_t kMostScales = 8;

/// Whether the kernel computes with rows of such latent channels, `channels` in number.
constexpr bool takes(const Codec& codec, int32_t channels) {
  if (!is_quantized(codec.element)) return true;
  return core::is_common_e4m3(codec.element, codec.scale_type, codec.outer_scale) &&
         (codec.channels_per_scale == 0 || channels <= kMostScales * codec.channels_per_scale);
}

}  // namespace mla::cuda::bulk
