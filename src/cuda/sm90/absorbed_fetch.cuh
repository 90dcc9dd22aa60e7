// SPDX-License-Identifier: Apache-2.0
// The warps that fetch rows: 16 keys of every step each. The first of them describes the units, as it needs them first.
#pragma once

#include "cuda/sm90/absorbed_block.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

template <class Config>
class WgmmaFetch : WgmmaBlock<Config> {
  using Block = WgmmaBlock<Config>;
  using Block::args_, Block::unit;

 public:
  MLA_DEVICE WgmmaFetch(const cuda::AbsorbedArgs& args, const UnitWalk& walk) : Block(args), walk_(walk) {}

  MLA_DEVICE bool next_unit() {
    if (ptx::warp() == 0 && ptx::lane() == 0) describe_unit(Block::unit_number() + 1);
    ptx::sync_warp();
    return Block::next_unit();
  }

  MLA_DEVICE void compute() {
    keys_ = unit().keys;
    key_ = unit().segment.key_begin + first_row() + (ptx::lane() & (kWarpKeys - 1));
    next_entry_ = load_entry(key_);
    find_next();
    const uint32_t end = unit().step_end;
    MLA_NO_UNROLL
    for (; next_ < end; ++next_) {
      if (next_ >= Config::kStages)
        ptx::mbarrier_wait(Block::free(next_, half()), Block::parity(next_ - Config::kStages));
      fetch(next_);
      find_next();
    }
    Block::leave_unit();
  }

 private:
  static constexpr int kWarpKeys = Block::kWarpRows;

  MLA_DEVICE static int first_row() { return ptx::warp() * kWarpKeys; }
  MLA_DEVICE static int half() { return first_row() / Config::kHalfKeys; }

  MLA_DEVICE void describe_unit(int number) {
    if (number >= 2) ptx::mbarrier_wait(Block::left(number), Block::unit_parity(number - 2));
    walk_.describe_next<Config>(args_, Block::unit(number));
    ptx::mbarrier_arrive(Block::described(number));
  }

  MLA_DEVICE int32_t load_entry(int32_t key) const {
    const int32_t* from = entry_of(args_, keys_, key);
    return from != nullptr ? *from : -1;
  }

  /// Finds the row of the lane's key (lane and lane + 16 have the same) in the step after the last one found.
  MLA_DEVICE void find_next() {
    in_second_pool_ = keys_.pool_of(key_) == 1;  // the same for all keys of a step
    // A pool chosen by an index would be read by slow loads.
    place_ = in_second_pool_ ? find_place<Config>(args_, args_.pools[1].cache, key_, next_entry_)
                             : find_place<Config>(args_, args_.pools[0].cache, key_, next_entry_);
    key_ += Config::kKeys;
    next_entry_ = load_entry(key_);
  }

  /// Sends for the warp's rows of step n, which are found.
  MLA_DEVICE void fetch(uint32_t n) const {
    const uint32_t there = ptx::ballot(place_.ckv != nullptr);  // the upper half repeats the lower
    if (ptx::lane() == 0) Block::valid(n)[ptx::warp()] = static_cast<uint16_t>(there);
    const cuda::KeyPool& pool = in_second_pool_ ? args_.pools[1] : args_.pools[0];
    const int d_ckv = pool.cache.d_ckv;
    const auto arrived = [&](int piece) {
      if ((piece + 1) % Config::kArrivalPieces == 0 || piece + 1 == Config::kPieces)
        arrive(n, piece / Config::kArrivalPieces);
    };
    if (pool.aligned && (pool.whole || pool.cache.d_kpe == 0)) [[likely]] {
      Block::template copy_rows<true>(Block::stage(n), first_row(), place_.ckv, nullptr, d_ckv, arrived);
    } else if (pool.aligned && d_ckv % Config::kPieceDims == 0) {
      Block::template copy_rows<false>(Block::stage(n), first_row(), place_.ckv, place_.kpe, d_ckv, arrived);
    } else {
      copy_slowly(n, d_ckv);
      MLA_UNROLL
      for (int arrival = 0; arrival < Config::kArrivals; ++arrival) arrive(n, arrival);
    }
  }

  /// The warp has sent for its rows' pieces of an arrival.
  MLA_DEVICE void arrive(uint32_t n, int arrival) const {
    ptx::mbarrier_arrive_after_copies(Block::full(n, arrival));
    if (arrival == 0) ptx::sync_warp();  // the valid bits, and rows copied slowly
    if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::full(n, arrival));
  }

  /// Rows that begin anywhere.
  MLA_DEVICE void copy_slowly(uint32_t n, int d_ckv) const {
    const int num_chunks = args_.d_qk / kVector, latent_chunks = d_ckv / kVector;
    MLA_NO_UNROLL
    for (int key = 0; key < kWarpKeys; ++key) {
      const std::byte* ckv = Block::of_lane(place_.ckv, key);
      const std::byte* kpe = Block::of_lane(place_.kpe, key);
      MLA_NO_UNROLL
      for (int chunk = ptx::lane(); chunk < num_chunks; chunk += kWarpSize) {
        const std::byte* from =
            chunk < latent_chunks ? ckv + chunk * kChunkBytes : kpe + (chunk - latent_chunks) * kChunkBytes;
        copy_chunk_slowly(Block::stage(n) + Block::chunk_offset(first_row() + key, chunk), from, 2, ckv != nullptr);
      }
    }
    ptx::fence_async_proxy();
  }

  UnitWalk walk_;
  uint32_t next_ = 0;            // number of the next step
  KeyList keys_;                 // of the unit
  Place<Config> place_;          // of the lane's key in that step
  bool in_second_pool_ = false;  // whether the step's keys are
  int32_t key_ = 0;              // of the lane in the step after it
  int32_t next_entry_ = -1;      // of that key
};

}  // namespace mla::MLA_CUDA_NAMESPACE
