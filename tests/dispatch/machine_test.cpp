// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "cpu/levels.h"
#include "dispatch/gpus.h"
#include "mla/mla.h"

namespace mla {
namespace {

std::string processor_flags() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("flags")) return line + " ";
  return {};
}

TEST(MachineInfo, ListsTheLevelsBestFirst) {
  const MachineInfo& info = machine_info();
  std::vector<std::string> names = {"amx", "avx512_bf16", "avx512", "avx2", "neon_bf16", "portable"};
  if (info.isa.size() > names.size()) names.emplace_back("amx_emulated");  // which a build may leave out
  ASSERT_EQ(info.isa.size(), names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    EXPECT_EQ(info.isa[i].name, names[i]);
    EXPECT_FALSE(info.isa[i].detail.empty());
    if (names[i] != "portable") continue;
    EXPECT_TRUE(info.isa[i].cpu_has && info.isa[i].os_allows && info.isa[i].built);
  }
  EXPECT_FALSE(info.cpu.empty());
  EXPECT_GE(info.threads, 1);
  EXPECT_LE(info.threads, static_cast<int32_t>(std::thread::hardware_concurrency()));
  EXPECT_EQ(&machine_info(), &info);
}

std::vector<IsaLevel> levels_of(double bf16, double f32) {
  return {{.name = "avx512_bf16", .gflops = bf16}, {.name = "avx512", .gflops = f32}, {.name = "avx2"}};
}

const cpu::Level& level_of(std::string_view name) { return *std::ranges::find(cpu::levels(), name, &cpu::Level::name); }

TEST(MachineInfo, PairsOfBf16AreMultipliedWhereThatIsFaster) {
  const cpu::Level& pairs = level_of("avx512_bf16");
  EXPECT_TRUE(cpu::slower_pairs(pairs, levels_of(471, 252)).empty());
  EXPECT_TRUE(cpu::slower_pairs(pairs, levels_of(250, 250)).empty());
  EXPECT_EQ(cpu::slower_pairs(pairs, levels_of(68.7, 140.2)).str(),
            "can, but a thread multiplies 69 GFLOP/s of bf16 pairs here, and 140 of f32");
  EXPECT_TRUE(cpu::slower_pairs(pairs, levels_of(0, 0)).empty());  // neither is there
  EXPECT_TRUE(cpu::slower_pairs(pairs, {}).empty());
  const auto on_arm = [](double bf16, double f32) {
    const std::vector<IsaLevel> levels = {{.name = "neon_bf16", .gflops = bf16}, {.name = "portable", .gflops = f32}};
    return std::string(cpu::slower_pairs(level_of("neon_bf16"), levels).str());
  };
  EXPECT_EQ(on_arm(90, 45), "");
  EXPECT_EQ(on_arm(40, 45), "can, but a thread multiplies 40 GFLOP/s of bf16 pairs here, and 45 of f32");
  EXPECT_EQ(on_arm(0, 45), "");  // a processor without bf16
}

// What is chosen is what was measured, and a forced row runs all the same.
TEST(MachineInfo, TheChoiceFollowsTheRates) {
  std::string fastest, first;  // of those that were measured
  double rate = 0;
  for (const cpu::Level& level : cpu::levels()) {
    const IsaLevel& found = *std::ranges::find(isa_levels(), level.name, &IsaLevel::name);
    const bool there = found.cpu_has && found.os_allows && found.built;
    EXPECT_EQ(found.gflops > 0, there && level.burst != nullptr) << level.name;
    if (found.gflops == 0) continue;
    if (first.empty()) first = level.row;
    if (found.gflops > rate) fastest = level.row;
    rate = std::max(rate, found.gflops);
  }
  if (first.empty()) GTEST_SKIP() << "nothing to choose by rates";
  for (Op op : {Op::kDecode, Op::kDecodeSparse, Op::kPrefill, Op::kPrefillSparse, Op::kIndexerLogits})
    EXPECT_EQ(explain({.op = op}, "auto").selected, fastest) << name(op);
  EXPECT_EQ(explain({.q_dtype = DType::kF32}, "auto").selected, first);  // all multiply f32 alike
  EXPECT_EQ(explain({}, first).selected, first);
}

TEST(MachineInfo, AgreesWithTheKernel) {
#if !defined(__x86_64__)
  GTEST_SKIP() << "the levels with needs are x86-64's";  // and an emulator shows the host's /proc/cpuinfo
#endif
  const std::string flags = processor_flags();  // Linux lists what processor and kernel both allow
  if (flags.empty()) GTEST_SKIP() << "no processor flags in /proc/cpuinfo";
  const struct {
    size_t level;
    std::vector<const char*> needs;
  } cases[] = {{0, {" amx_tile ", " amx_bf16 ", " avx512_bf16 ", " avx512f "}},
               {1, {" avx512_bf16 ", " avx512f ", " avx512bw ", " avx512vl ", " avx512dq ", " avx512cd "}},
               {2, {" avx512f ", " avx512bw ", " avx512vl ", " avx512dq ", " avx512cd "}},
               {3, {" avx2 ", " fma ", " f16c "}}};
  for (const auto& expected : cases) {
    bool all = true;
    for (const char* flag : expected.needs) all = all && flags.find(flag) != std::string::npos;
    const IsaLevel& level = machine_info().isa[expected.level];
    EXPECT_EQ(level.cpu_has && level.os_allows, all) << level.name << ": " << level.detail;
  }
}

/// Makes an empty folder, which goes with the object.
class Folder {
 public:
  Folder() { std::filesystem::create_directories(path_); }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  void add_gpu(const std::string& bus_location, const std::string& information) const {
    std::filesystem::create_directories(path_ / bus_location);
    std::ofstream(path_ / bus_location / "information") << information;
  }

 private:
  std::filesystem::path path_ = testing::TempDir() + "mla_gpus_" + std::to_string(getpid());
};

/// Returns what driver 580 writes of a GPU.
std::string information(const std::string& model, const std::string& uuid, const std::string& bus_location,
                        const std::string& excluded) {
  return "Model: \t\t " + model + "\nIRQ:   \t\t 41\nGPU UUID: \t " + uuid +
         "\nVideo BIOS: \t 96.00.a5.00.1a\nBus Type: \t PCIe\nDMA Size: \t 52 bits\nBus Location: \t " + bus_location +
         "\nDevice Minor: \t 0\nGPU Firmware: \t 580.159.04\nGPU Excluded:\t " + excluded + "\n";
}

TEST(NvidiaGpus, AreReadByBusLocation) {
  const Folder folder;
  folder.add_gpu("0000:3b:00.0", information("NVIDIA L4", "GPU-" + std::string(8, '?'), "0000:3b:00.0", "No"));
  folder.add_gpu("0000:19:00.0", information("NVIDIA H200", "GPU-f3241ad2-15ec", "0000:19:00.0", "No"));
  folder.add_gpu("0000:5d:00.0", information("NVIDIA T4", "GPU-1", "0000:5d:00.0", "Yes"));
  const std::vector<GpuInfo> gpus = dispatch::nvidia_gpus(folder.path());
  ASSERT_EQ(gpus.size(), 2U);
  EXPECT_EQ(gpus[0].name, "NVIDIA H200");
  EXPECT_EQ(gpus[0].bus_location, "0000:19:00.0");
  EXPECT_EQ(gpus[0].uuid, "GPU-f3241ad2-15ec");
  EXPECT_EQ(gpus[1].name, "NVIDIA L4");
  EXPECT_EQ(gpus[1].bus_location, "0000:3b:00.0");
  EXPECT_EQ(gpus[1].uuid, "");
}

TEST(NvidiaGpus, NoneWhereThereIsNoDriver) {
  const Folder folder;
  EXPECT_TRUE(dispatch::nvidia_gpus(folder.path()).empty());
  EXPECT_TRUE(dispatch::nvidia_gpus(folder.path() / "missing").empty());
  std::ofstream(folder.path() / "file") << "text";
  EXPECT_TRUE(dispatch::nvidia_gpus(folder.path()).empty());
  EXPECT_TRUE(dispatch::nvidia_gpus(folder.path() / "file").empty());
}

TEST(NvidiaGpus, OtherTextIsPassedOver) {
  const Folder folder;
  folder.add_gpu("0000:01:00.0", "");
  folder.add_gpu("0000:02:00.0", "Model:\nno colon\n\n: \n");
  folder.add_gpu("0000:03:00.0", std::string("\0\xFF: \n\n", 5) + "IRQ: 4\n");
  folder.add_gpu("0000:04:00.0", "Model: NVIDIA H200\r\nGPU UUID");
  std::filesystem::create_directories(folder.path() / "0000:05:00.0" / "information");
  const std::vector<GpuInfo> gpus = dispatch::nvidia_gpus(folder.path());
  ASSERT_EQ(gpus.size(), 1U);
  EXPECT_EQ(gpus[0].name, "NVIDIA H200");
  EXPECT_EQ(gpus[0].bus_location, "0000:04:00.0");  // of the folder
  EXPECT_EQ(gpus[0].uuid, "");
}

TEST(MachineInfo, ListsTheGpusOfTheDriver) {
  const std::vector<GpuInfo> gpus = dispatch::nvidia_gpus(dispatch::kNvidiaGpus);
  std::vector<std::string> found;
  for (const GpuInfo& gpu : machine_info().gpus) found.push_back(gpu.bus_location);
  for (const GpuInfo& gpu : gpus) EXPECT_THAT(found, testing::Contains(gpu.bus_location));
  for (const GpuInfo& gpu : machine_info().gpus) {
    if (gpu.index < 0) continue;
    EXPECT_GE(gpu.arch, 50) << gpu.name;
    EXPECT_GT(gpu.num_sms, 0) << gpu.name;
    EXPECT_GT(gpu.memory_bytes, 0) << gpu.name;
    EXPECT_GE(gpu.shared_bytes_per_block, 48 * 1024) << gpu.name;
    EXPECT_GT(gpu.l2_bytes, 0) << gpu.name;
  }
}

TEST(MergeGpus, ByBusLocationInEitherSpelling) {
  std::vector<GpuInfo> listed = {{.name = "NVIDIA L4", .bus_location = "0000:3b:00.0"},
                                 {.name = "NVIDIA H200", .bus_location = "0000:19:00.0"}};
  dispatch::merge_gpus(listed, {{.name = "NVIDIA L4", .bus_location = "00000000:3B:00.0", .index = 0, .arch = 89},
                                {.name = "NVIDIA A100", .bus_location = "0000:01:00.0", .index = 1, .arch = 80}});
  ASSERT_EQ(listed.size(), 3U);
  EXPECT_EQ(listed[0].arch, 80);
  EXPECT_EQ(listed[0].bus_location, "0000:01:00.0");
  EXPECT_EQ(listed[1].name, "NVIDIA H200");
  EXPECT_EQ(listed[1].index, -1);
  EXPECT_EQ(listed[2].bus_location, "0000:3b:00.0");
  EXPECT_EQ(listed[2].arch, 89);
  EXPECT_EQ(listed[2].index, 0);
}

TEST(Version, IsThatOfTheProject) {
  EXPECT_THAT(std::string(version()), testing::MatchesRegex("[0-9]+\\.[0-9]+\\.[0-9]+"));
}

TEST(Names, CoverEveryValueAndUnknownOnes) {
  EXPECT_EQ(name(DType::kE4M3), "e4m3");
  EXPECT_EQ(name(DType::kNone), "none");
  EXPECT_EQ(name(static_cast<DType>(99)), "unknown");
  EXPECT_EQ(name(Op::kMergeStates), "merge_states");
  EXPECT_EQ(name(static_cast<Op>(99)), "unknown");
  EXPECT_EQ(name(DeviceType::kCuda), "cuda");
  EXPECT_EQ(name(static_cast<DeviceType>(99)), "unknown");
}

}  // namespace
}  // namespace mla
