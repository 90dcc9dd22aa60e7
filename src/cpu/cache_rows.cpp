// SPDX-License-Identifier: Apache-2.0
#include "cpu/cache_rows.h"

#include <algorithm>
#include <cstring>

#include "cpu/share.h"
#include "mla/numeric.h"

namespace mla::cpu {
namespace {

constexpr int32_t kMaxScales = 8;  // chosen at a time

bool has_ue8m0_scales(const core::Cache& cache) { return is_ue8m0(cache.layout.scale_kind); }

DType element_type(CacheFormat format, int32_t bytes) {
  if (bytes == 1) return DType::kE4M3;
  return format == CacheFormat::kF16 ? DType::kF16 : DType::kBF16;
}

/// Not necessarily aligned.
float load_scale(const std::byte* scales, int32_t i, bool ue8m0) {
  if (ue8m0) return ue8m0_to_f32(std::to_integer<uint8_t>(scales[i]));
  float scale;
  std::memcpy(&scale, scales + i * static_cast<int64_t>(sizeof scale), sizeof scale);
  return scale;
}

uint8_t* codes_of(const core::Plane& plane, int64_t page, int64_t offset) {
  return reinterpret_cast<uint8_t*>(plane.row(page, offset));
}

}  // namespace

DType ckv_type(const core::Cache& cache) { return element_type(cache.format, cache.layout.element_bytes); }
DType kpe_type(const core::Cache& cache) { return element_type(cache.format, cache.layout.rope_element_bytes); }

int64_t token_bytes(const core::Cache& cache) {
  const KvLayout& layout = cache.layout;
  return int64_t{cache.d_ckv} * layout.element_bytes + int64_t{cache.d_kpe} * layout.rope_element_bytes +
         (cache.writes_scales ? cache.num_scales * (has_ue8m0_scales(cache) ? 1 : 4) : 0);
}

void ElementCopier::copy(const void* src, void* dst, int64_t n) const {
  const int64_t bytes = n * static_cast<int64_t>(size_of(dst_));
  if (streaming_) {
    kernels_.stream(src, dst, bytes);
  } else if (src_ == dst_) {
    rows_.copy(src, dst, bytes);
  } else {
    kernels_.convert(src, src_, dst, dst_, n);
  }
}

void ElementCopier::finish() const {
  if (streaming_) kernels_.finish_streams();
}

void CacheWriter::prefetch(int64_t page, int64_t offset) const {
  if (cache_.num_scales > 0) tiles_.prefetch_for_write(cache_.ckv.row(page, offset), token_bytes(cache_));
}

void CacheReader::prefetch(int64_t page, int64_t offset) const {
  prefetch_for_read(cache_.ckv.row(page, offset), token_bytes(cache_));
}

void CacheWriter::write_ckv(const void* source, int64_t page, int64_t offset) const {
  if (cache_.num_scales == 0) return ckv_.copy(source, cache_.ckv.row(page, offset), cache_.d_ckv);
  uint8_t* codes = codes_of(cache_.ckv, page, offset);
  std::byte* scales = cache_.scales.row(page, offset);
  if (!cache_.writes_scales)
    return kernels_.quantize(source, ckv_source_, load_scale(scales, 0, false), cache_.d_ckv, codes);
  const int32_t group = cache_.d_ckv / cache_.num_scales;
  for (int32_t first = 0; first < cache_.num_scales; first += kMaxScales) {
    float chosen[kMaxScales];
    const int32_t n = std::min(kMaxScales, cache_.num_scales - first);
    kernels_.quantize_groups(at(source, int64_t{first} * group, ckv_source_), ckv_source_, n, group,
                             cache_.power_of_two_scales, chosen, codes + int64_t{first} * group);
    write_scales(chosen, first, n, scales);
  }
}

void CacheWriter::write_scales(const float* scales, int32_t first, int32_t n, std::byte* to) const {
  if (!has_ue8m0_scales(cache_)) {
    std::memcpy(to + first * sizeof(float), scales, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  for (int32_t i = 0; i < n; ++i) to[first + i] = std::byte{f32_to_ue8m0(scales[i])};
  const int32_t padded = cache_.layout.scale_bytes_per_token;
  if (first + n == cache_.num_scales) std::fill(to + cache_.num_scales, to + padded, std::byte{0});
}

void CacheWriter::write_kpe(const void* source, int64_t page, int64_t offset, int32_t first, int32_t n) const {
  const DType type = kpe_type(cache_);
  char* out = at(cache_.kpe.row(page, offset), first, type);
  if (type != DType::kE4M3) return kpe_.copy(source, out, n);
  kernels_.quantize(source, kpe_source_, *cache_.kpe_scale, n, reinterpret_cast<uint8_t*>(out));
}

void CacheReader::read_ckv(int64_t page, int64_t offset, void* out) const {
  if (cache_.num_scales == 0) return ckv_.copy(cache_.ckv.row(page, offset), out, cache_.d_ckv);
  const uint8_t* codes = codes_of(cache_.ckv, page, offset);
  const std::byte* stored = cache_.scales.row(page, offset);
  const int64_t group = cache_.d_ckv / cache_.num_scales;
  const bool ue8m0 = has_ue8m0_scales(cache_);
  for (int32_t first = 0; first < cache_.num_scales; first += kMaxScales) {
    float scales[kMaxScales];
    const int32_t n = std::min(kMaxScales, cache_.num_scales - first);
    for (int32_t i = 0; i < n; ++i) scales[i] = load_scale(stored, first + i, ue8m0);
    dequantize(codes + first * group, scales, n, group, at(out, first * group, out_));
  }
}

void CacheReader::read_kpe(int64_t page, int64_t offset, void* out) const {
  if (kpe_type(cache_) != DType::kE4M3) return kpe_.copy(cache_.kpe.row(page, offset), out, cache_.d_kpe);
  dequantize(codes_of(cache_.kpe, page, offset), cache_.kpe_scale, 1, cache_.d_kpe, out);
}

/// What goes past the caches is made in L1 first.
void CacheReader::dequantize(const uint8_t* codes, const float* scales, int32_t num_groups, int64_t group,
                             void* out) const {
  constexpr int64_t kStaged = 1024;
  if (!streaming_ || num_groups * group > kStaged)
    return kernels_.dequantize(codes, scales, num_groups, group, out, out_);
  alignas(64) float values[kStaged];  // of any type
  kernels_.dequantize(codes, scales, num_groups, group, values, out_);
  staged_.copy(values, out, num_groups * group);
}

}  // namespace mla::cpu
