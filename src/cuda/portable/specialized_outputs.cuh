// SPDX-License-Identifier: Apache-2.0
// A value warp's outputs: all rows of its share of the channels, in registers until a unit is done.
#pragma once

#include "cuda/portable/specialized_block.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

template <class Config>
class OutputRole : protected SpecializedBlock<Config> {
  using Block = SpecializedBlock<Config>;

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

  /// Straight from the registers. Of 16 channels the lane has two neighbours in the first of two tiles, those kApart on
  /// in the second.
  template <int kApart>
  MLA_DEVICE void store_outputs() const {
    const int64_t slot = unit().slot;
    if (slot >= 0)
      for_lane_rows([&](int m, int half, int r) { store_partial<kApart>(m, half, r, slot); });
    else if (args_.o_dtype == DType::kBF16)
      store_rows<kApart, uint16_t, uint32_t>([](float low, float high) { return ptx::pack_bf16x2(low, high); });
    else if (args_.o_dtype == DType::kF16)
      store_rows<kApart, uint16_t, uint32_t>([](float low, float high) { return ptx::pack_f16x2(low, high); });
    else if (args_.o_dtype == DType::kF32)
      store_rows<kApart, uint32_t, uint64_t>(two_floats);
    else
      store_rows<kApart, uint8_t, uint16_t>(
          [](float low, float high) { return static_cast<uint16_t>(ptx::pack_e4m3x2(low, high)); });
  }

  /// What outputs so far are multiplied by in step n, besides `also`.
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
  template <int kApart>
  MLA_DEVICE static int lane_channel() {
    return output_channel() + (ptx::lane() & 3) * (kApart == 8 ? 2 : 4);
  }
  template <int kApart>
  MLA_DEVICE static constexpr int of_tile(int j) {
    return j / 2 * 16 + j % 2 * kApart;
  }

  /// Of the block's rows.
  MLA_DEVICE static int lane_row(int m, int half) { return m * 16 + half * 8 + (ptx::lane() >> 2); }
  template <class F>
  MLA_DEVICE static void for_lane_rows(const F& f) {
    MLA_UNROLL
    for (int m = 0; m < Config::kOutputTilesM; ++m) MLA_UNROLL
    for (int half = 0; half < 2; ++half) f(m, half, lane_row(m, half));
  }

  /// As it is. What stands in rows that the request does not have is never read.
  template <int kApart>
  MLA_DEVICE void store_partial(int m, int half, int r, int64_t slot) const {
    float* const to = args_.list.partial_o + (slot * Config::kRows + r) * args_.d_v + lane_channel<kApart>();
    MLA_UNROLL
    for (int j = 0; j < Config::kOutputTilesN; ++j) {
      const uint64_t bits = two_floats(outputs_[m][j][2 * half], outputs_[m][j][2 * half + 1]);
      ptx::store_streaming(reinterpret_cast<uint64_t*>(to + of_tile<kApart>(j)), bits);
    }
  }

  MLA_DEVICE static uint64_t two_floats(float low, float high) {
    return uint64_t{std::bit_cast<uint32_t>(high)} << 32 | std::bit_cast<uint32_t>(low);
  }

  /// `pack` makes of two neighbours the bits of a Pair of Elements.
  template <int kApart, class Element, class Pair, class F>
  MLA_DEVICE void store_rows(const F& pack) const {
    const bool pairs = is_aligned(args_.o, sizeof(Pair)) && ((args_.o_stride_token | args_.o_stride_head) & 1) == 0;
    for_lane_rows([&](int m, int half, int r) {
      const QueryRow row = unit().rows.row(r);
      if (row.token < 0) return;
      const float factor = Block::output_factors()[r];
      Element* const to = static_cast<Element*>(args_.o) + int64_t{row.token} * args_.o_stride_token +
                          row.head * args_.o_stride_head + lane_channel<kApart>();
      MLA_UNROLL
      for (int j = 0; j < Config::kOutputTilesN; ++j) {
        const Pair bits = pack(outputs_[m][j][2 * half] * factor, outputs_[m][j][2 * half + 1] * factor);
        if (pairs) {
          *reinterpret_cast<Pair*>(to + of_tile<kApart>(j)) = bits;
        } else {
          to[of_tile<kApart>(j)] = static_cast<Element>(bits);
          to[of_tile<kApart>(j) + 1] = static_cast<Element>(bits >> (8 * sizeof(Element)));
        }
      }
    });
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE
