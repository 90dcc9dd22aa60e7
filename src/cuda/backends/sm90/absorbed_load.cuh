// SPDX-License-Identifier: Apache-2.0
// The warps that fetch rows: 16 keys of every step each. The first of them describes the units, as it needs them first.
#pragma once

#include "cuda/backends/sm90/absorbed_block.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

/// What fetching warps do whatever the rows are made of: units, and where their keys' rows lie.
template <class Config>
class AbsorbedKeys : protected AbsorbedBlock<Config> {
  using Block = AbsorbedBlock<Config>;

 public:
  MLA_DEVICE bool next_unit() {
    if (is_describing()) Block::describe_next_unit(Block::walk());
    ptx::sync_warp();
    return Block::next_unit();
  }

 protected:
  using Block::args_, Block::unit;
  static constexpr int kWarpKeys = Block::kWarpRows;

  MLA_DEVICE AbsorbedKeys(const cuda::AbsorbedArgs& args, const cuda::Share& share) : Block(args) {
    if (is_describing()) Block::walk() = UnitWalk(share);
  }

  MLA_DEVICE static int first_row() { return ptx::warp() * kWarpKeys; }

  /// To be followed by find_next().
  MLA_DEVICE void begin_unit() {
    key_ = unit().segment.key_begin + first_row() + (ptx::lane() & (kWarpKeys - 1));
    next_entry_ = load_entry(key_);
  }

  /// Finds the row of the lane's key (lane and lane + 16 have the same) in the step after the last one found.
  MLA_DEVICE void find_next() {
    in_second_pool_ = unit().keys.pool_of(key_) == 1;  // the same for all keys of a step
    // A pool chosen by an index would be read by slow loads.
    place_ = in_second_pool_ ? find_place<Config>(args_, args_.pools[1], key_, next_entry_)
                             : find_place<Config>(args_, args_.pools[0], key_, next_entry_);
    key_ += Config::kKeys;
    next_entry_ = load_entry(key_);
  }

  /// Of the rows found.
  MLA_DEVICE bool in_second_pool() const { return in_second_pool_; }
  MLA_DEVICE const cuda::KeyPool& pool() const { return in_second_pool_ ? args_.pools[1] : args_.pools[0]; }

  /// Until there is room for the warp's rows of step n.
  MLA_DEVICE void wait_for_room(uint32_t n) const {
    if (n >= Config::kStages)
      ptx::mbarrier_wait(Block::kv_empty(n, first_row() / Config::kHalfKeys), Block::parity(n - Config::kStages));
  }

  /// Says which rows of step n are there; they are found.
  MLA_DEVICE void store_valid(uint32_t n) const {
    const uint32_t there = ptx::ballot(place_.ckv != nullptr);  // the upper half repeats the lower
    if (ptx::lane() == 0) Block::valid(n)[ptx::warp()] = static_cast<uint16_t>(there);
  }

  uint32_t next_ = 0;    // number of the next step
  Place<Config> place_;  // of the lane's key in the step found last

 private:
  /// The only thread that looks at the walk.
  MLA_DEVICE static bool is_describing() { return ptx::thread_index() == 0; }

  MLA_DEVICE int32_t load_entry(int32_t key) const {
    const int32_t* from = entry_of(args_, unit().keys, key);
    return from != nullptr ? *from : -1;
  }

  bool in_second_pool_ = false;  // whether the keys found last are
  int32_t key_ = 0;              // of the lane in the step after it
  int32_t next_entry_ = -1;      // of that key
};

/// Rows that are multiplied as they are.
template <class Config>
class LoadRole : AbsorbedKeys<Config> {
  using Block = AbsorbedBlock<Config>;
  using Keys = AbsorbedKeys<Config>;
  using Keys::args_, Keys::unit, Keys::place_, Keys::next_, Keys::first_row;

 public:
  using Keys::next_unit;

  MLA_DEVICE LoadRole(const cuda::AbsorbedArgs& args, const cuda::Share& share) : Keys(args, share) {}

  MLA_DEVICE void compute() {
    Keys::begin_unit();
    const uint32_t end = unit().steps.end;
    MLA_NO_UNROLL
    for (;; ++next_) {
      Keys::find_next();
      if (next_ == end) break;
      Keys::wait_for_room(next_);
      fetch(next_);
    }
    Block::leave_unit();
  }

 private:
  /// Sends for the warp's rows of step n, which are found.
  MLA_DEVICE void fetch(uint32_t n) const {
    Keys::store_valid(n);
    const cuda::KeyPool& pool = Keys::pool();
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
    ptx::mbarrier_arrive_after_copies(Block::kv_full(n, arrival));
    if (arrival == 0) ptx::sync_warp();  // the valid bits, and rows copied slowly
    if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::kv_full(n, arrival));
  }

  /// Rows that begin anywhere.
  MLA_DEVICE void copy_slowly(uint32_t n, int d_ckv) const {
    const int num_chunks = args_.d_qk / kVector, latent_chunks = d_ckv / kVector;
    MLA_NO_UNROLL
    for (int key = 0; key < Keys::kWarpKeys; ++key) {
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
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90
