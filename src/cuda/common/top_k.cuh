// SPDX-License-Identifier: Apache-2.0
// top_k writes the indices of the k largest logits of every row in ascending order; of equal logits it takes those with
// lower indices. Or it chooses blocks of logits alike, by the largest of each; or keys of listed blocks (KeyBlocks).
//
// The grid has a block per row, or a cluster of blocks, each of which has a part of the row. A block reads its part up
// to four times, from L2 after the first time, or once if it is no more than a chunk.
//   1. Radix select: logits become integers of the same order ("ranks"). Histograms of the ranks' top 11 bits, then of
//      the next 11 and the last 10 bits of those that share the bits found so far, find the rank of the k-th largest.
//      The search ends early where all ranks with the bits found so far are wanted. Each block of a cluster adds up the
//      bins of all, and so finds the same rank, and how many wanted ones the parts before its own have.
//   2. Ordered compaction: chunk after chunk of 16 entries per thread, a scan over the block gives each one that is
//      wanted its place in a list, from which threads write indices, or slots of the latent cache, one after another.
// Shared memory holds the histogram [8 copies][2048 bins] of u32, 64 KB, where copy = lane % 8, so that the atomics of
// equal logits do not queue up at one address; the block's bins [2][2048] and the sums of 64 of them [2][32], which the
// other blocks read; the sums of the warps [2][32], and the bin that was found. The list lies where the histogram was.
// Where blocks are chosen, the histogram has fewer copies, and the ranks of a chunk of blocks lie behind all that, 64
// KB, later the list.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/args.h"
#include "cuda/common/query_batch.cuh"
#include "cuda/common/top_k_rows.cuh"
#include "cuda/ptx/ptx.h"
#include "cuda/ptx/shared_atomics.h"
#include "cuda/tile/fast_divisor.h"

namespace mla::MLA_CUDA_NAMESPACE {

/// Says which slots of the latent cache are written in the place of indices, if `count` is not 0: rows of so many, -1
/// behind those of selected keys.
struct SelectedSlots {
  core::Pages pages = {};
  cuda::FastDivisor page_size = {};
  int32_t count = 0;
  int32_t* valid_count = nullptr;  // [T], may be null
};

struct TopKParams {
  core::TopKArgs args;
  /// If batch.kv_len is given, a row has as many logits as its token sees keys, or all that are listed, if it sees one.
  /// Tokens of no request are left out.
  QueryBatch batch = {};
  SelectedSlots slots = {};  // with batch.kv_len only
  int32_t parts = 1;         // of a row, each of which a block of a cluster has
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
  static constexpr int kMostParts = 8;

  // Shared memory, in words.
  static constexpr int kCopyStride = kBins + 4;  // so that a bin's copies are in different banks
  static constexpr int kGroupBins = kBins / kWarps;
  static constexpr int kBinWords = kCopies * kCopyStride;      // [2][kBins], sums of all copies
  static constexpr int kGroupWords = kBinWords + 2 * kBins;    // [2][kWarps], sums of kGroupBins bins
  static constexpr int kWarpWords = kGroupWords + 2 * kWarps;  // [2][kWarps]
  static constexpr int kFoundWords = kWarpWords + 2 * kWarps;  // a Bin
  static constexpr int kRankWords = kFoundWords + 8;           // [Row::kSharedRanks]
  static constexpr int kListWords = Row::kSharedRanks > 0 ? kRankWords : 0;
  static_assert(Row::kSharedRanks >= kChunk || kBinWords >= kChunk, "a list has room for a chunk");
  static constexpr int kSharedBytes = (kRankWords + Row::kSharedRanks) * 4;

  static MLA_DEVICE void run(const Params& params) {
    const core::TopKArgs& args = params.args;
    const auto token =
        static_cast<int32_t>(static_cast<uint32_t>(ptx::block_index_x()) / static_cast<uint32_t>(params.parts));
    const Cluster cluster(params.parts);
    ptx::wait_for_previous_grid();  // which may write logits and lengths
    ptx::allow_next_grid();
    auto n = static_cast<int32_t>(args.num_logits);
    int32_t request = 0;
    if (params.batch.kv_len != nullptr) {
      request = params.batch.request_of(token);
      if (request == params.batch.batch_size) return;
      const int32_t visible = params.batch.visible(request, token);
      n = args.blocks.given() ? visible > 0 ? n : 0 : std::min(n, visible);
    }
    if (args.lengths != nullptr) n = std::clamp(args.lengths[token], 0, n);
    const int32_t start = args.starts != nullptr ? std::clamp(args.starts[token], 0, n) : 0;
    const std::byte* const logits =
        static_cast<const std::byte*>(args.logits) +
        (int64_t{token} * args.logits_stride_token + start) * static_cast<int64_t>(size_of(args.logits_dtype));
    n -= start;
    if (args.blocks.given()) n = std::min(n, args.blocks.num_keys());
    const int32_t length = Row::entries(args, n);
    const RowPart part(length, cluster.size, cluster.rank);
    const Row row(args, logits + part.begin * Row::bytes_of_entry(args), part, words(kRankWords));
    ThreadEntries entries;
    const auto k = static_cast<uint32_t>(args.k);
    Selection selection = kAboveHidden;
    if (length > args.k) selection = select(row, entries, k, args.logits_dtype, cluster);

    const int32_t* const pages = params.slots.count > 0 ? params.slots.pages.of(request) : nullptr;
    int32_t* const out = args.indices + int64_t{token} * args.indices_stride_token;
    const auto value = [&](int32_t i) {
      const int32_t entry = part.begin + i;
      const int32_t key = args.blocks.given() ? static_cast<int32_t>(args.blocks.key(token, entry)) : start + entry;
      if (pages == nullptr) return key;
      const int32_t page = params.slots.page_size.divide(key), page_size = params.slots.page_size.value;
      return static_cast<int32_t>(static_cast<uint32_t>(pages[page]) * static_cast<uint32_t>(page_size)) +
             (key - page * page_size);
    };
    auto end = static_cast<uint32_t>(length);  // of the selected entries of the parts so far
    if (args.blocks.given() || length > args.k) {
      if (args.blocks.given() && selection.rank <= kAboveHidden.rank)
        selection = kAboveHidden;  // fewer than k are above -inf
      end = compact(row, entries, selection, k, out, value);
    } else {
      for (int32_t i = ptx::thread_index(); i < part.size; i += kThreads) out[part.begin + i] = value(i);
    }
    if (part.ends()) {
      const auto width = static_cast<uint32_t>(params.slots.count > 0 ? params.slots.count : args.k);
      for (uint32_t i = end + static_cast<uint32_t>(ptx::thread_index()); i < width; i += kThreads) out[i] = -1;
      if (params.slots.valid_count != nullptr && ptx::thread_index() == 0)
        params.slots.valid_count[token] = static_cast<int32_t>(end);
    }
    cluster.leave();
  }

 private:
  /// Ranks greater than `above` are wanted, and of those from `rank` to `above` the first `ties`. Earlier parts of the
  /// row have `earlier_above` ranks of the former kind, and `earlier_ties` of the latter.
  struct Selection {
    uint32_t rank, above, ties, earlier_above, earlier_ties;
  };
  /// All logits above -inf are wanted. No rank shares the first digit of that of -inf, so that a rank of select() is at
  /// most as large only if it lets -inf pass, or NaN.
  static constexpr Selection kAboveHidden = {0x007FFFFF, 0x007FFFFF, 0, 0, 0};

  /// Counts ranks, in all parts of the row, and in those before the block's.
  struct Counts {
    uint32_t all, earlier;
    MLA_DEVICE Counts operator+(const Counts& c) const { return {all + c.all, earlier + c.earlier}; }
  };
  struct Bin {
    uint32_t number;
    Counts above, count;  // `count` ranks are in the bin, `above` in higher bins
  };

  static MLA_DEVICE uint32_t* words(int place) { return reinterpret_cast<uint32_t*>(ptx::shared_memory()) + place; }
  static MLA_DEVICE uint32_t* bins(int turn) { return words(kBinWords) + turn % 2 * kBins; }
  static MLA_DEVICE uint32_t* groups(int turn) { return words(kGroupWords) + turn % 2 * kWarps; }

  /// Is the cluster of the blocks that have the row's parts, or the one block that has it whole.
  struct Cluster {
    int32_t size, rank = 0;

    explicit MLA_DEVICE Cluster(int32_t parts) : size(parts) {
      if constexpr (kHasClusters)
        if (size > 1) rank = ptx::cluster_rank();
    }
    /// Waits for all threads of all blocks. They see what the others have stored in shared memory.
    MLA_DEVICE void sync() const {
      if constexpr (kHasClusters)
        if (size > 1) return ptx::sync_cluster_memory();
      ptx::sync_block();
    }
    /// Returns in `counts` the sums of two neighbouring words, which lie at the same place in all blocks.
    MLA_DEVICE void add_up(const uint32_t* two, Counts (&counts)[2]) const {
      const ptx::SharedAddress own = ptx::shared_address(two);
      uint64_t parts[kMostParts] = {};
      if constexpr (kHasClusters) {
        MLA_UNROLL
        for (int i = 0; i < kMostParts; ++i)
          if (i < size && size > 1) parts[i] = ptx::load_in_cluster(ptx::map_shared(own, i));
      }
      if (size == 1) parts[0] = ptx::load_shared<uint64_t>(own);
      counts[0] = counts[1] = {};
      MLA_UNROLL
      for (int i = 0; i < kMostParts; ++i) {
        const uint32_t of_part[2] = {static_cast<uint32_t>(parts[i]), static_cast<uint32_t>(parts[i] >> 32)};
        for (int j = 0; j < 2; ++j) counts[j] = counts[j] + Counts{of_part[j], i < rank ? of_part[j] : 0};
      }
    }
    /// Waits until no other block reads this one's shared memory.
    MLA_DEVICE void leave() const {
      if constexpr (kHasClusters)
        if (size > 1) ptx::sync_cluster();
    }
  };

  /// Returns the bit from which on ranks differ. Logits of bf16 have 16 bits of f32, those of f16 19, and the others
  /// are all zeros, or all ones in ranks of negative numbers.
  static MLA_DEVICE int lowest_bit(DType logits) { return logits == DType::kF32 ? 0 : 10; }

  static MLA_DEVICE Selection select(const Row& row, ThreadEntries& entries, uint32_t k, const DType& logits,
                                     const Cluster& cluster) {
    uint32_t rank = 0, mask = 0, ties = k;  // the bits that were found, and how many with these are wanted
    Counts above = {}, equal = {};
    int turn = 0;
    MLA_NO_UNROLL
    for (int shift = 32; shift > lowest_bit(logits) && ties != equal.all; ++turn) {
      const int width = std::min(shift, int{kBinBits});
      shift -= width;
      count(row, entries, rank, mask, shift, (1U << width) - 1);
      const Bin bin = find(ties, cluster, turn);
      rank |= bin.number << shift;
      mask = 0xFFFFFFFFU << shift;
      ties -= bin.above.all;
      above = above + bin.above;
      equal = bin.count;
    }
    if (ties == equal.all) return {rank, rank - 1, 0, above.earlier + equal.earlier, 0};
    return {rank, rank | ~mask, ties, above.earlier, equal.earlier};
  }

  /// Counts, in the histogram, the bits from `shift` up of all ranks that have the bits `found` of `mask`.
  static MLA_DEVICE void count(const Row& row, ThreadEntries& entries, uint32_t found, uint32_t mask, int shift,
                               uint32_t bin_mask) {
    for (int i = ptx::thread_index(); i < kBinWords / 4; i += kThreads) reinterpret_cast<ptx::Vec4*>(words(0))[i] = {};
    ptx::sync_block();  // the histogram is cleared before any thread adds to it
    const ptx::SharedAddress copy =
        ptx::shared_address(words(0)) + static_cast<uint32_t>(ptx::lane() % kCopies * kCopyStride) * 4;
    MLA_NO_UNROLL
    for (int32_t chunk = 0; chunk < row.num_chunks(); ++chunk) {
      row.load(chunk, entries);
      MLA_UNROLL
      for (int e = 0; e < kEntries; ++e) {
        const uint32_t rank = entries.ranks[e];
        if (((rank ^ found) & mask) == 0 && (entries.valid >> e & 1U) != 0)
          ptx::add_shared(copy + (rank >> shift & bin_mask) * 4, 1);
      }
    }
    ptx::sync_block();  // the histogram is complete before find() reads it
  }

  /// Returns the bin of the `wanted`-th largest rank.
  static MLA_DEVICE Bin find(uint32_t wanted, const Cluster& cluster, int turn) {
    const int32_t low = ptx::warp() * kGroupBins + 2 * ptx::lane();
    static_assert(kGroupBins == 2 * kWarpSize);
    uint32_t two[2] = {};
    MLA_UNROLL
    for (int copy = 0; copy < kCopies; ++copy)
      for (int j = 0; j < 2; ++j) two[j] += words(copy * kCopyStride + low)[j];
    for (int j = 0; j < 2; ++j) bins(turn)[low + j] = two[j];  // other blocks may still read those of the last turn
    const uint32_t inclusive = scan_warp(two[0] + two[1]);
    if (ptx::lane() == kWarpSize - 1) groups(turn)[ptx::warp()] = inclusive;
    cluster.sync();  // the sums of all blocks are in shared memory
    if (ptx::warp() == 0) {
      Bin bin = {};
      const uint32_t* sums = groups(turn);
      int32_t number_of_sums = kWarps;
      MLA_NO_UNROLL
      for (int level = 0; level < 2; ++level) {
        const Bin found = find_among(sums, number_of_sums, wanted - bin.above.all, cluster);
        sums = bins(turn) + found.number * kGroupBins;
        number_of_sums = kGroupBins;
        bin = {bin.number * kGroupBins + found.number, bin.above + found.above, found.count};
      }
      const uint32_t found[] = {bin.number, bin.above.all, bin.above.earlier, bin.count.all, bin.count.earlier};
      if (ptx::lane() == 0)
        for (int i = 0; i < 5; ++i) words(kFoundWords)[i] = found[i];
    }
    ptx::sync_block();  // the bin is found before all threads read it, and the histogram may be cleared again
    const uint32_t* const found = words(kFoundWords);
    return {found[0], {found[1], found[2]}, {found[3], found[4]}};
  }

  /// Returns, to a warp, the one of up to 64 sums that the `wanted`-th largest rank is counted in. Each lane looks at
  /// two sums, lane 0 at the two highest.
  static MLA_DEVICE Bin find_among(const uint32_t* sums, int32_t number, uint32_t wanted, const Cluster& cluster) {
    const int32_t low = number - 2 - 2 * ptx::lane();
    Counts two[2] = {};
    if (low >= 0) cluster.add_up(sums + low, two);
    const Counts both = two[0] + two[1];
    const Counts above = {scan_warp(both.all) - both.all, scan_warp(both.earlier) - both.earlier};
    const bool is_here = above.all < wanted && wanted <= above.all + both.all;
    const bool is_high = wanted <= above.all + two[1].all;
    const Bin own = {static_cast<uint32_t>(low + (is_high ? 1 : 0)), is_high ? above : above + two[1],
                     is_high ? two[1] : two[0]};
    // One bit is set. (nvcc 13.0 makes a constant 32 of std::countr_zero.)
    const int lane = std::popcount(ptx::ballot(is_here) - 1);
    const auto of_lane = [&](uint32_t word) { return ptx::shuffle(word, lane); };
    return {of_lane(own.number),
            {of_lane(own.above.all), of_lane(own.above.earlier)},
            {of_lane(own.count.all), of_lane(own.count.earlier)}};
  }

  /// Returns the sum over all warps before this one, and sets `all` to the sum over all warps. Successive calls must
  /// alternate the parity of `turn`, since a warp may write the next sums while others still read the last ones.
  static MLA_DEVICE uint32_t sum_before_warp(uint32_t sum_of_warp, int32_t turn, uint32_t& all) {
    uint32_t* const sums = words(kWarpWords) + turn % 2 * kWarps;
    if (ptx::lane() == 0) sums[ptx::warp()] = sum_of_warp;
    ptx::sync_block();  // the sums of all warps are in shared memory
    const uint32_t sum = sums[ptx::lane()];
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

  /// Says how many entries that have a bit come before each of the thread's quads in a chunk, and how many there are.
  struct Places {
    uint32_t before[kQuads], all;
  };

  /// Returns the places of a chunk's entries whose bits are set: bit 4 q + j is that of entry j of the thread's quad q.
  static MLA_DEVICE Places places_of(uint32_t bits, int32_t turn) {
    static_assert(kQuads == 4 && kLoad < 256, "counts of four quads fit the bytes of a word");
    const auto byte_of_quad = [](uint32_t counts, int quad) { return counts >> (8 * quad) & 0xFFU; };
    uint32_t counts = 0;
    MLA_UNROLL
    for (int q = 0; q < kQuads; ++q)
      counts |= static_cast<uint32_t>(std::popcount(bits >> (kQuad * q) & 0xFU)) << (8 * q);
    const uint32_t scan = scan_warp(counts), in_warp = ptx::shuffle(scan, kWarpSize - 1);
    const uint32_t pairs = (in_warp & 0xFF00FFU) + (in_warp >> 8 & 0xFF00FFU);
    Places places;
    uint32_t before = sum_before_warp((pairs + (pairs >> 16)) & 0xFFFFU, turn, places.all);
    MLA_UNROLL
    for (int q = 0; q < kQuads; ++q) {
      places.before[q] = before + byte_of_quad(scan - counts, q);
      before += byte_of_quad(in_warp, q);
    }
    return places;
  }

  /// Writes value(i) to `out` for each wanted entry i. Returns where those of this part end, or of the row.
  template <class Value>
  static MLA_DEVICE uint32_t compact(const Row& row, ThreadEntries& entries, const Selection& selection, uint32_t k,
                                     int32_t* out, const Value& value) {
    uint32_t end = selection.earlier_above + std::min(selection.earlier_ties, selection.ties);
    uint32_t ties = selection.earlier_ties;  // of earlier parts and chunks
    int32_t turn = 0;
    MLA_NO_UNROLL
    for (int32_t chunk = 0; chunk < row.num_chunks() && end < k; ++chunk) {
      row.load(chunk, entries);
      uint32_t wanted = 0;
      MLA_UNROLL
      for (int e = 0; e < kEntries; ++e) wanted |= entries.ranks[e] > selection.above ? 1U << e : 0U;
      wanted &= entries.valid;
      if (selection.ties > 0) wanted |= first_ties(entries, selection, ties, turn++);
      entries.chunk = -1;  // nobody needs the ranks any more, but their registers
      const Places places = places_of(wanted, turn++);
      uint32_t* const list = words(kListWords);
      MLA_UNROLL
      for (int q = 0; q < kQuads; ++q) {
        uint32_t* to = list + places.before[q];
        MLA_UNROLL
        for (int j = 0; j < kQuad; ++j)
          if ((wanted >> (kQuad * q + j) & 1U) != 0) *to++ = static_cast<uint32_t>(row.index(chunk, q) + j);
      }
      ptx::sync_block();  // the list is complete
      for (auto i = static_cast<uint32_t>(ptx::thread_index()); i < places.all; i += kThreads)
        out[end + i] = value(static_cast<int32_t>(list[i]));
      end += places.all;
      ptx::sync_block();  // all threads have read the list
    }
    return end;
  }

  /// Returns the bits of the thread's entries that are among the first ties of the row, of which `before` came before
  /// the chunk, and adds the chunk's to `before`.
  static MLA_DEVICE uint32_t first_ties(const ThreadEntries& entries, const Selection& selection, uint32_t& before,
                                        int32_t turn) {
    uint32_t equal = 0;
    MLA_UNROLL
    for (int e = 0; e < kEntries; ++e)
      equal |= entries.ranks[e] - selection.rank <= selection.above - selection.rank ? 1U << e : 0U;
    equal &= entries.valid;
    const Places places = places_of(equal, turn);
    uint32_t first = 0;
    MLA_UNROLL
    for (int e = 0; e < kEntries; ++e) {
      const auto in_quad = static_cast<uint32_t>(std::popcount(equal >> (e / kQuad * kQuad) & ((1U << e % kQuad) - 1)));
      const bool is_first = before + places.before[e / kQuad] + in_quad < selection.ties;
      first |= is_first ? equal & 1U << e : 0U;
    }
    before += places.all;
    return first;
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE
