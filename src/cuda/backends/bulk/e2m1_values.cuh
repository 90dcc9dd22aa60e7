// SPDX-License-Identifier: Apache-2.0
// The value warps of rows of e2m1 multiply P, in f16, by elements times their scales. The scale warp lays the scales
// out for them.
#pragma once

#include "cuda/backends/bulk/e2m1_rows.cuh"
#include "cuda/backends/bulk/outputs.cuh"

namespace mla::MLA_CUDA_NAMESPACE::bulk {

/// Returns where the scales of a pair of keys, 2 pair and 2 pair + 1 of a step, lie among those of a group, in bytes. A
/// lane of a value warp multiplies pairs t, t + 4, t + 8, ...: they are neighbours.
MLA_DEVICE uint32_t scale_place(int pair) {
  constexpr int kPairsOfLane = 8;  // of the 32 pairs of a step
  return static_cast<uint32_t>(((pair & 3) * kPairsOfLane + pair / 4) * 4);
}

/// The scale warp converts the scales of a step to f16, [group of channels, pair of keys]. Lane l has pair l.
template <class Config>
class E2m1ScaleRole : AbsorbedBlock<Config> {
  using Block = AbsorbedBlock<Config>;

 public:
  using Block::next_unit;

  MLA_DEVICE explicit E2m1ScaleRole(const cuda::AbsorbedArgs& args) : Block(args) {}

  MLA_DEVICE void compute() {
    static_assert(Config::kKeys == 2 * kWarpSize && Config::kScaleGroups % 16 == 0);
    const uint32_t place =
        E2m1Row(Block::args_.pools[0]).scales_at + static_cast<uint32_t>(ptx::lane() * 2 * Config::kKeyPitch);
    MLA_NO_UNROLL
    for (; next_ < Block::unit().steps.end; ++next_) {
      const uint32_t n = next_;
      ptx::mbarrier_wait(Block::kv_full(n), Block::kv_parity(n));
      if (n >= 2) ptx::mbarrier_wait(Block::kv_empty(n - 2), Block::kv_parity(n - 2));
      const ptx::SharedAddress from = Block::stage(n) + place;
      MLA_UNROLL
      for (int group = 0; group < Config::kScaleGroups; group += 16) {
        const auto a = ptx::load_shared<ptx::Vec4>(from + static_cast<uint32_t>(group));
        const auto b = ptx::load_shared<ptx::Vec4>(from + static_cast<uint32_t>(group + Config::kKeyPitch));
        MLA_UNROLL
        for (int word = 0; word < 4; ++word) {
          store_pairs(n, group + word * 4, ptx::permute_bytes(a.x[word], b.x[word], 0x5140U));
          store_pairs(n, group + word * 4 + 2, ptx::permute_bytes(a.x[word], b.x[word], 0x7362U));
        }
      }
      ptx::sync_warp();
      if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::p_full(n));
    }
    Block::leave_unit();
  }

 private:
  /// Stores the scales of two groups, both keys of the first one first.
  MLA_DEVICE void store_pairs(uint32_t n, int group, uint32_t four) const {
    uint32_t first, second;
    ptx::e4m3x4_to_f16x2(four, first, second);
    ptx::store_shared(Block::value_scales(n, group) + scale_place(ptx::lane()), first);
    ptx::store_shared(Block::value_scales(n, group + 1) + scale_place(ptx::lane()), second);
  }

  uint32_t next_ = 0;  // number of the next step
};

template <class Config>
class E2m1ValueRole : OutputRole<Config> {
  using Block = AbsorbedBlock<Config>;
  using Output = OutputRole<Config>;
  using Block::args_, Output::kValueThreads, Output::output_channel, Output::outputs_, Output::value_warp;

 public:
  using Block::next_unit;

  MLA_DEVICE explicit E2m1ValueRole(const cuda::AbsorbedArgs& args) : Output(args) {}

  MLA_DEVICE void compute() {
    Output::clear_outputs();
    MLA_NO_UNROLL
    for (; next_ < Block::unit().steps.end; ++next_) {
      const uint32_t n = next_;
      ptx::mbarrier_wait(Block::kv_full(n), Block::kv_parity(n));  // makes what bulk copies wrote visible
      ptx::mbarrier_wait(Block::p_full(n), Block::p_parity(n));
      if (ptx::load_shared<uint32_t>(Block::events(n)) != 0) [[unlikely]] {
        if (Block::poison(n).any()) silence_poison(n);
        Output::rescale(n, 1.0F);
      }
      add_values(n);
      ptx::sync_warp();
      if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::kv_empty(n));
    }
    ptx::mbarrier_wait(Block::stats_full(), Block::stats_parity(Block::unit_number()));
    finish_outputs();
    Block::leave_unit();
  }

 private:
  static constexpr int kChunks = Config::kOutputDims / 32;  // of 32 channels, which are 16 bytes and four tiles
  static constexpr int kGroups = Config::kOutputDims / kE2m1Group;
  static_assert(Config::kOutputTilesM == 1 && kChunks == 2);

  /// Adds P V of step n. Transposed, a word has four neighbouring channels of two neighbouring keys, one for each of
  /// four tiles; so lane 4 g + t has, as column g of tile i of a chunk, channel 4 g + i.
  MLA_DEVICE void add_values(uint32_t n) {
    const auto chunk_of_lane = static_cast<uint32_t>((ptx::lane() >> 4) * kChunkBytes);
    const auto key_of_lane = static_cast<uint32_t>(ptx::lane() & 15);
    const ptx::SharedAddress codes =
        Block::stage(n) + key_of_lane * Config::kKeyPitch + chunk_of_lane + static_cast<uint32_t>(output_channel() / 2);
    const ptx::SharedAddress p = Block::p(n) + key_of_lane * Config::kPPitch + chunk_of_lane;
    const ptx::SharedAddress scales =
        Block::value_scales(n, output_channel() / kE2m1Group + (ptx::lane() >> 4)) + scale_place(ptx::lane() & 3);
    MLA_UNROLL
    for (int step = 0; step < Config::kKeys / 16; ++step) {
      uint32_t a[4], words[4];  // words: keys 0-7 and 8-15 of a chunk, then of the next
      ptx::ldmatrix_x4(a, p + static_cast<uint32_t>(step * Config::kKStepBytes));
      ptx::ldmatrix_x4_trans(words, codes + static_cast<uint32_t>(step * 16 * Config::kKeyPitch));
      MLA_UNROLL
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const auto both = ptx::load_shared<uint64_t>(scales + static_cast<uint32_t>(chunk * 2 * Config::kScalePitch) +
                                                     scale_place(step * 8));
        const E2m1Pairs low = e2m1x8_to_f16(words[2 * chunk], static_cast<uint32_t>(both));
        const E2m1Pairs high = e2m1x8_to_f16(words[2 * chunk + 1], static_cast<uint32_t>(both >> 32));
        float(&tiles)[Config::kOutputTilesN][4] = outputs_[0];
        ptx::mma_f16(tiles[chunk * 4], a, low.even[0], high.even[0]);
        ptx::mma_f16(tiles[chunk * 4 + 1], a, low.odd[0], high.odd[0]);
        ptx::mma_f16(tiles[chunk * 4 + 2], a, low.even[1], high.even[1]);
        ptx::mma_f16(tiles[chunk * 4 + 3], a, low.odd[1], high.odd[1]);
      }
    }
  }

  /// Clears scales that are NaN of keys that are marked as poison (poison.cuh). Codes are finite.
  MLA_DEVICE void silence_poison(uint32_t n) const {
    Block::poison(n).for_each_marked([&](int key) {
      if (ptx::lane() >= kGroups) return;
      const ptx::SharedAddress at = Block::value_scales(n, output_channel() / kE2m1Group + ptx::lane()) +
                                    scale_place(key / 2) + static_cast<uint32_t>(key % 2 * 2);
      constexpr uint32_t kMagnitude = 0x7FFFU, kInfinity = 0x7C00U;  // of f16
      if ((ptx::load_shared<uint16_t>(at) & kMagnitude) > kInfinity) ptx::store_shared(at, uint16_t{0});
    });
    // Behind this barrier every value warp has seen the marks, and every lane of this warp sees the zeros.
    ptx::sync_threads(Block::kValuesBarrier, kValueThreads);
    if (value_warp() == 0) Block::poison(n).reset(ptx::lane(), kWarpSize);
  }

  /// Multiplies the accumulators by what P and elements were divided by and by the outer scale, and stores them. The
  /// lane's columns of four tiles are eight neighbouring channels; they are brought into their order.
  MLA_DEVICE void finish_outputs() {
    const float factor = ptx::exp2_approx(-kPShift<Config>) / kE2m1Unit * outer_scale(args_);
    MLA_UNROLL
    for (int chunk = 0; chunk < kChunks; ++chunk) MLA_UNROLL
    for (int i = 0; i < 4; i += 2) {
      float eight[8];
      MLA_UNROLL
      for (int tile = 0; tile < 4; ++tile) MLA_UNROLL
      for (int column = 0; column < 2; ++column)
        eight[column * 4 + tile] = outputs_[0][chunk * 4 + tile][i + column] * factor;
      MLA_UNROLL
      for (int tile = 0; tile < 4; ++tile) MLA_UNROLL
      for (int column = 0; column < 2; ++column) outputs_[0][chunk * 4 + tile][i + column] = eight[tile * 2 + column];
    }
    Output::template store_outputs<8>();
  }

  uint32_t next_ = 0;  // number of the next step
};

}  // namespace mla::MLA_CUDA_NAMESPACE::bulk
