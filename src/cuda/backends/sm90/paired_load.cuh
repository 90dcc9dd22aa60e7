// SPDX-License-Identifier: Apache-2.0
// The load role of the wgmma kernel for dense rows of 16 bits. Its first warp describes units and issues tensor copies;
// another warp finds which keys the rows see where not all rows see all keys of a step.
#pragma once

#include "cuda/backends/sm90/paired_block.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

template <class Config>
class PairedLoadRole : PairedBlock<Config> {
  using Block = PairedBlock<Config>;
  using Block::args_, Block::unit;

 public:
  MLA_DEVICE PairedLoadRole(const PairedArgs& args, const cuda::Share& share) : Block(args.args), paired_(args) {
    if (is_describing()) Block::walk() = UnitWalk(share);
  }

  MLA_DEVICE bool next_unit() {
    if (is_describing()) Block::describe_next_unit(Block::walk());
    ptx::sync_warp();
    return Block::next_unit();
  }

  MLA_DEVICE void compute() {
    const int warp = ptx::shuffle(ptx::warp(), 0);
    if (warp == 0) load();
    if (warp == Config::kMaskWarp) mask();
    Block::leave_unit();
  }

 private:
  /// Returns whether this is the thread that describes units, the only one that reads walk().
  MLA_DEVICE static bool is_describing() { return ptx::thread_index() == 0; }

  // Rows.

  MLA_DEVICE void load() const {
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
    const uint32_t key =
        static_cast<uint32_t>(unit().segment.key_begin) + static_cast<uint32_t>(box * paired_.box_rows);
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
        if (box == 0) ptx::mbarrier_arrive_expect_bytes(full, Config::kPieceBytes);
        ptx::tensor_copy(Block::stage(kOwner) + static_cast<uint32_t>(piece * Config::kPieceBytes) + to, &paired_.keys,
                         piece * Config::kPieceDims, at.offset, at.page, full, ptx::kEvictFirst);
      }
    }
  }

  MLA_DEVICE void wait_for_room(uint32_t n, int half) const {
    if (n >= Config::kStages) ptx::mbarrier_wait(Block::kv_empty(n, half), Block::parity(n - Config::kStages));
  }

  // Masks.

  MLA_DEVICE void mask() const {
    Block::find_unmasked_steps();
    const StepRange steps = unit().steps, unmasked = unit().unmasked;
    MLA_NO_UNROLL
    for (uint32_t n = steps.begin; n < steps.end; ++n) {
      // P of the step before that had this place is there, so that nobody needs its masks any more.
      if (n >= Config::kStages) ptx::mbarrier_wait(Block::p_full(n), Block::parity(n - Config::kStages));
      const bool masked = !unmasked.contains(n);
      if (masked) mask_step(n);
      if (ptx::lane() == 0) Block::masked(n) = masked ? 1 : 0;
      ptx::sync_warp();
      if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::kv_full(n, Config::kLatentPieces));
    }
  }

  MLA_DEVICE void mask_step(uint32_t n) const {
    const int32_t first = unit().template first_key<Config>(n);
    const uint32_t end =
        std::min(static_cast<uint32_t>(first) + uint32_t{Config::kKeys}, static_cast<uint32_t>(unit().keys.length[0]));
    MLA_NO_UNROLL
    for (int r = ptx::lane(); r < Config::kRows; r += kWarpSize) {
      const RowScores row(args_, unit().segment, unit().rows.row(args_, r));
      uint64_t mask = 0;
      MLA_NO_UNROLL
      for (auto key = static_cast<uint32_t>(first); key < end; ++key)
        if (row.sees(static_cast<int32_t>(key))) mask |= uint64_t{1} << (key - static_cast<uint32_t>(first));
      Block::masks(n)[r] = mask;
    }
  }

  const PairedArgs& paired_;
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90
