// SPDX-License-Identifier: Apache-2.0
// This is the load role of the paired wgmma kernel for quantized rows, which are found by slots. Each warp decodes
// eight rows of a step, the first or the second eight of its 16 keys, and copies them to the other block of the
// cluster, whose warp does so with the other eight. Codes wait in a place of their own for their turn, so that they
// come while earlier ones are decoded (docs/notebook/2026-11-30-paired-quantized.md).
#pragma once

#include <algorithm>
#include <bit>

#include "cuda/backends/sm90/paired_load.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

/// Loads queries, and loads and decodes rows of e4m3 whose scales are those of 64 channels or more.
template <class Config>
class PairedDecodeRole : PairedLoadBase<Config> {
  using Block = PairedBlock<Config>;
  using Load = PairedLoadBase<Config>;
  using Base = LoadRoleBase<Config, Block>;
  using Base::first_row, Base::kWarpKeys;
  using Block::args_, Block::unit;
  using Load::wait_for_room;

 public:
  using Base::next_unit;

  /// `to_other` leads from this block's shared memory to the other block's, in bytes.
  MLA_DEVICE PairedDecodeRole(const PairedArgs& args, const cuda::Share& share, ptx::SharedAddress to_other)
      : Load(args, share), to_other_(to_other) {}

  MLA_DEVICE void compute() {
    begin_unit();
    const StepRange steps = unit().steps;
    find_rows();
    begin_step(0);
    copy_codes(row_, first_half(steps.begin));
    Load::load_queries();
    MLA_NO_UNROLL
    for (uint32_t n = steps.begin; n < steps.end; ++n) decode(n, n - steps.begin);
    ptx::cp_async_wait<0>();
    Block::leave_unit();
  }

 private:
  // A lane decodes 16 channels of every piece of a row; four neighbouring lanes have a row. A half is one of the
  // channels.
  static constexpr int kHalfPieces = Config::kGroupPieces;  // of a half of the channels
  static constexpr int kLaneChannels = Config::kPieceDims / 4;
  static_assert(kLaneChannels == kChunkBytes && Config::kAtomRows * 2 == kWarpKeys);

  MLA_DEVICE static int lane_row() { return ptx::lane() >> 2; }
  MLA_DEVICE static int lane_channel() { return (ptx::lane() & 3) * kLaneChannels; }
  /// Returns the half of the channels that is decoded first: the one that the step's owner frees itself.
  MLA_DEVICE static uint32_t first_half(uint32_t n) { return n % Config::kMathGroups; }

  /// Says where a row's scales lie. The lane has those of piece lane % 4 of each half of the channels.
  class Scales {
   public:
    Scales() = default;
    MLA_DEVICE explicit Scales(const cuda::KeyPool& pool) : bits_(pool.ue8m0 ? kUe8m0 : 0U) {
      const core::Cache& cache = pool.cache;
      MLA_UNROLL
      for (int half = 0; half < 2; ++half) {
        // Rotary channels have no scale, so that any one will do for their piece.
        const int channel =
            std::min((half * kHalfPieces + (ptx::lane() & 3)) * Config::kPieceDims, cache.d_ckv - Config::kPieceDims);
        const int number = channel / kVector >> pool.scale_shift;
        bits_ |= static_cast<uint32_t>(number * size_of(cache.scale_type)) << (8 * half);
      }
    }
    /// Returns the bits of a scale in the cache, so that nothing waits for them yet.
    MLA_DEVICE uint32_t load(const std::byte* scales, int half) const {
      const std::byte* const from = scales + (bits_ >> (8 * half) & 0xFFU);
      return is_ue8m0() ? static_cast<uint8_t>(*from) : *as<uint32_t>(from);
    }
    MLA_DEVICE float convert(uint32_t bits) const {
      return is_ue8m0() ? ue8m0_to_f32(static_cast<uint8_t>(bits)) : std::bit_cast<float>(bits);
    }

   private:
    MLA_DEVICE bool is_ue8m0() const { return (bits_ & kUe8m0) != 0; }
    static constexpr uint32_t kUe8m0 = 1U << 16;
    uint32_t bits_ = 0;  // kUe8m0, and a byte for each half: where its scale lies
  };

  // Rows.

  /// Keeps what the unit's lists are like.
  MLA_DEVICE void begin_unit() {
    const KeyList& keys = unit().keys;
    const int32_t first_key = unit().segment.key_begin;
    entries_ = keys.entries[0];
    length_ = keys.length[0];
    second_pool_ = keys.second_pool;
    second_step_ = second_pool_ == INT32_MAX
                       ? UINT32_MAX
                       : static_cast<uint32_t>(std::max(second_pool_ - first_key, 0)) / uint32_t{Config::kKeys};
    num_slots_ = static_cast<int32_t>(std::min<int64_t>(args_.pools[0].cache.num_slots(), INT32_MAX));
    of_pools_[0] = Scales(args_.pools[0]);
    if (args_.num_pools() == 2) of_pools_[1] = Scales(args_.pools[1]);
    key_ = first_key + first_row() + ptx::lane() % kWarpKeys + ptx::lane() / kWarpKeys * Config::kKeys;
    load_entry();
  }
  MLA_DEVICE bool in_second_pool(uint32_t step) const { return step >= second_step_; }

  MLA_DEVICE void load_entry() {
    entry_ = -1;
    if (key_ >= second_pool_) [[unlikely]] {
      const int32_t at = key_ - second_pool_;
      if (at < unit().keys.length[1]) entry_ = ptx::load_global(unit().keys.entries[1] + at);
    } else if (key_ < length_) {
      entry_ = ptx::load_global(entries_ + key_);
    }
  }

  /// Finds the rows of the next two steps: lane r has the warp's key r of the first one, lane 16 + r that of the
  /// second.
  MLA_DEVICE void find_rows() {
    if (key_ >= second_pool_) [[unlikely]]
      find_row(args_.pools[1], args_.pools[1].cache.num_slots());
    else
      find_row(args_.pools[0], num_slots_);
    found_ = ptx::ballot(ckv_ != nullptr);
    key_ += 2 * Config::kKeys;
    load_entry();
  }
  MLA_DEVICE void find_row(const cuda::KeyPool& pool, int64_t num_slots) {
    const bool exists = entry_ >= 0 && entry_ < num_slots;
    const PagePlace at = place_in_pages(std::max(entry_, 0), pool.page_size);
    const std::byte* const ckv = pool.cache.ckv.row(at.page, at.offset);
    const std::byte* const scales = pool.cache.scales.row(at.page, at.offset);
    ckv_ = exists ? ckv : nullptr;
    of_scales_ = exists ? scales : nullptr;
  }
  /// Returns what lanes have of the lane's row among the first (0) or the second (1) eight keys of the warp in a step.
  MLA_DEVICE static const std::byte* row_of(const std::byte* of_lanes, uint32_t step, int eight) {
    const int first_lane = static_cast<int>(step & 1) * kWarpKeys + eight * Config::kAtomRows;
    return shuffle_pointer(of_lanes, first_lane + lane_row());
  }

  /// Turns to the rows of a step of the unit, which have been found.
  MLA_DEVICE void begin_step(uint32_t step) {
    row_ = row_of(ckv_, step, ptx::cluster_rank());
    const std::byte* const scales = row_of(of_scales_, step, ptx::cluster_rank());
    of_step_ = in_second_pool(step) ? of_pools_[1] : of_pools_[0];
    MLA_UNROLL
    for (int half = 0; half < 2; ++half) scales_[half] = scales != nullptr ? of_step_.load(scales, half) : 0;
  }

  // Codes.

  /// Returns where the lane's codes of a piece of a half of the channels lie until they are decoded.
  MLA_DEVICE ptx::SharedAddress codes(int piece) const {
    return Block::shared_ + static_cast<uint32_t>(Config::kCodeOffset + ptx::warp() * Config::kWarpCodeBytes +
                                                  piece * Config::kPieceCodeBytes + ptx::lane() * kChunkBytes);
  }
  /// Copies the lane's codes of a half of the channels. Keys without a row get zeros.
  MLA_DEVICE void copy_codes(const std::byte* row, uint32_t half) const {
    const std::byte* const from = row + lane_channel() + half * (kHalfPieces * Config::kPieceDims);
    MLA_UNROLL
    for (int piece = 0; piece < kHalfPieces; ++piece)
      ptx::cp_async_16(codes(piece), from + piece * Config::kPieceDims, row != nullptr, row_policy(args_));
    ptx::cp_async_commit();
  }

  /// Decodes step n, the unit's step `step`, a half of the channels at a time.
  MLA_DEVICE void decode(uint32_t n, uint32_t step) {
    const float scales[2] = {of_step_.convert(scales_[0]), of_step_.convert(scales_[1])};
    const uint32_t found = found_ >> ((step & 1) * kWarpKeys);
    const std::byte* const row = row_;
    const std::byte* rope[2];
    MLA_UNROLL
    for (int eight = 0; eight < 2; ++eight) rope[eight] = row_of(ckv_, step, eight);
    // Without a loop the code is longer, and all of it slower: 91.1 instead of 89.7 us (fp8_ds_mla, 128 heads, 64
    // tokens, topk 2048; H200, 2026-11-30).
    MLA_NO_UNROLL
    for (int turn = 0; turn < 2; ++turn) {
      const uint32_t half = first_half(n + static_cast<uint32_t>(turn));
      ptx::cp_async_wait<0>();
      // All pieces are loaded before any is stored, which takes 92 instead of 95 us (same shape and day).
      ptx::Vec4 e4m3[kHalfPieces];
      MLA_UNROLL
      for (int piece = 0; piece < kHalfPieces; ++piece) e4m3[piece] = ptx::load_shared<ptx::Vec4>(codes(piece));
      float of_piece[kHalfPieces];
      MLA_UNROLL
      for (int piece = 0; piece < kHalfPieces; ++piece)
        of_piece[piece] = ptx::shuffle(half == 0 ? scales[0] : scales[1], (ptx::lane() & ~3) | piece);
      if (turn == 0) {
        copy_codes(row, half ^ 1);  // to where this lane has loaded its codes from
        if (step % 2 == 1) find_rows();
        begin_step(step + 1);
      } else {
        copy_codes(row_, half);  // the next step begins with the half that this one ends with
      }
      wait_for_room(n, static_cast<int>(half));
      // The place of the ninth piece has P of step n - 2 until both warpgroups have given their halves back. Rotary
      // channels that are no piece of their own are part of the second half of the channels.
      if (Block::has_rope() ? turn == 1 : half == 1) copy_rope(n, step, rope);
      const ptx::SharedAddress to =
          Block::stage(n) + lane_offset(ptx::cluster_rank(), static_cast<int>(half) * kHalfPieces);
      MLA_UNROLL
      for (int piece = 0; piece < kHalfPieces; ++piece)
        if (piece + 1 < kHalfPieces || pieces(half) == kHalfPieces)
          store_piece(to + static_cast<uint32_t>(piece * Config::kPieceStride), e4m3[piece], of_piece[piece]);
      give(n, half);
    }
    if (ptx::lane() != 0) return;
    constexpr auto kAll = uint16_t{(1 << kWarpKeys) - 1};
    Block::valid(n)[ptx::warp()] = static_cast<uint16_t>(found);
    Block::masked(n)[ptx::warp()] = static_cast<uint16_t>(found) != kAll ? 1 : 0;
    ptx::mbarrier_arrive(Block::kv_full(n, Config::kLatentPieces));
  }

  /// Returns how many pieces of a half of the channels are decoded.
  MLA_DEVICE int pieces(uint32_t half) const {
    return half == 1 && Block::rope_piece() == Config::kLatentPieces - 1 ? kHalfPieces - 1 : kHalfPieces;
  }
  /// Returns where the lane's row among eight keys of the warp begins in a piece of a tile.
  MLA_DEVICE static uint32_t lane_offset(int eight, int piece) {
    return Block::atom_offset(first_row() / Config::kAtomRows + eight, piece) +
           static_cast<uint32_t>(lane_row() * Config::kPieceRowBytes);
  }
  /// Decodes the lane's 16 channels of a piece and stores them in the piece's row that begins at `row`.
  MLA_DEVICE static void store_piece(ptx::SharedAddress row, const ptx::Vec4& e4m3, float scale) {
    store_e4m3_as_bf16(row, (lane_channel() / kVector ^ lane_row()) & 7, e4m3, scale);
  }

  /// Copies the rotary channels of all the warp's rows of step n; both blocks do so.
  MLA_DEVICE void copy_rope(uint32_t n, uint32_t step, const std::byte* const (&rows)[2]) const {
    const int piece = Block::rope_piece();
    if (piece < 0) return;
    const int64_t distance = in_second_pool(step) ? args_.pools[1].kpe_distance : args_.pools[0].kpe_distance;
    const int chunk = (ptx::lane() & 3) | (lane_row() & 1) << 2;  // neighbouring rows have theirs in different banks
    MLA_UNROLL
    for (int eight = 0; eight < 2; ++eight) {
      const ptx::SharedAddress to = Block::stage(n) + lane_offset(eight, piece);
      const std::byte* const from = rows[eight] + distance;
      MLA_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int of_row = chunk ^ i * 4;
        ptx::cp_async_16(to + static_cast<uint32_t>((of_row ^ lane_row()) * kChunkBytes), from + of_row * kChunkBytes,
                         rows[eight] != nullptr, row_policy(args_));
      }
    }
    ptx::mbarrier_arrive_after_copies(Block::kv_full(n, piece & Block::kPartMask));
  }

  /// Hands a half of the channels of step n over, and copies it to the other block. This block's barrier also expects
  /// what the other block copies here, which is as much.
  MLA_DEVICE void give(uint32_t n, uint32_t half) const {
    ptx::fence_async_proxy();
    ptx::sync_warp();
    if (ptx::lane() != 0) return;
    const int piece = static_cast<int>(half) * kHalfPieces;
    const auto bytes = static_cast<uint32_t>(pieces(half) * Config::kAtomBytes);
    const ptx::SharedAddress from = Block::stage(n) + lane_offset(ptx::cluster_rank(), piece);  // lane 0 has row 0
    const ptx::SharedAddress full = Block::kv_full(n, piece);
    ptx::bulk_copy_in_cluster(from + to_other_, from, bytes, full + to_other_);
    ptx::mbarrier_arrive_expect_bytes(full, bytes);
  }

  const ptx::SharedAddress to_other_;
  // Of the unit:
  const int32_t* entries_;  // the slots of pool 0
  int32_t length_;          // how many they are
  int32_t second_pool_;     // the first key of pool 1
  uint32_t second_step_;    // and its step
  int32_t num_slots_;       // of pool 0
  Scales of_pools_[2];
  // Of the lane's key in the two steps found last, and in the two behind them:
  const std::byte *ckv_, *of_scales_;  // its row; null: it has none
  uint32_t found_;                     // bits of the lanes whose key has a row
  int32_t key_, entry_;
  // Of the step begun last: the row that the lane decodes, and bits of its scales
  const std::byte* row_;
  Scales of_step_;
  uint32_t scales_[2];
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90
