// SPDX-License-Identifier: Apache-2.0
// Absorbed attention on mma.sync: kRows query rows against paged or indexed rows of a latent cache, which are key and
// value at once.
//
// Grid: persistent; a block computes the segments of its worker (work_list.h). Its 8 warps all take part in every phase
// of a step:
//   keys      cp.async of the next step's rows, while this one is computed; quantized rows are decoded to bf16
//   scores    warps divide rows x keys x channels, queries in registers; the sums of K slices meet in shared memory
//   softmax   a warp has 8 rows, four lanes each row; P replaces the scores, rounded to 16 bits
//   outputs   each warp has all rows of its share of the channels, accumulators in registers
// Shared memory: [places of keys][entries][scales][rows' state][the unit]
//                [one or two tiles: keys x (latent + 64) x 2 B][scores, then P][raw stages]
// absorbed_config.cuh has the bytes.
//   step n:   wait, barrier | copy n + 1 | scores | barrier | softmax | barrier | outputs
// Accumulators and queries fill the registers, so that all else lives in shared memory. docs/kernels/cuda_portable.md.
#pragma once

#include "cuda/attention/absorbed_results.cuh"
#include "cuda/attention/poison.cuh"
#include "cuda/backends/portable/absorbed_config.cuh"
#include "cuda/border/launch.h"

namespace mla::MLA_CUDA_NAMESPACE::portable {

/// Describes the unit that a block computes, for all its threads. Its steps are numbered from 0 on.
struct BlockUnit : AbsorbedUnit {
  uint32_t valid[4][2];  // of step n at n % 4: a bit for each key that has a row
};

template <class Config>
class AbsorbedBlock {
 public:
  MLA_DEVICE explicit AbsorbedBlock(const cuda::AbsorbedArgs& args)
      : args_(args), memory_(ptx::shared_memory()), shared_(ptx::shared_address(memory_)) {}

  MLA_DEVICE void compute(const cuda::Segment& segment, int row_lane) {
    if (segment.row_begin + row_lane * Config::kRows >= segment.q_len * args_.num_heads.value) return;
    start(segment, row_lane);
    const auto num_steps = static_cast<int>(unit().steps.end);
    if (num_steps > 0) {
      copy_entries(2);
      if (Config::kQueriesBesideKeys) copy_keys(0);
      load_queries();
      if (!Config::kQueriesBesideKeys) copy_keys(0);
      MLA_NO_UNROLL
      for (int n = 0; n < num_steps; ++n) compute_step(n);
    }
    finish();
  }

 private:
  static_assert(sizeof(BlockUnit) <= Config::kUnitBytes);

  MLA_DEVICE BlockUnit& unit() const { return *as<BlockUnit>(memory_ + Config::kUnitOffset); }
  MLA_DEVICE int32_t first_key(int n) const { return unit().segment.key_begin + n * Config::kKeys; }
  MLA_DEVICE bool has_step(int n) const { return first_key(n) < unit().segment.key_end; }
  MLA_DEVICE const cuda::KeyPool& pool(int n) const { return args_.pools[unit().keys.pool_of(first_key(n))]; }
  MLA_DEVICE bool has_rope() const { return args_.d_qk > Config::kLatentDims; }

  MLA_DEVICE ptx::SharedAddress tile(int n) const {
    return shared_ + static_cast<uint32_t>(Config::kTileOffset + n % Config::kTiles * Config::kTileBytes);
  }
  MLA_DEVICE static int raw_offset(int n) {
    return Config::kRawOffset + n % std::max(Config::kRawStages, 1) * Config::kRawBytes;
  }
  MLA_DEVICE static uint32_t scale_offset(int n) {
    return static_cast<uint32_t>(Config::kScaleOffset + n % 2 * Config::kScaleBytes);
  }
  MLA_DEVICE ptx::SharedAddress places(int n) const {
    return shared_ + static_cast<uint32_t>(Config::kPlaceOffset + n % 2 * Config::kPlaceBytes);
  }
  MLA_DEVICE ptx::SharedAddress entry(int n) const {
    return shared_ +
           static_cast<uint32_t>(Config::kEntryOffset + n % 2 * Config::kEntryBytes + ptx::thread_index() * 4);
  }
  MLA_DEVICE float* row_factors() const { return as<float>(memory_ + Config::kRowOffset); }
  MLA_DEVICE ScoreState* row_states() const {
    return as<ScoreState>(memory_ + Config::kRowOffset + Config::kRows * sizeof(float));
  }
  MLA_DEVICE PoisonMarks<Config::kKeys> poison() const {
    return PoisonMarks<Config::kKeys>(as<uint8_t>(memory_ + Config::kPoisonOffset));
  }

  MLA_DEVICE static bool has_softmax_rows() { return ptx::warp() < Config::kRows / 8; }
  MLA_DEVICE static int softmax_row() { return ptx::warp() * 8 + (ptx::lane() & 7); }

  /// Describes the unit, and finds the keys of the first two steps.
  MLA_DEVICE void start(const cuda::Segment& segment, int row_lane) {
    MLA_UNROLL
    for (int m = 0; m < Config::kOutputTilesM; ++m) MLA_UNROLL
    for (int n = 0; n < Config::kOutputTilesN; ++n) MLA_UNROLL
    for (int i = 0; i < 4; ++i) outputs_[m][n][i] = 0.0F;
    clear_poison();
    for (int r = ptx::thread_index(); r < Config::kRows; r += Config::kThreads) row_states()[r] = {};
    if (ptx::thread_index() == 0) {
      describe_unit<Config>(args_, segment, row_lane, 0, unit());
      unit().template find_unmasked_steps<Config>(args_);
    }
    ptx::sync_block();
    if (ptx::thread_index() < Config::kKeys)
      for (int n = 0; n < 2; ++n) {
        const int32_t* from = entry_of(args_, unit().keys, first_key(n) + ptx::thread_index());
        store_place(n, from != nullptr ? *from : -1);
      }
    ptx::sync_block();
  }

  // Keys. An entry of the page table or index list is copied three steps ahead, its place found two ahead, the row
  // copied one ahead.

  MLA_DEVICE void copy_entries(int n) const {
    if (ptx::thread_index() >= Config::kKeys) return;
    const int32_t* from = entry_of(args_, unit().keys, first_key(n) + ptx::thread_index());
    if (from != nullptr)
      ptx::cp_async_4(entry(n), from, true);
    else
      ptx::store_shared(entry(n), int32_t{-1});
  }

  MLA_DEVICE void store_place(int n, int32_t entry) const {
    const Place<Config> place = find_place<Config>(args_, pool(n), first_key(n) + ptx::thread_index(), entry);
    const ptx::SharedAddress to = places(n) + static_cast<uint32_t>(ptx::thread_index() * sizeof(place));
    ptx::store_shared(to, place.ckv);
    ptx::store_shared(to + 8, place.kpe);
    if constexpr (Config::kQuantized) ptx::store_shared(to + 16, place.scales);
    const uint32_t valid = ptx::ballot(place.ckv != nullptr);
    if (ptx::lane() == 0) unit().valid[n % 4][ptx::warp()] = valid;
  }

  MLA_DEVICE void copy_keys(int n) const {
    if (has_step(n)) {
      const RowCopy<Config> copy(pool(n));
      if constexpr (Config::kQuantized)
        copy.to_raw(shared_ + static_cast<uint32_t>(raw_offset(n)), shared_ + scale_offset(n), places(n));
      else
        copy.to_tile(tile(n), places(n));
    }
    ptx::cp_async_commit();
  }

  /// Waits for the keys of step n. When it returns, their rows are in the tile, for all threads, and the next step's
  /// rows are on their way.
  MLA_DEVICE void wait_for_keys(int n) const {
    ptx::cp_async_wait<0>();
    ptx::sync_block();  // all threads' copies of this step have landed, and nobody reads the step before any more
    copy_entries(n + 3);
    if constexpr (!Config::kQuantized) {
      copy_keys(n + 1);
    } else {
      if constexpr (Config::kRawStages == 2) copy_keys(n + 1);
      decode_raw<Config>(pool(n), memory_ + raw_offset(n), memory_ + scale_offset(n), tile(n));
      ptx::sync_block();  // the tile is complete, and the raw stage may be overwritten
      if constexpr (Config::kRawStages == 1) copy_keys(n + 1);
    }
    if (ptx::thread_index() < Config::kKeys) store_place(n + 2, ptx::load_shared<int32_t>(entry(n + 2)));
  }

  // Queries.

  /// Loads the queries into registers by way of shared memory.
  MLA_DEVICE void load_queries() {
    constexpr int kLatentChunks = Config::kLatentDims / kVector, kChunks = kLatentChunks + Config::kRopeDims / kVector;
    MLA_NO_UNROLL
    for (int i = ptx::thread_index(); i < Config::kQueryTerms * Config::kRows * kChunks; i += Config::kThreads) {
      const int chunk = i % kChunks, r = i / kChunks % Config::kRows, term = i / (kChunks * Config::kRows);
      const Bits8 bits = query_channels<Config::kType>(args_, unit().rows.row(args_, r), chunk * kVector, term);
      const ptx::SharedAddress to =
          chunk < kLatentChunks ? query_latents(term) + tile_offset<Config::kLatentDims * 2>(r, chunk)
                                : query_rope(term) + tile_offset<Config::kRopeDims * 2>(r, chunk - kLatentChunks);
      ptx::store_shared(to, ptx::Vec4{bits.w[0], bits.w[1], bits.w[2], bits.w[3]});
    }
    ptx::sync_block();
    MLA_UNROLL
    for (int term = 0; term < Config::kQueryTerms; ++term) MLA_UNROLL
    for (int m = 0; m < Config::kScoreTilesM; ++m) {
      const int row = (score_warp_m() * Config::kScoreTilesM + m) * 16;
      const auto latent = lane_of_a<Config::kLatentDims * 2>(
          query_latents(term) + static_cast<uint32_t>(row * Config::kLatentDims * 2 + latent_step(0) * 32));
      MLA_UNROLL
      for (int step = 0; step < Config::kLatentSteps; ++step)
        ptx::ldmatrix_x4(queries_[m][step][term], latent.at(0, 2 * step));
      const TileLane<Config::kRopeDims * 2> rope(query_rope(term) + static_cast<uint32_t>(row * Config::kRopeDims * 2),
                                                 ptx::lane() & 15, (ptx::lane() >> 4) | score_warp_k() * 2);
      ptx::ldmatrix_x4(queries_[m][Config::kLatentSteps][term], rope.at(0, 0));
    }
    if (!Config::kQueriesBesideKeys) ptx::sync_block();  // keys will lie where the queries were
  }

  MLA_DEVICE ptx::SharedAddress query_latents(int term) const {
    return shared_ + static_cast<uint32_t>(Config::kQueryStageOffset + term * Config::kRows * Config::kLatentDims * 2);
  }
  MLA_DEVICE ptx::SharedAddress query_rope(int term) const {
    return shared_ + static_cast<uint32_t>(Config::kRopeStageOffset + term * Config::kRows * Config::kRopeDims * 2);
  }

  // Scores.

  MLA_DEVICE static int score_warp_n() { return ptx::warp() % Config::kScoreWarpsN; }
  MLA_DEVICE static int score_warp_m() { return ptx::warp() / Config::kScoreWarpsN % Config::kScoreWarpsM; }
  MLA_DEVICE static int score_warp_k() { return ptx::warp() / (Config::kScoreWarpsN * Config::kScoreWarpsM); }
  MLA_DEVICE static int latent_step(int step) { return score_warp_k() * Config::kLatentSteps + step; }
  MLA_DEVICE static int first_score_key() { return score_warp_n() * Config::kScoreGroups * 16; }

  MLA_DEVICE void compute_step(int n) {
    wait_for_keys(n);
    multiply_queries(n);
    ptx::sync_block();  // all warps have stored their scores
    if (has_softmax_rows()) softmax(n);
    ptx::sync_block();  // P and the rows' factors are written
    rescale_outputs();
    if (poison().any()) silence_poison(n);
    add_values(n);
  }

  MLA_DEVICE void multiply_queries(int n) const {
    // A warp's latent channels begin at a multiple of 64, so that the swizzle of its first chunk is that of chunk 0.
    const ptx::SharedAddress keys = tile(n) + static_cast<uint32_t>(first_score_key() * Config::kRowBytes);
    const auto latent_lane = lane_of_b<Config::kRowBytes>(keys + static_cast<uint32_t>(latent_step(0) * 32));
    const TileLane<Config::kRowBytes> rope_lane(keys + Config::kLatentDims * 2,
                                                (ptx::lane() & 7) | (ptx::lane() >> 4) << 3,
                                                ((ptx::lane() >> 3) & 1) | score_warp_k() * 2);
    MLA_UNROLL
    for (int group = 0; group < Config::kScoreGroups; ++group) {
      float s[Config::kScoreTilesM][2][4] = {};
      MLA_UNROLL
      for (int step = 0; step < Config::kLatentSteps; ++step) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, latent_lane.at(16 * group, 2 * step));
        multiply_step(s, step, b);
      }
      if (has_rope()) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, rope_lane.at(16 * group, 0));
        multiply_step(s, Config::kLatentSteps, b);
      }
      store_scores(s, group);
    }
  }

  MLA_DEVICE void multiply_step(float (&s)[Config::kScoreTilesM][2][4], int step, const uint32_t (&b)[4]) const {
    MLA_UNROLL
    for (int m = 0; m < Config::kScoreTilesM; ++m) MLA_UNROLL
    for (int term = 0; term < Config::kQueryTerms; ++term) {
      mma<Config::kType>(s[m][0], queries_[m][step][term], b[0], b[1]);
      mma<Config::kType>(s[m][1], queries_[m][step][term], b[2], b[3]);
    }
  }

  /// Returns where a 16-byte chunk of a row's scores lies. Chunks are permuted so that neither stores of fragments nor
  /// loads of rows meet bank conflicts.
  MLA_DEVICE ptx::SharedAddress score_chunk(int slice, int row, int chunk) const {
    const int flip = (row & 3) << 1 | ((row >> 2) & 1);
    return shared_ +
           static_cast<uint32_t>(Config::kScoreOffset + (slice * Config::kRows + row) * Config::kScoreRowBytes +
                                 (chunk ^ flip) * kChunkBytes);
  }

  MLA_DEVICE void store_scores(const float (&s)[Config::kScoreTilesM][2][4], int group) const {
    const int g = ptx::lane() >> 2, t = ptx::lane() & 3;
    MLA_UNROLL
    for (int m = 0; m < Config::kScoreTilesM; ++m) MLA_UNROLL
    for (int n = 0; n < 2; ++n) MLA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = (score_warp_m() * Config::kScoreTilesM + m) * 16 + half * 8 + g;
      const int chunk = first_score_key() / 4 + group * 4 + n * 2 + (t >> 1);
      const uint64_t low = std::bit_cast<uint32_t>(s[m][n][2 * half]);
      const uint64_t high = std::bit_cast<uint32_t>(s[m][n][2 * half + 1]);
      ptx::store_shared(score_chunk(score_warp_k(), row, chunk) + static_cast<uint32_t>((t & 1) * 8), high << 32 | low);
    }
  }

  // Softmax. A lane has keys 8 (lane / 8) ... + 7 of its row, and in steps of 64 keys those 32 further on.

  static constexpr int kGroups = Config::kKeys / 32;  // groups of eight keys that a lane has

  MLA_DEVICE static int lane_chunk(int group) { return (ptx::lane() >> 3) + 4 * group; }
  /// Returns where P lies: P of a row takes the first 128 bytes of the row's scores in the first K slice.
  MLA_DEVICE ptx::SharedAddress p_tile() const { return shared_ + Config::kScoreOffset; }

  /// Turns the scores of step n into P, for a warp that has rows of the softmax.
  MLA_DEVICE void softmax(int n) const {
    float s[kGroups][8];
    make_logits(s, n);
    const int r = softmax_row();
    ScoreState state = row_states()[r];
    float largest = kNoKey;
    MLA_UNROLL
    for (int group = 0; group < kGroups; ++group) MLA_UNROLL
    for (int i = 0; i < 8; ++i) largest = std::max(largest, s[group][i]);
    largest = std::max(largest, ptx::shuffle_xor(largest, 8));
    largest = std::max(largest, ptx::shuffle_xor(largest, 16));
    const float factor = state.is_outgrown_by(largest, 0.0F) ? state.raise(largest) : 1.0F, base = state.base();
    ptx::sync_warp();  // all lanes have read the scores that P replaces, and the state
    float sum = 0.0F;
    MLA_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      float p[8];
      MLA_UNROLL
      for (int i = 0; i < 8; ++i) {
        p[i] = ptx::exp2_approx(s[group][i] - base);
        sum += p[i];
      }
      ptx::Vec4 packed;
      MLA_UNROLL
      for (int i = 0; i < 4; ++i) packed.x[i] = pack<Config::kType>(p[2 * i], p[2 * i + 1]);
      ptx::store_shared(p_tile() + tile_offset<Config::kScoreRowBytes>(r, lane_chunk(group)), packed);
    }
    sum += ptx::shuffle_xor(sum, 8);
    sum += ptx::shuffle_xor(sum, 16);
    if (ptx::lane() >= 8) return;
    row_factors()[r] = factor;
    state.sum += sum;
    row_states()[r] = state;
  }

  /// Returns the lane's scores as base-2 logits, -inf where its row does not see the key.
  MLA_DEVICE void make_logits(float (&s)[kGroups][8], int n) const {
    const bool unmasked = unit().unmasked.contains(static_cast<uint32_t>(n));
    const bool only_valid = args_.sparse() && needs_only_scale(args_.options);
    if (!unmasked && !only_valid) {
      const RowScores row(args_, unit().segment, unit().rows.row(args_, softmax_row()));
      for (int group = 0; group < kGroups; ++group) replace_scores(n, lane_chunk(group) * 8, row);
    }
    const bool direct = unmasked || only_valid;
    const float scale = direct ? score_scale(args_) * std::numbers::log2e_v<float> : 1.0F;
    MLA_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      load_scores(s[group], lane_chunk(group), scale, direct);
      const uint32_t valid = only_valid ? unit().valid[n % 4][group] >> (ptx::lane() >> 3) * 8 : 0xFFU;
      MLA_UNROLL
      for (int i = 0; i < 8; ++i)
        if ((valid >> i & 1U) == 0) s[group][i] = kNoKey;
    }
  }

  /// Loads eight scores of the lane's row: the sums of all K slices, or what replace_scores() left in the first one.
  MLA_DEVICE void load_scores(float (&s)[8], int chunk, float scale, bool all_slices) const {
    MLA_UNROLL
    for (int i = 0; i < 8; ++i) s[i] = 0.0F;
    MLA_NO_UNROLL
    for (int slice = 0; slice < (all_slices ? Config::kScoreWarpsK : 1); ++slice) {
      MLA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const auto four = ptx::load_shared<ptx::Vec4>(score_chunk(slice, softmax_row(), chunk * 2 + half));
        MLA_UNROLL
        for (int i = 0; i < 4; ++i) s[half * 4 + i] += std::bit_cast<float>(four.x[i]);
      }
    }
    MLA_UNROLL
    for (int i = 0; i < 8; ++i) s[i] *= scale;
  }

  /// Turns the scores of keys `first` ... + 7 of step n into base-2 logits in place, -inf where the row does not see
  /// the key. It looks at one key at a time, for steps that are masked or whose scores need more than the scale.
  MLA_DEVICE void replace_scores(int n, int first, const RowScores& row) const {
    const int32_t key = first_key(n) + first;
    MLA_NO_UNROLL
    for (int i = first; i < first + 8; ++i) {
      float s = 0.0F;
      MLA_UNROLL
      for (int slice = 0; slice < Config::kScoreWarpsK; ++slice) s += ptx::load_shared<float>(score(slice, i));
      const bool valid = (unit().valid[n % 4][i / 32] >> i % 32 & 1U) != 0;
      if (valid && row.sees(key + i - first)) {
        s = row.logit(s, key + i - first);
      } else {
        if (!is_finite(s)) poison().mark(i);
        s = kNoKey;
      }
      ptx::store_shared(score(0, i), s);
    }
  }

  /// Returns where a K slice's score of the lane's row and a key of the step lies.
  MLA_DEVICE ptx::SharedAddress score(int slice, int key) const {
    return score_chunk(slice, softmax_row(), key / 4) + static_cast<uint32_t>(key % 4 * 4);
  }

  // Outputs.

  MLA_DEVICE static int output_channel() { return ptx::warp() * Config::kOutputDims; }

  MLA_DEVICE void rescale_outputs() {
    const int g = ptx::lane() >> 2;
    float factor[Config::kOutputTilesM][2];
    bool any = false;
    MLA_UNROLL
    for (int m = 0; m < Config::kOutputTilesM; ++m) MLA_UNROLL
    for (int half = 0; half < 2; ++half) {
      factor[m][half] = row_factors()[m * 16 + half * 8 + g];
      any |= factor[m][half] != 1.0F;
    }
    if (!ptx::any(any)) return;
    MLA_UNROLL
    for (int m = 0; m < Config::kOutputTilesM; ++m) MLA_UNROLL
    for (int n = 0; n < Config::kOutputTilesN; ++n) MLA_UNROLL
    for (int i = 0; i < 4; ++i) outputs_[m][n][i] *= factor[m][i >> 1];
  }

  MLA_DEVICE void add_values(int n) {
    const auto p_lane = lane_of_a<Config::kScoreRowBytes>(p_tile());
    const int chunk = output_channel() / kVector, in_segment = chunk % kChunksPerSegment;
    const TileLane<Config::kRowBytes> value_lane(tile(n) + static_cast<uint32_t>((chunk - in_segment) * kChunkBytes),
                                                 ptx::lane() & 15, (ptx::lane() >> 4) | in_segment);
    MLA_NO_UNROLL
    for (int step = 0; step < Config::kKeys / 16; ++step) {
      uint32_t a[Config::kOutputTilesM][4];
      MLA_UNROLL
      for (int m = 0; m < Config::kOutputTilesM; ++m) ptx::ldmatrix_x4(a[m], p_lane.at(16 * m, 2 * step));
      MLA_UNROLL
      for (int column = 0; column < Config::kOutputTilesN; column += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, value_lane.at(16 * step, column));
        MLA_UNROLL
        for (int m = 0; m < Config::kOutputTilesM; ++m) {
          mma<Config::kType>(outputs_[m][column], a[m], b[0], b[1]);
          mma<Config::kType>(outputs_[m][column + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  MLA_DEVICE void clear_poison() const { poison().reset(ptx::thread_index(), Config::kThreads); }

  MLA_DEVICE void silence_poison(int n) const {
    poison().for_each_marked([&](int key) {
      silence_values<Config::kType>(Config::kOutputDims, [&](int c) {
        const int channel = output_channel() + c;
        return tile(n) + tile_offset<Config::kRowBytes>(key, channel / kVector) +
               static_cast<uint32_t>(channel % kVector * 2);
      });
    });
    ptx::sync_block();  // every warp has read the marks, and this warp's lanes see each other's zeros
    clear_poison();
  }

  // The end of a segment.

  MLA_DEVICE void finish() const {
    ptx::sync_block();  // nobody reads the tiles any more
    if (ptx::thread_index() < Config::kRows) finish_row_of_thread();
    ptx::sync_block();
    MLA_UNROLL
    for (int m = 0; m < Config::kOutputTilesM; ++m) store_outputs(m);
    ptx::sync_block();  // the next segment may overwrite all shared memory
  }

  /// Writes what is known of a row at the end, and stores the factor of its outputs in the row's place.
  MLA_DEVICE void finish_row_of_thread() const {
    const int r = ptx::thread_index();
    const RowEnd<Config> end(args_, unit(), r, row_states()[r]);
    row_factors()[r] = end.output_factor();
    end.store_stats(args_);
  }

  /// Stores 16 rows of the warp's channels by way of the warp's corner of the tiles, so that lanes store neighbouring
  /// channels.
  MLA_DEVICE void store_outputs(int m) const {
    constexpr int kRowFloats = Config::kOutputDims + 4;  // 4 more, so that rows begin in different banks
    static_assert(Config::kWarps * 16 * kRowFloats * 4 <= Config::kTileBytes);
    const ptx::SharedAddress corner =
        shared_ + static_cast<uint32_t>(Config::kTileOffset + ptx::warp() * 16 * kRowFloats * 4);
    const int g = ptx::lane() >> 2, t = ptx::lane() & 3;
    ptx::sync_warp();  // all lanes have read the rows stored before
    MLA_UNROLL
    for (int n = 0; n < Config::kOutputTilesN; ++n) MLA_UNROLL
    for (int i = 0; i < 4; ++i)
      ptx::store_shared(corner + static_cast<uint32_t>(((i >> 1) * 8 + g) * kRowFloats + n * 8 + 2 * t + (i & 1)) * 4,
                        outputs_[m][n][i]);
    ptx::sync_warp();
    constexpr int kVectors = Config::kOutputDims / kVector;
    MLA_NO_UNROLL
    for (int i = ptx::lane(); i < 16 * kVectors; i += kWarpSize) {
      const int r = m * 16 + i / kVectors, channel = i % kVectors * kVector;
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
      store_row(row, r, output_channel() + channel, values);
    }
  }

  MLA_DEVICE void store_row(const QueryRow& row, int r, int channel, const float (&values)[kVector]) const {
    const int64_t slot = unit().slot;
    if (slot < 0) {
      store_output(args_, row, channel, values);
    } else {
      float* to = args_.list.partial_o + (slot * Config::kRows + r) * args_.d_v + channel;
      store_bits8(reinterpret_cast<std::byte*>(to), 4, encode8(values, DType::kF32));
    }
  }

  const cuda::AbsorbedArgs& args_;
  std::byte* const memory_;
  const ptx::SharedAddress shared_;

  uint32_t queries_[Config::kScoreTilesM][Config::kLatentSteps + 1][Config::kQueryTerms][4];  // the rotary step is last
  float outputs_[Config::kOutputTilesM][Config::kOutputTilesN][4];
};

template <class Config_>
struct AbsorbedKernel {
  using Config = Config_;
  using Params = cuda::AbsorbedArgs;
  static constexpr const char* kName = "absorbed_attention";
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kMinBlocks = Config::kMinBlocks;
  static constexpr int kCluster = 1;
  static constexpr bool kStartsEarly = false;

  static MLA_DEVICE void run(const Params& args) {
    ptx::wait_for_previous_grid();  // waits for the plan
    ptx::allow_next_grid();
    const cuda::WorkList& list = args.list;
    const cuda::Share share = list.shares[ptx::block_index_x()];
    AbsorbedBlock<Config> block(args);
    MLA_NO_UNROLL
    for (int32_t i = share.begin; i < share.end; ++i) block.compute(list.segments[i], share.row_lane);
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::portable
