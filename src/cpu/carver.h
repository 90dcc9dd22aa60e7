// SPDX-License-Identifier: Apache-2.0
// This allocator lays arrays into a workspace.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mla::cpu {

/// Hands out arrays of a buffer, aligned to 64 bytes. With a null base it only counts their bytes.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}

  template <class T>
  T* take(int64_t count) {
    auto* piece = base_ != nullptr ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return piece;
  }
  size_t used() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

}  // namespace mla::cpu
