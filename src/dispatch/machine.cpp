// SPDX-License-Identifier: Apache-2.0
// Finds out what the processor reports and what the operating system allows.
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "core/processors.h"
#include "cpu/levels.h"
#include "dispatch/gpus.h"
#include "dispatch/machine.h"
#include "mla/backend.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace mla {
namespace {

#if defined(__x86_64__)

struct CpuidRegisters {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuidRegisters cpuid(uint32_t leaf, uint32_t subleaf) {
  CpuidRegisters r;
  if (__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx) == 0) return {};
  return r;
}

constexpr bool bit(uint32_t word, int index) { return (word >> index & 1U) != 0; }

/// Returns the register sets that the operating system saves on a task switch (XCR0).
__attribute__((target("xsave"))) uint64_t saved_registers() { return _xgetbv(0); }

/// Asks Linux, which grants it once for all threads of a process, for the permission to use the data of tiles.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

/// Holds the features that the processor reports, named as Linux names them.
class Features {
 public:
  bool has(std::string_view name) const {
    const struct {
      std::string_view name;
      bool present;
    } all[] = {{"avx2", bit(extended_.ebx, 5)},         {"fma", bit(basic_.ecx, 12)},
               {"f16c", bit(basic_.ecx, 29)},           {"avx512f", bit(extended_.ebx, 16)},
               {"avx512dq", bit(extended_.ebx, 17)},    {"avx512cd", bit(extended_.ebx, 28)},
               {"avx512bw", bit(extended_.ebx, 30)},    {"avx512vl", bit(extended_.ebx, 31)},
               {"avx512_bf16", bit(extended1_.eax, 5)}, {"amx_bf16", bit(extended_.edx, 22)},
               {"amx_tile", bit(extended_.edx, 24)}};
    return std::any_of(std::begin(all), std::end(all),
                       [&](const auto& feature) { return feature.name == name && feature.present; });
  }
  /// Returns whether the operating system saves these registers on a task switch.
  bool saves(cpu::Registers registers) const {
    constexpr uint64_t kYmm = 0x06;       // SSE and AVX state
    constexpr uint64_t kZmm = 0xE6;       // and the three parts of AVX-512 state
    constexpr uint64_t kTiles = 0x600E6;  // and the configuration and the data of tiles
    const auto saves_all = [&](uint64_t wanted) { return (saved_ & wanted) == wanted; };
    switch (registers) {
      case cpu::Registers::kBaseline: return true;
      case cpu::Registers::kYmm: return saves_all(kYmm);
      case cpu::Registers::kZmm: return saves_all(kZmm);
      case cpu::Registers::kTiles: return saves_all(kTiles) && may_use_tiles();
      case cpu::Registers::kNeon: break;
    }
    return false;
  }

 private:
  const CpuidRegisters basic_ = cpuid(1, 0), extended_ = cpuid(7, 0), extended1_ = cpuid(7, 1);
  const uint64_t saved_ = bit(basic_.ecx, 27) ? saved_registers() : 0;  // OSXSAVE: xgetbv may be executed
};

IsaLevel detect(const cpu::Level& level) {
  if (level.registers == cpu::Registers::kNeon)
    return {.name = std::string(level.name), .detail = "processor is not 64-bit Arm"};
  static const Features features;
  IsaLevel result{.name = std::string(level.name), .cpu_has = true, .os_allows = features.saves(level.registers)};
  std::string present, missing;
  for (const std::string_view need : level.needs) {
    std::string& list = features.has(need) ? present : missing;
    if (!list.empty()) list += ' ';
    list += need;
  }
  result.cpu_has = missing.empty();
  result.detail = present;
  if (!result.cpu_has)
    result.detail = "processor lacks " + missing;
  else if (!result.os_allows)
    result.detail =
        "operating system does not save the registers" +
        std::string(level.registers == cpu::Registers::kTiles ? ", or does not permit this process to use them" : "");
  return result;
}

std::string processor_name() {
  std::string name;
  for (uint32_t leaf = 0x80000002U; leaf <= 0x80000004U; ++leaf) {
    const CpuidRegisters r = cpuid(leaf, 0);
    for (uint32_t word : {r.eax, r.ebx, r.ecx, r.edx})
      for (int shift = 0; shift < 32; shift += 8) name += static_cast<char>(word >> shift & 0xFFU);
  }
  name.erase(std::find(name.begin(), name.end(), '\0'), name.end());
  const size_t first = name.find_first_not_of(' ');
  const size_t last = name.find_last_not_of(' ');
  return first == std::string::npos ? "unknown x86-64" : name.substr(first, last - first + 1);
}

#else

#if defined(__aarch64__)

/// Returns whether the processor has a feature, named as Linux names it, and the operating system allows it.
bool processor_has(std::string_view feature) { return feature == "bf16" && (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0; }

#else

bool processor_has(std::string_view /*feature*/) { return false; }

#endif

IsaLevel detect(const cpu::Level& level) {
  IsaLevel result{.name = std::string(level.name)};
  const bool arm = level.registers == cpu::Registers::kNeon;
  if (!arm && level.registers != cpu::Registers::kBaseline) {
    result.detail = "processor is not x86-64";
    return result;
  }
  std::string present, missing;
  for (const std::string_view need : level.needs) {
    std::string& list = processor_has(need) ? present : missing;
    if (!list.empty()) list += ' ';
    list += need;
  }
  result.cpu_has = result.os_allows = missing.empty();
  result.detail = missing.empty() ? present : "processor lacks " + missing;
  return result;
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

std::vector<IsaLevel> detect_isa() {
  std::vector<IsaLevel> all;
  for (const cpu::Level& level : cpu::levels()) {
    IsaLevel& found = all.emplace_back(detect(level));
    found.built = level.kernels != nullptr;
    if (!found.cpu_has || !found.os_allows) continue;
    if (!found.built) found.detail = "not in this build";
    if (found.detail.empty()) found.detail = "baseline instructions";
  }
  // In turns, so that a neighbour or a change of the clock rate meets all levels; the fastest burst counts.
  constexpr int kTurns = 20;
  const auto levels = cpu::levels();
  for (int turn = 0; turn < kTurns; ++turn)
    for (size_t i = 0; i < all.size(); ++i)
      if (levels[i].burst != nullptr && all[i].cpu_has && all[i].os_allows)
        all[i].gflops = std::max(all[i].gflops, levels[i].burst());
  return all;
}

}  // namespace

namespace dispatch {

int32_t usable_threads() {
  const auto count = static_cast<int32_t>(core::usable_processors().size());
  return count > 0 ? count : std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency()));
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

std::vector<int32_t> usable_processors() { return core::usable_processors(); }

std::string_view version() { return MLA_VERSION; }

}  // namespace mla
