// SPDX-License-Identifier: Apache-2.0
// top_k writes the indices of the k largest logits of every row in ascending order; of equal logits it takes those with
// lower indices. Or it chooses blocks of logits alike, by the largest of each; or keys of listed blocks (KeyBlocks).
//
// The grid has one block per row, which reads the row up to four times, from L2 after the first time.
//   1. Radix select: logits become integers of the same order ("ranks"). Histograms of the ranks' top 11 bits, then of
//      the next 11 and the last 10 bits of those that share the threshold's bits so far, find the rank of the k-th
//      largest. The search ends early where all ranks with the bits found so far are wanted.
//   2. Ordered compaction: chunk after chunk of 16 logits per thread, a scan over the block gives each one that is
//      wanted its place.
// Shared memory holds the histogram [2048 bins][8 copies] of u32, 64 KB, where copy = lane % 8, so that the atomics of
// equal logits do not queue up at one address; then the sums of the warps [2][32] and the bin that was found. Where
// blocks are chosen, the histogram has 4 copies, and the ranks of a chunk of blocks lie behind all that, 64 KB: a row
// of up to 16,384 blocks is read once.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/args.h"
#include "cuda/common/query_batch.cuh"
#include "cuda/ptx/ptx.h"
#include "cuda/ptx/shared_atomics.h"
#include "cuda/tile/channels.cuh"
#include "cuda/tile/logits.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

struct TopKParams {
  core::TopKArgs args;
  /// If batch.kv_len is given, a row has as many logits as its token sees keys, or all that are listed, if it sees one.
  /// Tokens of no request are left out.
  QueryBatch batch;
};

/// Returns an integer that orders as the operation orders logits: NaN is lowest, then -inf ... +inf; both zeros are
/// equal.
MLA_DEVICE uint32_t logit_rank(float logit) {
  if (is_nan(logit)) return 0;
  const auto bits = std::bit_cast<uint32_t>(logit + 0.0F);  // -0 becomes 0
  return bits ^ ((bits >> 31) != 0 ? 0xFFFFFFFFU : 0x80000000U);
}

/// Says how rows are divided. A row is read in chunks of entries: logits, or blocks of them. A chunk is divided among
/// the warps, and a warp's share among its kQuads loads, so that the 16-byte loads of a warp's lanes are contiguous.
struct RowChunks {
  static constexpr int kThreads = 1024;
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr int kQuad = 4;   // entries of a 16-byte load
  static constexpr int kQuads = 4;  // loads of a thread in a chunk
  static constexpr int kWarpChunk = kWarpSize * kQuad * kQuads;
  static constexpr int kChunk = kWarps * kWarpChunk;

  int32_t length, before;  // the entries begin `before` entries behind the first chunk's first one
  int lowest_bit;          // ranks are equal where all bits from this one up are

  MLA_DEVICE int32_t num_chunks() const { return (length + before - 1) / kChunk + 1; }
  /// Returns the index of the thread's first entry in a quad, which may be outside of the row.
  MLA_DEVICE int32_t index(int32_t chunk, int quad) const {
    return chunk * kChunk + ptx::warp() * kWarpChunk + (quad * kWarpSize + ptx::lane()) * kQuad - before;
  }
  /// Returns a mask whose bit j says that the row has entry i + j.
  MLA_DEVICE uint32_t valid(int32_t i) const {
    if (i >= 0 && i < length - (kQuad - 1)) return (1U << kQuad) - 1;
    uint32_t bits = 0;
    for (int j = 0; j < kQuad; ++j) bits |= i + j >= 0 && i + j < length ? 1U << j : 0U;
    return bits;
  }
};

/// Returns RowChunks::lowest_bit. Logits of bf16 have 16 bits of f32, those of f16 19, and the others are all zeros, or
/// all ones in ranks of negative numbers.
MLA_DEVICE int lowest_rank_bit(DType logits) { return logits == DType::kF32 ? 0 : 10; }

/// Reads a row of logits. The first chunk begins at a multiple of 4 logits, up to 3 of them before the row.
class LogitRow : public RowChunks {
 public:
  static constexpr int kCopies = 8;  // of the histogram
  static constexpr int kSharedRanks = 0;

  MLA_DEVICE LogitRow(const core::TopKArgs& args, const std::byte* logits, int32_t n, uint32_t*)
      : RowChunks{.length = n,
                  .before =
                      static_cast<int32_t>(reinterpret_cast<uintptr_t>(logits) / size_of(args.logits_dtype) % kQuad),
                  .lowest_bit = lowest_rank_bit(args.logits_dtype)},
        logits_(logits, args.logits_dtype) {}

  /// Loads the thread's entries of a chunk, of which rank() makes ranks.
  MLA_DEVICE void load(int32_t chunk, ptx::Vec4 (&quads)[kQuads]) const {
    MLA_UNROLL
    for (int q = 0; q < kQuads; ++q) quads[q] = load_quad(index(chunk, q));
    MLA_UNROLL
    for (int q = 0; q < kQuads; ++q) quads[q] = logits_.to_f32(quads[q]);
  }
  static MLA_DEVICE uint32_t rank(uint32_t entry) { return logit_rank(std::bit_cast<float>(entry)); }

 private:
  MLA_DEVICE ptx::Vec4 load_quad(int32_t i) const {
    if (i >= 0 && i < length - (kQuad - 1)) return logits_.load_four(i);
    return logits_.load_some(i, length);
  }

  LogitReader logits_;
};

/// Reads a row of blocks of logits. An entry is the rank of the block's largest logit; that of the last block is above
/// all others. A warp computes the ranks of its share of a chunk in shared memory.
class BlockRow : public RowChunks {
 public:
  static constexpr int kCopies = 4;
  static constexpr int kSharedRanks = kChunk;

  MLA_DEVICE BlockRow(const core::TopKArgs& args, const std::byte* logits, int32_t n, uint32_t* ranks)
      : RowChunks{.length = n > 0 ? (n - 1) / args.block_size + 1 : 0,
                  .before = 0,
                  .lowest_bit = lowest_rank_bit(args.logits_dtype)},
        logits_(logits, args.logits_dtype),
        block_size_(args.block_size),
        ranks_(ranks + ptx::warp() * kWarpChunk) {
    // Lanes share a block if it has a power of two of vectors, no more than there are lanes.
    const auto size = static_cast<uint32_t>(block_size_);
    if (std::popcount(size) == 1 && size >= kQuad && size <= kQuad * kWarpSize &&
        is_aligned(logits, kQuad * static_cast<uint32_t>(size_of(args.logits_dtype))))
      block_vectors_ = block_size_ / kQuad;
  }

  MLA_DEVICE void load(int32_t chunk, ptx::Vec4 (&quads)[kQuads]) {
    if (chunk != chunk_) {
      ptx::sync_warp();  // all lanes have read the chunk before
      if (block_vectors_ > 0)
        rank_vectors(chunk * kChunk + ptx::warp() * kWarpChunk);
      else
        rank_blocks(chunk * kChunk + ptx::warp() * kWarpChunk);
      chunk_ = chunk;
      ptx::sync_warp();  // the ranks are in shared memory
    }
    MLA_UNROLL
    for (int q = 0; q < kQuads; ++q) quads[q] = reinterpret_cast<const ptx::Vec4*>(ranks_)[q * kWarpSize + ptx::lane()];
  }
  static MLA_DEVICE uint32_t rank(uint32_t entry) { return entry; }

 private:
  static constexpr uint32_t kAboveAll = 0xFFFFFFFF;

  /// Computes the ranks of the warp's blocks from `first` on, where block_vectors_ lanes load a block.
  MLA_DEVICE void rank_vectors(int32_t first) {
    constexpr int kAhead = 8;
    const int32_t at_once = kWarpSize / block_vectors_, own = ptx::lane() / block_vectors_;
    MLA_NO_UNROLL
    for (int32_t begin = 0; begin < kWarpChunk; begin += kAhead * at_once) {
      if (first + begin >= length) return;
      ptx::Vec4 vectors[kAhead] = {};
      MLA_UNROLL
      for (int a = 0; a < kAhead; ++a) {
        const int32_t block = first + begin + a * at_once + own;
        if (block < length - 1)
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
        const int32_t place = begin + a * at_once + own;
        if (ptx::lane() % block_vectors_ == 0 && place < kWarpChunk)
          ranks_[place] = first + place < length - 1 ? largest : kAboveAll;
      }
    }
  }

  /// Does the same for blocks of any size, a lane for each.
  MLA_DEVICE void rank_blocks(int32_t first) {
    for (int32_t place = ptx::lane(); place < kWarpChunk && first + place < length; place += kWarpSize) {
      uint32_t largest = first + place < length - 1 ? 0 : kAboveAll;
      for (int32_t i = 0; i < block_size_ && largest != kAboveAll; ++i)
        largest = std::max(largest, logit_rank(logits_[int64_t{first + place} * block_size_ + i]));
      ranks_[place] = largest;
    }
  }

  LogitReader logits_;
  int32_t block_size_, block_vectors_ = 0, chunk_ = -1;
  uint32_t* ranks_;
};

template <class Row>
class TopKKernel : RowChunks {
 public:
  using Params = TopKParams;
  using RowChunks::kThreads;
  static constexpr const char* kName = "top_k";
  static constexpr int kMinBlocks = 1;
  static constexpr int kBinBits = 11;
  static constexpr int kBins = 1 << kBinBits;
  static constexpr int kCopies = Row::kCopies;
  static constexpr int kSharedBytes = (kBins * kCopies + 2 * kWarps + 4 + Row::kSharedRanks) * 4;

  static MLA_DEVICE void run(const Params& params) {
    const core::TopKArgs& args = params.args;
    const int64_t token = ptx::block_index_x();
    auto n = static_cast<int32_t>(args.num_logits);
    if (params.batch.kv_len != nullptr) {
      const int32_t request = params.batch.request_of(token);
      if (request == params.batch.batch_size) return;
      const int32_t visible = params.batch.visible(request, token);
      n = args.blocks.given() ? visible > 0 ? n : 0 : std::min(n, visible);
    }
    if (args.lengths != nullptr) n = std::clamp(args.lengths[token], 0, n);
    const int32_t start = args.starts != nullptr ? std::clamp(args.starts[token], 0, n) : 0;
    int32_t* const indices = args.indices + token * args.indices_stride_token;
    const std::byte* const logits =
        static_cast<const std::byte*>(args.logits) +
        (token * args.logits_stride_token + start) * static_cast<int64_t>(size_of(args.logits_dtype));
    n -= start;
    const auto k = static_cast<uint32_t>(args.k);
    if (args.blocks.given()) n = std::min(n, args.blocks.num_keys());
    Row row(args, logits, n, found_bin() + 4);
    if (args.blocks.given()) {
      Threshold threshold = row.length > args.k ? select(row, k) : kAboveHidden;
      if (threshold.rank <= kAboveHidden.rank) threshold = kAboveHidden;  // fewer than k are above -inf
      compact(row, threshold, k, indices, [&](int32_t i) { return static_cast<int32_t>(args.blocks.key(token, i)); });
    } else if (row.length <= args.k) {
      for (int32_t i = ptx::thread_index(); i < args.k; i += kThreads) indices[i] = i < row.length ? start + i : -1;
    } else {
      compact(row, select(row, k), k, indices, [&](int32_t i) { return start + i; });
    }
  }

 private:
  /// The ranks above `rank` are wanted, and the first `ties` of those equal to it. Only the bits of `mask` are
  /// compared.
  struct Threshold {
    uint32_t rank, mask, ties;
  };
  /// All logits above -inf are wanted. No rank shares the first digit of that of -inf, so that a threshold of select()
  /// is at most as large only if it lets -inf pass, or NaN.
  static constexpr Threshold kAboveHidden = {.rank = 0x007FFFFF, .mask = 0xFFFFFFFF, .ties = 0};

  struct Bin {
    uint32_t number, above, count;  // `count` ranks are in the bin, `above` in higher bins
  };

  static MLA_DEVICE uint32_t* histogram() { return reinterpret_cast<uint32_t*>(ptx::shared_memory()); }
  static MLA_DEVICE uint32_t* warp_sums(int32_t chunk) { return histogram() + kBins * kCopies + chunk % 2 * kWarps; }
  static MLA_DEVICE uint32_t* found_bin() { return histogram() + kBins * kCopies + 2 * kWarps; }

  static MLA_DEVICE Threshold select(Row& row, uint32_t k) {
    Threshold threshold = {.rank = 0, .mask = 0, .ties = k};
    for (int shift = 32; shift > row.lowest_bit;) {
      const int width = std::min(shift, int{kBinBits});
      shift -= width;
      count(row, threshold, shift, (1U << width) - 1);
      const Bin bin = find(threshold.ties);
      threshold = {.rank = threshold.rank | bin.number << shift,
                   .mask = 0xFFFFFFFFU << shift,
                   .ties = threshold.ties - bin.above};
      if (threshold.ties == bin.count) break;
    }
    return threshold;
  }

  /// Counts, in the histogram, the bits from `shift` up of all ranks that have the threshold's bits.
  static MLA_DEVICE void count(Row& row, const Threshold& threshold, int shift, uint32_t bin_mask) {
    for (int i = ptx::thread_index(); i < kBins * kCopies / 4; i += kThreads)
      reinterpret_cast<ptx::Vec4*>(histogram())[i] = {};
    ptx::sync_block();  // the histogram is cleared before any thread adds to it
    const auto copy = ptx::shared_address(histogram()) + static_cast<uint32_t>(ptx::lane() % kCopies) * 4;
    MLA_NO_UNROLL
    for (int32_t chunk = 0; chunk < row.num_chunks(); ++chunk) {
      ptx::Vec4 quads[kQuads];
      row.load(chunk, quads);
      MLA_UNROLL
      for (int q = 0; q < kQuads; ++q) {
        const uint32_t valid = row.valid(row.index(chunk, q));
        MLA_UNROLL
        for (int j = 0; j < kQuad; ++j) {
          const uint32_t rank = Row::rank(quads[q].x[j]);
          if (((rank ^ threshold.rank) & threshold.mask) == 0 && (valid >> j & 1U) != 0)
            ptx::add_shared(copy + (rank >> shift & bin_mask) * kCopies * 4, 1);
        }
      }
    }
    ptx::sync_block();  // the histogram is complete before find() reads it
  }

  static MLA_DEVICE uint32_t bin_count(int32_t bin) {
    uint32_t sum = 0;
    for (int i = 0; i < kCopies / 4; ++i) {
      const ptx::Vec4 copies = reinterpret_cast<const ptx::Vec4*>(histogram())[bin * (kCopies / 4) + i];
      sum += copies.x[0] + copies.x[1] + copies.x[2] + copies.x[3];
    }
    return sum;
  }

  /// Returns the bin of the `wanted`-th largest rank. Each thread looks at two bins, thread 0 at the two highest.
  static MLA_DEVICE Bin find(uint32_t wanted) {
    static_assert(kBins == 2 * kThreads);
    const int32_t high = kBins - 1 - 2 * ptx::thread_index();
    const uint32_t counts[2] = {bin_count(high), bin_count(high - 1)};
    const uint32_t inclusive = scan_warp(counts[0] + counts[1]);
    uint32_t all = 0;
    uint32_t above =
        sum_before_warp(ptx::shuffle(inclusive, kWarpSize - 1), 0, all) + inclusive - counts[0] - counts[1];
    for (int i = 0; i < 2; ++i) {
      if (above < wanted && wanted <= above + counts[i]) {
        found_bin()[0] = static_cast<uint32_t>(high - i);
        found_bin()[1] = above;
        found_bin()[2] = counts[i];
      }
      above += counts[i];
    }
    ptx::sync_block();  // the bin is found before all threads read it, and the histogram may be cleared again
    return {found_bin()[0], found_bin()[1], found_bin()[2]};
  }

  /// Returns the sum over all warps before this one, and sets `all` to the sum over all warps. Successive calls must
  /// alternate the parity of `turn`, since a warp may write the next sums while others still read the last ones.
  static MLA_DEVICE uint32_t sum_before_warp(uint32_t sum_of_warp, int32_t turn, uint32_t& all) {
    if (ptx::lane() == 0) warp_sums(turn)[ptx::warp()] = sum_of_warp;
    ptx::sync_block();  // the sums of all warps are in shared memory
    const uint32_t sum = warp_sums(turn)[ptx::lane()];
    const uint32_t inclusive = scan_warp(sum);
    all = ptx::shuffle(inclusive, kWarpSize - 1);
    return ptx::shuffle(inclusive - sum, ptx::warp());
  }

  /// Returns the sum over the lanes up to and including this one.
  static MLA_DEVICE uint32_t scan_warp(uint32_t value) {
    static_assert(kWarps == kWarpSize);
    for (int delta = 1; delta < kWarpSize; delta *= 2) {
      const uint32_t lower = ptx::shuffle_up(value, delta);
      if (ptx::lane() >= delta) value += lower;
    }
    return value;
  }

  /// These functions read four counts that are packed into a word, that of quad q in byte q.
  static MLA_DEVICE uint32_t byte_of_quad(uint32_t counts, int quad) { return counts >> (8 * quad) & 0xFFU; }
  static MLA_DEVICE uint32_t sum_of_quads(uint32_t counts) {
    const uint32_t pairs = (counts & 0xFF00FFU) + (counts >> 8 & 0xFF00FFU);
    return (pairs + (pairs >> 16)) & 0xFFFFU;
  }

  /// Says which logits of a chunk a thread wants: bit 4 q + j stands for logit j of quad q.
  struct Wanted {
    uint32_t above, equal;
  };

  static MLA_DEVICE Wanted wanted_of(Row& row, const Threshold& threshold, int32_t chunk) {
    ptx::Vec4 quads[kQuads];
    row.load(chunk, quads);
    Wanted wanted = {};
    uint32_t valid = 0;
    MLA_UNROLL
    for (int q = 0; q < kQuads; ++q) {
      valid |= row.valid(row.index(chunk, q)) << (kQuad * q);
      MLA_UNROLL
      for (int j = 0; j < kQuad; ++j) {
        const uint32_t rank = Row::rank(quads[q].x[j]) & threshold.mask;
        const uint32_t bit = 1U << (kQuad * q + j);
        wanted.above |= rank > threshold.rank ? bit : 0U;
        wanted.equal |= rank == threshold.rank ? bit : 0U;
      }
    }
    return {wanted.above & valid, wanted.equal & valid};
  }

  /// Writes index_of(i) for each wanted entry i, and -1 behind them.
  template <class IndexOf>
  static MLA_DEVICE void compact(Row& row, const Threshold& threshold, uint32_t k, int32_t* indices,
                                 const IndexOf& index_of) {
    static_assert(kQuads == 4 && kWarpSize * kQuad < 256 && kChunk < 1 << 16, "counts fit their bytes and halves");
    uint32_t above = 0, equal = 0;  // wanted logits of earlier chunks
    MLA_NO_UNROLL
    for (int32_t chunk = 0; chunk < row.num_chunks(); ++chunk) {
      const Wanted wanted = wanted_of(row, threshold, chunk);
      uint32_t above_counts = 0, equal_counts = 0;
      MLA_UNROLL
      for (int q = 0; q < kQuads; ++q) {
        above_counts |= static_cast<uint32_t>(std::popcount(wanted.above >> (kQuad * q) & 0xFU)) << (8 * q);
        equal_counts |= static_cast<uint32_t>(std::popcount(wanted.equal >> (kQuad * q) & 0xFU)) << (8 * q);
      }
      const uint32_t above_scan = scan_warp(above_counts), equal_scan = scan_warp(equal_counts);
      const uint32_t above_in_warp = ptx::shuffle(above_scan, kWarpSize - 1);
      const uint32_t equal_in_warp = ptx::shuffle(equal_scan, kWarpSize - 1);
      uint32_t all = 0;
      const uint32_t before =
          sum_before_warp(sum_of_quads(above_in_warp) | sum_of_quads(equal_in_warp) << 16, chunk, all);
      uint32_t quad_above = above + (before & 0xFFFFU), quad_equal = equal + (before >> 16);
      MLA_UNROLL
      for (int q = 0; q < kQuads; ++q) {
        uint32_t a = quad_above + byte_of_quad(above_scan - above_counts, q);
        uint32_t e = quad_equal + byte_of_quad(equal_scan - equal_counts, q);
        MLA_UNROLL
        for (int j = 0; j < kQuad; ++j) {
          const uint32_t is_above = wanted.above >> (kQuad * q + j) & 1U,
                         is_equal = wanted.equal >> (kQuad * q + j) & 1U;
          if (is_above != 0 || (is_equal != 0 && e < threshold.ties))
            indices[a + std::min(e, threshold.ties)] = index_of(row.index(chunk, q) + j);
          a += is_above;
          e += is_equal;
        }
        quad_above += byte_of_quad(above_in_warp, q);
        quad_equal += byte_of_quad(equal_in_warp, q);
      }
      above += all & 0xFFFFU;
      equal += all >> 16;
      if (above + std::min(equal, threshold.ties) == k) return;
    }
    for (uint32_t i = above + std::min(equal, threshold.ties) + static_cast<uint32_t>(ptx::thread_index()); i < k;
         i += kThreads)
      indices[i] = -1;
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE
