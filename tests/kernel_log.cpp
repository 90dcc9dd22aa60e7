// SPDX-License-Identifier: Apache-2.0
// Is part of every GoogleTest program: writes down which emulated kernels it runs, if MLA_KERNEL_LOG names a folder.
// scripts/kernels_not_run.py reads that. A line has the program and the address of a kernel's entry in its file.
#include <link.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>

#include "emulator/emulator.h"

namespace {

/// Returns where the program's first segment was loaded.
uintptr_t program_base() {
  uintptr_t base = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* to) {
        *static_cast<uintptr_t*>(to) = info->dlpi_addr;
        return 1;  // the program is the first object
      },
      &base);
  return base;
}

std::string program() {
  std::array<char, 4096> path;
  const ssize_t length = readlink("/proc/self/exe", path.data(), path.size());
  return {path.data(), length > 0 ? static_cast<size_t>(length) : 0};
}

void write_down(const mla::emulator::Launch& launch) {
  static std::mutex mutex;
  static std::set<uintptr_t> seen;
  const std::lock_guard lock(mutex);
  const auto entry = reinterpret_cast<uintptr_t>(launch.entry);
  if (!seen.insert(entry).second) return;
  const std::string path = std::string(std::getenv("MLA_KERNEL_LOG")) + "/" + std::to_string(getpid());
  std::FILE* const file = std::fopen(path.c_str(), "a");
  if (file == nullptr) return std::perror(path.c_str());
  std::fprintf(file, "%s %jx\n", program().c_str(), static_cast<uintmax_t>(entry - program_base()));
  std::fclose(file);
}

[[maybe_unused]] const bool installed = [] {
  if (std::getenv("MLA_KERNEL_LOG") == nullptr) return false;
  mla::emulator::launch_observer = write_down;
  return true;
}();

}  // namespace
