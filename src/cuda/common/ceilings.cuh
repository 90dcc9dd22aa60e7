// SPDX-License-Identifier: Apache-2.0
// These kernels measure what a GPU can do at best (border/ceilings.h):
//   read, copy   8 loads of 16 bytes in flight per thread, past L1
//   mma          8 warps a block, 2 blocks an SM; 8 accumulators per warp hide the latency of mma.sync
//   wgmma        2 warpgroups an SM take turns, 16 multiplications of m64n256k16 each; operands stay in shared memory
//                (12 KB)
// Values have random mantissas and signs, because multiplying zeros draws less power and so runs at higher clocks.
#pragma once

#include "cuda/border/launch.h"
#include "cuda/ptx/ptx.h"
#include "cuda/ptx/wgmma.h"

namespace mla::MLA_CUDA_NAMESPACE {

inline constexpr int kCeilingUnroll = 8;

struct ReadParams {
  const ptx::Vec4* data;
  int64_t count;  // number of 16-byte vectors
  uint32_t* sink;
};

struct ReadCeilingKernel {
  using Params = ReadParams;
  static constexpr const char* kName = "read_ceiling";
  static constexpr int kThreads = 512;
  static constexpr int kMinBlocks = 2;

  static MLA_DEVICE void run(const Params& params) {
    const int64_t step = int64_t{kThreads} * ptx::grid_size_x();
    int64_t at = int64_t{kThreads} * ptx::block_index_x() + ptx::thread_index();
    uint32_t folded = 0;
    for (; at + (kCeilingUnroll - 1) * step < params.count; at += kCeilingUnroll * step) {
      ptx::Vec4 values[kCeilingUnroll];
      MLA_UNROLL
      for (int i = 0; i < kCeilingUnroll; ++i) values[i] = ptx::load_once(params.data + at + i * step);
      MLA_UNROLL
      for (int i = 0; i < kCeilingUnroll; ++i)
        folded |= values[i].x[0] ^ values[i].x[1] ^ values[i].x[2] ^ values[i].x[3];
    }
    for (; at < params.count; at += step) folded |= ptx::load_once(params.data + at).x[0];
    // The buffer holds only even words, so that `folded` is never odd: the store never happens, but the compiler cannot
    // drop the loads.
    if ((folded & 1U) != 0) *params.sink = folded;
  }
};

struct CopyParams {
  ptx::Vec4* to;
  const ptx::Vec4* from;
  int64_t count;  // number of 16-byte vectors
};

struct CopyCeilingKernel {
  using Params = CopyParams;
  static constexpr const char* kName = "copy_ceiling";
  static constexpr int kThreads = 512;
  static constexpr int kMinBlocks = 2;

  static MLA_DEVICE void run(const Params& params) {
    const int64_t step = int64_t{kThreads} * ptx::grid_size_x();
    int64_t at = int64_t{kThreads} * ptx::block_index_x() + ptx::thread_index();
    for (; at + (kCeilingUnroll - 1) * step < params.count; at += kCeilingUnroll * step) {
      ptx::Vec4 values[kCeilingUnroll];
      MLA_UNROLL
      for (int i = 0; i < kCeilingUnroll; ++i) values[i] = ptx::load_once(params.from + at + i * step);
      MLA_UNROLL
      for (int i = 0; i < kCeilingUnroll; ++i) ptx::store_streaming(params.to + at + i * step, values[i]);
    }
    for (; at < params.count; at += step) ptx::store_streaming(params.to + at, ptx::load_once(params.from + at));
  }
};

struct MultiplyParams {
  int32_t rounds;
  uint32_t* sink;
};

/// Returns two bf16 with random signs and mantissas and magnitudes from 1 to 2.
MLA_DEVICE uint32_t random_bf16x2(uint32_t seed) {
  uint32_t bits = seed * 0x9E3779B9U + 0x7F4A7C15U;
  bits ^= bits >> 15;
  bits *= 0x85EBCA6BU;
  bits ^= bits >> 13;
  return (bits & 0x807F807FU) | 0x3F803F80U;
}

struct MmaCeilingKernel {
  using Params = MultiplyParams;
  static constexpr const char* kName = "mma_ceiling";
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 2;
  static constexpr int kChains = 8;                    // independent accumulators of a warp
  static constexpr double kFlops = 2.0 * 16 * 8 * 16;  // floating-point operations of one mma

  static MLA_DEVICE void run(const Params& params) {
    uint32_t a[2][4], b[2][2];
    const auto seed = static_cast<uint32_t>(ptx::block_index_x() * kThreads + ptx::thread_index());
    MLA_UNROLL
    for (int set = 0; set < 2; ++set) {
      MLA_UNROLL
      for (int i = 0; i < 4; ++i) a[set][i] = random_bf16x2(seed * 16 + static_cast<uint32_t>(set * 8 + i));
      MLA_UNROLL
      for (int i = 0; i < 2; ++i) b[set][i] = random_bf16x2(seed * 16 + static_cast<uint32_t>(set * 8 + 4 + i));
    }
    float sums[kChains][4] = {};
    for (int32_t round = 0; round < params.rounds; ++round) {
      MLA_UNROLL
      for (int chain = 0; chain < kChains; ++chain)
        ptx::mma_bf16(sums[chain], a[chain & 1], b[(chain >> 1) & 1][0], b[(chain >> 1) & 1][1]);
    }
    float total = 0;
    MLA_UNROLL
    for (int i = 0; i < kChains * 4; ++i) total += sums[i / 4][i % 4];
    // No sum of these products equals the constant, so that nothing is stored; but the compiler must compute the sums.
    if (total == 0.123456789F) *params.sink = 1;
  }
};

/// The kernel is a template, so that it is compiled only where it is used: where there is wgmma.
template <int kOn = kArch>
struct WgmmaCeilingKernel {
  using Params = MultiplyParams;
  static constexpr const char* kName = "wgmma_ceiling";
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 1;
  static constexpr int kWarpgroup = 128;
  static constexpr int kGroup = 16;                      // wgmma instructions between two waits
  static constexpr double kFlops = 2.0 * 64 * 256 * 16;  // floating-point operations of one wgmma
  // Operands are cores of 128 bytes (8 rows of 16 bytes), two along k. A [64, 16] of each warpgroup comes first, then B
  // [256, 16].
  static constexpr int kCoreBytes = 128, kRowStride = 2 * kCoreBytes;
  static constexpr int kABytes = 64 * 32, kBBytes = 256 * 32;
  static constexpr int kSharedBytes = kThreads / kWarpgroup * kABytes + kBBytes;

  static MLA_DEVICE void run(const Params& params) {
    const int thread = ptx::thread_index();
    const ptx::SharedAddress shared = ptx::shared_address(ptx::shared_memory());
    for (int i = thread; i < kSharedBytes / 4; i += kThreads)
      ptx::store_shared(shared + 4 * static_cast<uint32_t>(i), random_bf16x2(static_cast<uint32_t>(i)));
    ptx::fence_async_proxy();
    ptx::sync_block();
    const auto group = static_cast<uint32_t>(thread / kWarpgroup);
    const uint64_t a = ptx::matrix_descriptor(shared + group * kABytes, kCoreBytes, kRowStride);
    const uint64_t b = ptx::matrix_descriptor(shared + kThreads / kWarpgroup * kABytes, kCoreBytes, kRowStride);
    float sums[128] = {};
    for (int32_t round = 0; round < params.rounds; ++round) {
      ptx::wgmma_fence();
      MLA_UNROLL
      for (int i = 0; i < kGroup; ++i) ptx::wgmma_bf16<256>(sums, a, b, true);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
    }
    float total = 0;
    MLA_UNROLL
    for (int i = 0; i < 128; ++i) total += sums[i];
    if (total == 0.123456789F) *params.sink = 1;
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE
