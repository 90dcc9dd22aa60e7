// SPDX-License-Identifier: Apache-2.0
// One warp reads and writes one token's row in a cache of any format. Writers, gather and copies use these functions,
// which know a format only by the fields of core::Cache. All lanes call with the same arguments.
//
// A *source* gives channels one at a time, source(c), or, for c a multiple of eight below source.vector_channels(n),
// eight at a time. The latter has two steps, source.decode(source.fetch(c), values), so that the loads of several calls
// of fetch can be in flight.
#pragma once

#include "core/args.h"
#include "cuda/tile/channels.cuh"
#include "mla/kv_layout.h"

namespace mla::MLA_CUDA_NAMESPACE {

/// One warp handles this many channels at a time, eight per lane.
inline constexpr int kWarpChannels = kWarpSize * kVector;

/// Returns which scale channel c has, where `channels_each` neighbours share one. A shift replaces the division, which
/// takes some twenty instructions, where it can.
MLA_DEVICE int32_t scale_of_channel(int32_t c, int32_t channels_each) {
  const auto below = static_cast<uint32_t>(channels_each) - 1;
  if ((static_cast<uint32_t>(channels_each) & below) == 0) return c >> std::popcount(below);
  return c / channels_each;
}

/// This is a source of channels in memory, which are bf16, f16 or f32, or quantized elements with scales, which it
/// dequantizes.
struct Channels {
  const std::byte* data = nullptr;
  DType dtype = DType::kNone;
  const std::byte* scales = nullptr;  // may have any alignment; null if there are none
  ScaleType scale_type = ScaleType::kF32;
  const float* outer_scale = nullptr;  // null stands for 1
  int32_t channels_each = 1;           // channels that share a scale

  static constexpr int kBatch = 2;
  struct Fetched {
    Bits8 bits;
    float scale;
  };

  MLA_DEVICE float scale(int32_t group) const { return load_scale(scales, scale_type, group, outer_scale); }
  MLA_DEVICE float operator()(int32_t c) const {
    if (scales == nullptr) return load_element(data, dtype, c);
    return bf16_to_f32(from_e4m3(load_code(data, dtype, c), scale(scale_of_channel(c, channels_each))));
  }
  MLA_DEVICE int32_t vector_channels(int32_t n) const {
    return scales == nullptr || channels_each % kVector == 0 ? n / kVector * kVector : 0;
  }
  MLA_DEVICE Fetched fetch(int32_t c) const {
    if (scales != nullptr) return {load_elements8(data, dtype, c), scale(scale_of_channel(c, channels_each))};
    const auto bytes = static_cast<int32_t>(size_of(dtype));
    return {load_bits8(data + int64_t{c} * bytes, bytes), 1.0F};
  }
  MLA_DEVICE void decode(const Fetched& fetched, float (&values)[kVector]) const {
    if (scales != nullptr)
      decode8(dequantize8(fetched.bits, fetched.scale), DType::kBF16, values);
    else
      decode8(fetched.bits, dtype, values);
  }
};

/// Returns where channels lie that have the type `dtype` already; null for others.
MLA_DEVICE const std::byte* as_stored(const Channels& source, DType dtype) {
  return source.dtype == dtype ? source.data : nullptr;
}

/// Converts channels to bf16, f16 or f32 elements, or to e4m3 with one scale for all.
class Encoder {
 public:
  /// `scale` is used for e4m3 only.
  MLA_DEVICE explicit Encoder(DType dtype, float scale = 1.0F) : dtype_(dtype), scale_(scale), divide_(scale) {}

  MLA_DEVICE int32_t bytes_each() const { return static_cast<int32_t>(size_of(dtype_)); }
  MLA_DEVICE Bits8 operator()(const float (&values)[kVector]) const {
    return dtype_ == DType::kE4M3 ? quantize8(values, divide_) : encode8(values, dtype_);
  }
  MLA_DEVICE void store(std::byte* to, int32_t c, float value) const { store_element(to, dtype_, c, value, scale_); }

 private:
  DType dtype_;
  float scale_;
  ScaleDivisor divide_;
};

/// Writes channels [0, n) of `source` to `to` as elements of `bytes_each` bytes. convert8(fetched) returns the bits of
/// eight channels; convert1(c) writes one of those behind the last eight.
template <class Source, class Convert8, class Convert1>
MLA_DEVICE void for_channels(const Source& source, int32_t n, int32_t bytes_each, std::byte* to,
                             const Convert8& convert8, const Convert1& convert1) {
  constexpr int kBatch = Source::kBatch;
  const int32_t whole = source.vector_channels(n);
  for (int32_t first = ptx::lane() * kVector; first < whole; first += kBatch * kWarpChannels) {
    typename Source::Fetched fetched[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (first + b * kWarpChannels < whole) fetched[b] = source.fetch(first + b * kWarpChannels);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int32_t c = first + b * kWarpChannels;
      if (c < whole) store_bits8(to + int64_t{c} * bytes_each, bytes_each, convert8(fetched[b]));
    }
  }
  for (int32_t c = whole + ptx::lane(); c < n; c += kWarpSize) convert1(c);
}

/// Writes channels [0, n) of `source` to `to`.
template <class Source>
MLA_DEVICE void write_channels(const Source& source, int32_t n, const Encoder& encode, std::byte* to) {
  for_channels(
      source, n, encode.bytes_each(), to,
      [&](const typename Source::Fetched& fetched) {
        float values[kVector];
        source.decode(fetched, values);
        return encode(values);
      },
      [&](int32_t c) { encode.store(to, c, source(c)); });
}

/// Writes quantized channels [0, n) as the bf16 values that they stand for.
MLA_DEVICE void write_dequantized(const Channels& source, int32_t n, std::byte* to) {
  for_channels(
      source, n, 2, to, [&](const Channels::Fetched& fetched) { return dequantize8(fetched.bits, fetched.scale); },
      [&](int32_t c) { store_element(to, DType::kBF16, c, source(c)); });
}

/// Describes a range of bytes that is copied as it is.
struct Piece {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  int64_t bytes = 0;

  MLA_DEVICE bool aligned_to(uint32_t size) const {
    return (reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | static_cast<uintptr_t>(bytes)) %
               size ==
           0;
  }
};

template <class T>
MLA_DEVICE void copy_units(const Piece& piece) {
  for (int64_t i = ptx::lane(); i < piece.bytes / static_cast<int64_t>(sizeof(T)); i += kWarpSize)
    as<T>(piece.to)[i] = as<T>(piece.from)[i];
}

MLA_DEVICE void copy_piece(const Piece& piece) {
  if (piece.aligned_to(4))
    copy_units<uint32_t>(piece);
  else if (piece.aligned_to(2))
    copy_units<uint16_t>(piece);
  else
    copy_units<uint8_t>(piece);
}

/// Holds a piece whose loads are issued before its destination is known, so that they overlap with other loads. A piece
/// of up to 128 bytes at a multiple of four bytes is loaded that way; store() copies any other.
class PieceInFlight {
 public:
  MLA_DEVICE PieceInFlight(const std::byte* from, int64_t bytes)
      : from_(from),
        bytes_(bytes),
        loaded_(bytes <= 4 * kWarpSize && (bytes | static_cast<int64_t>(reinterpret_cast<uintptr_t>(from))) % 4 == 0) {
    if (loaded_ && ptx::lane() * 4 < bytes) word_ = ptx::load_once(as<uint32_t>(from) + ptx::lane());
  }
  MLA_DEVICE void store(std::byte* to) const {
    if (!loaded_ || !is_aligned(to, 4))
      copy_piece({to, from_, bytes_});
    else if (ptx::lane() * 4 < bytes_)
      as<uint32_t>(to)[ptx::lane()] = word_;
  }

 private:
  const std::byte* from_;
  int64_t bytes_;
  bool loaded_;
  uint32_t word_ = 0;
};

/// Copies two pieces. Where addresses allow, each lane copies 16 bytes at a time with up to three loads in flight,
/// which covers a row of 576 bf16 channels.
MLA_DEVICE void copy_pieces(const Piece& a, const Piece& b) {
  if (!a.aligned_to(16) || !b.aligned_to(16)) {
    copy_piece(a);
    copy_piece(b);
    return;
  }
  constexpr int kUnroll = 3;
  const auto units_of_a = static_cast<int32_t>(a.bytes / 16), units = static_cast<int32_t>((a.bytes + b.bytes) / 16);
  const auto from = [&](int32_t i) {
    return i < units_of_a ? as<ptx::Vec4>(a.from) + i : as<ptx::Vec4>(b.from) + (i - units_of_a);
  };
  const auto to = [&](int32_t i) {
    return i < units_of_a ? as<ptx::Vec4>(a.to) + i : as<ptx::Vec4>(b.to) + (i - units_of_a);
  };
  for (int32_t first = ptx::lane(); first < units; first += kUnroll * kWarpSize) {
    ptx::Vec4 values[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      if (first + u * kWarpSize < units) values[u] = ptx::load_once(from(first + u * kWarpSize));
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      if (first + u * kWarpSize < units) *to(first + u * kWarpSize) = values[u];
  }
}

/// Says where a token's row lies in a cache.
struct CacheRow {
  const core::Cache& cache;
  int64_t page, offset;

  /// `slot` must not be negative.
  static MLA_DEVICE CacheRow at_slot(const core::Cache& cache, int64_t slot) { return at(cache, nullptr, slot); }
  /// Returns the row of token `token` of the request that has these pages; without pages, of the whole pool.
  static MLA_DEVICE CacheRow at(const core::Cache& cache, const int32_t* pages, int64_t token) {
    int64_t page, offset;
    if (token <= INT32_MAX) {  // because a 64-bit division is a long subroutine
      page = static_cast<uint32_t>(token) / static_cast<uint32_t>(cache.page_size);
      offset = static_cast<uint32_t>(token) % static_cast<uint32_t>(cache.page_size);
    } else {
      page = token / cache.page_size;
      offset = token % cache.page_size;
    }
    return {cache, pages != nullptr ? pages[page] : page, offset};
  }

  MLA_DEVICE std::byte* of(const core::Plane& plane) const { return plane.row(page, offset); }

  MLA_DEVICE Channels ckv() const {
    Channels channels = {.data = of(cache.ckv), .dtype = cache.ckv_dtype};
    if (cache.is_quantized()) {
      channels.scales = of(cache.scales);
      channels.scale_type = cache.scale_type;
      channels.outer_scale = cache.outer_scale;
      channels.channels_each = cache.channels_per_scale;
    }
    return channels;
  }
  /// Must be called only if d_kpe is not 0.
  MLA_DEVICE Channels kpe() const {
    Channels channels = {.data = of(cache.kpe), .dtype = cache.kpe_dtype};
    if (is_quantized(channels.dtype)) {
      channels.scales =
          cache.writes_kpe_scale() ? of(cache.kpe_scales()) : reinterpret_cast<const std::byte*>(cache.kpe_scale);
      channels.channels_each = cache.d_kpe;
    }
    return channels;
  }
};

/// Returns the larger of `amax` and the magnitude of `value`; infinities and NaN are ignored.
MLA_DEVICE float with_magnitude(float amax, float value) {
  const float m = magnitude(value);
  return is_finite(value) && m > amax ? m : amax;
}

/// Returns the largest magnitude of those values that are finite, and in `all_finite` whether all are.
MLA_DEVICE float largest_magnitude(const float (&values)[kVector], bool& all_finite) {
  // Magnitudes are ordered as their bits are, infinity and NaN above all others.
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kVector; ++i) largest = std::max(largest, std::bit_cast<uint32_t>(magnitude(values[i])));
  all_finite = is_finite(std::bit_cast<float>(largest));
  if (all_finite) [[likely]]
    return std::bit_cast<float>(largest);
  float amax = 0;
  for (int i = 0; i < kVector; ++i) amax = with_magnitude(amax, values[i]);
  return amax;
}

/// Returns the largest value of `lanes` neighbouring lanes, where `lanes` is a power of two.
MLA_DEVICE float max_of_lanes(float value, int32_t lanes) {
  for (int32_t mask = lanes / 2; mask > 0; mask /= 2) {
    const float other = ptx::shuffle_xor(value, mask);
    value = other > value ? other : value;
  }
  return value;
}

/// Chooses the scale of group `g` by the group's largest magnitude, and stores it if `stores` is set. Returns the
/// number by which the group's values are divided. kCommon is Cache::has_common_e4m3().
template <bool kCommon>
MLA_DEVICE float make_scale(const CacheRow& row, int32_t g, float amax, bool stores) {
  const core::Cache& cache = row.cache;
  if constexpr (kCommon) {
    const float chosen = cache.power_of_two_scales ? e4m3_power_of_two_scale(amax) : e4m3_scale(amax);
    const float scale = chosen < cache.least_scale ? cache.least_scale : chosen;
    if (stores)
      store_scale(row.of(cache.scales), cache.scale_type == ScaleType::kUE8M0 ? ScaleType::kUE8M0 : ScaleType::kF32, g,
                  scale);
    return scale;
  }
  const float outer = cache.outer_scale != nullptr ? *cache.outer_scale : 1.0F;
  const float scale =
      choose_scale(cache.ckv_dtype, cache.scale_type, cache.power_of_two_scales, amax, outer, cache.least_scale);
  if (stores) store_scale(row.of(cache.scales), cache.scale_type, g, scale);
  return cache.outer_scale != nullptr ? scale * outer : scale;
}

/// Writes groups whose channels neighbouring lanes hold, eight per lane; their widths are powers of two. Scales are
/// chosen and elements are quantized in registers.
template <bool kCommon, class Source>
MLA_DEVICE void write_lane_groups(const CacheRow& row, const Source& source, int32_t group) {
  const int32_t n = row.cache.d_ckv, lanes = group / kVector;
  std::byte* to = row.of(row.cache.ckv);
  constexpr int kBatch = Source::kBatch;
  for (int32_t base = 0; base < n; base += kBatch * kWarpChannels) {
    const int32_t first = base + ptx::lane() * kVector;
    typename Source::Fetched fetched[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (first + b * kWarpChannels < n) fetched[b] = source.fetch(first + b * kWarpChannels);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (base + b * kWarpChannels >= n) continue;  // the same in all lanes
      const int32_t c = first + b * kWarpChannels;
      float values[kVector] = {};
      if (c < n) source.decode(fetched[b], values);
      bool all_finite;
      const float amax = max_of_lanes(largest_magnitude(values, all_finite), lanes);
      const float scale = make_scale<kCommon>(row, scale_of_channel(c, group), amax, c < n && (c & (group - 1)) == 0);
      if (c >= n) continue;
      if (kCommon && row.cache.power_of_two_scales && all_finite) [[likely]]
        store_bits8(to + c, 1, quantize8_by_power_of_two(values, scale));
      else
        store_codes8(to, kCommon ? DType::kE4M3 : row.cache.ckv_dtype, c, values, ScaleDivisor(scale));
    }
  }
}

/// Writes groups of any width, one after another.
template <class Source>
MLA_DEVICE void write_odd_groups(const CacheRow& row, const Source& source, int32_t group) {
  std::byte* to = row.of(row.cache.ckv);
  for (int32_t g = 0; g < row.cache.num_scales; ++g) {
    const int32_t begin = g * group, end = begin + group;
    float amax = 0;
    for (int32_t c = begin + ptx::lane(); c < end; c += kWarpSize) amax = with_magnitude(amax, source(c));
    const float scale = make_scale<false>(row, g, max_of_lanes(amax, kWarpSize), ptx::lane() == 0);
    if (row.cache.ckv_dtype == DType::kE2M1) {  // each lane writes both channels of a byte
      for (int32_t c = begin + 2 * ptx::lane(); c < end; c += 2 * kWarpSize)
        as<uint8_t>(to)[c / 2] =
            static_cast<uint8_t>(quantize_e2m1(source(c), scale) | quantize_e2m1(source(c + 1), scale) << 4);
    } else {
      for (int32_t c = begin + ptx::lane(); c < end; c += kWarpSize) as<uint8_t>(to)[c] = to_e4m3(source(c), scale);
    }
  }
}

/// kCommon: groups of e4m3 with the usual scales have code of their own, which is faster.
template <bool kCommon, class Source>
MLA_DEVICE void write_groups(const CacheRow& row, const Source& source) {
  const core::Cache& cache = row.cache;
  const int32_t group = cache.channels_per_scale, lanes = group / kVector;
  const bool lanes_hold_groups = group % kVector == 0 && (lanes & (lanes - 1)) == 0 && lanes <= kWarpSize;
  if (!lanes_hold_groups || source.vector_channels(cache.d_ckv) != cache.d_ckv)
    write_odd_groups(row, source, group);
  else if (kCommon && cache.has_common_e4m3())
    write_lane_groups<true>(row, source, group);
  else
    write_lane_groups<false>(row, source, group);
  const int32_t pad = cache.num_scales * size_of(cache.scale_type) + ptx::lane();
  if (pad < cache.scale_bytes) row.of(cache.scales)[pad] = std::byte{0};
}

/// Writes the rotary channels of a cache that has a scale of them in every row.
template <class Source>
MLA_DEVICE void write_scaled_kpe(const CacheRow& row, const Source& source) {
  const core::Cache& cache = row.cache;
  auto* const to = as<uint8_t>(row.of(cache.kpe));
  std::byte* const to_scale = row.of(cache.kpe_scales());
  float amax = 0;
  for (int32_t c = ptx::lane(); c < cache.d_kpe; c += kWarpSize) amax = with_magnitude(amax, source(c));
  const float scale = e4m3_scale(max_of_lanes(amax, kWarpSize));
  for (int32_t c = ptx::lane(); c < cache.d_kpe; c += kWarpSize) to[c] = to_e4m3(source(c), scale);
  if (ptx::lane() == 0) store_f32_anywhere(to_scale, scale);
  for (int32_t pad = size_of(ScaleType::kF32) + ptx::lane(); pad < cache.kpe_scale_bytes; pad += kWarpSize)
    to_scale[pad] = std::byte{0};
}

/// Returns the scale of the rotary channels, which have none or one that all rows share.
MLA_DEVICE float given_kpe_scale(const core::Cache& cache) {
  return cache.kpe_scale != nullptr ? *cache.kpe_scale : 1.0F;
}

/// Returns the scale of the latent channels for caches whose scales writers do not choose.
MLA_DEVICE float given_ckv_scale(const CacheRow& row) { return row.cache.is_quantized() ? row.ckv().scale(0) : 1.0F; }

/// Says how a kernel writes rows. Each way is a kernel of its own, because with all of them in one every row pays for
/// the registers and the code of the largest.
enum class RowWay : uint8_t {
  kCopied,       ///< the latent part keeps its bits, NaN payloads included
  kWithScales,   ///< the same, and the scales of its groups are copied
  kDequantized,  ///< quantized parts become bf16
  kGrouped,      ///< the latent part is quantized, and the scales of its groups are chosen
  kEncoded,      ///< parts without scales become other elements, with one scale or none
  kConverted,    ///< anything else
};

/// Writes the parts of a row, with the scales of its latent channels in kGrouped. A part whose elements already have
/// the cache's type is copied faster by copy_pieces(), and is then left out here.
template <RowWay kWay>
MLA_DEVICE void write_row(const CacheRow& row, bool writes_ckv, const Channels& ckv, bool writes_kpe,
                          const Channels& kpe) {
  static_assert(kWay != RowWay::kCopied && kWay != RowWay::kWithScales);
  const core::Cache& cache = row.cache;
#pragma unroll 1
  for (int part = 0; part < (kWay == RowWay::kGrouped ? 1 : 2); ++part) {  // is not unrolled, which halves the code
    const bool is_kpe = part == 0;
    if (is_kpe ? !writes_kpe || cache.d_kpe == 0 || (kWay == RowWay::kGrouped && cache.writes_kpe_scale())
               : !writes_ckv)
      continue;
    // The fields are chosen one by one, because nvcc 13.0 puts both structs into local memory where a whole one is
    // chosen (ptxas -v: "stack frame").
    const Channels source = {.data = is_kpe ? kpe.data : ckv.data,
                             .dtype = is_kpe ? kpe.dtype : ckv.dtype,
                             .scales = kWay == RowWay::kEncoded ? nullptr
                                       : is_kpe                 ? kpe.scales
                                                                : ckv.scales,
                             .scale_type = is_kpe ? kpe.scale_type : ckv.scale_type,
                             .outer_scale = is_kpe ? kpe.outer_scale : ckv.outer_scale,
                             .channels_each = is_kpe ? kpe.channels_each : ckv.channels_each};
    const int32_t n = is_kpe ? cache.d_kpe : cache.d_ckv;
    std::byte* const to = row.of(is_kpe ? cache.kpe : cache.ckv);
    if constexpr (kWay == RowWay::kDequantized)
      write_dequantized(source, n, to);
    else
      write_channels(
          source, n,
          is_kpe ? Encoder(cache.kpe_dtype, given_kpe_scale(cache)) : Encoder(cache.ckv_dtype, given_ckv_scale(row)),
          to);
  }
  if (kWay == RowWay::kGrouped && writes_ckv) write_groups<true>(row, ckv);
  if (kWay == RowWay::kGrouped && writes_kpe && cache.writes_kpe_scale()) write_scaled_kpe(row, kpe);
}

}  // namespace mla::MLA_CUDA_NAMESPACE
