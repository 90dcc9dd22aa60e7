// SPDX-License-Identifier: Apache-2.0
// From softmax states and accumulators in registers to outputs or partial states, for kernels that walk through units.
#pragma once

#include <bit>
#include <type_traits>

#include "cuda/attention/absorbed_units.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// The unit's row `r`, all of whose keys are weighed. Values wait for what it says of outputs, nobody for the rest.
template <class Config>
class RowEnd {
 public:
  RowEnd() = default;
  MLA_DEVICE RowEnd(const cuda::AbsorbedArgs& args, const AbsorbedUnit& unit, int r, const ScoreState& state)
      : row_(unit.rows.row(args, r)), r_(r), slot_(unit.slot), state_(state) {
    if (slot_ < 0)
      finished_ = finish_row(state.max, state.sum, row_.token < 0 ? kNoKey : load_sink(args.options, row_.head),
                             inverse_o_scale(args.o_scale), args.lse_base);
  }

  /// What outputs are to be multiplied by; those of a partial state are left as they are.
  MLA_DEVICE float output_factor() const { return finished_.o_factor; }

  /// Writes lse and max_logits, or those of the partial state.
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
  ScoreState state_;  // the sum is the whole row's
  FinishedRow finished_ = {1.0F, kNoKey};
};

MLA_DEVICE uint64_t two_floats(float low, float high) {
  return uint64_t{std::bit_cast<uint32_t>(high)} << 32 | std::bit_cast<uint32_t>(low);
}

/// Stores accumulators straight from the registers. Of 16 channels of the unit's row `r` the lane has two neighbours in
/// the first of two tiles, from `first_channel` on, and those kApart on in the second.
template <class Config, int kTiles, int kApart = 8>
class ResultRow {
 public:
  MLA_DEVICE ResultRow(const cuda::AbsorbedArgs& args, const AbsorbedUnit& unit, int r, int first_channel)
      : args_(args), unit_(unit), r_(r), first_channel_(first_channel) {}

  /// `pair(tile, low, high)` gives the two channels of a tile. kFinal: it is known that the unit has no partial state.
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

  /// As it is. What stands in rows that the request does not have is never read.
  template <class Pair>
  MLA_DEVICE void store_partial(const Pair& pair) const {
    float* const to = args_.list.partial_o + (int64_t{unit_.slot} * Config::kRows + r_) * args_.d_v + first_channel_;
    MLA_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      float low, high;
      pair(tile, low, high);
      *reinterpret_cast<uint64_t*>(to + of_tile(tile)) = two_floats(low, high);  // read soon, by combine
    }
  }

 private:
  /// Of the lane's first channel among all outputs' elements; and whether the request has the row.
  struct OutputPlace {
    int64_t element;
    bool exists;
  };
  static constexpr int of_tile(int tile) { return tile / 2 * 16 + tile % 2 * kApart; }

  /// `pack` makes of two neighbours the bits of two Elements. Memory takes 32 bytes at a time: of small elements a lane
  /// stores four. Where it has only two neighbours, two lanes exchange halves of two tiles.
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
      auto* const fours = reinterpret_cast<Four*>(to + (odd ? 8 - 2 : 0));
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
