// SPDX-License-Identifier: Apache-2.0
// merge_states merges partial attention states row by row. It is bound by memory.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "cpu/lse.h"
#include "cpu/operations.h"
#include "cpu/share.h"

namespace mla::cpu {
namespace {

/// Computes the merged lse of one output row's states, log2(sum 2^lse), and the factors of the states.
struct MergedRow {
  const float* lse;  // [N], `stride` apart
  int64_t stride;
  float to_log2;
  float merged = -std::numeric_limits<float>::infinity();

  bool empty() const { return merged == -std::numeric_limits<float>::infinity(); }
  float factor(float value) const { return empty() ? 0.0F : std::exp2(value * to_log2 - merged); }
  void add_all(int32_t n, const float* own) {
    LogSum sum;
    if (own != nullptr) sum.see(*own * to_log2);
    for (int32_t i = 0; i < n; ++i) sum.see(lse[i * stride] * to_log2);
    if (sum.empty()) return;
    if (own != nullptr) sum.add(*own * to_log2);
    for (int32_t i = 0; i < n; ++i) sum.add(lse[i * stride] * to_log2);
    merged = sum.value();
  }
};

void merge_row(const TileKernels& kernels, const core::MergeStatesArgs& args, int64_t token, int64_t head) {
  constexpr int32_t kStates = 64;     // states whose factors are computed at a time
  constexpr int32_t kChannels = 512;  // channels that are summed at a time
  const char* partial =
      at(args.partial_o, token * args.partial_o_stride_token + head * args.partial_o_stride_head, args.partial_dtype);
  char* o = at(args.o, token * args.o_stride_token + head * args.o_stride_head, args.o_dtype);
  float* lse = args.lse != nullptr ? args.lse + token * args.lse_stride_token + head * args.lse_stride_head : nullptr;
  MergedRow row{.lse = args.partial_lse + token * args.partial_lse_stride_token + head * args.partial_lse_stride_head,
                .stride = args.partial_lse_stride_state,
                .to_log2 = args.lse_form.base == LseBase::kE ? std::numbers::log2e_v<float> : 1.0F};
  row.add_all(args.num_states, args.in_place ? lse : nullptr);

  alignas(64) float sum[kChannels];
  float factors[kStates];
  for (int32_t d = 0; d < args.d_v; d += kChannels) {
    const int32_t width = std::min(kChannels, args.d_v - d);
    factors[0] = args.in_place ? row.factor(*lse) : 0.0F;
    kernels.weighted_sum(at(o, d, args.o_dtype), 0, args.o_dtype, 1, factors, 1, width, nullptr, sum, DType::kF32);
    for (int32_t first = 0; first < args.num_states; first += kStates) {
      const int32_t n = std::min(kStates, args.num_states - first);
      for (int32_t i = 0; i < n; ++i) factors[i] = row.factor(row.lse[(first + i) * row.stride]);
      const bool last = first + n == args.num_states;
      kernels.weighted_sum(at(partial, first * args.partial_o_stride_state + d, args.partial_dtype),
                           args.partial_o_stride_state, args.partial_dtype, n, factors, 1, width, sum,
                           last ? static_cast<void*>(at(o, d, args.o_dtype)) : sum, last ? args.o_dtype : DType::kF32);
    }
  }
  if (lse != nullptr) *lse = row.empty() ? args.lse_form.without_keys() : row.merged / row.to_log2;
}

}  // namespace

void run_merge_states(const KernelSet& set, const core::MergeStatesArgs& args, core::ThreadPool& pool) {
  const int64_t rows = args.num_tokens * args.num_heads;
  const int64_t bytes = rows * args.num_states * args.d_v * static_cast<int64_t>(size_of(args.partial_dtype));
  share(pool, rows, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      merge_row(*set.floats, args, row / args.num_heads, row % args.num_heads);
  });
}

}  // namespace mla::cpu
