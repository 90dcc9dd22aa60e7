// SPDX-License-Identifier: Apache-2.0
// Holds kernels for every form of wgmma, on operands in every layout.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda/ptx/ptx.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/ptx/wrapper_kernels.h"

namespace mla::MLA_CUDA_NAMESPACE {

/// Says how a tile of 16-bit elements, [rows, 64 channels], lies in shared memory for a swizzle; offsets are in bytes.
template <ptx::Swizzle kSwizzle, bool kTransposed>
struct TileLayout {
  static constexpr int kChannels = 64;
  /// Holds the bytes of a row of 16-byte units; without a swizzle a row is one unit.
  static constexpr int kRowBytes = kSwizzle == ptx::Swizzle::k128 ? 128 : kSwizzle == ptx::Swizzle::k64 ? 64 : 16;
  static constexpr int kCore = 8 * kRowBytes;

  static MLA_DEVICE uint32_t place(int rows, int row, int k) {
    constexpr int kElements = kRowBytes / 2;  // in a row of a core
    if constexpr (kTransposed) {
      const int core = row / kElements * (kChannels / 8) + k / 8;
      return swizzled(static_cast<uint32_t>(core * kCore + k % 8 * kRowBytes + row % kElements * 2));
    } else if constexpr (kSwizzle == ptx::Swizzle::kNone) {
      const int core = row / 8 * (kChannels / 8) + k / 8;
      return static_cast<uint32_t>(core * kCore + row % 8 * 16 + k % 8 * 2);
    } else {
      return swizzled(static_cast<uint32_t>((k / kElements * rows + row) * kRowBytes + k % kElements * 2));
    }
  }
  /// Returns the descriptor of channels 16 step ... 16 step + 15.
  static MLA_DEVICE uint64_t descriptor(ptx::SharedAddress tile, int rows, int step) {
    constexpr uint32_t kCores = kChannels / 8 * kCore;  // all those along the channels
    if constexpr (kTransposed && kSwizzle != ptx::Swizzle::kNone) {
      return ptx::matrix_descriptor(tile + static_cast<uint32_t>(step * 2 * kCore), kCores, kCore, kSwizzle);
    } else if constexpr (kSwizzle == ptx::Swizzle::kNone) {
      return ptx::matrix_descriptor(tile + static_cast<uint32_t>(step * 2 * kCore), kCore, kCores, kSwizzle);
    } else {
      constexpr int kSteps = kRowBytes / 32;  // within a row
      const int begin = step / kSteps * rows * kRowBytes + step % kSteps * 32;
      return ptx::matrix_descriptor(tile + static_cast<uint32_t>(begin), 0, kCore, kSwizzle);
    }
  }

 private:
  /// Returns where a byte lies after the swizzle: 16-byte units change places within their row, as its place among 8
  /// rows says.
  static MLA_DEVICE uint32_t swizzled(uint32_t offset) {
    if constexpr (kSwizzle == ptx::Swizzle::k128) return offset ^ (offset / 128 % 8) * 16;
    if constexpr (kSwizzle == ptx::Swizzle::k64) return offset ^ (offset / 128 % 4) * 16;
    return offset;
  }
};

enum class WgmmaElement { kBf16, kF16, kE4M3 };

/// Runs one warpgroup with a [64, 64] of 16-bit elements from word 0 of the input, and b [kN, 64] from word 2048. Two
/// e4m3 lie as one such element does, and then there are 128 of them in a row. For
/// each of three swizzles it writes two outputs [64, kN]: a b^T + register number % 8, and a b^T where the registers
/// hold NaN at first.
template <int kN, WgmmaElement kElement, bool kTransposeB, bool kARegisters>
struct WgmmaForm {
  using Params = cuda::WrapperParams;
  static constexpr const char* kName = "wgmma_form";
  static constexpr int kThreads = 128;
  static constexpr int kMinBlocks = 1;
  static constexpr int kSteps = 4;  // of 16 channels, or 32 of e4m3
  static constexpr uint32_t kABytes = 64 * 128, kBBytes = kN * 128;
  static constexpr cuda::LaunchShape kShape{.shared_bytes = kABytes + kBBytes};

  template <class A>
  static MLA_DEVICE void multiply(float (&d)[kN / 2], const A& a, uint64_t b, bool accumulate) {
    if constexpr (kElement == WgmmaElement::kE4M3)
      ptx::wgmma_e4m3<kN>(d, a, b, accumulate);
    else if constexpr (kElement == WgmmaElement::kBf16)
      ptx::wgmma_bf16<kN, kTransposeB>(d, a, b, accumulate);
    else
      ptx::wgmma_f16<kN, kTransposeB>(d, a, b, accumulate);
  }

  /// Holds the descriptors of all steps.
  struct Descriptors {
    uint64_t a[kSteps], b[kSteps];
  };

  template <class Layout>
  static MLA_DEVICE void lay_out(const uint32_t* from, ptx::SharedAddress to, int rows) {
    for (int i = ptx::thread_index(); i < rows * 64; i += kThreads) {
      const auto code = static_cast<uint16_t>(from[i / 2] >> 16 * (i % 2));
      ptx::store_shared(to + Layout::place(rows, i / 64, i % 64), code);
    }
  }

  template <ptx::Swizzle kSwizzle>
  static MLA_DEVICE void lay_out(const Params& p, Descriptors& descriptors) {
    using LayoutA = TileLayout<kSwizzle, false>;
    using LayoutB = TileLayout<kSwizzle, kTransposeB>;
    const ptx::SharedAddress a = ptx::shared_address(ptx::shared_memory());
    const ptx::SharedAddress b = a + kABytes;
    lay_out<LayoutA>(p.in, a, 64);
    lay_out<LayoutB>(p.in + 2048, b, kN);
    MLA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      descriptors.a[step] = LayoutA::descriptor(a, 64, step);
      descriptors.b[step] = LayoutB::descriptor(b, kN, step);
    }
  }

  static MLA_DEVICE void run(const Params& p) {
    uint32_t* out = p.out;
    const int row = ptx::warp() * 16 + ptx::lane() / 4;
    uint32_t registers[kSteps][4];
    MLA_UNROLL
    for (int step = 0; step < kSteps; ++step) MLA_UNROLL
    for (int i = 0; i < 4; ++i)
      registers[step][i] = p.in[(row + i % 2 * 8) * 32 + step * 8 + i / 2 * 4 + ptx::lane() % 4];
    // One loop for all, since what differs is in the descriptors, and each copy of the multiplications takes long to
    // compile.
    MLA_NO_UNROLL
    for (int round = 0; round < 6; ++round) {
      const bool accumulate = round % 2 == 0;
      Descriptors descriptors;
      ptx::sync_block();
      if (round < 2)
        lay_out<ptx::Swizzle::kNone>(p, descriptors);
      else if (round < 4)
        lay_out<ptx::Swizzle::k128>(p, descriptors);
      else
        lay_out<ptx::Swizzle::k64>(p, descriptors);
      ptx::fence_async_proxy();
      ptx::sync_block();
      float d[kN / 2];
      for (int i = 0; i < kN / 2; ++i)
        d[i] = accumulate ? static_cast<float>(i % 8) : std::bit_cast<float>(0x7FC00000U);
      ptx::wgmma_hold(d);
      ptx::wgmma_fence();
      MLA_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        if constexpr (kARegisters)
          multiply(d, registers[step], descriptors.b[step], accumulate || step != 0);
        else
          multiply(d, descriptors.a[step], descriptors.b[step], accumulate || step != 0);
        if (step % 2 == 1) ptx::wgmma_commit();
      }
      ptx::wgmma_wait<0>();
      ptx::wgmma_hold(d);
      for (int i = 0; i < kN / 2; ++i)
        out[(row + i % 4 / 2 * 8) * kN + i / 4 * 8 + ptx::lane() % 4 * 2 + i % 2] = std::bit_cast<uint32_t>(d[i]);
      out += 64 * kN;
    }
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE
