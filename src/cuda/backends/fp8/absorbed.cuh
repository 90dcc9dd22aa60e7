// SPDX-License-Identifier: Apache-2.0
// This kernel computes absorbed attention by mma.sync on e4m3, m16n8k32: kRows query rows against paged or indexed rows
// of e4m3, which are operands as they lie. params.h defines the arithmetic (AttentionOptions::compute).
//
// Grid: persistent; a block computes the segments of its worker (work_list.h). All 8 warps copy rows, and compute,
// alone (16 rows) or as two groups of 32 rows each, which share the keys (grouped_block.cuh):
//   keys      a warp copies four rows of a step by cp.async, two steps ahead if there is room
//   scores    a group's warps divide keys x channels, queries in registers as e4m3; a run of 64 channels at a time is
//             summed by tensor cores and multiplied by the key's scale of it, or has the scale as an operand where the
//             GPU knows such (kHasBlockScales) and it is a power of two; 16-bit rotary channels by bf16 multiplies
//   softmax   a warp has 8 rows, four lanes each row (grouped_scores.cuh); P times the keys' scales becomes e4m3 with a
//             scale for each row, once for every scale that a key has (quantized_p.cuh)
//   outputs   each warp has all rows of its group and its share of the channels, accumulators in registers: P times 32
//             values on tensor cores, times the scale of P, added in f32
// Shared memory: [places][entries][rows' state][scales of queries][scales of P][the unit][mbarriers][poison]
//                [scores of one group][P][tiles: keys x 640 B][scales]
// config.cuh has the bytes. docs/kernels/cuda_fp8.md describes the kernel.
#pragma once

#include "cuda/attention/grouped_outputs.cuh"
#include "cuda/backends/fp8/e4m3_operands.cuh"
#include "cuda/backends/fp8/quantized_p.cuh"
#include "cuda/border/launch.h"

namespace mla::MLA_CUDA_NAMESPACE::fp8 {

/// Returns the scale of a query row whose largest finite magnitude is given.
MLA_DEVICE float query_scale(float largest) {
  const float scale = largest / kE4M3Max;
  return scale == 0.0F ? 1.0F : scale;
}

template <class Config>
class AbsorbedBlock : public GroupedOutputs<Config, QuantizedP<Config>> {
  using Base = GroupedOutputs<Config, QuantizedP<Config>>;
  using Base::args_, Base::memory_, Base::shared_, Base::lane;
  using Base::group, Base::unit, Base::has_step, Base::tile, Base::poison, Base::score_warp_k, Base::key_scale;
  using Base::p_tile, Base::p_chunk, Base::p_scales, Base::rope_p_tile, Base::rope_p_chunk;

 public:
  using Base::Base;

  /// Computes all segments of the worker.
  MLA_DEVICE void compute_all() {
    Base::for_each_segment([&](const cuda::Segment& segment) { compute(segment); });
  }

 private:
  MLA_DEVICE void compute(const cuda::Segment& segment) {
    Base::clear(outputs_);
    Base::start(segment);
    uint32_t n = unit().steps.begin;
    if (has_step(n)) {
      if (Config::kQueriesBesideKeys) start_keys(n);
      load_queries(n);
      if (!Config::kQueriesBesideKeys) start_keys(n);
      MLA_NO_UNROLL
      for (; has_step(n); ++n) compute_step(n);
    }
    // Two tiles of quantized channels hold the even and the odd ones of 16.
    Base::store_outputs(outputs_, [&](int at, int t, int i) {
      const bool quantized = output_channel(at / Config::kRunTiles) < d_ckv();
      return quantized ? at / 2 * 16 + t * 4 + i * 2 + at % 2 : at * 8 + t * 2 + i;
    });
  }

  /// Returns the pool of the keys of step n. Most problems have one only.
  MLA_DEVICE const cuda::KeyPool& pool(uint32_t n) const {
    return args_.num_pools() == 1 ? args_.pools[0] : Base::pool(n);
  }
  MLA_DEVICE int32_t d_ckv() const { return args_.pools[0].cache.d_ckv; }
  MLA_DEVICE bool has_rope() const { return args_.pools[0].kpe_bytes > 0; }
  MLA_DEVICE bool has_quantized_rope() const { return args_.pools[0].quantized_kpe; }

  // Keys.

  MLA_DEVICE void start_keys(uint32_t first) const {
    Base::template start_keys<Config::kLead>(first, [&](uint32_t n) { fill_tile(n, false); });
  }

  MLA_DEVICE void fill_tile(uint32_t n, bool finds) const {
    if (!has_step(n)) return;
    Base::fill_by_copies(n, finds, [&](const KeptPlace<Config>& place) {
      RowCopy<Config>(args_, pool(n), place).to_raw(tile(n), shared_ + Base::scale_offset(n));
    });
  }

  // Queries.

  MLA_DEVICE float* query_scales() const { return as<float>(memory_ + Config::kQueryScaleOffset); }

  /// Loads the queries into registers by way of shared memory, where each row has 512 bytes of e4m3 and 128 bytes of
  /// rotary channels. A warp quantizes a row at a time.
  MLA_DEVICE void load_queries(uint32_t first_step) {
    // Beside the first keys, the queries take the tile that is filled last, in the first step.
    const ptx::SharedAddress latents =
        Config::kQueriesBesideKeys ? tile(first_step + Config::kLead) : shared_ + Config::kTileOffset;
    const ptx::SharedAddress rope = latents + Config::kRows * Config::kLatentDims;
    MLA_NO_UNROLL
    for (int r = Base::warp(); r < Config::kRows; r += Config::kWarps) store_query(latents, rope, r);
    ptx::sync_block();
    MLA_UNROLL
    for (int m = 0; m < Config::kScoreTilesM; ++m) {
      const int row = group() * Config::kGroupRows + m * 16;
      const TileLane<Config::kLatentDims> latent(
          latents + static_cast<uint32_t>(row * Config::kLatentDims + score_warp_k() * Config::kWarpLatents),
          lane() & 15, lane() >> 4);
      MLA_UNROLL
      for (int step = 0; step < Config::kLatentSteps; ++step)
        ptx::ldmatrix_x4(queries_[m][step], latent.at(0, 2 * step));
      const TileLane<kRopeBytes> of_rope(rope + static_cast<uint32_t>(row * kRopeBytes), lane() & 15,
                                         (lane() >> 4) | score_warp_k() * 2);
      ptx::ldmatrix_x4(queries_[m][Config::kLatentSteps], of_rope.at(0, 0));
    }
    ptx::sync_block();  // keys will lie where the queries were
  }
  static constexpr int kRopeBytes = 2 * Config::kRopeDims;

  /// Stores a query row: its channels that meet quantized ones as e4m3 with one scale, the others as bf16.
  MLA_DEVICE void store_query(ptx::SharedAddress latents, ptx::SharedAddress rope, int r) const {
    constexpr int kChunks = (Config::kLatentDims + Config::kRopeDims) / kVector;
    const QueryRow row = unit().rows.row(args_, r);
    const int latent_chunks = d_ckv() / kVector, num_chunks = args_.d_qk / kVector;
    const int quantized_chunks = has_quantized_rope() ? num_chunks : latent_chunks;
    float largest = 0.0F;
    MLA_NO_UNROLL
    for (int chunk = lane(); chunk < quantized_chunks; chunk += kWarpSize) {
      float values[kVector];
      decode8(query_bits(args_, row, chunk * kVector), args_.q_dtype, values);
      MLA_UNROLL
      for (int i = 0; i < kVector; ++i)
        largest = std::fmax(largest, is_finite(values[i]) ? magnitude(values[i]) : 0.0F);
    }
    largest = std::bit_cast<float>(ptx::max_of_warp(std::bit_cast<uint32_t>(largest)));
    const bool as_they_are = args_.q_dtype == DType::kE4M3;
    const float scale = as_they_are ? 1.0F : query_scale(largest);
    if (lane() == 0) query_scales()[r] = scale;
    const ScaleDivisor divide(scale);
    MLA_NO_UNROLL
    for (int chunk = lane(); chunk < kChunks; chunk += kWarpSize) {
      const Bits8 bits = query_bits(args_, row, chunk * kVector);
      float values[kVector];
      decode8(bits, args_.q_dtype, values);
      const bool latent = chunk < latent_chunks;
      const int of_part = latent ? chunk : chunk - latent_chunks;
      if (of_part >= (latent ? Config::kLatentDims : Config::kRopeDims) / kVector) continue;
      if (chunk < quantized_chunks) {
        const Bits8 e4m3 = as_they_are ? bits : quantize8(values, divide);
        const uint32_t at =
            latent ? tile_offset<Config::kLatentDims>(r, of_part / 2) : tile_offset<kRopeBytes>(r, of_part / 2);
        ptx::store_shared((latent ? latents : rope) + at + static_cast<uint32_t>(of_part % 2 * kVector),
                          uint64_t{e4m3.w[1]} << 32 | e4m3.w[0]);
      } else {
        const Bits8 rounded = encode8(values, DType::kBF16);
        ptx::store_shared(rope + tile_offset<kRopeBytes>(r, of_part),
                          ptx::Vec4{rounded.w[0], rounded.w[1], rounded.w[2], rounded.w[3]});
      }
    }
  }

  // Scores.

  MLA_DEVICE void compute_step(uint32_t n) {
    const uint32_t ahead = n + Config::kLead;
    if (Base::fills_first()) fill_tile(ahead, true);
    ptx::mbarrier_wait(Base::kv_full(n), Base::parity(n));
    const cuda::KeyPool& of = pool(n);
    compute_scores(n, of);
    Base::sync_group();  // all warps of the group have stored their scores
    const bool of_warp = Base::has_softmax_rows() && Base::softmax(n, of);
    Base::end_turn();
    if (!Base::fills_first()) fill_tile(ahead, true);
    // P and the rows' factors are written. What is rare concerns all warps of the group, or none.
    const bool rare = Base::sync_group_any(of_warp);
    if (rare) [[unlikely]]
      Base::rescale(outputs_);
    if (rare && poison(n).any()) [[unlikely]] {
      add_values<true>(n, of);
      Base::reset_poison(n);
    } else {
      add_values<false>(n, of);
    }
    Base::leave_tile(n);
  }

  MLA_DEVICE void compute_scores(uint32_t n, const cuda::KeyPool& of) const {
    const ptx::SharedAddress keys = tile(n) + static_cast<uint32_t>(Base::first_score_key() * Config::kRawRowBytes);
    const int key_row = (lane() & 7) | (lane() >> 4) << 3, chunk = lane() >> 3 & 1;
    const TileLane<Config::kRawRowBytes> latent_lane(keys + static_cast<uint32_t>(first_channel()), key_row, chunk);
    const TileLane<Config::kRawRowBytes> rope_lane(keys + Config::kLatentDims, key_row, chunk | score_warp_k() * 2);
    const auto multiply = [&](int block, float(&s)[Config::kScoreTilesM][2][4], auto whole, auto scaled,
                              uint32_t scales) {
      if constexpr (scaled)
        add_latents_with_scales<whole>(s, latent_lane, block, of.cache.d_ckv, scales);
      else
        add_latents_then_scale<whole>(s, latent_lane, block, n, of);
    };
    const auto multiply_whole = [&](auto scaled, uint32_t scales) {
      MLA_UNROLL
      for (int block = 0; block < Config::kScoreBlocks; ++block) {
        float s[Config::kScoreTilesM][2][4] = {}, rope[Config::kScoreTilesM][2][4] = {};
        add_16_bit_rope(rope, rope_lane, block);
        multiply(block, s, std::true_type(), scaled, scales);
        scale_by_queries(s, rope);
        if (block == 0) Base::wait_for_turn(n);
        Base::store_scores(s, block);
      }
    };
    uint32_t scales = 0;
    const bool scaled = kHasBlockScales && find_block_scales(scales, n, of);
    if (of.cache.d_ckv == Config::kLatentDims && has_rope() && !has_quantized_rope() &&
        (kHasBlockScales || !of.ue8m0)) {
      if (scaled)
        multiply_whole(std::bool_constant<kHasBlockScales>(), scales);
      else
        multiply_whole(std::false_type(), scales);
      return;
    }
    MLA_UNROLL
    for (int block = 0; block < Config::kScoreBlocks; ++block) {
      float s[Config::kScoreTilesM][2][4] = {}, rope[Config::kScoreTilesM][2][4] = {};
      if (has_rope() && !has_quantized_rope()) add_16_bit_rope(rope, rope_lane, block);
      if (scaled)
        multiply(block, s, std::false_type(), std::bool_constant<kHasBlockScales>(), scales);
      else
        multiply(block, s, std::false_type(), std::false_type(), scales);
      if (has_quantized_rope() && score_warp_k() < 2) add_quantized_rope(s, rope_lane, block, *of.cache.kpe_scale);
      scale_by_queries(s, rope);
      if (block == 0) Base::wait_for_turn(n);
      Base::store_scores(s, block);
    }
  }
  MLA_DEVICE static int first_channel() { return score_warp_k() * Config::kWarpLatents; }

  /// Sums a run of channels at a time, and adds the sum times the key's scale of it.
  template <bool kWhole>
  MLA_DEVICE void add_latents_then_scale(float (&s)[Config::kScoreTilesM][2][4],
                                         const TileLane<Config::kRawRowBytes>& latent_lane, int block, uint32_t n,
                                         const cuda::KeyPool& of) const {
    const bool ue8m0 = !kHasBlockScales && !kWhole && of.ue8m0;
    const int first_key = Base::first_score_key() + 16 * block + (lane() & 3) * 2;
    MLA_UNROLL
    for (int run = 0; run < Config::kScoreRuns; ++run) {
      const int channel = first_channel() + run * Config::kScaleRun;
      if (!kWhole && run > 0 && channel >= of.cache.d_ckv) continue;  // the first run always exists
      float products[Config::kScoreTilesM][2][4] = {};
      MLA_UNROLL
      for (int step = run * Config::kRunSteps; step < (run + 1) * Config::kRunSteps; ++step) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, latent_lane.at(16 * block, 2 * step));
        multiply_queries(products, step, b);
      }
      const int scale_index = channel / kVector >> of.scale_shift;
      MLA_UNROLL
      for (int eight = 0; eight < 2; ++eight) MLA_UNROLL
      for (int odd = 0; odd < 2; ++odd) {
        const float scale = key_scale(n, ue8m0, first_key + eight * 8 + odd, scale_index);
        MLA_UNROLL
        for (int m = 0; m < Config::kScoreTilesM; ++m) MLA_UNROLL
        for (int half = 0; half < 2; ++half) s[m][eight][half * 2 + odd] += products[m][eight][half * 2 + odd] * scale;
      }
    }
  }

  /// Adds the same, where the tensor cores multiply by the scales that find_block_scales() found.
  template <bool kWhole>
  MLA_DEVICE void add_latents_with_scales(float (&s)[Config::kScoreTilesM][2][4],
                                          const TileLane<Config::kRawRowBytes>& latent_lane, int block, int32_t d_ckv,
                                          uint32_t scales) const {
    MLA_UNROLL
    for (int run = 0; run < Config::kScoreRuns; ++run) {
      if (!kWhole && run > 0 && first_channel() + run * Config::kScaleRun >= d_ckv)
        continue;  // the first run always exists
      MLA_UNROLL
      for (int step = run * Config::kRunSteps; step < (run + 1) * Config::kRunSteps; ++step) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, latent_lane.at(16 * block, 2 * step));
        MLA_UNROLL
        for (int eight = 0; eight < 2; ++eight) MLA_UNROLL
        for (int m = 0; m < Config::kScoreTilesM; ++m)
          multiply_e4m3(s[m][eight], queries_[m][step], b[2 * eight], b[2 * eight + 1],
                        {scales, run, 2 * block + eight});
      }
    }
  }

  /// Finds the lane's UE8M0 scales of keys of step n, for the multiplies: lane 4 g + i has those of key g of the warp's
  /// i-th eight keys, each in the byte that is numbered as its run of channels is. Returns false, for all lanes, if one
  /// of them is an f32 that no UE8M0 is.
  MLA_DEVICE bool find_block_scales(uint32_t& scales, uint32_t n, const cuda::KeyPool& of) const {
    constexpr int kEights = 2 * Config::kScoreBlocks;
    static_assert(kEights <= 4 && Config::kScoreRuns <= 4);
    const int key = Base::first_score_key() + (lane() & (kEights - 1)) * 8 + (lane() >> 2);
    const std::byte* of_key = memory_ + Base::scale_offset(n) + key * Config::kKeyScaleBytes;
    const auto index = [&](int run) { return (first_channel() + run * Config::kScaleRun) / kVector >> of.scale_shift; };
    if (of.ue8m0) {
      MLA_UNROLL
      for (int run = 0; run < Config::kScoreRuns; ++run)
        scales |= static_cast<uint32_t>(of_key[index(run)]) << (8 * run);
      return true;
    }
    bool powers_of_two = true;
    MLA_UNROLL
    for (int run = 0; run < Config::kScoreRuns; ++run) {
      const uint32_t bits = as<uint32_t>(of_key)[index(run)], exponent = bits >> 23;
      powers_of_two = powers_of_two && exponent << 23 == bits && exponent - 1 < 0xFE;
      scales |= exponent << (8 * run);
    }
    return ptx::all(powers_of_two);
  }

  MLA_DEVICE void multiply_queries(float (&s)[Config::kScoreTilesM][2][4], int step, const uint32_t (&b)[4]) const {
    MLA_UNROLL
    for (int m = 0; m < Config::kScoreTilesM; ++m) {
      multiply_e4m3(s[m][0], queries_[m][step], b[0], b[1]);
      multiply_e4m3(s[m][1], queries_[m][step], b[2], b[3]);
    }
  }

  /// Adds 32 of the 64 rotary channels: two K slices have them all.
  MLA_DEVICE void add_quantized_rope(float (&s)[Config::kScoreTilesM][2][4],
                                     const TileLane<Config::kRawRowBytes>& rope_lane, int block, float scale) const {
    uint32_t b[4];
    float products[Config::kScoreTilesM][2][4] = {};
    ptx::ldmatrix_x4(b, rope_lane.at(16 * block, 0));
    multiply_queries(products, Config::kLatentSteps, b);
    MLA_UNROLL
    for (int m = 0; m < Config::kScoreTilesM; ++m) MLA_UNROLL
    for (int eight = 0; eight < 2; ++eight) MLA_UNROLL
    for (int i = 0; i < 4; ++i) s[m][eight][i] += products[m][eight][i] * scale;
  }

  /// Adds 16 rotary channels: each K slice has some.
  MLA_DEVICE void add_16_bit_rope(float (&s)[Config::kScoreTilesM][2][4],
                                  const TileLane<Config::kRawRowBytes>& rope_lane, int block) const {
    uint32_t b[4];
    ptx::ldmatrix_x4(b, rope_lane.at(16 * block, 0));
    MLA_UNROLL
    for (int m = 0; m < Config::kScoreTilesM; ++m) {
      ptx::mma_bf16(s[m][0], queries_[m][Config::kLatentSteps], b[0], b[1]);
      ptx::mma_bf16(s[m][1], queries_[m][Config::kLatentSteps], b[2], b[3]);
    }
  }

  /// Turns what e4m3 queries gave into scores: times the queries' scales, and what 16-bit rotary channels gave.
  MLA_DEVICE void scale_by_queries(float (&s)[Config::kScoreTilesM][2][4],
                                   const float (&rope)[Config::kScoreTilesM][2][4]) const {
    const float* const scales = query_scales() + group() * Config::kGroupRows + (lane() >> 2);
    MLA_UNROLL
    for (int m = 0; m < Config::kScoreTilesM; ++m) MLA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float scale = scales[m * 16 + half * 8];
      MLA_UNROLL
      for (int eight = 0; eight < 2; ++eight) MLA_UNROLL
      for (int i = 0; i < 2; ++i)
        s[m][eight][half * 2 + i] = s[m][eight][half * 2 + i] * scale + rope[m][eight][half * 2 + i];
    }
  }

  // Outputs.

  MLA_DEVICE static int output_channel(int run) { return Base::first_output_channel() + run * Config::kScaleRun; }

  /// Adds P times the values of step n. With kSilenced, values of marked keys that are not finite count as 0.
  template <bool kSilenced>
  MLA_DEVICE void add_values(uint32_t n, const cuda::KeyPool& of) {
    MLA_UNROLL
    for (int run = 0; run < Config::kOutputRuns; ++run)
      if (output_channel(run) < d_ckv()) add_latents<kSilenced>(n, run, of.scale_shift);
    // Rotary channels, where they are part of the value, are the last run of the last warp.
    if (output_channel(Config::kOutputRuns - 1) >= d_ckv()) add_rope<kSilenced>(n, Config::kOutputRuns - 1);
  }

  /// Adds a run of quantized channels.
  template <bool kSilenced>
  MLA_DEVICE void add_latents(uint32_t n, int run, int scale_shift) {
    const int channel = output_channel(run), scale_index = channel / kVector >> scale_shift;
    const int row = lane() & 15;
    uint32_t a[Config::kOutputTilesM][4];
    float scale[Config::kOutputTilesM][2];
    MLA_UNROLL
    for (int m = 0; m < Config::kOutputTilesM; ++m) {
      ptx::ldmatrix_x4(a[m], p_tile(scale_index) + p_chunk(m * 16 + row, lane() >> 4));
      MLA_UNROLL
      for (int half = 0; half < 2; ++half) scale[m][half] = p_scales(scale_index)[m * 16 + half * 8 + (lane() >> 2)];
    }
    // All runs of a warp are in one segment of the row.
    static_assert(Config::kOutputDims <= kSegmentBytes);
    const int first_chunk = Base::first_output_channel() / kChunkBytes, in_segment = first_chunk % kChunksPerSegment;
    const TileLane<Config::kRawRowBytes> value_lane(
        tile(n) + static_cast<uint32_t>((first_chunk - in_segment) * kChunkBytes), lane(), in_segment);
    MLA_UNROLL
    for (int column = 0; column < Config::kRunTiles; column += 2) {
      uint32_t pairs[4];
      ptx::ldmatrix_x4_trans(pairs, value_lane.at(0, run * (Config::kScaleRun / kChunkBytes) + column / 2));
      if constexpr (kSilenced) silence_e4m3(pairs, n);
      MLA_UNROLL
      for (int odd = 0; odd < 2; ++odd) {
        uint32_t b[2];
        channels_of_pairs(b, pairs, odd);
        MLA_UNROLL
        for (int m = 0; m < Config::kOutputTilesM; ++m) {
          float products[4] = {};
          multiply_e4m3(products, a[m], b[0], b[1]);
          float(&to)[4] = outputs_[m][run * Config::kRunTiles + column + odd];
          MLA_UNROLL
          for (int i = 0; i < 4; ++i) to[i] += products[i] * scale[m][i >> 1];
        }
      }
    }
  }

  /// Clears NaN in the lane's e4m3 of marked keys. The tile itself must not change: rows of the other group may see
  /// the key.
  MLA_DEVICE void silence_e4m3(uint32_t (&pairs)[4], uint32_t n) const {
    MLA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int key = i * 8 + (lane() & 3) * 2;
      const uint32_t marked =
          (poison(n).is_marked(key) ? 0xFFFFU : 0U) | (poison(n).is_marked(key + 1) ? 0xFFFF0000U : 0U);
      pairs[i] &= ~(nan_bytes(pairs[i]) & marked);
    }
  }

  /// Adds the 64 rotary channels, which are of 16 bits where they are part of the value.
  template <bool kSilenced>
  MLA_DEVICE void add_rope(uint32_t n, int run) {
    const TileLane<Config::kRawRowBytes> value_lane(tile(n) + Config::kLatentDims, lane() & 15, lane() >> 4);
    MLA_NO_UNROLL
    for (int step = 0; step < Config::kKeys / 16; ++step) {
      uint32_t a[Config::kOutputTilesM][4];
      MLA_UNROLL
      for (int m = 0; m < Config::kOutputTilesM; ++m)
        ptx::ldmatrix_x4(a[m], rope_p_tile() + rope_p_chunk(m * 16 + (lane() & 15), 2 * step + (lane() >> 4)));
      MLA_UNROLL
      for (int column = 0; column < Config::kRunTiles; column += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, value_lane.at(16 * step, column));
        if constexpr (kSilenced) Base::template silence<DType::kBF16>(b, n, 16 * step);
        MLA_UNROLL
        for (int m = 0; m < Config::kOutputTilesM; ++m) {
          ptx::mma_bf16(outputs_[m][run * Config::kRunTiles + column], a[m], b[0], b[1]);
          ptx::mma_bf16(outputs_[m][run * Config::kRunTiles + column + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  uint32_t queries_[Config::kScoreTilesM][Config::kLatentSteps + 1][4];  // the rotary step is last
  typename Base::Outputs outputs_;
};

template <class Config>
struct AbsorbedKernel : GroupedKernel<AbsorbedBlock<Config>, Config> {
  static constexpr const char* kName = "fp8_absorbed_attention";
};

}  // namespace mla::MLA_CUDA_NAMESPACE::fp8
