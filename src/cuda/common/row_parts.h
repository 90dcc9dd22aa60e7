// SPDX-License-Identifier: Apache-2.0
// A row whose channels all share one scale is one part, rotary channels and all: a tensor of whole rows does not say
// where these begin. The short ways of append and gather have lanes for 512 latent channels and 64 rotary ones. They
// take such a row in these two parts.
#pragma once

#include <cstddef>

#include "core/args.h"

namespace mla::cuda {

inline constexpr int32_t kFirstPart = 512, kMostSecondPart = 64;

/// Cuts the rows of a cache in two parts where they are one that is wider than kFirstPart. Returns whether it did.
inline bool cut_row(core::Cache& cache) {
  const bool one_scale = cache.num_scales == 1 && !cache.writes_scales && cache.scale_type == ScaleType::kF32 &&
                         cache.scales.stride_page == 0 && cache.scales.stride_token == 0;
  if (!one_scale || cache.ckv_dtype != DType::kE4M3 || cache.d_kpe != 0 || cache.d_ckv <= kFirstPart ||
      cache.d_ckv > kFirstPart + kMostSecondPart)
    return false;
  cache.kpe = cache.ckv;
  cache.kpe.base += kFirstPart;
  cache.kpe_dtype = cache.ckv_dtype;
  cache.kpe_scale = reinterpret_cast<const float*>(cache.scales.base);
  cache.d_kpe = cache.d_ckv - kFirstPart;
  cache.d_ckv = cache.channels_per_scale = kFirstPart;
  return true;
}

/// Returns the arguments with rows in two parts, of the cache and of the tensor beside it.
inline core::AppendArgs in_parts(core::AppendArgs args) {
  if (!cut_row(args.cache)) return args;
  args.kpe = static_cast<const std::byte*>(args.ckv) + kFirstPart * size_of(args.dtype);
  args.kpe_stride_token = args.ckv_stride_token;
  return args;
}
inline core::GatherArgs in_parts(core::GatherArgs args) {
  if (!cut_row(args.cache)) return args;
  args.out_kpe = static_cast<std::byte*>(args.out_ckv) + kFirstPart * size_of(args.out_dtype);
  args.out_kpe_stride_token = args.out_ckv_stride_token;
  return args;
}

}  // namespace mla::cuda
