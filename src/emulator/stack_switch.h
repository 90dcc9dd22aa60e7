// SPDX-License-Identifier: Apache-2.0
// A switch leaves one stack for another. On x86-64 it is a few instructions of our own, with which emulated attention
// takes a tenth less time than with Boost's: they stand where they are used, and leave alone the modes of
// floating-point arithmetic, which no kernel changes. Other processors have Boost's; builds with a sanitizer too, which
// test it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "emulator/sanitizers.h"

#if defined(__x86_64__) && !MLA_EMULATOR_ASAN && !MLA_EMULATOR_TSAN
#define MLA_EMULATOR_OWN_SWITCH 1
#else
#define MLA_EMULATOR_OWN_SWITCH 0
#include <boost/context/detail/fcontext.hpp>
#endif

namespace mla::emulator {

#if MLA_EMULATOR_OWN_SWITCH

/// Holds where to go on. The compiler saves all other registers that it needs.
struct StackPlace {
  void* stack_pointer = nullptr;
  void* frame_pointer = nullptr;
  void (*next)(StackPlace& from) = nullptr;  // the next instruction; of a new stack, its function
};

/// Makes the next switch to `place` call `entry` on a new stack, with the place that was left. `entry` never returns.
inline void begin_stack(StackPlace& place, std::byte* top, size_t, void (*entry)(StackPlace& from)) {
  // A function finds its return address 8 bytes below a multiple of 16. A 0 there ends a debugger's list of calls.
  auto* const return_address = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top) / 16 * 16) - 1;
  *return_address = nullptr;
  place = {return_address, nullptr, entry};
}

/// Goes on at `to`, until something switches to `from`: returns the place that was left then.
[[gnu::always_inline]] inline StackPlace& switch_stack(StackPlace& from, StackPlace& to) {
  StackPlace* left = &from;  // in %rdi, where a function has its first argument
  StackPlace* target = &to;
  asm volatile(
      "movq %%rsp, 0(%[left])\n\t"
      "movq %%rbp, 8(%[left])\n\t"
      "leaq 1f(%%rip), %%rax\n\t"
      "movq %%rax, 16(%[left])\n\t"
      "movq 0(%[target]), %%rsp\n\t"
      "movq 8(%[target]), %%rbp\n\t"
      "jmpq *16(%[target])\n"
      "1:"
      : [left] "+D"(left), [target] "+S"(target)
      :
      : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm1", "xmm2",
        "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15",
#ifdef __AVX512F__
        "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", "xmm27",
        "xmm28", "xmm29", "xmm30", "xmm31", "k1", "k2", "k3", "k4", "k5", "k6", "k7",
#endif
        "st", "st(1)", "st(2)", "st(3)", "st(4)", "st(5)", "st(6)", "st(7)", "cc", "memory");
  return *left;
}

#else

struct StackPlace {
  boost::context::detail::fcontext_t context = nullptr;
  void (*entry)(StackPlace& from) = nullptr;
};

struct StackSwitch {
  StackPlace& from;
  StackPlace& to;
};

/// Is called on the stack that was switched to: notes where the one that was left goes on.
inline StackPlace& note_left(boost::context::detail::transfer_t transfer) {
  StackPlace& left = static_cast<const StackSwitch*>(transfer.data)->from;
  left.context = transfer.fctx;
  return left;
}

inline void begin_stack(StackPlace& place, std::byte* top, size_t bytes, void (*entry)(StackPlace& from)) {
  const auto enter = [](boost::context::detail::transfer_t transfer) {
    const StackPlace& to = static_cast<const StackSwitch*>(transfer.data)->to;
    to.entry(note_left(transfer));
  };
  place = {boost::context::detail::make_fcontext(top, bytes, enter), entry};
}

[[gnu::always_inline]] inline StackPlace& switch_stack(StackPlace& from, StackPlace& to) {
  StackSwitch places{from, to};
  return note_left(boost::context::detail::jump_fcontext(to.context, &places));
}

#endif

}  // namespace mla::emulator
