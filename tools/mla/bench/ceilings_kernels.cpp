// SPDX-License-Identifier: Apache-2.0
// Holds the inner loops of the ceilings. Sixteen independent chains hide the latency of an FMA on every processor known
// to us (4-6 cycles, at most two a cycle); there are twelve where there are only sixteen registers.
#include <hwy/highway.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "mla/backend.h"
#include "mla/bench/ceilings.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define MLA_REPEAT_12(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#define MLA_REPEAT_16(X) MLA_REPEAT_12(X) X(12) X(13) X(14) X(15)

namespace mla::bench {
namespace {

// The compiler cannot see these values, so it neither folds the chains nor merges equal ones.
struct Seeds {
  alignas(64) float start[16][16];
  alignas(64) float factor[16];
  alignas(64) float addend[16];
  alignas(64) uint16_t bf16[32];
};

Seeds make_seeds() {
  volatile float one = 1.0F;
  volatile uint16_t small_bf16 = 0x3C00;  // 2^-7
  Seeds seeds{};
  for (int i = 0; i < 16; ++i) {
    for (int lane = 0; lane < 16; ++lane) seeds.start[i][lane] = one + static_cast<float>(i * 16 + lane);
    seeds.factor[i] = one * 0.5F;
    seeds.addend[i] = one + static_cast<float>(i);
  }
  for (uint16_t& value : seeds.bf16) value = small_bf16;
  return seeds;
}

const Seeds& seeds() {
  static const Seeds instance = make_seeds();
  return instance;
}

// Keeps a result alive.
void consume(float value) {
  static std::atomic<float> sink{0.0F};
  sink.store(value, std::memory_order_relaxed);
}

void consume(uint64_t value) {
  static std::atomic<uint64_t> sink{0};
  sink.store(value, std::memory_order_relaxed);
}

double fma_portable(int64_t iterations) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::ScalableTag<float> d;
  const Seeds& s = seeds();
  const auto factor = hn::Set(d, s.factor[0]);
  const auto addend = hn::Set(d, s.addend[0]);
#define MLA_DECLARE(i) auto acc##i = hn::Set(d, s.start[i][0]);
#define MLA_STEP(i) acc##i = hn::MulAdd(acc##i, factor, addend);
#define MLA_SUM(i) total = hn::Add(total, acc##i);
  MLA_REPEAT_12(MLA_DECLARE)
  for (int64_t n = 0; n < iterations; ++n) {
    MLA_REPEAT_12(MLA_STEP)
  }
  auto total = hn::Zero(d);
  MLA_REPEAT_12(MLA_SUM)
#undef MLA_DECLARE
#undef MLA_STEP
#undef MLA_SUM
  consume(hn::GetLane(hn::SumOfLanes(d, total)));
  return static_cast<double>(iterations) * 12.0 * 2.0 * static_cast<double>(hn::Lanes(d));
}

void read_portable(const std::byte* data, size_t bytes) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::ScalableTag<uint64_t> d;
  const auto* words = reinterpret_cast<const uint64_t*>(data);
  const size_t count = bytes / sizeof(uint64_t), lanes = hn::Lanes(d);
  auto a = hn::Zero(d), b = hn::Zero(d), c = hn::Zero(d), e = hn::Zero(d);
  for (size_t i = 0; i + 4 * lanes <= count; i += 4 * lanes) {
    a = hn::Xor(a, hn::LoadU(d, words + i));
    b = hn::Xor(b, hn::LoadU(d, words + i + lanes));
    c = hn::Xor(c, hn::LoadU(d, words + i + 2 * lanes));
    e = hn::Xor(e, hn::LoadU(d, words + i + 3 * lanes));
  }
  consume(hn::GetLane(hn::Xor(hn::Xor(a, b), hn::Xor(c, e))));
}

#if defined(__x86_64__)

__attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"))) double dot_bf16_avx512(int64_t iterations) {
  const Seeds& s = seeds();
  const __m512i bits = _mm512_load_si512(s.bf16);
  __m512bh a, b;
  std::memcpy(&a, &bits, sizeof(a));
  std::memcpy(&b, &bits, sizeof(b));
#define MLA_DECLARE(i) __m512 acc##i = _mm512_load_ps(s.start[i]);
#define MLA_STEP(i) acc##i = _mm512_dpbf16_ps(acc##i, a, b);
#define MLA_SUM(i) total = _mm512_add_ps(total, acc##i);
  MLA_REPEAT_16(MLA_DECLARE)
  for (int64_t n = 0; n < iterations; ++n) {
    MLA_REPEAT_16(MLA_STEP)
  }
  __m512 total = _mm512_setzero_ps();
  MLA_REPEAT_16(MLA_SUM)
#undef MLA_STEP
  consume(_mm512_cvtss_f32(total));
  return static_cast<double>(iterations) * 16.0 * 2.0 * 32.0;
}

__attribute__((target("avx512f"))) double fma_avx512(int64_t iterations) {
  const Seeds& s = seeds();
  const __m512 factor = _mm512_load_ps(s.factor);
  const __m512 addend = _mm512_load_ps(s.addend);
#define MLA_STEP(i) acc##i = _mm512_fmadd_ps(acc##i, factor, addend);
  MLA_REPEAT_16(MLA_DECLARE)
  for (int64_t n = 0; n < iterations; ++n) {
    MLA_REPEAT_16(MLA_STEP)
  }
  __m512 total = _mm512_setzero_ps();
  MLA_REPEAT_16(MLA_SUM)
#undef MLA_DECLARE
#undef MLA_STEP
#undef MLA_SUM
  consume(_mm512_cvtss_f32(total));
  return static_cast<double>(iterations) * 16.0 * 2.0 * 16.0;
}

__attribute__((target("avx2,fma"))) double fma_avx2(int64_t iterations) {
  const Seeds& s = seeds();
  const __m256 factor = _mm256_load_ps(s.factor);
  const __m256 addend = _mm256_load_ps(s.addend);
#define MLA_DECLARE(i) __m256 acc##i = _mm256_load_ps(s.start[i]);
#define MLA_STEP(i) acc##i = _mm256_fmadd_ps(acc##i, factor, addend);
#define MLA_SUM(i) total = _mm256_add_ps(total, acc##i);
  MLA_REPEAT_12(MLA_DECLARE)
  for (int64_t n = 0; n < iterations; ++n) {
    MLA_REPEAT_12(MLA_STEP)
  }
  __m256 total = _mm256_setzero_ps();
  MLA_REPEAT_12(MLA_SUM)
#undef MLA_DECLARE
#undef MLA_STEP
#undef MLA_SUM
  consume(_mm256_cvtss_f32(total));
  return static_cast<double>(iterations) * 12.0 * 2.0 * 8.0;
}

__attribute__((target("avx2"))) void read_avx2(const std::byte* data, size_t bytes) {
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  for (size_t i = 0; i + 128 <= bytes; i += 128) {
    a = _mm256_xor_si256(a, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + i)));
    b = _mm256_xor_si256(b, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + i + 32)));
    c = _mm256_xor_si256(c, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + i + 64)));
    d = _mm256_xor_si256(d, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + i + 96)));
  }
  const __m256i all = _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d));
  consume(static_cast<uint64_t>(_mm256_extract_epi64(all, 0)));
}

/// Is what ldtilecfg reads: eight tiles of 16 rows of 64 bytes.
struct alignas(64) TileConfiguration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr TileConfiguration kTiles;
constexpr double kTileProductFlops = 2.0 * 16 * 16 * 32;

__attribute__((target("amx-tile,amx-bf16"))) double multiply_tiles(int64_t iterations) {
  asm volatile("ldtilecfg %0" : : "m"(kTiles));
  for (int64_t n = 0; n < iterations; ++n)
    asm volatile(
        "tdpbf16ps %tmm6, %tmm4, %tmm0\n\ttdpbf16ps %tmm7, %tmm4, %tmm1\n\t"
        "tdpbf16ps %tmm6, %tmm5, %tmm2\n\ttdpbf16ps %tmm7, %tmm5, %tmm3");
  asm volatile("tilerelease");
  return static_cast<double>(iterations) * 4 * kTileProductFlops;
}

__attribute__((target("amx-tile,amx-bf16"))) double multiply_loaded_tiles(int64_t iterations) {
  alignas(64) static thread_local std::byte operands[4][1024];
  asm volatile("ldtilecfg %0" : : "m"(kTiles));
  for (int64_t n = 0; n < iterations; ++n)
    asm volatile(
        "tileloadd (%0,%1,1), %%tmm4\n\ttileloadd 1024(%0,%1,1), %%tmm6\n\ttdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\t"
        "tileloadd 2048(%0,%1,1), %%tmm7\n\ttdpbf16ps %%tmm7, %%tmm4, %%tmm1\n\t"
        "tileloadd 3072(%0,%1,1), %%tmm5\n\ttdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\ttdpbf16ps %%tmm7, %%tmm5, %%tmm3"
        :
        : "r"(operands), "r"(int64_t{64})
        : "memory");
  asm volatile("tilerelease");
  return static_cast<double>(iterations) * 4 * kTileProductFlops;
}

#endif

CeilingKernels pick_kernels() {
  CeilingKernels kernels{.bf16 = fma_portable,
                         .f32 = fma_portable,
                         .f32_avx2 = fma_portable,
                         .read = read_portable,
                         .bf16_name = "f32 multiply-add of the compiler's baseline (no bf16 dot product)",
                         .f32_name = "f32 multiply-add of the compiler's baseline"};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    kernels.f32 = kernels.f32_avx2 = kernels.bf16 = fma_avx2;
    kernels.read = read_avx2;
    kernels.f32_name = "AVX2 vfmadd";
    kernels.bf16_name = "AVX2 vfmadd (no bf16 dot product)";
  }
  if (__builtin_cpu_supports("avx512f")) {
    kernels.f32 = kernels.bf16 = fma_avx512;
    kernels.f32_name = "AVX-512 vfmadd";
    kernels.bf16_name = "AVX-512 vfmadd (no bf16 dot product)";
  }
  if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw")) {
    kernels.bf16 = dot_bf16_avx512;
    kernels.bf16_name = "AVX-512 vdpbf16ps";
  }
  const std::vector<IsaLevel>& levels = isa_levels();  // which also asks the system for the tiles
  const auto amx =
      std::find_if(levels.begin(), levels.end(), [](const IsaLevel& level) { return level.name == "amx"; });
  if (amx != levels.end() && amx->cpu_has && amx->os_allows) {
    kernels.tiles = multiply_tiles;
    kernels.loaded_tiles = multiply_loaded_tiles;
  }
#endif
  return kernels;
}

}  // namespace

const CeilingKernels& ceiling_kernels() {
  static const CeilingKernels kernels = pick_kernels();
  return kernels;
}

}  // namespace mla::bench
