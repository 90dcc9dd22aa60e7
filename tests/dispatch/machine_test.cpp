// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include <fstream>
#include <sstream>
#include <thread>

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
  ASSERT_EQ(info.isa.size(), 4U);
  const char* names[] = {"avx512_bf16", "avx512", "avx2", "portable"};
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(info.isa[i].name, names[i]);
    EXPECT_FALSE(info.isa[i].detail.empty());
  }
  EXPECT_TRUE(info.isa[3].cpu_has && info.isa[3].os_allows && info.isa[3].built);
  EXPECT_FALSE(info.cpu.empty());
  EXPECT_GE(info.threads, 1);
  EXPECT_LE(info.threads, static_cast<int32_t>(std::thread::hardware_concurrency()));
  EXPECT_EQ(&machine_info(), &info);
}

TEST(MachineInfo, AgreesWithTheKernel) {
  const std::string flags = processor_flags();  // Linux lists what processor and kernel both allow
  if (flags.empty()) GTEST_SKIP() << "no processor flags in /proc/cpuinfo";
  const struct {
    size_t level;
    std::vector<const char*> needs;
  } cases[] = {{0, {" avx512_bf16 ", " avx512f ", " avx512bw ", " avx512vl ", " avx512dq ", " avx512cd "}},
               {1, {" avx512f ", " avx512bw ", " avx512vl ", " avx512dq ", " avx512cd "}},
               {2, {" avx2 ", " fma ", " f16c "}}};
  for (const auto& expected : cases) {
    bool all = true;
    for (const char* flag : expected.needs) all = all && flags.find(flag) != std::string::npos;
    const IsaLevel& level = machine_info().isa[expected.level];
    EXPECT_EQ(level.cpu_has && level.os_allows, all) << level.name << ": " << level.detail;
  }
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
