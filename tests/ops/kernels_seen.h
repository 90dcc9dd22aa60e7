// SPDX-License-Identifier: Apache-2.0
// Lets a test see which kernels of an emulated GPU compute a problem, where a backend has several for it: a test of a
// kernel that is never chosen cannot fail.
#pragma once

#include <mutex>
#include <set>
#include <string>

#include "cuda/runtime/emulated_queue.h"

namespace mla {

/// Notes the names of kernels that are launched on emulated GPUs while it lives. One may live at a time.
class KernelsSeen {
 public:
  KernelsSeen() {
    all().names.clear();
    cuda::emulator_launch_observer() = [](const char* kernel) {
      const std::lock_guard lock(all().mutex);
      all().names.insert(kernel);
    };
  }
  ~KernelsSeen() { cuda::emulator_launch_observer() = nullptr; }
  KernelsSeen(const KernelsSeen&) = delete;
  KernelsSeen& operator=(const KernelsSeen&) = delete;

  bool contains(const std::string& kernel) const {
    const std::lock_guard lock(all().mutex);
    return all().names.contains(kernel);
  }

 private:
  struct Names {
    std::mutex mutex;
    std::set<std::string> names;
  };
  static Names& all() {
    static Names names;
    return names;
  }
};

}  // namespace mla
