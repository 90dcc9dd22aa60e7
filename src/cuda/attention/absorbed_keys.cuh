// SPDX-License-Identifier: Apache-2.0
// Copies the rows that hold the keys of a segment to shared memory, and converts quantized rows.
#pragma once

#include <algorithm>

#include "cuda/attention/absorbed_args.h"
#include "cuda/attention/absorbed_places.cuh"
#include "cuda/attention/key_kind.h"
#include "cuda/tile/channels.cuh"
#include "cuda/tile/tile.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Copies 16 bytes that are aligned as one element is, and no better.
MLA_DEVICE void copy_unaligned_chunk(ptx::SharedAddress to, const std::byte* from, int element_bytes, bool valid) {
  ptx::Vec4 chunk = {};
  if (valid) {
    for (int half = 0; half < 2 && element_bytes == 1; ++half) {
      const Bits8 bits = load_bits8(from + half * kVector, 1);
      chunk.x[2 * half] = bits.w[0];
      chunk.x[2 * half + 1] = bits.w[1];
    }
    if (element_bytes == 2) {
      const Bits8 bits = load_bits8(from, 2);
      for (int i = 0; i < 4; ++i) chunk.x[i] = bits.w[i];
    }
  }
  ptx::store_shared(to, chunk);
}

/// Copies four bytes of a key's scales, from byte `at` on. If `scales` is null it stores zeros.
MLA_DEVICE void copy_scale_word(ptx::SharedAddress to, const std::byte* scales, int at) {
  const bool valid = scales != nullptr;
  scales += at;
  if (is_aligned(scales, 4))
    ptx::cp_async_4(to, scales, valid);
  else
    ptx::store_shared(to, valid ? load_f32_anywhere(scales) : 0.0F);
}

/// Says which keys of a step a warp has: warp w copies and converts keys w, w + kWarps, ... Their rows have the same
/// swizzle in a tile, so that a lane's addresses are one start plus offsets that are known at compile time. Eight lanes
/// copy a row, and all eight know its place.
template <class Config>
struct WarpKeys {
  static constexpr int kCount = Config::kKeys / Config::kWarps;
  static constexpr int kLanes = kWarpSize / kCount;
  static_assert(kLanes == kChunksPerSegment);
  /// Returns the number, among the keys of the step, of key i of this warp, and of the key that the lane copies.
  MLA_DEVICE static int key(int i) { return ptx::warp<Config::kReadsIndexAnew>() + i * Config::kWarps; }
  MLA_DEVICE static int lane_key() { return key(ptx::lane<Config::kReadsIndexAnew>() / kLanes); }
  MLA_DEVICE static int lane_of_key() { return ptx::lane<Config::kReadsIndexAnew>() % kLanes; }
};

/// Says where the parts of a quantized row lie in a row of a tile until they are decoded there, in bytes:
///   0             kLatentsAt            scales_at        rope_at
///   |             | latent codes        | scales | ..... | rotary channels |
///   | latent channels in bf16, when they are decoded .... |
/// A warp decodes kRound channels of a row at a time, from the first on. What it stores overwrites only what it has
/// loaded before: round i stores up to byte 2 kRound (i + 1), and the codes of the next one are behind that.
template <class Config>
struct CodesInTile {
  static constexpr int kRound = kWarpSize * kVector;
  static constexpr int kLatentsAt = Config::kLatentDims - kSegmentBytes;
  static_assert(!Config::kQuantized || Config::kLatentDims <= kRound ||
                (Config::kLatentDims <= 2 * kRound && kLatentsAt + kRound / 2 >= 512));

  MLA_DEVICE explicit CodesInTile(const cuda::KeyPool& pool)
      : scales_at(kLatentsAt + pool.ckv_bytes), rope_at(pool.cache.d_ckv * 2) {}

  /// Returns where byte `at` of a key's row lies in the tile.
  MLA_DEVICE static uint32_t offset(int key, int at) {
    return tile_offset<Config::kRowBytes>(key, at / kChunkBytes) + static_cast<uint32_t>(at % kChunkBytes);
  }

  int scales_at, rope_at;
};

/// Copies the warp's rows of a pool to shared memory by cp.async, all lanes together.
template <class Config>
class RowCopy {
 public:
  /// `place` is that of the lane's key.
  MLA_DEVICE RowCopy(const cuda::AbsorbedArgs& args, const cuda::KeyPool& pool, const KeptPlace<Config>& place)
      : policy_(row_policy(args)), pool_(pool), place_(place) {}

  /// Returns whether rows of all pools are aligned and have all channels that the kernel is for.
  MLA_DEVICE static bool are_whole(const cuda::AbsorbedArgs& args) {
    bool whole = true;
    for (int i = 0; i < args.num_pools(); ++i)
      whole &= args.pools[i].aligned && args.pools[i].ckv_bytes == Config::kLatentDims * Config::kKeyBytes &&
               args.pools[i].kpe_bytes == Config::kRopeDims * Config::kKeyBytes;
    return whole;
  }
  /// Copies rows into a tile, where are_whole() holds.
  MLA_DEVICE static void whole_to_tile(const Place<Config>& place, ptx::SharedAddress tile, ptx::CachePolicy policy) {
    const int first = Keys::lane_of_key();
    const ptx::SharedAddress to = tile + tile_offset<Config::kRowBytes>(Keys::lane_key(), first);
    const Place<Config> row = place;
    const bool valid = row.ckv != nullptr;
    MLA_UNROLL
    for (int chunk = 0; chunk < kTileLatentChunks; chunk += Keys::kLanes)
      ptx::cp_async_16(to + static_cast<uint32_t>(chunk * kChunkBytes), row.ckv + (first + chunk) * kChunkBytes, valid,
                       policy);
    if (first < kTileRopeChunks)
      ptx::cp_async_16(to + kTileLatentChunks * kChunkBytes, row.kpe + first * kChunkBytes, valid, policy);
    static_assert(kTileRopeChunks <= Keys::kLanes);
  }

  /// Copies rows into a tile.
  MLA_DEVICE void to_tile(ptx::SharedAddress tile) const {
    const int latent_chunks = pool_.ckv_bytes / kChunkBytes, rope_chunks = pool_.kpe_bytes / kChunkBytes;
    if (pool_.aligned) {
      copy_plane<kTileLatentChunks, Config::kRowBytes>(place_.ckv, latent_chunks, tile);
      copy_plane<kTileRopeChunks, Config::kRowBytes>(place_.kpe, rope_chunks,
                                                     tile + static_cast<uint32_t>(latent_chunks * kChunkBytes));
    } else {
      copy_unaligned(place_, latent_chunks, rope_chunks, Config::kKeyBytes, Config::kKeyBytes,
                     [&](int chunk) { return tile + tile_offset<Config::kRowBytes>(Keys::lane_key(), chunk); });
    }
  }

  /// Copies quantized rows into a raw stage: the latent channels from byte 0 of a row on, the rotary channels from byte
  /// kLatentDims on.
  MLA_DEVICE void to_raw(ptx::SharedAddress raw, ptx::SharedAddress scales) const {
    if constexpr (!Config::kDecodes) {
      if (pool_.direct && pool_.ckv_bytes == Config::kLatentDims && pool_.kpe_bytes == Config::kRopeDims * 2)
          [[likely]] {
        copy_whole(raw, scales);
        return;
      }
    }
    copy_quantized<Config::kRawRowBytes>(raw, 0, Config::kLatentDims, [&](int at) {
      return scales + static_cast<uint32_t>(Keys::lane_key() * Config::kKeyScaleBytes + at);
    });
  }

  /// Copies quantized rows into a tile, where decode_in_tile() will convert them: to the end of the place of the latent
  /// channels, with the scales behind them, and to the begin of that of the rotary channels.
  MLA_DEVICE void to_tile_as_codes(ptx::SharedAddress tile) const {
    const CodesInTile<Config> codes(pool_);
    copy_quantized<Config::kRowBytes>(tile, codes.kLatentsAt, codes.rope_at, [&](int at) {
      return tile + codes.offset(Keys::lane_key(), codes.scales_at + at);
    });
  }

  /// Returns where a byte of a key lies in a raw stage, whose rows are swizzled as those of a tile are.
  MLA_DEVICE static uint32_t raw_offset(int key, int byte) {
    return tile_offset<Config::kRawRowBytes>(key, byte / kChunkBytes) + static_cast<uint32_t>(byte % kChunkBytes);
  }

 private:
  using Keys = WarpKeys<Config>;
  static constexpr int kRopeChunks = Config::kRopeDims * 2 / kChunkBytes;
  // Of rows in a tile, whose elements all have kKeyBytes.
  static constexpr int kTileLatentChunks = Config::kLatentDims * Config::kKeyBytes / kChunkBytes;
  static constexpr int kTileRopeChunks = Config::kRopeDims * Config::kKeyBytes / kChunkBytes;

  /// Copies `num_chunks` (at most kMostChunks) chunks of the latent or the rotary channels of the lane's row.
  template <int kMostChunks, int kRowBytes>
  MLA_DEVICE void copy_plane(const std::byte* row, int num_chunks, ptx::SharedAddress to) const {
    const int first = Keys::lane_of_key();
    // `to` lies at a multiple of 128 bytes of a row, so that its chunks have the swizzle of the row's first chunks.
    const ptx::SharedAddress start = to + tile_offset<kRowBytes>(Keys::lane_key(), first);
    const bool valid = row != nullptr;
    row += first * kChunkBytes;
    const auto copy = [&](int chunk) {
      ptx::cp_async_16(start + static_cast<uint32_t>(chunk * kChunkBytes), row + chunk * kChunkBytes, valid, policy_);
    };
    if (kMostChunks % Keys::kLanes == 0 && num_chunks == kMostChunks) [[likely]] {
      MLA_UNROLL
      for (int chunk = 0; chunk < kMostChunks; chunk += Keys::kLanes) copy(chunk);
    } else {
      MLA_NO_UNROLL
      for (int chunk = 0; chunk < num_chunks - first; chunk += Keys::kLanes) copy(chunk);
    }
  }

  /// Copies quantized rows of a direct pool that have all channels, the rotary ones in 16 bits, to a raw stage.
  MLA_DEVICE void copy_whole(ptx::SharedAddress raw, ptx::SharedAddress scales) const {
    static_assert(kRopeChunks == Keys::kLanes);
    const int key = Keys::lane_key(), first = Keys::lane_of_key();
    const ptx::SharedAddress to = raw + tile_offset<Config::kRawRowBytes>(key, first);
    const FoundRow row = place_;
    const std::byte* const from = row.ckv + first * kChunkBytes;
    const bool valid = row.ckv != nullptr;
    MLA_UNROLL
    for (int chunk = 0; chunk < Config::kLatentDims / kChunkBytes; chunk += Keys::kLanes)
      ptx::cp_async_16(to + static_cast<uint32_t>(chunk * kChunkBytes), from + chunk * kChunkBytes, valid, policy_);
    ptx::cp_async_16(to + static_cast<uint32_t>(Config::kLatentDims), from + pool_.kpe_distance, valid, policy_);
    if (first < pool_.scale_words)
      ptx::cp_async_4(scales + static_cast<uint32_t>(key * Config::kKeyScaleBytes + first * 4), row.scales + first * 4,
                      valid);
  }

  /// Copies quantized rows: the latent and the rotary channels to bytes `latents_at` and `rope_at` of a row of `rows`,
  /// both multiples of 128, and byte i of the scales of the lane's key to to_scales(i).
  template <int kRowBytes, class ToScales>
  MLA_DEVICE void copy_quantized(ptx::SharedAddress rows, int latents_at, int rope_at,
                                 const ToScales& to_scales) const {
    const int latent_chunks = pool_.ckv_bytes / kChunkBytes, rope_chunks = pool_.kpe_bytes / kChunkBytes;
    const int first = Keys::lane_of_key();
    static_assert(Config::kKeyScaleBytes <= Keys::kLanes * 4 && kRopeChunks <= Keys::kLanes);
    if (pool_.direct) [[likely]] {
      const ptx::SharedAddress to = rows + tile_offset<kRowBytes>(Keys::lane_key(), first);
      const std::byte* const from = place_.ckv + first * kChunkBytes;
      const bool valid = place_.ckv != nullptr;
      MLA_UNROLL
      for (int chunk = 0; chunk < Config::kLatentDims / kChunkBytes; chunk += Keys::kLanes)
        if (first + chunk < latent_chunks)
          ptx::cp_async_16(to + static_cast<uint32_t>(latents_at + chunk * kChunkBytes), from + chunk * kChunkBytes,
                           valid, policy_);
      if (first < rope_chunks)
        ptx::cp_async_16(to + static_cast<uint32_t>(rope_at), from + pool_.kpe_distance, valid, policy_);
      if (first < pool_.scale_words) ptx::cp_async_4(to_scales(first * 4), place_.scales + first * 4, valid);
      copy_kpe_scale<kRowBytes>(rows, rope_at, place_.ckv);
      return;
    }
    const Place<Config> place = place_.ckv == nullptr ? Place<Config>() : row_at<Config>(pool_, place_.at);
    if (pool_.aligned) {
      copy_plane<Config::kLatentDims / kChunkBytes, kRowBytes>(place.ckv, latent_chunks,
                                                               rows + static_cast<uint32_t>(latents_at));
      copy_plane<kRopeChunks, kRowBytes>(place.kpe, rope_chunks, rows + static_cast<uint32_t>(rope_at));
    } else {
      copy_unaligned(place, latent_chunks, rope_chunks, 1, pool_.quantized_kpe ? 1 : 2, [&](int chunk) {
        const int at =
            chunk < latent_chunks ? latents_at / kChunkBytes + chunk : rope_at / kChunkBytes + chunk - latent_chunks;
        return rows + tile_offset<kRowBytes>(Keys::lane_key(), at);
      });
    }
    if (first < pool_.scale_words) copy_scale_word(to_scales(first * 4), place.scales, first * 4);
    copy_kpe_scale<kRowBytes>(rows, rope_at, place.ckv);
  }

  /// Copies the scale of the rotary channels, where the row has one, behind them. They take half the place that they
  /// have in bf16.
  template <int kRowBytes>
  MLA_DEVICE void copy_kpe_scale(ptx::SharedAddress rows, int rope_at, const std::byte* ckv) const {
    if (!pool_.row_kpe_scale || Keys::lane_of_key() != 0) return;
    const int at = rope_at + pool_.kpe_bytes;
    copy_scale_word(rows + tile_offset<kRowBytes>(Keys::lane_key(), at / kChunkBytes), ckv, pool_.cache.kpe_scale_at);
    static_assert(Config::kRopeDims % kChunkBytes == 0);
  }

  /// Copies a row that is not aligned to 16 bytes. The elements of latent and rotary channels have `latent_bytes` and
  /// `rope_bytes` bytes; to(chunk) returns where a chunk goes.
  template <class To>
  MLA_DEVICE static void copy_unaligned(const Place<Config>& place, int latent_chunks, int rope_chunks,
                                        int latent_bytes, int rope_bytes, const To& to) {
    MLA_NO_UNROLL
    for (int chunk = Keys::lane_of_key(); chunk < latent_chunks + rope_chunks; chunk += Keys::kLanes) {
      const bool latent = chunk < latent_chunks;
      const std::byte* of_row = latent ? place.ckv : place.kpe;
      copy_unaligned_chunk(to(chunk), of_row + (latent ? chunk : chunk - latent_chunks) * kChunkBytes,
                           latent ? latent_bytes : rope_bytes, of_row != nullptr);
    }
  }

  ptx::CachePolicy policy_;
  const cuda::KeyPool& pool_;
  const KeptPlace<Config>& place_;
};

/// Returns two e4m3 elements, given in f16, times their scales and rounded to bf16: these are the values that a
/// quantized cache stands for. A NaN may come out with other bits, which nothing depends on.
MLA_DEVICE uint32_t scale_to_bf16(uint32_t pair, float low_scale, float high_scale) {
  float low, high;
  ptx::unpack_f16x2(pair, low, high);
  return ptx::pack_bf16x2(low * low_scale, high * high_scale);
}

/// Returns eight e4m3 elements times their scale, in bf16.
MLA_DEVICE ptx::Vec4 e4m3_to_bf16(uint64_t e4m3, float scale) {
  ptx::Vec4 values;
  MLA_UNROLL
  for (int half = 0; half < 2; ++half) {
    uint32_t low, high;
    ptx::e4m3x4_to_f16x2(static_cast<uint32_t>(e4m3 >> (32 * half)), low, high);
    values.x[2 * half] = scale_to_bf16(low, scale, scale);
    values.x[2 * half + 1] = scale_to_bf16(high, scale, scale);
  }
  return values;
}

/// Decodes 16 neighbouring e4m3 elements and stores them as two chunks of the 128 bytes from `row` on: chunk `chunk`,
/// which is swizzled already, and its neighbour.
MLA_DEVICE void store_e4m3_as_bf16(ptx::SharedAddress row, int chunk, const ptx::Vec4& e4m3, float scale) {
  MLA_UNROLL
  for (int i = 0; i < 2; ++i)
    ptx::store_shared(row + static_cast<uint32_t>((chunk ^ i) * kChunkBytes),
                      e4m3_to_bf16(uint64_t{e4m3.x[2 * i + 1]} << 32 | e4m3.x[2 * i], scale));
}

/// These are the rows that kernels have faster code for: the types of eight neighbouring channels and of their scale in
/// memory, and what both are in bf16.
struct E4m3WithF32Scales {
  using Codes = uint64_t;
  using Scale = float;
  static MLA_DEVICE ptx::Vec4 decode(Codes codes, Scale scale, bool /*ue8m0*/) { return e4m3_to_bf16(codes, scale); }
};
struct E4m3WithUe8m0Scales {
  using Codes = uint64_t;
  using Scale = uint8_t;
  static MLA_DEVICE ptx::Vec4 decode(Codes codes, Scale scale, bool /*ue8m0*/) {
    return e4m3_to_bf16(codes, ue8m0_to_f32(scale));
  }
};
/// Scales are UE8M0 or e4m3. A product has at most six significant bits, and is exact in bf16.
struct E2m1WithByteScales {
  using Codes = uint32_t;
  using Scale = uint8_t;
  static MLA_DEVICE ptx::Vec4 decode(Codes codes, Scale scale, bool ue8m0) {
    float factor, none;
    ptx::unpack_f16x2(ptx::e4m3x2_to_f16x2(scale), factor, none);
    if (ue8m0) factor = ue8m0_to_f32(scale);
    return e2m1x8_to_bf16(codes, ptx::pack_bf16x2(factor, factor));
  }
};

/// Calls f(Rows) with the rows that a pool has; returns false if they have no faster code.
template <class F>
MLA_DEVICE bool with_common_rows(const cuda::KeyPool& pool, const F& f) {
  if (pool.common_e4m3 && pool.ue8m0)
    f(E4m3WithUe8m0Scales{});
  else if (pool.common_e4m3)
    f(E4m3WithF32Scales{});
  else if (pool.common_e2m1)
    f(E2m1WithByteScales{});
  else
    return false;
  return true;
}

/// Converts the latent channels of the warp's rows in a raw stage to bf16 and stores them in the tile.
template <class Config, class Rows>
MLA_DEVICE void decode_latents(const cuda::KeyPool& pool, const std::byte* raw, const std::byte* scales,
                               ptx::SharedAddress tile) {
  using Codes = typename Rows::Codes;
  using Scale = typename Rows::Scale;
  const int num_chunks = pool.cache.d_ckv / kVector, lane = ptx::lane(), warp = ptx::warp();
  MLA_UNROLL
  for (int first = 0; first < Config::kLatentDims / kVector; first += kWarpSize) {
    const int chunk = first + lane, group = chunk >> pool.scale_shift;
    if (chunk >= num_chunks) continue;
    const std::byte* from = raw + RowCopy<Config>::raw_offset(warp, chunk * static_cast<int>(sizeof(Codes)));
    const std::byte* scale_from = scales + warp * Config::kKeyScaleBytes + group * static_cast<int>(sizeof(Scale));
    const ptx::SharedAddress to = tile + tile_offset<Config::kRowBytes>(warp, chunk);
    MLA_UNROLL
    for (int key = 0; key < Config::kKeys; key += Config::kWarps) {
      const Scale scale = *as<Scale>(scale_from + key * Config::kKeyScaleBytes);
      const ptx::Vec4 values = Rows::decode(*as<Codes>(from + key * Config::kRawRowBytes), scale, pool.ue8m0);
      ptx::store_shared(to + static_cast<uint32_t>(key * Config::kRowBytes), values);
    }
  }
}

/// Does the same for all quantized formats: elements of e4m3 or e2m1, scales of any type. The loop is not unrolled,
/// because queries and outputs hold most of the registers: unrolled, 64 rows of cuda_portable spilled 16 bytes (nvcc
/// 13.0, 2026-11-23).
template <class Config>
MLA_DEVICE void decode_any_latents(const cuda::KeyPool& pool, const std::byte* raw, const std::byte* scales,
                                   ptx::SharedAddress tile) {
  const core::Cache& cache = pool.cache;
  const int num_chunks = cache.d_ckv / kVector;
  const bool e2m1 = cache.ckv_dtype == DType::kE2M1;
  MLA_NO_UNROLL
  for (int i = ptx::lane(); i < WarpKeys<Config>::kCount * num_chunks; i += kWarpSize) {
    const int key = WarpKeys<Config>::key(i / num_chunks), chunk = i % num_chunks;
    const std::byte* from = raw + RowCopy<Config>::raw_offset(key, chunk * (e2m1 ? kVector / 2 : kVector));
    const Bits8 bits = e2m1x8_to_e4m3(*as<uint32_t>(from));
    const uint64_t e4m3 = e2m1 ? uint64_t{bits.w[1]} << 32 | bits.w[0] : *as<uint64_t>(from);
    const float scale = load_scale(scales + key * Config::kKeyScaleBytes, cache.scale_type, chunk >> pool.scale_shift,
                                   cache.outer_scale);
    ptx::store_shared(tile + tile_offset<Config::kRowBytes>(key, chunk), e4m3_to_bf16(e4m3, scale));
  }
}

/// Converts the warp's rows of a raw stage to bf16 and stores them in the tile. The rotary channels are bf16 already,
/// or e4m3 with one scale for all of them.
template <class Config>
MLA_DEVICE void decode_raw(const cuda::KeyPool& pool, const std::byte* raw, const std::byte* scales,
                           ptx::SharedAddress tile) {
  if (!with_common_rows(pool, [&]<class Rows>(Rows) { decode_latents<Config, Rows>(pool, raw, scales, tile); }))
    decode_any_latents<Config>(pool, raw, scales, tile);
  const int latent_chunks = pool.cache.d_ckv / kVector, rope_chunks = pool.cache.d_kpe / kVector;
  if (rope_chunks == 0) return;
  const bool quantized = pool.quantized_kpe;
  float kpe_scale = quantized && !pool.row_kpe_scale ? *pool.cache.kpe_scale : 1.0F;
  MLA_NO_UNROLL
  for (int i = ptx::lane(); i < WarpKeys<Config>::kCount * rope_chunks; i += kWarpSize) {
    const int key = WarpKeys<Config>::key(i / rope_chunks), chunk = i % rope_chunks;
    if (pool.row_kpe_scale)
      kpe_scale = *as<float>(raw + RowCopy<Config>::raw_offset(key, Config::kLatentDims + pool.kpe_bytes));
    const std::byte* from =
        raw + RowCopy<Config>::raw_offset(key, Config::kLatentDims + chunk * kVector * (quantized ? 1 : 2));
    ptx::store_shared(tile + tile_offset<Config::kRowBytes>(key, latent_chunks + chunk),
                      quantized ? e4m3_to_bf16(*as<uint64_t>(from), kpe_scale) : *as<ptx::Vec4>(from));
  }
}

/// Converts the latent channels of the warp's rows in a tile to bf16, where they are. Lanes without channels skip
/// single loads and stores: with a branch around all of them, or with both rounds unrolled, nvcc 13.0 spilled more than
/// 500 bytes of 64 rows.
template <class Config, class Rows>
MLA_DEVICE void decode_latents_in_tile(const cuda::KeyPool& pool, ptx::SharedAddress tile) {
  using InTile = CodesInTile<Config>;
  using Codes = typename Rows::Codes;
  using Scale = typename Rows::Scale;
  using Keys = WarpKeys<Config>;
  const InTile in_tile(pool);
  constexpr int kCodeBytes = sizeof(Codes);
  const int num_channels = pool.cache.d_ckv, scale_shift = pool.scale_shift;
  // All keys of a warp have the same swizzle.
  const auto of_key = [](int i) { return static_cast<uint32_t>(i * Config::kWarps * Config::kRowBytes); };
  int channel = ptx::lane() * kVector;
  ptx::SharedAddress from = tile + InTile::offset(Keys::key(0), InTile::kLatentsAt + channel / kVector * kCodeBytes);
  ptx::SharedAddress to = tile + InTile::offset(Keys::key(0), channel * 2);
  MLA_NO_UNROLL
  do {
    const bool exists = channel < num_channels;
    const int scale_at = in_tile.scales_at + (channel / kVector >> scale_shift) * static_cast<int>(sizeof(Scale));
    const ptx::SharedAddress scale_from = tile + InTile::offset(Keys::key(0), scale_at);
    Codes codes[Keys::kCount] = {};
    Scale scales[Keys::kCount] = {};
    MLA_UNROLL
    for (int i = 0; i < Keys::kCount; ++i) {
      if (!exists) continue;
      codes[i] = ptx::load_shared<Codes>(from + of_key(i));
      scales[i] = ptx::load_shared<Scale>(scale_from + of_key(i));
    }
    ptx::sync_warp();  // all lanes have loaded what is overwritten now
    MLA_UNROLL
    for (int i = 0; i < Keys::kCount; ++i)
      if (exists) ptx::store_shared(to + of_key(i), Rows::decode(codes[i], scales[i], pool.ue8m0));
    channel += InTile::kRound;
    from += InTile::kRound / kVector * kCodeBytes;
    to += 2 * InTile::kRound;
  } while (channel < Config::kLatentDims);
}

/// Does the same for all quantized formats: elements of e4m3 or e2m1, scales of any type.
template <class Config>
MLA_DEVICE void decode_any_latents_in_tile(const cuda::KeyPool& pool, std::byte* memory, ptx::SharedAddress tile) {
  using Codes = CodesInTile<Config>;
  const core::Cache& cache = pool.cache;
  const Codes codes(pool);
  const bool e2m1 = cache.ckv_dtype == DType::kE2M1;
  const int scale_bytes = size_of(cache.scale_type);
  MLA_NO_UNROLL
  for (int i = 0; i < WarpKeys<Config>::kCount; ++i) {
    const int key = WarpKeys<Config>::key(i);
    MLA_NO_UNROLL
    for (int first = 0; first < cache.d_ckv; first += Codes::kRound) {
      const int channel = first + ptx::lane() * kVector;
      const bool exists = channel < cache.d_ckv;
      ptx::Vec4 values = {};
      if (exists) {
        const std::byte* const from = memory + Codes::offset(key, Codes::kLatentsAt + (e2m1 ? channel / 2 : channel));
        const Bits8 bits = e2m1x8_to_e4m3(*as<uint32_t>(from));
        const uint64_t e4m3 = e2m1 ? uint64_t{bits.w[1]} << 32 | bits.w[0] : *as<uint64_t>(from);
        const int at = codes.scales_at + (channel / kVector >> pool.scale_shift) * scale_bytes;
        values =
            e4m3_to_bf16(e4m3, load_scale(memory + Codes::offset(key, at), cache.scale_type, 0, cache.outer_scale));
      }
      ptx::sync_warp();  // all lanes have loaded what is overwritten now
      if (exists) ptx::store_shared(tile + Codes::offset(key, channel * 2), values);
    }
  }
}

/// Converts the warp's rows, which to_tile_as_codes() has brought to the tile, to bf16. All lanes of the warp do so
/// together. `memory` is the tile's address too.
template <class Config>
MLA_DEVICE void decode_in_tile(const cuda::KeyPool& pool, std::byte* memory, ptx::SharedAddress tile) {
  using Codes = CodesInTile<Config>;
  using Keys = WarpKeys<Config>;
  if (!with_common_rows(pool, [&]<class Rows>(Rows) { decode_latents_in_tile<Config, Rows>(pool, tile); }))
    decode_any_latents_in_tile<Config>(pool, memory, tile);
  if (!pool.quantized_kpe) return;
  const Codes codes(pool);
  const int channel = Keys::lane_of_key() * kVector;
  const bool exists = channel < pool.cache.d_kpe;
  ptx::Vec4 values = {};
  if (exists) {
    const float scale =
        pool.row_kpe_scale
            ? ptx::load_shared<float>(tile + Codes::offset(Keys::lane_key(), codes.rope_at + pool.kpe_bytes))
            : *pool.cache.kpe_scale;
    values = e4m3_to_bf16(ptx::load_shared<uint64_t>(tile + Codes::offset(Keys::lane_key(), codes.rope_at + channel)),
                          scale);
  }
  ptx::sync_warp();
  if (exists) ptx::store_shared(tile + Codes::offset(Keys::lane_key(), codes.rope_at + channel * 2), values);
}

}  // namespace mla::MLA_CUDA_NAMESPACE
