// SPDX-License-Identifier: Apache-2.0
#include "emulator/fiber.h"

#include <sys/mman.h>

namespace mla::emulator {
namespace {

constexpr size_t kPage = 4096;
/// A stack has this many bytes. Untouched pages cost only address space.
constexpr size_t kStackBytes = 256 * 1024;
/// Stacks a power of two apart would share the same few sets of the caches, so that their tops are spread over two
/// pages.
constexpr size_t kColors = 16;
constexpr size_t kColorBytes = 512 + 64;

/// Unmaps stacks. Whatever is mapped at these addresses next must not find AddressSanitizer's marks of frames that
/// never returned.
void unmap(std::byte* memory, size_t bytes) {
  if (memory == nullptr) return;
  unpoison(memory, bytes);
  munmap(memory, bytes);
}

}  // namespace

Stacks::~Stacks() { unmap(memory_, bytes_); }

bool Stacks::reserve(int32_t num_fibers) {
  if (num_fibers <= num_fibers_) return true;
  const size_t bytes = static_cast<size_t>(num_fibers) * kStackBytes;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return false;
  unmap(memory_, bytes_);
  memory_ = static_cast<std::byte*>(memory);
  bytes_ = bytes;
  num_fibers_ = num_fibers;
  // A guard page makes an overflow end the program instead of overwriting another thread's stack. There is none where
  // the process may have no more mappings.
  for (int32_t i = 0; i < num_fibers; ++i)
    if (mprotect(memory_ + static_cast<size_t>(i) * kStackBytes, kPage, PROT_NONE) != 0) break;
  return true;
}

void Stacks::restart(Fiber& fiber, int32_t index, void (*entry)(StackPlace& from)) {
  std::byte* const bottom = memory_ + static_cast<size_t>(index) * kStackBytes + kPage;
  fiber.stack = bottom;
  fiber.stack_bytes = kStackBytes - kPage - (static_cast<size_t>(index) % kColors) * kColorBytes;
  unpoison(bottom, kStackBytes - kPage);  // removes the marks of frames that never returned
#if MLA_EMULATOR_TSAN
  forget_fiber(fiber);
  fiber.tsan = __tsan_create_fiber(0);
#endif
  begin_stack(fiber, bottom + fiber.stack_bytes, fiber.stack_bytes, entry);
}

void adopt_host([[maybe_unused]] Fiber& host) {
#if MLA_EMULATOR_TSAN
  host.tsan = __tsan_get_current_fiber();
#endif
}

void forget_fiber([[maybe_unused]] Fiber& fiber) {
#if MLA_EMULATOR_TSAN
  if (fiber.tsan != nullptr) __tsan_destroy_fiber(fiber.tsan);
  fiber.tsan = nullptr;
#endif
}

}  // namespace mla::emulator
