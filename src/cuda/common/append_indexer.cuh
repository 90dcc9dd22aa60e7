// SPDX-License-Identifier: Apache-2.0
// append_indexer writes one key of 128 channels per token, quantized to e4m3 with one scale, into its slot of the
// indexer's cache.
//
// The grid has a warp per token. Lane l has channels l, l + 32, ..., so that the loads and stores of a warp are
// contiguous at any alignment of rows and pages.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/args.h"
#include "cuda/ptx/ptx.h"
#include "cuda/tile/scalar.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

struct AppendIndexerKernel {
  using Params = core::AppendIndexerArgs;
  static constexpr const char* kName = "append_indexer";
  static constexpr int kThreads = 128;
  static constexpr int kMinBlocks = 1;
  static constexpr int kTokens = kThreads / kWarpSize;  // tokens of a block

  static MLA_DEVICE void run(const Params& args) {
    constexpr int kEach = kIndexerLayout.head_dim / kWarpSize;
    const int64_t token = int64_t{ptx::block_index_x()} * kTokens + ptx::warp();
    if (token >= args.num_tokens) return;
    const int64_t slot = args.slot_mapping[token];
    if (slot < 0) return;
    const int64_t page = slot / args.cache.page_size, offset = slot % args.cache.page_size;

    float k[kEach];
    float largest = 0.0F;  // of the finite channels only: infinities and NaN do not affect the scale
    for (int i = 0; i < kEach; ++i) {
      k[i] = load_element(args.k, args.dtype, token * args.k_stride_token + ptx::lane() + i * kWarpSize);
      if (is_finite(k[i])) largest = std::max(largest, magnitude(k[i]));
    }
    for (int mask = kWarpSize / 2; mask > 0; mask /= 2) largest = std::max(largest, ptx::shuffle_xor(largest, mask));
    const float scale = args.power_of_two_scales ? e4m3_power_of_two_scale(largest) : e4m3_scale(largest);

    auto* const key = reinterpret_cast<uint8_t*>(args.cache.key(page, offset));
    for (int i = 0; i < kEach; ++i) key[ptx::lane() + i * kWarpSize] = to_e4m3(k[i], scale);
    if (ptx::lane() == 0) store_f32_anywhere(args.cache.scale(page, offset), scale);
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE
