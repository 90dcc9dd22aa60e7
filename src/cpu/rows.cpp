// SPDX-License-Identifier: Apache-2.0
// Row-wise operations: merge_states, append, gather. Bound by memory; each worker takes a contiguous share.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>

#include "cpu/attention.h"
#include "cpu/task_list.h"

namespace mla::cpu {
namespace {

constexpr int64_t kMinBytesPerWorker = 64 << 10;  // below this, waking another worker costs more than it saves

/// Calls f(begin, end) for shares of [0, count), on as many workers as the bytes are worth.
template <class F>
void share(core::ThreadPool& pool, int64_t count, int64_t bytes, const F& f) {
  const auto workers = static_cast<int32_t>(std::clamp<int64_t>(bytes / kMinBytesPerWorker, 1, pool.size()));
  pool.run([&](int32_t worker) { f(count * worker / workers, count * (worker + 1) / workers); }, workers);
}

char* at(void* base, int64_t element, DType dtype) {
  return static_cast<char*>(base) + element * static_cast<int64_t>(size_of(dtype));
}
const char* at(const void* base, int64_t element, DType dtype) {
  return static_cast<const char*>(base) + element * static_cast<int64_t>(size_of(dtype));
}

/// Copies rows of one operation, converting where the types differ. Copies larger than any cache level they could stay
/// in go past the caches: stores into them would first read every line.
class RowCopier {
 public:
  RowCopier(const TileKernels& kernels, DType src, DType dst, int64_t total_bytes)
      : kernels_(kernels), src_(src), dst_(dst), streaming_(src == dst && total_bytes >= kStreamBytes) {}

  void copy(const void* src, void* dst, int32_t d) const {
    const int64_t bytes = d * static_cast<int64_t>(size_of(dst_));
    if (streaming_) {
      kernels_.stream(src, dst, bytes);
    } else if (src_ == dst_) {
      std::memcpy(dst, src, static_cast<size_t>(bytes));
    } else {
      kernels_.convert(src, src_, dst, dst_, d);
    }
  }
  void finish() const {
    if (streaming_) kernels_.finish_streams();
  }

 private:
  static constexpr int64_t kStreamBytes = 16 << 20;

  const TileKernels& kernels_;
  DType src_, dst_;
  bool streaming_;
};

DType element_type(CacheFormat format) { return format == CacheFormat::kF16 ? DType::kF16 : DType::kBF16; }

/// log2(sum 2^lse) of the states of one output row, and what it takes to weigh them.
struct MergedRow {
  const float* lse;  // [N], `stride` apart
  int64_t stride;
  float to_log2;
  float merged = -std::numeric_limits<float>::infinity();

  float weight(float value) const {
    return merged == -std::numeric_limits<float>::infinity() ? 0.0F : std::exp2(value * to_log2 - merged);
  }
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
  constexpr int32_t kStates = 64;     // weighed at a time
  constexpr int32_t kChannels = 512;  // summed at a time
  const char* partial =
      at(args.partial_o, token * args.partial_o_stride_token + head * args.partial_o_stride_head, args.partial_dtype);
  char* o = at(args.o, token * args.o_stride_token + head * args.o_stride_head, args.o_dtype);
  float* lse = args.lse != nullptr ? args.lse + token * args.lse_stride_token + head * args.lse_stride_head : nullptr;
  MergedRow row{.lse = args.partial_lse + token * args.partial_lse_stride_token + head * args.partial_lse_stride_head,
                .stride = args.partial_lse_stride_state,
                .to_log2 = args.lse_base == LseBase::kE ? std::numbers::log2e_v<float> : 1.0F};
  row.add_all(args.num_states, args.in_place ? lse : nullptr);

  alignas(64) float sum[kChannels];
  float weight[kStates];
  for (int32_t d = 0; d < args.d_v; d += kChannels) {
    const int32_t width = std::min(kChannels, args.d_v - d);
    weight[0] = args.in_place ? row.weight(*lse) : 0.0F;
    kernels.weighted_sum(at(o, d, args.o_dtype), 0, args.o_dtype, 1, weight, 1, width, nullptr, sum, DType::kF32);
    for (int32_t first = 0; first < args.num_states; first += kStates) {
      const int32_t n = std::min(kStates, args.num_states - first);
      for (int32_t i = 0; i < n; ++i) weight[i] = row.weight(row.lse[(first + i) * row.stride]);
      const bool last = first + n == args.num_states;
      kernels.weighted_sum(at(partial, first * args.partial_o_stride_state + d, args.partial_dtype),
                           args.partial_o_stride_state, args.partial_dtype, n, weight, 1, width, sum,
                           last ? static_cast<void*>(at(o, d, args.o_dtype)) : sum, last ? args.o_dtype : DType::kF32);
    }
  }
  if (lse != nullptr) *lse = row.merged / row.to_log2;
}

struct CacheRow {
  char* ckv;
  char* kpe;
};

CacheRow cache_row(const core::Cache& cache, int64_t page, int64_t slot, DType dtype) {
  const bool rope = cache.d_kpe > 0;
  return {at(cache.ckv, page * cache.ckv_stride_page + slot * cache.ckv_stride_token, dtype),
          rope ? at(cache.kpe, page * cache.kpe_stride_page + slot * cache.kpe_stride_token, dtype) : nullptr};
}

void gather_rows(const RowCopier& copier, const core::GatherArgs& args, int64_t begin, int64_t end) {
  const DType dtype = element_type(args.cache.format);
  const int32_t page_size = args.pages.page_size;
  const auto* bound = std::upper_bound(args.out_indptr, args.out_indptr + args.batch_size + 1, begin);
  auto request = static_cast<int32_t>(bound - args.out_indptr) - 1;
  for (int64_t row = begin; row < end; ++request) {
    const int32_t* pages = args.pages.of(request);
    const int64_t request_end = std::min<int64_t>(end, args.out_indptr[request + 1]);
    int64_t token = (args.token_start != nullptr ? args.token_start[request] : 0) + row - args.out_indptr[request];
    for (; row < request_end; ++row, ++token) {
      const CacheRow from = cache_row(args.cache, pages[token / page_size], token % page_size, dtype);
      copier.copy(from.ckv, at(args.out_ckv, row * args.out_ckv_stride_token, args.out_dtype), args.cache.d_ckv);
      if (args.cache.d_kpe > 0)
        copier.copy(from.kpe, at(args.out_kpe, row * args.out_kpe_stride_token, args.out_dtype), args.cache.d_kpe);
    }
  }
  copier.finish();
}

void append_rows(const RowCopier& copier, const core::AppendArgs& args, int64_t begin, int64_t end) {
  const DType dtype = element_type(args.cache.format);
  for (int64_t token = begin; token < end; ++token) {
    const int64_t slot = args.slot_mapping[token];
    if (slot < 0) continue;
    const CacheRow to = cache_row(args.cache, slot / args.cache.page_size, slot % args.cache.page_size, dtype);
    copier.copy(at(args.ckv, token * args.ckv_stride_token, args.dtype), to.ckv, args.cache.d_ckv);
    if (args.cache.d_kpe > 0)
      copier.copy(at(args.kpe, token * args.kpe_stride_token, args.dtype), to.kpe, args.cache.d_kpe);
  }
  copier.finish();
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

void run_append(const KernelSet& set, const core::AppendArgs& args, core::ThreadPool& pool) {
  const int64_t width = args.cache.d_ckv + args.cache.d_kpe;
  const int64_t bytes = args.num_tokens * width * static_cast<int64_t>(size_of(args.dtype));
  const RowCopier copier(*set.floats, args.dtype, element_type(args.cache.format), bytes);
  share(pool, args.num_tokens, bytes, [&](int64_t begin, int64_t end) { append_rows(copier, args, begin, end); });
}

void run_gather(const KernelSet& set, const core::GatherArgs& args, core::ThreadPool& pool) {
  const int64_t width = args.cache.d_ckv + args.cache.d_kpe;
  const int64_t bytes = args.num_rows * width * static_cast<int64_t>(size_of(args.out_dtype));
  const RowCopier copier(*set.floats, element_type(args.cache.format), args.out_dtype, bytes);
  share(pool, args.num_rows, bytes, [&](int64_t begin, int64_t end) { gather_rows(copier, args, begin, end); });
}

}  // namespace mla::cpu
