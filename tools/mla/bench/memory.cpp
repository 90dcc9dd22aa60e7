// SPDX-License-Identifier: Apache-2.0
#include "mla/bench/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <utility>

#include "mla/text.h"

namespace mla::bench {
namespace {

// The first number in a one-line file of the kernel, or -1 ("max", no such file).
int64_t read_number(const char* path) {
  std::ifstream file(path);
  int64_t value = -1;
  return file >> value ? value : -1;
}

}  // namespace

Buffer::Buffer(size_t bytes, bool huge_pages) : size_(bytes) {
  if (bytes == 0) return;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    throw cli::UsageError("not enough memory for a buffer of {}", cli::human_bytes(static_cast<double>(bytes)));
  data_ = static_cast<std::byte*>(memory);
#ifdef MADV_HUGEPAGE
  // A refusal only costs speed: kernels without huge pages answer EINVAL.
  if (huge_pages) static_cast<void>(madvise(memory, bytes, MADV_HUGEPAGE));
#else
  static_cast<void>(huge_pages);
#endif
}

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Buffer::~Buffer() {
  if (data_ != nullptr) munmap(data_, size_);
}

int64_t available_memory() {
  int64_t available = 0;
  std::ifstream meminfo("/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);)
    if (line.starts_with("MemAvailable:")) available = std::strtoll(line.c_str() + 13, nullptr, 10) * 1024;
  const int64_t limit = read_number("/sys/fs/cgroup/memory.max");
  const int64_t used = read_number("/sys/fs/cgroup/memory.current");
  if (limit >= 0 && used >= 0 && available > 0) available = std::min(available, std::max<int64_t>(limit - used, 0));
  return available;
}

int64_t l3_cache_size() {
#ifdef _SC_LEVEL3_CACHE_SIZE
  if (const int64_t bytes = sysconf(_SC_LEVEL3_CACHE_SIZE); bytes > 0) return bytes;
#endif
  const int64_t kib = read_number("/sys/devices/system/cpu/cpu0/cache/index3/size");
  return kib > 0 ? kib * 1024 : 0;
}

}  // namespace mla::bench
