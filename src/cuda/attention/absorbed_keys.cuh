// SPDX-License-Identifier: Apache-2.0
// Finds the rows of the cache that hold the keys of a segment, copies them to shared memory, and converts quantized
// rows.
#pragma once

#include <algorithm>

#include "cuda/attention/absorbed_args.h"
#include "cuda/attention/key_kind.h"
#include "cuda/tile/channels.cuh"
#include "cuda/tile/page_place.cuh"
#include "cuda/tile/tile.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Holds the addresses of a key's latent channels, rotary channels and scales. They are null where the key has no row;
/// the tile then holds zeros instead.
template <class Config, bool kQuantized = Config::kQuantized>
struct alignas(16) Place {
  const std::byte* ckv = nullptr;
  const std::byte* kpe = nullptr;
};
template <class Config>
struct alignas(8) Place<Config, true> {
  const std::byte* ckv = nullptr;
  const std::byte* kpe = nullptr;
  const std::byte* scales = nullptr;
};

/// Tells where the rows of a segment's keys are found. Every key has an entry in a list: in dense attention the entry
/// is the number of the key's page, in sparse attention the key's slot. In sparse attention the keys of pool 0 come
/// first, padded to a multiple of kPlanKeys, and those of pool 1 follow.
struct KeyList {
  const int32_t* entries[2];
  int32_t second_pool;  // number of the first key of pool 1; INT32_MAX: there is no pool 1
  int32_t length[2];    // keys of each pool; dense: the segment's end

  MLA_DEVICE int pool_of(int32_t key) const { return key >= second_pool ? 1 : 0; }
};

/// Returns how many keys of pool 1 a query token has.
MLA_DEVICE int32_t second_pool_length(const cuda::AbsorbedArgs& args, int32_t token) {
  const cuda::KeyPool& pool = args.pools[1];
  if (pool.topk_length == nullptr) return pool.topk;
  int32_t at = token;
  if (pool.length_per_request && args.queries.indptr == nullptr) {
    at = token / args.queries.uniform_len;
  } else if (pool.length_per_request) {
    int32_t last = args.batch_size;  // the loop leaves in `at` the last request that begins at or before the token
    for (at = 0; last - at > 1;) {
      const int32_t middle = (at + last) / 2;
      if (args.queries.indptr[middle] <= token)
        at = middle;
      else
        last = middle;
    }
  }
  return std::clamp<int32_t>(pool.topk_length[at], 0, pool.topk);
}

MLA_DEVICE KeyList make_key_list(const cuda::AbsorbedArgs& args, const cuda::Segment& segment) {
  if (!args.sparse()) return {{args.pages.of(segment.request), nullptr}, INT32_MAX, {segment.key_end, 0}};
  KeyList list = {{args.pools[0].indices + segment.request * args.pools[0].indices_stride_token, nullptr},
                  INT32_MAX,
                  {segment.kv_len, 0}};
  if (args.num_pools() == 2) {
    list.entries[1] = args.pools[1].indices + segment.request * args.pools[1].indices_stride_token;
    list.second_pool = (segment.kv_len + args.list.step_keys - 1) / args.list.step_keys * args.list.step_keys;
    list.length[1] = second_pool_length(args, segment.request);
  }
  return list;
}

/// Returns the address of a key's entry; null if the segment has no such key.
MLA_DEVICE const int32_t* entry_of(const cuda::AbsorbedArgs& args, const KeyList& list, int32_t key) {
  if (!args.sparse())
    return key < list.length[0] ? list.entries[0] + place_in_pages(key, args.pools[0].page_size).page : nullptr;
  const bool second = list.pool_of(key) == 1;
  const int32_t at = second ? key - list.second_pool : key;
  if (at >= (second ? list.length[1] : list.length[0])) return nullptr;
  return (second ? list.entries[1] : list.entries[0]) + at;
}

/// Returns the addresses of a key's row from the key's entry. A negative entry stands for a key without a row.
template <class Config>
MLA_DEVICE Place<Config> find_place(const cuda::AbsorbedArgs& args, const cuda::KeyPool& pool, int32_t key,
                                    int32_t entry) {
  const core::Cache& cache = pool.cache;
  if (entry < 0 || (args.sparse() && entry >= cache.num_slots())) return {};
  const PagePlace at = place_in_pages(args.sparse() ? entry : key, pool.page_size);
  const int32_t page = args.sparse() ? at.page : entry, offset = at.offset;
  Place<Config> place;
  place.ckv = cache.ckv.row(page, offset);
  place.kpe = cache.kpe.row(page, offset);
  if constexpr (Config::kQuantized) place.scales = cache.scales.row(page, offset);
  return place;
}

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

/// Copies the warp's rows of a pool to shared memory by cp.async, all lanes together. Rows are copied with
/// L2::evict_first, so that they leave the L2 cache before the instructions and the plan that the next run needs:
/// blocks that read the same rows do so at the same time. This took fp8_ds_mla of 128 heads from 238 to 233 us, and of
/// 32 heads from 133 to 128 us (H200, 2026-11-21).
template <class Config>
class RowCopy {
 public:
  /// `place` is that of the lane's key.
  MLA_DEVICE RowCopy(const cuda::KeyPool& pool, const Place<Config>& place) : pool_(pool), place_(place) {}

  /// Returns whether rows of all pools are aligned and have all channels that the kernel is for.
  MLA_DEVICE static bool are_whole(const cuda::AbsorbedArgs& args) {
    bool whole = true;
    for (int i = 0; i < args.num_pools(); ++i)
      whole &= args.pools[i].aligned && args.pools[i].ckv_bytes == Config::kLatentDims * Config::kKeyBytes &&
               args.pools[i].kpe_bytes == Config::kRopeDims * Config::kKeyBytes;
    return whole;
  }
  /// Copies rows into a tile, where are_whole() holds.
  MLA_DEVICE static void whole_to_tile(const Place<Config>& place, ptx::SharedAddress tile) {
    const int first = Keys::lane_of_key();
    const ptx::SharedAddress to = tile + tile_offset<Config::kRowBytes>(Keys::lane_key(), first);
    const Place<Config> row = place;
    const bool valid = row.ckv != nullptr;
    MLA_UNROLL
    for (int chunk = 0; chunk < kTileLatentChunks; chunk += Keys::kLanes)
      ptx::cp_async_16(to + static_cast<uint32_t>(chunk * kChunkBytes), row.ckv + (first + chunk) * kChunkBytes, valid,
                       ptx::evict_first());
    if (first < kTileRopeChunks)
      ptx::cp_async_16(to + kTileLatentChunks * kChunkBytes, row.kpe + first * kChunkBytes, valid, ptx::evict_first());
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
      copy_unaligned(latent_chunks, rope_chunks, Config::kKeyBytes, Config::kKeyBytes,
                     [&](int chunk) { return tile + tile_offset<Config::kRowBytes>(Keys::lane_key(), chunk); });
    }
  }

  /// Copies quantized rows into a raw stage: the latent channels from byte 0 of a row on, the rotary channels from byte
  /// kLatentDims on.
  MLA_DEVICE void to_raw(ptx::SharedAddress raw, ptx::SharedAddress scales) const {
    const int latent_chunks = pool_.ckv_bytes / kChunkBytes, rope_chunks = pool_.kpe_bytes / kChunkBytes;
    if (pool_.aligned) {
      copy_plane<Config::kLatentDims / kChunkBytes, Config::kRawRowBytes>(place_.ckv, latent_chunks, raw);
      copy_plane<kRopeChunks, Config::kRawRowBytes>(place_.kpe, rope_chunks, raw + Config::kLatentDims);
    } else {
      copy_unaligned(latent_chunks, rope_chunks, 1, pool_.quantized_kpe ? 1 : 2, [&](int chunk) {
        const int at =
            chunk < latent_chunks ? chunk * kChunkBytes : Config::kLatentDims + (chunk - latent_chunks) * kChunkBytes;
        return raw + raw_offset(Keys::lane_key(), at);
      });
    }
    static_assert(Config::kKeyScaleBytes <= Keys::kLanes * 4);
    if (Keys::lane_of_key() < pool_.scale_words)
      copy_scale_word(
          scales + static_cast<uint32_t>(Keys::lane_key() * Config::kKeyScaleBytes + Keys::lane_of_key() * 4),
          place_.scales, Keys::lane_of_key() * 4);
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
      ptx::cp_async_16(start + static_cast<uint32_t>(chunk * kChunkBytes), row + chunk * kChunkBytes, valid,
                       ptx::evict_first());
    };
    if (kMostChunks % Keys::kLanes == 0 && num_chunks == kMostChunks) [[likely]] {
      MLA_UNROLL
      for (int chunk = 0; chunk < kMostChunks; chunk += Keys::kLanes) copy(chunk);
    } else {
      MLA_NO_UNROLL
      for (int chunk = 0; chunk < num_chunks - first; chunk += Keys::kLanes) copy(chunk);
    }
  }

  /// Copies a row that is not aligned to 16 bytes. The elements of latent and rotary channels have `latent_bytes` and
  /// `rope_bytes` bytes; to(chunk) returns where a chunk goes.
  template <class To>
  MLA_DEVICE void copy_unaligned(int latent_chunks, int rope_chunks, int latent_bytes, int rope_bytes,
                                 const To& to) const {
    MLA_NO_UNROLL
    for (int chunk = Keys::lane_of_key(); chunk < latent_chunks + rope_chunks; chunk += Keys::kLanes) {
      const bool latent = chunk < latent_chunks;
      const std::byte* of_row = latent ? place_.ckv : place_.kpe;
      copy_unaligned_chunk(to(chunk), of_row + (latent ? chunk : chunk - latent_chunks) * kChunkBytes,
                           latent ? latent_bytes : rope_bytes, of_row != nullptr);
    }
  }

  const cuda::KeyPool& pool_;
  const Place<Config>& place_;
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

/// Converts the latent channels of the warp's rows in a raw stage to bf16 and stores them in the tile. The elements are
/// e4m3, the scales f32 or UE8M0.
template <class Config, bool kUe8m0>
MLA_DEVICE void decode_latents(const cuda::KeyPool& pool, const std::byte* raw, const std::byte* scales,
                               ptx::SharedAddress tile) {
  const int num_chunks = pool.cache.d_ckv / kVector, lane = ptx::lane(), warp = ptx::warp();
  MLA_UNROLL
  for (int first = 0; first < Config::kLatentDims / kVector; first += kWarpSize) {
    const int chunk = first + lane, group = chunk >> pool.scale_shift;
    if (chunk >= num_chunks) continue;
    const std::byte* from = raw + RowCopy<Config>::raw_offset(warp, chunk * kVector);
    const std::byte* scale_from =
        scales + warp * Config::kKeyScaleBytes + group * size_of(kUe8m0 ? ScaleType::kUE8M0 : ScaleType::kF32);
    const ptx::SharedAddress to = tile + tile_offset<Config::kRowBytes>(warp, chunk);
    MLA_UNROLL
    for (int key = 0; key < Config::kKeys; key += Config::kWarps) {
      const std::byte* of_key = scale_from + key * Config::kKeyScaleBytes;
      const float scale = kUe8m0 ? ue8m0_to_f32(static_cast<uint8_t>(*of_key)) : *as<float>(of_key);
      const ptx::Vec4 values = e4m3_to_bf16(*as<uint64_t>(from + key * Config::kRawRowBytes), scale);
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
  if (!pool.common_e4m3)
    decode_any_latents<Config>(pool, raw, scales, tile);
  else if (pool.ue8m0)
    decode_latents<Config, true>(pool, raw, scales, tile);
  else
    decode_latents<Config, false>(pool, raw, scales, tile);
  const int latent_chunks = pool.cache.d_ckv / kVector, rope_chunks = pool.cache.d_kpe / kVector;
  if (rope_chunks == 0) return;
  const bool quantized = pool.quantized_kpe;
  const float kpe_scale = quantized ? *pool.cache.kpe_scale : 1.0F;
  MLA_NO_UNROLL
  for (int i = ptx::lane(); i < WarpKeys<Config>::kCount * rope_chunks; i += kWarpSize) {
    const int key = WarpKeys<Config>::key(i / rope_chunks), chunk = i % rope_chunks;
    const std::byte* from =
        raw + RowCopy<Config>::raw_offset(key, Config::kLatentDims + chunk * kVector * (quantized ? 1 : 2));
    ptx::store_shared(tile + tile_offset<Config::kRowBytes>(key, latent_chunks + chunk),
                      quantized ? e4m3_to_bf16(*as<uint64_t>(from), kpe_scale) : *as<ptx::Vec4>(from));
  }
}

}  // namespace mla::MLA_CUDA_NAMESPACE
