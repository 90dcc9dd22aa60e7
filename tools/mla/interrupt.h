// SPDX-License-Identifier: Apache-2.0
// Turns Ctrl-C into a request to stop, for commands that have something to show for what is done.
#pragma once

#include <pthread.h>

#include <atomic>
#include <csignal>
#include <thread>

namespace mla::cli {

constexpr int kExitInterrupted = 130;  ///< as a shell reports a program that SIGINT ended

inline std::atomic<bool> stop_requested = false;

/// While it lives, the first Ctrl-C sets `stop_requested`; a second one ends the program at once. It must be made
/// before other threads are, which inherit that they do not take the signal.
///
/// A thread waits for the signal, and no handler runs on any other: oneDNN's kernels for AVX2 keep data where the frame
/// of a handler would lie. With a handler on the thread that happened to compute, half of the interrupted replays died
/// of a corrupted heap (oneDNN 2.6.3 with ONEDNN_MAX_CPU_ISA=AVX2, 2026-11-26).
class InterruptGuard {
 public:
  InterruptGuard() {
    stop_requested = false;
    previous_handler_ = std::signal(SIGINT, SIG_DFL);  // a shell lets its background jobs ignore the signal
    sigemptyset(&interrupt_);
    sigaddset(&interrupt_, SIGINT);
    pthread_sigmask(SIG_BLOCK, &interrupt_, &previous_);
    waiter_ = std::thread([this] { wait(); });
  }
  ~InterruptGuard() {
    done_ = true;
    pthread_kill(waiter_.native_handle(), SIGINT);
    waiter_.join();
    pthread_sigmask(SIG_SETMASK, &previous_, nullptr);
    std::signal(SIGINT, previous_handler_);
  }
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

 private:
  void wait() {
    for (int signal = 0;;) {
      sigwait(&interrupt_, &signal);
      if (done_) return;
      if (stop_requested.exchange(true)) break;
    }
    pthread_sigmask(SIG_UNBLOCK, &interrupt_, nullptr);
    std::raise(SIGINT);
  }

  sigset_t interrupt_ = {}, previous_ = {};
  void (*previous_handler_)(int) = SIG_DFL;
  std::atomic<bool> done_ = false;
  std::thread waiter_;
};

}  // namespace mla::cli
