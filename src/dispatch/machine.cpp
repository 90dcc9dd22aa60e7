// SPDX-License-Identifier: Apache-2.0
// What the processor reports and the operating system allows.
#include <sched.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "cpu/isa.h"
#include "dispatch/gpus.h"
#include "dispatch/machine.h"
#include "mla/backend.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace mla {
namespace {

/// One instruction set and whether the processor reports it.
struct Feature {
  const char* name;
  bool present;
};

#if defined(__x86_64__)

struct Registers {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  if (__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx) == 0) return {};
  return r;
}

constexpr bool bit(uint32_t word, int index) { return (word >> index & 1U) != 0; }

/// The register sets that the operating system saves on a task switch (XCR0).
__attribute__((target("xsave"))) uint64_t saved_registers() { return _xgetbv(0); }

IsaLevel level(const char* name, const std::vector<Feature>& features, bool os_allows) {
  IsaLevel result{.name = name, .cpu_has = true, .os_allows = os_allows, .built = cpu::built(name), .detail = {}};
  std::string present;
  std::string missing;
  for (const Feature& feature : features) {
    std::string& list = feature.present ? present : missing;
    if (!list.empty()) list += ' ';
    list += feature.name;
    result.cpu_has = result.cpu_has && feature.present;
  }
  if (!result.cpu_has)
    result.detail = "processor lacks " + missing;
  else if (!os_allows)
    result.detail = "operating system does not save the registers";
  else if (!result.built)
    result.detail = "not in this build";
  else
    result.detail = present;
  return result;
}

std::vector<IsaLevel> detect_isa() {
  const Registers basic = cpuid(1, 0);
  const Registers extended = cpuid(7, 0);
  const Registers extended1 = cpuid(7, 1);
  const uint64_t saved = bit(basic.ecx, 27) ? saved_registers() : 0;  // OSXSAVE: xgetbv may be executed
  constexpr uint64_t kYmm = 0x06;                                     // SSE and AVX state
  constexpr uint64_t kZmm = 0xE6;                                     // and the three parts of AVX-512 state
  const std::vector<Feature> avx2 = {
      {"avx2", bit(extended.ebx, 5)}, {"fma", bit(basic.ecx, 12)}, {"f16c", bit(basic.ecx, 29)}};
  std::vector<Feature> avx512 = avx2;
  avx512.insert(avx512.end(), {{"avx512f", bit(extended.ebx, 16)},
                               {"avx512dq", bit(extended.ebx, 17)},
                               {"avx512cd", bit(extended.ebx, 28)},
                               {"avx512bw", bit(extended.ebx, 30)},
                               {"avx512vl", bit(extended.ebx, 31)}});
  std::vector<Feature> avx512_bf16 = avx512;
  avx512_bf16.push_back({"avx512_bf16", bit(extended1.eax, 5)});
  return {level("avx512_bf16", avx512_bf16, (saved & kZmm) == kZmm),
          level("avx512", avx512, (saved & kZmm) == kZmm),
          level("avx2", avx2, (saved & kYmm) == kYmm),
          {.name = "portable",
           .cpu_has = true,
           .os_allows = true,
           .built = cpu::built("portable"),
           .detail = "baseline instructions"}};
}

std::string processor_name() {
  std::string name;
  for (uint32_t leaf = 0x80000002U; leaf <= 0x80000004U; ++leaf) {
    const Registers r = cpuid(leaf, 0);
    for (uint32_t word : {r.eax, r.ebx, r.ecx, r.edx})
      for (int shift = 0; shift < 32; shift += 8) name += static_cast<char>(word >> shift & 0xFFU);
  }
  name.erase(std::find(name.begin(), name.end(), '\0'), name.end());
  const size_t first = name.find_first_not_of(' ');
  const size_t last = name.find_last_not_of(' ');
  return first == std::string::npos ? "unknown x86-64" : name.substr(first, last - first + 1);
}

#else

std::vector<IsaLevel> detect_isa() {
  std::vector<IsaLevel> levels;
  for (const char* name : {"avx512_bf16", "avx512", "avx2"})
    levels.push_back({.name = name, .built = cpu::built(name), .detail = "processor is not x86-64"});
  levels.push_back({.name = "portable",
                    .cpu_has = true,
                    .os_allows = true,
                    .built = cpu::built("portable"),
                    .detail = "baseline instructions"});
  return levels;
}

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name") || line.starts_with("Model"))
      if (const size_t colon = line.find(": "); colon != std::string::npos) return line.substr(colon + 2);
#if defined(__aarch64__)
  return "unknown Arm";
#else
  return "unknown processor";
#endif
}

#endif

}  // namespace

namespace dispatch {

int32_t usable_threads() {
  // The kernel refuses a set smaller than its own, so the size grows until it fits.
  for (int32_t processors = CPU_SETSIZE; processors <= 1 << 20; processors *= 2) {
    cpu_set_t* set = CPU_ALLOC(static_cast<size_t>(processors));
    if (set == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(static_cast<size_t>(processors));
    const int32_t count = sched_getaffinity(0, bytes, set) == 0 ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (count > 0) return count;
  }
  return std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency()));
}

}  // namespace dispatch

const std::vector<IsaLevel>& isa_levels() {
  static const std::vector<IsaLevel> levels = detect_isa();
  return levels;
}

const MachineInfo& machine_info() {
  static const MachineInfo info = [] {
    MachineInfo found{.cpu = processor_name(), .threads = dispatch::usable_threads(), .isa = isa_levels()};
    dispatch::find_gpus(found);
    return found;
  }();
  return info;
}

std::string_view version() { return MLA_VERSION; }

}  // namespace mla
