// SPDX-License-Identifier: Apache-2.0
// This kernel computes absorbed attention by mma.sync: kRows query rows against paged or indexed rows of a latent
// cache, which are key and value at once.
//
// Grid: persistent; a block computes the segments of its worker (work_list.h). All 8 warps copy rows, and compute,
// alone (16 and 32 rows) or as two groups of 32 rows each, which share the keys:
//   keys      a warp copies four rows of a step by cp.async, a step or more ahead; it decodes quantized rows to bf16
//   scores    a group's warps divide keys x channels, queries in registers; the sums of K slices meet in shared memory
//   softmax   a warp has 8 rows, four lanes each row; P is rounded to 16 bits
//   outputs   each warp has all rows of its group and its share of the channels, accumulators in registers
// Shared memory: [places][entries][scales][rows' state][the unit][mbarriers][poison]
//                [scores of one group][P][tiles: keys x (latent + 64) x 2 B][raw stages]
// absorbed_config.cuh has the bytes.
//   group 0, step n:                          wait kv_full | scores | softmax | fill n + 1 | outputs -> kv_empty
//   group 1, half a step later:  fill n + 1 | wait kv_full | scores | softmax | outputs -> kv_empty
// Accumulators and queries fill the registers, so that all else lives in shared memory. docs/kernels/cuda_portable.md
// describes the kernel.
#pragma once

#include "cuda/attention/absorbed_results.cuh"
#include "cuda/attention/poison.cuh"
#include "cuda/backends/portable/absorbed_config.cuh"
#include "cuda/border/launch.h"

namespace mla::MLA_CUDA_NAMESPACE::portable {

/// Describes the unit that a block computes, for all its threads. Steps are numbered from the kernel's start on.
struct BlockUnit : AbsorbedUnit {
  int32_t next_segment, end_segment, row_lane;  // the worker's state; kept here because registers are short
  uint32_t valid[8];                            // word n % 8 is that of step n: a bit for each key, set if it has a row
};

template <class Config>
class AbsorbedBlock {
 public:
  MLA_DEVICE explicit AbsorbedBlock(const cuda::AbsorbedArgs& args)
      : args_(args), memory_(ptx::shared_memory()), shared_(ptx::shared_address(memory_)) {}

  /// Initializes the unit, barriers and poison marks. All threads call it once, at the kernel's start.
  MLA_DEVICE void init(const cuda::Share& share) const {
    if (ptx::thread_index() == 0) {
      unit().next_segment = share.begin;
      unit().end_segment = share.end;
      unit().row_lane = share.row_lane;
      for (int i = 0; i < Config::kTiles; ++i) {
        // Every warp arrives for its ordinary stores. Copies of 16-bit rows arrive by themselves, for every thread.
        ptx::mbarrier_init(barrier(Config::kKvFull + i), Config::kWarps + (Config::kQuantized ? 0 : Config::kThreads));
        ptx::mbarrier_init(barrier(Config::kKvEmpty + i), Config::kWarps);
      }
      for (int i = 0; i < Config::kGroups; ++i)
        ptx::mbarrier_init(barrier(Config::kScoresRead + i), Config::kGroupWarps);
      ptx::fence_mbarrier_init();
      unit().steps = {0, 0};
    }
    for (int i = ptx::thread_index(); i < 2 * Config::kGroups * Config::kPoisonBytes; i += Config::kThreads)
      memory_[Config::kPoisonOffset + i] = std::byte{0};
    ptx::sync_block();
  }

  /// Computes all segments of the worker.
  MLA_DEVICE void compute_all() {
    MLA_NO_UNROLL
    while (unit().next_segment < unit().end_segment) {
      compute(args_.list.segments[unit().next_segment]);
      ptx::sync_block();  // nobody reads the unit any more
      if (ptx::thread_index() == 0) ++unit().next_segment;
      ptx::sync_block();
    }
  }

 private:
  MLA_DEVICE void compute(const cuda::Segment& segment) {
    if (segment.row_begin + unit().row_lane * Config::kRows >= segment.q_len * args_.num_heads.value) return;
    start(segment);
    uint32_t n = unit().steps.begin;
    if (has_step(n)) {
      if (Config::kQueriesBesideKeys || Config::kQuantized) start_keys(n);
      load_queries(n);
      if (!Config::kQueriesBesideKeys && !Config::kQuantized) start_keys(n);
      if constexpr (Config::kQuantized && Config::kLead > 0) {
        for (uint32_t i = 0; i < Config::kLead; ++i) fill_tile(n + i, true);
        ptx::sync_block();  // the rows that were found are known to all
      }
      MLA_NO_UNROLL
      for (; has_step(n); ++n) compute_step(n);
    }
    finish();
  }

  static_assert(sizeof(BlockUnit) <= Config::kUnitBytes && sizeof(Place<Config>) == Config::kPlaceBytes);

  MLA_DEVICE BlockUnit& unit() const { return *as<BlockUnit>(memory_ + Config::kUnitOffset); }
  MLA_DEVICE bool has_step(uint32_t n) const { return n < unit().steps.end; }
  MLA_DEVICE int32_t first_key(uint32_t n) const { return unit().template first_key<Config>(n); }
  MLA_DEVICE const cuda::KeyPool& pool(uint32_t n) const { return args_.pools[unit().keys.pool_of(first_key(n))]; }
  MLA_DEVICE bool has_rope() const { return args_.d_qk > Config::kLatentDims; }

  MLA_DEVICE static int group() { return Config::kGroups == 1 ? 0 : ptx::warp() / Config::kGroupWarps; }
  MLA_DEVICE static int warp_of_group() { return ptx::warp() % Config::kGroupWarps; }
  MLA_DEVICE static void sync_group() { ptx::sync_threads(Config::kGroupBarrier + group(), Config::kGroupThreads); }

  MLA_DEVICE ptx::SharedAddress barrier(int place) const {
    return shared_ + static_cast<uint32_t>(Config::kBarrierOffset + place * Config::kBarrierBytes);
  }
  /// Returns the barrier kv_full, a phase of which ends when the rows of step n are in the tile.
  MLA_DEVICE ptx::SharedAddress kv_full(uint32_t n) const {
    return barrier(Config::kKvFull + static_cast<int>(n % Config::kTiles));
  }
  /// Returns the barrier kv_empty, a phase of which ends when every warp is done with the values of step n.
  MLA_DEVICE ptx::SharedAddress kv_empty(uint32_t n) const {
    return barrier(Config::kKvEmpty + static_cast<int>(n % Config::kTiles));
  }
  /// Returns the parity that a wait for step n's phase of a tile's barrier takes.
  MLA_DEVICE static uint32_t parity(uint32_t n) { return n / Config::kTiles & 1U; }
  /// Returns the barrier scores_read, a phase of which ends, in every step, when every warp of a group has read the
  /// scores.
  MLA_DEVICE ptx::SharedAddress scores_read(int of_group) const { return barrier(Config::kScoresRead + of_group); }

  MLA_DEVICE ptx::SharedAddress tile(uint32_t n) const {
    return shared_ + Config::kTileOffset + n % Config::kTiles * Config::kTileBytes;
  }
  MLA_DEVICE static uint32_t raw_offset(uint32_t n) {
    return Config::kRawOffset + n % std::max(Config::kRawStages, 1) * Config::kRawBytes;
  }
  MLA_DEVICE static uint32_t scale_offset(uint32_t n) { return Config::kScaleOffset + n % 2 * Config::kScaleBytes; }
  MLA_DEVICE float* row_factors() const { return as<float>(memory_ + Config::kRowOffset); }
  MLA_DEVICE ScoreState* row_states() const {
    return as<ScoreState>(memory_ + Config::kRowOffset + Config::kRows * sizeof(float));
  }
  /// Returns the group's marks of step n. They are reset a step later, when all its warps have seen them.
  MLA_DEVICE PoisonMarks<Config::kKeys> poison(uint32_t n) const {
    const auto place = static_cast<uint32_t>(group() * 2) + n % 2;
    return PoisonMarks<Config::kKeys>(as<uint8_t>(memory_ + Config::kPoisonOffset + place * Config::kPoisonBytes));
  }

  MLA_DEVICE static bool has_softmax_rows() { return warp_of_group() < Config::kGroupRows / 8; }
  /// Returns the lane's row of the softmax, counted in its group, and in the block.
  MLA_DEVICE static int group_row() { return warp_of_group() * 8 + (ptx::lane() & 7); }
  MLA_DEVICE static int softmax_row() { return group() * Config::kGroupRows + group_row(); }

  /// Describes the unit.
  MLA_DEVICE void start(const cuda::Segment& segment) {
    MLA_UNROLL
    for (int m = 0; m < Config::kOutputTilesM; ++m) MLA_UNROLL
    for (int n = 0; n < Config::kOutputTilesN; ++n) MLA_UNROLL
    for (int i = 0; i < 4; ++i) outputs_[m][n][i] = 0.0F;
    if (ptx::thread_index() < Config::kRows) row_states()[ptx::thread_index()] = {};
    if (ptx::thread_index() == 0) {
      describe_unit<Config>(args_, segment, unit().row_lane, unit().steps.end, unit());
      unit().template find_unmasked_steps<Config>(args_);
    }
    ptx::sync_block();
  }

  // Keys. One warp after another finds the rows of a step's keys, a key a lane, a step before the rows are copied;
  // another step before, it has issued copies of the keys' entries in the page table or index list.

  using Keys = WarpKeys<Config>;

  /// Returns whether this warp finds the rows of step n + 1 while rows of step n are copied.
  MLA_DEVICE static bool finds_after(uint32_t n) { return ptx::warp() == static_cast<int>(n % Config::kWarps); }

  /// Returns where the entry of the lane's key of step n lies. At a unit's begin the entries of as many steps are there
  /// as rows are issued ahead, and one more.
  MLA_DEVICE int32_t& entry(uint32_t n) const {
    return as<int32_t>(memory_ + Config::kEntryOffset)[n % Config::kEntryPlaces * Config::kKeys + ptx::lane()];
  }
  MLA_DEVICE Place<Config>& place(uint32_t n, int key) const {
    return as<Place<Config>>(memory_ + Config::kPlaceOffset)[static_cast<int>(n % 2) * Config::kKeys + key];
  }

  /// Issues the copies of the entries of step n, all lanes of a warp together.
  MLA_DEVICE void copy_entries(uint32_t n) const {
    if (!has_step(n)) return;
    const int32_t* from = entry_of(args_, unit().keys, first_key(n) + ptx::lane());
    ptx::cp_async_4(ptx::shared_address(&entry(n)), from, from != nullptr);
  }

  /// Finds the rows of step n from the entries that this warp has copied.
  MLA_DEVICE void find_rows(uint32_t n) const {
    if (!has_step(n)) return;
    const int32_t key = first_key(n) + ptx::lane();
    const bool listed = entry_of(args_, unit().keys, key) != nullptr;
    const Place<Config> found = find_place<Config>(args_, pool(n), key, listed ? entry(n) : -1);
    place(n, ptx::lane()) = found;
    const uint32_t valid = ptx::ballot(found.ckv != nullptr);
    if (ptx::lane() == 0) unit().valid[n % 8] = valid;
  }

  /// Issues the warp's rows of the first steps, and finds the rows of the step behind them. As many warps load the
  /// entries of a step each, all at the same time.
  MLA_DEVICE void start_keys(uint32_t first) const {
    constexpr int kFirstSteps = Config::kQuantized ? Config::kRawStages : Config::kLead;
    if (ptx::warp() <= kFirstSteps) {
      copy_entries(first + static_cast<uint32_t>(ptx::warp()));
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
    }
    MLA_NO_UNROLL
    for (int i = 0; i <= kFirstSteps; ++i) {
      const uint32_t n = first + static_cast<uint32_t>(i);
      if (ptx::warp() == i) find_rows(n);
      ptx::sync_block();
      if (i == kFirstSteps) break;
      if constexpr (Config::kQuantized)
        load_raw(n, false);
      else
        fill_tile(n, false);
    }
    // The first step that the loop copies finds rows of the step behind it.
    if (finds_after(first + kFirstSteps)) copy_entries(first + kFirstSteps + 1);
    ptx::cp_async_commit();
    ptx::cp_async_commit();
  }

  /// Commits the entries that this warp needs a step later, if it is its turn.
  MLA_DEVICE void commit_entries(uint32_t n) const {
    if (finds_after(n + 1)) copy_entries(n + 2);
    ptx::cp_async_commit();
  }

  /// Issues the warp's quantized rows of step n. `finds` says whether the warp also takes its turn in loading entries
  /// and finding rows of the steps behind it.
  MLA_DEVICE void load_raw(uint32_t n, bool finds) const {
    if (finds) commit_entries(n);
    if (has_step(n))
      RowCopy<Config>(pool(n), place(n, Keys::lane_key())).to_raw(shared_ + raw_offset(n), shared_ + scale_offset(n));
    ptx::cp_async_commit();
    if (finds && finds_after(n)) {
      ptx::cp_async_wait<3>();  // since then rows, entries and rows were committed
      find_rows(n + 1);
    }
  }

  /// Brings the warp's rows of step n to their tile: issues copies of 16-bit rows, or decodes quantized ones and issues
  /// those of a later step. Places are read and written after the wait for kv_empty, which says that every warp has
  /// read those of the step before and written those of this one.
  MLA_DEVICE void fill_tile(uint32_t n, bool finds) const {
    if (!has_step(n)) return;
    if constexpr (Config::kQuantized) {
      // Entries and rows of each later step are two groups.
      ptx::cp_async_wait<2 * (Config::kRawStages - 1)>();
      ptx::sync_warp();  // the copies of all lanes have landed
    } else {
      ptx::cp_async_wait<1>();  // the entries that this warp has copied
    }
    if (n >= Config::kTiles) ptx::mbarrier_wait(kv_empty(n), parity(n - Config::kTiles));
    if constexpr (Config::kQuantized) {
      decode_raw<Config>(pool(n), memory_ + raw_offset(n), memory_ + scale_offset(n), tile(n));
    } else {
      if (finds) commit_entries(n);
      RowCopy<Config>(pool(n), place(n, Keys::lane_key())).to_tile(tile(n));
      ptx::cp_async_commit();
      ptx::mbarrier_arrive_after_copies(kv_full(n));
      if (finds && finds_after(n)) find_rows(n + 1);
    }
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(kv_full(n));
    if constexpr (Config::kQuantized) load_raw(n + Config::kRawStages, finds);
  }

  // Queries.

  /// Loads the queries into registers by way of shared memory.
  MLA_DEVICE void load_queries(uint32_t first_step) {
    constexpr int kLatentChunks = Config::kLatentDims / kVector, kChunks = kLatentChunks + Config::kRopeDims / kVector;
    // Beside the first keys, the queries take the tile that is filled last, in the first step.
    const ptx::SharedAddress at =
        Config::kQueriesBesideKeys ? tile(first_step + Config::kLead) : shared_ + Config::kTileOffset;
    const auto latents = [&](int term) {
      return at + static_cast<uint32_t>(term * Config::kRows * Config::kLatentDims * 2);
    };
    const auto rope = [&](int term) {
      return latents(Config::kQueryTerms) + static_cast<uint32_t>(term * Config::kRows * Config::kRopeDims * 2);
    };
    MLA_NO_UNROLL
    for (int i = ptx::thread_index(); i < Config::kQueryTerms * Config::kRows * kChunks; i += Config::kThreads) {
      const int chunk = i % kChunks, r = i / kChunks % Config::kRows, term = i / (kChunks * Config::kRows);
      const Bits8 bits = query_channels<Config::kType>(args_, unit().rows.row(args_, r), chunk * kVector, term);
      const ptx::SharedAddress to = chunk < kLatentChunks
                                        ? latents(term) + tile_offset<Config::kLatentDims * 2>(r, chunk)
                                        : rope(term) + tile_offset<Config::kRopeDims * 2>(r, chunk - kLatentChunks);
      ptx::store_shared(to, ptx::Vec4{bits.w[0], bits.w[1], bits.w[2], bits.w[3]});
    }
    ptx::sync_block();
    MLA_UNROLL
    for (int term = 0; term < Config::kQueryTerms; ++term) MLA_UNROLL
    for (int m = 0; m < Config::kScoreTilesM; ++m) {
      const int row = group() * Config::kGroupRows + m * 16;
      const auto latent = lane_of_a<Config::kLatentDims * 2>(
          latents(term) + static_cast<uint32_t>(row * Config::kLatentDims * 2 + latent_step(0) * 32));
      MLA_UNROLL
      for (int step = 0; step < Config::kLatentSteps; ++step)
        ptx::ldmatrix_x4(queries_[m][step][term], latent.at(0, 2 * step));
      const TileLane<Config::kRopeDims * 2> of_rope(rope(term) + static_cast<uint32_t>(row * Config::kRopeDims * 2),
                                                    ptx::lane() & 15, (ptx::lane() >> 4) | score_warp_k() * 2);
      ptx::ldmatrix_x4(queries_[m][Config::kLatentSteps][term], of_rope.at(0, 0));
    }
    ptx::sync_block();  // keys will lie where the queries were
  }

  // Scores.

  MLA_DEVICE static int score_warp_n() { return warp_of_group() % Config::kScoreWarpsN; }
  MLA_DEVICE static int score_warp_k() { return warp_of_group() / Config::kScoreWarpsN; }
  MLA_DEVICE static int latent_step(int step) { return score_warp_k() * Config::kLatentSteps + step; }
  MLA_DEVICE static int first_score_key() { return score_warp_n() * Config::kScoreBlocks * 16; }

  /// A tile can be filled when all warps have left the values of the step before. One group does it at the begin of a
  /// step. Of two groups, group 1 leaves them when group 0 has done its softmax.
  MLA_DEVICE static bool fills_first() { return Config::kGroups == 1 || Config::kLead == 0 || group() == 1; }

  MLA_DEVICE void compute_step(uint32_t n) {
    const uint32_t ahead = n + Config::kLead;
    if (fills_first()) fill_tile(ahead, true);
    ptx::mbarrier_wait(kv_full(n), parity(n));
    multiply_queries(n);
    sync_group();  // all warps of the group have stored their scores
    if (poison(n - 1).any()) [[unlikely]]
      reset_poison(n - 1);
    if (has_softmax_rows()) softmax(n);
    if constexpr (Config::kGroups == 2) {
      ptx::sync_warp();
      if (ptx::lane() == 0) ptx::mbarrier_arrive(scores_read(group()));
    }
    if (!fills_first()) fill_tile(ahead, true);
    sync_group();  // P and the rows' factors are written
    rescale_outputs();
    if (poison(n).any()) [[unlikely]]
      add_values<true>(n);
    else
      add_values<false>(n);
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(kv_empty(n));
  }

  MLA_DEVICE void reset_poison(uint32_t n) const {
    sync_group();  // every warp knows that there are marks
    if (warp_of_group() == 0) poison(n).reset(ptx::lane(), kWarpSize);
  }

  /// Waits until the other group has read its scores, which lie where this group's will.
  MLA_DEVICE void wait_for_turn(uint32_t n) const {
    if constexpr (Config::kGroups == 2) {
      if (group() == 1)
        ptx::mbarrier_wait(scores_read(0), n & 1U);
      else if (n > 0)
        ptx::mbarrier_wait(scores_read(1), (n - 1) & 1U);
    }
  }

  MLA_DEVICE void multiply_queries(uint32_t n) const {
    // A warp's latent channels begin at a multiple of 64, so that the swizzle of its first chunk is that of chunk 0.
    const ptx::SharedAddress keys = tile(n) + static_cast<uint32_t>(first_score_key() * Config::kRowBytes);
    const auto latent_lane = lane_of_b<Config::kRowBytes>(keys + static_cast<uint32_t>(latent_step(0) * 32));
    const TileLane<Config::kRowBytes> rope_lane(keys + Config::kLatentDims * 2,
                                                (ptx::lane() & 7) | (ptx::lane() >> 4) << 3,
                                                ((ptx::lane() >> 3) & 1) | score_warp_k() * 2);
    MLA_UNROLL
    for (int block = 0; block < Config::kScoreBlocks; ++block) {
      float s[Config::kScoreTilesM][2][4] = {};
      MLA_UNROLL
      for (int step = 0; step < Config::kLatentSteps; ++step) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, latent_lane.at(16 * block, 2 * step));
        multiply_step(s, step, b);
      }
      if (has_rope()) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, rope_lane.at(16 * block, 0));
        multiply_step(s, Config::kLatentSteps, b);
      }
      if (block == 0) wait_for_turn(n);
      store_scores(s, block);
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
  /// loads of rows meet bank conflicts. Chunk c ^ x lies where chunk c does, but for an exclusive or with 16 x.
  MLA_DEVICE ptx::SharedAddress score_chunk(int slice, int row, int chunk) const {
    const int flip = (row & 3) << 1 | ((row >> 2) & 1);
    return shared_ + static_cast<uint32_t>(Config::kScoreOffset + slice * kSliceBytes + row * Config::kScoreRowBytes +
                                           (chunk ^ flip) * kChunkBytes);
  }
  static constexpr int kSliceBytes = Config::kGroupRows * Config::kScoreRowBytes;

  MLA_DEVICE void store_scores(const float (&s)[Config::kScoreTilesM][2][4], int block) const {
    const int g = ptx::lane() >> 2, t = ptx::lane() & 3;
    const ptx::SharedAddress first =
        score_chunk(score_warp_k(), g, first_score_key() / 4 | t >> 1) + static_cast<uint32_t>((t & 1) * 8);
    MLA_UNROLL
    for (int n = 0; n < 2; ++n) {
      const ptx::SharedAddress at = first ^ static_cast<uint32_t>((block * 4 + n * 2) * kChunkBytes);
      MLA_UNROLL
      for (int m = 0; m < Config::kScoreTilesM; ++m) MLA_UNROLL
      for (int half = 0; half < 2; ++half)
        ptx::store_shared(at + static_cast<uint32_t>((m * 16 + half * 8) * Config::kScoreRowBytes),
                          two_floats(s[m][n][2 * half], s[m][n][2 * half + 1]));
    }
  }

  // Softmax. A lane has keys 8 (lane / 8) ... + 7 of its row.

  static_assert(Config::kKeys == 32);
  MLA_DEVICE static int lane_chunk() { return ptx::lane() >> 3; }
  MLA_DEVICE ptx::SharedAddress p_tile() const {
    return shared_ + static_cast<uint32_t>(Config::kPOffset + group() * Config::kGroupRows * Config::kPRowBytes);
  }

  /// Turns the scores of step n into P, for a warp that has rows of the softmax.
  MLA_DEVICE void softmax(uint32_t n) const {
    float s[8];
    make_logits(s, n);
    const int r = softmax_row();
    ScoreState state = row_states()[r];
    float largest = std::fmax(std::fmax(std::fmax(s[0], s[1]), std::fmax(s[2], s[3])),
                              std::fmax(std::fmax(s[4], s[5]), std::fmax(s[6], s[7])));
    largest = std::fmax(largest, ptx::shuffle_xor(largest, 8));
    largest = std::fmax(largest, ptx::shuffle_xor(largest, 16));
    const float factor = state.is_outgrown_by(largest, 0.0F) ? state.raise(largest) : 1.0F, base = state.base();
    ptx::sync_warp();  // all lanes have read the state
    float p[8];
    MLA_UNROLL
    for (int i = 0; i < 8; ++i) p[i] = ptx::exp2_approx(s[i] - base);
    ptx::Vec4 packed;
    MLA_UNROLL
    for (int i = 0; i < 4; ++i) packed.x[i] = pack<Config::kType>(p[2 * i], p[2 * i + 1]);
    ptx::store_shared(p_tile() + tile_offset<Config::kPRowBytes>(group_row(), lane_chunk()), packed);
    float sum = ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]));
    sum += ptx::shuffle_xor(sum, 8);
    sum += ptx::shuffle_xor(sum, 16);
    if (ptx::lane() >= 8) return;
    row_factors()[r] = factor;
    state.sum += sum;
    row_states()[r] = state;
  }

  /// Returns whether a key of step n has a row.
  MLA_DEVICE bool has_row(uint32_t n, int key) const { return (unit().valid[n % 8] >> key & 1) != 0; }

  /// Returns the lane's scores as base-2 logits, -inf where its row does not see the key.
  MLA_DEVICE void make_logits(float (&s)[8], uint32_t n) const {
    const bool unmasked = unit().unmasked.contains(n);
    const bool only_valid = args_.sparse() && needs_only_scale(args_.options);
    if (!unmasked && !only_valid)
      replace_scores(n, lane_chunk() * 8, RowScores(args_, unit().segment, unit().rows.row(args_, softmax_row())));
    const bool direct = unmasked || only_valid;
    load_scores(s, direct ? score_scale(args_) * std::numbers::log2e_v<float> : 1.0F, direct);
    if (!only_valid) return;
    MLA_UNROLL
    for (int i = 0; i < 8; ++i)
      if (!has_row(n, lane_chunk() * 8 + i)) s[i] = kNoKey;
  }

  /// Loads the lane's scores: the sums of all K slices, or what replace_scores() left in the first one.
  MLA_DEVICE void load_scores(float (&s)[8], float scale, bool all_slices) const {
    const ptx::SharedAddress first = score_chunk(0, group_row(), lane_chunk() * 2);
    const auto add = [&](int slice) {
      MLA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const auto four = ptx::load_shared<ptx::Vec4>((first ^ static_cast<uint32_t>(half * kChunkBytes)) +
                                                      static_cast<uint32_t>(slice * kSliceBytes));
        MLA_UNROLL
        for (int i = 0; i < 4; ++i) {
          const auto score = std::bit_cast<float>(four.x[i]);
          s[half * 4 + i] = slice == 0 ? score : s[half * 4 + i] + score;
        }
      }
    };
    add(0);
    if (all_slices) {
      MLA_UNROLL
      for (int slice = 1; slice < Config::kScoreWarpsK; ++slice) add(slice);
    }
    MLA_UNROLL
    for (int i = 0; i < 8; ++i) s[i] *= scale;
  }

  /// Turns the scores of keys `first` ... + 7 of step n into base-2 logits in place, -inf where the row does not see
  /// the key. It looks at one key at a time, for steps that are masked or whose scores need more than the scale.
  MLA_DEVICE void replace_scores(uint32_t n, int first, const RowScores& row) const {
    const int32_t key = first_key(n);
    MLA_NO_UNROLL
    for (int i = first; i < first + 8; ++i) {
      float s = 0.0F;
      MLA_UNROLL
      for (int slice = 0; slice < Config::kScoreWarpsK; ++slice) s += ptx::load_shared<float>(score(slice, i));
      if (has_row(n, i) && row.sees(key + i)) {
        s = row.logit(s, key + i);
      } else {
        if (!is_finite(s)) poison(n).mark(i);
        s = kNoKey;
      }
      ptx::store_shared(score(0, i), s);
    }
  }

  /// Returns where a K slice's score of the lane's row and a key of the step lies.
  MLA_DEVICE ptx::SharedAddress score(int slice, int key) const {
    return score_chunk(slice, group_row(), key / 4) + static_cast<uint32_t>(key % 4 * 4);
  }

  // Outputs.

  MLA_DEVICE static int output_channel() { return warp_of_group() * Config::kOutputDims; }

  MLA_DEVICE void rescale_outputs() {
    const float* const factors = row_factors() + group() * Config::kGroupRows + (ptx::lane() >> 2);
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
    for (int i = 0; i < 4; ++i) outputs_[m][n][i] *= factor[m][i >> 1];
  }

  /// Adds P times the values of step n. With kSilenced, values of marked keys that are not finite count as 0.
  template <bool kSilenced>
  MLA_DEVICE void add_values(uint32_t n) {
    const auto p_lane = lane_of_a<Config::kPRowBytes>(p_tile());
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
        if constexpr (kSilenced) silence(b, n, 16 * step);
        MLA_UNROLL
        for (int m = 0; m < Config::kOutputTilesM; ++m) {
          mma<Config::kType>(outputs_[m][column], a[m], b[0], b[1]);
          mma<Config::kType>(outputs_[m][column + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  /// Clears what is not finite in the lane's values of marked keys. The lane has keys 2 (lane % 4) and the next one of
  /// each eight. The tile itself must not change: rows of the other group may see the key.
  MLA_DEVICE void silence(uint32_t (&b)[4], uint32_t n, int first_key_of_b) const {
    MLA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int key = first_key_of_b + (i & 1) * 8 + (ptx::lane() & 3) * 2;
      const uint32_t finite = finite_or_zero<Config::kType>(b[i]);
      if (poison(n).is_marked(key)) b[i] = (b[i] & 0xFFFF0000U) | (finite & 0xFFFFU);
      if (poison(n).is_marked(key + 1)) b[i] = (b[i] & 0xFFFFU) | (finite & 0xFFFF0000U);
    }
  }

  // The end of a segment.

  MLA_DEVICE void finish() const {
    ptx::sync_block();  // nobody reads the tiles any more
    if (ptx::thread_index() < Config::kRows) finish_row_of_thread();
    ptx::sync_block();
    MLA_UNROLL
    for (int m = 0; m < Config::kOutputTilesM; ++m) store_outputs(m);
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
    constexpr int kRowFloats = Config::kOutputRowFloats;
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
    AbsorbedBlock<Config> block(args);
    block.init(args.list.shares[ptx::block_index_x()]);
    block.compute_all();
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::portable
