// SPDX-License-Identifier: Apache-2.0
// This file has the row reader and the row packer of the oracle, for one token's row in a cache of any format. All its
// operations use them, and no other file of it knows a format. A source of channels is any function (c) -> float.
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

/// Reads scale factors in memory, at any address.
struct Scales {
  const std::byte* data = nullptr;  // null if there are none
  ScaleType type = ScaleType::kF32;
  const float* outer = nullptr;  // null stands for 1
  int32_t channels_each = 1;

  float stored(int32_t group) const {
    const std::byte* at = data + int64_t{group} * size_of(type);
    return type == ScaleType::kUE8M0  ? ue8m0_to_f32(read_as<uint8_t>(at))
           : type == ScaleType::kE4M3 ? e4m3_to_f32(read_as<uint8_t>(at))
                                      : read_as<float>(at);
  }
  float outer_factor() const { return outer != nullptr ? *outer : 1.0F; }
  float operator[](int32_t group) const { return outer != nullptr ? stored(group) * *outer : stored(group); }
  /// Returns the product with the outer scale unrounded.
  double exact(int32_t group) const {
    const auto scale = static_cast<double>(stored(group));
    return outer != nullptr ? scale * static_cast<double>(*outer) : scale;
  }
};

/// Returns the bits of channel `c` of a quantized row.
inline uint8_t load_bits(const std::byte* row, DType element, int64_t c) {
  if (element == DType::kE4M3) return read_as<uint8_t>(row + c);
  return static_cast<uint8_t>(read_as<uint8_t>(row + c / 2) >> (c % 2 * 4) & 0xF);  // even channels are in the low half
}
inline void store_bits(std::byte* row, DType element, int64_t c, uint8_t code) {
  if (element == DType::kE4M3) return write_as(row + c, code);
  const auto other = static_cast<uint8_t>(read_as<uint8_t>(row + c / 2) & (c % 2 == 0 ? 0xF0 : 0x0F));
  write_as(row + c / 2, static_cast<uint8_t>(other | code << (c % 2 * 4)));
}
inline float dequantize(DType element, uint8_t code, float scale) {
  return bf16_to_f32(element == DType::kE2M1 ? dequantize_e2m1(code, scale) : dequantize_e4m3(code, scale));
}
inline uint8_t quantize(DType element, float value, float scale) {
  return element == DType::kE2M1 ? quantize_e2m1(value, scale) : quantize_e4m3(value, scale);
}

/// Reads channels in memory, and dequantizes them if they have scales.
struct Channels {
  const void* data = nullptr;
  DType dtype = DType::kNone;
  int64_t first = 0;  // element that channel 0 is
  Scales scales = {};

  const std::byte* bytes() const { return static_cast<const std::byte*>(data) + bytes_of(dtype, first); }
  /// Returns the element that is stored, without its scale.
  float element(int32_t c) const {
    if (scales.data == nullptr) return load(data, dtype, first + c);
    const uint8_t code = load_bits(bytes(), dtype, c);
    return dtype == DType::kE2M1 ? e2m1_to_f32(code) : e4m3_to_f32(code);
  }
  float operator()(int32_t c) const {
    if (scales.data == nullptr) return load(data, dtype, first + c);
    return dequantize(dtype, load_bits(bytes(), dtype, c), scales[c / scales.channels_each]);
  }
  /// Writes channels [0, n) to `out`.
  void read(int32_t n, double* out) const {
    if (scales.data == nullptr) return load_row(data, dtype, first, n, out);
    const std::byte* const codes = bytes();
    for (int32_t c = 0; c < n;) {
      const float scale = scales[c / scales.channels_each];
      for (const int32_t end = std::min(c + scales.channels_each, n); c < end; ++c)
        out[c] = static_cast<double>(dequantize(dtype, load_bits(codes, dtype, c), scale));
    }
  }
};

/// Writes `n` channels of `source`, rounded once.
template <class Source>
void write_channels(const Source& source, int32_t n, DType dtype, int64_t offset, void* out) {
  for (int32_t c = 0; c < n; ++c) store(source(c), dtype, offset + c, out);
}

/// Writes channels from memory. If the types are equal, the bits are kept, NaN payloads included.
inline void write_channels(const Channels& source, int32_t n, DType dtype, int64_t offset, void* out) {
  if (source.dtype == dtype && n > 0)
    std::memcpy(static_cast<std::byte*>(out) + bytes_of(dtype, offset), source.bytes(),
                static_cast<size_t>(bytes_of(dtype, n)));
  else
    write_channels<Channels>(source, n, dtype, offset, out);
}

/// Returns the largest finite magnitude of channels [first, first + n). Infinities and NaN do not affect a scale.
template <class Source>
float finite_amax(const Source& source, int32_t first, int32_t n) {
  float amax = 0;
  for (int32_t c = first; c < first + n; ++c)
    if (std::isfinite(source(c))) amax = std::max(amax, std::fabs(source(c)));
  return amax;
}

/// Says where a token's row lies.
struct CacheRow {
  const core::Cache& cache;
  int64_t page, offset;

  static CacheRow at_slot(const core::Cache& cache, int64_t slot) {
    return {cache, slot / cache.page_size, slot % cache.page_size};
  }

  std::byte* of(const core::Plane& plane) const { return plane.row(page, offset); }

  Channels ckv() const {
    Channels channels = {.data = of(cache.ckv), .dtype = cache.ckv_dtype};
    if (cache.is_quantized())
      channels.scales = {.data = of(cache.scales),
                         .type = cache.scale_type,
                         .outer = cache.outer_scale,
                         .channels_each = cache.channels_per_scale};
    return channels;
  }
  /// Returns the rotary channels; empty if d_kpe is 0.
  Channels kpe() const {
    if (cache.d_kpe == 0) return {};
    Channels channels = {.data = of(cache.kpe), .dtype = cache.kpe_dtype};
    if (cache.has_quantized_kpe())
      channels.scales = {.data = cache.writes_kpe_scale() ? of(cache.kpe_scales())
                                                          : reinterpret_cast<const std::byte*>(cache.kpe_scale),
                         .channels_each = cache.d_kpe};
    return channels;
  }
};

/// Reads a row: writes [ckv | kpe], dequantized, to `out`.
inline void read_row(const CacheRow& row, double* out) {
  const core::Cache& cache = row.cache;
  row.ckv().read(cache.d_ckv, out);
  row.kpe().read(cache.d_kpe, out + cache.d_ckv);
}

/// Packs the latent part of a row, with its scales where writers choose them.
template <class Source>
void write_ckv(const CacheRow& row, const Source& source) {
  const core::Cache& cache = row.cache;
  std::byte* out = row.of(cache.ckv);
  if (!cache.is_quantized()) return write_channels(source, cache.d_ckv, cache.ckv_dtype, 0, out);
  const Scales scales = row.ckv().scales;
  const int32_t group = cache.channels_per_scale;
  if (cache.writes_scales) {
    std::byte* at = row.of(cache.scales);
    std::memset(at, 0, static_cast<size_t>(cache.scale_bytes));  // also clears the bytes that pad the scales
    for (int32_t g = 0; g < cache.num_scales; ++g, at += size_of(cache.scale_type)) {
      const float scale = choose_scale(cache.ckv_dtype, cache.scale_type, cache.power_of_two_scales,
                                       finite_amax(source, g * group, group), scales.outer_factor(), cache.least_scale);
      if (cache.scale_type == ScaleType::kUE8M0)
        write_as(at, f32_to_ue8m0(scale));
      else if (cache.scale_type == ScaleType::kE4M3)
        write_as(at, f32_to_e4m3(scale));
      else
        write_as(at, scale);
    }
  }
  for (int32_t c = 0; c < cache.d_ckv; ++c)
    store_bits(out, cache.ckv_dtype, c, quantize(cache.ckv_dtype, source(c), scales[c / group]));
}

/// Packs the rotary part of a row.
template <class Source>
void write_kpe(const CacheRow& row, const Source& source) {
  const core::Cache& cache = row.cache;
  if (cache.d_kpe == 0) return;
  const Channels target = row.kpe();
  std::byte* out = row.of(cache.kpe);
  if (target.scales.data == nullptr) return write_channels(source, cache.d_kpe, target.dtype, 0, out);
  if (cache.writes_kpe_scale()) {
    std::byte* const at = row.of(cache.kpe_scales());
    std::memset(at, 0, static_cast<size_t>(cache.kpe_scale_bytes));  // also clears the bytes that pad the scale
    write_as(at, choose_scale(target.dtype, ScaleType::kF32, false, finite_amax(source, 0, cache.d_kpe)));
  }
  for (int32_t c = 0; c < cache.d_kpe; ++c)
    store_bits(out, target.dtype, c, quantize(target.dtype, source(c), target.scales[0]));
}

/// Returns a key of the indexer.
inline Channels indexer_key(const core::IndexerPages& cache, int64_t page, int64_t offset) {
  const Codec codec = cache.layout().codec;
  return {.data = cache.key(page, offset),
          .dtype = codec.element,
          .scales = {
              .data = cache.scale(page, offset), .type = codec.scale_type, .channels_each = codec.channels_per_scale}};
}

/// Packs a key of the indexer, with the scales that are chosen for it.
template <class Source>
void write_indexer_key(const core::IndexerPages& cache, int64_t slot, const Source& source, bool power_of_two_scales) {
  const IndexerLayout layout = cache.layout();
  const Codec& codec = layout.codec;
  const int32_t group = codec.channels_per_scale;
  const int64_t page = slot / cache.page_size, offset = slot % cache.page_size;
  for (int32_t g = 0; g < layout.num_scales(); ++g) {
    const float scale =
        choose_scale(codec.element, codec.scale_type, power_of_two_scales, finite_amax(source, g * group, group));
    std::byte* const at = cache.scale(page, offset) + g * size_of(codec.scale_type);
    if (codec.scale_type == ScaleType::kUE8M0)
      write_as(at, f32_to_ue8m0(scale));
    else
      write_as(at, scale);
    for (int32_t c = g * group; c < (g + 1) * group; ++c)
      store_bits(cache.key(page, offset), codec.element, c, quantize(codec.element, source(c), scale));
  }
}

}  // namespace mla::reference
