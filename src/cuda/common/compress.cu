// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/compress.cuh"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <utility>

#include "cuda/common/compress_rows.cuh"
#include "cuda/common/operations.h"
#include "cuda/common/rows_grid.h"

namespace mla::MLA_CUDA_NAMESPACE {
namespace {

template <class Kernel>
Status enqueue(const core::CompressArgs& args, int32_t team_warps, cuda::Queue& queue) {
  const int32_t num_teams = Kernel::kWarps / team_warps;
  const int64_t groups = (args.num_tokens + args.ratio - 1) / args.ratio;
  const int32_t num_request_blocks = groups_by_request(args) > 0 ? args.batch_size : 0;
  const int64_t blocks = num_request_blocks + (groups + num_teams - 1) / num_teams;
  return launch<Kernel>(queue, {.grid_x = static_cast<int32_t>(blocks), .shared_bytes = Kernel::kSharedBytes},
                        {.args = args, .num_request_blocks = num_request_blocks, .team_warps = team_warps});
}

/// Returns whether rows from `base` on, with strides of `strides` elements, have multiples of `channels` elements
/// aligned to so many.
bool rows_aligned(const void* base, DType dtype, int32_t channels, std::initializer_list<int64_t> strides) {
  if (base == nullptr) return true;
  const bool starts = reinterpret_cast<uintptr_t>(base) % (static_cast<size_t>(channels) * size_of(dtype)) == 0;
  return starts && std::all_of(strides.begin(), strides.end(), [&](int64_t n) { return n % channels == 0; });
}

bool is_aligned(const core::CompressArgs& args, int32_t channels) {
  return args.d_latent % channels == 0 && rows_aligned(args.kv, args.dtype, channels, {args.kv_stride_token}) &&
         rows_aligned(args.score, args.dtype, channels, {args.score_stride_token}) &&
         rows_aligned(args.position_bias, DType::kF32, channels, {args.position_bias_stride_position}) &&
         rows_aligned(args.state, DType::kF32, channels, {args.state_stride_block, args.state_stride_row}) &&
         rows_aligned(args.norm_weight, args.norm_weight_dtype, channels, {}) &&
         rows_aligned(args.latent, args.latent_dtype, channels, {args.latent_stride_token});
}

/// Enqueues the kernel that makes the latents.
template <bool kAligned>
Status make_latents(const core::CompressArgs& args, cuda::Queue& queue) {
  constexpr int32_t kManyTokens = 32, kMostPieces = 5;
  using Single = CompressKernel<kMostPieces, 0, 1, kAligned>;
  using Pairs = CompressKernel<2, 2, 1, kAligned>;
  using Usual = CompressKernel<1, 4, 1, kAligned>;
  using Many = CompressKernel<1, 4, 4, kAligned>;
  using Wide = CompressKernel<kMostPieces, 1, 1, false>;  // rare, so that there is one for all rows
  static_assert(kMostPieces * Wide::kWarpChannels == cuda::kMostPooledChannels);
  const int32_t pieces = (args.d_latent + Wide::kWarpChannels - 1) / Wide::kWarpChannels;
  if (args.span() == 1) return enqueue<Single>(args, 1, queue);
  if (pieces > Usual::kWarps) return enqueue<Wide>(args, 1, queue);
  if (args.span() == 2) return enqueue<Pairs>(args, pieces > 2 ? 2 : 1, queue);
  const int32_t team_warps = pieces == 3 ? 4 : pieces;
  return args.span() <= kManyTokens ? enqueue<Usual>(args, team_warps, queue) : enqueue<Many>(args, team_warps, queue);
}

/// Enqueues the kernel that appends them, and keeps new tokens.
template <CompressedRow kRow>
Status finish(const core::CompressArgs& args, cuda::Queue& queue) {
  using Kernel = CompressRowsKernel<kRow>;
  cuda::LaunchShape shape = cuda::warp_per_row(Kernel::num_warps(args), Kernel::kThreads);
  shape.overlaps_previous = true;
  return launch<Kernel>(queue, shape,
                        {.args = args, .append_page_size = cuda::FastDivisor(args.append.cache.page_size)});
}

/// Enqueues both kernels. What is appended beside the latents is the second kernel's work as far as that takes it; the
/// rest has kernels of its own in front.
template <CompressedRow kRow>
Status run_both(core::CompressArgs args, cuda::Queue& queue) {
  constexpr int32_t kTogether = 4;  // channels that a thread loads together
  if (args.appends()) {
    const core::AppendRopeArgs append = args.append;
    if (Status status = run_rope_queries(append, args.append, queue); !status.ok()) return status;
    if (!CompressRowsKernel<kRow>::takes(args.append)) {
      const core::AppendRopeArgs keys = std::exchange(args.append, {});
      Status status = run_rope_rest(keys, keys.num_heads < append.num_heads, queue);
      if (!status.ok()) return status;
    }
  }
  const Status status =
      is_aligned(args, kTogether) ? make_latents<true>(args, queue) : make_latents<false>(args, queue);
  if (!status.ok() || (kRow == CompressedRow::kNone && args.state == nullptr)) return status;
  return finish<kRow>(args, queue);
}

}  // namespace

Status run_compress(const core::CompressArgs& args, cuda::Queue& queue) {
  using To = core::CompressArgs::To;
  if (args.to == To::kLatents) return run_both<CompressedRow::kNone>(args, queue);
  if (args.to == To::kIndexer) return run_both<CompressedRow::kKey>(args, queue);
  if (args.d_rotary == 0) return run_both<CompressedRow::kPlain>(args, queue);
  return args.cache.rotary_in_ckv > 0 ? run_both<CompressedRow::kJoined>(args, queue)
                                      : run_both<CompressedRow::kParted>(args, queue);
}

}  // namespace mla::MLA_CUDA_NAMESPACE
