// SPDX-License-Identifier: Apache-2.0
// Turns the softmax states and accumulators of a unit, which are in registers, into outputs or partial states. The
// kernels whose warps walk from unit to unit use it.
#pragma once

#include <bit>
#include <type_traits>

#include "cuda/attention/absorbed_units.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Computes the end of the unit's row `r`, whose softmax state is complete. The warps that store outputs wait for
/// output_factor(); nothing in the kernel waits for store_stats(), so that it is called last.
template <class Config>
class RowEnd {
 public:
  RowEnd() = default;
  MLA_DEVICE RowEnd(const cuda::AbsorbedArgs& args, const AbsorbedUnit& unit, int r, const ScoreState& state)
      : row_(unit.rows.row(args, r)), r_(r), slot_(unit.slot), state_(state) {
    if (slot_ < 0)
      finished_ = finish_row(state.max, state.sum, row_.token < 0 ? kNoKey : load_sink(args.options, row_.head),
                             inverse_o_scale(args.o_scale), args.lse_form);
  }

  /// Returns what the row's outputs are to be multiplied by: 1 if they belong to a partial state.
  MLA_DEVICE float output_factor() const { return finished_.o_factor; }

  /// Writes the row's lse and max_logits, or the maximum and the sum of its partial state.
  MLA_DEVICE void store_stats(const cuda::AbsorbedArgs& args) const {
    if (row_.token < 0) return;
    if (slot_ >= 0) {
      args.list.partial_max[int64_t{slot_} * Config::kRows + r_] = state_.max;
      args.list.partial_sum[int64_t{slot_} * Config::kRows + r_] = state_.sum;
      return;
    }
    if (args.lse != nullptr)
      args.lse[int64_t{row_.token} * args.lse_stride_token + row_.head * args.lse_stride_head] = finished_.lse;
    if (args.max_logits != nullptr)
      args.max_logits[int64_t{row_.token} * args.max_logits_stride_token + row_.head * args.max_logits_stride_head] =
          natural_logit(state_.max);
  }

 private:
  QueryRow row_;
  int r_ = 0;
  int32_t slot_ = -1;
  ScoreState state_;  // its sum is over all keys of the row, not over those of one lane
  FinishedRow finished_ = {1.0F, kNoKey};
};

/// Returns the bits of two floats, the first of which has the lower address.
MLA_DEVICE uint64_t two_floats(float low, float high) {
  return uint64_t{std::bit_cast<uint32_t>(high)} << 32 | std::bit_cast<uint32_t>(low);
}

/// Stores the accumulators of the unit's row `r` straight from the registers. Of each 16 channels the lane holds two
/// neighbours in the first of two tiles, at `first_channel`, and in the second tile two that are kApart channels
/// further.
template <class Config, int kTiles, int kApart = 8>
class ResultRow {
 public:
  MLA_DEVICE ResultRow(const cuda::AbsorbedArgs& args, const AbsorbedUnit& unit, int r, int first_channel)
      : args_(args), unit_(unit), r_(r), first_channel_(first_channel) {}

  /// Stores outputs times `factor`, or the accumulators as a partial state. pair(tile, low, high) returns the two
  /// channels of a tile. kFinal says that the caller knows the unit to have no partial state.
  template <bool kFinal = false, class Pair>
  MLA_DEVICE void store(float factor, const Pair& pair) const {
    if (!kFinal && unit_.slot >= 0) return store_partial(pair);
    const QueryRow row = unit_.rows.row(args_, r_);
    const OutputPlace at = {int64_t{row.token} * args_.o_stride_token + row.head * args_.o_stride_head + first_channel_,
                            row.token >= 0};
    if (args_.o_dtype == DType::kBF16)
      store_row<uint16_t, uint32_t>(at, factor, pair,
                                    [](float low, float high) { return ptx::pack_bf16x2(low, high); });
    else if (args_.o_dtype == DType::kF16)
      store_row<uint16_t, uint32_t>(at, factor, pair, [](float low, float high) { return ptx::pack_f16x2(low, high); });
    else if (args_.o_dtype == DType::kF32)
      store_row<uint32_t, uint64_t>(at, factor, pair, two_floats);
    else
      store_row<uint8_t, uint16_t>(
          at, factor, pair, [](float low, float high) { return static_cast<uint16_t>(ptx::pack_e4m3x2(low, high)); });
  }

  /// Stores the accumulators as they are. This includes rows that the request does not have: they are never read.
  template <class Pair>
  MLA_DEVICE void store_partial(const Pair& pair) const {
    float* const to = args_.list.partial_o + (int64_t{unit_.slot} * Config::kRows + r_) * args_.d_v + first_channel_;
    MLA_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      float low, high;
      pair(tile, low, high);
      *reinterpret_cast<uint64_t*>(to + of_tile(tile)) = two_floats(low, high);  // no hint: combine reads it soon
    }
  }

 private:
  struct OutputPlace {
    int64_t element;  // number of the lane's first channel among all elements of the output tensor
    bool exists;      // the request has the row
  };
  /// Returns the distance from the lane's first channel to its channels of a tile.
  static constexpr int of_tile(int tile) { return tile / 2 * 16 + tile % 2 * kApart; }

  /// Stores the row in the type of the outputs. pack(low, high) converts two neighbours to the bits of two Elements.
  /// Memory is written in sectors of 32 bytes, so that a lane stores four small elements at once; where it holds only
  /// two neighbours, two lanes exchange halves of two tiles. The exchange took 128 heads, bf16, batch 64, kv 2k from
  /// 82.0 to 79-81 us (H200, 2026-11-21).
  template <class Element, class Packed, class Pair, class Pack>
  MLA_DEVICE void store_row(const OutputPlace& at, float factor, const Pair& pair, const Pack& pack) const {
    constexpr int kTogether = sizeof(Element) < 4 ? 4 : 2;  // elements that a lane stores at once
    const bool together = is_aligned(args_.o, kTogether * sizeof(Element)) &&
                          ((args_.o_stride_token | args_.o_stride_head) & (kTogether - 1)) == 0;
    Element* const to = static_cast<Element*>(args_.o) + at.element;
    const auto bits = [&](int tile) {
      float low, high;
      pair(tile, low, high);
      return pack(low * factor, high * factor);
    };
    if (!together) [[unlikely]] {
      if (!at.exists) return;
      MLA_UNROLL
      for (int tile = 0; tile < kTiles; ++tile) {
        const Packed two = bits(tile);
        to[of_tile(tile)] = static_cast<Element>(two);
        to[of_tile(tile) + 1] = static_cast<Element>(two >> (8 * sizeof(Element)));
      }
    } else if constexpr (kTogether == 2) {
      if (!at.exists) return;
      MLA_UNROLL
      for (int tile = 0; tile < kTiles; ++tile) *reinterpret_cast<Packed*>(to + of_tile(tile)) = bits(tile);
    } else {
      using Four = std::conditional_t<sizeof(Element) == 1, uint32_t, uint64_t>;
      const bool odd = kApart == 8 && (ptx::lane() & 1) != 0;
      auto* const fours =
          reinterpret_cast<Four*>(to + (odd ? kApart - 2 : 0));  // odd lanes store the second tile's half
      MLA_UNROLL
      for (int tile = 0; tile < kTiles; tile += 2) {
        Packed low = bits(tile), high = bits(tile + 1);
        if constexpr (kApart == 8) {
          const auto other = static_cast<Packed>(ptx::shuffle_xor(static_cast<uint32_t>(odd ? low : high), 1));
          (odd ? low : high) = other;
        }
        if (at.exists) fours[of_tile(tile) / kTogether] = Four{low} | Four{high} << (16 * sizeof(Element));
      }
    }
  }

  const cuda::AbsorbedArgs& args_;
  const AbsorbedUnit& unit_;
  const int r_, first_channel_;
};

}  // namespace mla::MLA_CUDA_NAMESPACE
