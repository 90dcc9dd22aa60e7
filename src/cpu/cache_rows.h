// SPDX-License-Identifier: Apache-2.0
// These classes read and write a token's row in a cache of any format. All operations on caches use them; they know a
// format only by the fields of core::Cache.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/args.h"
#include "cpu/operations.h"

namespace mla::cpu {

/// Copies elements from type to type. Where an operation is too large for its rows to stay in a cache level, they are
/// written past the caches, since a store into a cache would first read its line.
class ElementCopier {
 public:
  ElementCopier(const KernelSet& set, DType src, DType dst, int64_t total_bytes)
      : kernels_(*set.floats), rows_(*set.rows), src_(src), dst_(dst), streaming_(src == dst && streams(total_bytes)) {}

  void copy(const void* src, void* dst, int64_t n) const;
  /// Completes the copies; it must be called before another thread reads them.
  void finish() const;

  static bool streams(int64_t total_bytes) { return total_bytes >= kStreamBytes; }

 private:
  static constexpr int64_t kStreamBytes = 16 << 20;

  const TileKernels& kernels_;
  const RowKernels& rows_;
  DType src_, dst_;
  bool streaming_;
};

/// Returns the bytes of a token's row, its scales included.
int64_t token_bytes(const core::Cache& cache);

/// Rows are prefetched this many rows ahead, since the hardware's prefetchers stop at 4 KiB pages. It took the
/// dequantizing gather from 46 to 73 % of its ceiling (AMD EPYC, Zen 4, 2026-11-20; docs/notebook/2026-11-20-cpu.md).
inline constexpr int64_t kRowsAhead = 4;

/// Prefetches memory that will be read soon.
void prefetch_for_read(const void* begin, int64_t bytes);

/// Writes a key of the indexer, 128 floats, into a slot, which must not be negative.
void write_indexer_key(const RowKernels& kernels, const core::IndexerPages& cache, int64_t slot, const void* source,
                       DType dtype, bool power_of_two_scales);

/// Writes rows of floats into a cache, quantized as its format asks.
class CacheWriter {
 public:
  CacheWriter(const KernelSet& set, const core::Cache& cache, DType ckv, DType kpe, int64_t total_bytes)
      : kernels_(*set.rows),
        tiles_(*set.floats),
        cache_(cache),
        ckv_source_(ckv),
        kpe_source_(kpe),
        token_bytes_(token_bytes(cache)),
        ckv_(set, ckv, cache.ckv_dtype, total_bytes),
        kpe_(set, kpe, cache.kpe_dtype, cache.is_quantized() ? 0 : total_bytes) {}

  /// Prefetches a row that will be written soon.
  void prefetch(int64_t page, int64_t offset) const;
  void write_ckv(const void* source, int64_t page, int64_t offset) const;
  /// Writes channels first ... first + n - 1 of the rotary channels; all of them where their scale is chosen.
  void write_kpe(const void* source, int64_t page, int64_t offset, int32_t first, int32_t n) const;
  void finish() const {
    ckv_.finish();
    kpe_.finish();
  }

 private:
  void choose_scales(float* amaxes, int32_t n, std::byte* to) const;
  void write_e2m1(const void* source, int64_t page, int64_t offset) const;

  const RowKernels& kernels_;
  const TileKernels& tiles_;
  const core::Cache& cache_;
  DType ckv_source_, kpe_source_;
  int64_t token_bytes_;
  ElementCopier ckv_, kpe_;
};

/// Reads rows of a cache as floats, dequantized.
class CacheReader {
 public:
  CacheReader(const KernelSet& set, const core::Cache& cache, DType out, int64_t total_bytes)
      : kernels_(*set.rows),
        cache_(cache),
        out_(out),
        token_bytes_(token_bytes(cache)),
        ckv_(set, cache.ckv_dtype, out, total_bytes),
        kpe_(set, cache.kpe_dtype, out, total_bytes),
        staged_(set, out, out, total_bytes),
        streaming_(ElementCopier::streams(total_bytes)) {}

  /// Prefetches a row that will be read soon.
  void prefetch(int64_t page, int64_t offset) const;
  void read_ckv(int64_t page, int64_t offset, void* out) const;
  void read_kpe(int64_t page, int64_t offset, void* out) const;
  void finish() const {
    ckv_.finish();
    kpe_.finish();
    staged_.finish();
  }

 private:
  void dequantize(const QuantizedRow& row, void* out) const;

  const RowKernels& kernels_;
  const core::Cache& cache_;
  DType out_;
  int64_t token_bytes_;
  ElementCopier ckv_, kpe_, staged_;
  bool streaming_;
};

}  // namespace mla::cpu
