// SPDX-License-Identifier: Apache-2.0
// The load role of the paired wgmma kernel loads queries and rows. Rows of pages come by tensor copies, which one
// thread issues; meanwhile another warp finds which keys the rows see where not all rows see all keys of a step. Rows
// that are found by slots come by cp.async of all warps, and their queries by tensor copies if they lie one behind the
// other.
#pragma once

#include "cuda/backends/sm90/paired_block.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

/// This is the base of the load roles: it loads queries.
template <class Config>
class PairedLoadBase : protected LoadRoleBase<Config, PairedBlock<Config>> {
  using Block = PairedBlock<Config>;
  using Base = LoadRoleBase<Config, Block>;

 public:
  using Base::next_unit;

  MLA_DEVICE PairedLoadBase(const PairedArgs& args, const cuda::Share& share) : Base(args.args, share), paired_(args) {}

 protected:
  using Block::args_, Block::unit;
  static constexpr int kTurnRows = 4;  // rows that a warp copies at once

  /// Loads the unit's queries; all load warps call it.
  MLA_DEVICE void load_queries() const {
    const int warp = ptx::shuffle(ptx::warp(), 0);
    if (paired_.copies_boxes_of_queries) {
      if (warp == Config::kGroupWarps - 1) copy_boxes_of_queries();
    } else if (warp >= Block::first_query_warp()) {
      copy_queries();
    }
  }

  MLA_DEVICE void wait_for_room(uint32_t n, int half) const {
    if (n >= Config::kStages) ptx::mbarrier_wait(Block::kv_empty(n, half), Block::parity(n - Config::kStages));
  }

  const PairedArgs& paired_;

 private:
  MLA_DEVICE void wait_for_query_room() const {
    const int number = Block::unit_number();
    if (number > 0) ptx::mbarrier_wait(Block::q_empty(), Block::query_parity(number - 1));
  }

  /// Copies 64 rows from the unit's first one on. In the places of those that the request lacks are others, the next
  /// token's, the last one again or zeros, whose results nobody stores.
  MLA_DEVICE void copy_boxes_of_queries() const {
    constexpr int kBoxes = Config::kQuantized ? Config::kRows / Config::kAtomRows : 1;  // of latent channels
    wait_for_query_room();
    if (!ptx::elect()) return;
    const UnitRows& rows = unit().rows;
    const int32_t request = rows.token_begin * args_.num_heads.value;
    const int pieces = Block::has_rope() ? Config::kPieces : Config::kLatentPieces;
    ptx::mbarrier_arrive_expect_bytes(Block::q_full(), static_cast<uint32_t>(pieces * Config::kPieceBytes));
    MLA_NO_UNROLL
    for (int box = 0; box < kBoxes; ++box) {
      const int32_t row = std::min(rows.row_begin + box * Config::kAtomRows, rows.num_rows - 1);
      ptx::tensor_copy(Block::queries() + static_cast<uint32_t>(box * Config::kEightRowsBytes), &paired_.latent_queries,
                       0, request + row, 0, Block::q_full());
    }
    if (Block::has_rope())
      ptx::tensor_copy(Block::queries() + Config::kRopeOffset, &paired_.rope_queries, 0, request + rows.row_begin, 0,
                       Block::q_full());
  }

  /// Copies the warp's part of the queries: eight lanes copy 128 bytes of a row, four rows in a turn. There is no cache
  /// hint: with one, ptxas 13.0 writes an instruction that faults where the shared address lies in a uniform register
  /// (docs/notebook/2026-11-29-paired-again.md).
  MLA_DEVICE void copy_queries() const {
    wait_for_query_room();
    const int first_warp = Block::first_query_warp(), chunk = ptx::lane() & 7;
    const int rows = Config::kRows / (Config::kGroupWarps - first_warp);  // 32 or 16
    const int first = (ptx::warp() - first_warp) * rows;
    const QueryRow of_lane = unit().rows.row(args_, first + (ptx::lane() & (rows - 1)));
    const auto at = [&](const void* base, int64_t stride_token, int64_t stride_head) {
      const int64_t element = of_lane.token * stride_token + of_lane.head * stride_head;
      return of_lane.token >= 0 ? static_cast<const std::byte*>(base) + element * 2 : nullptr;
    };
    const int rope_piece = Block::rope_piece();
    const std::byte* const latent = at(args_.q_nope, args_.q_nope_stride_token, args_.q_nope_stride_head);
    const std::byte* const rope = at(args_.q_pe, args_.q_pe_stride_token, args_.q_pe_stride_head);
    MLA_NO_UNROLL
    for (int row = ptx::lane() >> 3; row < rows; row += kTurnRows) {
      const std::byte *latent_from = shuffle_pointer(latent, row), *rope_from = shuffle_pointer(rope, row);
      const bool valid = latent_from != nullptr;
      const int eight = (first + row) / Config::kAtomRows;
      const ptx::SharedAddress to =
          Block::queries() + tile_offset<Config::kPieceRowBytes>((first + row) % Config::kAtomRows, chunk);
      latent_from += chunk * kChunkBytes;
      rope_from += chunk * kChunkBytes;
      MLA_UNROLL
      for (int piece = 0; piece < Config::kLatentPieces; ++piece)
        ptx::cp_async_16(
            to + Block::atom_offset(eight, piece),
            Config::kQuantized && piece == rope_piece ? rope_from : latent_from + piece * Config::kPieceRowBytes,
            valid);
      if (Block::has_rope()) ptx::cp_async_16(to + Block::atom_offset(eight, Config::kLatentPieces), rope_from, valid);
    }
    ptx::mbarrier_arrive_after_copies(Block::q_full());
  }
};

/// Loads queries and rows of 16 bits.
template <class Config>
class PairedLoadRole : PairedLoadBase<Config> {
  using Block = PairedBlock<Config>;
  using Load = PairedLoadBase<Config>;
  using Base = LoadRoleBase<Config, Block>;
  using Base::kWarpKeys, Base::place_;
  using Block::args_, Block::unit;
  using Load::kTurnRows, Load::load_queries, Load::paired_, Load::wait_for_room;

 public:
  using Base::next_unit, Load::Load;

  MLA_DEVICE void compute() {
    const int warp = ptx::shuffle(ptx::warp(), 0);
    const bool by_slots = args_.sparse();
    if (by_slots) Base::begin_unit();
    load_queries();
    if (by_slots) Base::find_next();
    if (by_slots)
      load_slots();
    else if (warp == 0)
      load_pages();
    else if (warp == Config::kMaskWarp)
      mask();
    Block::leave_unit();
  }

 private:
  // Rows of pages.

  MLA_DEVICE void load_pages() const {
    const StepRange steps = {ptx::shuffle(unit().steps.begin, 0), ptx::shuffle(unit().steps.end, 0)};
    const int boxes = Config::kKeys / paired_.box_rows;  // of a step; they divide 32
    PagePlace of_lane = {0, 0};                          // of one of 32 boxes, in the order in which they are loaded
    MLA_NO_UNROLL
    for (uint32_t n = steps.begin; n < steps.end; ++n) {
      const int first = static_cast<int>(n - steps.begin) * boxes;
      if (first % kWarpSize == 0) of_lane = place_of_box(first + ptx::lane());
      if (n % Config::kMathGroups == 0)
        load_step<0>(n, of_lane, first, boxes);
      else
        load_step<1>(n, of_lane, first, boxes);
    }
  }

  /// Returns where the rows of a box of the unit lie. Boxes behind the last key, which nobody sees, and pages that do
  /// not exist are those of page 0, so that no copy leaves the cache.
  MLA_DEVICE PagePlace place_of_box(int box) const {
    // Boxes of lanes behind the last one may begin behind the largest int32_t.
    const uint32_t key = static_cast<uint32_t>(unit().segment.key_begin) +
                         static_cast<uint32_t>(box) * static_cast<uint32_t>(paired_.box_rows);
    if (key >= static_cast<uint32_t>(unit().keys.length[0])) return {0, 0};
    PagePlace at = place_in_pages(static_cast<int32_t>(key), args_.pools[0].page_size);
    const int32_t page = unit().keys.entries[0][at.page];
    at.page = static_cast<uint32_t>(page) < args_.pools[0].cache.num_pages ? page : 0;
    return at;
  }

  /// Loads a step of the warpgroup kOwner, the unit's boxes from number `first` on.
  template <int kOwner>
  MLA_DEVICE void load_step(uint32_t n, PagePlace of_lane, int first, int boxes) const {
    wait_for_room(n, kOwner);
    load_pieces<kOwner, 0, Config::kGroupPieces>(of_lane, first, boxes);
    wait_for_room(n, kOwner ^ 1);
    load_pieces<kOwner, Config::kGroupPieces, Config::kPieces>(of_lane, first, boxes);
  }

  /// Loads pieces kBegin ... kEnd - 1 in the order in which they are multiplied.
  template <int kOwner, int kBegin, int kEnd>
  MLA_DEVICE void load_pieces(PagePlace of_lane, int first, int boxes) const {
    MLA_NO_UNROLL
    for (int box = 0; box < boxes; ++box) {
      // What all lanes read from one of them lies in uniform registers, as tensor copies take it.
      const int from = (first + box) % kWarpSize;
      const PagePlace at = {ptx::shuffle(of_lane.page, from), ptx::shuffle(of_lane.offset, from)};
      if (!ptx::elect()) continue;
      const auto to = static_cast<uint32_t>(box * paired_.box_rows * Config::kPieceRowBytes);
      MLA_UNROLL
      for (int i = kBegin; i < kEnd; ++i) {
        const int piece = Block::piece_of(kOwner, i);
        const ptx::SharedAddress full = Block::kv_full(kOwner, piece);
        if (piece == Config::kLatentPieces && !Block::has_rope()) {
          if (box == 0) ptx::mbarrier_arrive(full);
          break;
        }
        if (box == 0) ptx::mbarrier_arrive_expect_bytes(full, Config::kPieceBytes);
        ptx::tensor_copy(Block::stage(kOwner) + static_cast<uint32_t>(piece * Config::kPieceBytes) + to, &paired_.keys,
                         piece * Config::kPieceDims, at.offset, at.page, full, ptx::kEvictFirst);
      }
    }
  }

  // Rows that are found by slots.

  MLA_DEVICE void load_slots() {
    const StepRange steps = unit().steps;
    MLA_NO_UNROLL
    for (uint32_t n = steps.begin; n < steps.end; ++n) {
      copy_rows(n);
      Base::find_next();
    }
  }

  /// Copies the warp's rows of step n, which have been found: eight lanes copy 128 bytes of a row, four rows in a turn.
  /// Keys without a row get zeros.
  MLA_DEVICE void copy_rows(uint32_t n) const {
    constexpr int kTurns = kWarpKeys / kTurnRows;
    const int row_in_turn = ptx::lane() >> 3, chunk = ptx::lane() & 7;
    const ptx::CachePolicy policy = row_policy(args_);
    const std::byte* from[kTurns];
    bool valid[kTurns];
    MLA_UNROLL
    for (int turn = 0; turn < kTurns; ++turn) {
      from[turn] = shuffle_pointer(place_.ckv, turn * kTurnRows + row_in_turn);
      valid[turn] = from[turn] != nullptr;
      from[turn] += chunk * kChunkBytes;
    }
    const auto copy = [&](int piece) {
      MLA_UNROLL
      for (int turn = 0; turn < kTurns; ++turn) {
        const int row = Base::first_row() + turn * kTurnRows + row_in_turn;
        ptx::cp_async_16(Block::stage(n) + static_cast<uint32_t>(piece * Config::kPieceBytes) +
                             tile_offset<Config::kPieceRowBytes>(row, chunk),
                         from[turn] + piece * Config::kPieceRowBytes, valid[turn], policy);
      }
    };
    const int owner = static_cast<int>(n % Config::kMathGroups);
    MLA_NO_UNROLL
    for (int i = 0; i < Config::kMathGroups; ++i) {
      const int half = owner ^ i, first = half * Config::kGroupPieces;
      wait_for_room(n, half);
      MLA_UNROLL
      for (int piece = 0; piece < Config::kGroupPieces; ++piece) copy(first + piece);
      ptx::mbarrier_arrive_after_copies(Block::kv_full(n, first));
    }
    if (Block::has_rope()) copy(Config::kLatentPieces);
    Base::store_valid(n);
    if (ptx::lane() == 0) {
      const bool masked = Block::valid(n)[ptx::warp()] != (1 << kWarpKeys) - 1;
      Block::masked(n)[ptx::warp()] = masked ? 1 : 0;
    }
    const ptx::SharedAddress full = Block::kv_full(n, Config::kLatentPieces);
    ptx::mbarrier_arrive_after_copies(full);
    if (ptx::lane() == 0) ptx::mbarrier_arrive(full);
  }

  // Masks.

  MLA_DEVICE void mask() const {
    Block::find_unmasked_steps();
    const StepRange steps = unit().steps, unmasked = unit().unmasked;
    MLA_NO_UNROLL
    for (uint32_t n = steps.begin; n < steps.end; ++n) {
      // P of the step before that had this place is there, so that nobody needs its masks any more.
      if (n >= Config::kStages) ptx::mbarrier_wait(Block::p_full(n), Block::parity(n - Config::kStages));
      // The stage has a row for every key, so that those behind the last one are masked, too.
      const bool whole = unit().keys.length[0] - unit().template first_key<Config>(n) >= Config::kKeys;
      const bool masked = !unmasked.contains(n) || !whole;
      if (masked) mask_step(n);
      if (ptx::lane() < Config::kGroupWarps) Block::masked(n)[ptx::lane()] = masked ? 1 : 0;
      ptx::sync_warp();
      if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::kv_full(n, Config::kLatentPieces));
    }
  }

  MLA_DEVICE void mask_step(uint32_t n) const {
    const int32_t first = unit().template first_key<Config>(n);
    const uint64_t exist = low_bits(int64_t{unit().keys.length[0]} - first);
    MLA_NO_UNROLL
    for (int r = ptx::lane(); r < Config::kRows; r += kWarpSize)
      Block::masks(n)[r] = RowScores(args_, unit().segment, unit().rows.row(args_, r)).visible_keys(first, exist);
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90
