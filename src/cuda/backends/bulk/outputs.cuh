// SPDX-License-Identifier: Apache-2.0
// A value warp has its accumulators here: all rows of its share of the channels, in registers until a unit is done.
#pragma once

#include "cuda/attention/absorbed_results.cuh"
#include "cuda/backends/bulk/block.cuh"

namespace mla::MLA_CUDA_NAMESPACE::bulk {

template <class Config>
class OutputRole : protected AbsorbedBlock<Config> {
  using Block = AbsorbedBlock<Config>;

 protected:
  using Block::args_, Block::unit;
  static constexpr int kValueThreads = Config::kValueWarps * kWarpSize;

  MLA_DEVICE explicit OutputRole(const cuda::AbsorbedArgs& args) : Block(args) {}

  MLA_DEVICE static int value_warp() { return ptx::warp() - Config::kFirstValueWarp; }
  MLA_DEVICE static int output_channel() { return value_warp() * Config::kOutputDims; }

  MLA_DEVICE void clear_outputs() {
    MLA_UNROLL
    for (int m = 0; m < Config::kOutputTilesM; ++m) MLA_UNROLL
    for (int j = 0; j < Config::kOutputTilesN; ++j) MLA_UNROLL
    for (int i = 0; i < 4; ++i) outputs_[m][j][i] = 0.0F;
  }

  /// Stores the outputs of the unit, or its partial state. The lane has so many neighbouring channels: four in two
  /// tiles of each 16 channels, or eight in four tiles of each 32; or it has two in each tile. The accumulators are
  /// lost: with 16 or 32 rows, two tiles are stored at a time and the others move up in their place. This makes the
  /// code shorter, which runs once for a unit and so comes from memory each time. AbsorbedConfig::kSharedLoadCode says
  /// what it gained.
  template <int kNeighbours>
  MLA_DEVICE void store_outputs() {
    constexpr int kApart = kNeighbours == 2 ? 8 : 2;
    int channel = output_channel() + (ptx::lane() & 3) * kNeighbours;
    if (kPartialsApart && unit().slot >= 0) {
      MLA_UNROLL
      for (int m = 0; m < Config::kOutputTilesM; ++m) MLA_UNROLL
      for (int half = 0; half < 2; ++half)
        ResultRow<Config, Config::kOutputTilesN, kApart>(args_, unit(), lane_row(m, half), channel)
            .store_partial(values_of(m, half));
      return;
    }
    constexpr int kAtOnce = Config::kRows <= 32 ? 2 : Config::kOutputTilesN;
    MLA_NO_UNROLL
    for (int first = 0; first < Config::kOutputTilesN; first += kAtOnce) {
      MLA_UNROLL
      for (int m = 0; m < Config::kOutputTilesM; ++m) {
        MLA_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int r = lane_row(m, half);
          const ResultRow<Config, kAtOnce, kApart> row(args_, unit(), r, channel);
          row.template store<kPartialsApart>(Block::output_factors()[r], values_of(m, half));
        }
        MLA_UNROLL
        for (int j = kAtOnce; j < Config::kOutputTilesN; ++j) MLA_UNROLL
        for (int i = 0; i < 4; ++i) outputs_[m][j - kAtOnce][i] = outputs_[m][j][i];
      }
      channel += kNeighbours < 8 ? kAtOnce * 8 : first % 4 == 0 ? 4 : 28;
    }
  }

  /// Multiplies the accumulators by the factors of their rows in step n and by `also`.
  MLA_DEVICE void rescale(uint32_t n, float also) {
    float factor[Config::kOutputTilesM][2];
    bool any = also != 1.0F;
    MLA_UNROLL
    for (int m = 0; m < Config::kOutputTilesM; ++m) MLA_UNROLL
    for (int half = 0; half < 2; ++half) {
      factor[m][half] = Block::factors(n)[lane_row(m, half)];
      any |= factor[m][half] != 1.0F;
    }
    if (!ptx::any(any)) return;
    MLA_UNROLL
    for (int m = 0; m < Config::kOutputTilesM; ++m) MLA_UNROLL
    for (int j = 0; j < Config::kOutputTilesN; ++j) MLA_UNROLL
    for (int i = 0; i < 4; ++i) outputs_[m][j][i] *= factor[m][i >> 1] * also;
  }

  float outputs_[Config::kOutputTilesM][Config::kOutputTilesN][4];

 private:
  /// Says whether partial states, which combine waits for, are stored by code of their own, without the code of the
  /// output types. This took 16 heads, bf16, kv 4k, batch 64 / 16 / 1 from 81.2 / 28.1 / 11.6 to 80.7 / 27.8 / 11.3 us;
  /// quantized caches were 1 to 2 % slower (H200, 2026-11-22).
  static constexpr bool kPartialsApart = Config::kRows <= 32 && !Config::kQuantized;

  /// Returns a function that gives the lane's two channels of a tile, for a row of tile row m.
  MLA_DEVICE auto values_of(int m, int half) const {
    return [this, m, half](int tile, float& low, float& high) {
      low = outputs_[m][tile][2 * half];
      high = outputs_[m][tile][2 * half + 1];
    };
  }
  /// Returns the number, among the block's rows, of one of the lane's rows.
  MLA_DEVICE static int lane_row(int m, int half) { return m * 16 + half * 8 + (ptx::lane() >> 2); }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::bulk
