// SPDX-License-Identifier: Apache-2.0
// This file divides an operation that is bound by memory into contiguous shares of rows for the workers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/thread_pool.h"
#include "mla/types.h"

namespace mla::cpu {

// With fewer bytes, waking another worker costs more than it saves (chosen without a recorded measurement).
inline constexpr int64_t kMinBytesPerWorker = 64 << 10;

/// Calls f(begin, end) for shares of [0, count), on one worker per kMinBytesPerWorker bytes as far as there are
/// workers.
template <class F>
void share(core::ThreadPool& pool, int64_t count, int64_t bytes, const F& f) {
  const auto workers = static_cast<int32_t>(std::clamp<int64_t>(bytes / kMinBytesPerWorker, 1, pool.size()));
  pool.run([&](int32_t worker) { f(count * worker / workers, count * (worker + 1) / workers); }, workers);
}

inline char* at(void* base, int64_t element, DType dtype) {
  return static_cast<char*>(base) + element * static_cast<int64_t>(size_of(dtype));
}
inline const char* at(const void* base, int64_t element, DType dtype) {
  return static_cast<const char*>(base) + element * static_cast<int64_t>(size_of(dtype));
}

}  // namespace mla::cpu
