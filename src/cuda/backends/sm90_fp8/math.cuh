// SPDX-License-Identifier: Apache-2.0
// The math role is two warpgroups, which take turns with the scores of steps, and each of which has the values of half
// of the channels.
//   scores  S [rows, keys] = Q K^T, A = the queries and B = the rows as they lie. A scale's channels are summed by the
//           tensor cores, and the sum times the key's scale is added in f32
//   values  O^T [channels, rows] += scale of P * (V^T P^T), A = the values, transposed on their way into registers, B =
//           P as it lies. The products of a step leave the tensor cores before they are added
#pragma once

#include "cuda/backends/sm90_fp8/quantized_p.cuh"
#include "cuda/ptx/matrix.h"

namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8 {

/// kTensorScale says that all keys of a pool have the same scale for all their channels.
template <bool kTensorScale>
class MathRole : QuantizedP {
 public:
  using QuantizedP::QuantizedP, QuantizedP::next_unit;

  MLA_DEVICE void compute() {
    load_queries();
    find_unmasked_steps();
    for (int r = 0; r < 2; ++r) states_[r] = {};
    scale_ = score_scale(args_) * std::numbers::log2e_v<float>;
    MLA_UNROLL
    for (auto& product : outputs_) MLA_UNROLL
    for (float& output : product) output = 0.0F;
    const StepRange steps = unit().steps;
    // Both warpgroups have the scores of two steps, one each, before they go on to the values of these.
    uint32_t own = steps.begin + ((steps.begin & 1U) != static_cast<uint32_t>(group()) ? 1 : 0);
    MLA_NO_UNROLL
    for (uint32_t n = steps.begin; n < steps.end; ++n) {
      if (own <= (n | 1U) && own < steps.end) {
        compute_p(own, steps);
        own += Config::kMathGroups;
      }
      add_step(n);
    }
    finish(steps);
    leave_unit();
  }

 private:
  MLA_DEVICE static int group() { return math_warp() / Config::kGroupWarps; }
  MLA_DEVICE static void sync_group() { ptx::sync_threads(Config::kGroupBarrier + group(), Config::kGroupThreads); }

  MLA_DEVICE const cuda::KeyPool& pool(uint32_t n) const {
    if (args_.num_pools() == 1) return args_.pools[0];
    return unit().keys.pool_of(unit().template first_key<Config>(n)) == 1 ? args_.pools[1] : args_.pools[0];
  }
  /// Returns the number of the scale that a key has for the channels of a piece of its row.
  MLA_DEVICE static int scale_of_piece(const cuda::KeyPool& of, int piece) {
    return kTensorScale ? 0 : piece * Config::kPieceRowBytes / kVector >> of.scale_shift;
  }

  // Scores and P.

  MLA_DEVICE void compute_p(uint32_t n, StepRange steps) {
    const cuda::KeyPool& of = pool(n);
    float s[kScores];
    ptx::mbarrier_wait(kv_full(n), stage_parity(n));
    ptx::fence_async_proxy();
    multiply_queries(s, n, of);
    // The step's place, and the marks in it, are free.
    if (n >= Config::kPlaces) ptx::mbarrier_wait(kv_empty(n - Config::kPlaces), stage_parity(n - Config::kPlaces));
    if (poison(n).any()) [[unlikely]] {
      sync_group();
      if (score_warp() == 0) poison(n).reset(ptx::lane<Config::kReadsIndexAnew>(), kWarpSize);
    }
    sync_group();  // there are no marks, and no warp reads the step's rotary channels any more
    float scale = scale_;
    if (unit().unmasked.contains(n) && scale > 0.0F) [[likely]] {
      hide_invalid(s, n);
    } else {
      replace_scores(s, n);
      scale = 1.0F;
    }
    float base[2], largest[2];
    raise_rows(s, scale, n, steps, base, largest);
    // P is 2^(logit - base), or that in units of the row's largest one / 448.
    float to[2], unit_of_p[2] = {1.0F, 1.0F};
    MLA_UNROLL
    for (int r = 0; r < 2; ++r) {
      to[r] = base[r];
      if constexpr (kTensorScale) {
        to[r] = finite_or_zero(largest[r]) - kLog2OfMax;
        unit_of_p[r] = largest[r] == kNoKey ? 0.0F : ptx::exp2_approx(to[r] - base[r]);
      }
    }
    MLA_UNROLL
    for (int i = 0; i < kScores; ++i) s[i] = ptx::exp2_approx(s[i] * scale - to[row_of(i)]);
    float sums[2][4] = {};
    MLA_UNROLL
    for (int i = 0; i < kScores; ++i) sums[row_of(i)][chain_of(i)] += s[i];
    MLA_UNROLL
    for (int r = 0; r < 2; ++r)
      states_[r].sum += ((sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3])) * unit_of_p[r];
    if constexpr (kTensorScale) {
      const float of_keys = tensor_scale(of);
      float units[2];
      MLA_UNROLL
      for (int r = 0; r < 2; ++r)  // an infinite score makes the row's outputs NaN, as everywhere
        units[r] = largest[r] < std::numeric_limits<float>::infinity() ? unit_of_p[r] * of_keys
                                                                       : std::numeric_limits<float>::quiet_NaN();
      store_p(n, s, units);
    } else {
      store_scaled_p(n, of.cache.num_scales, s);
    }
    ptx::fence_async_proxy();
    ptx::sync_warp();
    if (ptx::lane<Config::kReadsIndexAnew>() == 0) ptx::mbarrier_arrive(p_full(n));
  }

  MLA_DEVICE void multiply_queries(float (&s)[kScores], uint32_t n, const cuda::KeyPool& of) const {
    const uint64_t queries_at = descriptor(queries()), keys_at = descriptor(stage(n));
    float products[kScores];
    MLA_UNROLL
    for (int piece = 0; piece < Config::kLatentPieces; piece += kPiecesTogether) {
      ptx::wgmma_hold(products);
      ptx::wgmma_fence();
      MLA_UNROLL
      for (int step = 0; step < kPiecesTogether * kPieceSteps; ++step) {
        const int at = (piece + step / kPieceSteps) * Config::kPieceBytes + step % kPieceSteps * 32;
        ptx::wgmma_e4m3<Config::kKeys>(products, ptx::advance(queries_at, at), ptx::advance(keys_at, at), step > 0);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::wgmma_hold(products);
      float scales[kLaneKeys];
      if constexpr (!kTensorScale) load_scales(scales, n, scale_of_piece(of, piece));
      MLA_UNROLL
      for (int i = 0; i < kScores; ++i) {
        const float scale = kTensorScale ? 1.0F : scales[i / 4 * 2 + i % 2];
        s[i] = piece == 0 ? products[i] * scale : s[i] + products[i] * scale;
      }
    }
    float of_rows[2] = {row_values()[lane_row()], row_values()[lane_row() + kLaneRowStep]};
    const float of_latents = kTensorScale ? tensor_scale(of) : 1.0F;
    if (has_rope()) {
      const bool quantized = has_quantized_rope();
      ptx::wgmma_hold(products);
      ptx::wgmma_fence();
      if (quantized) {
        MLA_UNROLL
        for (int step = 0; step < kRopeSteps / 2; ++step)
          ptx::wgmma_e4m3<Config::kKeys>(products, ptx::advance(queries_at, Config::kRopeOffset + step * 32),
                                         ptx::advance(keys_at, Config::kRopeOffset + step * 32), step > 0);
      } else {
        MLA_UNROLL
        for (int step = 0; step < kRopeSteps; ++step)
          ptx::wgmma_bf16<Config::kKeys>(products, ptx::advance(queries_at, Config::kRopeOffset + step * 32),
                                         ptx::advance(keys_at, Config::kRopeOffset + step * 32), step > 0);
      }
      ptx::wgmma_commit();
      const float of_rope = quantized ? *of.cache.kpe_scale : 0.0F;
      ptx::wgmma_wait<0>();
      ptx::wgmma_hold(products);
      if (!quantized) {
        MLA_UNROLL
        for (float& of_row : of_rows) of_row *= of_latents;
        MLA_UNROLL
        for (int i = 0; i < kScores; ++i) s[i] = s[i] * of_rows[row_of(i)] + products[i];
        return;
      }
      MLA_UNROLL
      for (int i = 0; i < kScores; ++i)
        s[i] = s[i] * (of_rows[row_of(i)] * of_latents) + products[i] * (of_rows[row_of(i)] * of_rope);
      return;
    }
    MLA_UNROLL
    for (float& of_row : of_rows) of_row *= of_latents;
    MLA_UNROLL
    for (int i = 0; i < kScores; ++i) s[i] *= of_rows[row_of(i)];
  }
  /// Returns the scale of all keys of a pool.
  MLA_DEVICE static float tensor_scale(const cuda::KeyPool& of) {
    return *reinterpret_cast<const float*>(of.cache.scales.base);
  }
  static constexpr float kLog2OfMax = 8.8073549F;  // of 448
  // The tensor cores sum 256 channels if all keys have one scale, and 128 otherwise.
  static constexpr int kPiecesTogether = kTensorScale ? 2 : 1, kPieceSteps = Config::kPieceRowBytes / 32;
  static constexpr int kRopeSteps = Config::kRopeDims / 16;  // of bf16; e4m3 has half as many
  MLA_DEVICE static uint64_t descriptor(ptx::SharedAddress tile) {
    return ptx::matrix_descriptor(tile, 0, Config::kEightRowsBytes, ptx::Swizzle::k128);
  }

  /// Turns scores into base-2 logits as logit_of() does, with few registers beside the outputs: the lane's scores lie
  /// where P will.
  MLA_DEVICE void replace_scores(float (&s)[kScores], uint32_t n) const {
    constexpr int kHalf = kScores / 2;
    static_assert(kHalf * Config::kGroupThreads * 4 == 2 * Config::kPTileBytes && Config::kPTilesInStage == 2);
    const uint32_t thread_at =
        static_cast<uint32_t>((score_warp() * kWarpSize + ptx::lane<Config::kReadsIndexAnew>()) * 4);
    const ptx::SharedAddress halves[2] = {p_tile(n, 0) + thread_at, p_tile(n, Config::kPTilesInStage) + thread_at};
    const auto place = [&](int i) {
      return (i < kHalf ? halves[0] : halves[1]) + static_cast<uint32_t>(i % kHalf * Config::kGroupThreads * 4);
    };
    MLA_UNROLL
    for (int i = 0; i < kScores; ++i) ptx::store_shared(place(i), s[i]);
    MLA_NO_UNROLL
    for (int r = 0; r < 2; ++r) {
      const RowScores row(args_, unit().segment, unit().rows.row(args_, lane_row() + r * kLaneRowStep));
      const uint64_t visible = visible_keys(row, n);
      MLA_NO_UNROLL
      for (int of_row = 0; of_row < kHalf; ++of_row) {
        const ptx::SharedAddress at = place(of_row / 2 * 4 + r * 2 + of_row % 2);
        const int column = of_row / 2 * 8 + of_row % 2;  // from the lane's first one on
        const bool sees = (visible >> column & 1) != 0;
        ptx::store_shared(at, logit_of(row, sees, ptx::load_shared<float>(at), n, lane_column() + column, false));
      }
    }
    MLA_UNROLL
    for (int i = 0; i < kScores; ++i) s[i] = ptx::load_shared<float>(place(i));
    sync_group();  // P may take the place
  }

  /// Raises the rows' maxima by the scores of step n, and hands them to the next step. Returns what the
  /// outputs are relative to, and the rows' largest logits in the step.
  MLA_DEVICE void raise_rows(const float (&s)[kScores], float scale, uint32_t n, StepRange steps, float (&base)[2],
                             float (&largest)[2]) {
    find_largest(s, scale, largest);
    RowMax rows[2];
    if (n > steps.begin) {
      ptx::mbarrier_wait(max_full(n - 1), place_parity(n - 1));
      MLA_UNROLL
      for (int r = 0; r < 2; ++r) rows[r] = row_max(n - 1)[lane_row() + r * kLaneRowStep];
    }
    // Who asks for max_logits gets exact maxima, without headroom in the last step.
    const float headroom = args_.max_logits != nullptr && n + 1 == steps.end ? 0.0F : kHeadroom;
    float factor[2];
    MLA_UNROLL
    for (int r = 0; r < 2; ++r) {
      rows[r].largest = std::fmax(rows[r].largest, largest[r]);
      ScoreState outputs{rows[r].base, 0.0F};
      factor[r] = outputs.is_outgrown_by(rows[r].largest, headroom) ? outputs.raise(rows[r].largest) : 1.0F;
      rows[r].base = outputs.max;
      if (states_[r].max != outputs.max) states_[r].raise(outputs.max);
      base[r] = outputs.base();
      if ((ptx::lane<Config::kReadsIndexAnew>() & 3) == 0) {
        const int row = lane_row() + r * kLaneRowStep;
        row_max(n)[row] = rows[r];
        ptx::store_shared(factors(n) + static_cast<uint32_t>(row * 4), factor[r]);
      }
    }
    const bool rescales_any = ptx::any(factor[0] != 1.0F || factor[1] != 1.0F);
    if (ptx::lane<Config::kReadsIndexAnew>() == 0) {
      ptx::store_shared(rescales(n) + static_cast<uint32_t>(score_warp()), static_cast<uint8_t>(rescales_any ? 1 : 0));
      ptx::mbarrier_arrive(max_full(n));
    }
  }

  // Values. A lane has channels 2 (lane / 4) and the next one of each 16, and rows 8 i + 2 (lane % 4) and the next one.

  static constexpr int kLaneRows = Config::kRows / 4;

  MLA_DEVICE void add_step(uint32_t n) {
    ptx::mbarrier_wait(p_full(n), place_parity(n));
    if (ptx::load_shared<uint32_t>(rescales(n)) != 0) [[unlikely]]
      rescale(n);
    if (poison(n).any()) [[unlikely]]
      silence_poison(n);
    const cuda::KeyPool& of = pool(n);
    float scales[kLaneRows];
    MLA_UNROLL
    for (int i = 0; i < kGroupPieces; ++i) add_piece(n, i, scale_of_piece(of, group() * kGroupPieces + i), scales);
    ptx::sync_warp();
    if (ptx::lane<Config::kReadsIndexAnew>() == 0) ptx::mbarrier_arrive(kv_empty(n));
  }
  static constexpr int kGroupPieces = Config::kLatentPieces / Config::kMathGroups;

  /// Adds the values of step n, for the channels of the warpgroup's piece i.
  MLA_DEVICE void add_piece(uint32_t n, int i, int scale, float (&scales)[kLaneRows]) {
    constexpr int kHalves = Config::kKeys / 32;
    const uint64_t p = ptx::matrix_descriptor(p_tile(n, scale), 0, 8 * Config::kPRowBytes, ptx::Swizzle::k64);
    if (i == 0 || !kTensorScale) load_row_values(scales, p_scales(n, scale));
    // One product is in flight at a time: two took 310 instead of 268 us, because outputs were spilled (128 heads,
    // batch 64, kv 8k; H200, 2026-11-28).
    MLA_UNROLL
    for (int j = 0; j < Config::kGroupProducts; ++j) {
      float products[Config::kRows / 2];
      uint32_t values[kHalves][4];
      MLA_UNROLL
      for (int half = 0; half < kHalves; ++half) load_values(values[half], n, group() * kGroupPieces + i, j, half);
      ptx::wgmma_hold(products);
      ptx::wgmma_fence();
      MLA_UNROLL
      for (int half = 0; half < kHalves; ++half)
        ptx::wgmma_e4m3<64>(products, values[half], ptx::advance(p, half * 32), half > 0);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::wgmma_hold(products);
      float(&to)[Config::kRows / 2] = outputs_[i * Config::kGroupProducts + j];
      MLA_UNROLL
      for (int k = 0; k < Config::kRows / 2; ++k) to[k] += products[k] * scales[lane_row_of(k)];
    }
  }

  /// Returns which of the lane's rows an accumulator of the values is of.
  static constexpr int lane_row_of(int i) { return i / 4 * 2 + i % 2; }

  /// Loads a number for each of the lane's rows.
  MLA_DEVICE static void load_row_values(float (&to)[kLaneRows], ptx::SharedAddress from) {
    MLA_UNROLL
    for (int i = 0; i < kLaneRows; i += 2) {
      const auto two = ptx::load_shared<uint64_t>(from + static_cast<uint32_t>((i * 4 + lane_column()) * 4));
      to[i] = std::bit_cast<float>(static_cast<uint32_t>(two));
      to[i + 1] = std::bit_cast<float>(static_cast<uint32_t>(two >> 32));
    }
  }

  /// Loads 16 channels of 32 keys, for the warp's part of product j of a piece, as the operand A whose rows are
  /// the even channels, then the odd ones, and whose k 4 t ... 4 t + 3 are keys 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
  MLA_DEVICE void load_values(uint32_t (&a)[4], uint32_t n, int piece, int j, int half) const {
    uint32_t pairs[4];
    ptx::ldmatrix_x4_trans(pairs, stage(n) + static_cast<uint32_t>(piece * Config::kPieceBytes) +
                                      chunk_offset(half * 32 + ptx::lane<Config::kReadsIndexAnew>(), warp_chunk(j)));
    a[0] = ptx::permute_bytes(pairs[0], pairs[1], 0x6420);
    a[1] = ptx::permute_bytes(pairs[0], pairs[1], 0x7531);
    a[2] = ptx::permute_bytes(pairs[2], pairs[3], 0x6420);
    a[3] = ptx::permute_bytes(pairs[2], pairs[3], 0x7531);
  }
  /// Returns which 16 channels of a piece the warp has in product j.
  MLA_DEVICE static int warp_chunk(int j) { return score_warp() * Config::kGroupProducts + j; }

  MLA_DEVICE void rescale(uint32_t n) {
    float factor[kLaneRows];
    load_row_values(factor, factors(n));
    MLA_UNROLL
    for (auto& product : outputs_) MLA_UNROLL
    for (int i = 0; i < Config::kRows / 2; ++i) product[i] *= factor[lane_row_of(i)];
  }

  /// Clears NaN among the warpgroup's channels of marked keys. No other warps read these.
  MLA_DEVICE void silence_poison(uint32_t n) const {
    constexpr int kWords = Config::kPieceRowBytes / 4;  // of a piece of a row
    const int first = group() * (Config::kLatentPieces / Config::kMathGroups);
    poison(n).for_each_marked([&](int key) {
      for (int word = score_warp() * kWarpSize + ptx::lane<Config::kReadsIndexAnew>(); word < Config::kOutputDims / 4;
           word += Config::kGroupThreads) {
        const ptx::SharedAddress at = stage(n) + static_cast<uint32_t>((first + word / kWords) * Config::kPieceBytes) +
                                      chunk_offset(key, word % kWords / 4) + static_cast<uint32_t>(word % 4 * 4);
        const auto codes = ptx::load_shared<uint32_t>(at);
        ptx::store_shared(at, codes & ~nan_bytes(codes));
      }
    });
    sync_group();
  }

  // The end of a unit.

  MLA_DEVICE void finish(StepRange steps) {
    float end[2] = {kNoKey, kNoKey};
    if (steps.begin < steps.end) {
      ptx::mbarrier_wait(max_full(steps.end - 1), place_parity(steps.end - 1));
      MLA_UNROLL
      for (int r = 0; r < 2; ++r) end[r] = row_max(steps.end - 1)[lane_row() + r * kLaneRowStep].base;
    }
    MLA_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (states_[r].max != end[r]) states_[r].raise(end[r]);
      float sum = states_[r].sum;
      sum += ptx::shuffle_xor(sum, 1);
      sum += ptx::shuffle_xor(sum, 2);
      if ((ptx::lane<Config::kReadsIndexAnew>() & 3) == 0) row_sums(group())[lane_row() + r * kLaneRowStep] = sum;
    }
    sync_math();
    const int row = math_warp() * kWarpSize + ptx::lane<Config::kReadsIndexAnew>();
    if (row < Config::kRows) {
      const float base = steps.begin < steps.end ? row_max(steps.end - 1)[row].base : kNoKey;
      const RowEnd<Config> of_row(args_, unit(), row, ScoreState{base, row_sums(0)[row] + row_sums(1)[row]});
      row_values()[row] = of_row.output_factor();
      of_row.store_stats(args_);
    }
    sync_math();
    store_outputs();
  }

  MLA_DEVICE void store_outputs() const {
    if (unit().slot >= 0) {
      // Rows that the request does not have are stored too: they are never read.
      float* const to = args_.list.partial_o + int64_t{unit().slot} * Config::kRows * args_.d_v + first_channel();
      MLA_UNROLL
      for (int i = 0; i < kLaneRows; ++i) MLA_UNROLL
      for (int product = 0; product < Config::kProducts; ++product)
        *reinterpret_cast<uint64_t*>(to + row_of_lane(i) * args_.d_v + channels_behind(product)) =
            two_floats(output(product, i, 0), output(product, i, 1));
      return;
    }
    if (args_.o_dtype == DType::kBF16)
      store_final<uint16_t, uint32_t>([](float low, float high) { return ptx::pack_bf16x2(low, high); });
    else if (args_.o_dtype == DType::kF16)
      store_final<uint16_t, uint32_t>([](float low, float high) { return ptx::pack_f16x2(low, high); });
    else if (args_.o_dtype == DType::kF32)
      store_final<uint32_t, uint64_t>(two_floats);
    else
      store_final<uint8_t, uint16_t>(
          [](float low, float high) { return static_cast<uint16_t>(ptx::pack_e4m3x2(low, high)); });
  }

  /// Stores outputs in their type. pack(low, high) converts two neighbours to the bits of two Elements.
  template <class Element, class Packed, class Pack>
  MLA_DEVICE void store_final(const Pack& pack) const {
    float factor[kLaneRows];
    load_row_values(factor, ptx::shared_address(row_values()));
    const bool together =
        is_aligned(args_.o, sizeof(Packed)) && ((args_.o_stride_token | args_.o_stride_head) & 1) == 0;
    MLA_UNROLL
    for (int i = 0; i < kLaneRows; ++i) {
      const QueryRow row = unit().rows.row(args_, row_of_lane(i));
      if (row.token < 0) continue;
      Element* const to = static_cast<Element*>(args_.o) + int64_t{row.token} * args_.o_stride_token +
                          row.head * args_.o_stride_head + first_channel();
      MLA_UNROLL
      for (int product = 0; product < Config::kProducts; ++product) {
        const Packed two = pack(output(product, i, 0) * factor[i], output(product, i, 1) * factor[i]);
        Element* const at = to + channels_behind(product);
        if (together) [[likely]] {
          *reinterpret_cast<Packed*>(at) = two;
        } else {
          at[0] = static_cast<Element>(two);
          at[1] = static_cast<Element>(two >> (8 * sizeof(Element)));
        }
      }
    }
  }

  /// Returns the row, in the block, that is the lane's row i, the lane's first channel, how far its channels of a
  /// product are behind that, and one of these two.
  MLA_DEVICE static int row_of_lane(int i) {
    return i / 2 * 8 + (ptx::lane<Config::kReadsIndexAnew>() & 3) * 2 + i % 2;
  }
  MLA_DEVICE static int first_channel() {
    return group() * Config::kOutputDims + warp_chunk(0) * kChunkBytes +
           (ptx::lane<Config::kReadsIndexAnew>() >> 2) * 2;
  }
  static constexpr int channels_behind(int product) {
    return product / Config::kGroupProducts * Config::kPieceRowBytes + product % Config::kGroupProducts * kChunkBytes;
  }
  MLA_DEVICE float output(int product, int i, int second) const {
    return outputs_[product][i / 2 * 4 + second * 2 + i % 2];
  }

  ScoreState states_[2];  // of the lane's rows, over its keys of the warpgroup's own steps
  float outputs_[Config::kProducts][Config::kRows / 2];
  // These hold for the unit:
  float scale_;  // factor from scores to base-2 logits
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8
