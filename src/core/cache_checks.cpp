// SPDX-License-Identifier: Apache-2.0
#include "core/cache_checks.h"

#include <algorithm>
#include <array>

#include "core/list_checks.h"

namespace mla::core {
namespace {

constexpr DType element_type(CacheFormat format) { return format == CacheFormat::kF16 ? DType::kF16 : DType::kBF16; }

bool check_format(Checks& check, CacheFormat format) {
  if (format == CacheFormat::kBF16 || format == CacheFormat::kF16) return check.ok();
  const std::string_view known = name(format);
  if (known.empty())
    return check.fail("cache.format", "expected a cache format, got unknown value {}", static_cast<unsigned>(format));
  return check.fail("cache.format", "expected bf16 or f16, got {}", known);
}

/// `outer` with the width appended.
bool check_part(Checks& check, std::string_view field, const TensorView& view, DTypes dtypes,
                std::initializer_list<Dim> outer, Dim width, Role role) {
  const Dim* dims = outer.begin();
  switch (outer.size()) {
    case 1: return check.tensor(field, view, dtypes, {dims[0], width}, role);
    default: return check.tensor(field, view, dtypes, {dims[0], dims[1], width}, role);
  }
}

/// kv_len of every request against what its part of the table can hold.
bool check_kv_len(Checks& check, const Pages& pages, int64_t max_pages) {
  for (int32_t b = 0; b < pages.batch_size; ++b) {
    const int64_t held = pages.kv_indptr != nullptr ? pages.kv_indptr[b + 1] - pages.kv_indptr[b] : max_pages;
    const int64_t capacity = std::min<int64_t>(held, INT32_MAX) * pages.page_size;
    if (pages.kv_len[b] < 0)
      return check.fail("kv_len", "expected at least 0, got {} for request {}", pages.kv_len[b], b);
    if (pages.kv_len[b] > kMaxKvLen)
      return check.fail("kv_len", "expected at most {}, got {} for request {}", kMaxKvLen, pages.kv_len[b], b);
    if (pages.kv_len[b] > capacity)
      return check.fail("kv_len", "expected at most {} ({} pages of {}), got {} for request {}", capacity, held,
                        pages.page_size, pages.kv_len[b], b);
  }
  return true;
}

}  // namespace

bool RowWidths::settle(Checks& check, std::string_view field) {
  // Each alone first: a tensor without tokens may be of any width, and the sum must not overflow.
  if (!check.fits_int32("kv_lora_rank", ckv) || !check.fits_int32("qk_rope_head_dim", kpe) ||
      !check.fits_int32("d_qk", total))
    return false;
  if (ckv != kUnbound && kpe != kUnbound) {
    if (total == kUnbound) total = ckv + kpe;
    return total == ckv + kpe ||
           check.fail(field, "expected kv_lora_rank + qk_rope_head_dim = {}, got {} + {}", total, ckv, kpe);
  }
  if (ckv != kUnbound && total != kUnbound) {
    if (ckv > total) return check.fail(field, "expected kv_lora_rank of at most d_qk = {}, got {}", total, ckv);
    kpe = total - ckv;
  }
  return true;
}

bool RowWidths::finish(Checks& check) {
  if (!check.ok()) return false;
  if (ckv == kUnbound) {
    ckv = total;
    kpe = 0;
  }
  return check.at_least("kv_lora_rank", ckv, 1) && check.fits_int32("d_qk", total);
}

bool check_rows(Checks& check, const RowForms& rows, DTypes dtypes, std::initializer_list<Dim> outer, Role role,
                RowWidths& widths) {
  if (!check.ok()) return false;
  if (rows.whole.given()) {
    if (rows.ckv.given() || rows.kpe.given())
      return check.fail(rows.whole_name, "expected either {} or {} and {}, got both", rows.whole_name, rows.ckv_name,
                        rows.kpe_name);
    return check_part(check, rows.whole_name, rows.whole, dtypes, outer, {"d_qk", &widths.total}, role) &&
           widths.settle(check, rows.whole_name);
  }
  if (!rows.ckv.given())
    return check.fail(rows.whole_name, "expected {}, or {} and {}, got none", rows.whole_name, rows.ckv_name,
                      rows.kpe_name);
  if (!check_part(check, rows.ckv_name, rows.ckv, dtypes, outer, {"kv_lora_rank", &widths.ckv}, role)) return false;
  if (!rows.kpe.given()) {
    if (widths.kpe > 0)
      return check.fail(rows.kpe_name, "expected a tensor, since qk_rope_head_dim is {}, got none", widths.kpe);
    widths.kpe = 0;
    return widths.settle(check, rows.ckv_name);
  }
  return check_part(check, rows.kpe_name, rows.kpe, set_of({rows.ckv.dtype}), outer, {"qk_rope_head_dim", &widths.kpe},
                    role) &&
         widths.settle(check, rows.kpe_name);
}

RowPointers point_to_rows(const RowForms& rows, const RowWidths& widths) {
  static constexpr int64_t kNoStride[kMaxDims] = {};  // backends step a null kpe by 0, which is defined
  const TensorView& first = rows.first();
  RowPointers at{.ckv = first.data, .ckv_stride = first.stride.data(), .kpe_stride = kNoStride};
  if (widths.kpe == 0) return at;
  if (!rows.whole.given()) {
    at.kpe = rows.kpe.data;
    at.kpe_stride = rows.kpe.stride.data();
    return at;
  }
  at.kpe_stride = at.ckv_stride;
  if (first.data != nullptr)
    at.kpe = static_cast<char*>(first.data) + widths.ckv * static_cast<int64_t>(size_of(first.dtype));
  return at;
}

RowForms cache_rows(const KvCache& cache) {
  return {.whole_name = "cache.kv",
          .ckv_name = "cache.ckv",
          .kpe_name = "cache.kpe",
          .whole = cache.kv,
          .ckv = cache.ckv,
          .kpe = cache.kpe};
}

bool check_cache(Checks& check, const KvCache& cache, Role role, RowWidths& widths, int64_t& num_pages,
                 int64_t& page_size) {
  return check.ok() && check_format(check, cache.format) &&
         check_rows(check, cache_rows(cache), set_of({element_type(cache.format)}),
                    {{"num_pages", &num_pages}, {"page_size", &page_size}}, role, widths) &&
         check.at_least("page_size", page_size, 1) && check.at_most("page_size", page_size, kMaxKvLen);
}

Cache make_cache(const KvCache& cache, const RowWidths& widths, int64_t num_pages, int64_t page_size) {
  const RowPointers rows = point_to_rows(cache_rows(cache), widths);
  return {.format = cache.format,
          .num_pages = num_pages,
          .page_size = static_cast<int32_t>(page_size),
          .d_ckv = static_cast<int32_t>(widths.ckv),
          .d_kpe = static_cast<int32_t>(widths.kpe),
          .ckv = rows.ckv,
          .ckv_stride_page = rows.ckv_stride[0],
          .ckv_stride_token = rows.ckv_stride[1],
          .kpe = rows.kpe,
          .kpe_stride_page = rows.kpe_stride[0],
          .kpe_stride_token = rows.kpe_stride[1]};
}

bool check_page_table(Checks& check, const PageTable& table, int64_t page_size, int64_t& batch_size, Pages& pages) {
  if (!check.lengths("kv_len", table.kv_len, {"B", &batch_size}) || !check.fits_int32("batch_size", batch_size))
    return false;
  const bool csr = table.kv_indptr.given() || table.kv_indices.given();
  if (csr && table.block_table.given())
    return check.fail("block_table", "expected either block_table or kv_indptr and kv_indices, got both");
  if (!csr && !table.block_table.given())
    return check.fail("block_table", "expected block_table, or kv_indptr and kv_indices, got none");

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
    if (check.on_cpu() &&
        !check_indptr(check, "kv_indptr", pages.kv_indptr, batch_size, "entries of kv_indices", max_pages, false))
      return false;
  } else {
    if (!check.tensor("block_table", table.block_table, kI32Only, {{"B", &batch_size}, {"max_pages", &max_pages}}))
      return false;
    pages.table = static_cast<const int32_t*>(table.block_table.data);
    pages.table_stride_request = table.block_table.stride[0];
  }
  return !check.on_cpu() || check_kv_len(check, pages, max_pages);
}

bool check_used_pages(Checks& check, const Pages& pages, int64_t num_pages) {
  const std::string_view field = pages.kv_indptr != nullptr ? "kv_indices" : "block_table";
  for (int32_t b = 0; b < pages.batch_size; ++b) {
    const int64_t used = (int64_t{pages.kv_len[b]} + pages.page_size - 1) / pages.page_size;
    if (used > 0 && !check_pages(check, field, pages.of(b), 0, used, num_pages, b)) return false;
  }
  return check.ok();
}

}  // namespace mla::core
