// SPDX-License-Identifier: Apache-2.0
// The score warps multiply queries and keys. Those that share a band divide the channels into K slices.
#pragma once

#include "cuda/backends/bulk/block.cuh"

namespace mla::MLA_CUDA_NAMESPACE::bulk {

template <class Config>
class ScoreRole : AbsorbedBlock<Config> {
  using Block = AbsorbedBlock<Config>;
  using Block::args_, Block::memory_, Block::shared_, Block::unit;

 public:
  using Block::next_unit;

  MLA_DEVICE explicit ScoreRole(const cuda::AbsorbedArgs& args) : Block(args) {}

  MLA_DEVICE void compute() {
    load_queries();
    const uint32_t end = unit().steps.end;
    MLA_NO_UNROLL
    for (; next_ < end; ++next_) step(next_);
    Block::leave_unit();
  }

 private:
  static constexpr int kTiles = Config::kBandTiles, kSteps = Config::kLatentSteps + Config::kRopeSteps;  // K steps

  MLA_DEVICE static int score_warp() { return ptx::warp() - Config::kFirstScoreWarp; }
  MLA_DEVICE static int band() { return score_warp() / Config::kSlices; }
  MLA_DEVICE static int slice() { return score_warp() % Config::kSlices; }

  // Queries. No other warp uses a warp's rows and channels of them.

  /// Loads the queries through shared memory into registers, as many as these hold; the others stay in shared memory.
  MLA_DEVICE void load_queries() {
    const bool aligned = queries_are_chunks(args_, Config::kType);
    constexpr int kFirstTurn = Config::kQueriesAtOnce ? kSteps : Config::kHeldSteps;
    share_queries<0, kFirstTurn>(aligned);
    MLA_UNROLL
    for (int m = 0; m < kTiles; ++m) MLA_UNROLL
    for (int step = 0; step < Config::kHeldSteps; ++step)
      ptx::ldmatrix_x4(queries_[m][step], lane_queries() + static_cast<uint32_t>(m * 16 * Config::kQueryPitch +
                                                                                 step * Config::kKStepBytes));
    if constexpr (kFirstTurn == kSteps) return;
    ptx::sync_warp();
    share_queries<kFirstTurn, kSteps>(aligned);
  }

  /// Returns where the warp's rows of queries begin in shared memory, at the first channel of its K slice.
  MLA_DEVICE ptx::SharedAddress shared_queries() const {
    return shared_ + static_cast<uint32_t>(Config::kQueryOffset + band() * Config::kBandRows * Config::kQueryPitch +
                                           slice() * Config::kQuerySliceBytes);
  }
  /// These return the address that the lane gives to ldmatrix for an A operand: of the first K step in shared memory,
  /// and of the first one that stays there.
  MLA_DEVICE ptx::SharedAddress lane_queries() const {
    return shared_queries() +
           static_cast<uint32_t>((ptx::lane() & 15) * Config::kQueryPitch + (ptx::lane() >> 4) * kChunkBytes);
  }
  MLA_DEVICE ptx::SharedAddress kept_lane_queries() const {
    return lane_queries() +
           (Config::kQueriesAtOnce ? static_cast<uint32_t>(Config::kHeldSteps * Config::kKStepBytes) : 0U);
  }

  /// Brings K steps kBegin ... kEnd - 1 of the warp's queries into shared memory. Two lanes share a row; each has one
  /// of the two chunks of every K step. `aligned` says that queries have the type of keys and can be copied 16 bytes at
  /// a time.
  template <int kBegin, int kEnd>
  MLA_DEVICE void share_queries(bool aligned) const {
    MLA_UNROLL
    for (int m = 0; m < kTiles; ++m) {
      const int r = m * 16 + ptx::lane() / 2, chunk = ptx::lane() % 2;
      const QueryRow row = unit().rows.row(args_, band() * Config::kBandRows + r);
      const ptx::SharedAddress to =
          shared_queries() + static_cast<uint32_t>(r * Config::kQueryPitch + chunk * kChunkBytes);
      if (aligned)
        copy_row<kBegin, kEnd>(to, row, chunk * kVector);
      else
        convert_row<kBegin, kEnd>(to, row, chunk * kVector);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::sync_warp();
  }

  /// Copies the lane's chunk of each K step, which begins `behind` channels into the K step.
  template <int kBegin, int kEnd>
  MLA_DEVICE void copy_row(ptx::SharedAddress to, const QueryRow& row, int behind) const {
    const int num_latent = args_.pools[0].cache.d_ckv;
    // These are the addresses of the lane's chunk of channel 0. Rotary channels are numbered behind the latent ones, so
    // that theirs is where channel 0 would be.
    const uint64_t base = reinterpret_cast<uint64_t>(args_.q_nope);
    const uint64_t nope = base + static_cast<uint64_t>((nope_at(row) + behind) * 2);
    const uint64_t pe =
        reinterpret_cast<uint64_t>(args_.q_pe) + static_cast<uint64_t>((pe_at(row) + behind - num_latent) * 2);
    MLA_NO_UNROLL
    for (int step = kBegin; step < kEnd; ++step) {
      const int channel = channel_of(step);
      const bool valid = row.token >= 0 && channel + behind < args_.d_qk;
      uint64_t from = base;
      if (valid) from = (channel + behind < num_latent ? nope : pe) + static_cast<uint64_t>(channel * 2);
      ptx::cp_async_16(to + static_cast<uint32_t>((step - kBegin) * Config::kKStepBytes),
                       reinterpret_cast<const void*>(from), valid);
    }
  }

  /// Does the same for queries of any type and alignment, two channels at a time, since few registers are free here.
  template <int kBegin, int kEnd>
  MLA_DEVICE void convert_row(ptx::SharedAddress to, const QueryRow& row, int behind) const {
    const int d_ckv = args_.pools[0].cache.d_ckv;
    MLA_NO_UNROLL
    for (int i = 0; i < (kEnd - kBegin) * kVector; i += 2) {
      const int channel = channel_of(kBegin + i / kVector) + behind + i % kVector;
      const bool valid = row.token >= 0 && channel < args_.d_qk, latent = channel < d_ckv;
      const void* from = latent ? args_.q_nope : args_.q_pe;
      const int64_t at = latent ? nope_at(row) + channel : pe_at(row) + channel - d_ckv;
      const float low = valid ? load_element(from, args_.q_dtype, at) : 0.0F;
      const float high = valid ? load_element(from, args_.q_dtype, at + 1) : 0.0F;
      ptx::store_shared(to + static_cast<uint32_t>(i / kVector * Config::kKStepBytes + i % kVector * 2),
                        pack<Config::kType>(low, high));
    }
  }

  /// Returns the first channel of a K step of the warp's slice.
  MLA_DEVICE static int channel_of(int step) {
    return step < Config::kLatentSteps
               ? (slice() * Config::kLatentSteps + step) * 16
               : Config::kLatentDims + (slice() * Config::kRopeSteps + step - Config::kLatentSteps) * 16;
  }

  /// These return where a row begins in q_nope and in q_pe, in elements.
  MLA_DEVICE int64_t nope_at(const QueryRow& row) const {
    return int64_t{row.token} * args_.q_nope_stride_token + row.head * args_.q_nope_stride_head;
  }
  MLA_DEVICE int64_t pe_at(const QueryRow& row) const {
    return int64_t{row.token} * args_.q_pe_stride_token + row.head * args_.q_pe_stride_head;
  }

  // Scores.

  MLA_DEVICE void step(uint32_t n) const {
    ptx::mbarrier_wait(Block::kv_full(n), Block::kv_parity(n));
    float s[kTiles][4][4] = {};
    multiply_queries(s, n);
    if (n > 0) ptx::mbarrier_wait(Block::s_empty(band()), Block::s_parity(n - 1));
    if constexpr (Config::kScoresInRows)
      store_rows(s);
    else
      store_accumulators(s);
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::s_full(band()));
  }

  /// Stores the sums of the warp's K slice by rows; softmax warps read them by rows.
  MLA_DEVICE void store_rows(const float (&s)[kTiles][4][4]) const {
    const ptx::SharedAddress to =
        Block::score_row(slice(), ptx::lane() >> 2) + static_cast<uint32_t>((ptx::lane() & 3) * 8);
    MLA_UNROLL
    for (int m = 0; m < kTiles; ++m) MLA_UNROLL
    for (int half = 0; half < 2; ++half) MLA_UNROLL
    for (int j = 0; j < 4; ++j)
      ptx::store_shared(to + static_cast<uint32_t>((m * 16 + half * 8) * Config::kScorePitch + j * 32),
                        two_floats(s[m][j][2 * half], s[m][j][2 * half + 1]));
  }
  /// Stores the sums of the warp's K slice in the layout of the accumulators, 16 bytes a lane and tile.
  MLA_DEVICE void store_accumulators(const float (&s)[kTiles][4][4]) const {
    MLA_UNROLL
    for (int m = 0; m < kTiles; ++m) MLA_UNROLL
    for (int j = 0; j < 4; ++j) {
      ptx::Vec4 four;
      MLA_UNROLL
      for (int i = 0; i < 4; ++i) four.x[i] = std::bit_cast<uint32_t>(s[m][j][i]);
      ptx::store_shared(Block::scores(band(), slice(), m, j), four);
    }
  }

  /// Holds the operands of one K step: queries of the band's rows, and the step's 32 keys in two groups of 16.
  struct Operands {
    uint32_t q[kTiles][4], k[2][4];
  };

  MLA_DEVICE static void multiply(float (&s)[kTiles][4][4], const Operands& of) {
    MLA_UNROLL
    for (int m = 0; m < kTiles; ++m) MLA_UNROLL
    for (int group = 0; group < 2; ++group) {
      mma<Config::kType>(s[m][2 * group], of.q[m], of.k[group][0], of.k[group][1]);
      mma<Config::kType>(s[m][2 * group + 1], of.q[m], of.k[group][2], of.k[group][3]);
    }
  }

  /// Adds to `s` the products of the band's rows and the step's keys over this warp's K slice. The operands of a K step
  /// are loaded before those of the K step in front of it are multiplied.
  MLA_DEVICE void multiply_queries(float (&s)[kTiles][4][4], uint32_t n) const {
    const ptx::SharedAddress lane_keys =
        Block::stage(n) + static_cast<uint32_t>(((ptx::lane() & 7) | (ptx::lane() >> 4) << 3) * Config::kKeyPitch +
                                                ((ptx::lane() >> 3) & 1) * kChunkBytes);
    const ptx::SharedAddress latent_keys =
        lane_keys + static_cast<uint32_t>(slice() * Config::kLatentSteps * Config::kKStepBytes);
    const ptx::SharedAddress rope_keys =
        lane_keys + static_cast<uint32_t>(Config::kLatentDims * 2 + slice() * Config::kRopeSteps * Config::kKStepBytes);
    const ptx::SharedAddress rows = kept_lane_queries();
    const auto load = [&](Operands& to, int step) {
      const ptx::SharedAddress keys =
          step < Config::kLatentSteps
              ? latent_keys + static_cast<uint32_t>(step * Config::kKStepBytes)
              : rope_keys + static_cast<uint32_t>((step - Config::kLatentSteps) * Config::kKStepBytes);
      MLA_UNROLL
      for (int group = 0; group < 2; ++group)
        ptx::ldmatrix_x4(to.k[group], keys + static_cast<uint32_t>(group * 16 * Config::kKeyPitch));
      MLA_UNROLL
      for (int m = 0; m < kTiles; ++m) {
        if (step >= Config::kHeldSteps) {
          ptx::ldmatrix_x4(to.q[m], rows + static_cast<uint32_t>(m * 16 * Config::kQueryPitch +
                                                                 (step - Config::kHeldSteps) * Config::kKStepBytes));
        } else {
          MLA_UNROLL
          for (int i = 0; i < 4; ++i) to.q[m][i] = queries_[m][step][i];
        }
      }
    };
    static_assert(Config::kLatentSteps % 2 == 0);
    Operands even, odd;
    const bool has_rope = args_.d_qk > Config::kLatentDims;
    load(even, 0);
    MLA_UNROLL
    for (int step = 0; step < Config::kLatentSteps; step += 2) {
      load(odd, step + 1);
      multiply(s, even);
      if (step + 2 < Config::kLatentSteps || has_rope) load(even, step + 2);
      multiply(s, odd);
    }
    if (!has_rope) return;
    if constexpr (Config::kRopeSteps == 2) load(odd, Config::kLatentSteps + 1);
    multiply(s, even);
    if constexpr (Config::kRopeSteps == 2) multiply(s, odd);
  }

  uint32_t next_ = 0;                                // number of the next step
  uint32_t queries_[kTiles][Config::kHeldSteps][4];  // queries of the slice's first K steps
};

}  // namespace mla::MLA_CUDA_NAMESPACE::bulk
