// SPDX-License-Identifier: Apache-2.0
// This is the base of the kernels of absorbed attention whose warps all do the same work, alone or as two groups that
// share the keys. It has the block's unit, its barriers, and the keys: which rows they are, and the copies that bring
// them to shared memory.
//   group 0, step n:                          wait kv_full | scores | softmax | fill n + 1 | outputs -> kv_empty
//   group 1, half a step later:  fill n + 1 | wait kv_full | scores | softmax | outputs -> kv_empty
// A kernel's Config has the constants that the functions below name: portable/absorbed_config.cuh, fp8/config.cuh.
#pragma once

#include "cuda/attention/absorbed_results.cuh"
#include "cuda/attention/poison.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Says how the scores of a unit become logits, in one word of 16 bytes, because every warp reads it in every step.
struct alignas(16) ScoreMode {
  StepRange unmasked;  // those of the unit
  float scale;         // of base-2 logits in these steps
};

/// Describes the unit that a block computes, for all its threads. Steps are numbered from the kernel's start on.
struct BlockUnit : AbsorbedUnit {
  int32_t next_segment, end_segment, row_lane;  // the worker's state; kept here because registers are short
  uint32_t valid[8];                            // word n % 8 is that of step n: a bit for each key, set if it has a row
  bool whole_rows;                              // of RowCopy::are_whole()
  ScoreMode mode;
};

template <class Config>
class GroupedBlock {
 public:
  MLA_DEVICE explicit GroupedBlock(const cuda::AbsorbedArgs& args)
      : args_(args), memory_(ptx::shared_memory()), shared_(ptx::shared_address(memory_)) {}

  /// Initializes the unit, barriers and poison marks. All threads call it once, at the kernel's start.
  MLA_DEVICE void init(const cuda::Share& share) const {
    if (ptx::thread_index() == 0) {
      unit().next_segment = share.begin;
      unit().end_segment = share.end;
      unit().row_lane = share.row_lane;
      for (int i = 0; i < Config::kTiles; ++i) {
        // Every warp arrives for its ordinary stores. Rows that are copied straight into a tile arrive by themselves,
        // for every thread.
        ptx::mbarrier_init(barrier(Config::kKvFull + i), Config::kWarps + (Config::kDecodes ? 0 : Config::kThreads));
        ptx::mbarrier_init(barrier(Config::kKvEmpty + i), Config::kWarps);
      }
      for (int i = Config::kOfGroups; i < Config::kNumBarriers; ++i)
        ptx::mbarrier_init(barrier(i), Config::kGroupWarps);
      ptx::fence_mbarrier_init();
      unit().steps = {0, 0};
    }
    for (int i = ptx::thread_index(); i < 2 * Config::kGroups * Config::kPoisonBytes; i += Config::kThreads)
      memory_[Config::kPoisonOffset + i] = std::byte{0};
    ptx::sync_block();
  }

 protected:
  using Keys = WarpKeys<Config>;

  /// These are ptx::thread_index(), lane() and warp(), read anew at every use where Config says so.
  MLA_DEVICE static int thread() { return Config::kReadsIndexAnew ? ptx::thread_index_anew() : ptx::thread_index(); }
  MLA_DEVICE static int lane() { return ptx::lane<Config::kReadsIndexAnew>(); }
  MLA_DEVICE static int warp() { return ptx::warp<Config::kReadsIndexAnew>(); }

  /// Calls compute(segment) for all segments of the worker that the block has rows of.
  template <class Compute>
  MLA_DEVICE void for_each_segment(const Compute& compute) const {
    MLA_NO_UNROLL
    while (unit().next_segment < unit().end_segment) {
      const cuda::Segment& segment = args_.list.segments[unit().next_segment];
      if (segment.row_begin + unit().row_lane * Config::kRows < segment.q_len * args_.num_heads.value) compute(segment);
      ptx::sync_block();  // nobody reads the unit any more
      if (ptx::thread_index() == 0) ++unit().next_segment;
      ptx::sync_block();
    }
  }

  static_assert(sizeof(BlockUnit) <= Config::kUnitBytes && sizeof(KeptPlace<Config>) == Config::kPlaceBytes);

  MLA_DEVICE BlockUnit& unit() const { return *as<BlockUnit>(memory_ + Config::kUnitOffset); }
  MLA_DEVICE bool has_step(uint32_t n) const { return n < unit().steps.end; }
  MLA_DEVICE int32_t first_key(uint32_t n) const { return unit().template first_key<Config>(n); }
  MLA_DEVICE const cuda::KeyPool& pool(uint32_t n) const { return args_.pools[unit().keys.pool_of(first_key(n))]; }

  MLA_DEVICE static int group() { return Config::kGroups == 1 ? 0 : warp() / Config::kGroupWarps; }
  MLA_DEVICE static int warp_of_group() { return warp() % Config::kGroupWarps; }
  MLA_DEVICE static void sync_group() { ptx::sync_threads(Config::kGroupBarrier + group(), Config::kGroupThreads); }

  /// Does the same, and returns whether `predicate` holds in any thread of the group.
  MLA_DEVICE static bool sync_group_any(bool predicate) {
    return ptx::sync_threads_any(Config::kGroupBarrier + group(), Config::kGroupThreads, predicate);
  }

  MLA_DEVICE ptx::SharedAddress barrier(int place) const {
    return shared_ + static_cast<uint32_t>(Config::kBarrierOffset + place * Config::kBarrierBytes);
  }
  /// Returns the barrier kv_full, a phase of which ends when the rows of step n are in the tile.
  MLA_DEVICE ptx::SharedAddress kv_full(uint32_t n) const {
    return barrier(Config::kKvFull + static_cast<int>(n % Config::kTiles));
  }
  /// Returns the barrier kv_empty, a phase of which ends when every warp is done with the values of step n.
  MLA_DEVICE ptx::SharedAddress kv_empty(uint32_t n) const {
    return barrier(Config::kKvEmpty + static_cast<int>(n % Config::kTiles));
  }
  /// Returns the parity that a wait for step n's phase of a tile's barrier takes.
  MLA_DEVICE static uint32_t parity(uint32_t n) { return n / Config::kTiles & 1U; }

  MLA_DEVICE ptx::SharedAddress tile(uint32_t n) const {
    return shared_ + Config::kTileOffset + n % Config::kTiles * Config::kTileBytes;
  }
  /// Returns where the scales of step n lie, in bytes from the begin of shared memory.
  MLA_DEVICE static uint32_t scale_offset(uint32_t n) {
    return Config::kScaleOffset + n % Config::kScalePlaces * Config::kScaleBytes;
  }
  MLA_DEVICE float* row_factors() const { return as<float>(memory_ + Config::kRowOffset); }
  MLA_DEVICE ScoreState* row_states() const {
    return as<ScoreState>(memory_ + Config::kRowOffset + Config::kRows * sizeof(float));
  }
  /// Returns the group's marks of step n. They are reset when all its warps have seen them.
  MLA_DEVICE PoisonMarks<Config::kKeys> poison(uint32_t n) const {
    const auto place = static_cast<uint32_t>(group() * 2) + n % 2;
    return PoisonMarks<Config::kKeys>(as<uint8_t>(memory_ + Config::kPoisonOffset + place * Config::kPoisonBytes));
  }
  MLA_DEVICE void reset_poison(uint32_t n) const {
    sync_group();  // no warp needs the marks any more
    if (warp_of_group() == 0) poison(n).reset(lane(), kWarpSize);
  }

  /// Describes the unit.
  MLA_DEVICE void start(const cuda::Segment& segment) const {
    if (const int r = thread(); r < Config::kRows) row_states()[r] = {};
    if (ptx::thread_index() == 0) {
      describe_unit<Config>(args_, segment, unit().row_lane, unit().steps.end, unit());
      unit().template find_unmasked_steps<Config>(args_);
      unit().whole_rows = !Config::kQuantized && RowCopy<Config>::are_whole(args_);
      const float scale = score_scale(args_) * std::numbers::log2e_v<float>;
      unit().mode = {scale > 0.0F ? unit().unmasked : StepRange{}, scale};
    }
    ptx::sync_block();
  }

  // Keys. One warp after another finds the rows of a step's keys, a key a lane, a step before the rows are copied;
  // another step before, it has issued copies of the keys' entries in the page table or index list.

  /// Returns whether this warp finds the rows of step n + 1 while rows of step n are copied.
  MLA_DEVICE static bool finds_after(uint32_t n) { return warp() == static_cast<int>(n % Config::kWarps); }

  /// Returns where the entry of the lane's key of step n lies. At a unit's begin the entries of as many steps are there
  /// as rows are issued ahead, and one more.
  MLA_DEVICE int32_t& entry(uint32_t n) const {
    return as<int32_t>(memory_ + Config::kEntryOffset)[n % Config::kEntryPlaces * Config::kKeys + lane()];
  }
  MLA_DEVICE KeptPlace<Config>& place(uint32_t n, int key) const {
    return as<KeptPlace<Config>>(memory_ + Config::kPlaceOffset)[static_cast<int>(n % 2) * Config::kKeys + key];
  }

  /// Issues the copies of the entries of step n, all lanes of a warp together.
  MLA_DEVICE void copy_entries(uint32_t n) const {
    if (!has_step(n)) return;
    const int32_t* from = entry_of(args_, unit().keys, first_key(n) + lane());
    ptx::cp_async_4(ptx::shared_address(&entry(n)), from, from != nullptr);
  }

  /// Finds the rows of step n from the entries that this warp has copied.
  MLA_DEVICE void find_rows(uint32_t n) const {
    if (!has_step(n)) return;
    const int32_t key = first_key(n) + lane();
    const bool listed = entry_of(args_, unit().keys, key) != nullptr;
    const KeptPlace<Config> found = kept_place<Config>(pool(n), find_row(args_, pool(n), key, listed ? entry(n) : -1));
    place(n, lane()) = found;
    const uint32_t valid = ptx::ballot(found.ckv != nullptr);
    if (lane() == 0) unit().valid[n % 8] = valid;
  }
  /// Return which keys of step n are valid, a bit for each, and which of those that `asked` has bits of are valid and
  /// visible to a row of queries.
  MLA_DEVICE uint32_t valid(uint32_t n) const { return unit().valid[n % 8]; }
  MLA_DEVICE uint32_t visible_keys(const RowScores& row, uint32_t n, uint32_t asked) const {
    return static_cast<uint32_t>(row.visible_keys(first_key(n), asked & valid(n)));
  }
  static_assert(Config::kKeys <= kWarpSize);
  static constexpr uint32_t kAllKeys = ~0U >> (32 - Config::kKeys);

  /// Issues the warp's rows of the first kSteps steps by issue(n), and finds the rows of the step behind them. As many
  /// warps load the entries of a step each, all at the same time.
  template <int kSteps, class Issue>
  MLA_DEVICE void start_keys(uint32_t first, const Issue& issue) const {
    static_assert(kSteps < Config::kWarps && kSteps < Config::kEntryPlaces);
    if (warp() <= kSteps) {
      copy_entries(first + static_cast<uint32_t>(warp()));
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
    }
    MLA_NO_UNROLL
    for (int i = 0; i <= kSteps; ++i) {
      const uint32_t n = first + static_cast<uint32_t>(i);
      if (warp() == i) find_rows(n);
      ptx::sync_block();
      if (i == kSteps) break;
      issue(n);
    }
    // The first step that the loop copies finds rows of the step behind it.
    if (finds_after(first + kSteps)) copy_entries(first + kSteps + 1);
    ptx::cp_async_commit();
    ptx::cp_async_commit();
  }

  /// Commits the entries that this warp needs a step later, if it is its turn.
  MLA_DEVICE void commit_entries(uint32_t n) const {
    if (finds_after(n + 1)) copy_entries(n + 2);
    ptx::cp_async_commit();
  }

  /// Waits until the tile of step n is empty. Places are read and written behind this wait: it says that every warp has
  /// read those of the step before and written those of this one.
  MLA_DEVICE void wait_for_tile(uint32_t n) const {
    if (n >= Config::kTiles) ptx::mbarrier_wait(kv_empty(n), parity(n - Config::kTiles));
  }

  /// Says that the warp is done with the tile of step n.
  MLA_DEVICE void leave_tile(uint32_t n) const {
    ptx::sync_warp();
    if (lane() == 0) ptx::mbarrier_arrive(kv_empty(n));
  }

  /// Issues the copies of the warp's rows of step n to their tile: copy(place) does so for a row. `finds` says whether
  /// the warp also takes its turn in loading entries.
  template <class Copy>
  MLA_DEVICE void copy_rows(uint32_t n, bool finds, const Copy& copy) const {
    // The entries that this warp has copied have landed. Where rows are several steps ahead, waiting here would wait
    // for these rows too.
    if constexpr (Config::kLead == 1) ptx::cp_async_wait<1>();
    wait_for_tile(n);
    if (finds) commit_entries(n);
    copy(place(n, Keys::lane_key()));
    ptx::cp_async_commit();
  }
  /// Finds the rows of the step behind step n, whose copies were issued, if it is the warp's turn.
  MLA_DEVICE void find_rows_after(uint32_t n) const {
    if (!finds_after(n)) return;
    if constexpr (Config::kLead != 1) ptx::cp_async_wait<3>();  // since then rows, entries and rows were committed
    find_rows(n + 1);
  }

  /// Does both for rows that are multiplied as they land.
  template <class Copy>
  MLA_DEVICE void fill_by_copies(uint32_t n, bool finds, const Copy& copy) const {
    copy_rows(n, finds, copy);
    ptx::mbarrier_arrive_after_copies(kv_full(n));
    if (finds) find_rows_after(n);
    ptx::sync_warp();
    if (lane() == 0) ptx::mbarrier_arrive(kv_full(n));
  }

  /// A tile can be filled when all warps have left the values of the step before. One group does it at the begin of a
  /// step. Of two groups, group 1 leaves them when group 0 has done its softmax.
  MLA_DEVICE static bool fills_first() { return Config::kGroups == 1 || Config::kLead == 0 || group() == 1; }

  // The end of a segment.

  /// Writes what is known of the rows at the end, and stores the factors of their outputs, times `scale`, in the rows'
  /// places.
  MLA_DEVICE void finish_rows(float scale) const {
    ptx::sync_block();  // nobody reads the tiles any more
    if (const int r = thread(); r < Config::kRows) {
      const RowEnd<Config> end(args_, unit(), r, row_states()[r]);
      const float factor = end.output_factor();
      row_factors()[r] = factor == 0.0F ? 0.0F : factor * scale;  // a row without keys asks nothing of the scale
      end.store_stats(args_);
    }
    ptx::sync_block();
  }

  const cuda::AbsorbedArgs& args_;
  std::byte* const memory_;
  const ptx::SharedAddress shared_;
};

}  // namespace mla::MLA_CUDA_NAMESPACE
