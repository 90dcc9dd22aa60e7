// SPDX-License-Identifier: Apache-2.0
// The first kernel of compress pools groups of tokens into latents. Its bytes are few; it is bound by instructions.
//   grid    a block per request, for the latents that may need its state; then blocks for the other groups
//           (compress_groups.cuh)
//   team    of warps that make a latent: a warp for each 128 channels, or for 256 where two tokens are pooled, or one
//   for
//           all where no more than one is. A block has one to four teams. Many tokens are divided into slices, each
//           with warps of its own. The choice depends on the compressor alone, so that a latent's sums are the same
//           however a prompt is divided.
//   memory  a thread has four channels of each of its pieces; the loads of kTokens tokens are in flight together
//   shared  the sums of slices [kSlices - 1][12 kPieces][threads of a slice], then a sum of squares of each warp
//   sums    of weights and of weighted values, with a maximum for each channel; every sum says how it is rounded, so
//           that all ways through the code give the same bits
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "cuda/border/launch.h"
#include "cuda/common/compress_groups.cuh"
#include "cuda/tile/channels.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

struct CompressParams {
  core::CompressArgs args;
  int32_t num_request_blocks = 0;  // batch_size, or 0 where there is no state
  int32_t team_warps = 1;          // of a slice
};

/// A block has kWarps warps for each slice; a thread has kPieces pieces of four channels. With kTokens = 0 each token
/// is a group, and nothing is summed. kAligned says that a thread's four channels lie at multiples of their size in
/// every row.
template <int kPieces, int kTokens, int kSlices, bool kAligned>
class CompressKernel {
 public:
  using Params = CompressParams;
  static constexpr const char* kName = kTokens == 0   ? "compress_norm"
                                       : kTokens == 1 ? "compress_wide"
                                       : kTokens == 2 ? "compress_pairs"
                                       : kSlices > 1  ? "compress_many"
                                                      : "compress";
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * kWarpSize * kSlices;
  static constexpr int kMinBlocks = kSlices > 1 || kTokens == 1 ? 1 : kTokens == 2 ? 3 : 4;
  static constexpr int kLaneChannels = 4;                          // of a piece
  static constexpr int kWarpChannels = kLaneChannels * kWarpSize;  // of a piece
  static constexpr int kSliceThreads = kWarps * kWarpSize;
  static constexpr int kThreadSums = 3 * kPieces * kLaneChannels;
  static constexpr int kSharedBytes = ((kSlices - 1) * kThreadSums * kSliceThreads + kWarps) * 4;

  static MLA_DEVICE void run(const Params& params) {
    ptx::allow_next_grid();  // lets attention over these rows start, up to its wait for them
    const CompressKernel kernel(params);
    const core::CompressArgs& args = params.args;
    const int32_t block = ptx::block_index_x() - params.num_request_blocks;
    const bool by_request = block < 0;
    Group group;
    int32_t more = 0;  // groups behind the first
    if (by_request) {
      group = {.tokens = NewTokens::of(args, ptx::block_index_x())};
      if (group.tokens.begin >= group.tokens.end || group.tokens.end_position() <= 0) return;
      group.last = first_end(args, group.tokens) + kernel.team_ * args.ratio;
      more = groups_by_request(args) - 1;
    } else {
      const int64_t token = (int64_t{block} * kernel.num_teams() + kernel.team_) * args.ratio;
      if (token < args.num_tokens) group = later_group(args, token, groups_by_request(args));
      if (group.last < 0) return;
    }
    for (int32_t i = by_request ? kernel.team_ : 0; i <= more && group.last < group.tokens.end_position();
         i += kernel.num_teams(), group.last += int64_t{kernel.num_teams()} * args.ratio) {
      kernel.make_latent(group.tokens, group.last);
      kernel.sync_team();  // the next latent uses the same shared memory
    }
  }

 private:
  /// Holds one value for each of the thread's channels.
  struct Values {
    float v[kPieces][kLaneChannels];
  };
  struct Sums {
    Values max, weights, values;
  };

  MLA_DEVICE explicit CompressKernel(const Params& params)
      : args_(params.args),
        team_warps_(params.team_warps),
        slice_(ptx::warp() / kWarps),
        team_(ptx::warp() % kWarps / params.team_warps),
        thread_(ptx::warp() % params.team_warps * kWarpSize + ptx::lane()) {}

  MLA_DEVICE int32_t num_teams() const { return kWarps / team_warps_; }
  /// Waits for all threads of the team.
  MLA_DEVICE void sync_team() const {
    if (kSlices == 1 && team_warps_ == 1)
      ptx::sync_warp();
    else
      ptx::sync_threads(1 + team_, team_warps_ * kWarpSize * kSlices);
  }

  /// Makes the latent of the group that ends at `last`. All threads of a team call this.
  MLA_DEVICE void make_latent(const NewTokens& from, int64_t last) const {
    const int64_t token = from.token(last);
    Values latent, weight = {};
    if (args_.norm_weight != nullptr)  // is on its way while tokens are summed
      weight = load(static_cast<const std::byte*>(args_.norm_weight), args_.norm_weight_dtype);
    if constexpr (kTokens == 0) {
      latent = load(element(args_.kv, args_.dtype, token * args_.kv_stride_token), args_.dtype);
    } else {
      Sums sums = pool(from, last);
      if constexpr (kSlices > 1) merge_slices(sums);
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
#pragma unroll
        for (int j = 0; j < kLaneChannels; ++j) latent.v[i][j] = sums.values.v[i][j] / sums.weights.v[i][j];
    }
    if (args_.norm_weight != nullptr) normalize(latent, weight);
    if (slice_ == 0)
      store(latent, static_cast<std::byte*>(args_.latent) +
                        token * args_.latent_stride_token * static_cast<int64_t>(size_of(args_.latent_dtype)));
  }

  /// Sums the tokens of the group that ends at `last`, or the slice's share of them, kTokens at a time: always the same
  /// ones, so that every call rounds alike.
  MLA_DEVICE Sums pool(const NewTokens& from, int64_t last) const {
    Sums sums = {};
    for_channels(sums.max, [](float& max) { max = kLowest; });
    constexpr int32_t kShared = kTokens * kSlices;
    const int32_t share = (args_.span() + kShared - 1) / kShared * kTokens;  // of a slice, in whole batches
    const int32_t end = std::min(args_.span(), (slice_ + 1) * share);
    const Span group(args_, from, last, slice_ * share);
    const bool all_new = group.num_old == 0 && group.first == 0 && args_.ratio % kTokens == 0;
    if (args_.dtype == DType::kF32)
      all_new ? add_tokens<false, true>(sums, group, slice_ * share, end)
              : add_tokens<false, false>(sums, group, slice_ * share, end);
    else
      all_new ? add_tokens<true, true>(sums, group, slice_ * share, end)
              : add_tokens<true, false>(sums, group, slice_ * share, end);
    return sums;
  }

  /// Holds the bits of a thread's channels of one token.
  struct Bits {
    ptx::Vec4 kv[kPieces], score[kPieces];
  };

  /// Says where the tokens of a group lie: none before `first`, those before `num_old` in the state, the others in this
  /// call.
  struct Span {
    int32_t first, num_old;
    int64_t token;            // of the batch, that token 0 of the group is or would be
    const int32_t* table;     // the request's row of the state's table
    uint32_t column, offset;  // of the token at which a slice begins: its place there, and its row in the block

    MLA_DEVICE Span(const core::CompressArgs& args, const NewTokens& from, int64_t last, int32_t begin)
        : table(args.state_table + from.request * args.state_table_stride_request) {
      const int64_t oldest = last - args.span() + 1;
      first = static_cast<int32_t>(std::max<int64_t>(-oldest, 0));
      num_old = static_cast<int32_t>(std::clamp<int64_t>(from.first - oldest, 0, args.span()));
      token = from.token(oldest);
      const auto at = static_cast<uint32_t>(std::max<int64_t>(oldest + std::max(begin, first), 0));
      const auto size = static_cast<uint32_t>(args.block_size);
      column = at / size;
      offset = at - column * size;
      column %= static_cast<uint32_t>(args.num_columns);
    }
  };

  /// Finds the states of tokens i ... i + kCount - 1, those that have one.
  template <int kCount>
  MLA_DEVICE void find_states(Span& group, int32_t i, const float* (&old)[kCount], bool (&known)[kCount]) const {
    const auto size = static_cast<uint32_t>(args_.block_size), columns = static_cast<uint32_t>(args_.num_columns);
    int32_t blocks[kCount];
    uint32_t offsets[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      blocks[k] = i + k < group.num_old ? group.table[group.column] : -1;
      offsets[k] = group.offset;
      group.offset += i + k >= group.first ? 1 : 0;
      const bool next = group.offset == size;
      group.offset = next ? 0 : group.offset;
      group.column += next ? 1 : 0;
      group.column = group.column == columns ? 0 : group.column;
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      known[k] = blocks[k] >= 0 && blocks[k] < args_.num_blocks;
      old[k] = args_.state + (known[k] ? blocks[k] : 0) * args_.state_stride_block +
               int64_t{offsets[k]} * args_.state_stride_row + channel(0);
    }
  }

  /// Adds tokens i ... end - 1 of a group, those that there are, kTokens at a time. Little code depends on which of
  /// them are old: addresses are chosen, and what is not there is loaded as 0 and weighs nothing. kHalves says that the
  /// elements of new tokens have 16 bits; kAllNew that all tokens are new, and halves are whole batches of tokens.
  template <bool kHalves, bool kAllNew>
  MLA_DEVICE void add_tokens(Sums& sums, Span group, int32_t i, int32_t end) const {
    constexpr int64_t kBytes = kHalves ? 2 : 4;
    const bool biased = args_.position_bias != nullptr;
    // Each token has a half for the group behind its own, and one for its own.
    const int32_t half = args_.overlap && i >= args_.ratio ? args_.d_latent : 0;
    const int64_t kv_step = args_.kv_stride_token * kBytes, score_step = args_.score_stride_token * kBytes;
    const auto* kv_at =
        static_cast<const std::byte*>(args_.kv) + (group.token + i) * kv_step + (channel(0) + half) * kBytes;
    const auto* score_at =
        static_cast<const std::byte*>(args_.score) + (group.token + i) * score_step + (channel(0) + half) * kBytes;
    const float* bias_at = (biased ? args_.position_bias : args_.state) +
                           i % args_.ratio * args_.position_bias_stride_position + channel(0) + half;
    const int64_t bias_back = args_.ratio * args_.position_bias_stride_position;
    const int32_t half_begins = args_.overlap ? args_.ratio : INT32_MAX;  // token whose second half counts
    for (; i < end; i += kTokens) {
      Bits bits[kTokens];
      ptx::Vec4 bias[kTokens][kPieces];
      const float* old[kTokens];
      bool known[kTokens] = {}, there[kTokens], is_new[kTokens];
#pragma unroll
      for (int k = 0; k < kTokens; ++k) old[k] = args_.state;
      if (!kAllNew && i < group.num_old) find_states(group, i, old, known);
#pragma unroll
      for (int k = 0; k < kTokens; ++k) {
        const int32_t token = i + k;
        if (!kAllNew || k == 0) {
          const bool begins_half = token == half_begins && half == 0;
          kv_at += begins_half ? args_.d_latent * kBytes : 0;
          score_at += begins_half ? args_.d_latent * kBytes : 0;
          bias_at += begins_half ? args_.d_latent - bias_back : 0;
        }
        is_new[k] = kAllNew || token >= group.num_old;
        there[k] = kAllNew || (token < end && token >= group.first && (is_new[k] || known[k]));
        const float* const state = old[k] + (token >= half_begins ? args_.d_latent : 0);
        if constexpr (kHalves) {
          if constexpr (!kAllNew) {
            load_f32_if(there[k] && !is_new[k], state, bits[k].kv);
            load_f32_if(there[k] && !is_new[k], state + args_.width(), bits[k].score);
          }
          if (there[k] && is_new[k]) {
            load_halves(kv_at, bits[k].kv);
            load_halves(score_at, bits[k].score);
          }
        } else {
          load_f32_if(there[k], is_new[k] ? as<float>(kv_at) : state, bits[k].kv);
          load_f32_if(there[k], is_new[k] ? as<float>(score_at) : state + args_.width(), bits[k].score);
        }
        load_f32_if(biased && there[k] && is_new[k], bias_at, bias[k]);
        kv_at += kv_step;
        score_at += score_step;
        bias_at += args_.position_bias_stride_position;
      }
      Values scores[kTokens], max = sums.max;
#pragma unroll
      for (int k = 0; k < kTokens; ++k) {
        Values biases;
        decode_token<kHalves>(is_new[k], bits[k].score, scores[k]);
        decode_f32(bias[k], biases);
        for_channels(scores[k], biases, [&](float& score, float b) { score = there[k] ? score + b : kLowest; });
        for_channels(max, scores[k], [](float& m, float score) { m = std::max(m, score); });
      }
      Values rescale = sums.max;
      for_channels(rescale, max, [](float& r, float m) { r = factor(r, m); });
      for_channels(sums.weights, rescale, [](float& sum, float r) { sum = ptx::mul_rn(sum, r); });
      for_channels(sums.values, rescale, [](float& sum, float r) { sum = ptx::mul_rn(sum, r); });
      sums.max = max;
#pragma unroll
      for (int k = 0; k < kTokens; ++k) {
        Values kv;
        decode_token<kHalves>(is_new[k], bits[k].kv, kv);
        for_channels(scores[k], max, [&](float& score, float m) { score = there[k] ? factor(score, m) : 0.0F; });
        for_channels(sums.weights, scores[k], [](float& sum, float weight) { sum += weight; });
#pragma unroll
        for (int p = 0; p < kPieces; ++p)
#pragma unroll
          for (int j = 0; j < kLaneChannels; ++j)
            sums.values.v[p][j] = ptx::fma_rn(scores[k].v[p][j], kv.v[p][j], sums.values.v[p][j]);
      }
    }
  }

  template <bool kHalves>
  MLA_DEVICE void decode_token(bool is_new, const ptx::Vec4 (&bits)[kPieces], Values& values) const {
    if (kHalves && is_new)
      decode_halves(bits, args_.dtype, values);
    else
      decode_f32(bits, values);
  }

  /// Returns e^(score - max).
  static MLA_DEVICE float factor(float score, float max) { return ptx::exp2_approx((score - max) * kLog2E); }

  /// Calls f(value) for every channel; of two sets of values f(a's value, b's value).
  template <class F>
  static MLA_DEVICE void for_channels(Values& a, const F& f) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
#pragma unroll
      for (int j = 0; j < kLaneChannels; ++j) f(a.v[i][j]);
  }
  template <class F>
  static MLA_DEVICE void for_channels(Values& a, const Values& b, const F& f) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
#pragma unroll
      for (int j = 0; j < kLaneChannels; ++j) f(a.v[i][j], b.v[i][j]);
  }

  static MLA_DEVICE float* shared() { return reinterpret_cast<float*>(ptx::shared_memory()); }

  /// Merges the sums of all slices into those of the first.
  MLA_DEVICE void merge_slices(Sums& sums) const {
    const int32_t at = team_ * team_warps_ * kWarpSize + thread_;
    if (slice_ > 0) each_sum(sums, slice_ - 1, at, [](float* to, float& value) { *to = value; });
    sync_team();
    if (slice_ > 0) return;
    for (int slice = 0; slice < kSlices - 1; ++slice) {
      Sums other = {};
      each_sum(other, slice, at, [](float* from, float& value) { value = *from; });
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
#pragma unroll
        for (int j = 0; j < kLaneChannels; ++j) {
          const float max = std::max(sums.max.v[i][j], other.max.v[i][j]);
          const float own = factor(sums.max.v[i][j], max), its = factor(other.max.v[i][j], max);
          sums.weights.v[i][j] = ptx::fma_rn(other.weights.v[i][j], its, ptx::mul_rn(sums.weights.v[i][j], own));
          sums.values.v[i][j] = ptx::fma_rn(other.values.v[i][j], its, ptx::mul_rn(sums.values.v[i][j], own));
          sums.max.v[i][j] = max;
        }
      }
    }
  }
  /// Calls f(place in shared memory, value) for the sums of a thread of a slice.
  template <class F>
  static MLA_DEVICE void each_sum(Sums& sums, int32_t slice, int32_t thread, const F& f) {
    float* const base = shared() + slice * kThreadSums * kSliceThreads + thread;
#pragma unroll
    for (int i = 0; i < kPieces * kLaneChannels; ++i) {
      f(base + (3 * i) * kSliceThreads, sums.max.v[i / kLaneChannels][i % kLaneChannels]);
      f(base + (3 * i + 1) * kSliceThreads, sums.weights.v[i / kLaneChannels][i % kLaneChannels]);
      f(base + (3 * i + 2) * kSliceThreads, sums.values.v[i / kLaneChannels][i % kLaneChannels]);
    }
  }

  /// Normalizes the latent of the team, of which each thread of the first slice has its channels.
  MLA_DEVICE void normalize(Values& latent, const Values& weight) const {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
#pragma unroll
      for (int j = 0; j < kLaneChannels; ++j)
        if (channel(i) + j < args_.d_latent) squares = ptx::fma_rn(latent.v[i][j], latent.v[i][j], squares);
    for (int mask = kWarpSize / 2; mask > 0; mask /= 2) squares += ptx::shuffle_xor(squares, mask);
    if (team_warps_ > 1) {
      float* const of_warps = shared() + (kSlices - 1) * kThreadSums * kSliceThreads + team_ * team_warps_;
      if (slice_ == 0 && ptx::lane() == 0) of_warps[thread_ / kWarpSize] = squares;
      sync_team();
      squares = 0;
      for (int32_t warp = 0; warp < team_warps_; ++warp) squares += of_warps[warp];
    }
    const float scale = 1.0F / std::sqrt(squares / static_cast<float>(args_.d_latent) + args_.norm_eps);
    for_channels(latent, weight, [&](float& x, float w) { x *= scale * w; });
  }

  static MLA_DEVICE const std::byte* element(const void* base, DType dtype, int64_t index) {
    return static_cast<const std::byte*>(base) + index * static_cast<int64_t>(size_of(dtype));
  }
  /// Returns how many channels a piece is behind the thread's first, and which channel it begins with.
  MLA_DEVICE int32_t piece(int i) const { return i * team_warps_ * kWarpChannels; }
  MLA_DEVICE int32_t channel(int i) const { return piece(i) + thread_ * kLaneChannels; }

  /// Loads the thread's channels, of which `from` is the first, of a row of f32; those that do not exist are 0. Unless
  /// `valid`, all are 0, and nothing is read.
  MLA_DEVICE void load_f32_if(bool valid, const float* from, ptx::Vec4 (&bits)[kPieces]) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int32_t left = args_.d_latent - channel(i);
      if constexpr (kAligned) {
        bits[i] = ptx::load_once_if(valid && left > 0, reinterpret_cast<const ptx::Vec4*>(from + piece(i)));
      } else {
#pragma unroll
        for (int j = 0; j < kLaneChannels; ++j)
          bits[i].x[j] = std::bit_cast<uint32_t>(ptx::load_if(valid && j < left, from + piece(i) + j));
      }
    }
  }
  static MLA_DEVICE void decode_f32(const ptx::Vec4 (&bits)[kPieces], Values& values) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
#pragma unroll
      for (int j = 0; j < kLaneChannels; ++j) values.v[i][j] = std::bit_cast<float>(bits[i].x[j]);
  }

  /// Does the same with elements of 16 bits; only the first two words are set.
  MLA_DEVICE void load_halves(const std::byte* from, ptx::Vec4 (&bits)[kPieces]) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int32_t left = args_.d_latent - channel(i);
      bits[i].x[0] = bits[i].x[1] = 0;
      if constexpr (kAligned) {
        if (left <= 0) continue;
        const uint64_t both = ptx::load_once(as<uint64_t>(from) + piece(i) / kLaneChannels);
        bits[i].x[0] = static_cast<uint32_t>(both);
        bits[i].x[1] = static_cast<uint32_t>(both >> 32);
      } else {
#pragma unroll
        for (int j = 0; j < kLaneChannels; ++j)
          if (j < left) bits[i].x[j / 2] |= uint32_t{as<uint16_t>(from)[piece(i) + j]} << (16 * (j % 2));
      }
    }
  }
  static MLA_DEVICE void decode_halves(const ptx::Vec4 (&bits)[kPieces], DType dtype, Values& values) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (dtype == DType::kBF16) {
        ptx::unpack_bf16x2(bits[i].x[0], values.v[i][0], values.v[i][1]);
        ptx::unpack_bf16x2(bits[i].x[1], values.v[i][2], values.v[i][3]);
      } else {
        ptx::unpack_f16x2(bits[i].x[0], values.v[i][0], values.v[i][1]);
        ptx::unpack_f16x2(bits[i].x[1], values.v[i][2], values.v[i][3]);
      }
    }
  }

  /// Returns the thread's channels of a row of any type, which begins at `row`.
  MLA_DEVICE Values load(const std::byte* row, DType dtype) const {
    const std::byte* const from = row + channel(0) * static_cast<int64_t>(size_of(dtype));
    ptx::Vec4 bits[kPieces];
    Values values;
    if (dtype == DType::kF32) {
      load_f32_if(true, as<float>(from), bits);
      decode_f32(bits, values);
    } else {
      load_halves(from, bits);
      decode_halves(bits, dtype, values);
    }
    return values;
  }

  /// Stores the thread's channels of the latent.
  MLA_DEVICE void store(const Values& latent, std::byte* to) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int32_t c = channel(i);
      if (!kAligned) {
#pragma unroll
        for (int j = 0; j < kLaneChannels; ++j)
          if (c + j < args_.d_latent) store_element(to, args_.latent_dtype, c + j, latent.v[i][j]);
      } else if (c < args_.d_latent && args_.latent_dtype == DType::kF32) {
        ptx::Vec4 bits;
#pragma unroll
        for (int j = 0; j < kLaneChannels; ++j) bits.x[j] = std::bit_cast<uint32_t>(latent.v[i][j]);
        as<ptx::Vec4>(to)[c / kLaneChannels] = bits;
      } else if (c < args_.d_latent) {
        uint64_t bits = 0;
#pragma unroll
        for (int j = 0; j < kLaneChannels; ++j)
          bits |=
              uint64_t{args_.latent_dtype == DType::kBF16 ? f32_to_bf16(latent.v[i][j]) : f32_to_f16(latent.v[i][j])}
              << (16 * j);
        as<uint64_t>(to)[c / kLaneChannels] = bits;
      }
    }
  }

  static constexpr float kLowest = -3.40282347e+38F;  // instead of -inf, whose difference with itself is NaN
  static constexpr float kLog2E = 1.44269504F;

  const core::CompressArgs& args_;
  int32_t team_warps_;  // of a slice
  int32_t slice_, team_;
  int32_t thread_;  // of the team's in this slice
};

}  // namespace mla::MLA_CUDA_NAMESPACE
