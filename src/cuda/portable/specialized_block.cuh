// SPDX-License-Identifier: Apache-2.0
// What the roles of the warp-specialized kernel share: the map of shared memory, the barriers, the units.
#pragma once

#include "cuda/portable/absorbed_keys.cuh"
#include "cuda/portable/absorbed_rows.cuh"
#include "cuda/portable/specialized_config.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// What all threads of a block know of a segment they compute.
struct SpecializedUnit {
  cuda::Segment segment;
  KeyList keys;
  UnitRows rows;
  KeyRange plain;     // keys that every row sees and whose scores need nothing but the scale
  int32_t slot;       // of the partial state, -1: write outputs
  uint32_t step_end;  // number of the step behind the unit's last
  bool more;          // whether all this is about a segment; else there is none any more
};

/// By which power of two weights for quantized rows are stored larger, so that small ones stay precise in f16: weights
/// are up to 2^8, scales over their reference below 4 (ScaleRole).
template <class Config>
inline constexpr float kWeightShift = Config::kQuantized ? 5.0F : 0.0F;

/// Roles walk through the units each at its own pace, at most two units apart. Units and steps are numbered from the
/// kernel's start on: unit u is described in place u % 2, step n uses stage n % kStages and weights n % 2.
template <class Config>
class SpecializedBlock {
 public:
  MLA_DEVICE explicit SpecializedBlock(const cuda::AbsorbedArgs& args)
      : args_(args), memory_(ptx::shared_memory()), shared_(ptx::shared_address(memory_)) {}

  /// For all threads, once.
  MLA_DEVICE void init() const {
    if (ptx::thread_index() == 0) {
      for (int stage = 0; stage < Config::kStages; ++stage) {
        ptx::mbarrier_init(full(stage), 1);
        ptx::mbarrier_init(free(stage), Config::kValueWarps);
      }
      for (int band = 0; band < Config::kBands; ++band) {
        ptx::mbarrier_init(scored(band), Config::kScoreWarps / Config::kBands);
        ptx::mbarrier_init(taken(band), Config::kWeightWarps / Config::kBands);
      }
      for (int i = 0; i < 2; ++i) {
        ptx::mbarrier_init(ready(i), Config::kWeightWarps + Config::kScaleWarps);
        ptx::mbarrier_init(described(i), 1);
        ptx::mbarrier_init(left(i), Config::kWarps);
      }
      ptx::mbarrier_init(weighed(), Config::kWeightWarps);
      ptx::fence_mbarrier_init();
    }
    for (int i = ptx::thread_index(); i < 2 * Config::kPoisonBytes; i += Config::kThreads)
      memory_[Config::kPoisonOffset + i] = std::byte{0};
    if (ptx::lane() == 0) *number_of_warp() = -1;
    ptx::sync_block();
  }

  /// For a warp: waits until its next unit is described. False: there is none.
  MLA_DEVICE bool next_unit() const {
    const int number = unit_number() + 1;
    ptx::sync_warp();
    if (ptx::lane() == 0) *number_of_warp() = number;
    ptx::sync_warp();
    ptx::mbarrier_wait(described(number), unit_parity(number));
    return unit().more;
  }

 protected:
  static constexpr int kValuesBarrier = 1;
  static_assert(sizeof(SpecializedUnit) <= Config::kUnitBytes);

  /// The rows of a stage are there; every value warp is done with it; every weight warp has written its weights.
  MLA_DEVICE ptx::SharedAddress full(uint32_t n) const { return barrier(n % Config::kStages); }
  MLA_DEVICE ptx::SharedAddress free(uint32_t n) const { return barrier(Config::kStages + n % Config::kStages); }
  MLA_DEVICE ptx::SharedAddress ready(uint32_t n) const { return barrier(2 * Config::kStages + n % 2); }
  /// The unit is described; its last weights and its output factors are written; every warp is done with it.
  MLA_DEVICE ptx::SharedAddress described(int unit) const { return barrier(2 * Config::kStages + 2 + unit % 2); }
  MLA_DEVICE ptx::SharedAddress weighed() const { return barrier(2 * Config::kStages + 4); }
  MLA_DEVICE ptx::SharedAddress left(int unit) const { return barrier(2 * Config::kStages + 5 + unit % 2); }
  /// The band's score warps have written their scores; its weight warps have read them.
  MLA_DEVICE ptx::SharedAddress scored(int band) const {
    return barrier(2 * Config::kStages + 7 + static_cast<uint32_t>(band));
  }
  MLA_DEVICE ptx::SharedAddress taken(int band) const { return scored(band) + Config::kBands * 8; }
  MLA_DEVICE static uint32_t score_parity(uint32_t n) { return n & 1U; }
  MLA_DEVICE static uint32_t stage_parity(uint32_t n) { return n / Config::kStages & 1U; }
  MLA_DEVICE static uint32_t ready_parity(uint32_t n) { return n / 2 & 1U; }
  MLA_DEVICE static uint32_t weighed_parity(int unit) { return static_cast<uint32_t>(unit) & 1U; }
  MLA_DEVICE static uint32_t unit_parity(int unit) { return static_cast<uint32_t>(unit / 2) & 1U; }

  MLA_DEVICE SpecializedUnit& unit(int number) const {
    return *as<SpecializedUnit>(memory_ + Config::kUnitOffset + number % 2 * Config::kUnitBytes);
  }
  MLA_DEVICE SpecializedUnit& unit() const { return unit(unit_number()); }
  /// Number of the step behind the unit's last of pool 0; and of pool 1, the unit's last.
  MLA_DEVICE uint32_t last_step_of_pool(int pool) const {
    const SpecializedUnit& of = unit();
    if (pool == 1 || of.keys.second_pool >= of.segment.key_end) return of.step_end;
    const int32_t behind = of.segment.key_end - std::max(of.keys.second_pool, of.segment.key_begin);
    return of.step_end - static_cast<uint32_t>((behind + Config::kKeys - 1) / Config::kKeys);
  }
  /// The warp's. It lies in shared memory: registers are short.
  MLA_DEVICE int unit_number() const { return *number_of_warp(); }

  /// For a warp that has done its part of the unit.
  MLA_DEVICE void leave_unit() const {
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(left(unit_number()));
  }

  /// A bit for each key of the step that has a row.
  MLA_DEVICE uint32_t* valid(uint32_t n) const {
    return as<uint32_t>(memory_ + Config::kValidOffset + n % Config::kStages * 4);
  }
  /// A byte for each key of the step that some rows do not see and whose channels are not finite; then one for any.
  MLA_DEVICE uint8_t* poison(uint32_t n) const {
    return as<uint8_t>(memory_ + Config::kPoisonOffset + n % 2 * Config::kPoisonBytes);
  }
  /// What the outputs so far are to be multiplied by in step n; and in the end of a unit.
  MLA_DEVICE float* factors(uint32_t n) const {
    return as<float>(memory_ + Config::kFactorOffset) + n % 2 * Config::kRows;
  }
  /// Of quantized rows. A byte of each weight warp: whether factors of step n are not 1, or keys may be poison. Behind
  /// them the scales' reference.
  MLA_DEVICE ptx::SharedAddress events(uint32_t n) const { return shared_ + Config::kEventOffset + n % 2 * 8; }
  MLA_DEVICE ptx::SharedAddress scale_reference(uint32_t n) const { return events(n) + 4; }
  MLA_DEVICE float* output_factors() const { return factors(0) + 2 * Config::kRows; }
  MLA_DEVICE ptx::SharedAddress stage(uint32_t n) const {
    return shared_ + static_cast<uint32_t>(Config::kStageOffset + n % Config::kStages * Config::kStageBytes);
  }
  /// Of quantized rows whose scales do not come with them: kKeyScaleBytes of each key.
  MLA_DEVICE ptx::SharedAddress stage_scales(uint32_t n) const { return stage(n) + Config::kKeys * Config::kKeyPitch; }
  /// Of a step's group of channels: every key's scale over the reference, in f16.
  MLA_DEVICE ptx::SharedAddress value_scales(uint32_t n, int group) const {
    return shared_ + static_cast<uint32_t>(Config::kScaleOffset + group * Config::kKeys * 2) +
           n % 2 * Config::kScaleBytes;
  }
  MLA_DEVICE ptx::SharedAddress weights(uint32_t n) const {
    return shared_ + static_cast<uint32_t>(Config::kWeightOffset + n % 2 * Config::kWeightBytes);
  }
  /// The lane's four scores: rows g and g + 8 of tile `m` of the band, keys 8 j + 2 t and the next.
  MLA_DEVICE ptx::SharedAddress scores(int band, int part, int m, int j) const {
    return shared_ + static_cast<uint32_t>(Config::kScoreOffset +
                                           (((band * Config::kParts + part) * Config::kBandTiles + m) * 4 + j) * 512 +
                                           ptx::lane() * kChunkBytes);
  }
  /// Where scores lie in rows: those over a part of the channels.
  MLA_DEVICE ptx::SharedAddress score_row(int part, int row) const {
    return shared_ + static_cast<uint32_t>(Config::kScoreOffset + (part * Config::kRows + row) * Config::kScorePitch);
  }

  const cuda::AbsorbedArgs& args_;
  std::byte* const memory_;
  const ptx::SharedAddress shared_;

 private:
  MLA_DEVICE ptx::SharedAddress barrier(uint32_t i) const { return shared_ + Config::kBarrierOffset + i * 8; }
  MLA_DEVICE int* number_of_warp() const {
    return as<int>(memory_ + Config::kUnitNumberOffset + ptx::warp() * static_cast<int>(sizeof(int)));
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE
