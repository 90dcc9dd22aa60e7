// SPDX-License-Identifier: Apache-2.0
// This is the load role for 16-bit rows, and what it shares with the one for quantized rows.
#pragma once

#include "cuda/attention/absorbed_load.cuh"
#include "cuda/backends/sm90/absorbed_block.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

/// This is the base of both load roles.
template <class Config>
class TileLoadRole : protected LoadRoleBase<Config, AbsorbedBlock<Config>> {
  using Block = AbsorbedBlock<Config>;
  using Base = LoadRoleBase<Config, Block>;

 public:
  using Base::Base, Base::next_unit;

 protected:
  /// Waits until there is room for the warp's rows of step n.
  MLA_DEVICE void wait_for_room(uint32_t n) const {
    if (n >= Config::kStages)
      ptx::mbarrier_wait(Block::kv_empty(n, Base::first_row() / Config::kHalfKeys), Block::parity(n - Config::kStages));
  }
};

/// Loads 16-bit rows, which are multiplied as they are.
template <class Config>
class LoadRole : TileLoadRole<Config> {
  using Block = AbsorbedBlock<Config>;
  using Base = TileLoadRole<Config>;
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
      const std::byte* ckv = shuffle_pointer(place_.ckv, key);
      const std::byte* kpe = shuffle_pointer(place_.kpe, key);
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
