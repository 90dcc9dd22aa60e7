// SPDX-License-Identifier: Apache-2.0
// The load role is one warpgroup: each of its warps loads 16 rows of every step. Thread 0 describes the units, because
// its warp needs them first.
#pragma once

#include "cuda/backends/sm90/absorbed_block.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

/// This is the base of both load roles, for 16-bit and for quantized rows: it describes units, and finds where rows of
/// keys lie.
template <class Config>
class LoadRoleBase : protected AbsorbedBlock<Config> {
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

  MLA_DEVICE LoadRoleBase(const cuda::AbsorbedArgs& args, const cuda::Share& share) : Block(args) {
    if (is_describing()) Block::walk() = UnitWalk(share);
  }

  MLA_DEVICE static int first_row() { return ptx::warp() * kWarpKeys; }

  /// Begins with the unit's first step; find_next() must follow.
  MLA_DEVICE void begin_unit() {
    key_ = unit().segment.key_begin + first_row() + (ptx::lane() & (kWarpKeys - 1));
    next_entry_ = load_entry(key_);
  }

  /// Finds the row of the lane's key in the step after the one found last. Lanes r and r + 16 have the same key.
  MLA_DEVICE void find_next() {
    in_second_pool_ = unit().keys.pool_of(key_) == 1;  // the same for all keys of a step
    // Both branches name their pool, because loads of a pool chosen by an index are slow.
    place_ = in_second_pool_ ? find_place<Config>(args_, args_.pools[1], key_, next_entry_)
                             : find_place<Config>(args_, args_.pools[0], key_, next_entry_);
    key_ += Config::kKeys;
    next_entry_ = load_entry(key_);
  }

  /// Return whether the rows found last are of the second pool, and the pool that they are of.
  MLA_DEVICE bool in_second_pool() const { return in_second_pool_; }
  MLA_DEVICE const cuda::KeyPool& pool() const { return in_second_pool_ ? args_.pools[1] : args_.pools[0]; }

  /// Waits until there is room for the warp's rows of step n.
  MLA_DEVICE void wait_for_room(uint32_t n) const {
    if (n >= Config::kStages)
      ptx::mbarrier_wait(Block::kv_empty(n, first_row() / Config::kHalfKeys), Block::parity(n - Config::kStages));
  }

  /// Writes down which of the warp's keys of step n have a row. They must have been found.
  MLA_DEVICE void store_valid(uint32_t n) const {
    const uint32_t found = ptx::ballot(place_.ckv != nullptr);  // the upper 16 bits repeat the lower ones
    if (ptx::lane() == 0) Block::valid(n)[ptx::warp()] = static_cast<uint16_t>(found);
  }

  uint32_t next_ = 0;    // number of the next step
  Place<Config> place_;  // addresses of the lane's key in the step found last

 private:
  /// Returns whether this is the thread that describes units, the only one that reads walk().
  MLA_DEVICE static bool is_describing() { return ptx::thread_index() == 0; }

  MLA_DEVICE int32_t load_entry(int32_t key) const {
    const int32_t* from = entry_of(args_, unit().keys, key);
    return from != nullptr ? *from : -1;
  }

  bool in_second_pool_ = false;
  int32_t key_ = 0;          // the lane's key in the step after the one found last
  int32_t next_entry_ = -1;  // the entry of that key in the page table or the index list; -1: there is none
};

/// Loads 16-bit rows, which are multiplied as they are.
template <class Config>
class LoadRole : LoadRoleBase<Config> {
  using Block = AbsorbedBlock<Config>;
  using Base = LoadRoleBase<Config>;
  using Base::args_, Base::unit, Base::place_, Base::next_, Base::first_row;

 public:
  using Base::next_unit;

  MLA_DEVICE LoadRole(const cuda::AbsorbedArgs& args, const cuda::Share& share) : Base(args, share) {}

  MLA_DEVICE void compute() {
    Base::begin_unit();
    const uint32_t end = unit().steps.end;
    MLA_NO_UNROLL
    for (;; ++next_) {
      Base::find_next();
      if (next_ == end) break;
      Base::wait_for_room(next_);
      issue(next_);
    }
    Block::leave_unit();
  }

 private:
  /// Issues the warp's rows of step n, which have been found.
  MLA_DEVICE void issue(uint32_t n) const {
    Base::store_valid(n);
    const cuda::KeyPool& pool = Base::pool();
    const int d_ckv = pool.cache.d_ckv;
    const ptx::CachePolicy policy = row_policy(args_);
    const auto issued = [&](int piece) {
      if ((piece + 1) % Config::kArrivalPieces == 0 || piece + 1 == Config::kPieces)
        arrive(n, piece / Config::kArrivalPieces);
    };
    if (pool.contiguous) [[likely]] {
      Block::template copy_rows<true>(Block::stage(n), first_row(), place_.ckv, nullptr, d_ckv, policy, issued);
    } else if (pool.aligned && d_ckv % Config::kPieceDims == 0) {
      Block::template copy_rows<false>(Block::stage(n), first_row(), place_.ckv, place_.kpe, d_ckv, policy, issued);
    } else {
      copy_slowly(n, d_ckv);
      MLA_UNROLL
      for (int arrival = 0; arrival < Config::kArrivals; ++arrival) arrive(n, arrival);
    }
  }

  /// Arrives for pieces that the warp has issued, once they have landed.
  MLA_DEVICE void arrive(uint32_t n, int arrival) const {
    ptx::mbarrier_arrive_after_copies(Block::kv_full(n, arrival));
    if (arrival == 0) ptx::sync_warp();  // all lanes have stored their valid bits, and rows that copy_slowly() stores
    if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::kv_full(n, arrival));
  }

  /// Copies rows of any alignment by ordinary loads and stores.
  MLA_DEVICE void copy_slowly(uint32_t n, int d_ckv) const {
    const int num_chunks = args_.d_qk / kVector, latent_chunks = d_ckv / kVector;
    MLA_NO_UNROLL
    for (int key = 0; key < Base::kWarpKeys; ++key) {
      const std::byte* ckv = Block::shuffle_pointer(place_.ckv, key);
      const std::byte* kpe = Block::shuffle_pointer(place_.kpe, key);
      MLA_NO_UNROLL
      for (int chunk = ptx::lane(); chunk < num_chunks; chunk += kWarpSize) {
        const std::byte* from =
            chunk < latent_chunks ? ckv + chunk * kChunkBytes : kpe + (chunk - latent_chunks) * kChunkBytes;
        copy_unaligned_chunk(Block::stage(n) + Block::chunk_offset(first_row() + key, chunk), from, 2, ckv != nullptr);
      }
    }
    ptx::fence_async_proxy();
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90
