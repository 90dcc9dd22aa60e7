// SPDX-License-Identifier: Apache-2.0
// Units of kernels whose warps have roles: every role walks from unit to unit at its own pace, at most two units apart.
// Units and steps are numbered from the kernel's start on; unit u is described in place u % 2 of shared memory.
#pragma once

#include "cuda/attention/absorbed_keys.cuh"
#include "cuda/attention/absorbed_rows.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Steps by their numbers.
struct StepRange {
  uint32_t begin, end;

  MLA_DEVICE bool contains(uint32_t n) const { return begin <= n && n < end; }
};

/// What all threads of a block know of a segment they compute.
struct AbsorbedUnit {
  cuda::Segment segment;
  KeyList keys;
  UnitRows rows;
  StepRange steps;     // all of the unit
  StepRange unmasked;  // those whose keys every row sees, and whose scores need nothing but the scale
  int32_t slot;        // of the partial state, -1: write outputs
  bool more;           // whether all this is about a segment; else there is none any more

  /// Of step n.
  template <class Config>
  MLA_DEVICE int32_t first_key(uint32_t n) const {
    return segment.key_begin + static_cast<int32_t>(n - steps.begin) * Config::kKeys;
  }

  /// For who knows `steps`.
  template <class Config>
  MLA_DEVICE void find_unmasked_steps(const cuda::AbsorbedArgs& args) {
    const KeyRange found = unmasked_keys(args, segment, rows, Config::kRows);
    const auto whole_steps = [](int32_t keys_on) {
      return static_cast<uint32_t>(std::max(keys_on, 0) / Config::kKeys);
    };
    unmasked = {steps.begin + whole_steps(found.begin - segment.key_begin + Config::kKeys - 1),
                steps.begin + whole_steps(found.end - segment.key_begin)};
  }
};

/// Describes the unit of a segment that lane `row_lane` of its worker has, whose steps are numbered from `first_step`
/// on. False: the lane has no rows of the segment.
template <class Config>
MLA_DEVICE bool describe_unit(const cuda::AbsorbedArgs& args, const cuda::Segment& segment, int row_lane,
                              uint32_t first_step, AbsorbedUnit& to) {
  const int32_t row_begin = segment.row_begin + row_lane * Config::kRows;
  if (row_begin >= segment.q_len * args.num_heads.value) return false;
  to.segment = segment;
  to.steps = {first_step, first_step + static_cast<uint32_t>((segment.key_end - segment.key_begin + Config::kKeys - 1) /
                                                             Config::kKeys)};
  to.keys = make_key_list(args, segment);
  to.rows = {row_begin, segment.q_len * args.num_heads.value, segment.token_begin};
  to.slot = segment.partial_slot < 0 ? -1 : segment.partial_slot + row_lane;
  return true;
}

inline constexpr int kUnitBytes = 112;  // of shared memory for each of the two places
static_assert(sizeof(AbsorbedUnit) <= kUnitBytes);
inline constexpr int kUnitBarriers = 4;

/// Whether who weighs scores finds a unit's unmasked steps, while its rows are on their way, and not who describes it:
/// rows are sent for a microsecond sooner. Quantized ones were decoded 5 % slower that way, in the same loop of
/// instructions (measured, H200), so there it stays.
template <class Config>
inline constexpr bool kUnmaskedStepsLater = !Config::kQuantized;

/// What the one thread that describes units remembers between them.
struct UnitWalk {
  int32_t next_segment, last_segment, row_lane;
  uint32_t steps = 0;  // of all units so far
  cuda::Segment next;  // read ahead

  MLA_DEVICE explicit UnitWalk(const cuda::Share& share)
      : next_segment(share.begin), last_segment(share.end), row_lane(share.row_lane), next(share.first) {}

  /// Describes the worker's next unit that this lane has rows of.
  template <class Config>
  MLA_DEVICE void describe_next(const cuda::AbsorbedArgs& args, AbsorbedUnit& to) {
    while (next_segment < last_segment) {
      to.more = describe<Config>(args, next, to);
      if (to.more) return;
      read_ahead(args);
    }
    to.more = false;
  }

  /// Afterwards.
  MLA_DEVICE void read_ahead(const cuda::AbsorbedArgs& args) {
    if (++next_segment < last_segment) next = args.list.segments[next_segment];
  }

 private:
  template <class Config>
  MLA_DEVICE bool describe(const cuda::AbsorbedArgs& args, const cuda::Segment& segment, AbsorbedUnit& to) {
    if (!describe_unit<Config>(args, segment, row_lane, steps, to)) return false;
    steps = to.steps.end;
    if constexpr (!kUnmaskedStepsLater<Config>) to.find_unmasked_steps<Config>(args);
    return true;
  }
};

/// Config: kWarps, kRows, kKeys (of a step), kUnitBarrierOffset, kUnitOffset, kUnitNumberOffset (an int for each warp).
template <class Config>
class AbsorbedUnits {
 public:
  MLA_DEVICE explicit AbsorbedUnits(const cuda::AbsorbedArgs& args)
      : args_(args), memory_(ptx::shared_memory()), shared_(ptx::shared_address(memory_)) {}

  /// For a warp: waits until its next unit is described. False: there is none.
  MLA_DEVICE bool next_unit() const {
    const int number = unit_number() + 1;
    ptx::sync_warp();
    if (ptx::lane() == 0) *number_of_warp() = number;
    ptx::sync_warp();
    ptx::mbarrier_wait(unit_full(number), unit_parity(number));
    return unit().more;
  }

 protected:
  /// For one thread, before fence_mbarrier_init().
  MLA_DEVICE void init_unit_barriers() const {
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(unit_full(i), 1);
      ptx::mbarrier_init(unit_empty(i), Config::kWarps);
    }
  }
  /// For every warp, before a barrier of the block.
  MLA_DEVICE void init_unit_number() const {
    if (ptx::lane() == 0) *number_of_warp() = -1;
  }

  /// For the one thread that describes units: the one after its warp's.
  MLA_DEVICE void describe_next_unit(UnitWalk& walk) const {
    const int number = unit_number() + 1;
    if (number >= 2) ptx::mbarrier_wait(unit_empty(number), unit_parity(number - 2));
    walk.describe_next<Config>(args_, unit(number));
    ptx::mbarrier_arrive(unit_full(number));
    walk.read_ahead(args_);
  }

  /// The unit is described; every warp is done with it.
  MLA_DEVICE ptx::SharedAddress unit_full(int unit) const { return unit_barrier(unit % 2); }
  MLA_DEVICE ptx::SharedAddress unit_empty(int unit) const { return unit_barrier(2 + unit % 2); }
  MLA_DEVICE static uint32_t unit_parity(int unit) { return static_cast<uint32_t>(unit / 2) & 1U; }

  MLA_DEVICE AbsorbedUnit& unit(int number) const {
    return *as<AbsorbedUnit>(memory_ + Config::kUnitOffset + number % 2 * kUnitBytes);
  }
  MLA_DEVICE AbsorbedUnit& unit() const { return unit(unit_number()); }
  /// The warp's. It lies in shared memory: registers are short.
  MLA_DEVICE int unit_number() const { return *number_of_warp(); }

  /// For a warp that weighs scores, before it looks at unit().unmasked. All such warps write the same.
  MLA_DEVICE void find_unmasked_steps() const {
    if constexpr (kUnmaskedStepsLater<Config>) {
      if (ptx::lane() == 0) unit().template find_unmasked_steps<Config>(args_);
      ptx::sync_warp();
    }
  }

  /// For a warp that has done its part of the unit.
  MLA_DEVICE void leave_unit() const {
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(unit_empty(unit_number()));
  }

  const cuda::AbsorbedArgs& args_;
  std::byte* const memory_;
  const ptx::SharedAddress shared_;

 private:
  MLA_DEVICE ptx::SharedAddress unit_barrier(int i) const {
    return shared_ + static_cast<uint32_t>(Config::kUnitBarrierOffset + i * 8);
  }
  MLA_DEVICE int* number_of_warp() const {
    return as<int>(memory_ + Config::kUnitNumberOffset + ptx::warp() * static_cast<int>(sizeof(int)));
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE
