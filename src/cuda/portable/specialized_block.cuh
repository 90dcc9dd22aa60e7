// SPDX-License-Identifier: Apache-2.0
// What the roles of the warp-specialized kernel share: the map of shared memory, the barriers, the unit at hand.
#pragma once

#include "cuda/portable/absorbed_keys.cuh"
#include "cuda/portable/absorbed_rows.cuh"
#include "cuda/portable/specialized_config.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// What all threads of a block know of the segment they compute.
struct SpecializedUnit {
  cuda::Segment segment;
  KeyList keys;
  UnitRows rows;
  KeyRange plain;           // keys that every row sees and whose scores need nothing but the scale
  int32_t slot;             // of the partial state, -1: write outputs
  bool more;                // whether all this is about a segment; else there is none any more
  int32_t step_end;         // number of the step behind the unit's last
  int32_t next, end, lane;  // segments to come, and which lane of their worker the block is
};

/// Steps are numbered from the kernel's start on: step n uses stage n % kStages and weights n % 2.
template <class Config>
class SpecializedBlock {
 public:
  MLA_DEVICE explicit SpecializedBlock(const cuda::AbsorbedArgs& args)
      : args_(args), memory_(ptx::shared_memory()), shared_(ptx::shared_address(memory_)) {}

  /// The block is lane `lane` of a worker with segments [begin, end).
  MLA_DEVICE void init(int32_t begin, int32_t end, int32_t lane) const {
    if (ptx::thread_index() == 0) {
      for (int stage = 0; stage < Config::kStages; ++stage) {
        ptx::mbarrier_init(full(stage), Config::kFetchWarps);
        ptx::mbarrier_init(free(stage), Config::kValueWarps);
      }
      for (int i = 0; i < 2; ++i) {
        ptx::mbarrier_init(ready(i), Config::kWeightWarps);
        ptx::mbarrier_init(scored(i), 2);
        ptx::mbarrier_init(taken(i), 1);
      }
      ptx::fence_mbarrier_init();
      unit().step_end = 0;
      unit().next = begin;
      unit().end = end;
      unit().lane = lane;
    }
    for (int i = ptx::thread_index(); i < 2 * Config::kPoisonBytes; i += Config::kThreads)
      memory_[Config::kPoisonOffset + i] = std::byte{0};
  }

  /// For all threads: describes the next segment's unit; false: there is none.
  MLA_DEVICE bool next_unit() const {
    if (ptx::thread_index() == 0) {
      do unit().more = unit().next < unit().end;
      while (unit().more && !describe(args_.list.segments[unit().next++]));
    }
    ptx::sync_block();
    return unit().more;
  }

 protected:
  static constexpr int kQueriesBarrier = 1, kValuesBarrier = 2;
  static_assert(sizeof(SpecializedUnit) <= Config::kUnitBytes);

  /// The rows of a stage have landed; every value warp is done with it; every weight warp has written its weights.
  MLA_DEVICE ptx::SharedAddress full(int n) const { return barrier(n % Config::kStages); }
  MLA_DEVICE ptx::SharedAddress free(int n) const { return barrier(Config::kStages + n % Config::kStages); }
  MLA_DEVICE ptx::SharedAddress ready(int n) const { return barrier(2 * Config::kStages + n % 2); }
  /// Both score warps of the pair have written its scores; its weight warp has read them.
  MLA_DEVICE ptx::SharedAddress scored(int pair) const { return barrier(2 * Config::kStages + 2 + pair); }
  MLA_DEVICE ptx::SharedAddress taken(int pair) const { return barrier(2 * Config::kStages + 4 + pair); }
  MLA_DEVICE static uint32_t score_parity(int n) { return static_cast<uint32_t>(n) & 1U; }
  MLA_DEVICE static uint32_t stage_parity(int n) { return static_cast<uint32_t>(n / Config::kStages) & 1U; }
  MLA_DEVICE static uint32_t ready_parity(int n) { return static_cast<uint32_t>(n / 2) & 1U; }

  MLA_DEVICE SpecializedUnit& unit() const { return *as<SpecializedUnit>(memory_ + Config::kUnitOffset); }
  /// A bit for each key of the step that has a row; 16 of each fetch warp.
  MLA_DEVICE uint16_t* valid(int n) const {
    return as<uint16_t>(memory_ + Config::kValidOffset + n % Config::kStages * 4);
  }
  MLA_DEVICE uint32_t valid_bits(int n) const { return *reinterpret_cast<const uint32_t*>(valid(n)); }
  /// A byte for each key of the step that some rows do not see and whose channels are not finite; then one for any.
  MLA_DEVICE uint8_t* poison(int n) const {
    return as<uint8_t>(memory_ + Config::kPoisonOffset + n % 2 * Config::kPoisonBytes);
  }
  MLA_DEVICE float* factors(int n) const { return as<float>(memory_ + Config::kFactorOffset) + n % 2 * Config::kRows; }
  MLA_DEVICE ptx::SharedAddress stage(int n) const {
    return shared_ + static_cast<uint32_t>(Config::kStageOffset + n % Config::kStages * Config::kStageBytes);
  }
  MLA_DEVICE ptx::SharedAddress weights(int n) const {
    return shared_ + static_cast<uint32_t>(Config::kWeightOffset + n % 2 * Config::kWeightBytes);
  }
  /// The lane's four scores: rows g and g + 8 of tile `m` of the pair's two, keys 8 j + 2 t and the next.
  MLA_DEVICE ptx::SharedAddress scores(int pair, int half, int m, int j) const {
    return shared_ + static_cast<uint32_t>(Config::kScoreOffset + (((pair * 2 + half) * 2 + m) * 4 + j) * 512 +
                                           ptx::lane() * kChunkBytes);
  }

  MLA_DEVICE int num_steps() const {
    return (unit().segment.key_end - unit().segment.key_begin + Config::kKeys - 1) / Config::kKeys;
  }

  /// The value warps have loaded the queries, which only the score warps wait for.
  MLA_DEVICE static void meet_for_queries() {
    ptx::sync_threads(kQueriesBarrier, (Config::kScoreWarps + Config::kValueWarps) * kWarpSize);
  }

  /// The end of a segment for those who have no outputs to store.
  MLA_DEVICE static void end_segment() {
    ptx::sync_block();  // pairs with the value warps: the rows' last factors are there
    ptx::sync_block();  // pairs with the value warps: outputs are stored, all shared memory is the next segment's
  }

  const cuda::AbsorbedArgs& args_;
  std::byte* const memory_;
  const ptx::SharedAddress shared_;

 private:
  /// Whether this lane of the worker has rows of the segment.
  MLA_DEVICE bool describe(const cuda::Segment& segment) const {
    const int32_t row_begin = segment.row_begin + unit().lane * Config::kRows;
    if (row_begin >= segment.q_len * args_.num_heads) return false;
    unit().segment = segment;
    unit().step_end += num_steps();
    unit().keys = make_key_list(args_, segment);
    unit().rows = {args_.num_heads, row_begin, segment.q_len * args_.num_heads, segment.token_begin};
    unit().plain = plain_keys(args_, segment, unit().rows, Config::kRows);
    unit().slot = segment.partial_slot < 0 ? -1 : segment.partial_slot + unit().lane;
    return true;
  }

  MLA_DEVICE ptx::SharedAddress barrier(int i) const {
    return shared_ + static_cast<uint32_t>(Config::kBarrierOffset + i * 8);
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE
