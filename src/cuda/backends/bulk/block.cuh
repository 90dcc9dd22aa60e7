// SPDX-License-Identifier: Apache-2.0
// The roles of the warp-specialized kernel share what is here: their barriers and the map of their shared memory.
#pragma once

#include <type_traits>

#include "cuda/backends/bulk/config.cuh"

namespace mla::MLA_CUDA_NAMESPACE::bulk {

/// P of quantized rows is stored times 2 to this power, so that small probabilities stay precise in f16. The products
/// with the scales do not overflow f16: P is up to 2^8, and scales over their reference are below 4 (ScaleRole).
template <class Config>
inline constexpr float kPShift = Config::kQuantized ? 5.0F : 0.0F;

/// This is the base of all roles. Step n uses stage n % kStages, and place n % 2 of P, factors, events, scales and
/// poison marks.
template <class Config>
class AbsorbedBlock : protected AbsorbedUnits<Config> {
  using Units = AbsorbedUnits<Config>;

 public:
  using Units::Units, Units::next_unit;

  /// Initializes barriers, poison marks and unit numbers. All threads of the block call this, once.
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
      for (int i = 0; i < Config::kParities; ++i)
        ptx::mbarrier_init(p_full(i), Config::kSoftmaxWarps + Config::kScaleWarps);
      ptx::mbarrier_init(stats_full(), Config::kSoftmaxWarps);
      Units::init_unit_barriers();
      ptx::fence_mbarrier_init();
    }
    for (int i = ptx::thread_index(); i < Config::kParities * Config::kPoisonBytes; i += Config::kThreads)
      memory_[Config::kPoisonOffset + i] = std::byte{0};
    Units::init_unit_number();
    ptx::sync_block();
  }

 protected:
  using Units::args_, Units::memory_, Units::shared_, Units::unit;
  /// These are named barriers (bar.sync). Number 0 is that of sync_block().
  enum NamedBarrier : int { kValuesBarrier = 1 };

  /// A phase of kv_full ends when the rows of step n are in their stage, one of kv_empty when every value warp is done
  /// with them, and one of p_full when P of step n, the factors of its rows and the scales of its keys are written.
  MLA_DEVICE ptx::SharedAddress kv_full(uint32_t n) const { return barrier(Config::kKvFull + n % Config::kStages); }
  MLA_DEVICE ptx::SharedAddress kv_empty(uint32_t n) const { return barrier(Config::kKvEmpty + n % Config::kStages); }
  MLA_DEVICE ptx::SharedAddress p_full(uint32_t n) const { return barrier(Config::kPFull + n % Config::kParities); }
  /// A phase of stats_full ends when the output factors of a unit are written, which comes after P of its last step.
  MLA_DEVICE ptx::SharedAddress stats_full() const { return barrier(Config::kStatsFull); }
  /// A phase of s_full ends when the band's score warps have written their scores, one of s_empty when its softmax
  /// warps have read them.
  MLA_DEVICE ptx::SharedAddress s_full(int band) const { return barrier(Config::kSFull + static_cast<uint32_t>(band)); }
  MLA_DEVICE ptx::SharedAddress s_empty(int band) const {
    // Relative to s_full: from barrier(kSEmpty + band) nvcc 13.0 made other code for SM100.
    return s_full(band) + (Config::kSEmpty - Config::kSFull) * kMbarrierBytes;
  }
  /// The one phase of first_issued ends when all copies of a group of the first steps are issued.
  MLA_DEVICE ptx::SharedAddress first_issued(uint32_t group) const { return barrier(Config::kFirstIssued + group); }
  MLA_DEVICE static uint32_t s_parity(uint32_t n) { return n & 1U; }
  MLA_DEVICE static uint32_t kv_parity(uint32_t n) { return n / Config::kStages & 1U; }
  MLA_DEVICE static uint32_t p_parity(uint32_t n) { return n / Config::kParities & 1U; }
  MLA_DEVICE static uint32_t stats_parity(int unit) { return static_cast<uint32_t>(unit) & 1U; }

  /// Returns where the unit's steps of a pool end: the number of the step behind the last one. Pool 1 ends with the
  /// unit.
  MLA_DEVICE uint32_t end_of_pool(int pool) const {
    const AbsorbedUnit& of = unit();
    if (pool == 1 || of.keys.second_pool >= of.segment.key_end) return of.steps.end;
    const int32_t behind = of.segment.key_end - std::max(of.keys.second_pool, of.segment.key_begin);
    return of.steps.end - static_cast<uint32_t>((behind + Config::kKeys - 1) / Config::kKeys);
  }

  /// Returns a bit for each key of step n, set if the key has a row. Bit 0 is that of `key`, and the bits end with the
  /// 32 keys that it belongs to (keys 0 ... 31 or 32 ... 63).
  MLA_DEVICE uint32_t valid_from(uint32_t n, int key) const {
    const int word = Config::kKeys == 32 ? 0 : key / 32;
    return as<uint32_t>(memory_ + valid_offset(n))[word] >> (key - word * 32);
  }
  /// Sets these bits for the keys of a copy. The copies of step n begin with number kStepCopies * n.
  MLA_DEVICE void set_valid(uint32_t copy, uint32_t bits) const {
    using Bits = std::conditional_t<Config::kCopyKeys == 16, uint16_t, uint32_t>;
    as<Bits>(memory_ + valid_offset(copy / Config::kStepCopies))[copy % Config::kStepCopies] = static_cast<Bits>(bits);
  }
  MLA_DEVICE PoisonMarks<Config::kKeys> poison(uint32_t n) const {
    return PoisonMarks<Config::kKeys>(
        as<uint8_t>(memory_ + Config::kPoisonOffset + n % Config::kParities * Config::kPoisonBytes));
  }
  /// Returns one factor for each row, by which value warps multiply the accumulators in step n, before they add its
  /// values.
  MLA_DEVICE float* factors(uint32_t n) const {
    return as<float>(memory_ + Config::kFactorOffset) + n % Config::kParities * Config::kRows;
  }
  /// Returns one factor for each row, by which value warps multiply the accumulators at the end of the unit.
  MLA_DEVICE float* output_factors() const { return as<float>(memory_ + Config::kOutputFactorOffset); }
  /// Returns where the events of quantized rows lie. Each softmax warp writes one byte: 1 if a factor of its rows is
  /// not 1 in step n, or if keys may be poison; then value warps look at factors and marks. The reference of the scales
  /// follows (ScaleRole), so that one load of 8 bytes brings both.
  MLA_DEVICE ptx::SharedAddress events(uint32_t n) const {
    return shared_ + Config::kEventOffset + n % Config::kParities * Config::kEventBytes;
  }
  MLA_DEVICE ptx::SharedAddress scale_reference(uint32_t n) const { return events(n) + kReferenceAt; }
  MLA_DEVICE ptx::SharedAddress stage(uint32_t n) const {
    return shared_ + static_cast<uint32_t>(Config::kStageOffset + n % Config::kStages * Config::kStageBytes);
  }
  /// Returns where the scales of step n lie if they are not copied with their rows: kKeyScaleBytes for each key.
  MLA_DEVICE ptx::SharedAddress stage_scales(uint32_t n) const { return stage(n) + Config::kKeys * Config::kKeyPitch; }
  /// Returns where the scale warp's results lie: the scales of a group of channels, for all keys of step n, in f16; of
  /// e4m3, divided by the reference.
  MLA_DEVICE ptx::SharedAddress value_scales(uint32_t n, int group) const {
    return shared_ + static_cast<uint32_t>(Config::kScaleOffset + group * Config::kScalePitch) +
           n % Config::kParities * Config::kScaleBytes;
  }
  /// Returns where P of step n lies, in rows that are kPPitch bytes apart.
  MLA_DEVICE ptx::SharedAddress p(uint32_t n) const {
    return shared_ + static_cast<uint32_t>(Config::kPOffset + n % Config::kParities * Config::kPBytes);
  }
  /// Returns where the lane's four scores of an accumulator lie, if scores have that layout. The lane is 4 g + t: it
  /// has rows g and 8 + g of tile `m` of the band, and keys 8 j + 2 t and 8 j + 2 t + 1.
  MLA_DEVICE ptx::SharedAddress scores(int band, int slice, int m, int j) const {
    return shared_ +
           static_cast<uint32_t>(
               Config::kScoreOffset +
               (((band * Config::kSlices + slice) * Config::kBandTiles + m) * (Config::kKeys / 8) + j) * kTileBytes +
               ptx::lane() * kChunkBytes);
  }
  /// Returns where the scores of a row over one K slice lie, if scores lie in rows.
  MLA_DEVICE ptx::SharedAddress score_row(int slice, int row) const {
    return shared_ + static_cast<uint32_t>(Config::kScoreOffset + (slice * Config::kRows + row) * Config::kScorePitch);
  }

 private:
  static constexpr int kReferenceAt = 4;  // the reference lies behind a byte of each softmax warp
  static_assert(!Config::kQuantized || Config::kSoftmaxWarps <= kReferenceAt);
  static constexpr int kTileBytes = kWarpSize * kChunkBytes;  // bytes of the accumulators of an m16n8 tile

  MLA_DEVICE static uint32_t valid_offset(uint32_t n) {
    return Config::kValidOffset + n % Config::kStages * (Config::kKeys / 8);
  }
  MLA_DEVICE ptx::SharedAddress barrier(uint32_t i) const {
    return shared_ + Config::kBarrierOffset + i * kMbarrierBytes;
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::bulk
