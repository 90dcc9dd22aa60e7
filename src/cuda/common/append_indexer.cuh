// SPDX-License-Identifier: Apache-2.0
// append_indexer writes one key of 128 channels per token, quantized, into its slot of the indexer's cache.
//
// The grid has a warp per token.
#pragma once

#include <cstdint>

#include "core/args.h"
#include "cuda/ptx/ptx.h"
#include "cuda/tile/indexer_key.cuh"
#include "cuda/tile/scalar.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

struct AppendIndexerKernel {
  using Params = core::AppendIndexerArgs;
  static constexpr const char* kName = "append_indexer";
  static constexpr int kThreads = 128;
  static constexpr int kMinBlocks = 1;
  static constexpr int kTokens = kThreads / kWarpSize;  // tokens of a block

  static MLA_DEVICE void run(const Params& args) {
    const int64_t token = int64_t{ptx::block_index_x()} * kTokens + ptx::warp();
    if (token >= args.num_tokens) return;
    const int64_t slot = args.slot_mapping[token];
    if (slot < 0) return;
    write_indexer_key(
        args.cache, slot, [&](int32_t c) { return load_element(args.k, args.dtype, token * args.k_stride_token + c); },
        args.power_of_two_scales);
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE
