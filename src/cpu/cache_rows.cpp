// SPDX-License-Identifier: Apache-2.0
#include "cpu/cache_rows.h"

#include <algorithm>
#include <cstring>

#include "cpu/row_scales.h"
#include "cpu/share.h"
#include "mla/numeric.h"

namespace mla::cpu {
namespace {

uint8_t* elements_of(const core::Plane& plane, int64_t page, int64_t offset) {
  return reinterpret_cast<uint8_t*>(plane.row(page, offset));
}

/// Clears the bytes that pad a token's scales.
void pad_scales(const core::Cache& cache, std::byte* scales) {
  std::fill(scales + cache.num_scales * size_of(cache.scale_type), scales + cache.scale_bytes, std::byte{0});
}

}  // namespace

// It is aligned so that its loop does not cross a line of 64 bytes, where gather of bf16 rows took 62 us instead of 56
// (AMD EPYC, Zen 4, 2026-11-23; docs/notebook/2026-11-23-cpu-gather.md).
[[gnu::aligned(64)]] void prefetch_for_read(const void* begin, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(begin) + i);
}

int64_t token_bytes(const core::Cache& cache) {
  const int32_t scales = cache.writes_scales ? cache.num_scales * size_of(cache.scale_type) : 0;
  return int64_t{cache.ckv_bytes()} + cache.kpe_bytes() + scales;
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
  if (cache_.is_quantized()) tiles_.prefetch_for_write(cache_.ckv.row(page, offset), token_bytes_);
}

void CacheReader::prefetch(int64_t page, int64_t offset) const {
  prefetch_for_read(cache_.ckv.row(page, offset), token_bytes_);
}

void CacheWriter::write_ckv(const void* source, int64_t page, int64_t offset) const {
  if (!cache_.is_quantized()) return ckv_.copy(source, cache_.ckv.row(page, offset), cache_.d_ckv);
  if (cache_.ckv_dtype == DType::kE2M1) return write_e2m1(source, page, offset);
  uint8_t* elements = elements_of(cache_.ckv, page, offset);
  std::byte* scales = cache_.scales.row(page, offset);
  if (!cache_.writes_scales)
    return kernels_.quantize(source, ckv_source_, load_scale(cache_, scales, 0), cache_.d_ckv, elements);
  const int32_t group = cache_.channels_per_scale;
  for (int32_t first = 0; first < cache_.num_scales; first += kMostGroups) {
    float chosen[kMostGroups];
    const int32_t n = std::min(kMostGroups, cache_.num_scales - first);
    kernels_.quantize_groups(at(source, int64_t{first} * group, ckv_source_), ckv_source_, n, group,
                             cache_.power_of_two_scales, cache_.least_scale, chosen, elements + int64_t{first} * group);
    store_scales(cache_, chosen, first, n, scales);
  }
  pad_scales(cache_, scales);
}

/// Chooses scales of groups whose largest finite magnitudes `amaxes` has, and stores them at `to`.
void CacheWriter::choose_scales(float* amaxes, int32_t n, std::byte* to) const {
  const float outer = cache_.outer_scale != nullptr ? *cache_.outer_scale : 1.0F;
  if (cache_.scale_type == ScaleType::kE4M3) {
    for (int32_t i = 0; i < n; ++i) amaxes[i] = unrounded_e4m3_scale(cache_.ckv_dtype, amaxes[i], outer);
    return kernels_.quantize(amaxes, DType::kF32, 1.0F, n, reinterpret_cast<uint8_t*>(to));
  }
  for (int32_t i = 0; i < n; ++i)
    amaxes[i] = choose_scale(cache_.ckv_dtype, cache_.scale_type, cache_.power_of_two_scales, amaxes[i], outer,
                             cache_.least_scale);
  store_scales(cache_, amaxes, 0, n, to);
}

void CacheWriter::write_e2m1(const void* source, int64_t page, int64_t offset) const {
  uint8_t* elements = elements_of(cache_.ckv, page, offset);
  std::byte* stored = cache_.scales.row(page, offset);
  const int32_t group = cache_.channels_per_scale;
  for (int32_t first = 0; first < cache_.num_scales; first += kMostGroups) {
    float scales[kMostGroups];  // at first the largest magnitudes
    const int32_t n = std::min(kMostGroups, cache_.num_scales - first);
    const void* from = at(source, int64_t{first} * group, ckv_source_);
    kernels_.finite_amaxes(from, ckv_source_, n, group, scales);
    choose_scales(scales, n, stored + int64_t{first} * size_of(cache_.scale_type));
    load_scales(cache_, stored, first, n, scales);
    kernels_.quantize_e2m1(from, ckv_source_, n, group, scales,
                           elements + bytes_of(DType::kE2M1, int64_t{first} * group));
  }
  pad_scales(cache_, stored);
}

void write_indexer_key(const RowKernels& kernels, const core::IndexerPages& cache, int64_t slot, const void* source,
                       DType dtype, bool power_of_two_scales) {
  const IndexerLayout layout = cache.layout();
  const int64_t page = slot / cache.page_size, offset = slot % cache.page_size;
  auto* const elements = reinterpret_cast<uint8_t*>(cache.key(page, offset));
  std::byte* const stored = cache.scale(page, offset);
  const int32_t n = layout.num_scales(), group = layout.codec.channels_per_scale;
  float scales[kMostGroups];
  if (layout.codec.element == DType::kE4M3) {
    kernels.quantize_groups(source, dtype, n, group, power_of_two_scales, 0.0F, scales, elements);
  } else {
    kernels.finite_amaxes(source, dtype, n, group, scales);
    for (int32_t g = 0; g < n; ++g)
      scales[g] = choose_scale(layout.codec.element, layout.codec.scale_type, power_of_two_scales, scales[g]);
    kernels.quantize_e2m1(source, dtype, n, group, scales, elements);
  }
  store_scales(layout.codec.scale_type, scales, n, stored);
}

void CacheWriter::write_kpe(const void* source, int64_t page, int64_t offset, int32_t first, int32_t n) const {
  const DType type = cache_.kpe_dtype;
  char* out = at(cache_.kpe.row(page, offset), first, type);
  if (!is_quantized(type)) return kpe_.copy(source, out, n);
  if (!cache_.writes_kpe_scale())
    return kernels_.quantize(source, kpe_source_, *cache_.kpe_scale, n, reinterpret_cast<uint8_t*>(out));
  float scale;
  kernels_.quantize_groups(source, kpe_source_, 1, n, false, 0.0F, &scale, reinterpret_cast<uint8_t*>(out));
  std::byte* const at_scale = cache_.kpe_scales().row(page, offset);
  std::fill_n(at_scale, cache_.kpe_scale_bytes, std::byte{0});
  std::memcpy(at_scale, &scale, sizeof scale);
}

void CacheReader::read_ckv(int64_t page, int64_t offset, void* out) const {
  const std::byte* ckv = cache_.ckv.row(page, offset);
  if (!cache_.is_quantized()) return ckv_.copy(ckv, out, cache_.d_ckv);
  for_latent_groups(cache_, ckv, cache_.scales.row(page, offset),
                    [&](const QuantizedRow& groups, int32_t channel) { dequantize(groups, at(out, channel, out_)); });
}

void CacheReader::read_kpe(int64_t page, int64_t offset, void* out) const {
  const std::byte* kpe = cache_.kpe.row(page, offset);
  if (!is_quantized(cache_.kpe_dtype)) return kpe_.copy(kpe, out, cache_.d_kpe);
  const float scale = load_kpe_scale(cache_, cache_.ckv.row(page, offset));
  dequantize({.element = cache_.kpe_dtype, .elements = kpe, .scales = &scale, .num_groups = 1, .group = cache_.d_kpe},
             out);
}

/// Rows that are written past the caches are first made in L1.
void CacheReader::dequantize(const QuantizedRow& row, void* out) const {
  constexpr int32_t kStaged = 1024;
  const int32_t n = row.num_groups * row.group;
  if (!streaming_ || n > kStaged) return kernels_.dequantize(row, out, out_);
  alignas(64) float values[kStaged];  // memory for elements of any float type
  kernels_.dequantize(row, values, out_);
  staged_.copy(values, out, n);
}

}  // namespace mla::cpu
