// SPDX-License-Identifier: Apache-2.0
// A stack of its own for every CUDA thread, and the switch between them; tells the sanitizers what it does.
#pragma once

#include <boost/context/detail/fcontext.hpp>
#include <cstddef>
#include <cstdint>

#include "emulator/device.h"
#include "emulator/sanitizers.h"
#if MLA_EMULATOR_ASAN
#include <sanitizer/common_interface_defs.h>
#endif
#if MLA_EMULATOR_TSAN
#include <sanitizer/tsan_interface.h>
#endif

namespace mla::emulator {

/// A place to continue: a CUDA thread, or the host thread that runs the block.
struct Fiber {
  boost::context::detail::fcontext_t context = nullptr;
  ThreadView view;
  std::byte* stack = nullptr;  // lowest address
  size_t stack_bytes = 0;
  void* tsan = nullptr;
};

/// Stacks for a number of fibers, mapped once and reused from block to block.
class Stacks {
 public:
  Stacks() = default;
  ~Stacks();
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  /// False if there is no memory for them.
  bool reserve(int32_t num_fibers);
  /// Makes `fiber`, number `index`, start at `entry` when it is next switched to, whatever it was doing.
  void restart(Fiber& fiber, int32_t index, void (*entry)(boost::context::detail::transfer_t));

 private:
  std::byte* memory_ = nullptr;
  size_t bytes_ = 0;
  int32_t num_fibers_ = 0;
};

/// Completes a switch: in the fiber that was switched to.
inline void finish_switch(boost::context::detail::transfer_t transfer, [[maybe_unused]] void* fake_stack) {
  auto& from = *static_cast<Fiber*>(transfer.data);
  from.context = transfer.fctx;
#if MLA_EMULATOR_ASAN
  const void* bottom = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(fake_stack, &bottom, &bytes);
  from.stack = static_cast<std::byte*>(const_cast<void*>(bottom));  // the host's is known only now
  from.stack_bytes = bytes;
#endif
}

/// Continues `to`; returns when something switches back to `from`. Inlined all the way up to what the kernel called:
/// the processor predicts none of the returns that follow a switch.
[[gnu::always_inline]] inline void switch_fiber(Fiber& from, Fiber& to) {
  current_thread = &to.view;
  void* fake_stack = nullptr;
#if MLA_EMULATOR_ASAN
  __sanitizer_start_switch_fiber(&fake_stack, to.stack, to.stack_bytes);
#endif
#if MLA_EMULATOR_TSAN
  __tsan_switch_to_fiber(to.tsan, 0);
#endif
  finish_switch(boost::context::detail::jump_fcontext(to.context, &from), fake_stack);
}

/// For the host thread's fiber, before and after it runs others.
void adopt_host(Fiber& host);
/// After a fiber has been abandoned or its stack is to go.
void forget_fiber(Fiber& fiber);

}  // namespace mla::emulator
