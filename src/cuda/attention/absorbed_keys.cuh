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
struct alignas(8) Place {
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

/// Copies a key's scales, whose bytes are padded to `words` words of 4 bytes. Where `from` is null it stores zeros.
MLA_DEVICE void copy_scales(int words, ptx::SharedAddress to, const std::byte* from) {
  const bool valid = from != nullptr;
  for (int word = 0; word < words; ++word, from += 4, to += 4) {
    if (is_aligned(from, 4))
      ptx::cp_async_4(to, from, valid);
    else
      ptx::store_shared(to, valid ? load_f32_anywhere(from) : 0.0F);
  }
}

/// Copies rows of a pool to shared memory by cp.async. Warp w takes keys w, w + kWarps, ...: their rows have the same
/// swizzle in a tile, so that a lane's addresses are one start plus offsets that are known at compile time. Rows are
/// copied with L2::evict_first, so that they leave the L2 cache before the instructions and the plan that the next run
/// needs: blocks that read the same rows do so at the same time. Gain: fp8_ds_mla of 128 heads 238 to 233 us, of 32
/// heads 133 to 128 us (H200, 2026-11-21).
template <class Config>
class RowCopy {
 public:
  MLA_DEVICE explicit RowCopy(const cuda::KeyPool& pool) : pool_(pool) {}

  /// Copies 16-bit rows into a tile.
  MLA_DEVICE void to_tile(ptx::SharedAddress tile, ptx::SharedAddress places) const {
    const int latent_chunks = pool_.ckv_bytes / kChunkBytes, rope_chunks = pool_.kpe_bytes / kChunkBytes;
    if (pool_.aligned) {
      copy_plane<Config::kLatentDims / kVector, Config::kRowBytes>(false, latent_chunks, tile, places);
      copy_plane<kRopeChunks, Config::kRowBytes>(true, rope_chunks,
                                                 tile + static_cast<uint32_t>(latent_chunks * kChunkBytes), places);
    } else {
      copy_unaligned(places, latent_chunks, rope_chunks, 2, 2,
                     [&](int key, int chunk) { return tile + tile_offset<Config::kRowBytes>(key, chunk); });
    }
  }

  /// Copies quantized rows into a raw stage: the latent channels from byte 0 of a row on, the rotary channels from byte
  /// kLatentDims on.
  MLA_DEVICE void to_raw(ptx::SharedAddress raw, ptx::SharedAddress scales, ptx::SharedAddress places) const {
    const int latent_chunks = pool_.ckv_bytes / kChunkBytes, rope_chunks = pool_.kpe_bytes / kChunkBytes;
    if (pool_.aligned) {
      copy_plane<Config::kLatentDims / kChunkBytes, Config::kRawRowBytes>(false, latent_chunks, raw, places);
      copy_plane<kRopeChunks, Config::kRawRowBytes>(true, rope_chunks, raw + Config::kLatentDims, places);
    } else {
      copy_unaligned(places, latent_chunks, rope_chunks, 1, pool_.quantized_kpe ? 1 : 2, [&](int key, int chunk) {
        const int at =
            chunk < latent_chunks ? chunk * kChunkBytes : Config::kLatentDims + (chunk - latent_chunks) * kChunkBytes;
        return raw + raw_offset(key, at);
      });
    }
    if (ptx::thread_index() < Config::kKeys) {
      const auto key = static_cast<uint32_t>(ptx::thread_index());
      const auto* from =
          ptx::load_shared<const std::byte*>(places + key * static_cast<uint32_t>(sizeof(Place<Config>)) + kScalesAt);
      copy_scales(pool_.scale_words, scales + key * Config::kKeyScaleBytes, from);
    }
  }

  /// Returns where a byte of a key lies in a raw stage, whose rows are swizzled as those of a tile are.
  MLA_DEVICE static uint32_t raw_offset(int key, int byte) {
    return tile_offset<Config::kRawRowBytes>(key, byte / kChunkBytes) + static_cast<uint32_t>(byte % kChunkBytes);
  }

 private:
  static constexpr int kRopeChunks = Config::kRopeDims * 2 / kChunkBytes;
  static constexpr int kKeysPerWarp = Config::kKeys / Config::kWarps;
  static constexpr int kKpeAt = 8, kScalesAt = 16;  // bytes from the begin of a Place

  /// Returns the address of a key's latent or rotary channels.
  MLA_DEVICE static const std::byte* row_of(ptx::SharedAddress places, int key, bool kpe) {
    return ptx::load_shared<const std::byte*>(
        places + static_cast<uint32_t>(key * static_cast<int>(sizeof(Place<Config>)) + (kpe ? kKpeAt : 0)));
  }

  /// Copies `num_chunks` (at most kMostChunks) chunks of the latent or the rotary channels of every row. As many lanes
  /// as a row may have chunks work on one row; the other lanes of the warp work on further rows.
  template <int kMostChunks, int kRowBytes>
  MLA_DEVICE void copy_plane(bool kpe, int num_chunks, ptx::SharedAddress to, ptx::SharedAddress places) const {
    constexpr int kLanes = std::min(kMostChunks, kWarpSize), kRowsAtOnce = kWarpSize / kLanes;
    const int first = ptx::lane() % kLanes, key = ptx::warp() + ptx::lane() / kLanes * Config::kWarps;
    // `to` lies at a multiple of 128 bytes of a row, so that its chunks have the swizzle of the row's first chunks.
    const ptx::SharedAddress start = to + tile_offset<kRowBytes>(key, first);
    MLA_UNROLL
    for (int row = 0; row < kKeysPerWarp; row += kRowsAtOnce) {
      const std::byte* of_row = row_of(places, key + row * Config::kWarps, kpe);
      const bool valid = of_row != nullptr;
      const std::byte* from = of_row + first * kChunkBytes;
      MLA_UNROLL
      for (int chunk = 0; chunk < kMostChunks; chunk += kLanes)
        if (first + chunk < num_chunks)
          ptx::cp_async_16(start + static_cast<uint32_t>(row * Config::kWarps * kRowBytes + chunk * kChunkBytes),
                           from + chunk * kChunkBytes, valid, ptx::evict_first());
    }
  }

  /// Copies rows that are not aligned to 16 bytes. The elements of latent and rotary channels have `latent_bytes` and
  /// `rope_bytes` bytes; to(key, chunk) returns where a chunk goes.
  template <class To>
  MLA_DEVICE void copy_unaligned(ptx::SharedAddress places, int latent_chunks, int rope_chunks, int latent_bytes,
                                 int rope_bytes, const To& to) const {
    MLA_NO_UNROLL
    for (int i = ptx::thread_index(); i < Config::kKeys * (latent_chunks + rope_chunks); i += Config::kThreads) {
      const int key = i / (latent_chunks + rope_chunks), chunk = i % (latent_chunks + rope_chunks);
      const bool latent = chunk < latent_chunks;
      const std::byte* of_row = row_of(places, key, !latent);
      copy_unaligned_chunk(to(key, chunk), of_row + (latent ? chunk : chunk - latent_chunks) * kChunkBytes,
                           latent ? latent_bytes : rope_bytes, of_row != nullptr);
    }
  }

  const cuda::KeyPool& pool_;
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

/// Converts the latent channels of a raw stage to bf16 and stores them in the tile. The elements are e4m3, the scales
/// f32 or UE8M0. Warps share the keys as in RowCopy.
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
  for (int i = ptx::thread_index(); i < Config::kKeys * num_chunks; i += Config::kThreads) {
    const int key = i / num_chunks, chunk = i % num_chunks;
    const std::byte* from = raw + RowCopy<Config>::raw_offset(key, chunk * (e2m1 ? kVector / 2 : kVector));
    const Bits8 bits = e2m1x8_to_e4m3(*as<uint32_t>(from));
    const uint64_t e4m3 = e2m1 ? uint64_t{bits.w[1]} << 32 | bits.w[0] : *as<uint64_t>(from);
    const float scale = load_scale(scales + key * Config::kKeyScaleBytes, cache.scale_type, chunk >> pool.scale_shift,
                                   cache.outer_scale);
    ptx::store_shared(tile + tile_offset<Config::kRowBytes>(key, chunk), e4m3_to_bf16(e4m3, scale));
  }
}

/// Converts a raw stage to bf16 and stores it in the tile. The rotary channels are bf16 already, or e4m3 with one scale
/// for all of them.
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
  for (int i = ptx::thread_index(); i < Config::kKeys * rope_chunks; i += Config::kThreads) {
    const int key = i / rope_chunks, chunk = i % rope_chunks;
    const std::byte* from =
        raw + RowCopy<Config>::raw_offset(key, Config::kLatentDims + chunk * kVector * (quantized ? 1 : 2));
    ptx::store_shared(tile + tile_offset<Config::kRowBytes>(key, latent_chunks + chunk),
                      quantized ? e4m3_to_bf16(*as<uint64_t>(from), kpe_scale) : *as<ptx::Vec4>(from));
  }
}

}  // namespace mla::MLA_CUDA_NAMESPACE
