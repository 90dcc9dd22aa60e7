// SPDX-License-Identifier: Apache-2.0
#include "core/batch_checks.h"

#include <algorithm>
#include <cmath>

#include "core/list_checks.h"

namespace mla::core {
namespace {

/// Checks kv_len of every request against the number of rows that its pages can hold.
bool check_kv_len(Checks& check, const Pages& pages, const PagedRows& rows, int64_t max_pages) {
  for (int32_t b = 0; b < pages.batch_size; ++b) {
    const int32_t length = pages.kv_len[b];
    if (length < 0) return check.fail("kv_len", "expected at least 0, got {} for request {}", length, b);
    if (length > kMaxKvLen)
      return check.fail("kv_len", "expected at most {}, got {} for request {}", kMaxKvLen, length, b);
    const int64_t held = pages.kv_indptr != nullptr ? pages.kv_indptr[b + 1] - pages.kv_indptr[b] : max_pages;
    const int64_t capacity = std::min<int64_t>(held, INT32_MAX) * pages.page_size;
    const int64_t local = rows.count(length);
    if (local <= capacity) continue;
    if (rows.ratio > 1)
      return check.fail("kv_len", "expected at most {} ({} pages of {} groups of {} tokens), got {} for request {}",
                        (capacity + 1) * rows.ratio - 1, held, pages.page_size, rows.ratio, length, b);
    if (rows.share.world == 1)
      return check.fail("kv_len", "expected at most {} ({} pages of {}), got {} for request {}", capacity, held,
                        pages.page_size, length, b);
    return check.fail("kv_len", "expected at most {} tokens on the rank ({} pages of {}), got {} of {} for request {}",
                      capacity, held, pages.page_size, local, length, b);
  }
  return true;
}

/// Checks that the arithmetic is one of those that there are.
bool check_compute_value(Checks& check, Compute compute, Options& result) {
  if (!check.ok()) return false;
  const Checks::Within within(check, "options");
  result.compute = compute == Compute::kExact ? Compute::kDefault : compute;
  return check_compute(check, compute);
}

/// Checks an optional list of one f32 per head.
bool check_per_head(Checks& check, std::string_view field, const TensorView& view, int64_t num_heads,
                    const float*& result) {
  if (!view.given()) return check.ok();
  if (!check.tensor(field, view, kF32Only, {{"H", &num_heads}})) return false;
  result = static_cast<const float*>(view.data);
  return true;
}

}  // namespace

bool check_batch(Checks& check, const BatchShape& batch) {
  return check.fits_int32("num_tokens", batch.num_tokens) && check.at_least("num_heads", batch.num_heads, 1) &&
         check.fits_int32("num_heads", batch.num_heads);
}

bool check_rows_of_batch(Checks& check, std::string_view field, int64_t count, int64_t num_heads) {
  return check.require(count * num_heads <= INT32_MAX, field, "expected at most {} with {} heads, got {}",
                       INT32_MAX / num_heads, num_heads, count);
}

bool check_batch_and_rows(Checks& check, const BatchShape& batch) {
  return check_batch(check, batch) && check_rows_of_batch(check, "num_tokens", batch.num_tokens, batch.num_heads);
}

bool check_queries(Checks& check, const TensorView& qo_indptr, int64_t batch_size, int64_t num_tokens,
                   QueryRanges& queries) {
  if (!check.ok()) return false;
  if (qo_indptr.given()) {
    int64_t extent = batch_size + 1;
    if (!check.lengths("qo_indptr", qo_indptr, {"B + 1", &extent})) return false;
    queries.indptr = static_cast<const int32_t*>(qo_indptr.data);
    return !check.on_cpu() || check_indptr(check, "qo_indptr", queries.indptr, batch_size, "query tokens", num_tokens);
  }
  if (batch_size == 0 ? num_tokens != 0 : num_tokens % batch_size != 0)
    return check.fail("qo_indptr",
                      "expected a tensor, since {} query tokens are not a multiple of {} requests, got none",
                      num_tokens, batch_size);
  queries.uniform_len = batch_size == 0 ? 0 : static_cast<int32_t>(num_tokens / batch_size);
  return true;
}

bool check_statistics(Checks& check, std::string_view field, const TensorView& view, BatchShape& batch) {
  return check.ok() &&
         (!view.given() ||
          check.strided(field, view, kF32Only, {{"T", &batch.num_tokens}, {"H", &batch.num_heads}}, Role::kOutput));
}

bool check_scale_of(Checks& check, std::string_view field, const TensorView& scale, std::string_view of, DType dtype) {
  if (!check.ok()) return false;
  if (dtype == DType::kE4M3) {
    if (!scale.given()) return check.fail(field, "expected a tensor, since `{}` is e4m3, got none", of);
    return check.scale(field, scale);
  }
  return check.require(!scale.given(), field, "expected none, since `{}` is {}, got a tensor", of, name(dtype));
}

DTypes output_types(DType queries, bool e4m3) {
  const DTypes narrow = e4m3 ? set_of({DType::kE4M3}) : 0;
  return set_of({queries == DType::kE4M3 ? DType::kBF16 : queries, DType::kF32}) | narrow;
}

bool check_options(Checks& check, const AttentionOptions& options, int64_t num_heads, bool keyed, Options& result) {
  if (!check.ok()) return false;
  const Checks::Within within(check, "options");
  if (!keyed && options.window_left != -1)
    return check.fail("window_left", "expected -1, since keys named by indices have no positions, got {}",
                      options.window_left);
  if (!keyed && !check.absent("alibi_slopes", options.alibi_slopes, "keys named by indices have no positions"))
    return false;
  if (!check_per_head(check, "attn_sink", options.attn_sink, num_heads, result.attn_sink) ||
      !check.at_least("window_left", options.window_left, -1) ||
      !check.require(std::isfinite(options.logits_soft_cap) && options.logits_soft_cap >= 0.0F, "logits_soft_cap",
                     "expected 0 or a finite number above it, got {}", options.logits_soft_cap) ||
      !check_per_head(check, "alibi_slopes", options.alibi_slopes, num_heads, result.alibi_slopes))
    return false;
  result.window_left = options.window_left;
  result.logits_soft_cap = options.logits_soft_cap;
  if (!check.reads_data()) return true;
  for (int64_t h = 0; h < num_heads; ++h) {
    if (result.attn_sink != nullptr && std::isnan(result.attn_sink[h]))
      return check.fail("attn_sink", "expected numbers, got NaN for head {}", h);
    if (result.alibi_slopes != nullptr && !std::isfinite(result.alibi_slopes[h]))
      return check.fail("alibi_slopes", "expected finite numbers, got {} for head {}", result.alibi_slopes[h], h);
  }
  return true;
}

bool check_compute(Checks& check, Compute compute) {
  return check.require(std::find(std::begin(kAllComputes), std::end(kAllComputes), compute) != std::end(kAllComputes),
                       "compute", "expected kDefault, kFP8 or kExact, got {}", static_cast<unsigned>(compute));
}

bool check_compute(Checks& check, const AttentionOptions& options, const Cache& cache, const Cache* extra,
                   Options& result) {
  if (!check_compute_value(check, options.compute, result)) return false;
  if (result.compute == Compute::kDefault) return true;
  const Checks::Within within(check, "options");
  for (const Cache* one : {&cache, extra != nullptr ? extra : &cache})
    if (!one->is_quantized())
      return check.fail("compute", "expected default, since {} caches are not quantized, got fp8", name(one->format));
  return check.require(extra == nullptr || cache.has_quantized_kpe() == extra->has_quantized_kpe(), "compute",
                       "expected default, since rotary channels are {} in one pool and {} in the other, got fp8",
                       name(cache.kpe_dtype), name((extra != nullptr ? *extra : cache).kpe_dtype));
}

bool check_compute(Checks& check, const AttentionOptions& options, DType keys, Options& result) {
  if (!check_compute_value(check, options.compute, result)) return false;
  const Checks::Within within(check, "options");
  return check.require(result.compute == Compute::kDefault || keys == DType::kE4M3, "compute",
                       "expected default, since keys are {}, not e4m3, got fp8", name(keys));
}

bool check_context_parallel(Checks& check, const ContextParallel& share) {
  if (!check.ok()) return false;
  const Checks::Within within(check, "context_parallel");
  return check.at_least("world", share.world, 1) &&
         check.require(share.rank >= 0 && share.rank < share.world, "rank", "expected 0 to {}, got {}", share.world - 1,
                       share.rank) &&
         check.at_least("interleave", share.interleave, 1);
}

bool check_page_table(Checks& check, const PageTable& table, int64_t page_size, const PagedRows& rows,
                      int64_t& batch_size, Pages& pages) {
  if (!check.lengths("kv_len", table.kv_len, {"B", &batch_size}) || !check.fits_int32("batch_size", batch_size))
    return false;
  const bool csr = table.kv_indptr.given() || table.kv_indices.given();
  if (csr && table.block_table.given())
    return check.fail("block_table", "expected either `block_table` or `kv_indptr` and `kv_indices`, got both");
  if (!csr && !table.block_table.given())
    return check.fail("block_table", "expected `block_table`, or `kv_indptr` and `kv_indices`, got none");

  pages.page_size = static_cast<int32_t>(page_size);
  pages.batch_size = static_cast<int32_t>(batch_size);
  pages.kv_len = static_cast<const int32_t*>(table.kv_len.data);
  int64_t max_pages = kUnbound;
  if (csr) {
    int64_t indptr_extent = batch_size + 1;
    if (!check.lengths("kv_indptr", table.kv_indptr, {"B + 1", &indptr_extent}) ||
        !check.tensor("kv_indices", table.kv_indices, kI32Only, {{"num_indices", &max_pages}}))
      return false;
    pages.table = static_cast<const int32_t*>(table.kv_indices.data);
    pages.kv_indptr = static_cast<const int32_t*>(table.kv_indptr.data);
    pages.table_entries = max_pages;
    if (check.on_cpu() &&
        !check_indptr(check, "kv_indptr", pages.kv_indptr, batch_size, "entries of `kv_indices`", max_pages, false))
      return false;
  } else {
    if (!check.tensor("block_table", table.block_table, kI32Only, {{"B", &batch_size}, {"max_pages", &max_pages}}))
      return false;
    pages.table = static_cast<const int32_t*>(table.block_table.data);
    pages.table_stride_request = table.block_table.stride[0];
    const bool empty = batch_size == 0 || max_pages == 0;
    pages.table_entries = empty ? 0 : (batch_size - 1) * pages.table_stride_request + max_pages;
  }
  return !check.on_cpu() || check_kv_len(check, pages, rows, max_pages);
}

bool check_used_pages(Checks& check, const Pages& pages, const PagedRows& rows, int64_t num_pages) {
  const std::string_view field = pages.kv_indptr != nullptr ? "kv_indices" : "block_table";
  for (int32_t b = 0; b < pages.batch_size; ++b) {
    const int64_t used = (rows.count(pages.kv_len[b]) + pages.page_size - 1) / pages.page_size;
    if (used > 0 && !check_pages(check, field, pages.of(b), 0, used, num_pages, b)) return false;
  }
  return check.ok();
}

}  // namespace mla::core
