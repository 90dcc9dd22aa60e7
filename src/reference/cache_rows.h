// SPDX-License-Identifier: Apache-2.0
// One token's row in a cache of any format, read and written. Every operation of the oracle goes through these two; no
// other file of it knows a format. A source of channels is any function (c) -> float.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/args.h"
#include "mla/kv_layout.h"
#include "reference/scalar.h"

namespace mla::reference {

/// Scale factors in memory: f32 at any address, or UE8M0.
struct Scales {
  const std::byte* data = nullptr;  // null: none
  bool ue8m0 = false;
  int32_t channels_each = 1;

  int32_t bytes_each() const { return ue8m0 ? 1 : 4; }
  float operator[](int32_t group) const {
    const std::byte* at = data + group * bytes_each();
    return ue8m0 ? ue8m0_to_f32(read_as<uint8_t>(at)) : read_as<float>(at);
  }
};

/// Channels in memory, dequantized if they have scales.
struct Channels {
  const void* data = nullptr;
  DType dtype = DType::kNone;
  int64_t first = 0;  // elements
  Scales scales = {};

  const std::byte* bytes() const {
    return static_cast<const std::byte*>(data) + first * static_cast<int64_t>(size_of(dtype));
  }
  float operator()(int32_t c) const {
    if (scales.data == nullptr) return load(data, dtype, first + c);
    return bf16_to_f32(dequantize_e4m3(read_as<uint8_t>(bytes() + c), scales[c / scales.channels_each]));
  }
};

/// Writes `n` channels of `source`, rounded once.
template <class Source>
void write_channels(const Source& source, int32_t n, DType dtype, int64_t offset, void* out) {
  for (int32_t c = 0; c < n; ++c) store(source(c), dtype, offset + c, out);
}

/// Equal types keep their bits, NaN payloads included.
inline void write_channels(const Channels& source, int32_t n, DType dtype, int64_t offset, void* out) {
  const auto size = static_cast<int64_t>(size_of(dtype));
  if (source.dtype == dtype && n > 0)
    std::memcpy(static_cast<std::byte*>(out) + offset * size, source.bytes(), static_cast<size_t>(n * size));
  else
    write_channels<Channels>(source, n, dtype, offset, out);
}

/// The scale for channels [first, first + n) of a quantized group; infinities and NaN have no say.
template <class Source>
float choose_scale(const Source& source, int32_t first, int32_t n, bool power_of_two) {
  float amax = 0;
  for (int32_t c = first; c < first + n; ++c)
    if (std::isfinite(source(c))) amax = std::max(amax, std::fabs(source(c)));
  return power_of_two ? e4m3_power_of_two_scale(amax) : e4m3_scale(amax);
}

/// Where a token's row lies.
struct CacheRow {
  const core::Cache& cache;
  int64_t page, offset;

  static CacheRow at_slot(const core::Cache& cache, int64_t slot) {
    return {cache, slot / cache.page_size, slot % cache.page_size};
  }

  const KvLayout& layout() const { return cache.layout; }
  DType element(int32_t bytes) const {
    if (bytes == 1) return DType::kE4M3;
    return cache.format == CacheFormat::kF16 ? DType::kF16 : DType::kBF16;
  }
  std::byte* of(const core::Plane& plane) const { return plane.row(page, offset); }

  Channels ckv() const {
    Channels channels = {.data = of(cache.ckv), .dtype = element(layout().element_bytes)};
    if (cache.num_scales > 0)
      channels.scales = {.data = of(cache.scales),
                         .ue8m0 = is_ue8m0(layout().scale_kind),
                         .channels_each = cache.d_ckv / cache.num_scales};
    return channels;
  }
  /// None if d_kpe is 0.
  Channels kpe() const {
    if (cache.d_kpe == 0) return {};
    Channels channels = {.data = of(cache.kpe), .dtype = element(layout().rope_element_bytes)};
    if (channels.dtype == DType::kE4M3)
      channels.scales = {.data = reinterpret_cast<const std::byte*>(cache.kpe_scale), .channels_each = cache.d_kpe};
    return channels;
  }
  /// Of one token, with what pads them.
  int32_t scale_bytes() const {
    const int32_t padded = layout().scale_bytes_per_token;
    return padded > 0 ? padded : cache.num_scales * ckv().scales.bytes_each();
  }
};

/// The row reader: [ckv | kpe], dequantized.
inline void read_row(const CacheRow& row, double* out) {
  const core::Cache& cache = row.cache;
  const Channels ckv = row.ckv();
  for (int32_t c = 0; c < cache.d_ckv; ++c) out[c] = static_cast<double>(ckv(c));
  const Channels kpe = row.kpe();
  for (int32_t c = 0; c < cache.d_kpe; ++c) out[cache.d_ckv + c] = static_cast<double>(kpe(c));
}

/// The row packer: the latent part, with its scales where the writer chooses them.
template <class Source>
void write_ckv(const CacheRow& row, const Source& source) {
  const core::Cache& cache = row.cache;
  const Channels target = row.ckv();
  std::byte* out = row.of(cache.ckv);
  if (cache.num_scales == 0) return write_channels(source, cache.d_ckv, target.dtype, 0, out);
  const Scales& scales = target.scales;
  const int32_t group = scales.channels_each;
  if (cache.writes_scales) {
    std::byte* at = row.of(cache.scales);
    std::memset(at, 0, static_cast<size_t>(row.scale_bytes()));  // what pads them
    for (int32_t g = 0; g < cache.num_scales; ++g, at += scales.bytes_each()) {
      const float scale = choose_scale(source, g * group, group, scales.ue8m0 || cache.power_of_two_scales);
      if (scales.ue8m0)
        write_as(at, f32_to_ue8m0(scale));
      else
        write_as(at, scale);
    }
  }
  for (int32_t c = 0; c < cache.d_ckv; ++c) write_as(out + c, quantize_e4m3(source(c), scales[c / group]));
}

/// The rotary part.
template <class Source>
void write_kpe(const CacheRow& row, const Source& source) {
  const core::Cache& cache = row.cache;
  if (cache.d_kpe == 0) return;
  const Channels target = row.kpe();
  std::byte* out = row.of(cache.kpe);
  if (target.scales.data == nullptr) return write_channels(source, cache.d_kpe, target.dtype, 0, out);
  for (int32_t c = 0; c < cache.d_kpe; ++c) write_as(out + c, quantize_e4m3(source(c), target.scales[0]));
}

}  // namespace mla::reference
