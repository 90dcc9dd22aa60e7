// SPDX-License-Identifier: Apache-2.0
#include "flash_mla_caches.h"

#include <tvm/ffi/container/tensor.h>

#include <algorithm>
#include <limits>
#include <span>
#include <utility>

namespace mla::python::flash_mla {
namespace {

/// Holds the peer's names of the layouts of packed rows.
constexpr std::pair<std::string_view, CacheFormat> kNamedFormats[] = {{"V32", CacheFormat::kFP8DsMla},
                                                                      {"V32_NO_ROPE", CacheFormat::kFP8Nope},
                                                                      {"V4", CacheFormat::kFP8DsV4},
                                                                      {"V41", CacheFormat::kFP8DsV41}};
/// Beside a V41 cache, an extra one may have rows of FP4.
constexpr CacheFormat kFormatsBesideV41[] = {CacheFormat::kFP8DsV41, CacheFormat::kFP4DsV41};
/// Lists the formats that the width of a row tells apart.
constexpr CacheFormat kUnnamedFormats[] = {CacheFormat::kFP8DsMla, CacheFormat::kFP8DsV4};

/// Returns the bytes of one token, its scales included.
int64_t token_bytes(CacheFormat format, int64_t d_qk) { return page_bytes(format, d_qk, 1, false); }

std::string bytes_and_name(CacheFormat format, int64_t d_qk) {
  return std::to_string(token_bytes(format, d_qk)) + " bytes (" + std::string(name(format)) + ")";
}

void check_format_name(const Arguments& args, const CacheForm& form) {
  if (!form.kv_format) return;
  std::string names;
  for (const auto& [known, format] : kNamedFormats) {
    if (known == *form.kv_format) {
      if (form.is_fp8) return;
      refuse(args, "ValueError", "kv_format", "names quantized rows; expected None while is_fp8_kvcache is False");
    }
    names.append(names.empty() ? "" : ", ").append(known);
  }
  args.fail("ValueError", "kv_format", "one of " + names, "'" + *form.kv_format + "'");
}

/// Returns the formats that a cache of packed rows may have.
std::span<const CacheFormat> packed_formats(const GivenCache& given, const CacheForm& form) {
  if (!form.kv_format) return kUnnamedFormats;
  if (*form.kv_format == "V41" && std::string_view(given.name) == "extra_k_cache") return kFormatsBesideV41;
  const auto* const named = std::find_if(std::begin(kNamedFormats), std::end(kNamedFormats),
                                         [&](const auto& entry) { return entry.first == *form.kv_format; });
  return {&named->second, 1};
}

[[noreturn]] void refuse_width(const Arguments& args, const GivenCache& given, const CacheForm& form) {
  const int64_t width = given.view.shape[3];
  std::string expected;
  for (const CacheFormat format : packed_formats(given, form)) {
    if (!expected.empty()) expected.append(form.kv_format ? " or " : ", ");
    expected.append(bytes_and_name(format, form.d_qk));
  }
  if (form.kv_format)
    args.fail("ValueError", given.name, "rows of " + expected + ", as kv_format is " + *form.kv_format,
              std::to_string(width));
  std::string others;
  for (const CacheFormat format : kAllCacheFormats)
    if (kv_layout(format).is_packed() && token_bytes(format, form.d_qk) == width)
      others.append(others.empty() ? ", which would be " : " or ").append(name(format));
  if (!others.empty()) others.append(": these have to be named, by kv_format or in calls of libmla itself");
  args.fail("ValueError", given.name, "rows of " + expected + " or " + std::to_string(form.d_qk) + " e4m3 values",
            std::to_string(width) + others);
}

/// Returns the cache of packed rows [num_blocks, page_block_size, width].
KvCache packed(const Arguments& args, const GivenCache& given, const TensorView& rows, CacheFormat format) {
  KvCache cache{.format = format, .kv = rows};
  if (!kv_layout(format).has_footer()) return cache;
  const int64_t page_size = rows.shape[1];
  const int64_t width = rows.shape[2];
  if (page_size > 1 && rows.stride[1] != width)
    refuse(args, "ValueError", given.name,
           "pages of " + std::string(name(format)) + " keep all their data before all their scales: expected stride " +
               std::to_string(width) + " in dimension 1, got " + std::to_string(rows.stride[1]));
  cache.kv.ndim = 2;
  cache.kv.shape = {rows.shape[0], page_size * width};
  cache.kv.stride = {rows.stride[0], rows.stride[2]};
  cache.page_size = static_cast<int32_t>(std::min<int64_t>(page_size, std::numeric_limits<int32_t>::max()));
  return cache;
}

}  // namespace

void refuse(const Arguments& args, const char* exception, const char* field, const std::string& text) {
  raise(exception, std::string(args.operation()) + ": " + field + ": " + text);
}

std::string shape_text(const TensorView& view) {
  std::string text = "(";
  for (int i = 0; i < view.ndim; ++i)
    text.append(i == 0 ? "" : ", ").append(std::to_string(view.shape[static_cast<size_t>(i)]));
  return text.append(view.ndim == 1 ? ",)" : ")");
}

void expect_dims(const Arguments& args, const char* field, const TensorView& view, std::string_view dims) {
  if (!view.given()) args.fail("TypeError", field, "a torch tensor [" + std::string(dims) + "]", "None");
  if (view.ndim != std::count(dims.begin(), dims.end(), ',') + 1)
    args.fail("ValueError", field, "[" + std::string(dims) + "]", "shape " + shape_text(view));
}

TensorView select(const TensorView& view, int dim, int64_t index) {
  TensorView part = narrow(view, dim, index, 1);
  for (auto i = static_cast<size_t>(dim); i + 1 < static_cast<size_t>(view.ndim); ++i) {
    part.shape[i] = part.shape[i + 1];
    part.stride[i] = part.stride[i + 1];
  }
  --part.ndim;
  return part;
}

TensorView narrow(const TensorView& view, int dim, int64_t first, int64_t count) {
  TensorView part = view;
  const auto at = static_cast<size_t>(dim);
  part.shape[at] = count;
  part.data = static_cast<std::byte*>(view.data) + bytes_of(view.dtype, first * view.stride[at]);
  return part;
}

void read_cache(Arguments& args, GivenCache& given) {
  if (args.skip_none()) return;
  const ffi::AnyView value = args.any(given.name);
  given.view = args.view_of(given.name, value, Bytes::kRaw);
  given.type = (*value.try_cast<DLTensor*>())->dtype;
}

KvCache cache_of(const Arguments& args, const GivenCache& given, const CacheForm& form, int64_t kv_head) {
  check_format_name(args, form);
  const TensorView& cache = given.view;
  if (!form.is_fp8) {
    if (cache.dtype != DType::kBF16 && cache.dtype != DType::kF16)
      args.fail("TypeError", given.name, "bfloat16 or float16 while is_fp8_kvcache is False",
                type_name(given.type) + "; quantized caches need is_fp8_kvcache=True");
    return {.format = *format_of_elements(cache.dtype), .kv = select(cache, 2, kv_head)};
  }
  if (cache.dtype != DType::kU8 || given.type.code == kDLBool)
    args.fail("TypeError", given.name, "float8_e4m3fn, uint8 or int8 while is_fp8_kvcache is True",
              type_name(given.type));
  if (!form.kv_format && cache.shape[3] == form.d_qk) {
    if (!form.descale.given())
      refuse(
          args, "ValueError", given.name,
          "rows of " + std::to_string(form.d_qk) + " e4m3 values have one scale for the tensor: descale_k is missing");
    KvCache one_scale{.format = CacheFormat::kFP8, .kv = select(cache, 2, kv_head), .ckv_scale = form.descale};
    one_scale.kv.dtype = DType::kE4M3;
    return one_scale;
  }
  if (cache.shape[2] != 1)
    refuse(args, "ValueError", given.name,
           "packed rows belong to all query heads: expected num_heads_k 1, got " + std::to_string(cache.shape[2]));
  for (const CacheFormat format : packed_formats(given, form))
    if (cache.shape[3] == token_bytes(format, form.d_qk)) return packed(args, given, select(cache, 2, 0), format);
  refuse_width(args, given, form);
}

}  // namespace mla::python::flash_mla
