// SPDX-License-Identifier: Apache-2.0
// Lets a test see which kernels of an emulated GPU compute a problem, where a backend has several for it: a test of a
// kernel that is never chosen cannot fail.
#pragma once

#include <mutex>
#include <set>
#include <string>

#include "emulator/emulator.h"

namespace mla {

/// Notes the names of kernels that are launched on emulated GPUs while it lives. One may live at a time.
class KernelsSeen {
 public:
  KernelsSeen() : before_(emulator::launch_observer) {
    all().names.clear();
    all().next = before_;
    emulator::launch_observer = [](const emulator::Launch& launch) {
      const std::lock_guard lock(all().mutex);
      all().names.insert(launch.name);
      if (all().next != nullptr) all().next(launch);
    };
  }
  ~KernelsSeen() { emulator::launch_observer = before_; }
  KernelsSeen(const KernelsSeen&) = delete;
  KernelsSeen& operator=(const KernelsSeen&) = delete;

  bool contains(const std::string& kernel) const {
    const std::lock_guard lock(all().mutex);
    return all().names.contains(kernel);
  }

 private:
  struct State {
    std::mutex mutex;
    std::set<std::string> names;
    emulator::LaunchObserver next = nullptr;
  };
  static State& all() {
    static State state;
    return state;
  }

  emulator::LaunchObserver before_;
};

}  // namespace mla
