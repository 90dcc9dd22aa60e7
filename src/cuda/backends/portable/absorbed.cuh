// SPDX-License-Identifier: Apache-2.0
// This kernel computes absorbed attention by mma.sync: kRows query rows against paged or indexed rows of a latent
// cache, which are key and value at once.
//
// Grid: persistent; a block computes the segments of its worker (work_list.h). All 8 warps copy rows, and compute,
// alone (16 and 32 rows) or as two groups of 32 rows each, which share the keys (grouped_block.cuh):
//   keys      a warp copies four rows of a step by cp.async, a step or more ahead; it decodes quantized rows to bf16
//   scores    a group's warps divide keys x channels, queries in registers; pairs of warps add up their sums
//   softmax   each lane makes P, rounded to 16 bits, of the scores that it is left with (fragment_scores.cuh)
//   outputs   each warp has all rows of its group and its share of the channels, accumulators in registers
// Shared memory: [places][entries][scales][rows' state][the unit][mbarriers][poison]
//                [exchanges of scores][P][tiles: keys x (latent + 64) x 2 B][raw stages]
// absorbed_config.cuh has the bytes. Accumulators and queries fill the registers, so that all else lives in shared
// memory. docs/kernels/cuda_portable.md describes the kernel.
#pragma once

#include "cuda/attention/fragment_scores.cuh"
#include "cuda/attention/grouped_outputs.cuh"
#include "cuda/backends/portable/absorbed_codes.cuh"
#include "cuda/backends/portable/absorbed_config.cuh"
#include "cuda/border/launch.h"

namespace mla::MLA_CUDA_NAMESPACE::portable {

template <class Config>
class AbsorbedBlock : public GroupedOutputs<Config, FragmentScores<Config>> {
  using Base = GroupedOutputs<Config, FragmentScores<Config>>;
  using Base::args_, Base::memory_, Base::shared_;
  using Base::group, Base::warp_of_group, Base::unit, Base::pool, Base::tile, Base::kv_full, Base::poison,
      Base::score_warp_k;
  using typename Base::Keys;

 public:
  using Base::Base;

  /// Computes all segments of the worker.
  MLA_DEVICE void compute_all() {
    Base::for_each_segment([&](const cuda::Segment& segment) { compute(segment); });
  }

 private:
  MLA_DEVICE void compute(const cuda::Segment& segment) {
    Base::clear(outputs_);
    Base::start_rows();
    if (Config::kCodes && ptx::thread_index() == 0) {
      const core::Cache& cache = args_.pools[0].cache;
      const float latent = *as<float>(cache.scales.base);
      code_scales() = CodeScales(latent, has_rope() ? *cache.kpe_scale : latent);
    }
    Base::start(segment);
    end_step_ = unit().steps.end;
    uint32_t n = unit().steps.begin;
    if (has_step(n)) {
      constexpr bool kKeysFirst = Config::kQueriesBesideKeys || Config::kRawStages > 0;
      if (kKeysFirst) start_keys(n);
      load_queries(n);
      if (!kKeysFirst) start_keys(n);
      if (Config::kDecodesInTile && Base::fills_first()) decode_tile(n);
      MLA_NO_UNROLL
      for (; has_step(n); ++n) compute_step(n);
    }
    Base::finish_sums();
    if constexpr (Config::kCodes)  // two tiles have 16 channels in turn
      Base::store_outputs(
          outputs_, [](int at, int t, int i) { return at / 2 * 16 + t * 4 + i * 2 + at % 2; },
          code_scales().latent_power * code_scales().of_scores);
    else
      Base::store_outputs(outputs_, [](int at, int t, int i) { return at * 8 + t * 2 + i; });
  }

  MLA_DEVICE bool has_step(uint32_t n) const { return n < end_step_; }
  MLA_DEVICE bool has_rope() const { return args_.d_qk > Config::kLatentDims; }

  // Keys.

  MLA_DEVICE static uint32_t raw_offset(uint32_t n) {
    return Config::kRawOffset + n % std::max(Config::kRawStages, 1) * Config::kRawBytes;
  }

  MLA_DEVICE void start_keys(uint32_t first) const {
    constexpr int kFirstSteps = Config::kRawStages > 0 ? Config::kRawStages : Config::kLead;
    Base::template start_keys<kFirstSteps>(first, [&](uint32_t n) {
      if constexpr (Config::kRawStages > 0)
        load_raw(n, false);
      else
        fill_tile(n, false);
    });
  }

  /// Issues the warp's quantized rows of step n. `finds` says whether the warp also takes its turn in loading entries
  /// and finding rows of the steps behind it.
  MLA_DEVICE void load_raw(uint32_t n, bool finds) const {
    if (finds) Base::commit_entries(n);
    if (has_step(n))
      RowCopy<Config>(args_, pool(n), Base::place(n, Keys::lane_key()))
          .to_raw(shared_ + raw_offset(n), shared_ + Base::scale_offset(n));
    ptx::cp_async_commit();
    if (finds && Base::finds_after(n)) {
      ptx::cp_async_wait<3>();  // since then rows, entries and rows were committed
      Base::find_rows(n + 1);
    }
  }

  /// Brings the warp's rows of step n to their tile: issues copies of those that land there, or decodes raw ones and
  /// issues copies of those of a later step.
  MLA_DEVICE void fill_tile(uint32_t n, bool finds) const {
    if (!has_step(n)) return;
    if constexpr (Config::kRawStages > 0) {
      // Entries and rows of each later step are two groups.
      ptx::cp_async_wait<2 * (Config::kRawStages - 1)>();
      ptx::sync_warp();  // the copies of all lanes have landed
      Base::wait_for_tile(n);
      decode_raw<Config>(pool(n), memory_ + raw_offset(n), memory_ + Base::scale_offset(n), tile(n));
      ptx::sync_warp();
      if (Base::lane() == 0) ptx::mbarrier_arrive(kv_full(n));
      load_raw(n + Config::kRawStages, finds);
    } else if constexpr (Config::kDecodesInTile) {
      Base::copy_rows(n, finds, [&](const KeptPlace<Config>& place) {
        RowCopy<Config>(args_, pool(n), place).to_tile_as_codes(tile(n));
      });
      if (finds) Base::find_rows_after(n);
    } else {
      Base::fill_by_copies(n, finds, [&](const KeptPlace<Config>& place) {
        if (unit().whole_rows) [[likely]]
          RowCopy<Config>::whole_to_tile(place, tile(n), row_policy(args_));
        else
          RowCopy<Config>(args_, pool(n), place).to_tile(tile(n));
      });
    }
  }

  /// Decodes the warp's rows of step n in their tile, half a step after their copies were issued.
  MLA_DEVICE void decode_tile(uint32_t n) const {
    if (!has_step(n)) return;
    ptx::cp_async_wait<0>();
    ptx::sync_warp();  // the copies of all lanes have landed
    decode_in_tile<Config>(pool(n), memory_ + (tile(n) - shared_), tile(n));
    ptx::sync_warp();
    if (Base::lane() == 0) ptx::mbarrier_arrive(kv_full(n));
  }

  // Queries.

  /// Loads the queries into registers by way of shared memory.
  MLA_DEVICE void load_queries(uint32_t first_step) {
    constexpr int kLatentChunks = Config::kLatentDims / kVector, kChunks = kLatentChunks + Config::kRopeDims / kVector;
    // Beside the first keys, the queries take the tile that is filled last, in the first step.
    const ptx::SharedAddress at =
        Config::kQueriesBesideKeys ? tile(first_step + Config::kLead) : shared_ + Config::kQueryOffset;
    const auto latents = [&](int term) {
      return at + static_cast<uint32_t>(term * Config::kRows * Config::kLatentDims * 2);
    };
    const auto rope = [&](int term) {
      return latents(Config::kQueryTerms) + static_cast<uint32_t>(term * Config::kRows * Config::kRopeDims * 2);
    };
    const auto place = [&](int r, int chunk, int term) {
      return chunk < kLatentChunks ? latents(term) + tile_offset<Config::kLatentDims * 2>(r, chunk)
                                   : rope(term) + tile_offset<Config::kRopeDims * 2>(r, chunk - kLatentChunks);
    };
    if (Config::kQueryTerms == 1 && queries_are_chunks(args_, Config::kQueryType)) [[likely]] {
      copy_queries(place);
    } else {
      MLA_NO_UNROLL
      for (int i = ptx::thread_index(); i < Config::kQueryTerms * Config::kRows * kChunks; i += Config::kThreads) {
        const int chunk = i % kChunks, r = i / kChunks % Config::kRows, term = i / (kChunks * Config::kRows);
        const Bits8 bits = query_channels<Config::kQueryType>(args_, unit().rows.row(args_, r), chunk * kVector, term);
        ptx::store_shared(place(r, chunk, term), ptx::Vec4{bits.w[0], bits.w[1], bits.w[2], bits.w[3]});
      }
    }
    ptx::sync_block();
    if constexpr (Config::kCodes) {
      MLA_NO_UNROLL
      for (int r = Base::warp(); r < Config::kRows; r += Config::kWarps) convert_query(latents(0), rope(0), r);
      ptx::sync_block();
    }
    MLA_UNROLL
    for (int term = 0; term < Config::kQueryTerms; ++term) MLA_UNROLL
    for (int m = 0; m < Config::kScoreTilesM; ++m) {
      const int row = group() * Config::kGroupRows + Base::query_row(m, Base::lane() & 15), half = Base::lane() >> 4;
      const TileLane<Config::kLatentDims * 2> latent(latents(term) + static_cast<uint32_t>(latent_step(0) * 32), row,
                                                     half);
      MLA_UNROLL
      for (int step = 0; step < Config::kLatentSteps; ++step)
        ptx::ldmatrix_x4(queries_[m][step][term], latent.at(0, 2 * step));
      const TileLane<Config::kRopeDims * 2> of_rope(rope(term), row, half | score_warp_k() * 2);
      ptx::ldmatrix_x4(queries_[m][Config::kLatentSteps][term], of_rope.at(0, 0));
    }
    ptx::sync_block();  // keys will lie where the queries were
  }

  /// Copies the queries, 16 bytes at a time, to place(row, chunk, 0). A warp has a row at a time, and all copies of a
  /// thread are under way at once.
  template <class Place>
  MLA_DEVICE void copy_queries(const Place& place) const {
    constexpr int kChunks = (Config::kLatentDims + Config::kRopeDims) / kVector;
    const int32_t d_ckv = args_.pools[0].cache.d_ckv;
    MLA_NO_UNROLL
    for (int r = Base::warp(); r < Config::kRows; r += Config::kWarps) {
      const QueryRow row = unit().rows.row(args_, r);
      const auto* nope = static_cast<const uint16_t*>(args_.q_nope) + row.token * args_.q_nope_stride_token +
                         row.head * args_.q_nope_stride_head;
      const auto* pe = static_cast<const uint16_t*>(args_.q_pe) + row.token * args_.q_pe_stride_token +
                       row.head * args_.q_pe_stride_head;
      MLA_UNROLL
      for (int chunk = Base::lane(); chunk < kChunks; chunk += kWarpSize) {
        const int channel = chunk * kVector;
        ptx::cp_async_16(place(r, chunk, 0), channel < d_ckv ? nope + channel : pe + (channel - d_ckv),
                         row.token >= 0 && channel < args_.d_qk);
      }
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
  }

  /// Multiplies a query row that meets e4m3, which lies in shared memory, by the powers of the keys' scales and a
  /// factor of its own, and brings its channels into the order of absorbed_codes.cuh. All lanes of a warp do so
  /// together.
  MLA_DEVICE void convert_query(ptx::SharedAddress latents, ptx::SharedAddress rope, int r) const {
    constexpr int kLatentChunks = Config::kLatentDims / kVector, kChunks = kLatentChunks + Config::kRopeDims / kVector;
    constexpr int kLaneChunks = (kChunks + kWarpSize - 1) / kWarpSize;
    static_assert(kLatentChunks % kWarpSize == 0, "a lane's chunk i is latent in all lanes or in none");
    const CodeScales scales = code_scales();
    const auto is_latent = [](int i) { return i < kLatentChunks / kWarpSize; };
    const auto power = [&](int i) { return is_latent(i) ? scales.latent_power : scales.rope_power; };
    const auto chunk = [&](int i) { return (is_latent(i) ? i * kWarpSize : 0) + Base::lane(); };  // of its part
    const auto exists = [&](int i) { return is_latent(i) || chunk(i) < kChunks - kLatentChunks; };
    const auto at = [&](int i, int c) {
      return is_latent(i) ? latents + tile_offset<Config::kLatentDims * 2>(r, c)
                          : rope + tile_offset<Config::kRopeDims * 2>(r, c);
    };
    ptx::Vec4 pairs[kLaneChunks];
    uint32_t largest = 0;  // the bits of a magnitude
    MLA_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      pairs[i] = {};
      if (exists(i)) pairs[i] = ptx::load_shared<ptx::Vec4>(at(i, chunk(i)));
      MLA_UNROLL
      for (int j = 0; j < 4; ++j) {
        float low, high;
        ptx::unpack_bf16x2(pairs[i].x[j], low, high);
        low *= power(i);
        high *= power(i);
        if (is_finite(low)) largest = std::max(largest, std::bit_cast<uint32_t>(magnitude(low)));
        if (is_finite(high)) largest = std::max(largest, std::bit_cast<uint32_t>(magnitude(high)));
      }
    }
    const float factor = scales.plain ? query_factor(std::bit_cast<float>(ptx::max_of_warp(largest))) : 1.0F;
    if (Base::lane() == 0) *score_factor(r / Config::kGroupRows, r % Config::kGroupRows) = scales.of_scores / factor;
    ptx::sync_warp();  // all lanes have loaded what is overwritten now
    MLA_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      if (!exists(i)) continue;
      MLA_UNROLL
      for (int j = 0; j < 4; ++j) {
        float low, high;
        ptx::unpack_bf16x2(pairs[i].x[j], low, high);
        low = low * power(i) * factor;
        high = high * power(i) * factor;
        const int pair = chunk(i) * 4 + j;
        const PairPlace place = is_latent(i) ? latent_pair(pair % 32) : rope_pair(pair % 8);
        const int block = is_latent(i) ? pair / 32 * 8 : pair / 8 * 2;
        ptx::store_shared(at(i, block + place.chunk) + static_cast<uint32_t>(place.byte),
                          scales.plain ? ptx::pack_f16x2(low, high) : ptx::pack_bf16x2(low, high));
      }
    }
  }

  /// Returns the place of what the scores of row `r` of a group are to be multiplied by.
  MLA_DEVICE float* score_factor(int of_group, int r) const {
    return as<float>(memory_ + Config::kQueryFactorOffset) + Base::place_of_row(of_group, r);
  }
  MLA_DEVICE CodeScales& code_scales() const { return *as<CodeScales>(memory_ + Config::kCodeScaleOffset); }

  // Scores.

  MLA_DEVICE static int latent_step(int step) { return score_warp_k() * Config::kLatentSteps + step; }

  MLA_DEVICE void compute_step(uint32_t n) {
    const uint32_t ahead = n + Config::kLead;
    if (Base::fills_first())
      fill_tile(ahead, true);
    else if (Config::kDecodesInTile)
      decode_tile(n);
    ptx::mbarrier_wait(kv_full(n), Base::parity(n));
    typename Base::LaneScores scores;
    const bool plain = !Config::kCodes || code_scales().plain;
    if constexpr (!Config::kCodes)
      Base::add_slices(scores, [&](int block, auto& s) { multiply_queries(n, block, s); });
    else if (plain) [[likely]]
      Base::add_slices(scores, [&](int block, auto& s) { multiply_codes<true>(n, block, s); });
    else
      Base::add_slices(scores, [&](int block, auto& s) { multiply_codes<false>(n, block, s); });
    if constexpr (Config::kCodes) {
      const float* const factors = score_factor(group(), Base::lane_row(0));
      MLA_UNROLL
      for (int i = 0; i < Base::kLaneRows; ++i) {
        const float factor = factors[i];
        for (float& score : scores[i]) score *= factor;
      }
    }
    const bool rare = Base::softmax(
        n, scores,
        // P that is made anew is careful, as all that the step does with it.
        [&](int i, float low, float high, bool anew) { store_p(n, i, low, high, anew || !plain); },
        [&] { Base::rescale(outputs_); });
    if (!Base::fills_first())
      fill_tile(ahead, true);
    else if (Config::kDecodesInTile)
      decode_tile(ahead);
    if (Config::kCodes ? rare || !plain : rare && poison(n).any()) [[unlikely]] {
      const bool poisoned = !Config::kCodes || poison(n).any();
      add_values<true>(n, poisoned);
      if (poisoned) Base::reset_poison(n);
    } else {
      add_values<false>(n, false);
    }
    Base::leave_tile(n);
  }

  /// Computes the warp's K slice of the scores of 16 keys.
  MLA_DEVICE void multiply_queries(uint32_t n, int block, float (&s)[Config::kScoreTilesM][2][4]) const {
    // A warp's latent channels begin at a multiple of 64, so that the swizzle of its first chunk is that of chunk 0.
    const ptx::SharedAddress keys = tile(n) + static_cast<uint32_t>(Base::first_score_key(block) * Config::kRowBytes);
    const int row = (Base::lane() & 7) | ((Base::lane() >> 4) ^ Base::given_key_tile()) << 3,
              half = (Base::lane() >> 3) & 1;
    const TileLane<Config::kRowBytes> latent_lane(keys + static_cast<uint32_t>(latent_step(0) * 32), row, half);
    const TileLane<Config::kRowBytes> rope_lane(keys + Config::kLatentDims * 2, row, half | score_warp_k() * 2);
    MLA_UNROLL
    for (int step = 0; step < Config::kLatentSteps; ++step) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, latent_lane.at(0, 2 * step));
      multiply_step<Config::kType>(s, step, b);
    }
    if (!has_rope()) return;
    uint32_t b[4];
    ptx::ldmatrix_x4(b, rope_lane.at(0, 0));
    multiply_step<Config::kType>(s, Config::kLatentSteps, b);
  }

  /// Does so where rows are e4m3; kPlain says whether their scales leave them plain (CodeScales). Of a key tile the
  /// lane has 16 codes of each 64 latent channels, and four rotary ones.
  template <bool kPlain>
  MLA_DEVICE void multiply_codes(uint32_t n, int block, float (&s)[Config::kScoreTilesM][2][4]) const {
    static_assert(Config::kLatentDims == 4 * kSegmentBytes, "a K slice is a segment of a row");
    const float latent_mantissa = kPlain ? 1.0F : code_scales().latent,
                rope_mantissa = kPlain ? 1.0F : code_scales().rope;
    const int t = Base::lane() & 3, key = Base::lane() >> 2 | Base::given_key_tile() << 3;
    const ptx::SharedAddress keys = tile(n) + static_cast<uint32_t>(Base::first_score_key(block) * Config::kRowBytes),
                             latents = keys + static_cast<uint32_t>(score_warp_k() * kSegmentBytes);
    MLA_UNROLL
    for (int half = 0; half < 2; ++half) {
      ptx::Vec4 codes[2];
      MLA_UNROLL
      for (int j = 0; j < 2; ++j)
        codes[j] = ptx::load_shared<ptx::Vec4>(latents + tile_offset<Config::kRowBytes>(key ^ j * 8, half * 4 + t));
      MLA_UNROLL
      for (int i = 0; i < 4; ++i) {
        uint32_t b[4];
        MLA_UNROLL
        for (int j = 0; j < 2; ++j) score_operand<kPlain>(codes[j].x[i], latent_mantissa, b[2 * j], b[2 * j + 1]);
        multiply_step<kCodeType<kPlain>>(s, half * 4 + i, b);
      }
    }
    if (!has_rope()) return;
    uint32_t b[4];
    MLA_UNROLL
    for (int j = 0; j < 2; ++j)
      score_operand<kPlain>(ptx::load_shared<uint32_t>(keys + Config::kLatentDims +
                                                       tile_offset<Config::kRowBytes>(key ^ j * 8, score_warp_k()) +
                                                       static_cast<uint32_t>(t * 4)),
                            rope_mantissa, b[2 * j], b[2 * j + 1]);
    multiply_step<kCodeType<kPlain>>(s, Config::kLatentSteps, b);
  }

  template <DType kType>
  MLA_DEVICE void multiply_step(float (&s)[Config::kScoreTilesM][2][4], int step, const uint32_t (&b)[4]) const {
    MLA_UNROLL
    for (int m = 0; m < Config::kScoreTilesM; ++m) MLA_UNROLL
    for (int term = 0; term < Config::kQueryTerms; ++term) {
      mma<kType>(s[m][0], queries_[m][step][term], b[0], b[1]);
      mma<kType>(s[m][1], queries_[m][step][term], b[2], b[3]);
    }
  }

  // Softmax.

  MLA_DEVICE ptx::SharedAddress p_tile() const {
    return shared_ + static_cast<uint32_t>(Config::kPOffset + group() * Config::kGroupRows * Config::kPRowBytes);
  }

  /// Stores P of two neighbouring keys of the lane's row i.
  MLA_DEVICE void store_p(uint32_t n, int i, float low, float high, bool careful) const {
    const int key = Base::first_lane_key();
    const ptx::SharedAddress first = p_tile() +
                                     tile_offset<Config::kPRowBytes>(Base::lane_row(0), key / kVector + p_chunk(n)) +
                                     static_cast<uint32_t>(key % kVector * 2);
    ptx::store_shared(
        first + static_cast<uint32_t>(i * 8 * Config::kPRowBytes),  // eight rows further the swizzle is the same
        Config::kCodes && careful ? pack<kCodeType<false>>(low, high) : pack<Config::kType>(low, high));
  }
  /// Returns the first chunk of P of step n in a row. Steps take turns with the halves of a row, since pairs of warps
  /// do not order all warps of a group that divides the keys.
  MLA_DEVICE static int p_chunk(uint32_t n) { return static_cast<int>(n % 2) * kChunksPerSegment / 2; }

  // Outputs.

  /// Adds P times the values of step n. With kCareful, values of marked keys that are not finite count as 0 if the step
  /// is poisoned, and e4m3 keys need not be plain.
  template <bool kCareful>
  MLA_DEVICE void add_values(uint32_t n, bool poisoned) {
    constexpr DType kType = Config::kCodes ? kCodeType<!kCareful> : Config::kType;
    const auto p_lane = lane_of_a<Config::kPRowBytes>(p_tile());
    const int chunk = Base::first_output_channel() * Config::kKeyBytes / kChunkBytes,
              in_segment = chunk % kChunksPerSegment;
    const TileLane<Config::kRowBytes> value_lane(tile(n) + static_cast<uint32_t>((chunk - in_segment) * kChunkBytes),
                                                 Base::lane() & 15, (Base::lane() >> 4) | in_segment);
    MLA_NO_UNROLL
    for (int step = 0; step < Config::kKeys / 16; ++step) {
      uint32_t a[Config::kOutputTilesM][4];
      MLA_UNROLL
      for (int m = 0; m < Config::kOutputTilesM; ++m) ptx::ldmatrix_x4(a[m], p_lane.at(16 * m, 2 * step + p_chunk(n)));
      const auto multiply = [&](int column, uint32_t(&b)[4]) {
        if (kCareful && poisoned) Base::template silence<kType>(b, n, 16 * step);
        MLA_UNROLL
        for (int m = 0; m < Config::kOutputTilesM; ++m) {
          mma<kType>(outputs_[m][column], a[m], b[0], b[1]);
          mma<kType>(outputs_[m][column + 1], a[m], b[2], b[3]);
        }
      };
      if constexpr (Config::kCodes) {
        MLA_UNROLL
        for (int column = 0; column < Config::kOutputTilesN; column += 4) {
          uint32_t codes[4];
          ptx::ldmatrix_x4_trans(codes, value_lane.at(16 * step, column / 2));
          MLA_UNROLL
          for (int i = 0; i < 2; ++i) {
            uint32_t b[4];
            const float mantissa = kCareful && !code_scales().plain ? code_scales().latent : kPlainUnit;
            value_operand<!kCareful>(codes[2 * i], mantissa, b[0], b[2]);
            value_operand<!kCareful>(codes[2 * i + 1], mantissa, b[1], b[3]);
            multiply(column + 2 * i, b);
          }
        }
      } else {
        MLA_UNROLL
        for (int column = 0; column < Config::kOutputTilesN; column += 2) {
          uint32_t b[4];
          ptx::ldmatrix_x4_trans(b, value_lane.at(16 * step, column));
          multiply(column, b);
        }
      }
    }
  }

  uint32_t queries_[Config::kScoreTilesM][Config::kLatentSteps + 1][Config::kQueryTerms][4];  // the rotary step is last
  typename Base::Outputs outputs_;
  uint32_t end_step_ = 0;  // of the unit; read in every step
};

template <class Config>
struct AbsorbedKernel : GroupedKernel<AbsorbedBlock<Config>, Config> {
  static constexpr const char* kName = "absorbed_attention";
};

}  // namespace mla::MLA_CUDA_NAMESPACE::portable
