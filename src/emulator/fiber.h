// SPDX-License-Identifier: Apache-2.0
// A fiber is a stack of its own for a CUDA thread. Switches between fibers are announced to the sanitizers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "emulator/device.h"
#include "emulator/sanitizers.h"
#include "emulator/stack_switch.h"
#if MLA_EMULATOR_ASAN
#include <sanitizer/common_interface_defs.h>
#endif
#if MLA_EMULATOR_TSAN
#include <sanitizer/tsan_interface.h>
#endif

namespace mla::emulator {

/// Holds a place where execution can continue: a CUDA thread, or the host thread that runs the block.
struct Fiber : StackPlace {
  ThreadView view;
  std::byte* stack = nullptr;  // lowest address
  size_t stack_bytes = 0;
  void* tsan = nullptr;
};

/// Holds the stacks of a number of fibers, mapped once and reused from block to block.
class Stacks {
 public:
  Stacks() = default;
  ~Stacks();
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  /// Maps the stacks; returns false if there is no memory for them.
  bool reserve(int32_t num_fibers);
  /// Makes `fiber`, number `index`, start at `entry` when it is next switched to, wherever it was.
  void restart(Fiber& fiber, int32_t index, void (*entry)(StackPlace& from));

 private:
  std::byte* memory_ = nullptr;
  size_t bytes_ = 0;
  int32_t num_fibers_ = 0;
};

/// Completes a switch away from `left`. It is called in the fiber that was switched to.
inline void finish_switch([[maybe_unused]] StackPlace& left, [[maybe_unused]] void* fake_stack) {
#if MLA_EMULATOR_ASAN
  const void* bottom = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(fake_stack, &bottom, &bytes);
  auto& from = static_cast<Fiber&>(left);
  from.stack = static_cast<std::byte*>(const_cast<void*>(bottom));  // the host thread's stack is known only now
  from.stack_bytes = bytes;
#endif
}

/// Continues `to`, and returns when something switches back to `from`. It is inlined into the functions that kernels
/// call, because the processor predicts none of the returns that follow a switch.
[[gnu::always_inline]] inline void switch_fiber(Fiber& from, Fiber& to) {
  current_thread = &to.view;
  void* fake_stack = nullptr;
#if MLA_EMULATOR_ASAN
  __sanitizer_start_switch_fiber(&fake_stack, to.stack, to.stack_bytes);
#endif
#if MLA_EMULATOR_TSAN
  __tsan_switch_to_fiber(to.tsan, 0);
#endif
  finish_switch(switch_stack(from, to), fake_stack);
}

/// Is called with the host thread's fiber before and after it runs others.
void adopt_host(Fiber& host);
/// Is called after a fiber has been abandoned, or before its stack is unmapped.
void forget_fiber(Fiber& fiber);

}  // namespace mla::emulator
