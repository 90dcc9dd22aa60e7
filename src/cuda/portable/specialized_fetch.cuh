// SPDX-License-Identifier: Apache-2.0
// The fetch warps: they send for the rows of keys, as soon as their stages are free. Each has 16 keys of every step, a
// lane one key.
#pragma once

#include "cuda/portable/specialized_block.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

template <class Config>
class FetchRole : SpecializedBlock<Config> {
  using Block = SpecializedBlock<Config>;
  using Block::args_, Block::memory_, Block::shared_, Block::unit;

 public:
  using Block::next_unit;

  MLA_DEVICE explicit FetchRole(const cuda::AbsorbedArgs& args) : Block(args) {}

  MLA_DEVICE void compute() {
    key_ = unit().segment.key_begin + first_key() + ptx::lane();
    next_entry_ = entry_of_key(key_);
    const int num_steps = Block::num_steps(), before_queries = std::min(num_steps, Config::kStages - 1);
    MLA_NO_UNROLL
    for (int step = 0; step < before_queries; ++step) fetch();
    // The last stage held queries on their way into registers: the first scores tell that they are there.
    if (num_steps > before_queries)
      for (int pair = 0; pair < 2; ++pair)
        ptx::mbarrier_wait(Block::scored(pair), Block::score_parity(first_of_segment_));
    MLA_NO_UNROLL
    for (int step = before_queries; step < num_steps; ++step) {
      if (n_ >= Config::kStages) ptx::mbarrier_wait(Block::free(n_), Block::stage_parity(n_ - Config::kStages));
      fetch();
    }
    first_of_segment_ = n_;
    Block::end_segment();
  }

 private:
  static constexpr int kWarpKeys = Config::kKeys / Config::kFetchWarps;
  static constexpr uint32_t kAllKeys = (1U << kWarpKeys) - 1;

  MLA_DEVICE static int fetch_warp() { return ptx::warp() - Config::kFirstFetchWarp; }
  MLA_DEVICE static bool has_key() { return ptx::lane() < kWarpKeys; }
  MLA_DEVICE static int first_key() { return fetch_warp() * kWarpKeys; }

  MLA_DEVICE int32_t entry_of_key(int32_t key) const {
    const int32_t* from = has_key() ? entry_of(args_, unit().keys, key) : nullptr;
    return from != nullptr ? *from : -1;
  }

  /// Sends for the warp's rows of the next step. (A pool chosen by an index would be read by slow loads.)
  MLA_DEVICE void fetch() {
    if (unit().keys.pool_of(key_ - ptx::lane()) == 0)
      fetch(args_.pools[0]);
    else
      fetch(args_.pools[1]);
    key_ += Config::kKeys;
    ++n_;
  }
  MLA_DEVICE void fetch(const cuda::KeyPool& pool) {
    const Place<Config> place = find_place<Config>(args_, pool.cache, key_, next_entry_);
    next_entry_ = entry_of_key(key_ + Config::kKeys);
    const uint32_t valid = ptx::ballot(place.ckv != nullptr);
    const uint32_t latent_bytes = static_cast<uint32_t>(pool.cache.d_ckv) * 2;
    const uint32_t rope_bytes = static_cast<uint32_t>(pool.cache.d_kpe) * 2;
    if ((~valid & kAllKeys) != 0) [[unlikely]]
      clear_rows(~valid, latent_bytes + rope_bytes);
    if (!pool.aligned) [[unlikely]]
      copy_rows_slowly(valid, place, latent_bytes, rope_bytes);
    if (has_key()) {
      ptx::store_shared(place_of(ptx::lane()), place.ckv);
      ptx::store_shared(place_of(ptx::lane()) + 8, place.kpe);
    }
    ptx::sync_warp();  // the places, and rows of zeros
    const bool whole = ptx::all(place.kpe == place.ckv + latent_bytes || place.ckv == nullptr);
    if (ptx::elect()) {
      Block::valid(n_)[fetch_warp()] = static_cast<uint16_t>(valid);
      ptx::mbarrier_arrive_expect_bytes(
          Block::full(n_),
          pool.aligned ? static_cast<uint32_t>(std::popcount(valid)) * (latent_bytes + rope_bytes) : 0U);
      if (pool.aligned) copy_rows(valid, latent_bytes, rope_bytes, whole);
    }
    ptx::sync_warp();  // the places may be written again
  }

  MLA_DEVICE ptx::SharedAddress place_of(int key) const {
    return shared_ + static_cast<uint32_t>(Config::kPlaceOffset + (first_key() + key) * 16);
  }

  /// For one lane: the instruction takes its operands from the whole warp, so that several would take turns. `whole`:
  /// both parts of all rows are one.
  MLA_DEVICE void copy_rows(uint32_t keys, uint32_t latent_bytes, uint32_t rope_bytes, bool whole) const {
    const ptx::SharedAddress bar = Block::full(n_), to = row_of_stage(0);
    if (whole && (keys & kAllKeys) == kAllKeys) {
      MLA_UNROLL
      for (int key = 0; key < kWarpKeys; ++key)
        ptx::bulk_copy(to + static_cast<uint32_t>(key * Config::kKeyPitch),
                       ptx::load_shared<const std::byte*>(place_of(key)), latent_bytes + rope_bytes, bar);
      return;
    }
    MLA_NO_UNROLL
    for (int key = 0; key < kWarpKeys; ++key) {
      if ((keys >> key & 1U) == 0) continue;
      const ptx::SharedAddress row = to + static_cast<uint32_t>(key * Config::kKeyPitch);
      ptx::bulk_copy(row, ptx::load_shared<const std::byte*>(place_of(key)), latent_bytes, bar);
      if (rope_bytes != 0)
        ptx::bulk_copy(row + latent_bytes, ptx::load_shared<const std::byte*>(place_of(key) + 8), rope_bytes, bar);
    }
  }

  /// Of the warp's key `key`.
  MLA_DEVICE ptx::SharedAddress row_of_stage(int key) const {
    return Block::stage(n_) + static_cast<uint32_t>((first_key() + key) * Config::kKeyPitch);
  }

  /// Keys that are not there are rows of zeros.
  MLA_DEVICE void clear_rows(uint32_t keys, uint32_t bytes) const {
    MLA_NO_UNROLL
    for (int key = 0; key < kWarpKeys; ++key) {
      if ((keys >> key & 1U) == 0) continue;
      for (auto at = static_cast<uint32_t>(ptx::lane() * kChunkBytes); at < bytes; at += kWarpSize * kChunkBytes)
        ptx::store_shared(row_of_stage(key) + at, ptx::Vec4{});
    }
    ptx::fence_async_proxy();  // rows will land here
  }

  MLA_DEVICE void copy_rows_slowly(uint32_t keys, const Place<Config>& place, uint32_t latent_bytes,
                                   uint32_t rope_bytes) const {
    MLA_NO_UNROLL
    for (int key = 0; key < kWarpKeys; ++key) {
      const std::byte* ckv = of_lane(place.ckv, key);
      const std::byte* kpe = of_lane(place.kpe, key);
      if ((keys >> key & 1U) == 0) continue;
      for (auto at = static_cast<uint32_t>(ptx::lane() * kChunkBytes); at < latent_bytes + rope_bytes;
           at += kWarpSize * kChunkBytes)
        copy_chunk_slowly(row_of_stage(key) + at, at < latent_bytes ? ckv + at : kpe + (at - latent_bytes), 2, true);
    }
    ptx::fence_async_proxy();
  }

  MLA_DEVICE static const std::byte* of_lane(const std::byte* pointer, int lane) {
    const auto bits = reinterpret_cast<uint64_t>(pointer);
    const uint32_t low = ptx::shuffle(static_cast<uint32_t>(bits), lane);
    const uint32_t high = ptx::shuffle(static_cast<uint32_t>(bits >> 32), lane);
    return reinterpret_cast<const std::byte*>(uint64_t{high} << 32 | low);
  }

  int n_ = 0;                 // number of the next step
  int first_of_segment_ = 0;  // number of the segment's first step
  int32_t key_ = 0;           // of the lane in the next step
  int32_t next_entry_ = -1;   // of that key
};

}  // namespace mla::MLA_CUDA_NAMESPACE
