// SPDX-License-Identifier: Apache-2.0
// Holds what random specs of several operations draw alike.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "kit/buffer.h"
#include "kit/specs.h"

namespace mla::kit {

// These limit the multiply-adds of one case: the reference needs about a second for 10^9.
inline constexpr int64_t kUsualWork = 10'000'000;
inline constexpr int64_t kLargeWork = 60'000'000;
inline constexpr int64_t kMaxRows = 4096;  // query rows (tokens times heads) of one case

template <class T, size_t N>
T pick(Random& random, const std::array<T, N>& values) {
  return random.pick(std::span<const T>(values));
}

/// Returns 0 more often than not, else a small number of elements, odd ones among them.
int64_t random_extra(Random& random);
int32_t random_heads(Random& random);
int32_t random_batch(Random& random);
int32_t random_page_size(Random& random);
int32_t random_kv_len(Random& random, int32_t page_size);
CacheSpec random_cache(Random& random, CacheFormat format);
/// Divides rows into two tensors if their parts have scales of their own: such scales need to know where a row is
/// divided, and the tensors say so where nothing else does.
void divide(CacheSpec& cache);
ContextParallel random_context_parallel(Random& random);
/// Returns bf16, f16 or f32.
DType random_float(Random& random);
/// Draws what becomes of such outputs.
FinishSpec random_finish(Random& random, const FinishedRows& rows);

/// Shortens requests whose work exceeds an even share of `limit`, but to no less than 3 keys; a query-key pair of one
/// head is `cost` multiply-adds of work.
void limit_work(std::vector<int32_t>& kv_len, const std::vector<int32_t>& q_len, int64_t heads, int64_t cost,
                int64_t limit);

/// Holds the requests of a batch: `random_requests` draws q_len, one for all (`omit_qo_indptr` sometimes) or ragged,
/// and kv_len.
struct Batch {
  std::vector<int32_t> q_len, kv_len;
  bool omit_qo_indptr = false;
};
Batch random_requests(Random& random, int32_t num_heads, int32_t page_size);

}  // namespace mla::kit
