// SPDX-License-Identifier: Apache-2.0
// Rows of logits as top_k reads them: which part of a row a block has, how its entries are divided among threads, and
// how logits, or blocks of them, become "ranks", integers of the same order.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/args.h"
#include "cuda/ptx/ptx.h"
#include "cuda/tile/channels.cuh"
#include "cuda/tile/logits.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Returns an integer that orders as the operation orders logits: NaN is lowest, then -inf ... +inf; both zeros are
/// equal.
MLA_DEVICE uint32_t logit_rank(float logit) {
  if (is_nan(logit)) return 0;
  const auto bits = std::bit_cast<uint32_t>(logit + 0.0F);  // -0 becomes 0
  return bits ^ ((bits >> 31) != 0 ? 0xFFFFFFFFU : 0x80000000U);
}

/// Says which entries of a row the block has: those of part `number` of `parts`.
struct RowPart {
  int32_t length, number;  // entries of the row; of the part
  int32_t begin = 0, size;

  MLA_DEVICE RowPart(int32_t entries, int32_t parts, int32_t part) : length(entries), number(part), size(entries) {
    if (parts == 1) return;
    const int32_t step = parts * 4;  // so that 16-byte loads do not straddle parts
    const int32_t most = (length - 1) / step * 4 + 4;
    begin = std::min(most * number, length);
    size = std::min(most, length - begin);
  }
  /// Returns whether the row ends with the part.
  MLA_DEVICE bool ends() const { return begin + size == length && (size > 0 || number == 0); }
};

/// Says how the entries of a part, logits or blocks of them, are divided. They are read in chunks. A chunk is divided
/// among the warps, and a warp's share among up to kQuads loads, so that the 16-byte loads of a warp's lanes are
/// contiguous.
struct RowChunks {
  static constexpr int kThreads = 1024;
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr int kQuad = 4;   // entries of a 16-byte load
  static constexpr int kQuads = 4;  // loads of a thread in a chunk, fewer if all warps have something to do then
  static constexpr int kEntries = kQuad * kQuads;
  static constexpr int kLoad = kWarpSize * kQuad;    // entries of a warp's load
  static constexpr int kMostShare = kLoad * kQuads;  // ... of its share of a chunk
  static constexpr int kChunk = kWarps * kMostShare;

  int32_t length, before;  // the entries begin `before` entries behind the first chunk's first one
  int num_quads;

  MLA_DEVICE RowChunks(const RowPart& part, int32_t entries_before)
      : length(part.size),
        before(entries_before),
        num_quads(std::min((length + before - 1) / (kWarps * kLoad) + 1, int{kQuads})) {}

  MLA_DEVICE int32_t share() const { return num_quads * kLoad; }
  MLA_DEVICE int32_t num_chunks() const { return (length + before - 1) / (kWarps * share()) + 1; }
  /// Returns the index of the warp's first entry in a chunk, which may be outside of the part, as the next ones.
  MLA_DEVICE int32_t first(int32_t chunk) const { return (chunk * kWarps + ptx::warp()) * share() - before; }
  /// Returns the index of the thread's first entry in a quad.
  MLA_DEVICE int32_t index(int32_t chunk, int quad) const {
    return first(chunk) + (quad * kWarpSize + ptx::lane()) * kQuad;
  }
  /// Returns a mask whose bit 4 q + j says that the part has entry j of the thread's quad q.
  MLA_DEVICE uint32_t valid(int32_t chunk) const {
    if (first(chunk) >= 0 && first(chunk) + share() <= length) return (1U << kQuad * num_quads) - 1;
    uint32_t bits = 0;
    MLA_NO_UNROLL
    for (int e = 0; e < kQuad * num_quads; ++e) {
      const int32_t i = index(chunk, e / kQuad) + e % kQuad;
      bits |= i >= 0 && i < length ? 1U << e : 0U;
    }
    return bits;
  }
};

/// Holds the thread's entries of a chunk, quad after quad: their ranks, and which of them the part has.
struct ThreadEntries {
  int32_t chunk = -1;
  uint32_t valid = 0;
  uint32_t ranks[RowChunks::kEntries];
};

/// Reads a row of logits. The first chunk begins at a multiple of 4 logits, up to 3 of them before the part.
class LogitRow : public RowChunks {
 public:
  static constexpr int kCopies = 8;  // of the histogram
  static constexpr int kSharedRanks = 0;
  static constexpr int kPartEntries = kChunk;  // of a part, before a row has more of them

  /// Returns how many entries a row of `logits` logits has.
  static MLA_DEVICE int32_t entries(const core::TopKArgs&, int32_t logits) { return logits; }
  static MLA_DEVICE int64_t bytes_of_entry(const core::TopKArgs& args) {
    return int64_t{1} << shift_of(args.logits_dtype);
  }

  /// `logits` are those of the part.
  MLA_DEVICE LogitRow(const core::TopKArgs& args, const std::byte* logits, const RowPart& part, uint32_t*)
      : RowChunks(part, static_cast<int32_t>(reinterpret_cast<uintptr_t>(logits) >> shift_of(args.logits_dtype) & 3U)),
        logits_(logits, args.logits_dtype) {}

  /// Loads the thread's entries of a chunk, unless it has them already.
  MLA_DEVICE void load(int32_t chunk, ThreadEntries& entries) const {
    if (chunk == entries.chunk) return;
    ptx::Vec4 quads[kQuads] = {};
    MLA_UNROLL
    for (int q = 0; q < kQuads; ++q)
      if (q < num_quads) quads[q] = load_quad(index(chunk, q));
    entries.chunk = chunk;
    entries.valid = valid(chunk);
    MLA_UNROLL
    for (int q = 0; q < kQuads; ++q) {
      const ptx::Vec4 bits = logits_.to_f32(quads[q]);
      MLA_UNROLL
      for (int j = 0; j < kQuad; ++j) entries.ranks[q * kQuad + j] = logit_rank(std::bit_cast<float>(bits.x[j]));
    }
  }

 private:
  /// Returns the base-2 logarithm of the bytes of a logit.
  static MLA_DEVICE int shift_of(DType logits) { return logits == DType::kF32 ? 2 : 1; }
  MLA_DEVICE ptx::Vec4 load_quad(int32_t i) const {
    if (i >= 0 && i < length - (kQuad - 1)) return logits_.load_four(i);
    return logits_.load_some(i, length);
  }

  LogitReader logits_;
};

/// Reads a row of blocks of logits. An entry is the rank of the block's largest logit; that of the row's last block is
/// above all others. A warp computes the ranks of its share of a chunk in shared memory.
class BlockRow : public RowChunks {
 public:
  static constexpr int kCopies = kSharedBytesPerBlock > 120 * 1024 ? 4 : 2;
  static constexpr int kSharedRanks = kChunk;
  static constexpr int kPartEntries = kWarps * kLoad;

  static MLA_DEVICE int32_t entries(const core::TopKArgs& args, int32_t logits) {
    return logits > 0 ? (logits - 1) / args.block_size + 1 : 0;
  }
  static MLA_DEVICE int64_t bytes_of_entry(const core::TopKArgs& args) {
    return args.block_size * static_cast<int64_t>(size_of(args.logits_dtype));
  }

  MLA_DEVICE BlockRow(const core::TopKArgs& args, const std::byte* logits, const RowPart& part, uint32_t* ranks)
      : RowChunks(part, 0),
        logits_(logits, args.logits_dtype),
        block_size_(args.block_size),
        num_before_last_(part.size - (part.ends() ? 1 : 0)),
        ranks_(ranks + ptx::warp() * kMostShare) {
    // Lanes share a block if it has a power of two of vectors, no more than there are lanes.
    const auto size = static_cast<uint32_t>(block_size_);
    if (std::popcount(size) == 1 && size >= kQuad && size <= kQuad * kWarpSize &&
        is_aligned(logits, kQuad * static_cast<uint32_t>(size_of(args.logits_dtype))))
      block_vectors_ = block_size_ / kQuad;
  }

  MLA_DEVICE void load(int32_t chunk, ThreadEntries& entries) const {
    if (chunk == entries.chunk) return;
    if (block_vectors_ > 0)
      rank_vectors(first(chunk));
    else
      rank_blocks(first(chunk));
    entries.chunk = chunk;
    entries.valid = valid(chunk);
    ptx::sync_warp();  // the ranks are in shared memory
    MLA_UNROLL
    for (int q = 0; q < kQuads; ++q) {
      const ptx::Vec4 quad = reinterpret_cast<const ptx::Vec4*>(ranks_)[q * kWarpSize + ptx::lane()];
      MLA_UNROLL
      for (int j = 0; j < kQuad; ++j) entries.ranks[q * kQuad + j] = quad.x[j];
    }
    ptx::sync_warp();  // all lanes have read them
  }

 private:
  static constexpr uint32_t kAboveAll = 0xFFFFFFFF;

  /// Computes the ranks of the warp's blocks from `begin` on, where block_vectors_ lanes load a block.
  MLA_DEVICE void rank_vectors(int32_t begin) const {
    constexpr int kAhead = 6;
    const int32_t at_once = kWarpSize / block_vectors_, own = ptx::lane() / block_vectors_;
    MLA_NO_UNROLL
    for (int32_t at = 0; at < share() && begin + at < length; at += kAhead * at_once) {
      ptx::Vec4 vectors[kAhead] = {};
      MLA_UNROLL
      for (int a = 0; a < kAhead; ++a) {
        const int32_t block = begin + at + a * at_once + own;
        if (block < num_before_last_)
          vectors[a] = logits_.load_four(int64_t{block} * block_size_ + ptx::lane() % block_vectors_ * kQuad);
      }
      MLA_UNROLL
      for (int a = 0; a < kAhead; ++a) {
        const ptx::Vec4 four = logits_.to_f32(vectors[a]);
        uint32_t largest = 0;
        MLA_UNROLL
        for (int j = 0; j < kQuad; ++j) largest = std::max(largest, logit_rank(std::bit_cast<float>(four.x[j])));
        for (int32_t lanes = 1; lanes < block_vectors_; lanes *= 2)
          largest = std::max(largest, ptx::shuffle_xor(largest, lanes));
        const int32_t place = at + a * at_once + own;
        if (ptx::lane() % block_vectors_ == 0 && place < share())
          ranks_[place] = begin + place < num_before_last_ ? largest : kAboveAll;
      }
    }
  }

  /// Does the same for blocks of any size, a lane for each.
  MLA_DEVICE void rank_blocks(int32_t begin) const {
    for (int32_t place = ptx::lane(); place < share() && begin + place < length; place += kWarpSize) {
      uint32_t largest = begin + place < num_before_last_ ? 0 : kAboveAll;
      for (int32_t i = 0; i < block_size_ && largest != kAboveAll; ++i)
        largest = std::max(largest, logit_rank(logits_[int64_t{begin + place} * block_size_ + i]));
      ranks_[place] = largest;
    }
  }

  LogitReader logits_;
  int32_t block_size_, block_vectors_ = 0;
  int32_t num_before_last_;  // blocks of the part that are not the row's last one
  uint32_t* ranks_;
};

}  // namespace mla::MLA_CUDA_NAMESPACE
