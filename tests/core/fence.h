// SPDX-License-Identifier: Apache-2.0
// Holds memory that ends where nobody may touch any.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>

namespace mla {

inline size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

/// Holds memory whose last byte stands right before pages that must not be touched: one, or as many as `fence` bytes
/// take.
class FencedMemory {
 public:
  explicit FencedMemory(size_t size, size_t fence = 1) {
    const auto unit = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t behind = round_up(fence, unit);
    mapped_ = round_up(size, unit) + behind;
    void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return;
    start_ = static_cast<std::byte*>(memory);
    if (mprotect(start_ + mapped_ - behind, behind, PROT_NONE) != 0) return;
    data_ = start_ + mapped_ - behind - size;
  }
  ~FencedMemory() {
    if (start_ != nullptr) munmap(start_, mapped_);
  }
  FencedMemory(const FencedMemory&) = delete;
  FencedMemory& operator=(const FencedMemory&) = delete;

  /// Returns the memory; null if there is none.
  std::byte* data() const { return data_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  /// Makes all of it memory that must not be touched from now on. Returns false if it may be.
  bool close() const { return mprotect(start_, mapped_, PROT_NONE) == 0; }

 private:
  std::byte* start_ = nullptr;
  std::byte* data_ = nullptr;
  size_t mapped_ = 0;
};

}  // namespace mla
