// SPDX-License-Identifier: Apache-2.0
// This table has what a warp of absorbed attention executes in a step of keys, counted in the SASS of nvcc 13.0.
//
// scripts/sass_steps.py made its rows on 2026-11-25 from the objects of a build with kernels for
// all architectures, and the last ones (on = 90) from one with -DMLA_CUDA_PROFILE=sm120; its head has the rule. ncu
// counted about 600 and 813 instructions on an H100 where the table has 545 and 724 (64 rows of bf16, 16 of fp8): what
// the rule leaves out, waits that do not succeed at once among it, is a tenth. The test cuda.step_table counts again
// wherever nvcc built kernels.
#pragma once

#include <cstdint>

namespace mla::cli {

/// Names a kernel of absorbed attention by what it multiplies.
enum class Kernel : uint8_t {
  kBf16,       ///< cuda_portable, rows of 16 bits
  kQuantized,  ///< cuda_portable, rows that are decoded to bf16
  kCodes,      ///< cuda_portable, e4m3 rows with one scale, where it has a kernel for them
  kFp8         ///< cuda_fp8
};

/// Counts what one warp of a block executes in a step.
struct StepCount {
  Kernel kernel;
  int32_t rows;          ///< query rows of a block
  int32_t arch;          ///< 120: the kernels of sm120
  int32_t on;            ///< what they are compiled for: `arch`, or the GPU of a profile
  int32_t blocks;        ///< that share an SM
  int32_t instructions;  ///< multiplies among them
  int32_t multiplies;    ///< m16n8k16 of 16-bit operands
  int32_t e4m3;          ///< m16n8k32 of e4m3
  int32_t shared_bytes;  ///< to and from shared memory
};

inline constexpr int32_t kStepWarps = 8;  ///< of a block, in all kernels of the table
inline constexpr int32_t kStepKeys = 32;  ///< of a step

// clang-format off
inline constexpr StepCount kStepCounts[] = {
    {Kernel::kBf16, 16, 80, 80, 2, 333, 34, 0, 18464},
    {Kernel::kBf16, 16, 86, 86, 1, 339, 34, 0, 18464},
    {Kernel::kBf16, 16, 89, 89, 1, 339, 34, 0, 18464},
    {Kernel::kBf16, 16, 90, 90, 2, 343, 34, 0, 17824},
    {Kernel::kBf16, 16, 100, 100, 2, 324, 34, 0, 17696},
    {Kernel::kBf16, 16, 120, 120, 1, 340, 34, 0, 17696},
    {Kernel::kBf16, 32, 100, 100, 1, 386, 68, 0, 20640},
    {Kernel::kBf16, 64, 80, 80, 1, 545, 136, 0, 33952},
    {Kernel::kBf16, 64, 86, 86, 1, 554, 136, 0, 33952},
    {Kernel::kBf16, 64, 89, 89, 1, 554, 136, 0, 33952},
    {Kernel::kBf16, 64, 90, 90, 1, 546, 136, 0, 33312},
    {Kernel::kBf16, 64, 120, 120, 1, 638, 136, 0, 33184},
    {Kernel::kCodes, 16, 80, 80, 2, 670, 34, 0, 12224},
    {Kernel::kCodes, 16, 86, 86, 2, 667, 34, 0, 12224},
    {Kernel::kCodes, 16, 89, 89, 2, 425, 34, 0, 12224},
    {Kernel::kCodes, 16, 120, 120, 2, 446, 34, 0, 11840},
    {Kernel::kCodes, 64, 89, 89, 1, 754, 136, 0, 23744},
    {Kernel::kCodes, 64, 120, 120, 1, 829, 136, 0, 23360},
    {Kernel::kFp8, 16, 89, 89, 1, 716, 2, 16, 22400},
    {Kernel::kFp8, 16, 120, 120, 1, 675, 2, 16, 20800},
    {Kernel::kFp8, 64, 89, 89, 1, 1092, 8, 64, 34304},
    {Kernel::kFp8, 64, 120, 120, 1, 1006, 8, 64, 31680},
    {Kernel::kQuantized, 16, 80, 80, 1, 821, 34, 0, 25984},
    {Kernel::kQuantized, 16, 86, 86, 1, 822, 34, 0, 25984},
    {Kernel::kQuantized, 16, 89, 89, 1, 701, 34, 0, 24960},
    {Kernel::kQuantized, 16, 90, 90, 2, 714, 34, 0, 25216},
    {Kernel::kQuantized, 16, 100, 100, 2, 676, 34, 0, 24960},
    {Kernel::kQuantized, 16, 120, 120, 1, 687, 34, 0, 24960},
    {Kernel::kQuantized, 32, 86, 86, 1, 880, 68, 0, 28928},
    {Kernel::kQuantized, 32, 89, 89, 1, 759, 68, 0, 27904},
    {Kernel::kQuantized, 32, 100, 100, 1, 742, 68, 0, 27904},
    {Kernel::kQuantized, 32, 120, 120, 1, 780, 68, 0, 27904},
    {Kernel::kQuantized, 64, 80, 80, 1, 817, 136, 0, 36480},
    {Kernel::kQuantized, 64, 86, 86, 1, 819, 136, 0, 36480},
    {Kernel::kQuantized, 64, 89, 89, 1, 819, 136, 0, 36480},
    {Kernel::kQuantized, 64, 90, 90, 1, 825, 136, 0, 36736},
    {Kernel::kQuantized, 64, 120, 120, 1, 939, 136, 0, 36608},
    {Kernel::kBf16, 16, 120, 90, 1, 343, 34, 0, 17824},
    {Kernel::kBf16, 64, 120, 90, 1, 546, 136, 0, 33312},
    {Kernel::kCodes, 16, 120, 90, 2, 438, 34, 0, 11968},
    {Kernel::kCodes, 64, 120, 90, 1, 768, 136, 0, 23488},
    {Kernel::kQuantized, 16, 120, 90, 1, 715, 34, 0, 25216},
    {Kernel::kQuantized, 32, 120, 90, 1, 770, 68, 0, 28160},
    {Kernel::kQuantized, 64, 120, 90, 1, 825, 136, 0, 36736},
};
// clang-format on

}  // namespace mla::cli
