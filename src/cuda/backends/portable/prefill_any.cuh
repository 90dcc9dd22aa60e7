// SPDX-License-Identifier: Apache-2.0
// This kernel computes up-projected prefill of what the tensor cores do not take: f32, e4m3, and other head dims. It is
// simple, not fast.
//
// Grid: x = ceil(T / kWarps), y, z = heads; a warp computes one query row. Scores: a lane has one key of 32. Values: a
// lane has kColumns / 32 channels, and rows wider than kColumns are computed in several passes. It uses no shared
// memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

#include "core/args.h"
#include "cuda/border/launch.h"
#include "cuda/ptx/ptx.h"
#include "cuda/tile/finish.cuh"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/query_block.cuh"
#include "cuda/tile/scalar.cuh"
#include "cuda/tile/search.cuh"
#include "cuda/tile/softmax.cuh"

namespace mla::MLA_CUDA_NAMESPACE::portable {

template <DType kType>
class PrefillAnyKernel {
 public:
  using Params = core::PrefillArgs;
  static constexpr const char* kName = "prefill_any";
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kMinBlocks = 4;

  static MLA_DEVICE void run(const Params& args) {
    const int head = ptx::block_index_z() * kMaxGridY + ptx::block_index_y();
    const int64_t token = int64_t{ptx::block_index_x()} * kWarps + ptx::warp();
    if (head >= args.num_heads || token >= args.num_tokens) return;
    const int32_t request = find_range(args.qo_indptr, args.batch_size, token);
    if (request < 0) return;  // the row pads the batch
    const int first_key = args.kv_indptr[request], kv_len = args.kv_indptr[request + 1] - first_key;
    const int rows_left = args.qo_indptr[request + 1] - static_cast<int>(token);
    const QueryBlock row = {.first_token = static_cast<int>(token),
                            .first_key = first_key,
                            .rows = 1,
                            .position = kv_len - rows_left,
                            .kv_len = kv_len};
    for (int column = 0; column < args.d_v; column += kColumns) attend(args, row, head, column);
  }

 private:
  static constexpr int kColumns = 256;
  static constexpr int kLaneColumns = kColumns / kWarpSize;

  // Of the scales, e4m3 tensors have all, and others none.
  static MLA_DEVICE float score_scale(const Params& args) {
    return kType == DType::kE4M3 ? args.sm_scale * *args.q_scale * *args.k_scale : args.sm_scale;
  }
  static MLA_DEVICE float o_factor(const Params& args) {
    return (kType == DType::kE4M3 ? *args.v_scale : 1.0F) * inverse_o_scale(args.o_scale);
  }

  /// Returns the base-2 logit of a key.
  static MLA_DEVICE float score(const Params& args, const QueryBlock& row, int head, int key) {
    const int64_t q = row.first_token * args.q_stride_token + head * args.q_stride_head;
    const int64_t k = (row.first_key + key) * args.k_stride_token + head * args.k_stride_head;
    float s = 0.0F;
    for (int c = 0; c < args.d_qk; ++c) s += load_element(args.q, kType, q + c) * load_element(args.k, kType, k + c);
    const core::Options& options = args.options;
    s *= score_scale(args);
    const float cap = options.logits_soft_cap;
    if (cap != 0.0F) s = soft_capped(s / cap * kSoftCapExponent, cap);
    if (options.alibi_slopes != nullptr) s += options.alibi_slopes[head] * static_cast<float>(key - row.position);
    return s * std::numbers::log2e_v<float>;
  }

  /// Computes channels first_column ... first_column + kColumns - 1 of the output.
  static MLA_DEVICE void attend(const Params& args, const QueryBlock& row, int head, int first_column) {
    const KeyRange keys = visible_keys(row.position, row.kv_len, args.causal, args.options.window_left);
    const int lane_column = first_column + ptx::lane();
    ScoreState state;
    float o[kLaneColumns] = {};
    for (int first = keys.begin; first < keys.end; first += kWarpSize) {
      const int key = first + ptx::lane();
      const float s = key < keys.end ? score(args, row, head, key) : kNoKey;
      const float largest = warp_max(s);
      if (state.is_outgrown_by(largest, 0.0F)) {
        const float factor = state.raise(largest);
        MLA_UNROLL
        for (float& value : o) value *= factor;
      }
      const float p = ptx::exp2_approx(s - state.base());
      state.sum += p;
      const int count = keys.end - first < kWarpSize ? keys.end - first : kWarpSize;
      for (int j = 0; j < count; ++j) {
        const float p_of_key = ptx::shuffle(p, j);
        const int64_t v = int64_t{row.first_key + first + j} * args.v_stride_token + head * args.v_stride_head;
        MLA_UNROLL
        for (int i = 0; i < kLaneColumns; ++i) {
          const int column = lane_column + i * kWarpSize;
          if (column < args.d_v) o[i] += p_of_key * load_element(args.v, kType, v + column);
        }
      }
    }
    const FinishedRow finished =
        finish_row(state.max, warp_sum(state.sum), load_sink(args.options, head), o_factor(args), args.lse_form);
    if (args.lse != nullptr && ptx::lane() == 0)
      args.lse[row.first_token * args.lse_stride_token + head * args.lse_stride_head] = finished.lse;
    const int64_t offset = row.first_token * args.o_stride_token + head * args.o_stride_head;
    MLA_UNROLL
    for (int i = 0; i < kLaneColumns; ++i) {
      const int column = lane_column + i * kWarpSize;
      if (column < args.d_v) store_element(args.o, args.o_dtype, offset + column, o[i] * finished.o_factor);
    }
  }

  static MLA_DEVICE float warp_max(float value) {
    for (int mask = kWarpSize / 2; mask > 0; mask /= 2) value = std::fmax(value, ptx::shuffle_xor(value, mask));
    return value;
  }
  static MLA_DEVICE float warp_sum(float value) {
    for (int mask = kWarpSize / 2; mask > 0; mask /= 2) value += ptx::shuffle_xor(value, mask);
    return value;
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::portable
