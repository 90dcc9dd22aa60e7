// SPDX-License-Identifier: Apache-2.0
// These kernels measure what a GPU can do at best (border/ceilings.h):
//   read, copy   8 loads of 16 bytes in flight per thread, past L1
//   mma          8 warps a block, 2 blocks an SM; 8 accumulators per warp hide the latency of mma.sync, on bf16 or e4m3
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

/// Returns random bits.
MLA_DEVICE uint32_t random_bits(uint32_t seed) {
  uint32_t bits = seed * 0x9E3779B9U + 0x7F4A7C15U;
  bits ^= bits >> 15;
  bits *= 0x85EBCA6BU;
  return bits ^ bits >> 13;
}

/// Multiplies bf16 by m16n8k16.
struct MmaOfBf16 {
  static constexpr const char* kName = "mma_ceiling";
  static constexpr double kFlops = 2.0 * 16 * 8 * 16;  // floating-point operations of one mma
  // Signs and mantissas are random, exponents are those of 1 to 2.
  static constexpr uint32_t kRandom = 0x807F807FU, kFixed = 0x3F803F80U;
  static constexpr int kSetsOfB = 2;
  static constexpr bool kChangesB = false;

  static MLA_DEVICE void multiply(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    ptx::mma_bf16(sums, a, b[0], b[1]);
  }
};

/// Multiplies e4m3 by m16n8k32. It is a template, so that it is compiled only where it is used: from SM89 on. Where
/// ptxas makes several instructions of it (border/ceilings.h), it leaves out products that it has already: so that
/// there are none, each chain has operands of its own, and they change from round to round.
template <int kOn = kArch>
struct MmaOfE4M3 {
  static constexpr const char* kName = "mma_e4m3_ceiling";
  static constexpr double kFlops = 2.0 * 16 * 8 * 32;
  static constexpr uint32_t kRandom = 0x87878787U, kFixed = 0x38383838U;
  static constexpr int kSetsOfB = 4;
  static constexpr bool kChangesB = true;

  static MLA_DEVICE void multiply(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    ptx::mma_e4m3<kOn>(sums, a, b[0], b[1]);
  }
};

/// Returns random numbers of the type that `Mma` multiplies, as many as a register holds.
template <class Mma>
MLA_DEVICE uint32_t random_numbers(uint32_t seed) {
  return (random_bits(seed) & Mma::kRandom) | Mma::kFixed;
}

template <class Mma>
struct MmaCeilingKernel {
  using Params = MultiplyParams;
  static constexpr const char* kName = Mma::kName;
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 2;
  static constexpr int kChains = 8;  // independent accumulators of a warp
  static constexpr double kFlops = Mma::kFlops;

  static MLA_DEVICE void multiply(float (&sums)[kChains][4], const uint32_t (&a)[2][4],
                                  const uint32_t (&b)[Mma::kSetsOfB][2]) {
    MLA_UNROLL
    for (int chain = 0; chain < kChains; ++chain)
      Mma::multiply(sums[chain], a[chain & 1], b[(chain >> 1) % Mma::kSetsOfB]);
  }

  static MLA_DEVICE void run(const Params& params) {
    uint32_t a[2][4], b[Mma::kSetsOfB][2];
    const auto seed = 32 * static_cast<uint32_t>(ptx::block_index_x() * kThreads + ptx::thread_index());
    MLA_UNROLL
    for (int i = 0; i < 2 * 4; ++i) a[i / 4][i % 4] = random_numbers<Mma>(seed + static_cast<uint32_t>(i));
    MLA_UNROLL
    for (int i = 0; i < Mma::kSetsOfB * 2; ++i)
      b[i / 2][i % 2] = random_numbers<Mma>(seed + static_cast<uint32_t>(16 + i));
    float sums[kChains][4] = {};
    if constexpr (Mma::kChangesB) {
      MLA_NO_UNROLL  // unrolled, it spilled on SM90 and SM100 (nvcc 13.0)
          for (int32_t round = 0; round < params.rounds; ++round) {
        const uint32_t change = static_cast<uint32_t>(round) * 0x9E3779B9U & Mma::kRandom;
        MLA_UNROLL
        for (int i = 0; i < Mma::kSetsOfB * 2; ++i) b[i / 2][i % 2] ^= change;
        multiply(sums, a, b);
      }
    } else {
      for (int32_t round = 0; round < params.rounds; ++round) multiply(sums, a, b);
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
      ptx::store_shared(shared + 4 * static_cast<uint32_t>(i), random_numbers<MmaOfBf16>(static_cast<uint32_t>(i)));
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
