// SPDX-License-Identifier: Apache-2.0
// This header is the byte map of every cache format, for host and device code. No other file has these numbers.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "mla/types.h"

namespace mla {

/// Lists the cache formats by the names that engines use.
enum class CacheFormat : uint8_t {
  kBF16,
  kF16,
  kFP8,
  kFP8DsMla,
  kFP8DsV4,
  kFP8DsV41,
  kFP4DsV41,
  kFP8Nope,
  kNvFP4DsMla,     ///< 432 bytes a row
  kNvFP4DsMla416,  ///< the same without padding
  kNvFP4DsMla368,  ///< the same with rotary channels of e4m3
  kNvFP4DsV4,
  kMxFP4DsV4
};

inline constexpr CacheFormat kAllCacheFormats[] = {
    CacheFormat::kBF16,       CacheFormat::kF16,           CacheFormat::kFP8,           CacheFormat::kFP8DsMla,
    CacheFormat::kFP8DsV4,    CacheFormat::kFP8DsV41,      CacheFormat::kFP4DsV41,      CacheFormat::kFP8Nope,
    CacheFormat::kNvFP4DsMla, CacheFormat::kNvFP4DsMla416, CacheFormat::kNvFP4DsMla368, CacheFormat::kNvFP4DsV4,
    CacheFormat::kMxFP4DsV4};

/// Names the type of a scale factor.
enum class ScaleType : uint8_t { kNone, kF32, kUE8M0, kE4M3 };

/// Says where a token's scale factors lie.
enum class ScalePlace : uint8_t {
  kNone,    ///< there are none
  kTensor,  ///< in a tensor of their own
  kRow,     ///< in the token's row, scale_offset bytes behind its first
  kFooter   ///< in the footer of the page, behind the rows of all its tokens
};

/// Returns the bytes of one scale factor.
constexpr int32_t size_of(ScaleType type) {
  switch (type) {
    case ScaleType::kNone: return 0;
    case ScaleType::kF32: return 4;
    case ScaleType::kUE8M0:
    case ScaleType::kE4M3: return 1;
  }
  return 0;
}

/// Says how the channels of one part of a row are stored. A quantized channel stands for element * scale, rounded to
/// bf16.
struct Codec {
  DType element = DType::kBF16;             ///< bf16 and f16 are stored as they are; e4m3 and e2m1 are quantized
  ScaleType scale_type = ScaleType::kNone;  ///< type of the scales of quantized channels
  ScalePlace scale_place = ScalePlace::kNone;
  int32_t channels_per_scale = 0;  ///< neighbouring channels that share a scale; 0: one f32 scale for the whole tensor
  bool outer_scale = false;        ///< whether one more scale, an f32 for the whole tensor, may multiply all the others
  float least_scale = 0;           ///< writers choose no smaller scale; 0: choose_scale() says which is the smallest
};

/// Returns whether elements of this type are quantized: a scale multiplies them.
constexpr bool is_quantized(DType element) { return element == DType::kE4M3 || element == DType::kE2M1; }

/// Returns the type of the values that elements stand for: bf16 if they are quantized.
constexpr DType value_dtype(DType element) { return is_quantized(element) ? DType::kBF16 : element; }

/// At most this many channels of e2m1 share a scale.
inline constexpr int32_t kMostE2M1Group = 64;

/// Says where the parts of one token lie. Offsets count from the token's row (`row_bytes` apart) unless they say
/// otherwise. `nope` are the latent channels, `rope` the rotary ones.
struct KvLayout {
  std::string_view name;
  Codec nope, rope;
  int32_t nope_dim = 0, rope_dim = 0;  ///< channels; 0, 0 where the tensors' shapes say (bf16, f16, fp8)
  int32_t row_bytes = 0;               ///< from one token's row to the next inside a page; 0 where the shapes say
  int32_t rope_offset = 0;             ///< bytes; 0 where the shapes say
  int32_t scale_offset = 0;            ///< bytes from the row (kRow); footer scales start at page_size * row_bytes
  int32_t scale_bytes_per_token = 0;   ///< bytes of the scales of nope, padding included
  int32_t rope_scale_offset = 0;       ///< bytes from the row to the f32 scale of its rope, where that is kRow
  int32_t rope_scale_bytes = 0;        ///< bytes of that scale, padding included
  int32_t page_alignment = 1;          ///< bytes to which writers may pad a page; 1 = no padding
  bool value_has_rope = false;         ///< whether a value is the whole row, not its nope channels alone
  int32_t rotary_in_nope = 0;          ///< so many of the nope channels, the last ones, are rotary, though stored alike

  /// Returns whether rows are bytes that this map divides; otherwise they are tensors of elements.
  constexpr bool is_packed() const { return row_bytes != 0; }
  constexpr bool has_footer() const { return nope.scale_place == ScalePlace::kFooter; }
};

/// These are the latent channels of NVFP4 rows whose scales lie in the row.
inline constexpr Codec kNvFP4Latents = {.element = DType::kE2M1,
                                        .scale_type = ScaleType::kE4M3,
                                        .scale_place = ScalePlace::kRow,
                                        .channels_per_scale = 16,
                                        .outer_scale = true};

/// Returns the layout of a format.
constexpr KvLayout kv_layout(CacheFormat format) {
  switch (format) {
    case CacheFormat::kBF16:
      return {.name = "bf16", .nope = {.element = DType::kBF16}, .rope = {.element = DType::kBF16}};
    case CacheFormat::kF16: return {.name = "f16", .nope = {.element = DType::kF16}, .rope = {.element = DType::kF16}};
    case CacheFormat::kFP8: {
      constexpr Codec kScaled = {
          .element = DType::kE4M3, .scale_type = ScaleType::kF32, .scale_place = ScalePlace::kTensor};
      return {.name = "fp8", .nope = kScaled, .rope = kScaled};
    }
    case CacheFormat::kFP8DsMla:
      return {.name = "fp8_ds_mla",
              .nope = {.element = DType::kE4M3,
                       .scale_type = ScaleType::kF32,
                       .scale_place = ScalePlace::kRow,
                       .channels_per_scale = 128},
              .rope = {.element = DType::kBF16},
              .nope_dim = 512,
              .rope_dim = 64,
              .row_bytes = 656,
              .rope_offset = 528,
              .scale_offset = 512,
              .scale_bytes_per_token = 16};
    case CacheFormat::kFP8DsV4:
      return {.name = "fp8_dsv4",
              .nope = {.element = DType::kE4M3,
                       .scale_type = ScaleType::kUE8M0,
                       .scale_place = ScalePlace::kFooter,
                       .channels_per_scale = 64},
              .rope = {.element = DType::kBF16},
              .nope_dim = 448,
              .rope_dim = 64,
              .row_bytes = 576,
              .rope_offset = 448,
              .scale_bytes_per_token = 8,
              .page_alignment = 576,
              .value_has_rope = true};
    case CacheFormat::kFP8DsV41:
      return {.name = "fp8_dsv41",
              .nope = {.element = DType::kE4M3,
                       .scale_type = ScaleType::kUE8M0,
                       .scale_place = ScalePlace::kFooter,
                       .channels_per_scale = 32,
                       .least_scale = 0x1p-13F},  // 2^ceil(log2(1e-4))
              .rope = {.element = DType::kBF16},
              .nope_dim = 512,
              .row_bytes = 512,
              .scale_bytes_per_token = 16,
              .rotary_in_nope = 64};
    case CacheFormat::kFP4DsV41:
      return {.name = "fp4_dsv41",
              .nope = {.element = DType::kE2M1,
                       .scale_type = ScaleType::kE4M3,
                       .scale_place = ScalePlace::kFooter,
                       .channels_per_scale = 16},
              .rope = {.element = DType::kBF16},
              .nope_dim = 512,
              .row_bytes = 256,
              .scale_bytes_per_token = 32,
              .rotary_in_nope = 64};
    case CacheFormat::kFP8Nope:
      return {.name = "fp8_nope",
              .nope = {.element = DType::kE4M3,
                       .scale_type = ScaleType::kF32,
                       .scale_place = ScalePlace::kRow,
                       .channels_per_scale = 128},
              .rope = {.element = DType::kBF16},
              .nope_dim = 512,
              .row_bytes = 528,
              .scale_offset = 512,
              .scale_bytes_per_token = 16};
    // Rows of V3.2 and GLM in NVFP4. b12x writes and reads 432 and 368 bytes (attention/_shared/mla/kv_cache.py), with
    // an outer scale of a layer that calibration gives, or 1. SGLang's pull request 35237 has 416; the order of its
    // parts is from the list in its description, since its code could not be read.
    case CacheFormat::kNvFP4DsMla:
      return {.name = "nvfp4_ds_mla",
              .nope = kNvFP4Latents,
              .rope = {.element = DType::kBF16},
              .nope_dim = 512,
              .rope_dim = 64,
              .row_bytes = 432,
              .rope_offset = 304,
              .scale_offset = 256,
              .scale_bytes_per_token = 48};
    case CacheFormat::kNvFP4DsMla416:
      return {.name = "nvfp4_ds_mla_416",
              .nope = kNvFP4Latents,
              .rope = {.element = DType::kBF16},
              .nope_dim = 512,
              .rope_dim = 64,
              .row_bytes = 416,
              .rope_offset = 288,
              .scale_offset = 256,
              .scale_bytes_per_token = 32};
    case CacheFormat::kNvFP4DsMla368:  // the scale of the rotary channels lies in the padding of 432 bytes
      return {.name = "nvfp4_ds_mla_368",
              .nope = kNvFP4Latents,
              .rope = {.element = DType::kE4M3,
                       .scale_type = ScaleType::kF32,
                       .scale_place = ScalePlace::kRow,
                       .channels_per_scale = 64},
              .nope_dim = 512,
              .rope_dim = 64,
              .row_bytes = 368,
              .rope_offset = 304,
              .scale_offset = 256,
              .scale_bytes_per_token = 32,
              .rope_scale_offset = 288,
              .rope_scale_bytes = 16};
    // Rows of V4: those of FlashInfer's Dsv4Nvfp4Layout, with 28 scales and 4 bytes of padding in the footer, and those
    // of SGLang's mxfp4_k_cache.py (pull requests 32741 and 37136), with 14 scales and 2 bytes of padding in the row.
    case CacheFormat::kNvFP4DsV4:
      return {.name = "nvfp4_dsv4",
              .nope = {.element = DType::kE2M1,
                       .scale_type = ScaleType::kE4M3,
                       .scale_place = ScalePlace::kFooter,
                       .channels_per_scale = 16},
              .rope = {.element = DType::kBF16},
              .nope_dim = 448,
              .rope_dim = 64,
              .row_bytes = 352,
              .rope_offset = 224,
              .scale_bytes_per_token = 32,
              .value_has_rope = true};
    case CacheFormat::kMxFP4DsV4:
      return {.name = "mxfp4_dsv4",
              .nope = {.element = DType::kE2M1,
                       .scale_type = ScaleType::kUE8M0,
                       .scale_place = ScalePlace::kRow,
                       .channels_per_scale = 32},
              .rope = {.element = DType::kBF16},
              .nope_dim = 448,
              .rope_dim = 64,
              .row_bytes = 368,
              .rope_offset = 240,
              .scale_offset = 224,
              .scale_bytes_per_token = 16,
              .value_has_rope = true};
  }
  return {};
}

constexpr std::string_view name(CacheFormat format) { return kv_layout(format).name; }

constexpr std::optional<CacheFormat> parse_cache_format(std::string_view text) {
  for (CacheFormat format : kAllCacheFormats)
    if (name(format) == text) return format;
  return std::nullopt;
}

/// Returns the format whose caches are tensors of such elements.
constexpr std::optional<CacheFormat> format_of_elements(DType element) {
  for (CacheFormat format : kAllCacheFormats)
    if (!kv_layout(format).is_packed() && kv_layout(format).nope.element == element) return format;
  return std::nullopt;
}

/// Returns whether a row can have so many channels, or a page so many tokens. For such counts the bytes of a page fit
/// int64.
constexpr bool is_extent(int64_t count) { return count >= 1 && count <= INT32_MAX; }

/// Returns the bytes of one token's row, with its inline scales. `d_qk` (nope + rope channels) is used by formats whose
/// widths the shapes give. For these the result is 0 if no row is so wide: d_qk is below 1 or above 2^31 - 1.
constexpr int64_t row_bytes(CacheFormat format, int64_t d_qk) {
  const KvLayout layout = kv_layout(format);
  if (layout.is_packed()) return layout.row_bytes;
  return is_extent(d_qk) ? bytes_of(layout.nope.element, d_qk) : 0;
}

/// Returns where the scales of token `token` lie, in bytes from the start of its page (footer formats).
constexpr int64_t footer_scale_offset(const KvLayout& layout, int64_t page_size, int64_t token) {
  return page_size * layout.row_bytes + token * layout.scale_bytes_per_token;
}

/// Returns the bytes of a page, its footer included; `padded` rounds them up to the format's alignment. The result is 0
/// if no page has so many tokens (page_size is below 1 or above 2^31 - 1), or no row is so wide.
constexpr int64_t page_bytes(CacheFormat format, int64_t d_qk, int64_t page_size, bool padded) {
  if (!is_extent(page_size)) return 0;
  const KvLayout layout = kv_layout(format);
  int64_t bytes = page_size * row_bytes(format, d_qk);
  if (layout.has_footer()) bytes += page_size * layout.scale_bytes_per_token;
  if (padded) bytes = (bytes + layout.page_alignment - 1) / layout.page_alignment * layout.page_alignment;
  return bytes;
}

/// A token has this many scales where they lie in a tensor of their own: one for every quarter of its latent channels.
inline constexpr int32_t kTensorScalesPerToken = 4;

/// Returns the most bytes that a token's scales take in all formats whose latent channels have this type, rounded up to
/// words of four bytes; padding behind the last word is left out.
constexpr int32_t most_scale_bytes(DType element) {
  int32_t most = 0;
  for (CacheFormat format : kAllCacheFormats) {
    const KvLayout layout = kv_layout(format);
    if (layout.nope.element != element) continue;
    if (layout.nope.scale_place == ScalePlace::kNone) continue;
    const int32_t scales = layout.nope.scale_place == ScalePlace::kTensor
                               ? kTensorScalesPerToken
                               : layout.nope_dim / layout.nope.channels_per_scale;
    const int32_t bytes = (scales * size_of(layout.nope.scale_type) + 3) / 4 * 4;
    most = bytes > most ? bytes : most;
  }
  return most;
}

/// Lists the formats of the keys of the sparse-attention indexer.
enum class IndexerFormat : uint8_t {
  kFP8,   ///< 128 e4m3 and one f32 scale, 132 bytes
  kMXFP4  ///< 128 e2m1 and four UE8M0 scales, 68 bytes
};

inline constexpr IndexerFormat kAllIndexerFormats[] = {IndexerFormat::kFP8, IndexerFormat::kMXFP4};

/// Describes the paged cache of the indexer: a page holds the elements of page_size keys, then their scales. Of two
/// e2m1 in a byte the even channel has the low half. Scales of UE8M0 lie in the order of their channels. There is no
/// name here, for kernels make such layouts, and nvcc 13.0 drops code behind a string_view that is made on a GPU.
struct IndexerLayout {
  Codec codec;
  int32_t head_dim;     ///< channels of a key, the same in all formats
  int32_t key_bytes;    ///< bytes of a key's elements; those of token t lie at t * key_bytes
  int32_t scale_bytes;  ///< bytes of its scales; those of token t lie at page_size * key_bytes + t * scale_bytes

  constexpr int32_t num_scales() const { return head_dim / codec.channels_per_scale; }
};

/// Returns the layout of a format of the indexer's keys.
constexpr IndexerLayout indexer_layout(IndexerFormat format) {
  switch (format) {
    case IndexerFormat::kFP8:
      return {.codec = {.element = DType::kE4M3,
                        .scale_type = ScaleType::kF32,
                        .scale_place = ScalePlace::kFooter,
                        .channels_per_scale = 128},
              .head_dim = 128,
              .key_bytes = 128,
              .scale_bytes = 4};
    // Keys of DeepGEMM's FP4 logits (tests/test_attention.py) and of vLLM's V4 (fused_compress_quant_cache.py).
    case IndexerFormat::kMXFP4:
      return {.codec = {.element = DType::kE2M1,
                        .scale_type = ScaleType::kUE8M0,
                        .scale_place = ScalePlace::kFooter,
                        .channels_per_scale = 32},
              .head_dim = 128,
              .key_bytes = 64,
              .scale_bytes = 4};
  }
  return {};
}

/// Returns the name of a format of the indexer's keys; empty if there is no such format.
constexpr std::string_view name(IndexerFormat format) {
  switch (format) {
    case IndexerFormat::kFP8: return "fp8";
    case IndexerFormat::kMXFP4: return "mxfp4";
  }
  return {};
}

constexpr std::optional<IndexerFormat> parse_indexer_format(std::string_view text) {
  for (IndexerFormat format : kAllIndexerFormats)
    if (name(format) == text) return format;
  return std::nullopt;
}

/// This is the layout of keys of FP8. Their head_dim is that of all formats.
inline constexpr IndexerLayout kIndexerLayout = indexer_layout(IndexerFormat::kFP8);

/// Returns the bytes of a key in the indexer's cache, its scales included.
constexpr int64_t indexer_key_bytes(IndexerFormat format) {
  return indexer_layout(format).key_bytes + indexer_layout(format).scale_bytes;
}

/// Returns the bytes of a page of the indexer's cache, or 0 if no page has so many tokens, as page_bytes does.
constexpr int64_t indexer_page_bytes(int64_t page_size, IndexerFormat format = IndexerFormat::kFP8) {
  return is_extent(page_size) ? page_size * indexer_key_bytes(format) : 0;
}

}  // namespace mla
