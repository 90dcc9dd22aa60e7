// SPDX-License-Identifier: Apache-2.0
// This file says which rows cuda_sm90_fp8 multiplies, for its verdicts and its kernels.
#pragma once

#include <cstdint>

#include "mla/kv_layout.h"

namespace mla::cuda::sm90_fp8 {

inline constexpr int32_t kLatentDims = 512;  ///< channels of a value, and of the latent part of a row
inline constexpr int32_t kScaleRun = 128;    ///< the channels of a scale are whole runs of so many
inline constexpr int32_t kMostScales = kLatentDims / kScaleRun;
inline constexpr int32_t kRunKeys = 64;  ///< keys whose P have one scale (Numerics::p_run), but for prefill

/// Returns the same of prefill: as many keys as registers hold scores of, beside outputs of d_v channels.
constexpr int32_t prefill_run_keys(int64_t d_v) { return d_v == 128 ? 128 : 64; }

/// Returns whether the kernels take latent channels of this codec.
constexpr bool takes(const Codec& latents) {
  return latents.element == DType::kE4M3 && !latents.outer_scale && latents.scale_type == ScaleType::kF32 &&
         latents.channels_per_scale % kScaleRun == 0;
}

}  // namespace mla::cuda::sm90_fp8
