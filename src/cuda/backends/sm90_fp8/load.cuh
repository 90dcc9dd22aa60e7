// SPDX-License-Identifier: Apache-2.0
// The load role is one warpgroup. Its warps copy rows to the stages, where they are operands as they land.
#pragma once

#include "cuda/attention/absorbed_keys.cuh"
#include "cuda/attention/absorbed_load.cuh"
#include "cuda/backends/sm90_fp8/block.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8 {

/// kTensorScale says that all keys of a pool have the same scale, so that none is copied.
template <bool kTensorScale>
class LoadRole : LoadRoleBase<AbsorbedConfig, AbsorbedBlock> {
  using Base = LoadRoleBase<AbsorbedConfig, AbsorbedBlock>;
  using Config = AbsorbedConfig;

 public:
  using Base::next_unit;

  MLA_DEVICE LoadRole(const cuda::AbsorbedArgs& args, const cuda::Share& share) : Base(args, share) {}

  MLA_DEVICE void compute() {
    begin_unit();
    const uint32_t end = unit().steps.end;
    MLA_NO_UNROLL
    for (;; ++next_) {
      find_next();
      if (next_ == end) break;
      if (next_ >= Config::kStages) ptx::mbarrier_wait(kv_empty(next_), stage_parity(next_ - Config::kStages));
      store_valid(next_);
      copy_rows(next_);
      if constexpr (!kTensorScale) copy_scales(next_);
      arrive(next_);
    }
    leave_unit();
  }

 private:
  /// Issues copies of the rows found last, four rows in a turn: eight lanes copy a piece of a row.
  MLA_DEVICE void copy_rows(uint32_t n) const {
    const cuda::KeyPool& of = pool();
    if (!of.aligned) return copy_slowly(n, of);
    constexpr int kTurnRows = 4;
    const int chunk = ptx::lane() & 7, row_in_turn = ptx::lane() >> 3;
    const ptx::CachePolicy policy = row_policy(args_);
    const bool has_rope = chunk < of.kpe_bytes / kChunkBytes;
    MLA_UNROLL
    for (int turn = 0; turn < kWarpKeys / kTurnRows; ++turn) {
      const int row = turn * kTurnRows + row_in_turn;
      const std::byte* const ckv = shuffle_pointer(place_.ckv, row);
      const std::byte* const kpe = shuffle_pointer(place_.kpe, row);
      const bool valid = ckv != nullptr;
      const ptx::SharedAddress to = stage(n) + chunk_offset(first_row() + row, chunk);
      MLA_UNROLL
      for (int piece = 0; piece < Config::kLatentPieces; ++piece)
        ptx::cp_async_16(to + static_cast<uint32_t>(piece * Config::kPieceBytes),
                         ckv + piece * Config::kPieceRowBytes + chunk * kChunkBytes, valid, policy);
      if (has_rope) ptx::cp_async_16(to + Config::kRopeOffset, kpe + chunk * kChunkBytes, valid, policy);
    }
  }

  /// Copies rows of any alignment by ordinary loads and stores.
  MLA_DEVICE void copy_slowly(uint32_t n, const cuda::KeyPool& of) const {
    constexpr int kLatentChunks = Config::kLatentDims / kChunkBytes;
    const int num_chunks = kLatentChunks + of.kpe_bytes / kChunkBytes;
    MLA_NO_UNROLL
    for (int row = 0; row < kWarpKeys; ++row) {
      const std::byte* const ckv = shuffle_pointer(place_.ckv, row);
      const std::byte* const kpe = shuffle_pointer(place_.kpe, row);
      MLA_NO_UNROLL
      for (int chunk = ptx::lane(); chunk < num_chunks; chunk += kWarpSize) {
        const bool latent = chunk < kLatentChunks;
        const std::byte* const from = latent ? ckv + chunk * kChunkBytes : kpe + (chunk - kLatentChunks) * kChunkBytes;
        copy_unaligned_chunk(stage(n) + static_cast<uint32_t>(chunk / kChunksPerSegment * Config::kPieceBytes) +
                                 chunk_offset(first_row() + row, chunk % kChunksPerSegment),
                             from, latent || of.quantized_kpe ? 1 : 2, ckv != nullptr);
      }
    }
    ptx::fence_async_proxy();
  }

  /// Copies the scales of the rows found last. Lanes r and r + 16 have those of row r.
  MLA_DEVICE void copy_scales(uint32_t n) const {
    const int key = first_row() + (ptx::lane() & (kWarpKeys - 1));
    for (int scale = ptx::lane() / kWarpKeys; scale < pool().scale_words; scale += kWarpSize / kWarpKeys)
      copy_scale_word(key_scales(n, scale) + static_cast<uint32_t>(key * 4), place_.scales, scale * 4);
  }

  /// Arrives for the warp's rows of step n, once they have landed.
  MLA_DEVICE void arrive(uint32_t n) const {
    ptx::mbarrier_arrive_after_copies(kv_full(n));
    ptx::sync_warp();  // all lanes have stored their valid bits, and what they do not copy
    if (ptx::lane() == 0) ptx::mbarrier_arrive(kv_full(n));
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8
