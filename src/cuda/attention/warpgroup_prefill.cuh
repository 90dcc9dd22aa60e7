// SPDX-License-Identifier: Apache-2.0
// These are parts of kernels of up-projected prefill by wgmma, whatever their elements: units of work, barriers, tiles
// of keys, and how rows come into shared memory. A block is one warpgroup that loads (warpgroup_prefill_load.cuh) and
// two that compute 64 query rows each (warpgroup_prefill_compute.cuh).
#pragma once

#include <cstdint>

#include "core/args.h"
#include "cuda/border/queue.h"
#include "cuda/ptx/ptx.h"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/query_block.cuh"
#include "cuda/tile/tile.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

struct WarpgroupPrefillParams {
  core::PrefillArgs args;
  uint32_t num_slots;       // slots for query blocks, of each head
  uint32_t num_units;       // slots of all heads
  uint32_t heads_together;  // heads whose slots are taken in turns
  uint32_t* next_unit;      // the first unit that no block has taken; null: a block computes the unit of its own number
  bool by_boxes;            // whether k_map and v_map describe k and v, so that tiles come by tensor copies
  bool rows_aligned;        // whether every row of q, k and v begins at a multiple of 16 bytes
  bool o_lane_aligned;      // whether every row of o begins at a multiple of the elements that a lane stores together
  bool o_rows_aligned;      // whether every row of o begins at a multiple of 16 bytes
  cuda::TensorMap k_map, v_map;  // boxes have all keys of a tile and 128 bytes of channels
};

/// A unit is up to 128 query rows of one request and head.
struct alignas(16) PrefillUnit {
  int first_token;  // number of the first row's token, among all tokens of the batch
  int first_key;    // number of the request's first key, among all keys of the batch
  int rows;         // number of rows; 0: no unit is left
  int position;     // position of the first row in its request
  int kv_len;       // keys of the request
  int head;
  int first_tile, end_tile;  // tiles with keys that any row sees

  MLA_DEVICE int num_tiles() const { return end_tile - first_tile; }
};

/// These are the roles and sizes that configurations of such kernels have in common. A tile of rows is its segments of
/// 128 bytes one after another, each [rows, 128 bytes], swizzled as in tile.cuh: Swizzle::k128, which wgmma takes for
/// rows along k (Q, K) and along n (V).
struct WarpgroupPrefillConfig {
  static constexpr int kGroupThreads = 128;  // of a warpgroup
  static constexpr int kGroups = 2;          // warpgroups that compute; one more loads
  static constexpr int kThreads = (kGroups + 1) * kGroupThreads;
  static constexpr int kGroupRows = 64, kRows = kGroups * kGroupRows;
  static constexpr int kBarrierBytes = 8;
  // Two places of flags for each computing warpgroup (WarpgroupPrefillCompute::any_warp()), 4 bytes for each warp.
  static constexpr int kFlagBytes = 16;
  static constexpr int kAllFlagBytes = kGroups * 2 * kFlagBytes;
  static constexpr int kUnitBytes = 2 * static_cast<int>(sizeof(PrefillUnit));

  // These are barriers of bar.sync; number 0 is that of the whole block.
  enum NamedBarrier : int {
    kTurnBarrier = 1,                        // [computing warpgroup]
    kGroupBarrier = kTurnBarrier + kGroups,  // [computing warpgroup]
  };
  /// Returns the segments of a tile whose rows have so many bytes.
  static constexpr int segments(int bytes) { return (bytes + kSegmentBytes - 1) / kSegmentBytes; }
};

/// This is the base of both roles. Each warpgroup walks through the units at its own pace. Units and tiles are numbered
/// from the kernel's start on: unit u is described in place u % 2, K of tile n lies in stage n % kStages, and V in n %
/// kVStages. Config says where things lie in shared memory (kKBegin, kVBegin, kUnitsBegin, kFlagsBegin,
/// kBarriersBegin), the order of the mbarriers (kKFull, kKEmpty, kVFull, kVEmpty, kUnitFull, kUnitEmpty), and their
/// Element.
template <class Config>
class WarpgroupPrefill {
 public:
  MLA_DEVICE explicit WarpgroupPrefill(const WarpgroupPrefillParams& params)
      : params_(params), args_(params.args), shared_(ptx::shared_address(ptx::shared_memory())) {}

 protected:
  using Element = typename Config::Element;
  static constexpr int kGroupWarps = Config::kGroupThreads / kWarpSize;
  static constexpr uint32_t kAtomBytes = 8 * kSegmentBytes;  // eight rows of a segment, an atom of the swizzle

  /// Returns how many threads arrive behind the copies of a tile that they have issued.
  MLA_DEVICE uint32_t copying_threads() const { return params_.by_boxes ? 1 : Config::kGroupThreads; }
  /// Initializes the barriers, of which v_full waits for `v_arrivals` and unit_empty for `load_warps` beside the
  /// computing ones. One thread calls it.
  MLA_DEVICE void init_barriers(uint32_t v_arrivals, int load_warps) const {
    for (int n = 0; n < Config::kStages; ++n) {
      ptx::mbarrier_init(k_full(n), copying_threads());
      ptx::mbarrier_init(k_empty(n), Config::kGroups * kGroupWarps);
    }
    for (int n = 0; n < Config::kVStages; ++n) {
      ptx::mbarrier_init(v_full(n), v_arrivals);
      ptx::mbarrier_init(v_empty(n), Config::kGroups * kGroupWarps);
    }
    for (int u = 0; u < 2; ++u) {
      ptx::mbarrier_init(unit_full(u), 1);
      ptx::mbarrier_init(unit_empty(u), Config::kGroups * kGroupWarps + load_warps);
    }
  }

  /// Returns the keys that the row at a position of the request sees.
  MLA_DEVICE KeyRange visible(const PrefillUnit& unit, int position) const {
    return visible_keys(position, unit.kv_len, args_.causal, args_.options.window_left);
  }

  /// Return the stages of K and of V of tile n. Numbers are not negative, which makes remainders short.
  static MLA_DEVICE int stage(int n) { return static_cast<int>(static_cast<uint32_t>(n) % Config::kStages); }
  static MLA_DEVICE int v_stage(int n) { return static_cast<int>(static_cast<uint32_t>(n) % Config::kVStages); }

  /// Return the barriers of tile n: a phase of k_full or v_full ends when the tile is in its stage, one of k_empty or
  /// v_empty when all computing warps are done with it.
  MLA_DEVICE ptx::SharedAddress k_full(int n) const { return barrier(Config::kKFull + stage(n)); }
  MLA_DEVICE ptx::SharedAddress k_empty(int n) const { return barrier(Config::kKEmpty + stage(n)); }
  MLA_DEVICE ptx::SharedAddress v_full(int n) const { return barrier(Config::kVFull + v_stage(n)); }
  MLA_DEVICE ptx::SharedAddress v_empty(int n) const { return barrier(Config::kVEmpty + v_stage(n)); }
  /// Return the barriers of unit u: a phase of unit_full ends when the unit is described, one of unit_empty when no
  /// warp reads its description any more.
  MLA_DEVICE ptx::SharedAddress unit_full(int u) const { return barrier(Config::kUnitFull + u % 2); }
  MLA_DEVICE ptx::SharedAddress unit_empty(int u) const { return barrier(Config::kUnitEmpty + u % 2); }
  /// Return the parities that waits for the phases of K and V of tile n, or of unit u, take.
  static MLA_DEVICE uint32_t tile_parity(int n) { return static_cast<uint32_t>(n) / Config::kStages & 1U; }
  static MLA_DEVICE uint32_t v_parity(int n) { return static_cast<uint32_t>(n) / Config::kVStages & 1U; }
  static MLA_DEVICE uint32_t unit_parity(int u) { return static_cast<uint32_t>(u / 2) & 1U; }
  MLA_DEVICE ptx::SharedAddress barrier(int i) const {
    return shared_ + static_cast<uint32_t>(Config::kBarriersBegin + i * Config::kBarrierBytes);
  }

  MLA_DEVICE ptx::SharedAddress q_tile(int group) const {
    return shared_ + static_cast<uint32_t>(group * Config::kQBytes);
  }
  MLA_DEVICE ptx::SharedAddress k_tile(int n) const {
    return shared_ + static_cast<uint32_t>(Config::kKBegin + stage(n) * Config::kKBytes);
  }
  MLA_DEVICE ptx::SharedAddress v_tile(int n) const {
    return shared_ + static_cast<uint32_t>(Config::kVBegin + v_stage(n) * Config::kVBytes);
  }
  MLA_DEVICE ptx::SharedAddress unit_place(int u) const {
    return shared_ + static_cast<uint32_t>(Config::kUnitsBegin + u % 2 * static_cast<int>(sizeof(PrefillUnit)));
  }

  MLA_DEVICE void wait_for_unit(int u) const { ptx::mbarrier_wait(unit_full(u), unit_parity(u)); }
  /// Returns the description of a unit. It is read from shared memory each time, because registers are short.
  MLA_DEVICE PrefillUnit unit(int u) const {
    const auto a = ptx::load_shared<ptx::Vec4>(unit_place(u)), b = ptx::load_shared<ptx::Vec4>(unit_place(u) + 16);
    const auto number = [](uint32_t bits) { return static_cast<int>(bits); };
    return {.first_token = number(a.x[0]),
            .first_key = number(a.x[1]),
            .rows = number(a.x[2]),
            .position = number(a.x[3]),
            .kv_len = number(b.x[0]),
            .head = number(b.x[1]),
            .first_tile = number(b.x[2]),
            .end_tile = number(b.x[3])};
  }
  /// Arrives for a warp that will not ask for the unit any more.
  MLA_DEVICE void leave_unit(int u) const {
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(unit_empty(u));
  }

  /// Starts to copy rows of global memory, of kRowBytes, into a tile, for a warpgroup; rows from `num_rows` on become
  /// zero. A warp copies four rows of 128 bytes at a time. Rows that are not aligned have been copied when it returns.
  /// Of the last segment only the row's own bytes are written.
  template <int kTileRows, int kRowBytes>
  MLA_DEVICE void load_tile(ptx::SharedAddress to, const void* from, int64_t offset, int64_t stride,
                            int num_rows) const {
    constexpr int kSegments = Config::segments(kRowBytes), kRowsAtOnce = Config::kGroupThreads / kChunksPerSegment;
    constexpr int kWordElements = 4 / static_cast<int>(sizeof(Element)), kSegmentElements = 32 * kWordElements;
    static_assert(kTileRows % kRowsAtOnce == 0 && kRowsAtOnce % 8 == 0 && kRowBytes % kChunkBytes == 0);
    const int thread = ptx::thread_index() % Config::kGroupThreads;
    const int chunk = thread % kChunksPerSegment, row = thread / kChunksPerSegment;
    const auto has_chunk = [&](int segment) {
      return (segment + 1) * kSegmentBytes <= kRowBytes || segment * kSegmentBytes + chunk * kChunkBytes < kRowBytes;
    };
    const Element* source = static_cast<const Element*>(from) + offset + row * stride + chunk * 4 * kWordElements;
    to += tile_offset<kSegmentBytes>(row, chunk);
    if (params_.rows_aligned) {
      MLA_UNROLL
      for (int r = 0; r < kTileRows; r += kRowsAtOnce) {
        MLA_UNROLL
        for (int segment = 0; segment < kSegments; ++segment)
          if (has_chunk(segment))
            ptx::cp_async_16(to + static_cast<uint32_t>((segment * kTileRows + r) * kSegmentBytes),
                             source + segment * kSegmentElements, row + r < num_rows);
        source += kRowsAtOnce * stride;
      }
      return;
    }
    MLA_NO_UNROLL
    for (int r = 0; r < kTileRows; r += kRowsAtOnce) {
      MLA_NO_UNROLL
      for (int segment = 0; segment < kSegments; ++segment) {
        if (!has_chunk(segment)) continue;
        ptx::Vec4 words = {};
        if (row + r < num_rows) {
          const Element* elements = source + segment * kSegmentElements;
          MLA_UNROLL
          for (int i = 0; i < 4 * kWordElements; ++i)
            words.x[i / kWordElements] |= static_cast<uint32_t>(elements[i])
                                          << i % kWordElements * (32 / kWordElements);
        }
        ptx::store_shared(to + static_cast<uint32_t>((segment * kTileRows + r) * kSegmentBytes), words);
      }
      source += kRowsAtOnce * stride;
    }
  }

  const WarpgroupPrefillParams& params_;
  const core::PrefillArgs& args_;
  const ptx::SharedAddress shared_;
};

}  // namespace mla::MLA_CUDA_NAMESPACE
