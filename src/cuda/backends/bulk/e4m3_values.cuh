// SPDX-License-Identifier: Apache-2.0
// The value warps of quantized rows multiply P times scales, in f16, by e4m3 elements. All channels of a warp share one
// scale of a key.
#pragma once

#include "cuda/backends/bulk/e4m3_rows.cuh"
#include "cuda/backends/bulk/outputs.cuh"

namespace mla::MLA_CUDA_NAMESPACE::bulk {

template <class Config>
class E4m3ValueRole : OutputRole<Config> {
  using Block = AbsorbedBlock<Config>;
  using Output = OutputRole<Config>;
  using Block::args_, Block::unit, Output::kValueThreads, Output::output_channel, Output::outputs_, Output::value_warp;

 public:
  using Block::next_unit;

  MLA_DEVICE explicit E4m3ValueRole(const cuda::AbsorbedArgs& args) : Output(args) {}

  MLA_DEVICE void compute() {
    Output::clear_outputs();
    reference_ = 0;
    MLA_NO_UNROLL
    for (int pool = 0; pool < 2; ++pool) {
      const uint32_t end = Block::end_of_pool(pool);
      if (is_rope_warp())
        steps<true>(pool, end);
      else
        steps<false>(pool, end);
    }
    ptx::mbarrier_wait(Block::stats_full(), Block::stats_parity(Block::unit_number()));
    finish_outputs();
    Block::leave_unit();
  }

 private:
  static constexpr int kTiles = Config::kOutputTilesN;
  static constexpr int kSteps = Config::kKeys / 16;  // K steps: the 16 keys of one mma
  static_assert(Config::kOutputTilesM == 1 && kTiles % 4 == 0);

  /// Returns whether this warp's channels are rotary. In some formats d_v includes the rotary channels, which are bf16
  /// and belong to the last warp.
  MLA_DEVICE bool is_rope_warp() const { return output_channel() >= args_.pools[0].cache.d_ckv; }

  MLA_DEVICE int group_of(const LandedRows& rows) const { return is_rope_warp() ? 0 : rows.group_of(output_channel()); }

  template <bool kRope>
  MLA_DEVICE void steps(int pool, uint32_t end) {
    const Places at(*this, landed_rows<Config>(args_.pools, pool));
    MLA_NO_UNROLL
    for (; next_ < end; ++next_) {
      const uint32_t n = next_;
      ptx::mbarrier_wait(Block::kv_full(n), Block::kv_parity(n));  // makes what bulk copies wrote visible
      ptx::mbarrier_wait(Block::p_full(n), Block::p_parity(n));
      const auto both = ptx::load_shared<uint64_t>(Block::events(n));
      const auto events = static_cast<uint32_t>(both);
      const uint32_t reference = kRope ? 0U : static_cast<uint32_t>(both >> 32);
      bool in_f16 = true;
      if ((events | (reference ^ reference_)) != 0) [[unlikely]] {
        const LandedRows rows = landed_rows<Config>(args_.pools, pool);
        if (Block::poison(n).any()) silence_poison<kRope>(n, rows);
        Output::rescale(n, kRope ? 1.0F : change_reference(reference & ~kSmallScales));
        in_f16 = (reference & kSmallScales) == 0;
        if (!in_f16) add_values_in_bf16(n, rows);
      }
      if constexpr (kRope)
        add_rope(n, at);
      else if (in_f16)
        add_values_in_f16(n, at);
      ptx::sync_warp();
      if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::kv_empty(n));
    }
  }

  /// Tells where the lane reads its operands: values by bytes from a stage's begin, P and scales by the addresses of
  /// those of even steps.
  struct Places {
    MLA_DEVICE Places(const E4m3ValueRole& role, const LandedRows& rows)
        : values(static_cast<uint32_t>((ptx::lane() & 15) * Config::kKeyPitch + (ptx::lane() >> 4) * kChunkBytes) +
                 (role.is_rope_warp() ? rows.rope_at + static_cast<uint32_t>((output_channel() - rows.d_ckv) * 2)
                                      : static_cast<uint32_t>(output_channel()))),
          p(role.p(0) + static_cast<uint32_t>((ptx::lane() & 15) * Config::kPPitch + (ptx::lane() >> 4) * kChunkBytes)),
          scales(role.value_scales(0, role.group_of(rows)) + static_cast<uint32_t>((ptx::lane() & 3) * 4)) {}

    uint32_t values;  // for ldmatrix: key `lane & 15` and chunk `lane >> 4`
    ptx::SharedAddress p, scales;
  };

  /// Takes over the reference of a step. Returns the factor for the accumulators, which are divided by the reference.
  /// It is at most 1: a reference only grows, from 0 before the unit's first one.
  MLA_DEVICE float change_reference(uint32_t reference) {
    if (reference == reference_) return 1.0F;
    const float change = std::bit_cast<float>(reference_) / std::bit_cast<float>(reference);
    reference_ = reference;
    return change;
  }

  /// Loads P of 16 keys as an A operand. Lane 4 g + t gets rows g and g + 8, keys 2 t and 2 t + 1, then the keys 8
  /// further.
  MLA_DEVICE static void load_p(uint32_t (&a)[4], uint32_t n, int step, const Places& at) {
    ptx::ldmatrix_x4(
        a, at.p + n % Config::kParities * Config::kPBytes + static_cast<uint32_t>(step * Config::kKStepBytes));
  }

  /// Holds the B operands, in f16, of 16 keys and 16 channels: one tile has the even channels as its columns, the other
  /// one the odd channels.
  struct ValueOperands {
    uint32_t even[2], odd[2];
  };
  /// Converts elements of 16 keys; each word has two neighbouring keys' two neighbouring channels.
  MLA_DEVICE static void to_f16(ValueOperands& to, uint32_t low_keys, uint32_t high_keys) {
    constexpr uint32_t kEvenBytesFirst = 0x3120;  // two keys' two channels become two channels' two keys
    ptx::e4m3x4_to_f16x2(ptx::permute_bytes(low_keys, kEvenBytesFirst), to.even[0], to.odd[0]);
    ptx::e4m3x4_to_f16x2(ptx::permute_bytes(high_keys, kEvenBytesFirst), to.even[1], to.odd[1]);
  }

  /// Calls f(j, values) with the operands of tiles j and j + 1, for all channels of the warp and 16 keys.
  template <class F>
  MLA_DEVICE void for_each_tile_pair(uint32_t n, int step, const Places& at, const F& f) const {
    const ptx::SharedAddress rows = Block::stage(n) + at.values + static_cast<uint32_t>(step * 16 * Config::kKeyPitch);
    MLA_UNROLL
    for (int j = 0; j < kTiles; j += 4) {
      uint32_t words[4];  // keys 0-7 and 8-15 of 16 channels, then of the next 16
      ptx::ldmatrix_x4_trans(words, rows + static_cast<uint32_t>(j * 8));
      MLA_UNROLL
      for (int pair = 0; pair < 2; ++pair) {
        ValueOperands values;
        to_f16(values, words[2 * pair], words[2 * pair + 1]);
        f(j + 2 * pair, values);
      }
    }
  }

  /// Adds P V of step n, with P times scales in f16.
  MLA_DEVICE void add_values_in_f16(uint32_t n, const Places& at) {
    const ptx::SharedAddress scales = at.scales + n % Config::kParities * Config::kScaleBytes;
    MLA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[4];
      load_p(a, n, step, at);
      MLA_UNROLL
      for (int i = 0; i < 4; ++i)
        a[i] = ptx::mul_f16x2(
            a[i], ptx::load_shared<uint32_t>(scales + static_cast<uint32_t>(step * Config::kKStepBytes + i / 2 * 16)));
      for_each_tile_pair(n, step, at, [&](int j, const ValueOperands& values) {
        ptx::mma_f16(outputs_[0][j], a, values.even[0], values.even[1]);
        ptx::mma_f16(outputs_[0][j + 1], a, values.odd[0], values.odd[1]);
      });
    }
  }

  /// Does the same in bf16, whose range holds P times any scale.
  MLA_DEVICE void add_values_in_bf16(uint32_t n, const LandedRows& from) {
    const Places at(*this, from);
    const int group = group_of(from);
    const float inverse = 1.0F / std::bit_cast<float>(reference_);
    MLA_NO_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[4];
      load_p(a, n, step, at);
      MLA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int key = step * 16 + i / 2 * 8 + (ptx::lane() & 3) * 2;
        a[i] = scale_to_bf16(a[i], from.scale(Block::stage(n), key, group) * inverse,
                             from.scale(Block::stage(n), key + 1, group) * inverse);
      }
      for_each_tile_pair(n, step, at, [&](int j, const ValueOperands& values) {
        const auto bf16 = [](uint32_t pair) { return scale_to_bf16(pair, 1.0F, 1.0F); };
        ptx::mma_bf16(outputs_[0][j], a, bf16(values.even[0]), bf16(values.even[1]));
        ptx::mma_bf16(outputs_[0][j + 1], a, bf16(values.odd[0]), bf16(values.odd[1]));
      });
    }
  }

  /// Adds P V of step n for rotary channels, which are bf16.
  MLA_DEVICE void add_rope(uint32_t n, const Places& at) {
    const ptx::SharedAddress rows = Block::stage(n) + at.values;
    MLA_NO_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[4];
      load_p(a, n, step, at);
      MLA_UNROLL
      for (int i = 0; i < 4; ++i) a[i] = scale_to_bf16(a[i], 1.0F, 1.0F);
      MLA_UNROLL
      for (int j = 0; j < kTiles; j += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, rows + static_cast<uint32_t>(step * 16 * Config::kKeyPitch + j * 16));
        ptx::mma_bf16(outputs_[0][j], a, b[0], b[1]);
        ptx::mma_bf16(outputs_[0][j + 1], a, b[2], b[3]);
      }
    }
  }

  /// Clears elements that are NaN, and scales that are not finite, of keys that are marked as poison (poison.cuh). The
  /// first of the warps that share a scale clears it.
  template <bool kRope>
  MLA_DEVICE void silence_poison(uint32_t n, const LandedRows& from) const {
    const int group = group_of(from);
    const bool first_of_group = !kRope && (value_warp() == 0 || group != from.group_of(output_channel() - 1));
    Block::poison(n).for_each_marked([&](int key) {
      const ptx::SharedAddress row = Block::stage(n) + static_cast<uint32_t>(key * Config::kKeyPitch);
      if constexpr (kRope) {
        silence_values<DType::kBF16>(Config::kOutputDims, [&](int c) {
          return row + from.rope_at + static_cast<uint32_t>((output_channel() - from.d_ckv + c) * 2);
        });
      } else {
        MLA_NO_UNROLL
        for (int c = ptx::lane(); c < Config::kOutputDims; c += kWarpSize) {
          const ptx::SharedAddress at = row + static_cast<uint32_t>(output_channel() + c);
          constexpr uint8_t kNan = 0x7F;  // of e4m3, but for the sign
          if ((ptx::load_shared<uint8_t>(at) & kNan) == kNan) ptx::store_shared(at, uint8_t{0});
        }
      }
      if (first_of_group && ptx::lane() == 0) silence_scale(n, key, from, group);
    });
    ptx::fence_async_proxy();
    // Behind this barrier every value warp has seen the marks, and every lane of this warp sees the zeros.
    ptx::sync_threads(Block::kValuesBarrier, kValueThreads);
    if (value_warp() == 0) Block::poison(n).reset(ptx::lane(), kWarpSize);
  }

  /// Clears the scale of a key and a group if it is not finite, in the stage and among the scale warp's results.
  MLA_DEVICE void silence_scale(uint32_t n, int key, const LandedRows& from, int group) const {
    if (is_finite(from.scale(Block::stage(n), key, group))) return;
    ptx::store_shared(Block::value_scales(n, group) + static_cast<uint32_t>(key * 2), uint16_t{0});
    const ptx::SharedAddress at = Block::stage(n) + from.scales_at + static_cast<uint32_t>(key) * from.scale_pitch;
    if (from.ue8m0)
      ptx::store_shared(at + static_cast<uint32_t>(group), uint8_t{0});
    else
      ptx::store_shared(at + static_cast<uint32_t>(group * 4), 0.0F);
  }

  /// Multiplies the accumulators by the reference and by 2^-kPShift, and stores them.
  MLA_DEVICE void finish_outputs() {
    const float factor =
        ptx::exp2_approx(-kPShift<Config>) * (is_rope_warp() ? 1.0F : std::bit_cast<float>(reference_));
    MLA_UNROLL
    for (int j = 0; j < kTiles; ++j) MLA_UNROLL
    for (int i = 0; i < 4; ++i) outputs_[0][j][i] *= factor;
    if (is_rope_warp()) {
      Output::template store_outputs<2>();
      return;
    }
    MLA_UNROLL
    for (int j = 0; j < kTiles; j += 2) MLA_UNROLL
    for (int i = 0; i < 4; i += 2) {  // even and odd channels become neighbours
      const float odd = outputs_[0][j + 1][i];
      outputs_[0][j + 1][i] = outputs_[0][j][i + 1];
      outputs_[0][j][i + 1] = odd;
    }
    Output::template store_outputs<4>();
  }

  uint32_t next_ = 0;       // number of the next step
  uint32_t reference_ = 0;  // bits of the f32 by which the accumulators are divided
};

}  // namespace mla::MLA_CUDA_NAMESPACE::bulk
