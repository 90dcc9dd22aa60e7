// SPDX-License-Identifier: Apache-2.0
// These are the GPUs that the model of estimate.h knows, and the times that it is held against.
#include "mla/estimate.h"

namespace mla::cli {
namespace {

// Rates of multiplies are those of the datasheets, dense, with f32 sums, divided by SMs and boost clock:
//   RTX PRO 6000, RTX 5090  NVIDIA RTX Blackwell PRO and RTX Blackwell whitepapers, tables of peak rates: 503.8 and
//   209.5
//                           TFLOP/s of bf16, 1,008 and 419 of FP8; GeForce has half the rate with f32 sums
//   RTX 4090, L40S          NVIDIA Ada whitepaper, L40S datasheet: 165.2 and 362 TFLOP/s of bf16, 330 and 733 of FP8
//   RTX A6000               NVIDIA GA102 whitepaper: 154.8 TFLOP/s
//   A100                    NVIDIA A100 whitepaper: 312 TFLOP/s; 2,039 GB/s is the SXM module with 80 GB
//   H100, H200              NVIDIA H100 whitepaper and H200 datasheet: 989 TFLOP/s by wgmma. mma.sync: 656 TFLOP/s
//   measured
//                           at 1.70 GHz (`libmla bench`, 2026-11-23)
constexpr GpuKind kGpuKinds[] = {
    {"RTX PRO 6000 Blackwell", 120, 188, 2.617, 1792, 1024, 2048, 1024, false},
    {"RTX 5090", 120, 170, 2.407, 1792, 512, 1024, 512, false},
    {"RTX 4090", 89, 128, 2.520, 1008, 512, 1024, 512, false},
    {"L40S", 89, 142, 2.520, 864, 1024, 2048, 1024, false},
    {"RTX A6000", 86, 84, 1.800, 768, 1024, 0, 1024, false},
    {"A100 80GB", 80, 108, 1.410, 2039, 2048, 0, 2048, false},
    {"H100 SXM", 90, 132, 1.830, 3350, 2923, 0, 4096, true},
    {"H200", 90, 132, 1.830, 4800, 2923, 0, 4096, true},
};

constexpr Op kDense = Op::kDecode, kSparse = Op::kDecodeSparse;
constexpr CacheFormat kBF16 = CacheFormat::kBF16, kFP8 = CacheFormat::kFP8, kDsMla = CacheFormat::kFP8DsMla;

// Medians of `libmla bench`, pages of 64 tokens, 2026-11-23 to 25 (cuda_portable) and 2026-11-21 to 22 (the others), as
// docs/kernels and docs/notebook have them.
constexpr MeasuredCase kMeasuredCases[] = {
    {"H100 SXM", "cuda_portable", 120, kDense, kBF16, 128, 1, 1, 32768, 64.7, true},
    {"H100 SXM", "cuda_portable", 120, kDense, kBF16, 128, 1, 16, 4096, 97.4, true},
    {"H100 SXM", "cuda_portable", 120, kDense, kBF16, 128, 1, 64, 4096, 294, true},
    {"H100 SXM", "cuda_portable", 120, kDense, kBF16, 128, 1, 64, 8192, 563, true},
    {"H100 SXM", "cuda_portable", 120, kDense, kBF16, 128, 1, 128, 8192, 1110, true},
    {"H100 SXM", "cuda_portable", 120, kDense, kBF16, 16, 1, 1, 32768, 28.0, true},
    {"H100 SXM", "cuda_portable", 120, kDense, kBF16, 16, 1, 16, 4096, 39.5, true},
    {"H100 SXM", "cuda_portable", 120, kDense, kBF16, 16, 1, 64, 4096, 115, true},
    {"H100 SXM", "cuda_portable", 120, kDense, kBF16, 16, 1, 64, 8192, 216, true},
    {"H100 SXM", "cuda_portable", 120, kDense, kBF16, 16, 1, 128, 8192, 416, true},
    {"H100 SXM", "cuda_portable", 120, kDense, kBF16, 64, 1, 16, 4096, 64.7, false},
    {"H100 SXM", "cuda_portable", 120, kDense, kBF16, 64, 1, 64, 4096, 167, false},
    {"H100 SXM", "cuda_portable", 120, kDense, kBF16, 64, 1, 64, 8192, 304.5, false},
    {"H100 SXM", "cuda_portable", 120, kDense, kBF16, 64, 1, 128, 8192, 573, false},
    {"H100 SXM", "cuda_portable", 120, kDense, kBF16, 128, 2, 32, 4096, 296, false},
    {"H100 SXM", "cuda_portable", 120, kSparse, kBF16, 128, 1, 64, 2048, 162, false},
    {"H100 SXM", "cuda_portable", 120, kDense, kFP8, 16, 1, 64, 8192, 151, false},
    {"H100 SXM", "cuda_portable", 120, kDense, kFP8, 64, 1, 64, 8192, 376, false},
    {"H100 SXM", "cuda_portable", 120, kDense, kFP8, 128, 1, 64, 8192, 705, false},
    {"H100 SXM", "cuda_portable", 120, kDense, kDsMla, 16, 1, 64, 8192, 338.5, false},
    {"H100 SXM", "cuda_portable", 120, kDense, kDsMla, 64, 1, 64, 8192, 416, false},
    {"H100 SXM", "cuda_portable", 120, kDense, kDsMla, 128, 1, 64, 8192, 795, false},
    {"H100 SXM", "cuda_portable", 120, kSparse, kDsMla, 64, 1, 64, 2048, 122.3, false},
    {"H100 SXM", "cuda_portable", 120, kSparse, kDsMla, 128, 1, 64, 2048, 219.5, false},
    {"H100 SXM", "cuda_portable", 80, kDense, kBF16, 128, 1, 128, 8192, 1170, false},
    {"H100 SXM", "cuda_portable", 80, kDense, kBF16, 16, 1, 64, 4096, 119, false},
    {"H100 SXM", "cuda_portable", 80, kDense, kFP8, 128, 1, 64, 8192, 1030, false},
    {"H100 SXM", "cuda_portable", 80, kDense, kDsMla, 64, 1, 64, 8192, 505.5, false},
    {"H100 SXM", "cuda_portable", 80, kDense, kDsMla, 128, 1, 64, 8192, 991, false},
    {"H100 SXM", "cuda_sm90", 0, kDense, kBF16, 128, 1, 1, 32768, 39.4, false},
    {"H100 SXM", "cuda_sm90", 0, kDense, kBF16, 128, 1, 16, 4096, 52.7, false},
    {"H100 SXM", "cuda_sm90", 0, kDense, kBF16, 128, 1, 64, 4096, 140.5, false},
    {"H100 SXM", "cuda_sm90", 0, kDense, kBF16, 128, 1, 128, 8192, 530, true},
    {"H100 SXM", "cuda_sm90", 0, kDense, kFP8, 128, 1, 64, 8192, 361, true},
    {"H200", "cuda_sm90", 0, kDense, kBF16, 128, 1, 1, 32768, 36.5, false},
    {"H200", "cuda_sm90", 0, kDense, kBF16, 128, 1, 1, 131072, 86, false},
    {"H200", "cuda_sm90", 0, kDense, kBF16, 128, 1, 32, 8192, 151.5, false},
    {"H200", "cuda_sm90", 0, kDense, kBF16, 128, 1, 128, 8192, 566, false},
    {"H200", "cuda_sm90", 0, kSparse, kBF16, 128, 1, 64, 2048, 80.5, false},
    {"H200", "cuda_sm90", 0, kDense, kDsMla, 128, 1, 64, 8192, 367, false},
    {"H200", "cuda_sm90", 0, kSparse, kDsMla, 128, 1, 64, 2048, 102.2, false},
    {"H100 SXM", "cuda_bulk", 0, kDense, kBF16, 16, 1, 1, 32768, 23.9, false},
    {"H100 SXM", "cuda_bulk", 0, kDense, kBF16, 16, 1, 16, 4096, 33.7, false},
    {"H100 SXM", "cuda_bulk", 0, kDense, kBF16, 16, 1, 64, 4096, 111.2, false},
    {"H100 SXM", "cuda_bulk", 0, kDense, kBF16, 16, 1, 128, 8192, 420, false},
    {"H100 SXM", "cuda_bulk", 0, kDense, kFP8, 16, 1, 64, 8192, 118, false},
    {"H200", "cuda_bulk", 0, kDense, kBF16, 16, 1, 1, 4096, 11.3, false},
    {"H200", "cuda_bulk", 0, kDense, kBF16, 16, 1, 1, 32768, 21.2, false},
    {"H200", "cuda_bulk", 0, kDense, kBF16, 16, 1, 16, 4096, 27.8, false},
    {"H200", "cuda_bulk", 0, kDense, kBF16, 16, 1, 64, 4096, 80.3, false},
    {"H200", "cuda_bulk", 0, kDense, kBF16, 16, 1, 128, 4096, 150.5, false},
    {"H200", "cuda_bulk", 0, kDense, kBF16, 16, 1, 64, 32768, 566, false},
    {"H200", "cuda_bulk", 0, kDense, kDsMla, 16, 1, 64, 32768, 338, false},
};

}  // namespace

std::span<const GpuKind> gpu_kinds() { return kGpuKinds; }
std::span<const MeasuredCase> measured_cases() { return kMeasuredCases; }

std::string_view evidence_of(int32_t arch) {
  switch (arch) {
    case 90: return "measured";
    case 80:
    case 86:
    case 89:
    case 120: return "estimated";
    case 110: return "compiled only";
    default: return "emulated only";
  }
}

}  // namespace mla::cli
