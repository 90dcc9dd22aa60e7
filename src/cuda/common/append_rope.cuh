// SPDX-License-Identifier: Apache-2.0
// append_rope normalizes queries and keys, rotates their rotary channels, converts queries, and quantizes and appends
// keys, in one pass. It is bound by memory.
//   grid    warps stride over rows: num_heads query rows of a token, then its key; a block is 8 warps that share
//           nothing
//   memory  each lane moves 16 bytes per access; no shared memory
#pragma once

#include "cuda/border/launch.h"
#include "cuda/tile/normalized.cuh"
#include "cuda/tile/rotated_rows.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// kNormalizes is core::AppendRopeArgs::normalizes().
template <bool kNormalizes>
struct AppendRopeKernel {
  using Params = core::AppendRopeArgs;
  static constexpr const char* kName = kNormalizes ? "append_rope_norm" : "append_rope";
  static constexpr int kThreads = 256;
  // The kernel asks for as many blocks per SM as the registers allow without spills.
  static constexpr int kMinBlocks = kNormalizes || kArch >= 100 ? 1 : 2;

  static MLA_DEVICE void run(const Params& args) {
    ptx::allow_next_grid();  // lets attention over these rows start, up to its wait for them
    // Where query_rows writes the queries, this kernel starts beside it, and needs nothing of it.
    constexpr int kWarps = kThreads / kWarpSize;
    const int64_t step = int64_t{kWarps} * ptx::grid_size_x();
    const int64_t rows_per_token = int64_t{args.num_heads} + 1, rows = args.num_tokens * rows_per_token;
    for (int64_t row = int64_t{kWarps} * ptx::block_index_x() + ptx::warp(); row < rows; row += step) {
      const int64_t token =
          row <= INT32_MAX ? static_cast<uint32_t>(row) / static_cast<uint32_t>(rows_per_token) : row / rows_per_token;
      const int64_t head = row - token * rows_per_token;
      write_row(args, token, head);
    }
    ptx::wait_for_previous_grid();  // so that this kernel does not end before the one that writes the queries
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
    const Channels pe =
        is_key ? channels(args.kpe, args.dtype, token * args.kpe_stride_token)
               : channels(args.q_pe, args.q_dtype, token * args.q_pe_stride_token + head * args.q_pe_stride_head);
    const Channels nope =
        is_key ? channels(args.ckv, args.dtype, token * args.ckv_stride_token)
               : channels(args.q_nope, args.q_dtype, token * args.q_nope_stride_token + head * args.q_nope_stride_head);
    if constexpr (kNormalizes) {
      Normalized plain = {.x = {nope.data, nope.dtype}}, rotary = {.x = {pe.data, pe.dtype}};
      if (is_key ? args.norm_weight != nullptr : args.q_norm) {
        const int32_t num_plain = cache.d_plain();
        const int32_t n = is_key ? args.norm_channels : num_plain + cache.d_rotary();
        plain.normalizes = true;
        plain.factor = rotary.factor = norm_factor(plain.x, num_plain, rotary.x, n, args.norm_eps);
        rotary.normalizes = n > num_plain;
        const void* const weight = is_key ? args.norm_weight : args.q_norm_weight;
        const DType dtype = is_key ? args.norm_weight_dtype : args.q_norm_weight_dtype;
        if (weight != nullptr) {
          const auto bytes = static_cast<int64_t>(size_of(dtype));
          plain.weight = {static_cast<const std::byte*>(weight), dtype};
          rotary.weight = {plain.weight.data + num_plain * bytes, dtype};
        }
      }
      write_turned(args, token, head, slot, plain, rotary);
    } else {
      write_turned(args, token, head, slot, nope, pe);
    }
  }

  template <class Source>
  static MLA_DEVICE void write_turned(const Params& args, int64_t token, int64_t head, int64_t slot, const Source& nope,
                                      const Source& pe) {
    const core::Cache& cache = args.cache;
    const Rotated<Source> rotated = {
        .pe = pe, .dim = cache.d_rotary(), .cos_sin = args.angles(token), .interleaved = args.interleaved};
    const bool is_key = head == args.num_heads;
    const CacheRow row = CacheRow::at_slot(cache, slot);
    if (is_key && cache.rotary_in_ckv > 0) return write_joined_row<false>(row, nope, rotated);
    RowParts to;
    if (is_key) {
      to = RowParts::of(row);
    } else {
      const auto bytes = static_cast<int64_t>(size_of(args.q_out_dtype));
      to.plain = static_cast<std::byte*>(args.q_out) +
                 (token * args.q_out_stride_token + head * args.q_out_stride_head) * bytes;
      to.rotary = to.plain + cache.d_plain() * bytes;
      to.plain_dtype = to.rotary_dtype = args.q_out_dtype;
      to.plain_scale = to.rotary_scale = args.q_out_dtype == DType::kE4M3 ? *args.q_scale : 1.0F;
    }
    write_parts<false>(to, is_key, row, nope, rotated);
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE
