// SPDX-License-Identifier: Apache-2.0
// These functions are loads and stores of global memory with cache hints, atomics, acquire and release (PTX ISA: ld,
// st, atom). Atomics, acquire and release take pointers into shared memory too (generic addresses).
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>

#include "cuda/ptx/shared.h"
#include "cuda/ptx/site.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

#if MLA_EMULATED
#define MLA_PTX_LOAD(name, instruction)                     \
  template <class T>                                        \
  MLA_DEVICE T name(const T* from MLA_PTX_SITE) {           \
    emulator::check_aligned(from, sizeof(T), MLA_PTX_HERE); \
    return *from;                                           \
  }
#else
#define MLA_PTX_LOAD(name, instruction)                                                                     \
  template <class T>                                                                                        \
  MLA_DEVICE T name(const T* from) {                                                                        \
    static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16); \
    if constexpr (sizeof(T) == 1) {                                                                         \
      uint32_t bits;                                                                                        \
      asm volatile(instruction ".u8 %0, [%1];" : "=r"(bits) : "l"(from) : "memory");                        \
      return std::bit_cast<T>(static_cast<uint8_t>(bits));                                                  \
    } else if constexpr (sizeof(T) == 2) {                                                                  \
      uint16_t bits;                                                                                        \
      asm volatile(instruction ".u16 %0, [%1];" : "=h"(bits) : "l"(from) : "memory");                       \
      return std::bit_cast<T>(bits);                                                                        \
    } else if constexpr (sizeof(T) == 4) {                                                                  \
      uint32_t bits;                                                                                        \
      asm volatile(instruction ".u32 %0, [%1];" : "=r"(bits) : "l"(from) : "memory");                       \
      return std::bit_cast<T>(bits);                                                                        \
    } else if constexpr (sizeof(T) == 8) {                                                                  \
      uint64_t bits;                                                                                        \
      asm volatile(instruction ".u64 %0, [%1];" : "=l"(bits) : "l"(from) : "memory");                       \
      return std::bit_cast<T>(bits);                                                                        \
    } else {                                                                                                \
      Vec4 v;                                                                                               \
      asm volatile(instruction ".v4.u32 {%0, %1, %2, %3}, [%4];"                                            \
                   : "=r"(v.x[0]), "=r"(v.x[1]), "=r"(v.x[2]), "=r"(v.x[3])                                 \
                   : "l"(from)                                                                              \
                   : "memory");                                                                             \
      return std::bit_cast<T>(v);                                                                           \
    }                                                                                                       \
  }
#endif

/// ld.global: loads a T of 1, 2, 4, 8 or 16 bytes from a multiple of its size.
MLA_PTX_LOAD(load_global, "ld.global")
/// ld.global.L1::no_allocate: loads data that this SM reads once.
MLA_PTX_LOAD(load_once, "ld.global.L1::no_allocate")
#undef MLA_PTX_LOAD

/// ld.global.L1::no_allocate: loads 16 bytes as load_once() does. Unless `valid`, it returns zeros and does not read
/// `from`.
MLA_DEVICE Vec4 load_once_if(bool valid, const Vec4* from MLA_PTX_SITE) {
#if MLA_EMULATED
  if (!valid) return {};
  emulator::check_aligned(from, sizeof(Vec4), MLA_PTX_HERE);
  return *from;
#else
  Vec4 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
      "@p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(v.x[0]), "=&r"(v.x[1]), "=&r"(v.x[2]), "=&r"(v.x[3])
      : "l"(from), "r"(static_cast<uint32_t>(valid))
      : "memory");
  return v;
#endif
}

/// ld.global: loads a float. Unless `valid`, it returns 0 and does not read `from`.
MLA_DEVICE float load_if(bool valid, const float* from MLA_PTX_SITE) {
#if MLA_EMULATED
  if (!valid) return 0.0F;
  emulator::check_aligned(from, sizeof(float), MLA_PTX_HERE);
  return *from;
#else
  float value = 0.0F;
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.global.f32 %0, [%1];\n}"
               : "+f"(value)
               : "l"(from), "r"(static_cast<uint32_t>(valid))
               : "memory");
  return value;
#endif
}

/// ld.relaxed.gpu: loads past the L1 cache what another kernel may still be writing.
MLA_DEVICE int32_t load_relaxed(const int32_t* from MLA_PTX_SITE) {
#if MLA_EMULATED
  emulator::check_aligned(from, sizeof(int32_t), MLA_PTX_HERE);
  return std::atomic_ref<int32_t>(*const_cast<int32_t*>(from)).load(std::memory_order_relaxed);
#else
  int32_t value;
  asm volatile("ld.relaxed.gpu.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
#endif
}

/// prefetch.global.L2: brings the line around `at` into the L2 cache. The emulator checks that there is memory.
MLA_DEVICE void prefetch_l2(const void* at) {
#if MLA_EMULATED
  emulator::prefetch(at);
#else
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(at)));
#endif
}

/// st.global.cs: stores data that will likely not be read soon. T has 1, 2, 4, 8 or 16 bytes, and `to` is a multiple of
/// its size.
template <class T>
MLA_DEVICE void store_streaming(T* to, T value MLA_PTX_SITE) {
  static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
#if MLA_EMULATED
  emulator::check_aligned(to, sizeof(T), MLA_PTX_HERE);
  *to = value;
#else
  if constexpr (sizeof(T) == 1) {
    asm volatile("st.global.cs.u8 [%0], %1;" ::"l"(to), "r"(static_cast<uint32_t>(std::bit_cast<uint8_t>(value)))
                 : "memory");
  } else if constexpr (sizeof(T) == 2) {
    asm volatile("st.global.cs.u16 [%0], %1;" ::"l"(to), "h"(std::bit_cast<uint16_t>(value)) : "memory");
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(to), "r"(std::bit_cast<uint32_t>(value)) : "memory");
  } else if constexpr (sizeof(T) == 8) {
    asm volatile("st.global.cs.u64 [%0], %1;" ::"l"(to), "l"(std::bit_cast<uint64_t>(value)) : "memory");
  } else {
    const Vec4 v = std::bit_cast<Vec4>(value);
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x[0]), "r"(v.x[1]), "r"(v.x[2]),
                 "r"(v.x[3])
                 : "memory");
  }
#endif
}

// NOLINTBEGIN(bugprone-macro-parentheses): T is a type
#if MLA_EMULATED
#define MLA_PTX_ATOMIC(name, T, instruction, constraint, operation)                  \
  MLA_DEVICE T name(T* to, T value MLA_PTX_SITE) {                                   \
    emulator::check_aligned(to, sizeof(T), MLA_PTX_HERE);                            \
    std::atomic_ref<T> word(*to);                                                    \
    T old = word.load(std::memory_order_relaxed);                                    \
    while (!word.compare_exchange_weak(old, operation, std::memory_order_acq_rel)) { \
    }                                                                                \
    return old;                                                                      \
  }
#else
#define MLA_PTX_ATOMIC(name, T, instruction, constraint, operation)                                           \
  MLA_DEVICE T name(T* to, T value) {                                                                         \
    T old;                                                                                                    \
    asm volatile(instruction " %0, [%1], %2;" : "=" constraint(old) : "l"(to), constraint(value) : "memory"); \
    return old;                                                                                               \
  }
#endif
// NOLINTEND(bugprone-macro-parentheses)

/// atom.relaxed.gpu.*: these return the old value.
MLA_PTX_ATOMIC(atomic_add, int32_t, "atom.relaxed.gpu.add.s32", "r",
               static_cast<int32_t>(static_cast<uint32_t>(old) + static_cast<uint32_t>(value)))
MLA_PTX_ATOMIC(atomic_add, uint32_t, "atom.relaxed.gpu.add.u32", "r", old + value)
MLA_PTX_ATOMIC(atomic_add, float, "atom.relaxed.gpu.add.f32", "f", old + value)
MLA_PTX_ATOMIC(atomic_max, int32_t, "atom.relaxed.gpu.max.s32", "r", old < value ? value : old)
MLA_PTX_ATOMIC(atomic_max, uint32_t, "atom.relaxed.gpu.max.u32", "r", old < value ? value : old)
MLA_PTX_ATOMIC(atomic_min, int32_t, "atom.relaxed.gpu.min.s32", "r", value < old ? value : old)
MLA_PTX_ATOMIC(atomic_min, uint32_t, "atom.relaxed.gpu.min.u32", "r", value < old ? value : old)
MLA_PTX_ATOMIC(atomic_or, uint32_t, "atom.relaxed.gpu.or.b32", "r", old | value)
MLA_PTX_ATOMIC(atomic_exchange, int32_t, "atom.relaxed.gpu.exch.b32", "r", value)
#undef MLA_PTX_ATOMIC

/// ld.acquire.gpu: loads an int. A loop must not wait for a block that may not have started, since blocks run in any
/// order.
MLA_DEVICE int load_acquire(const int* from MLA_PTX_SITE) {
#if MLA_EMULATED
  emulator::poll(MLA_PTX_HERE);
  return std::atomic_ref<int>(*const_cast<int*>(from)).load(std::memory_order_acquire);
#else
  int value;
  asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
#endif
}

/// st.release.gpu: stores an int.
MLA_DEVICE void store_release(int* to, int value) {
#if MLA_EMULATED
  std::atomic_ref<int>(*to).store(value, std::memory_order_release);
#else
  asm volatile("st.release.gpu.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
#endif
}

}  // namespace mla::MLA_CUDA_NAMESPACE::ptx
