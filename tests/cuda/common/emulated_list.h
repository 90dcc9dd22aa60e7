// SPDX-License-Identifier: Apache-2.0
// Runs the planner and combine of one emulated architecture over a work list in guarded memory.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "cuda/common/combine.h"
#include "cuda/common/plan.h"
#include "emulator/test_queue.h"

namespace mla::plan_test {

using namespace mla::MLA_CUDA_NAMESPACE;  // NOLINT(google-build-using-namespace): the machine under test

using emulated_test::TestQueue;

/// Holds a work list in memory of its own, filled with garbage, with a guard behind it.
class ListMemory {
 public:
  explicit ListMemory(const cuda::WorkShape& shape) : size_(work_list_bytes(shape)), bytes_(size_ + kGuard + kAlign) {
    const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
    base_ = bytes_.data() + (kAlign - address % kAlign) % kAlign;
    std::memset(bytes_.data(), 0xA5, bytes_.size());
    list = place_work_list(shape, base_);
  }
  ListMemory(const ListMemory&) = delete;
  ListMemory& operator=(const ListMemory&) = delete;

  bool guard_intact() const {
    for (size_t i = 0; i < kGuard; ++i)
      if (base_[size_ + i] != std::byte{0xA5}) return false;
    return true;
  }
  bool same_bytes(const ListMemory& other) const {
    return size_ == other.size_ && std::memcmp(base_, other.base_, size_) == 0;
  }

  cuda::WorkList list = {};

 private:
  static constexpr size_t kAlign = 64, kGuard = 256;
  size_t size_;
  std::vector<std::byte> bytes_;
  std::byte* base_ = nullptr;
};

template <class Args>
void expect_planned(const cuda::WorkShape& shape, const Args& args, const ListMemory& memory, uint64_t seed = 0) {
  TestQueue queue(seed);
  const Status status = plan_work(shape, args, memory.list, queue);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(memory.guard_intact());
}

}  // namespace mla::plan_test
