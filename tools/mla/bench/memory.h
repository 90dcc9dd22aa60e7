// SPDX-License-Identifier: Apache-2.0
// Holds large buffers for benchmarks, and says how much memory there is for them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mla::bench {

/// Holds zeroed, page-aligned memory. Throws UsageError if the system refuses.
class Buffer {
 public:
  Buffer() = default;
  /// `huge_pages` asks for transparent huge pages, so that random page tables do not measure the TLB.
  Buffer(size_t bytes, bool huge_pages);
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer();

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

/// Returns the bytes that may still be allocated without swapping, the limit of a memory cgroup included; 0 if unknown.
int64_t available_memory();

/// Returns the bytes of the last-level cache; 0 if unknown.
int64_t l3_cache_size();

}  // namespace mla::bench
