// SPDX-License-Identifier: Apache-2.0
// The decode warps: they turn quantized rows that have landed in shared memory into bf16. Each has its keys of every
// step.
#pragma once

#include "cuda/portable/specialized_block.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// A warp's landed rows: latent codes, rotary channels `pool.landed_rope_at` bytes behind the first; and their scales.
struct LandedRows {
  ptx::SharedAddress rows, scales;
  uint32_t scale_pitch;  // bytes from one row's to the next one's
};

/// Latent channels: e4m3 times scale, rounded to bf16. `to` is where the first row begins. All is loaded before
/// anything is stored, as stores keep later loads waiting. Where there are fewer channels than the tile has room for,
/// what is written behind them is not meant.
template <class Config, int kKeys, bool kUe8m0>
MLA_DEVICE void decode_landed_latents(const cuda::KeyPool& pool, const LandedRows& from, ptx::SharedAddress to) {
  constexpr int kTurns = Config::kLatentDims / kVector / kWarpSize;
  uint64_t codes[kKeys][kTurns];
  float scale[kKeys][kTurns];
  MLA_UNROLL
  for (int turn = 0; turn < kTurns; ++turn) {
    const int chunk = turn * kWarpSize + ptx::lane(), group = chunk >> pool.scale_shift;
    const ptx::SharedAddress scales = from.scales + static_cast<uint32_t>(group * (kUe8m0 ? 1 : 4));
    MLA_UNROLL
    for (int key = 0; key < kKeys; ++key) {
      codes[key][turn] =
          ptx::load_shared<uint64_t>(from.rows + static_cast<uint32_t>(key * Config::kRawPitch + chunk * kVector));
      const ptx::SharedAddress of_key = scales + static_cast<uint32_t>(key) * from.scale_pitch;
      scale[key][turn] = kUe8m0 ? ue8m0_to_f32(ptx::load_shared<uint8_t>(of_key)) : ptx::load_shared<float>(of_key);
    }
  }
  MLA_UNROLL
  for (int turn = 0; turn < kTurns; ++turn) MLA_UNROLL
  for (int key = 0; key < kKeys; ++key)
    ptx::store_shared(
        to + static_cast<uint32_t>(key * Config::kKeyPitch + (turn * kWarpSize + ptx::lane()) * kChunkBytes),
        decode_codes(codes[key][turn], scale[key][turn]));
}

/// Whole rows. The rotary channels are bf16 already, or have a scale of their own.
template <class Config, int kKeys>
MLA_DEVICE void decode_landed_rows(const cuda::KeyPool& pool, const LandedRows& from, ptx::SharedAddress to) {
  const core::Cache& cache = pool.cache;
  if (is_ue8m0(cache.layout.scale_kind))
    decode_landed_latents<Config, kKeys, true>(pool, from, to);
  else
    decode_landed_latents<Config, kKeys, false>(pool, from, to);
  ptx::sync_warp();  // rotary channels may follow where nothing was meant
  constexpr int kRopeChunks = Config::kTailDims / kVector;
  static_assert(kKeys * kRopeChunks == kWarpSize);
  const int key = ptx::lane() / kRopeChunks, chunk = ptx::lane() % kRopeChunks;
  if (chunk >= cache.d_kpe / kVector) return;
  const bool coded = cache.layout.rope_element_bytes == 1;
  const ptx::SharedAddress rope = from.rows + static_cast<uint32_t>(pool.landed_rope_at + key * Config::kRawPitch);
  to += static_cast<uint32_t>(key * Config::kKeyPitch + cache.d_ckv * 2 + chunk * kChunkBytes);
  if (coded)
    ptx::store_shared(to, decode_codes(ptx::load_shared<uint64_t>(rope + static_cast<uint32_t>(chunk * kVector)),
                                       cache.kpe_scale != nullptr ? *cache.kpe_scale : 1.0F));
  else
    ptx::store_shared(to, ptx::load_shared<ptx::Vec4>(rope + static_cast<uint32_t>(chunk * kChunkBytes)));
}

template <class Config>
class DecodeRole : SpecializedBlock<Config> {
  using Block = SpecializedBlock<Config>;
  using Block::args_, Block::unit;

 public:
  using Block::next_unit;

  MLA_DEVICE explicit DecodeRole(const cuda::AbsorbedArgs& args) : Block(args) {}

  MLA_DEVICE void compute() {
    int32_t key = unit().segment.key_begin;
    MLA_NO_UNROLL
    for (const uint32_t end = unit().step_end; next_ < end; ++next_, key += Config::kKeys) step(next_, key);
    Block::leave_unit();
  }

 private:
  static constexpr int kWarpKeys = Config::kKeys / std::max(Config::kDecodeWarps, 1);

  MLA_DEVICE static int decode_warp() { return ptx::warp() - Config::kFirstDecodeWarp; }

  MLA_DEVICE void step(uint32_t n, int32_t key) const {
    ptx::mbarrier_wait(Block::landed(n), Block::raw_parity(n));
    if (n >= Config::kStages) ptx::mbarrier_wait(Block::free(n), Block::stage_parity(n - Config::kStages));
    if (unit().keys.pool_of(key) == 0)  // a pool chosen by an index would be read by slow loads
      decode(args_.pools[0], n);
    else
      decode(args_.pools[1], n);
    ptx::sync_warp();
    if (ptx::lane() != 0) return;
    if (decode_warp() == 0) *Block::valid(n) = *Block::raw_valid(n);
    ptx::mbarrier_arrive(Block::decoded(n));
    ptx::mbarrier_arrive(Block::full(n));
  }

  MLA_DEVICE void decode(const cuda::KeyPool& pool, uint32_t n) const {
    const auto first_key = static_cast<uint32_t>(decode_warp() * kWarpKeys);
    LandedRows from = {Block::raw_stage(n) + first_key * Config::kRawPitch,
                       Block::raw_scales(n) + first_key * Config::kKeyScaleBytes, Config::kKeyScaleBytes};
    if (pool.scales_inside) {
      from.scales = from.rows + static_cast<uint32_t>(pool.cache.d_ckv);
      from.scale_pitch = Config::kRawPitch;
    }
    decode_landed_rows<Config, kWarpKeys>(pool, from, Block::stage(n) + first_key * Config::kKeyPitch);
  }

  uint32_t next_ = 0;  // number of the next step
};

}  // namespace mla::MLA_CUDA_NAMESPACE
