// SPDX-License-Identifier: Apache-2.0
// This file has the units of kernels whose warps have roles. Every role walks from unit to unit at its own pace; two
// roles are at most two units apart. A CTA numbers its units and steps from the kernel's start on. The description of
// unit u lies in place u % 2 of shared memory.
#pragma once

#include "cuda/attention/absorbed_keys.cuh"
#include "cuda/attention/absorbed_rows.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Holds steps begin ... end - 1, by their numbers.
struct StepRange {
  uint32_t begin, end;

  MLA_DEVICE bool contains(uint32_t n) const { return begin <= n && n < end; }
};

/// Describes one segment of a unit to all threads of the block.
struct AbsorbedUnit {
  cuda::Segment segment;
  KeyList keys;
  UnitRows rows;
  StepRange steps;     // all steps of the segment
  StepRange unmasked;  // those in which every row sees all keys that have a row, and whose scores need only the scale
  int32_t slot;        // slot of the partial state; -1: the unit is not cut, write outputs
  bool more;           // false: no unit is left, and no other field is set

  /// Returns the first key of step n.
  template <class Config>
  MLA_DEVICE int32_t first_key(uint32_t n) const {
    return segment.key_begin + static_cast<int32_t>(n - steps.begin) * Config::kKeys;
  }

  /// Computes `unmasked`. `steps` must be set before.
  template <class Config>
  MLA_DEVICE void find_unmasked_steps(const cuda::AbsorbedArgs& args) {
    const KeyRange found = unmasked_keys(args, segment, rows, Config::kRows);
    const auto whole_steps = [](int32_t keys_on) {
      return static_cast<uint32_t>(std::max(keys_on, 0) / Config::kKeys);
    };
    unmasked.begin = steps.begin + whole_steps(found.begin - segment.key_begin + Config::kKeys - 1);
    // Keys behind the segment's last one have no row.
    unmasked.end = found.end >= segment.key_end ? steps.end : steps.begin + whole_steps(found.end - segment.key_begin);
  }
};

/// Describes the unit that row lane `row_lane` of the worker computes of a segment. Its steps are numbered from
/// `first_step` on. Returns false if the row lane has no rows of the segment.
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

inline constexpr int kUnitPlaces = 2;   // descriptions in shared memory
inline constexpr int kUnitBytes = 112;  // bytes of a description
static_assert(sizeof(AbsorbedUnit) <= kUnitBytes);
inline constexpr int kMbarrierBytes = 8;

/// These are the places of the units' mbarriers in shared memory.
enum UnitBarrier : int {
  kUnitFull,                             // one for each description
  kUnitEmpty = kUnitFull + kUnitPlaces,  // one for each description
  kUnitBarriers = kUnitEmpty + kUnitPlaces
};

/// Says who finds a unit's unmasked steps: if true, the softmax warps do (of the paired kernel the mask warp), while
/// the first rows load; if false, the thread that describes the unit does, before the first load. With true the first
/// rows of 16-bit caches are issued about a microsecond sooner (a part of 84.7 to 82.0 us for 128 heads, batch 64, kv
/// 2k; H200, 2026-11-21). Quantized rows were decoded 5 % slower with true, by the same instructions; the cause is not
/// known (H200, 2026-11-21).
template <class Config>
inline constexpr bool kUnmaskedStepsLater = !Config::kQuantized;

/// Holds the state of the one thread that describes units.
struct UnitWalk {
  int32_t next_segment, end_segment, row_lane;
  uint32_t steps = 0;  // number of steps of all units so far
  cuda::Segment next;  // a copy of segment `next_segment`, read ahead

  MLA_DEVICE explicit UnitWalk(const cuda::Share& share)
      : next_segment(share.begin), end_segment(share.end), row_lane(share.row_lane), next(share.first) {}

  /// Describes the worker's next unit that this row lane has rows of.
  template <class Config>
  MLA_DEVICE void describe_next(const cuda::AbsorbedArgs& args, AbsorbedUnit& to) {
    while (next_segment < end_segment) {
      to.more = describe<Config>(args, next, to);
      if (to.more) return;
      read_ahead(args);
    }
    to.more = false;
  }

  /// Reads the next segment. Call it after describe_next(), when nobody waits for this thread.
  MLA_DEVICE void read_ahead(const cuda::AbsorbedArgs& args) {
    if (++next_segment < end_segment) next = args.list.segments[next_segment];
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

/// This base of a block's roles takes each warp from unit to unit. Config has kWarps, kRows, kKeys (keys of a step),
/// and the offsets in shared memory kUnitBarrierOffset, kUnitOffset and kUnitNumberOffset (an int for each warp).
template <class Config>
class AbsorbedUnits {
 public:
  MLA_DEVICE explicit AbsorbedUnits(const cuda::AbsorbedArgs& args)
      : args_(args), memory_(ptx::shared_memory()), shared_(ptx::shared_address(memory_)) {}

  /// All lanes of a warp call this. It waits until the warp's next unit is described. Returns false if no unit is left.
  MLA_DEVICE bool next_unit() const {
    const int number = unit_number() + 1;
    ptx::sync_warp();
    if (ptx::lane() == 0) *number_of_warp() = number;
    ptx::sync_warp();
    ptx::mbarrier_wait(unit_full(number), unit_parity(number));
    return unit().more;
  }

 protected:
  /// Initializes the units' barriers. One thread of the block calls this, before fence_mbarrier_init().
  MLA_DEVICE void init_unit_barriers() const {
    for (int i = 0; i < kUnitPlaces; ++i) {
      ptx::mbarrier_init(unit_full(i), 1);
      ptx::mbarrier_init(unit_empty(i), Config::kWarps);
    }
  }
  /// Sets the warp's unit number to -1, so that its next unit is unit 0. Every warp calls this, before a barrier of the
  /// whole block.
  MLA_DEVICE void init_unit_number() const {
    if (ptx::lane() == 0) *number_of_warp() = -1;
  }

  /// The one thread that describes units calls this before its warp goes on to the next unit, which it describes.
  MLA_DEVICE void describe_next_unit(UnitWalk& walk) const {
    const int number = unit_number() + 1;
    if (number >= kUnitPlaces) ptx::mbarrier_wait(unit_empty(number), unit_parity(number - kUnitPlaces));
    walk.describe_next<Config>(args_, unit(number));
    ptx::mbarrier_arrive(unit_full(number));
    walk.read_ahead(args_);
  }

  /// A phase of unit_full ends when the unit is described, one of unit_empty when every warp is done with the unit.
  MLA_DEVICE ptx::SharedAddress unit_full(int unit) const { return unit_barrier(kUnitFull + unit % kUnitPlaces); }
  MLA_DEVICE ptx::SharedAddress unit_empty(int unit) const { return unit_barrier(kUnitEmpty + unit % kUnitPlaces); }
  MLA_DEVICE static uint32_t unit_parity(int unit) { return static_cast<uint32_t>(unit / kUnitPlaces) & 1U; }

  MLA_DEVICE AbsorbedUnit& unit(int number) const {
    return *as<AbsorbedUnit>(memory_ + Config::kUnitOffset + number % kUnitPlaces * kUnitBytes);
  }
  MLA_DEVICE AbsorbedUnit& unit() const { return unit(unit_number()); }
  /// Returns the number of the warp's unit. It is kept in shared memory because registers are short.
  MLA_DEVICE int unit_number() const { return *number_of_warp(); }

  /// A warp calls this before it reads unit().unmasked. All warps that do write the same values.
  MLA_DEVICE void find_unmasked_steps() const {
    if constexpr (kUnmaskedStepsLater<Config>) {
      if (ptx::lane() == 0) unit().template find_unmasked_steps<Config>(args_);
      ptx::sync_warp();
    }
  }

  /// All lanes of a warp call this when the warp is done with its unit.
  MLA_DEVICE void leave_unit() const {
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(unit_empty(unit_number()));
  }

  const cuda::AbsorbedArgs& args_;
  std::byte* const memory_;
  const ptx::SharedAddress shared_;

 private:
  MLA_DEVICE ptx::SharedAddress unit_barrier(int i) const {
    return shared_ + static_cast<uint32_t>(Config::kUnitBarrierOffset + i * kMbarrierBytes);
  }
  MLA_DEVICE int* number_of_warp() const {
    return as<int>(memory_ + Config::kUnitNumberOffset + ptx::warp() * static_cast<int>(sizeof(int)));
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE
