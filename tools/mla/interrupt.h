// SPDX-License-Identifier: Apache-2.0
// Turns Ctrl-C into a request to stop, for commands that have something to show for what is done.
#pragma once

#include <atomic>
#include <csignal>

namespace mla::cli {

constexpr int kExitInterrupted = 130;  ///< as a shell reports a program that SIGINT ended

inline std::atomic<bool> stop_requested = false;
static_assert(std::atomic<bool>::is_always_lock_free, "the signal handler writes it");

/// While it lives, the first Ctrl-C sets `stop_requested`; a second one ends the program at once.
class InterruptGuard {
 public:
  InterruptGuard() {
    stop_requested = false;
    struct sigaction action = {};
    action.sa_handler = [](int) { stop_requested = true; };
    action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
    sigaction(SIGINT, &action, &previous_);
  }
  ~InterruptGuard() { sigaction(SIGINT, &previous_, nullptr); }
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

 private:
  struct sigaction previous_ = {};
};

}  // namespace mla::cli
