// SPDX-License-Identifier: Apache-2.0
// These functions access shared memory by 32-bit addresses (PTX ISA, "Data Movement and Conversion Instructions": ld,
// st, cvta).
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cuda/ptx/site.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

using SharedAddress = uint32_t;

/// Holds 16 bytes that one instruction loads or stores.
struct alignas(16) Vec4 {
  uint32_t x[4];
};

/// Returns the block's dynamic shared memory, aligned to 1024 bytes. Its size is the launch's shared_bytes.
MLA_DEVICE std::byte* shared_memory() {
#if MLA_EMULATED
  return emulator::current_thread->shared;
#else
  extern __shared__ __align__(1024) unsigned char mla_dynamic_shared_memory[];
  return reinterpret_cast<std::byte*>(mla_dynamic_shared_memory);
#endif
}

/// cvta.to.shared.u64: returns the address in shared memory, truncated to 32 bits.
MLA_DEVICE SharedAddress shared_address(const void* pointer MLA_PTX_SITE) {
#if MLA_EMULATED
  return emulator::shared_address(pointer, MLA_PTX_HERE);
#else
  return static_cast<SharedAddress>(__cvta_generic_to_shared(pointer));
#endif
}

/// ld.shared.{u8,u16,u32,v2.u32,v4.u32}: loads a T of 1, 2, 4, 8 or 16 bytes from a multiple of its size.
template <class T>
MLA_DEVICE T load_shared(SharedAddress from MLA_PTX_SITE) {
  static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
#if MLA_EMULATED
  T value;
  std::memcpy(&value, emulator::shared_pointer(from, sizeof(T), sizeof(T), MLA_PTX_HERE), sizeof(T));
  return value;
#else
  if constexpr (sizeof(T) == 1) {
    uint32_t bits;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(bits) : "r"(from) : "memory");
    return std::bit_cast<T>(static_cast<uint8_t>(bits));
  } else if constexpr (sizeof(T) == 2) {
    uint16_t bits;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(from) : "memory");
    return std::bit_cast<T>(bits);
  } else if constexpr (sizeof(T) == 4) {
    uint32_t bits;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(from) : "memory");
    return std::bit_cast<T>(bits);
  } else if constexpr (sizeof(T) == 8) {
    uint64_t bits;
    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(bits) : "r"(from) : "memory");
    return std::bit_cast<T>(bits);
  } else {
    Vec4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x[0]), "=r"(v.x[1]), "=r"(v.x[2]), "=r"(v.x[3])
                 : "r"(from)
                 : "memory");
    return std::bit_cast<T>(v);
  }
#endif
}

/// st.shared.{u8,u16,u32,u64,v4.u32}: stores a T of 1, 2, 4, 8 or 16 bytes to a multiple of its size.
template <class T>
MLA_DEVICE void store_shared(SharedAddress to, T value MLA_PTX_SITE) {
  static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
#if MLA_EMULATED
  std::memcpy(emulator::shared_pointer(to, sizeof(T), sizeof(T), MLA_PTX_HERE), &value, sizeof(T));
  if constexpr (kArch == 90) emulator::note_shared_store(to);
#else
  if constexpr (sizeof(T) == 1) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "r"(static_cast<uint32_t>(std::bit_cast<uint8_t>(value)))
                 : "memory");
  } else if constexpr (sizeof(T) == 2) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(std::bit_cast<uint16_t>(value)) : "memory");
  } else if constexpr (sizeof(T) == 4) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(std::bit_cast<uint32_t>(value)) : "memory");
  } else if constexpr (sizeof(T) == 8) {
    asm volatile("st.shared.u64 [%0], %1;" ::"r"(to), "l"(std::bit_cast<uint64_t>(value)) : "memory");
  } else {
    const Vec4 v = std::bit_cast<Vec4>(value);
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x[0]), "r"(v.x[1]), "r"(v.x[2]),
                 "r"(v.x[3])
                 : "memory");
  }
#endif
}

}  // namespace mla::MLA_CUDA_NAMESPACE::ptx
