// SPDX-License-Identifier: Apache-2.0
// From softmax states and accumulators in registers to outputs or partial states, for kernels that walk through units.
#pragma once

#include <bit>

#include "cuda/portable/absorbed_units.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Writes the statistics of the unit's row `r`, and what its outputs are to be multiplied by.
template <class Config>
MLA_DEVICE void store_statistics(const cuda::AbsorbedArgs& args, const AbsorbedUnit& unit, int r, float max, float sum,
                                 float& output_factor) {
  const QueryRow row = unit.rows.row(r);
  if (row.token < 0) return;
  const int64_t slot = unit.slot;
  if (slot >= 0) {
    args.list.partial_max[slot * Config::kRows + r] = max;
    args.list.partial_sum[slot * Config::kRows + r] = sum;
    output_factor = 1.0F;
    return;
  }
  const FinishedRow finished =
      finish_row(max, sum, load_sink(args.options, row.head), inverse_o_scale(args.o_scale), args.lse_base);
  output_factor = finished.o_factor;
  if (args.lse != nullptr)
    args.lse[int64_t{row.token} * args.lse_stride_token + row.head * args.lse_stride_head] = finished.lse;
  if (args.max_logits != nullptr)
    args.max_logits[int64_t{row.token} * args.max_logits_stride_token + row.head * args.max_logits_stride_head] =
        natural_logit(max);
}

MLA_DEVICE uint64_t two_floats(float low, float high) {
  return uint64_t{std::bit_cast<uint32_t>(high)} << 32 | std::bit_cast<uint32_t>(low);
}

/// Stores accumulators straight from the registers: four lanes have eight neighbouring channels of a row.
/// `accumulators[row][tile][i]`: channels first_channel + 8 tile + i, i of 0 and 1, of the unit's row r(row).
template <class Config, int kTiles>
class ResultRow {
 public:
  MLA_DEVICE ResultRow(const cuda::AbsorbedArgs& args, const AbsorbedUnit& unit, int r, int first_channel)
      : args_(args), unit_(unit), r_(r), first_channel_(first_channel) {}

  /// `pair(tile, low, high)` gives the two channels of a tile.
  template <class Pair>
  MLA_DEVICE void store(float factor, const Pair& pair) const {
    if (unit_.slot >= 0)
      store_partial(pair);
    else if (args_.o_dtype == DType::kBF16)
      store_row<uint16_t, uint32_t>(factor, pair, [](float low, float high) { return ptx::pack_bf16x2(low, high); });
    else if (args_.o_dtype == DType::kF16)
      store_row<uint16_t, uint32_t>(factor, pair, [](float low, float high) { return ptx::pack_f16x2(low, high); });
    else if (args_.o_dtype == DType::kF32)
      store_row<uint32_t, uint64_t>(factor, pair, two_floats);
    else
      store_row<uint8_t, uint16_t>(
          factor, pair, [](float low, float high) { return static_cast<uint16_t>(ptx::pack_e4m3x2(low, high)); });
  }

 private:
  /// As it is. What stands in rows that the request does not have is never read.
  template <class Pair>
  MLA_DEVICE void store_partial(const Pair& pair) const {
    float* const to = args_.list.partial_o + (int64_t{unit_.slot} * Config::kRows + r_) * args_.d_v + first_channel_;
    MLA_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      float low, high;
      pair(tile, low, high);
      *reinterpret_cast<uint64_t*>(to + tile * 8) = two_floats(low, high);  // read soon, by combine
    }
  }

  /// `pack` makes of two neighbours the bits of two Elements.
  template <class Element, class Packed, class Pair, class Pack>
  MLA_DEVICE void store_row(float factor, const Pair& pair, const Pack& pack) const {
    const QueryRow row = unit_.rows.row(r_);
    if (row.token < 0) return;
    const bool together =
        is_aligned(args_.o, sizeof(Packed)) && ((args_.o_stride_token | args_.o_stride_head) & 1) == 0;
    Element* const to = static_cast<Element*>(args_.o) + int64_t{row.token} * args_.o_stride_token +
                        row.head * args_.o_stride_head + first_channel_;
    MLA_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      float low, high;
      pair(tile, low, high);
      const Packed bits = pack(low * factor, high * factor);
      if (together) {
        *reinterpret_cast<Packed*>(to + tile * 8) = bits;
      } else {
        to[tile * 8] = static_cast<Element>(bits);
        to[tile * 8 + 1] = static_cast<Element>(bits >> (8 * sizeof(Element)));
      }
    }
  }

  const cuda::AbsorbedArgs& args_;
  const AbsorbedUnit& unit_;
  const int r_, first_channel_;
};

}  // namespace mla::MLA_CUDA_NAMESPACE
