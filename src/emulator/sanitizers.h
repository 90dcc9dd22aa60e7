// SPDX-License-Identifier: Apache-2.0
// These functions mark memory that AddressSanitizer is to report when it is touched. Without AddressSanitizer they do
// nothing.
#pragma once

#include <cstddef>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define MLA_EMULATOR_ASAN 1
#endif
#if __has_feature(thread_sanitizer)
#define MLA_EMULATOR_TSAN 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define MLA_EMULATOR_ASAN 1
#endif
#if defined(__SANITIZE_THREAD__)
#define MLA_EMULATOR_TSAN 1
#endif
#ifndef MLA_EMULATOR_ASAN
#define MLA_EMULATOR_ASAN 0
#endif
#ifndef MLA_EMULATOR_TSAN
#define MLA_EMULATOR_TSAN 0
#endif

#if MLA_EMULATOR_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace mla::emulator {

inline void poison([[maybe_unused]] const void* from, [[maybe_unused]] size_t bytes) {
#if MLA_EMULATOR_ASAN
  __asan_poison_memory_region(from, bytes);
#endif
}

inline void unpoison([[maybe_unused]] const void* from, [[maybe_unused]] size_t bytes) {
#if MLA_EMULATOR_ASAN
  __asan_unpoison_memory_region(from, bytes);
#endif
}

}  // namespace mla::emulator
