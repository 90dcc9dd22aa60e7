// SPDX-License-Identifier: Apache-2.0
#include "cpu/levels.h"

#include <algorithm>

namespace mla::cpu {

#if MLA_CPU_X86
double burst_amx();
double burst_avx512_bf16();
double burst_avx512();
#endif
#if MLA_CPU_ARM
double burst_neon_bf16();
double burst_portable();
#endif

namespace {

/// Each level needs what the level below it needs, and more.
constexpr std::string_view kNeeds[] = {"avx2",     "fma",      "f16c",        "avx512f",  "avx512dq", "avx512cd",
                                       "avx512bw", "avx512vl", "avx512_bf16", "amx_tile", "amx_bf16"};
constexpr std::span<const std::string_view> kAvx2Needs = std::span(kNeeds).first(3),
                                            kAvx512Needs = std::span(kNeeds).first(8),
                                            kAvx512Bf16Needs = std::span(kNeeds).first(9), kAmxNeeds = kNeeds;
constexpr std::string_view kNeonBf16Needs[] = {"bf16"};

const TileKernels* no_pairs() { return nullptr; }

template <auto kPairs, auto kFloats, auto kRows, auto kFloatRows>
const KernelSet& set_of() {
  static const KernelSet set = {kPairs(), kFloats(), kRows(), kFloatRows()};
  return set;
}
template <auto kFloats, auto kRows>
constexpr auto kFloatsOnly = set_of<no_pairs, kFloats, kRows, kRows>;

#if MLA_CPU_ARM
constexpr auto kNeonBf16Kernels =
    set_of<tile_kernels_neon_bf16_pairs, tile_kernels_portable, row_kernels_neon_bf16, row_kernels_portable>;
constexpr auto kNeonBf16Burst = burst_neon_bf16, kPortableBurst = burst_portable;
#else
constexpr auto kNeonBf16Kernels = nullptr;
constexpr auto kNeonBf16Burst = nullptr, kPortableBurst = nullptr;
#endif

constexpr Level kNeonBf16 = {.name = "neon_bf16",
                             .row = "cpu_neon_bf16",
                             .needs = kNeonBf16Needs,
                             .registers = Registers::kNeon,
                             .multiplied = Arithmetic::kBF16,
                             .kernels = kNeonBf16Kernels,
                             .burst = kNeonBf16Burst};

constexpr Level kPortable = {.name = "portable",
                             .row = "cpu_portable",
                             .needs = {},
                             .registers = Registers::kBaseline,
                             .multiplied = Arithmetic::kF32,
                             .kernels = kFloatsOnly<tile_kernels_portable, row_kernels_portable>,
                             .burst = kPortableBurst};

#if MLA_CPU_X86
constexpr auto kAmxKernels = set_of<tile_kernels_amx_pairs, tile_kernels_avx512, row_kernels_amx, row_kernels_avx512>;
constexpr auto kAvx512Bf16Kernels =
    set_of<tile_kernels_avx512_bf16_pairs, tile_kernels_avx512, row_kernels_avx512_bf16, row_kernels_avx512>;
constexpr auto kAvx512Kernels = kFloatsOnly<tile_kernels_avx512, row_kernels_avx512>;
constexpr auto kAvx2Kernels = kFloatsOnly<tile_kernels_avx2, row_kernels_avx2>;
constexpr auto kAmxBurst = burst_amx, kAvx512Bf16Burst = burst_avx512_bf16, kAvx512Burst = burst_avx512;
#else
constexpr auto kAmxKernels = nullptr, kAvx512Bf16Kernels = nullptr, kAvx512Kernels = nullptr, kAvx2Kernels = nullptr;
constexpr auto kAmxBurst = nullptr, kAvx512Bf16Burst = nullptr, kAvx512Burst = nullptr;
#endif

#if MLA_CPU_EMULATED_AMX
constexpr Level kEmulatedAmx = {
    .name = "amx_emulated",
    .row = "cpu_amx_emulated",
    .needs = kAvx512Needs,
    .registers = Registers::kZmm,
    .multiplied = Arithmetic::kBF16,
    .all_operations = false,
    .kernels =
        set_of<tile_kernels_amx_emulated_pairs, tile_kernels_avx512, row_kernels_amx_emulated, row_kernels_avx512>,
    .burst = nullptr,
    .in_software = true};
#endif

constexpr Level kLevels[] = {{.name = "amx",
                              .row = "cpu_amx",
                              .needs = kAmxNeeds,
                              .registers = Registers::kTiles,
                              .multiplied = Arithmetic::kBF16,
                              .all_operations = false,
                              .kernels = kAmxKernels,
                              .burst = kAmxBurst},
                             {.name = "avx512_bf16",
                              .row = "cpu_avx512_bf16",
                              .needs = kAvx512Bf16Needs,
                              .registers = Registers::kZmm,
                              .multiplied = Arithmetic::kBF16,
                              .kernels = kAvx512Bf16Kernels,
                              .burst = kAvx512Bf16Burst},
                             {.name = "avx512",
                              .row = "cpu_avx512",
                              .needs = kAvx512Needs,
                              .registers = Registers::kZmm,
                              .multiplied = Arithmetic::kF32,
                              .kernels = kAvx512Kernels,
                              .burst = kAvx512Burst},
                             {.name = "avx2",
                              .row = "cpu_avx2",
                              .needs = kAvx2Needs,
                              .registers = Registers::kYmm,
                              .multiplied = Arithmetic::kF32,
                              .kernels = kAvx2Kernels,
                              .burst = nullptr},
                             kNeonBf16,
                             kPortable,
#if MLA_CPU_EMULATED_AMX
                             kEmulatedAmx
#endif
};

}  // namespace

std::span<const Level> levels() { return kLevels; }

core::Reason missing(const Level& level) {
  using core::Reason;
  if (level.kernels == nullptr) return Reason::format("this build has no {} code", level.name);
  const auto& isa = isa_levels();
  const auto it = std::find_if(isa.begin(), isa.end(), [&](const IsaLevel& i) { return i.name == level.name; });
  if (it == isa.end() || !it->cpu_has) return Reason::format("this processor has no {}", level.name);
  if (!it->os_allows) return Reason::format("the operating system does not enable {}", level.name);
  return {};
}

double gflops(const Level& level, std::span<const IsaLevel> isa) {
  const auto it = std::ranges::find(isa, level.name, &IsaLevel::name);
  return it != isa.end() ? it->gflops : 0.0;
}

core::Reason slower_pairs(const Level& level, std::span<const IsaLevel> isa) {
  if (level.in_software) return "can, with the instructions in software";
  const double pairs = gflops(level, isa);
  double of_f32 = 0.0;  // of the first level behind it that multiplies f32 and was measured
  for (const Level& other : kLevels)
    if (of_f32 == 0.0 && other.multiplied == Arithmetic::kF32) of_f32 = gflops(other, isa);
  if (pairs == 0.0 || pairs >= of_f32) return {};
  return core::Reason::format("can, but a thread multiplies {:.0f} GFLOP/s of bf16 pairs here, and {:.0f} of f32",
                              pairs, of_f32);
}

Numerics numerics(const Level& level, const Problem& problem) {
  const Op op = problem.op;
  const bool keys_are_cached = op == Op::kDecode || op == Op::kDecodeSparse || op == Op::kPrefillSparse;
  const bool multiplies = keys_are_cached || op == Op::kPrefill || op == Op::kIndexerLogits || op == Op::kIndexerTopK;
  const auto has_bf16_keys = [](CacheFormat format) {
    return value_dtype(kv_layout(format).nope.element) == DType::kBF16;
  };
  const bool bf16_keys =
      !keys_are_cached || has_bf16_keys(problem.cache) || has_bf16_keys(problem.extra_cache.value_or(problem.cache));
  const bool bf16_queries = problem.q_dtype == DType::kBF16 || problem.q_dtype == DType::kE4M3;
  if (!multiplies || !bf16_queries || !bf16_keys) return {};
  return {.multiplied = level.multiplied, .summed = Arithmetic::kF32};
}

}  // namespace mla::cpu
