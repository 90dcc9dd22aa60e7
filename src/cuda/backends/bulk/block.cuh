// SPDX-License-Identifier: Apache-2.0
// What the roles of the warp-specialized kernel share: the map of shared memory and the barriers.
#pragma once

#include <type_traits>

#include "cuda/backends/bulk/config.cuh"

namespace mla::MLA_CUDA_NAMESPACE::bulk {

/// By which power of two weights for quantized rows are stored larger, so that small ones stay precise in f16: weights
/// are up to 2^8, scales over their reference below 4 (ScaleRole).
template <class Config>
inline constexpr float kPShift = Config::kQuantized ? 5.0F : 0.0F;

/// Step n uses stage n % kStages and weights n % 2.
template <class Config>
class AbsorbedBlock : protected AbsorbedUnits<Config> {
  using Units = AbsorbedUnits<Config>;

 public:
  using Units::Units, Units::next_unit;

  /// For all threads, once.
  MLA_DEVICE void init() const {
    if (ptx::thread_index() == 0) {
      for (int stage = 0; stage < Config::kStages; ++stage) {
        ptx::mbarrier_init(kv_full(stage), Config::kStepCopies);
        ptx::mbarrier_init(kv_empty(stage), Config::kValueWarps);
      }
      for (int group = 0; group < Config::kFirstGroups; ++group)
        ptx::mbarrier_init(first_issued(group), Config::kGroupCopies);
      for (int band = 0; band < Config::kBands; ++band) {
        ptx::mbarrier_init(s_full(band), Config::kScoreWarps / Config::kBands);
        ptx::mbarrier_init(s_empty(band), Config::kSoftmaxWarps / Config::kBands);
      }
      for (int i = 0; i < 2; ++i) ptx::mbarrier_init(p_full(i), Config::kSoftmaxWarps + Config::kScaleWarps);
      ptx::mbarrier_init(stats_full(), Config::kSoftmaxWarps);
      Units::init_unit_barriers();
      ptx::fence_mbarrier_init();
    }
    for (int i = ptx::thread_index(); i < 2 * Config::kPoisonBytes; i += Config::kThreads)
      memory_[Config::kPoisonOffset + i] = std::byte{0};
    Units::init_unit_number();
    ptx::sync_block();
  }

 protected:
  using Units::args_, Units::memory_, Units::shared_, Units::unit;
  static constexpr int kValuesBarrier = 1;

  /// The rows of a stage are there; every value warp is done with it; every weight warp has written its weights.
  MLA_DEVICE ptx::SharedAddress kv_full(uint32_t n) const { return barrier(n % Config::kStages); }
  MLA_DEVICE ptx::SharedAddress kv_empty(uint32_t n) const { return barrier(Config::kStages + n % Config::kStages); }
  MLA_DEVICE ptx::SharedAddress p_full(uint32_t n) const { return barrier(2 * Config::kStages + n % 2); }
  /// The unit's last weights and its output factors are written.
  MLA_DEVICE ptx::SharedAddress stats_full() const { return barrier(2 * Config::kStages + 2); }
  /// The band's score warps have written their scores; its weight warps have read them.
  MLA_DEVICE ptx::SharedAddress s_full(int band) const {
    return barrier(2 * Config::kStages + 3 + static_cast<uint32_t>(band));
  }
  MLA_DEVICE ptx::SharedAddress s_empty(int band) const { return s_full(band) + Config::kBands * 8; }
  /// A group of the first copies is sent for. One phase.
  MLA_DEVICE ptx::SharedAddress first_issued(uint32_t group) const {
    return barrier(2 * Config::kStages + 3 + 2 * Config::kBands + group);
  }
  MLA_DEVICE static uint32_t s_parity(uint32_t n) { return n & 1U; }
  MLA_DEVICE static uint32_t kv_parity(uint32_t n) { return n / Config::kStages & 1U; }
  MLA_DEVICE static uint32_t p_parity(uint32_t n) { return n / 2 & 1U; }
  MLA_DEVICE static uint32_t stats_parity(int unit) { return static_cast<uint32_t>(unit) & 1U; }

  /// Number of the step behind the unit's last of pool 0; and of pool 1, the unit's last.
  MLA_DEVICE uint32_t last_step_of_pool(int pool) const {
    const AbsorbedUnit& of = unit();
    if (pool == 1 || of.keys.second_pool >= of.segment.key_end) return of.steps.end;
    const int32_t behind = of.segment.key_end - std::max(of.keys.second_pool, of.segment.key_begin);
    return of.steps.end - static_cast<uint32_t>((behind + Config::kKeys - 1) / Config::kKeys);
  }

  /// A bit for each key of step n that has a row: those from `key` on, as far as they are of the same 32.
  MLA_DEVICE uint32_t valid_from(uint32_t n, int key) const {
    const int word = Config::kKeys == 32 ? 0 : key / 32;
    return as<uint32_t>(memory_ + valid_offset(n))[word] >> (key - word * 32);
  }
  /// Those of a copy's keys. Step n's copies are kStepCopies * n and those behind it.
  MLA_DEVICE void set_valid(uint32_t copy, uint32_t bits) const {
    using Bits = std::conditional_t<Config::kCopyKeys == 16, uint16_t, uint32_t>;
    as<Bits>(memory_ + valid_offset(copy / Config::kStepCopies))[copy % Config::kStepCopies] = static_cast<Bits>(bits);
  }
  MLA_DEVICE PoisonMarks<Config::kKeys> poison(uint32_t n) const {
    return PoisonMarks<Config::kKeys>(as<uint8_t>(memory_ + Config::kPoisonOffset + n % 2 * Config::kPoisonBytes));
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
  MLA_DEVICE ptx::SharedAddress p(uint32_t n) const {
    return shared_ + static_cast<uint32_t>(Config::kPOffset + n % 2 * Config::kPBytes);
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

 private:
  MLA_DEVICE static uint32_t valid_offset(uint32_t n) {
    return Config::kValidOffset + n % Config::kStages * (Config::kKeys / 8);
  }
  MLA_DEVICE ptx::SharedAddress barrier(uint32_t i) const { return shared_ + Config::kBarrierOffset + i * 8; }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::bulk
