// SPDX-License-Identifier: Apache-2.0
// The byte map of every cache format, for host and device code alike. No other file states these numbers.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace mla {

/// Cache formats by the names that engines use.
enum class CacheFormat : uint8_t { kBF16, kF16, kFP8, kFP8DsMla, kFP8DsV4 };

inline constexpr CacheFormat kAllCacheFormats[] = {CacheFormat::kBF16, CacheFormat::kF16, CacheFormat::kFP8,
                                                   CacheFormat::kFP8DsMla, CacheFormat::kFP8DsV4};

/// How the scale factors of a format are stored.
enum class ScaleKind : uint8_t { kNone, kPerTensorF32, kInlineF32, kFooterUE8M0 };

/// Whether the scales are UE8M0 bytes; else they are f32.
constexpr bool is_ue8m0(ScaleKind kind) { return kind == ScaleKind::kFooterUE8M0; }

/// Where the parts of one token lie. Offsets count from the token's row (`row_bytes` apart) unless they say otherwise.
/// `nope` are the latent channels, `rope` the rotary ones.
struct KvLayout {
  std::string_view name;
  int32_t element_bytes;       ///< of a nope channel
  int32_t rope_element_bytes;  ///< of a rope channel
  int32_t nope_dim, rope_dim;  ///< channels; 0, 0 where the tensors' shapes say (bf16, f16, fp8)
  int32_t row_bytes;           ///< from one token's row to the next inside a page; 0 where the shapes say
  int32_t rope_offset;         ///< bytes; 0 where the shapes say
  ScaleKind scale_kind;
  int32_t scale_offset;           ///< bytes from the row (kInlineF32); footer scales start at page_size * row_bytes
  int32_t scale_bytes_per_token;  ///< pad bytes included
  int32_t channels_per_scale;     ///< nope channels that share one scale; 0 = the whole tensor
  int32_t page_alignment;         ///< bytes to which writers may pad a page; 1 = no padding
};

/// The layout of a format.
constexpr KvLayout kv_layout(CacheFormat format) {
  switch (format) {
    case CacheFormat::kBF16:
      return {.name = "bf16",
              .element_bytes = 2,
              .rope_element_bytes = 2,
              .nope_dim = 0,
              .rope_dim = 0,
              .row_bytes = 0,
              .rope_offset = 0,
              .scale_kind = ScaleKind::kNone,
              .scale_offset = 0,
              .scale_bytes_per_token = 0,
              .channels_per_scale = 0,
              .page_alignment = 1};
    case CacheFormat::kF16:
      return {.name = "f16",
              .element_bytes = 2,
              .rope_element_bytes = 2,
              .nope_dim = 0,
              .rope_dim = 0,
              .row_bytes = 0,
              .rope_offset = 0,
              .scale_kind = ScaleKind::kNone,
              .scale_offset = 0,
              .scale_bytes_per_token = 0,
              .channels_per_scale = 0,
              .page_alignment = 1};
    case CacheFormat::kFP8:
      return {.name = "fp8",
              .element_bytes = 1,
              .rope_element_bytes = 1,
              .nope_dim = 0,
              .rope_dim = 0,
              .row_bytes = 0,
              .rope_offset = 0,
              .scale_kind = ScaleKind::kPerTensorF32,
              .scale_offset = 0,
              .scale_bytes_per_token = 0,
              .channels_per_scale = 0,
              .page_alignment = 1};
    case CacheFormat::kFP8DsMla:
      return {.name = "fp8_ds_mla",
              .element_bytes = 1,
              .rope_element_bytes = 2,
              .nope_dim = 512,
              .rope_dim = 64,
              .row_bytes = 656,
              .rope_offset = 528,
              .scale_kind = ScaleKind::kInlineF32,
              .scale_offset = 512,
              .scale_bytes_per_token = 16,
              .channels_per_scale = 128,
              .page_alignment = 1};
    case CacheFormat::kFP8DsV4:
      return {.name = "fp8_dsv4",
              .element_bytes = 1,
              .rope_element_bytes = 2,
              .nope_dim = 448,
              .rope_dim = 64,
              .row_bytes = 576,
              .rope_offset = 448,
              .scale_kind = ScaleKind::kFooterUE8M0,
              .scale_offset = 0,
              .scale_bytes_per_token = 8,
              .channels_per_scale = 64,
              .page_alignment = 576};
  }
  return {};
}

constexpr std::string_view name(CacheFormat format) { return kv_layout(format).name; }

constexpr std::optional<CacheFormat> parse_cache_format(std::string_view text) {
  for (CacheFormat format : kAllCacheFormats)
    if (name(format) == text) return format;
  return std::nullopt;
}

/// Bytes of one token's row, with its inline scales. `d_qk` (nope + rope channels) matters to the formats whose
/// widths the shapes give.
constexpr int64_t row_bytes(CacheFormat format, int64_t d_qk) {
  const KvLayout layout = kv_layout(format);
  return layout.row_bytes != 0 ? layout.row_bytes : d_qk * layout.element_bytes;
}

/// Byte of token `token`'s scales from the start of its page (footer formats).
constexpr int64_t footer_scale_offset(const KvLayout& layout, int64_t page_size, int64_t token) {
  return page_size * layout.row_bytes + token * layout.scale_bytes_per_token;
}

/// Bytes of a page, its footer included; `padded` rounds up to the format's alignment.
constexpr int64_t page_bytes(CacheFormat format, int64_t d_qk, int64_t page_size, bool padded) {
  const KvLayout layout = kv_layout(format);
  int64_t bytes = page_size * row_bytes(format, d_qk);
  if (layout.scale_kind == ScaleKind::kFooterUE8M0) bytes += page_size * layout.scale_bytes_per_token;
  if (padded) bytes = (bytes + layout.page_alignment - 1) / layout.page_alignment * layout.page_alignment;
  return bytes;
}

/// The paged cache of the sparse-attention indexer: a page holds page_size keys of e4m3, then page_size f32 scales.
struct IndexerLayout {
  int32_t head_dim;     ///< channels of a key
  int32_t key_bytes;    ///< of a token's key; token t's lies at t * key_bytes
  int32_t scale_bytes;  ///< of a token's scale; token t's lies at page_size * key_bytes + t * scale_bytes
};

inline constexpr IndexerLayout kIndexerLayout = {.head_dim = 128, .key_bytes = 128, .scale_bytes = 4};

/// Bytes of a page of the indexer's cache.
constexpr int64_t indexer_page_bytes(int64_t page_size) {
  return page_size * (kIndexerLayout.key_bytes + kIndexerLayout.scale_bytes);
}

}  // namespace mla
