// SPDX-License-Identifier: Apache-2.0
// Describes a paged cache as backends see it. Where the parts of its rows lie and how they are stored is resolved once,
// on the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mla/kv_layout.h"
#include "mla/types.h"

namespace mla::core {

/// Returns whether latent channels are e4m3 with scales of f32 or UE8M0 and without an outer scale. Kernels have faster
/// code for these.
constexpr bool is_common_e4m3(DType element, ScaleType scale_type, bool outer_scale) {
  return element == DType::kE4M3 && !outer_scale && (scale_type == ScaleType::kF32 || scale_type == ScaleType::kUE8M0);
}

/// Says where one part of every token's row lies. Strides are in bytes.
struct Plane {
  std::byte* base = nullptr;
  int64_t stride_page = 0, stride_token = 0;

  constexpr std::byte* row(int64_t page, int64_t offset) const {
    return base + page * stride_page + offset * stride_token;
  }
};

/// Describes the parts of a cache's rows, for any format. For a cache of one tensor all planes point into it. Code that
/// reads or writes rows uses these fields and never asks for the format.
struct Cache {
  CacheFormat format = CacheFormat::kBF16;  // only for its name, and to compare two caches
  int64_t num_pages = 0;
  int32_t page_size = 1;
  int32_t d_ckv = 0;                                         // kv_lora_rank; in fp8_dsv4 the quantized channels
  int32_t d_kpe = 0;                                         // qk_rope_head_dim, may be 0
  int32_t rotary_in_ckv = 0;                                 // so many of d_ckv, the last ones, are rotary
  DType ckv_dtype = DType::kBF16, kpe_dtype = DType::kBF16;  // bf16 or f16; e4m3 or e2m1 if quantized
  ScaleType scale_type = ScaleType::kNone;                   // type of the scales of ckv
  Plane ckv = {};
  Plane kpe = {};     // its base is null if d_kpe is 0
  Plane scales = {};  // scales of ckv, num_scales for each token; strides are 0 if all tokens share them
  int32_t num_scales = 0;
  int32_t channels_per_scale = 1;
  int32_t scale_bytes = 0;             // bytes of a token's scales, with those that pad them
  const float* outer_scale = nullptr;  // [1], multiplies every scale of ckv; null if there is none
  const float* kpe_scale = nullptr;    // [1], scale of a quantized kpe; null if every row has its own
  // Where a row has the scale of its quantized kpe, an f32 of any value that writers choose: its bytes behind ckv of
  // the row, and how many it takes with those that pad it.
  int32_t kpe_scale_at = 0, kpe_scale_bytes = 0;
  // Writers choose the scales if this is set, as in all quantized forms but fp8 with one scale.
  bool writes_scales = false;
  bool power_of_two_scales = true;  // whether the f32 scales that writers choose are powers of two
  float least_scale = 0;            // Codec::least_scale

  /// Returns the channels that append_rope writes as they are, and those that it rotates.
  constexpr int32_t d_plain() const { return d_ckv - rotary_in_ckv; }
  constexpr int32_t d_rotary() const { return d_kpe + rotary_in_ckv; }
  constexpr int64_t num_slots() const { return num_pages * page_size; }
  /// Returns whether scales that were chosen for another cache are valid in this one. A cache whose scales may be any
  /// numbers takes powers of two.
  constexpr bool takes_scales_of(const Cache& from) const { return !power_of_two_scales || from.power_of_two_scales; }
  constexpr bool is_quantized() const { return mla::is_quantized(ckv_dtype); }
  constexpr bool has_common_e4m3() const { return is_common_e4m3(ckv_dtype, scale_type, outer_scale != nullptr); }
  constexpr bool has_quantized_kpe() const { return d_kpe > 0 && mla::is_quantized(kpe_dtype); }
  constexpr bool writes_kpe_scale() const { return kpe_scale_at > 0; }
  /// Returns where the rows have the scales of their kpe.
  constexpr Plane kpe_scales() const { return {ckv.base + kpe_scale_at, ckv.stride_page, ckv.stride_token}; }
  constexpr int32_t ckv_bytes() const { return static_cast<int32_t>(bytes_of(ckv_dtype, d_ckv)); }
  constexpr int32_t kpe_bytes() const { return static_cast<int32_t>(bytes_of(kpe_dtype, d_kpe)); }
};

/// Sets how the parts of rows are stored in a cache of this layout. d_ckv must be set before.
constexpr void set_codecs(const KvLayout& layout, Cache& cache) {
  cache.ckv_dtype = layout.nope.element;
  cache.kpe_dtype = layout.rope.element;
  cache.scale_type = layout.nope.scale_type;
  cache.rotary_in_ckv = layout.rotary_in_nope;
  if (!cache.is_quantized()) return;
  cache.channels_per_scale = layout.nope.channels_per_scale != 0 ? layout.nope.channels_per_scale : cache.d_ckv;
  cache.num_scales = cache.d_ckv / cache.channels_per_scale;
  cache.scale_bytes = layout.is_packed() ? layout.scale_bytes_per_token : cache.num_scales * size_of(cache.scale_type);
  cache.writes_scales = layout.nope.channels_per_scale != 0;
  cache.least_scale = layout.nope.least_scale;
  cache.kpe_scale_at = layout.rope_scale_offset;
  cache.kpe_scale_bytes = layout.rope_scale_bytes;
}

// Kernels that are written for common e4m3 latents take one scale of all rotary channels.
static_assert([] {
  for (CacheFormat format : kAllCacheFormats) {
    const KvLayout layout = kv_layout(format);
    const Codec& nope = layout.nope;
    if (layout.rope_scale_offset > 0 && is_common_e4m3(nope.element, nope.scale_type, nope.outer_scale)) return false;
  }
  return true;
}());

/// Sets that the scales lie in a tensor of their own with kTensorScalesPerToken for every token, and not one for all
/// tokens.
constexpr void set_token_scales(Cache& cache) {
  cache.num_scales = kTensorScalesPerToken;
  cache.channels_per_scale = cache.d_ckv / cache.num_scales;
  cache.scale_bytes = cache.num_scales * size_of(cache.scale_type);
  cache.writes_scales = true;
}

/// Points the planes of a packed cache into its bytes. `stride_token` is used by formats whose tokens are a dimension
/// of the tensor; in formats with footers the layout gives it.
constexpr void set_planes(const KvLayout& layout, std::byte* base, int64_t stride_page, int64_t stride_token,
                          Cache& cache) {
  const auto plane = [&](int64_t offset, int64_t stride) {
    return Plane{.base = base != nullptr ? base + offset : nullptr, .stride_page = stride_page, .stride_token = stride};
  };
  if (layout.has_footer()) stride_token = layout.row_bytes;
  cache.ckv = plane(0, stride_token);
  if (cache.d_kpe > 0) cache.kpe = plane(layout.rope_offset, stride_token);
  cache.scales = layout.has_footer()
                     ? plane(footer_scale_offset(layout, cache.page_size, 0), layout.scale_bytes_per_token)
                     : plane(layout.scale_offset, stride_token);
}

}  // namespace mla::core
