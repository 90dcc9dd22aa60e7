// SPDX-License-Identifier: Apache-2.0
// Tests what is said of AMX where Linux refuses a process its tiles. It is a program of its own, since a process that
// has asked once knows the answer.
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <fstream>
#include <iterator>
#include <string>

#include "cpu/levels.h"
#include "mla/backend.h"

namespace mla {
namespace {

bool has_tiles() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("flags")) return (line + " ").find(" amx_bf16 ") != std::string::npos;
  return false;
}

/// Has arch_prctl fail where a process asks for registers that must be permitted.
bool deny_tiles() {
  constexpr unsigned kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_arch_prctl, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kRequestPermission, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program = {.len = std::size(filter), .filter = filter};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

TEST(TilePermission, IsAVerdictWhereLinuxDeniesIt) {
  if (!has_tiles()) GTEST_SKIP() << "the processor has no AMX";
  ASSERT_TRUE(deny_tiles());
  const auto& isa = machine_info().isa;
  const auto amx = std::ranges::find(isa, "amx", &IsaLevel::name);
  ASSERT_NE(amx, isa.end());
  EXPECT_TRUE(amx->cpu_has);
  EXPECT_FALSE(amx->os_allows);
  EXPECT_NE(amx->detail.find("does not permit this process"), std::string::npos) << amx->detail;
  const auto level = std::ranges::find(cpu::levels(), "amx", &cpu::Level::name);
  ASSERT_NE(level, cpu::levels().end());
  EXPECT_EQ(cpu::missing(*level).str(), "the operating system does not enable amx");
}

}  // namespace
}  // namespace mla
