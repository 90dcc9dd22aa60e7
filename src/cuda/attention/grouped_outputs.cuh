// SPDX-License-Identifier: Apache-2.0
// This base of a grouped block (grouped_block.cuh) has its outputs: each warp has all rows of its group and its share
// of the channels, accumulators in registers. `Scores` is the base that has the scores: fragment_scores.cuh or
// grouped_scores.cuh.
#pragma once

#include "cuda/attention/grouped_block.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

template <class Config, class Scores>
class GroupedOutputs : public Scores {
 public:
  using Scores::Scores;

 protected:
  using Base = Scores;
  using Base::args_, Base::shared_, Base::lane, Base::warp;
  using Base::group, Base::unit, Base::poison, Base::row_factors;

  using Outputs = float[Config::kOutputTilesM][Config::kOutputTilesN][4];

  MLA_DEVICE static int first_output_channel() { return Base::warp_of_group() * Config::kOutputDims; }

  MLA_DEVICE static void clear(Outputs& outputs) {
    MLA_UNROLL
    for (int m = 0; m < Config::kOutputTilesM; ++m) MLA_UNROLL
    for (int n = 0; n < Config::kOutputTilesN; ++n) MLA_UNROLL
    for (int i = 0; i < 4; ++i) outputs[m][n][i] = 0.0F;
  }

  /// Multiplies outputs by the factors of their rows, of which most steps have none but 1.
  MLA_DEVICE void rescale(Outputs& outputs) const {
    const float* const factors = row_factors() + group() * Config::kGroupRows + (lane() >> 2);
    float factor[Config::kOutputTilesM][2];
    bool any = false;
    MLA_UNROLL
    for (int m = 0; m < Config::kOutputTilesM; ++m) MLA_UNROLL
    for (int half = 0; half < 2; ++half) {
      factor[m][half] = factors[m * 16 + half * 8];
      any |= factor[m][half] != 1.0F;
    }
    if (!ptx::any(any)) return;
    MLA_UNROLL
    for (int m = 0; m < Config::kOutputTilesM; ++m) MLA_UNROLL
    for (int n = 0; n < Config::kOutputTilesN; ++n) MLA_UNROLL
    for (int i = 0; i < 4; ++i) outputs[m][n][i] *= factor[m][i >> 1];
  }

  /// Clears what is not finite in the lane's 16-bit values of marked keys, in two operands whose rows are 16 keys. The
  /// lane has keys 2 (lane % 4) and the next one of each eight. The tile itself must not change: rows of the other
  /// group may see the key.
  template <DType kType>
  MLA_DEVICE void silence(uint32_t (&b)[4], uint32_t n, int first_key_of_b) const {
    MLA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int key = first_key_of_b + (i & 1) * 8 + (lane() & 3) * 2;
      const uint32_t finite = finite_or_zero<kType>(b[i]);
      if (poison(n).is_marked(key)) b[i] = (b[i] & 0xFFFF0000U) | (finite & 0xFFFFU);
      if (poison(n).is_marked(key + 1)) b[i] = (b[i] & 0xFFFFU) | (finite & 0xFFFF0000U);
    }
  }

  /// Writes the end of the segment: what is known of its rows, and their outputs, 16 rows at a time by way of the
  /// warp's corner of shared memory, so that lanes store neighbouring channels. column(tile, t, i) returns which of the
  /// warp's channels is column 2 t + i of an accumulator tile.
  template <class Column>
  MLA_DEVICE void store_outputs(const Outputs& outputs, const Column& column, float scale = 1.0F) const {
    Base::finish_rows(scale);
    MLA_UNROLL
    for (int m = 0; m < Config::kOutputTilesM; ++m) store_tile(outputs[m], m, column);
  }

 private:
  template <class Column>
  MLA_DEVICE void store_tile(const float (&outputs)[Config::kOutputTilesN][4], int m, const Column& column) const {
    constexpr int kRowFloats = Config::kOutputRowFloats;
    static_assert(Config::kWarps * 16 * kRowFloats * 4 <= Config::kSharedBytes - Config::kOutputOffset);
    const ptx::SharedAddress corner =
        shared_ + static_cast<uint32_t>(Config::kOutputOffset + warp() * 16 * kRowFloats * 4);
    const int g = lane() >> 2, t = lane() & 3;
    ptx::sync_warp();  // all lanes have read the rows stored before
    MLA_UNROLL
    for (int n = 0; n < Config::kOutputTilesN; ++n) MLA_UNROLL
    for (int i = 0; i < 4; ++i)
      ptx::store_shared(corner + static_cast<uint32_t>(((i >> 1) * 8 + g) * kRowFloats + column(n, t, i & 1)) * 4,
                        outputs[n][i]);
    ptx::sync_warp();
    if (unit().slot >= 0)
      store_partial(corner, m);
    else
      store_rows(corner, m);
  }

  /// Stores the 16 rows of a tile, which lie in the warp's corner, as outputs.
  MLA_DEVICE void store_rows(ptx::SharedAddress corner, int m) const {
    constexpr int kVectors = Config::kOutputDims / kVector, kRowFloats = Config::kOutputRowFloats;
    MLA_NO_UNROLL
    for (int i = lane(); i < 16 * kVectors; i += kWarpSize) {
      const int r = group() * Config::kGroupRows + m * 16 + i / kVectors, channel = i % kVectors * kVector;
      const QueryRow row = unit().rows.row(args_, r);
      if (row.token < 0) continue;
      float values[kVector];
      MLA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const auto four = ptx::load_shared<ptx::Vec4>(
            corner + static_cast<uint32_t>((i / kVectors) * kRowFloats + channel + half * 4) * 4);
        MLA_UNROLL
        for (int j = 0; j < 4; ++j) values[half * 4 + j] = std::bit_cast<float>(four.x[j]) * row_factors()[r];
      }
      store_output(args_, row, first_output_channel() + channel, values);
    }
  }

  /// Stores them as part of a partial state.
  MLA_DEVICE void store_partial(ptx::SharedAddress corner, int m) const {
    constexpr int kFours = Config::kOutputDims / 4;
    const int first_row = group() * Config::kGroupRows + m * 16;
    const int rows = unit().rows.num_rows - unit().rows.row_begin - first_row;
    float* const to =
        args_.list.partial_o + (int64_t{unit().slot} * Config::kRows + first_row) * args_.d_v + first_output_channel();
#pragma unroll 4
    for (int i = lane(); i < 16 * kFours; i += kWarpSize) {
      const int r = i / kFours, channel = i % kFours * 4;
      if (r >= rows) continue;
      auto four =
          ptx::load_shared<ptx::Vec4>(corner + static_cast<uint32_t>(r * Config::kOutputRowFloats + channel) * 4);
      MLA_UNROLL
      for (int j = 0; j < 4; ++j)
        four.x[j] = std::bit_cast<uint32_t>(std::bit_cast<float>(four.x[j]) * row_factors()[first_row + r]);
      *as<ptx::Vec4>(reinterpret_cast<std::byte*>(to + r * args_.d_v + channel)) = four;
    }
  }
};

/// Is what the kernels of grouped blocks have in common; a kernel adds its name.
template <class Block, class Config_>
struct GroupedKernel {
  using Config = Config_;
  using Params = cuda::AbsorbedArgs;
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kMinBlocks = Config::kMinBlocks;
  static constexpr int kCluster = 1;
  static constexpr bool kStartsEarly = false;

  static MLA_DEVICE void run(const Params& args) {
    ptx::wait_for_previous_grid();  // waits for the plan
    ptx::allow_next_grid();
    Block block(args);
    block.init(args.list.shares[ptx::block_index_x()]);
    block.compute_all();
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE
