// SPDX-License-Identifier: Apache-2.0
// Keeps caches of every format in memory, with a packer and an unpacker of their own, written from the specification's
// byte table.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ostream>
#include <string_view>
#include <tuple>
#include <vector>

#include "core/args.h"
#include "definitions.h"
#include "mla/numeric.h"

namespace mla::reference {

/// Describes a format with the choices that it leaves.
struct Variant {
  CacheFormat format;
  int32_t d_ckv, d_kpe;
  int32_t num_scales = 0;  // of a token; fp8: 1 for the whole tensor, or 4
  bool power_of_two = false;
  float scale = 0, kpe_scale = 0;  // fp8: of the tensor, and of kpe
  int32_t rotary_in_ckv = 0;       // so many channels of d_ckv, the last ones, are rotary
  float outer = 0;                 // multiplies all scales; 0: there is none

  friend std::ostream& operator<<(std::ostream& out, const Variant& v) {
    return out << name(v.format) << ' ' << v.d_ckv << '+' << v.d_kpe << " scales " << v.num_scales << ' '
               << v.power_of_two << " outer " << v.outer;
  }
};

inline std::vector<Variant> all_variants() {
  return {{.format = CacheFormat::kBF16, .d_ckv = 512, .d_kpe = 64},
          {.format = CacheFormat::kF16, .d_ckv = 512, .d_kpe = 64},
          {.format = CacheFormat::kBF16, .d_ckv = 448, .d_kpe = 64},
          {.format = CacheFormat::kBF16, .d_ckv = 12, .d_kpe = 0},
          {.format = CacheFormat::kFP8, .d_ckv = 512, .d_kpe = 64, .num_scales = 1, .scale = 0.05F, .kpe_scale = 0.25F},
          {.format = CacheFormat::kFP8, .d_ckv = 448, .d_kpe = 64, .num_scales = 1, .scale = 0.05F, .kpe_scale = 0.25F},
          {.format = CacheFormat::kFP8, .d_ckv = 12, .d_kpe = 0, .num_scales = 1, .scale = 0.5F},
          {.format = CacheFormat::kFP8, .d_ckv = 512, .d_kpe = 64, .num_scales = 4, .kpe_scale = 0.3F},
          {.format = CacheFormat::kFP8, .d_ckv = 12, .d_kpe = 0, .num_scales = 4, .power_of_two = true},
          {.format = CacheFormat::kFP8DsMla, .d_ckv = 512, .d_kpe = 64, .num_scales = 4, .power_of_two = true},
          {.format = CacheFormat::kFP8DsMla, .d_ckv = 512, .d_kpe = 64, .num_scales = 4},
          {.format = CacheFormat::kFP8DsV4, .d_ckv = 448, .d_kpe = 64, .num_scales = 7, .power_of_two = true},
          {.format = CacheFormat::kFP8DsV41,
           .d_ckv = 512,
           .d_kpe = 0,
           .num_scales = 16,
           .power_of_two = true,
           .rotary_in_ckv = 64},
          {.format = CacheFormat::kFP4DsV41,
           .d_ckv = 512,
           .d_kpe = 0,
           .num_scales = 32,
           .power_of_two = true,
           .rotary_in_ckv = 64},
          {.format = CacheFormat::kFP8Nope, .d_ckv = 512, .d_kpe = 0, .num_scales = 4, .power_of_two = true},
          {.format = CacheFormat::kFP8Nope, .d_ckv = 512, .d_kpe = 0, .num_scales = 4},
          {.format = CacheFormat::kNvFP4DsMla, .d_ckv = 512, .d_kpe = 64, .num_scales = 32},
          {.format = CacheFormat::kNvFP4DsMla, .d_ckv = 512, .d_kpe = 64, .num_scales = 32, .outer = 0.0037F},
          {.format = CacheFormat::kNvFP4DsMla416, .d_ckv = 512, .d_kpe = 64, .num_scales = 32, .outer = 0.0037F},
          {.format = CacheFormat::kNvFP4DsMla368, .d_ckv = 512, .d_kpe = 64, .num_scales = 32, .outer = 0.25F},
          {.format = CacheFormat::kNvFP4DsV4, .d_ckv = 448, .d_kpe = 64, .num_scales = 28},
          {.format = CacheFormat::kMxFP4DsV4, .d_ckv = 448, .d_kpe = 64, .num_scales = 14, .power_of_two = true}};
}

/// Holds a cache; every byte that belongs to no row, and every row not yet written, holds kFill.
class TestCache {
 public:
  static constexpr uint8_t kFill = 0xA5;

  TestCache(const Variant& variant, int64_t num_pages, int32_t page_size)
      : v(variant), num_pages_(num_pages), page_size_(page_size) {
    bytes.assign(static_cast<size_t>(num_pages * page_stride()), kFill);
    if (v.format == CacheFormat::kFP8) scales.assign(v.num_scales == 1 ? 1 : scale_at(num_pages, 0), v.scale);
  }

  core::Cache view() {
    core::Cache cache = {.format = v.format,
                         .num_pages = num_pages_,
                         .page_size = page_size_,
                         .d_ckv = v.d_ckv,
                         .d_kpe = v.d_kpe,
                         .ckv = {data(), page_stride(), row_stride()},
                         .kpe = {v.d_kpe > 0 ? data() + kpe_offset() : nullptr, page_stride(), row_stride()},
                         .power_of_two_scales = v.power_of_two};
    core::set_codecs(kv_layout(v.format), cache);
    if (v.format == CacheFormat::kFP8) {
      if (v.num_scales > 1) core::set_token_scales(cache);
      const int64_t token = v.num_scales == 1 ? 0 : 16;
      cache.scales = {reinterpret_cast<std::byte*>(scales.data()), token == 0 ? 0 : page_size_ * token + 4, token};
      cache.kpe_scale = v.d_kpe > 0 ? &v.kpe_scale : nullptr;
    } else if (footer() > 0) {
      cache.scales = {data() + page_size_ * int64_t{packed_row()}, page_stride(), footer()};
    } else if (packed_row() > 0) {
      cache.scales = {data() + scales_at(), page_stride(), row_stride()};
    }
    if (v.outer > 0) cache.outer_scale = &v.outer;
    return cache;
  }

  /// Writes [ckv | kpe] into the slot.
  void pack(int64_t slot, const std::vector<float>& row) {
    const int64_t page = slot / page_size_, offset = slot % page_size_;
    uint8_t* at = bytes.data() + page * page_stride() + offset * row_stride();
    const int32_t d_qk = v.d_ckv + v.d_kpe;
    for (int32_t c = 0; c < d_qk; ++c) {
      const float value = row[static_cast<size_t>(c)];
      const bool nope = c < v.d_ckv;
      if (v.format == CacheFormat::kBF16 || v.format == CacheFormat::kF16) {
        put(at + 2 * c, v.format == CacheFormat::kF16 ? f32_to_f16(value) : f32_to_bf16(value));
      } else if (v.format == CacheFormat::kFP8 && !nope) {
        at[c] = encode_by_definition(value / v.kpe_scale);
      } else if (!nope && has_kpe_scale()) {
        if (c == v.d_ckv) put(at + 288, std::array<float, 4>{kpe_scale_for(&row[static_cast<size_t>(c)])});
        at[kpe_offset() + c - v.d_ckv] = encode_by_definition(value / get<float>(at + 288));
      } else if (!nope) {
        put(at + kpe_offset() + 2 * (c - v.d_ckv), f32_to_bf16(value));
      } else {
        const int32_t group = v.d_ckv / v.num_scales;
        if (c % group == 0 && v.num_scales > 1)
          put_scale(page, offset, c / group, chosen_scale(&row[static_cast<size_t>(c)], group));
        const float quotient = value / scale(page, offset, c / group);
        if (!has_e2m1())
          at[c] = encode_by_definition(quotient);
        else  // the even channel is in the low half
          at[c / 2] = static_cast<uint8_t>(c % 2 == 0 ? encode_e2m1_by_definition(quotient)
                                                      : at[c / 2] | encode_e2m1_by_definition(quotient) << 4);
      }
    }
    for (const auto& [format, begin, end] :
         {std::tuple(CacheFormat::kFP8DsV4, 7, 8), std::tuple(CacheFormat::kNvFP4DsV4, 28, 32)})
      if (v.format == format)
        std::fill_n(bytes.begin() + static_cast<int64_t>(footer_at(page, offset)) + begin, end - begin, uint8_t{0});
    if (v.format == CacheFormat::kNvFP4DsMla) std::fill(at + 288, at + 304, uint8_t{0});
    if (v.format == CacheFormat::kMxFP4DsV4) std::fill(at + 238, at + 240, uint8_t{0});
  }

  /// Returns the dequantized row.
  std::vector<float> unpack(int64_t slot) const {
    const int64_t page = slot / page_size_, offset = slot % page_size_;
    const uint8_t* at = bytes.data() + page * page_stride() + offset * row_stride();
    std::vector<float> row;
    for (int32_t c = 0; c < v.d_ckv + v.d_kpe; ++c) {
      const bool nope = c < v.d_ckv;
      if (v.format == CacheFormat::kBF16 || v.format == CacheFormat::kF16) {
        const auto bits = get<uint16_t>(at + 2 * c);
        row.push_back(v.format == CacheFormat::kF16 ? f16_to_f32(bits) : bf16_to_f32(bits));
      } else if (v.format != CacheFormat::kFP8 && !nope && !has_kpe_scale()) {
        row.push_back(bf16_to_f32(get<uint16_t>(at + kpe_offset() + 2 * (c - v.d_ckv))));
      } else {
        const float factor = nope ? scale(page, offset, c / (v.d_ckv / v.num_scales)) : kpe_scale(at);
        const double code = nope || !has_kpe_scale() ? element(at, c) : e4m3(at[kpe_offset() + c - v.d_ckv]);
        row.push_back(bf16_to_f32(f32_to_bf16(static_cast<float>(code) * factor)));
      }
    }
    return row;
  }

  /// Holds a row without rounding: each channel is an element times a factor, which is 1 for 16-bit channels.
  struct Exact {
    std::vector<double> elements, factors;
  };
  Exact exact(int64_t slot) const {
    const int64_t page = slot / page_size_, offset = slot % page_size_;
    const uint8_t* at = bytes.data() + page * page_stride() + offset * row_stride();
    Exact row;
    for (int32_t c = 0; c < v.d_ckv + v.d_kpe; ++c) {
      const bool nope = c < v.d_ckv, narrow = nope || v.format == CacheFormat::kFP8 || has_kpe_scale();
      const double code = !narrow                    ? 0
                          : nope || !has_kpe_scale() ? element(at, c)
                                                     : e4m3(at[kpe_offset() + c - v.d_ckv]);
      const auto wide = [&] { return bf16_to_f32(get<uint16_t>(at + kpe_offset() + 2 * (c - v.d_ckv))); };
      row.elements.push_back(narrow ? code : static_cast<double>(wide()));
      const float factor = nope ? scale(page, offset, c / (v.d_ckv / v.num_scales)) : narrow ? kpe_scale(at) : 1.0F;
      row.factors.push_back(static_cast<double>(factor));
    }
    return row;
  }

  int64_t num_slots() const { return num_pages_ * page_size_; }

  const Variant v;
  std::vector<uint8_t> bytes;
  std::vector<float> scales;  // fp8

 private:
  std::byte* data() { return reinterpret_cast<std::byte*>(bytes.data()); }

  /// Returns the bytes of a row of bytes; 0 where rows are tensors of elements.
  int32_t packed_row() const {
    switch (v.format) {
      case CacheFormat::kFP8DsMla: return 656;
      case CacheFormat::kFP8DsV4: return 576;
      case CacheFormat::kFP8DsV41: return 512;
      case CacheFormat::kFP4DsV41: return 256;
      case CacheFormat::kFP8Nope: return 528;
      case CacheFormat::kNvFP4DsMla: return 432;
      case CacheFormat::kNvFP4DsMla416: return 416;
      case CacheFormat::kNvFP4DsMla368:
      case CacheFormat::kMxFP4DsV4: return 368;
      case CacheFormat::kNvFP4DsV4: return 352;
      default: return 0;
    }
  }
  /// Returns the bytes of a token's scales in the footer of its page; 0 where there is none.
  int32_t footer() const {
    switch (v.format) {
      case CacheFormat::kFP8DsV4: return 8;
      case CacheFormat::kFP8DsV41: return 16;
      case CacheFormat::kFP4DsV41:
      case CacheFormat::kNvFP4DsV4: return 32;
      default: return 0;
    }
  }
  bool has_e2m1() const { return name(v.format).find("fp4") != std::string_view::npos; }
  bool has_e4m3_scales() const { return has_e2m1() && v.format != CacheFormat::kMxFP4DsV4; }
  bool has_kpe_scale() const { return v.format == CacheFormat::kNvFP4DsMla368; }
  /// Returns the scale that a writer chooses for 64 rotary channels.
  static float kpe_scale_for(const float* kpe) { return std::fmax(finite_amax(kpe, 64) / 448.0F, 0x1p-126F); }
  /// Returns the scale of the rotary channels of the row at `at`.
  float kpe_scale(const uint8_t* at) const { return has_kpe_scale() ? get<float>(at + 288) : v.kpe_scale; }
  /// Returns the bytes of a row before its scales, where those lie in the row.
  int32_t scales_at() const { return v.format == CacheFormat::kMxFP4DsV4 ? 224 : has_e2m1() ? 256 : 512; }
  static double e4m3(uint8_t code) { return (code & 127) == 127 ? std::nan("") : e4m3_by_definition(code); }
  double element(const uint8_t* at, int32_t c) const {
    if (has_e2m1()) return e2m1_by_definition(c % 2 == 0 ? at[c / 2] & 15 : at[c / 2] >> 4);
    return e4m3(at[c]);
  }

  int64_t row_stride() const {
    if (packed_row() > 0) return packed_row();
    return (v.d_ckv + v.d_kpe) * (v.format == CacheFormat::kFP8 ? 1 : 2) + 6;
  }
  /// Returns the bytes from a page to the next, with a gap that leaves every second page of the packed formats at an
  /// odd multiple of 2.
  int64_t page_stride() const { return page_size_ * (row_stride() + footer()) + 10; }
  int64_t kpe_offset() const {
    if (v.format == CacheFormat::kFP8DsMla) return 528;
    if (v.format == CacheFormat::kFP8DsV4) return 448;
    if (v.format == CacheFormat::kNvFP4DsMla || has_kpe_scale()) return 304;
    if (v.format == CacheFormat::kNvFP4DsMla416) return 288;
    if (v.format == CacheFormat::kNvFP4DsV4) return 224;
    if (v.format == CacheFormat::kMxFP4DsV4) return 240;
    return v.d_ckv * (v.format == CacheFormat::kFP8 ? 1 : 2);
  }
  /// Returns the index in `scales` of a token's first scale; a page of scales ends in a gap of one.
  size_t scale_at(int64_t page, int64_t offset) const {
    return v.num_scales == 1 ? 0 : static_cast<size_t>(page * (page_size_ * 4 + 1) + offset * 4);
  }
  size_t inline_at(int64_t page, int64_t offset) const {
    return static_cast<size_t>(page * page_stride() + offset * packed_row() + scales_at());
  }
  size_t footer_at(int64_t page, int64_t offset) const {
    return static_cast<size_t>(page * page_stride() + page_size_ * packed_row() + offset * footer());
  }

  static float finite_amax(const float* values, int32_t n) {
    float amax = 0;
    for (int32_t c = 0; c < n; ++c)
      if (!std::isnan(values[c]) && !std::isinf(values[c])) amax = std::fmax(amax, std::fabs(values[c]));
    return amax;
  }
  bool has_byte_scales() const { return footer() > 0 || has_e2m1(); }
  size_t byte_scales_at(int64_t page, int64_t offset) const {
    return footer() > 0 ? footer_at(page, offset) : inline_at(page, offset);
  }

  /// Returns the scale that a writer chooses, without the outer one.
  float chosen_scale(const float* group, int32_t n) const {
    const float amax = finite_amax(group, n);
    if (v.format == CacheFormat::kFP8DsV41) return static_cast<float>(v41_scale_by_definition(amax));
    if (v.format == CacheFormat::kMxFP4DsV4) {
      int exponent = 0;
      const double fraction = std::frexp(static_cast<double>(std::fmax(amax, 1e-4F)) / 6.0, &exponent);
      return std::ldexp(1.0F, fraction == 0.5 ? exponent - 1 : exponent);
    }
    if (has_e4m3_scales()) {
      const float wanted = std::clamp((v.outer > 0 ? amax / v.outer : amax) / 6.0F, 0x1p-9F, 448.0F);
      return static_cast<float>(e4m3_by_definition(encode_by_definition(wanted)));
    }
    if (v.power_of_two) return static_cast<float>(power_of_two_by_definition(amax));
    return std::fmax(amax / 448.0F, 0x1p-126F);
  }
  void put_scale(int64_t page, int64_t offset, int32_t group, float value) {
    const auto g = static_cast<size_t>(group);
    if (v.format == CacheFormat::kFP8)
      scales[scale_at(page, offset) + g] = value;
    else if (has_e4m3_scales())
      bytes[byte_scales_at(page, offset) + g] = encode_by_definition(value);
    else if (has_byte_scales())
      bytes[byte_scales_at(page, offset) + g] = static_cast<uint8_t>(std::ilogb(value) + 127);
    else
      put(&bytes[inline_at(page, offset) + 4 * g], value);
  }
  float scale(int64_t page, int64_t offset, int32_t group) const {
    const auto g = static_cast<size_t>(group);
    if (v.format == CacheFormat::kFP8) return scales[scale_at(page, offset) + (v.num_scales == 1 ? 0 : g)];
    if (!has_byte_scales()) return get<float>(&bytes[inline_at(page, offset) + 4 * g]);
    const uint8_t code = bytes[byte_scales_at(page, offset) + g];
    if (has_e4m3_scales()) return static_cast<float>(e4m3(code)) * (v.outer > 0 ? v.outer : 1.0F);
    if (code == 255) return std::nanf("");
    return code == 0 ? 0.0F : std::ldexp(1.0F, code - 127);
  }

  template <class T>
  static T get(const uint8_t* at) {
    T value;
    std::memcpy(&value, at, sizeof(value));
    return value;
  }
  template <class T>
  static void put(uint8_t* at, T value) {
    std::memcpy(at, &value, sizeof(value));
  }

  int64_t num_pages_;
  int32_t page_size_;
};

}  // namespace mla::reference
