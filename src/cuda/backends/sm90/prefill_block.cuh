// SPDX-License-Identifier: Apache-2.0
// The warpgroups of a prefill block share what is here: sizes, the map of shared memory, the barriers, the units of
// work.
#pragma once

#include <cstdint>

#include "core/args.h"
#include "cuda/border/queue.h"
#include "cuda/ptx/ptx.h"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/query_block.cuh"
#include "cuda/tile/tile.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

struct PrefillTiling {
  int keys;          // keys of a tile of K or V: 64 or 128
  int stages;        // tiles of K, and of V, in shared memory
  int q_steps;       // steps of 16 channels of Q that are multiplied from registers; the others from shared memory
  bool takes_turns;  // whether the two computing warpgroups issue their products one after the other
};

struct PrefillParams {
  core::PrefillArgs args;
  uint32_t num_slots;    // slots for query blocks, of each head
  uint32_t num_units;    // slots of all heads
  uint32_t* next_unit;   // the first unit that no block has taken; null: a block computes the unit of its own number
  bool by_boxes;         // whether k_map and v_map describe k and v, so that tiles come by tensor copies
  bool rows_aligned;     // whether every row of q, k and v begins at a multiple of 16 bytes
  bool o_pairs_aligned;  // whether every row of o begins at a multiple of 2 elements
  bool o_rows_aligned;   // whether every row of o begins at a multiple of 16 bytes
  cuda::TensorMap k_map, v_map;  // boxes have all keys of a tile and 64 channels
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

template <DType kType_, int kDQk_, int kDV_, PrefillTiling kTiling>
struct PrefillConfig {
  static constexpr DType kType = kType_;
  static constexpr int kDQk = kDQk_, kDV = kDV_;
  static constexpr int kGroupThreads = 128;  // of a warpgroup
  static constexpr int kGroups = 2;          // warpgroups that compute; one more loads
  static constexpr int kThreads = (kGroups + 1) * kGroupThreads;
  // setmaxnreg gives the computing warpgroups what the load warpgroup leaves: O takes 64 registers, S 64 and P 32, and
  // nvcc 13.0 spills nothing. No measurement of other splits is recorded.
  static constexpr int kLoadRegisters = 40, kComputeRegisters = 232;
  static constexpr int kGroupRows = 64, kRows = kGroups * kGroupRows;
  static constexpr int kKeys = kTiling.keys, kStages = kTiling.stages, kQSteps = kTiling.q_steps;
  static constexpr bool kTakesTurns = kTiling.takes_turns;
  static constexpr int kQkPieces = kDQk / 64, kVPieces = kDV / 64;

  // A tile is its pieces of 64 channels one after another, each [rows, 128 bytes], swizzled as in tile.cuh. That is
  // Swizzle::k128, which wgmma takes for rows along k (Q, K) and along n (V).
  static constexpr int kQBytes = kGroupRows * kDQk * 2, kKBytes = kKeys * kDQk * 2, kVBytes = kKeys * kDV * 2;
  static constexpr int kKBegin = kGroups * kQBytes, kVBegin = kKBegin + kStages * kKBytes;
  // Each computing warp has room for 8 rows of 16-bit outputs, which it brings into order for stores of whole rows.
  static constexpr int kOutputBytes = 8 * kDV * 2, kOutputBegin = kVBegin + kStages * kVBytes;
  static constexpr int kUnitsBegin = kOutputBegin + kGroups * 4 * kOutputBytes;
  // all_finite() of each computing warpgroup has two places of 16 bytes: a flag of 4 bytes for each warp.
  static constexpr int kFlagBytes = 16;
  static constexpr int kFlagsBegin = kUnitsBegin + 2 * static_cast<int>(sizeof(PrefillUnit));
  static constexpr int kBarriersBegin = kFlagsBegin + kGroups * 2 * kFlagBytes;
  // The mbarriers have these places behind kBarriersBegin, in units of kBarrierBytes.
  static constexpr int kBarrierBytes = 8;
  enum Barrier : int {
    kKFull = 0,                     // [stage]
    kKEmpty = kKFull + kStages,     // [stage]
    kVFull = kKEmpty + kStages,     // [stage]
    kVEmpty = kVFull + kStages,     // [stage]
    kUnitFull = kVEmpty + kStages,  // [unit % 2]
    kUnitEmpty = kUnitFull + 2,     // [unit % 2]
    kNumBarriers = kUnitEmpty + 2
  };
  // These are barriers of bar.sync; number 0 is that of the whole block.
  enum NamedBarrier : int {
    kTurnBarrier = 1,                        // [computing warpgroup]
    kGroupBarrier = kTurnBarrier + kGroups,  // [computing warpgroup]
  };
  static constexpr int kSharedBytes = kBarriersBegin + kNumBarriers * kBarrierBytes;
  static_assert(kSharedBytes <= kSharedBytesPerBlock);
  static_assert(kDQk % 64 == 0 && kDV == 128 && (kKeys == 64 || kKeys == 128) && kStages >= 2);
};

/// This is the base of both roles. Each warpgroup walks through the units at its own pace. Units and tiles are numbered
/// from the kernel's start on: unit u is described in place u % 2, and tile n lies in stage n % kStages.
template <class Config>
class PrefillBlock {
 public:
  MLA_DEVICE explicit PrefillBlock(const PrefillParams& params)
      : params_(params), args_(params.args), shared_(ptx::shared_address(ptx::shared_memory())) {}

  /// Initializes the barriers. All threads call it once, at the kernel's start.
  MLA_DEVICE void init() const {
    if (ptx::thread_index() == 0) {
      const uint32_t loading_threads = params_.by_boxes ? 1 : Config::kGroupThreads;
      for (int n = 0; n < Config::kStages; ++n) {
        ptx::mbarrier_init(k_full(n), loading_threads);
        ptx::mbarrier_init(v_full(n), loading_threads);
        ptx::mbarrier_init(k_empty(n), Config::kGroups * kGroupWarps);
        ptx::mbarrier_init(v_empty(n), Config::kGroups * kGroupWarps);
      }
      for (int u = 0; u < 2; ++u) {
        ptx::mbarrier_init(unit_full(u), 1);
        ptx::mbarrier_init(unit_empty(u), Config::kGroups * kGroupWarps + (params_.by_boxes ? 1 : kGroupWarps));
      }
      ptx::fence_mbarrier_init();
    }
    ptx::sync_block();
  }

 protected:
  static constexpr int kGroupWarps = Config::kGroupThreads / kWarpSize;
  static constexpr uint32_t kAtomBytes = 8 * kSegmentBytes;  // eight rows of a piece, an atom of the swizzle

  /// Returns the keys that the row at a position of the request sees.
  MLA_DEVICE KeyRange visible(const PrefillUnit& unit, int position) const {
    return visible_keys(position, unit.kv_len, args_.causal, args_.options.window_left);
  }

  /// Return the barriers of tile n: a phase of k_full or v_full ends when the tile is in its stage, one of k_empty or
  /// v_empty when all computing warps are done with it.
  MLA_DEVICE ptx::SharedAddress k_full(int n) const { return barrier(Config::kKFull + n % Config::kStages); }
  MLA_DEVICE ptx::SharedAddress k_empty(int n) const { return barrier(Config::kKEmpty + n % Config::kStages); }
  MLA_DEVICE ptx::SharedAddress v_full(int n) const { return barrier(Config::kVFull + n % Config::kStages); }
  MLA_DEVICE ptx::SharedAddress v_empty(int n) const { return barrier(Config::kVEmpty + n % Config::kStages); }
  /// Return the barriers of unit u: a phase of unit_full ends when the unit is described, one of unit_empty when no
  /// warp reads its description any more.
  MLA_DEVICE ptx::SharedAddress unit_full(int u) const { return barrier(Config::kUnitFull + u % 2); }
  MLA_DEVICE ptx::SharedAddress unit_empty(int u) const { return barrier(Config::kUnitEmpty + u % 2); }
  /// Return the parities that waits for the phase of tile n, or of unit u, take.
  static MLA_DEVICE uint32_t tile_parity(int n) { return static_cast<uint32_t>(n / Config::kStages) & 1U; }
  static MLA_DEVICE uint32_t unit_parity(int u) { return static_cast<uint32_t>(u / 2) & 1U; }

  MLA_DEVICE ptx::SharedAddress q_tile(int group) const {
    return shared_ + static_cast<uint32_t>(group * Config::kQBytes);
  }
  MLA_DEVICE ptx::SharedAddress k_tile(int n) const {
    return shared_ + static_cast<uint32_t>(Config::kKBegin + n % Config::kStages * Config::kKBytes);
  }
  MLA_DEVICE ptx::SharedAddress v_tile(int n) const {
    return shared_ + static_cast<uint32_t>(Config::kVBegin + n % Config::kStages * Config::kVBytes);
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

  /// Starts to copy rows of global memory into a tile, for a warpgroup; rows from `num_rows` on become zero. A warp
  /// copies four rows of 128 bytes at a time. Rows that are not aligned have been copied when it returns.
  template <int kTileRows, int kPieces>
  MLA_DEVICE void load_tile(ptx::SharedAddress to, const void* from, int64_t offset, int64_t stride,
                            int num_rows) const {
    const int thread = ptx::thread_index() % Config::kGroupThreads;
    const int chunk = thread % kChunksPerSegment, row = thread / kChunksPerSegment;
    constexpr int kRowsAtOnce = Config::kGroupThreads / kChunksPerSegment;
    static_assert(kTileRows % kRowsAtOnce == 0 && kRowsAtOnce % 8 == 0);
    const uint16_t* source = static_cast<const uint16_t*>(from) + offset + row * stride + chunk * 8;
    to += tile_offset<kSegmentBytes>(row, chunk);
    if (params_.rows_aligned) {
      MLA_UNROLL
      for (int r = 0; r < kTileRows; r += kRowsAtOnce) {
        MLA_UNROLL
        for (int piece = 0; piece < kPieces; ++piece)
          ptx::cp_async_16(to + static_cast<uint32_t>((piece * kTileRows + r) * kSegmentBytes), source + piece * 64,
                           row + r < num_rows);
        source += kRowsAtOnce * stride;
      }
      return;
    }
    MLA_NO_UNROLL
    for (int r = 0; r < kTileRows; r += kRowsAtOnce) {
      MLA_NO_UNROLL
      for (int piece = 0; piece < kPieces; ++piece) {
        ptx::Vec4 elements = {};
        if (row + r < num_rows) {
          const uint16_t* pairs = source + piece * 64;
          MLA_UNROLL
          for (int i = 0; i < 4; ++i)
            elements.x[i] = static_cast<uint32_t>(pairs[2 * i]) | static_cast<uint32_t>(pairs[2 * i + 1]) << 16;
        }
        ptx::store_shared(to + static_cast<uint32_t>((piece * kTileRows + r) * kSegmentBytes), elements);
      }
      source += kRowsAtOnce * stride;
    }
  }

  const PrefillParams& params_;
  const core::PrefillArgs& args_;
  const ptx::SharedAddress shared_;

 private:
  MLA_DEVICE ptx::SharedAddress barrier(int i) const {
    return shared_ + static_cast<uint32_t>(Config::kBarriersBegin + i * 8);
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90
