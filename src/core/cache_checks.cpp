// SPDX-License-Identifier: Apache-2.0
#include "core/cache_checks.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace mla::core {
namespace {

/// Checks a tensor whose dimensions are `outer` and then the width.
bool check_part(Checks& check, std::string_view field, const TensorView& view, DTypes dtypes,
                std::initializer_list<Dim> outer, Dim width, Role role) {
  const Dim* dims = outer.begin();
  switch (outer.size()) {
    case 1: return check.tensor(field, view, dtypes, {dims[0], width}, role);
    default: return check.tensor(field, view, dtypes, {dims[0], dims[1], width}, role);
  }
}

}  // namespace

bool RowWidths::begin(Checks& check, std::string_view part, CacheFormat format) {
  const Checks::Within within(check, part);
  const KvLayout layout = kv_layout(format);
  if (!check.require(!layout.name.empty(), "format", "expected a cache format, got unknown value {}",
                     static_cast<unsigned>(format)))
    return false;
  if (!layout.is_packed()) return true;
  const auto fits = [](int64_t width, int64_t fixed) { return width == kUnbound || width == fixed; };
  if (!fits(total, layout.nope_dim + layout.rope_dim))
    return check.fail("format", "expected rows of {} channels, got {} with {}", total, layout.name,
                      layout.nope_dim + layout.rope_dim);
  if (!fits(ckv, layout.nope_dim) || !fits(kpe, layout.rope_dim))
    return check.fail("format", "expected rows of kv_lora_rank {} and qk_rope_head_dim {}, got {} with {} and {}", ckv,
                      kpe, layout.name, layout.nope_dim, layout.rope_dim);
  ckv = layout.nope_dim;
  kpe = layout.rope_dim;
  total = ckv + kpe;
  return true;
}

bool RowWidths::settle(Checks& check, std::string_view field) {
  // Each width is checked alone first: a tensor without tokens may have any width, and the sum must not overflow.
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
    divided = false;
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
      return check.fail(rows.whole_name, "expected either `{}` or `{}` and `{}`, got both", rows.whole_name,
                        rows.ckv_name, rows.kpe_name);
    return check_part(check, rows.whole_name, rows.whole, dtypes, outer, {"d_qk", &widths.total}, role) &&
           widths.settle(check, rows.whole_name);
  }
  if (!rows.ckv.given())
    return check.fail(rows.whole_name, "expected `{}`, or `{}` and `{}`, got none", rows.whole_name, rows.ckv_name,
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
  static constexpr int64_t kNoStride[kMaxDims] = {};  // backends advance a null kpe by 0, which is defined
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

namespace {

RowForms cache_rows(const KvCache& cache) {
  return {
      .whole_name = "kv", .ckv_name = "ckv", .kpe_name = "kpe", .whole = cache.kv, .ckv = cache.ckv, .kpe = cache.kpe};
}

/// Checks that every row begins at an even address, since rows of bytes contain bf16 channels.
bool check_even(Checks& check, const TensorView& kv) {
  if (reinterpret_cast<uintptr_t>(kv.data) % 2 != 0)
    return check.fail("kv", "expected an address that is a multiple of 2 bytes, got an odd one");
  for (int32_t d = 0; d < kv.ndim - 1; ++d) {
    const auto at = static_cast<size_t>(d);
    if (kv.shape[at] > 1 && kv.stride[at] % 2 != 0)
      return check.fail("kv", "expected strides that are multiples of 2 bytes, got {} in dimension {}", kv.stride[at],
                        d);
  }
  return check.ok();
}

bool check_packed_rows(Checks& check, const KvCache& cache, Role role, CacheShape& shape) {
  const KvLayout layout = kv_layout(cache.format);
  for (const auto& [field, view] : {std::pair("ckv", &cache.ckv), std::pair("kpe", &cache.kpe)})
    if (view->given()) return check.fail(field, "expected `kv` alone in {}, got a tensor", layout.name);
  if (layout.has_footer()) {
    if (!check_page_size(check, cache.page_size)) return false;
    if (shape.page_size == kUnbound) shape.page_size = cache.page_size;
    return check_byte_pages(check, cache.kv, page_bytes(cache.format, 0, cache.page_size, false), cache.page_size, role,
                            shape.num_pages) &&
           check_even(check, cache.kv);
  }
  int64_t row_bytes = layout.row_bytes;
  return check.tensor("kv", cache.kv, kU8Only,
                      {{"num_pages", &shape.num_pages}, {"page_size", &shape.page_size}, {"row bytes", &row_bytes}},
                      role) &&
         check_page_size(check, shape.page_size) && check_even(check, cache.kv);
}

/// Checks scales in tensors of their own: one for the whole cache, or one for every quarter of a token's ckv.
bool check_tensor_scales(Checks& check, const KvCache& cache, Role role, const RowWidths& widths,
                         const CacheShape& shape) {
  const bool of_quarters = cache.ckv_scale.given() && cache.ckv_scale.ndim == 3;
  if (of_quarters) {
    int64_t num_pages = shape.num_pages;
    int64_t page_size = shape.page_size;
    int64_t quarters = kTensorScalesPerToken;
    if (!check.tensor("ckv_scale", cache.ckv_scale, kF32Only,
                      {{"num_pages", &num_pages}, {"page_size", &page_size}, {"", &quarters}}, role))
      return false;
    if (!widths.divided)
      return check.fail("ckv_scale", "expected shape [1], since no tensor says where kpe begins in a row of {}, got {}",
                        widths.total, shape_text(cache.ckv_scale));
    if (widths.ckv % quarters != 0)
      return check.fail("ckv_scale", "expected shape [1], since kv_lora_rank {} is not a multiple of {}, got {}",
                        widths.ckv, quarters, shape_text(cache.ckv_scale));
  } else if (!check.scale("ckv_scale", cache.ckv_scale)) {
    return false;
  }
  if (!cache.kpe_scale.given()) {
    if (of_quarters && widths.kpe > 0)
      return check.fail("kpe_scale", "expected a tensor, since `ckv_scale` has shape {}, got none",
                        shape_text(cache.ckv_scale));
    return true;
  }
  return check.require(widths.divided, "kpe_scale",
                       "expected none, since no tensor says where kpe begins in a row of {}, got a tensor",
                       widths.total) &&
         check.require(widths.kpe > 0, "kpe_scale", "expected none, since qk_rope_head_dim is 0, got a tensor") &&
         check.scale("kpe_scale", cache.kpe_scale);
}

void point_to_scales(const KvCache& cache, Cache& result) {
  const TensorView& scale = cache.ckv_scale;
  result.scales.base = static_cast<std::byte*>(scale.data);
  if (scale.ndim == 3) {
    const int64_t bytes = size_of(result.scale_type);
    result.scales.stride_page = scale.stride[0] * bytes;
    result.scales.stride_token = scale.stride[1] * bytes;
    set_token_scales(result);
  }
  result.power_of_two_scales = cache.power_of_two_scales;
  if (result.d_kpe > 0)
    result.kpe_scale = static_cast<const float*>(cache.kpe_scale.given() ? cache.kpe_scale.data : scale.data);
}

}  // namespace

bool check_page_size(Checks& check, int64_t page_size) {
  return check.at_least("page_size", page_size, 1) && check.at_most("page_size", page_size, kMaxKvLen);
}

bool check_byte_pages(Checks& check, const TensorView& kv, int64_t needed, int64_t page_size, Role role,
                      int64_t& num_pages) {
  int64_t bytes = kUnbound;
  // Bytes behind the tokens of a page do not belong to the cache, even if the view includes them.
  TensorView used = kv;
  if (kv.ndim == 2) used.shape[1] = std::min(kv.shape[1], needed);
  return check.tensor("kv", used, kU8Only, {{"num_pages", &num_pages}, {"page bytes", &bytes}}, role) &&
         check.require(bytes >= needed, "kv", "expected pages of at least {} bytes ({} tokens), got {}", needed,
                       page_size, bytes) &&
         check.require(num_pages <= 1 || kv.stride[0] >= needed, "kv",
                       "expected a page stride of at least {} bytes ({} tokens), got {}", needed, page_size,
                       kv.stride[0]);
}

bool check_cache(Checks& check, std::string_view part, const KvCache& cache, Role role, RowWidths& widths,
                 CacheShape& shape) {
  if (!check.ok() || !widths.begin(check, part, cache.format)) return false;
  const Checks::Within within(check, part);
  const KvLayout layout = kv_layout(cache.format);
  if (layout.is_packed()
          ? !check_packed_rows(check, cache, role, shape)
          : !check_rows(check, cache_rows(cache), set_of({layout.nope.element}),
                        {{"num_pages", &shape.num_pages}, {"page_size", &shape.page_size}}, role, widths) ||
                !check_page_size(check, shape.page_size))
    return false;
  return check.require(cache.page_size == 0 || cache.page_size == shape.page_size, "page_size",
                       "expected 0 or {}, as the shape says, got {}", shape.page_size, cache.page_size);
}

bool finish_cache(Checks& check, std::string_view part, const KvCache& cache, Role role, const RowWidths& widths,
                  const CacheShape& shape, Cache& result) {
  if (!check.ok()) return false;
  const Checks::Within within(check, part);
  const KvLayout layout = kv_layout(cache.format);
  result = {.format = cache.format,
            .num_pages = shape.num_pages,
            .page_size = static_cast<int32_t>(shape.page_size),
            .d_ckv = static_cast<int32_t>(widths.ckv),
            .d_kpe = static_cast<int32_t>(widths.kpe)};
  set_codecs(layout, result);
  const bool own_scales = layout.nope.scale_place == ScalePlace::kTensor, outer = layout.nope.outer_scale;
  if (!own_scales)
    for (const auto& [field, view] :
         {std::pair("ckv_scale", &cache.ckv_scale), std::pair("kpe_scale", &cache.kpe_scale)})
      if (view->given() && !(outer && view == &cache.ckv_scale))
        return check.fail(field, "expected none for {}, got a tensor", name(cache.format));
  if (outer && cache.ckv_scale.given()) {
    if (!check.scale("ckv_scale", cache.ckv_scale)) return false;
    result.outer_scale = static_cast<const float*>(cache.ckv_scale.data);
  }
  if (layout.is_packed()) {
    set_planes(layout, static_cast<std::byte*>(cache.kv.data), cache.kv.stride[0], cache.kv.stride[1], result);
    result.power_of_two_scales = result.scale_type != ScaleType::kF32 || cache.power_of_two_scales;
    return true;
  }
  if (own_scales && !check_tensor_scales(check, cache, role, widths, shape)) return false;
  const RowForms forms = cache_rows(cache);
  const RowPointers rows = point_to_rows(forms, widths);
  const auto element = static_cast<int64_t>(size_of(forms.first().dtype));
  const auto plane = [&](void* base, const int64_t* stride) {
    return Plane{
        .base = static_cast<std::byte*>(base), .stride_page = stride[0] * element, .stride_token = stride[1] * element};
  };
  result.ckv = plane(rows.ckv, rows.ckv_stride);
  result.kpe = plane(rows.kpe, rows.kpe_stride);
  if (own_scales) point_to_scales(cache, result);
  return true;
}

bool check_indexer_cache(Checks& check, std::string_view part, const IndexerCache& cache, Role role,
                         IndexerPages& pages) {
  if (!check.ok()) return false;
  const Checks::Within within(check, part);
  int64_t num_pages = kUnbound;
  const bool known = !name(cache.format).empty();
  if (!check.require(known, "format", "expected a format of the indexer's keys, got unknown value {}",
                     static_cast<int>(cache.format)) ||
      !check_page_size(check, cache.page_size) ||
      !check_byte_pages(check, cache.kv, indexer_page_bytes(cache.page_size, cache.format), cache.page_size, role,
                        num_pages))
    return false;
  pages = {.base = static_cast<std::byte*>(cache.kv.data),
           .stride_page = cache.kv.stride[0],
           .num_pages = num_pages,
           .page_size = cache.page_size,
           .format = cache.format};
  return true;
}

bool check_indexer_scales(Checks& check, const IndexerPages& pages, bool power_of_two_scales) {
  return check.require(
      power_of_two_scales || pages.layout().codec.scale_type != ScaleType::kUE8M0, "power_of_two_scales",
      "expected powers of two for {} keys, which have no other scales, got any numbers", name(pages.format));
}

}  // namespace mla::core
