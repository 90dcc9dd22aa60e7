// SPDX-License-Identifier: Apache-2.0
// The second kernel of compress appends the latents, which the first has left in `latent`, to a cache, and keeps new
// tokens in the state, which the first has read. Keys that are appended beside the latents need nothing of the first
// kernel: their warps stand first, and run beside it.
//   grid    a warp for each of these keys; a warp for each token, which keeps it; then a warp per request, for its
//           first group, and one for each `ratio` tokens of the batch, for the others (compress_groups.cuh); a block
//           is 4 warps that share nothing
#pragma once

#include <cstdint>

#include "cuda/border/launch.h"
#include "cuda/common/append_groups.cuh"
#include "cuda/common/compress_groups.cuh"
#include "cuda/tile/indexer_key.cuh"
#include "cuda/tile/rotated_rows.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Says how a latent becomes a row: not at all; as a key of the indexer; with rotary channels that turn, which are the
/// end of its latent part or a part of their own; or as it is.
enum class CompressedRow : uint8_t { kNone, kKey, kJoined, kParted, kPlain };

struct CompressRowsParams {
  core::CompressArgs args;
  cuda::FastDivisor append_page_size;  // of the cache of args.append
};

template <CompressedRow kRow>
struct CompressRowsKernel {
  using Params = CompressRowsParams;
  using Args = core::CompressArgs;
  using Keys = AppendGroupsKernel<DType::kE4M3, core::AppendRopeArgs>;
  static constexpr const char* kName = kRow == CompressedRow::kNone     ? "compress_keep"
                                       : kRow == CompressedRow::kKey    ? "compress_keys"
                                       : kRow == CompressedRow::kJoined ? "compress_joined_rows"
                                       : kRow == CompressedRow::kParted ? "compress_rows"
                                                                        : "compress_plain_rows";
  static constexpr int kThreads = 128;
  static constexpr int kMinBlocks = 4;

  /// Says whether the kernel appends keys. Where latents do not turn it does not: no model has such layers.
  static constexpr bool kTakesKeys = kRow == CompressedRow::kJoined || kRow == CompressedRow::kParted;

  /// Returns whether it appends these.
  static bool takes(const core::AppendRopeArgs& append) {
    return kTakesKeys && append.num_heads == 0 && Keys::takes(append);
  }

  /// Returns how many keys, with a warp each, are appended.
  static constexpr int64_t num_keys(const Args& args) { return kTakesKeys ? args.append.num_tokens : 0; }

  /// Returns for how many requests, with a warp each, the first group is appended. Where each token is a group, all are
  /// among the others.
  static constexpr int32_t num_requests(const Args& args) { return args.ratio > 1 ? args.batch_size : 0; }

  /// Returns for how many tokens, with a warp each, is decided whether they are kept.
  static constexpr int64_t num_kept(const Args& args) { return args.state != nullptr ? args.num_tokens : 0; }

  /// Returns the number of warps.
  static constexpr int64_t num_warps(const Args& args) {
    const int64_t groups = (args.num_tokens + args.ratio - 1) / args.ratio;
    return num_keys(args) + num_kept(args) + (kRow != CompressedRow::kNone ? num_requests(args) + groups : 0);
  }

  static MLA_DEVICE void run(const Params& params) {
    ptx::allow_next_grid();  // lets attention over these rows start, up to its wait for them
    const Args& args = params.args;
    int64_t unit = int64_t{ptx::block_index_x()} * (kThreads / kWarpSize) + ptx::warp();
    if constexpr (kTakesKeys) {
      if (unit < num_keys(args)) {
        Keys::append_token(args.append, params.append_page_size, static_cast<int32_t>(unit));
        return;
      }
      unit -= num_keys(args);
    }
    // The first kernel makes the latents, and reads the tokens that others replace. All other warps wait for it, so
    // that this kernel does not end before it.
    if (unit < num_kept(args)) {
      const KeptToken kept = kept_token(args, unit);
      ptx::wait_for_previous_grid();
      if (kept.state != nullptr) keep(args, unit, kept);
      return;
    }
    const Group group = kRow != CompressedRow::kNone ? group_of(args, unit - num_kept(args)) : Group();
    const int64_t token = group.last >= 0 ? group.tokens.token(group.last) : -1;
    const int64_t slot = token >= 0 ? args.slot_mapping[token] : -1;
    ptx::wait_for_previous_grid();
    if (slot >= 0) append(args, token, group.last - args.ratio + 1, slot);
  }

 private:
  /// Gives what is kept of a token: latents as they are, or scores with the bias of their position.
  struct KeptChannels {
    Channels x, bias;  // without data is no bias

    static constexpr int kBatch = 2;
    struct Fetched {
      Bits8 x, bias;
    };
    MLA_DEVICE float operator()(int32_t c) const { return bias.data != nullptr ? x(c) + bias(c) : x(c); }
    MLA_DEVICE int32_t vector_channels(int32_t n) const { return x.vector_channels(n); }
    MLA_DEVICE Fetched fetch(int32_t c) const {
      return {.x = x.fetch(c).bits, .bias = bias.data != nullptr ? bias.fetch(c).bits : Bits8{}};
    }
    MLA_DEVICE void decode(const Fetched& fetched, float (&values)[kVector]) const {
      decode8(fetched.x, x.dtype, values);
      if (bias.data == nullptr) return;
      float biases[kVector];
      decode8(fetched.bias, DType::kF32, biases);
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[i] += biases[i];
    }
  };

  /// Says where a token is kept, and at which position it stands; `state` is null for one that is not kept.
  struct KeptToken {
    float* state = nullptr;
    int64_t position = 0;
  };

  /// A token is kept if the state has room for it beside those behind it.
  static MLA_DEVICE KeptToken kept_token(const Args& args, int64_t token) {
    NewTokens tokens;
    if (!find_request(args, token, tokens)) return {};
    const int64_t position = tokens.position(token);
    if (position < 0 || tokens.end - token > args.capacity()) return {};
    return {.state = state_of(args, tokens.request, position), .position = position};
  }

  static MLA_DEVICE void keep(const Args& args, int64_t token, const KeptToken& kept) {
    const float* bias = args.position_bias;
    if (bias != nullptr) {
      const auto row = static_cast<int32_t>(static_cast<uint32_t>(kept.position) % static_cast<uint32_t>(args.ratio));
      bias += row * args.position_bias_stride_position;
    }
    MLA_NO_UNROLL
    for (int part = 0; part < 2; ++part) {  // latents, then scores: not unrolled, which halves the code
      const bool is_score = part == 1;
      const auto* const from = static_cast<const std::byte*>(is_score ? args.score : args.kv);
      const int64_t element = token * (is_score ? args.score_stride_token : args.kv_stride_token);
      const KeptChannels source = {
          .x = {.data = from + element * static_cast<int64_t>(size_of(args.dtype)), .dtype = args.dtype},
          .bias = {.data = is_score ? reinterpret_cast<const std::byte*>(bias) : nullptr, .dtype = DType::kF32}};
      write_channels(source, args.width(), Encoder(DType::kF32),
                     reinterpret_cast<std::byte*>(kept.state + part * args.width()));
    }
  }

  /// Returns the group that a warp appends; none if `last` is negative.
  static MLA_DEVICE Group group_of(const Args& args, int64_t unit) {
    const int64_t token = (unit - num_requests(args)) * args.ratio;
    if (token >= args.num_tokens) return {};
    if (token >= 0) return later_group(args, token, args.ratio > 1 ? 1 : 0);
    const NewTokens tokens = NewTokens::of(args, static_cast<int32_t>(unit));
    const int64_t last = first_end(args, tokens);
    return {.tokens = tokens, .last = last < tokens.end_position() ? last : -1};
  }

  static MLA_DEVICE void append(const Args& args, int64_t token, int64_t position, int64_t slot) {
    constexpr bool kToIndexer = kRow == CompressedRow::kKey;
    const int64_t num_slots = kToIndexer ? args.indexer.num_pages * args.indexer.page_size : args.cache.num_slots();
    if (slot >= num_slots || (args.d_rotary > 0 && position >= args.max_positions)) return;
    const auto bytes = static_cast<int64_t>(size_of(args.latent_dtype));
    const std::byte* const from = static_cast<const std::byte*>(args.latent) + token * args.latent_stride_token * bytes;
    const Channels latent = {.data = from, .dtype = args.latent_dtype};
    const int32_t num_plain = args.d_latent - args.d_rotary;
    const Rotated<Channels> rotated = {
        .pe = {.data = from + num_plain * bytes, .dtype = args.latent_dtype},
        .dim = args.d_rotary,
        .cos_sin = args.d_rotary > 0 ? args.cos_sin + position * args.cos_sin_stride_position : nullptr,
        .interleaved = args.interleaved};
    if constexpr (kToIndexer) {
      write_indexer_key(args.indexer, slot, RowWithRotated<Channels>{latent, rotated, num_plain},
                        args.power_of_two_scales);
    } else if constexpr (kRow == CompressedRow::kJoined) {
      write_joined_row<true>(CacheRow::at_slot(args.cache, slot), latent, rotated);
    } else if constexpr (kRow == CompressedRow::kParted) {
      write_parted_row(CacheRow::at_slot(args.cache, slot), latent, rotated);
    } else {
      const CacheRow row = CacheRow::at_slot(args.cache, slot);
      const Channels kpe = {.data = from + args.cache.d_ckv * bytes, .dtype = args.latent_dtype};
      if (args.cache.writes_scales)
        write_row<RowWay::kGrouped>(row, true, latent, true, kpe);
      else
        write_row<RowWay::kConverted>(row, true, latent, true, kpe);
    }
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE
