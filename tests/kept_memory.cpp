// SPDX-License-Identifier: Apache-2.0
// Is part of every GoogleTest program: what a test frees stays with the process, for the next problem. Otherwise malloc
// gives tensors back to the system one by one, which clears each page again: up to a fifth of a test's time. Memory
// that was used is also no memory of zeros.
#include <malloc.h>

namespace {

[[maybe_unused]] const bool kKept = mallopt(M_MMAP_MAX, 0) != 0 && mallopt(M_TRIM_THRESHOLD, -1) != 0;

}  // namespace
