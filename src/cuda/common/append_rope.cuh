// SPDX-License-Identifier: Apache-2.0
// append_rope rotates the rotary channels of queries and keys, converts queries, and quantizes and appends keys, in one
// pass. It is bound by memory.
//   grid    warps stride over rows: num_heads query rows of a token, then its key; a block is 8 warps that share
//           nothing
//   memory  each lane moves 16 bytes per access; no shared memory
// The rotation is in f32 with every product and sum rounded separately, as on the CPU.
#pragma once

#include "cuda/border/launch.h"
#include "cuda/tile/cache_rows.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// This is a source, in the sense of cache_rows.cuh, of rotary channels rotated by the angles of their token's
/// position.
struct Rotated {
  Channels pe;
  int32_t dim;
  const float* cos_sin;  // dim / 2 cosines, then as many sines
  bool interleaved;

  static constexpr int kBatch = 1;
  struct Fetched {
    Bits8 own, partner;  // `partner` is not set where pairs are neighbouring channels
    Bits8 cos, sin;
    bool is_x;  // whether the lane's channels are x of their pairs, or y; only set with `partner`
  };

  static MLA_DEVICE float product(float a, float b) { return settle_nan(ptx::mul_rn(a, b), a, b); }
  /// A pair (x, y) is rotated into (x cos - y sin, x sin + y cos). Returns the one of the two that replaces `own`.
  static MLA_DEVICE float turned(float own, float partner, float cos, float sin, bool own_is_x) {
    const float a = product(own, cos), b = product(partner, sin);
    return own_is_x ? settle_nan(ptx::add_rn(a, -b), a, b) : settle_nan(ptx::add_rn(b, a), b, a);
  }

  MLA_DEVICE float operator()(int32_t c) const {
    const int32_t half = dim / 2;
    const int32_t angle = interleaved ? c / 2 : c < half ? c : c - half;
    const bool is_x = interleaved ? c % 2 == 0 : c < half;
    const int32_t to_partner = (interleaved ? 1 : half) * (is_x ? 1 : -1);
    return turned(pe(c), pe(c + to_partner), cos_sin[angle], cos_sin[half + angle], is_x);
  }

  MLA_DEVICE int32_t vector_channels(int32_t n) const {
    if (interleaved) return n / kVector * kVector;
    return dim / 2 % kVector == 0 ? n : 0;
  }

  MLA_DEVICE Fetched fetch(int32_t c) const {
    const int32_t half = dim / 2;
    Fetched fetched = {};
    fetched.own = pe.fetch(c).bits;
    if (interleaved) {
      fetched.cos = load_four(cos_sin + c / 2);
      fetched.sin = load_four(cos_sin + half + c / 2);
    } else {
      const int32_t angle = c < half ? c : c - half;
      fetched.partner = pe.fetch(c < half ? c + half : angle).bits;
      fetched.cos = load_bits8(reinterpret_cast<const std::byte*>(cos_sin + angle), 4);
      fetched.sin = load_bits8(reinterpret_cast<const std::byte*>(cos_sin + half + angle), 4);
    }
    fetched.is_x = c < half;
    return fetched;
  }

  MLA_DEVICE void decode(const Fetched& fetched, float (&values)[kVector]) const {
    float own[kVector], partner[kVector];
    decode8(fetched.own, pe.dtype, own);
    if (interleaved) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) partner[i] = own[i ^ 1];
    } else {
      decode8(fetched.partner, pe.dtype, partner);
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const uint32_t cos = interleaved ? fetched.cos.w[i / 2] : fetched.cos.w[i];
      const uint32_t sin = interleaved ? fetched.sin.w[i / 2] : fetched.sin.w[i];
      values[i] = turned(own[i], partner[i], std::bit_cast<float>(cos), std::bit_cast<float>(sin),
                         interleaved ? i % 2 == 0 : fetched.is_x);
    }
  }

 private:
  static MLA_DEVICE Bits8 load_four(const float* from) {
    Bits8 bits = {};
    if (is_aligned(from, 16)) {
      const ptx::Vec4 v = ptx::load_global(reinterpret_cast<const ptx::Vec4*>(from));
#pragma unroll
      for (int i = 0; i < 4; ++i) bits.w[i] = v.x[i];
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) bits.w[i] = std::bit_cast<uint32_t>(from[i]);
    }
    return bits;
  }
};

/// Gives rotary channels whose scale is chosen. They are rounded to bf16 before, as the formats' own writers do.
struct RoundedRotated {
  const Rotated& rotated;

  MLA_DEVICE float operator()(int32_t c) const { return bf16_to_f32(f32_to_bf16(rotated(c))); }
};

/// Gives the channels of a row whose latent part ends with the rotary channels.
struct RowWithRotated {
  const Channels& plain;
  const Rotated& rotated;
  int32_t num_plain;

  MLA_DEVICE float operator()(int32_t c) const {
    return c < num_plain ? plain(c) : RoundedRotated{rotated}(c - num_plain);
  }
};

struct AppendRopeKernel {
  using Params = core::AppendRopeArgs;
  static constexpr const char* kName = "append_rope";
  static constexpr int kThreads = 256;
  // The kernel asks for as many blocks per SM as the registers allow without spills.
  static constexpr int kMinBlocks = kArch >= 100 ? 1 : 2;

  static MLA_DEVICE void run(const Params& args) {
    ptx::allow_next_grid();  // lets attention over these rows start, up to its wait for them
    constexpr int kWarps = kThreads / kWarpSize;
    const int64_t step = int64_t{kWarps} * ptx::grid_size_x();
    const int64_t rows_per_token = int64_t{args.num_heads} + 1, rows = args.num_tokens * rows_per_token;
    for (int64_t row = int64_t{kWarps} * ptx::block_index_x() + ptx::warp(); row < rows; row += step) {
      const int64_t token =
          row <= INT32_MAX ? static_cast<uint32_t>(row) / static_cast<uint32_t>(rows_per_token) : row / rows_per_token;
      const int64_t head = row - token * rows_per_token;
      write_row(args, token, head);
    }
  }

 private:
  static MLA_DEVICE Channels channels(const void* base, DType dtype, int64_t first) {
    return {.data = static_cast<const std::byte*>(base) + first * static_cast<int64_t>(size_of(dtype)), .dtype = dtype};
  }

  /// Writes query row `head` of a token; the `head` behind the last stands for the token's key.
  static MLA_DEVICE void write_row(const Params& args, int64_t token, int64_t head) {
    const core::Cache& cache = args.cache;
    const bool is_key = head == args.num_heads;
    const int64_t slot = is_key ? args.slot_mapping[token] : 0;
    if (is_key && (slot < 0 || slot >= cache.num_slots())) return;
    const CacheRow row = CacheRow::at_slot(cache, slot);  // used for a key only
    const DType pe_dtype = is_key ? cache.kpe_dtype : args.q_out_dtype;
    const DType nope_dtype = is_key ? cache.ckv_dtype : args.q_out_dtype;
    const auto out_bytes = static_cast<int64_t>(size_of(args.q_out_dtype));
    std::byte* query = static_cast<std::byte*>(args.q_out) +
                       (token * args.q_out_stride_token + head * args.q_out_stride_head) * out_bytes;
    const Encoder encode =
        is_key ? kpe_encoder(cache) : Encoder(pe_dtype, pe_dtype == DType::kE4M3 ? *args.q_scale : 1.0F);

    const Rotated rotated = {
        .pe = is_key ? channels(args.kpe, args.dtype, token * args.kpe_stride_token)
                     : channels(args.q_pe, args.q_dtype, token * args.q_pe_stride_token + head * args.q_pe_stride_head),
        .dim = cache.d_rotary(),
        .cos_sin = args.cos_sin + args.positions[token] * args.cos_sin_stride_position,
        .interleaved = args.interleaved};
    const int32_t num_plain = cache.d_plain();
    const bool joined = is_key && cache.rotary_in_ckv > 0;
    if (is_key && cache.writes_kpe_scale())
      write_scaled_kpe(row, RoundedRotated{rotated});
    else if (!joined)
      write_channels(rotated, rotated.dim, encode, is_key ? row.of(cache.kpe) : query + num_plain * out_bytes);

    const Channels nope =
        is_key ? channels(args.ckv, args.dtype, token * args.ckv_stride_token)
               : channels(args.q_nope, args.q_dtype, token * args.q_nope_stride_token + head * args.q_nope_stride_head);
    std::byte* nope_out = is_key ? row.of(cache.ckv) : query;
    if (joined) {
      write_odd_groups(row, RowWithRotated{nope, rotated, num_plain}, cache.channels_per_scale);
    } else if (nope.dtype == nope_dtype) {
      const int64_t bytes = num_plain * static_cast<int64_t>(size_of(nope_dtype));
      copy_pieces({nope_out, nope.data, bytes}, {});
    } else if (is_key && cache.writes_scales) {
      write_groups(row, nope);
    } else {
      write_channels(nope, num_plain, is_key ? ckv_encoder(row) : encode, nope_out);
    }
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE
