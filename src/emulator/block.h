// SPDX-License-Identifier: Apache-2.0
// A Block is one block of a launch while it runs: its threads, warps, barriers and shared memory. A host thread runs
// one cluster at a time, all of its blocks by turns. Blocks are reused, since their stacks and shared memory cost more
// than a small kernel.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "emulator/emulator.h"
#include "emulator/fiber.h"

namespace mla::emulator {

inline constexpr int32_t kWarpSize = 32;
inline constexpr uint32_t kFullWarp = 0xFFFFFFFFU;
inline constexpr int32_t kWarpgroupSize = 128;
inline constexpr int32_t kMaxThreads = 1024;
inline constexpr int32_t kNumBarriers = 16;
inline constexpr int32_t kMaxSharedBytes = 256 * 1024;
inline constexpr int32_t kMaxCluster = 8;  // blocks of a cluster that every GPU with clusters grants

/// Is thrown through a kernel by a thread that waits for a previous grid which does not end.
struct WaitsForEver {};

/// Names what a thread waits at: nothing, or an instruction.
enum class Wait : uint8_t {
  kNothing,
  kEnded,
  kShuffle,
  kVote,
  kSyncWarp,
  kLdmatrix,
  kStmatrix,
  kMma,
  kWgmma,
  kBarrierSync,
  kBarrierArrive,
  kMbarrier,
  kCluster,
};

/// Generates random numbers by xorshift64*.
class Random {
 public:
  void seed(uint64_t value);
  uint32_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return static_cast<uint32_t>((state_ * 0x2545F4914F6CDD1DULL) >> 32);
  }

 private:
  uint64_t state_ = 1;
};

/// Describes a copy that was issued and has not landed.
struct PendingCopy {
  uint32_t to;
  uint32_t bytes;
  const void* from;  // null if zeros are written
  uint32_t barrier;  // address of the mbarrier, for bulk copies
  // For bulk copies from a block of the cluster: the writes of that block's shared memory, the offset of the source in
  // it, and the time of issue.
  const SharedWrites* source = nullptr;
  uint32_t source_offset = 0, issued = 0;
  // For boxes of a tensor, heads of rows of 128 bytes, which are swizzled on their way: of `valid_rows` of each of
  // `valid_heads`, `valid_bytes` are read; all else becomes zero.
  int32_t heads = 0, rows = 0, valid_heads = 0, valid_rows = 0;
  uint32_t valid_bytes = 0;
  int64_t row_stride = 0, head_stride = 0;
};

/// Describes a pending cp.async.mbarrier.arrive, which arrives once the thread's copies before `end` have landed.
struct PendingArrival {
  uint32_t barrier;
  int32_t thread;
  uint64_t end;
  Site site;
};

/// Describes a warp's wgmma.mma_async that was issued and not yet computed.
struct PendingWgmma {
  Wgmma what;  // the arguments of lane 0
  uint32_t time;
  Site site;
  const uint32_t* a_registers[kWarpSize];
  uint32_t a[kWarpSize][4];  // values of the registers of A at the time of issue
};

/// Holds the values that a warp's accumulators will have once its pending multiplications are computed.
struct WarpgroupAccumulator {
  float* registers[kWarpSize] = {};
  std::vector<float> values;  // [16, columns]
  int32_t columns = 0;
  int32_t pending = 0;
};

struct Thread {
  Fiber fiber;
  Wait wait = Wait::kNothing;
  Site site{};
  uint32_t wait_a = 0, wait_b = 0;  // what it waits for: barrier and count, or address and parity
  int64_t polls = 0;
  std::vector<PendingCopy> copies;       // cp.async in order of issue
  std::vector<uint32_t> group_ends;      // number of copies at each commit
  size_t next_copy = 0, next_group = 0;  // first copy and first group in flight
  uint64_t forgotten_copies = 0;         // copies that have landed and are no longer in `copies`
  uint32_t proxy_fence = 0;              // time of the thread's latest fence_async_proxy()
};

class Block;

/// Computes a warp's collective; the last lane to arrive calls it with the arguments of all lanes. If it returns false,
/// the lanes stay asleep.
using CollectiveFunction = bool (*)(Block& block, void* const* lanes);

struct Warp {
  uint32_t live = 0;     // lanes that have not ended
  uint32_t ready = 0;    // lanes that can run
  uint32_t arrived = 0;  // lanes at the collective in progress
  Wait wait = Wait::kNothing;
  Site site{};
  bool diverged = false;     // lanes wait for different things, which is reported once none of them can run
  bool barrier_any = false;  // what the last barrier that the warp waited for said of its threads' predicates
  uint32_t order_mul = 1, order_xor = 0, cursor = 0;
  void* lanes[kWarpSize] = {};
  std::vector<PendingWgmma> wgmmas;
  std::vector<size_t> wgmma_groups;  // number of pending wgmmas at each commit
  std::vector<WarpgroupAccumulator> accumulators;
  bool wgmma_fenced = false;
  size_t issued_wgmmas = 0;  // how many of Warpgroup::issued this warp has issued
};

struct Warpgroup {
  std::vector<Wgmma> issued;  // wgmmas of the warp that is ahead, until all warps have issued them
  uint32_t proxy_fence = 0;   // time of the latest fence_async_proxy() of any of its threads
};

struct Barrier {
  int32_t count = 0;     // threads that the barrier waits for
  int32_t arrived = 0;   // threads that have arrived
  uint32_t warps = 0;    // warps that have arrived, as bits
  uint32_t waiting = 0;  // those of these warps that wait
  bool any = false;      // some thread that has arrived brought a predicate that holds
};

struct Mbarrier {
  uint32_t address;
  uint32_t count;
  uint32_t pending;       // arrivals until the phase ends
  int64_t pending_bytes;  // bytes expected and not yet landed
  uint32_t phase;         // parity of the current phase
  bool fenced;
  int32_t owner;                 // thread that initialized it
  std::vector<int32_t> waiting;  // threads that wait
};

class Block {
 public:
  Block();
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  /// Runs blocks first, first + 1, ... of the launch, as many as there are in `cluster`, on the calling host thread.
  /// Returns the fault, or null.
  static const std::string* run(std::span<Block* const> cluster, const Launch& launch, int64_t first);
  const Counters& counters() const { return counters_; }
  void clear_counters() { counters_ = {}; }

  // The running fiber calls the functions below.
  Thread& current() { return threads_[static_cast<size_t>(current_)]; }
  int32_t current_index() const { return current_; }
  int32_t num_threads() const { return launch_.threads; }
  Warp& current_warp() { return warps_[static_cast<size_t>(current_ / kWarpSize)]; }
  Warp& warp(int32_t index) { return warps_[index]; }
  Warpgroup& current_warpgroup() { return warpgroups_[static_cast<size_t>(current_ / kWarpgroupSize)]; }
  Thread& thread(int32_t index) { return threads_[static_cast<size_t>(index)]; }
  SharedWrites& shared_writes() { return *writes_; }

  void collective(Wait kind, CollectiveFunction function, void* lane, Site site);
  /// Is called by the last lane of a warp at bar.sync or bar.arrive. Returns whether the warp goes on.
  bool arrive_at_barrier(uint32_t barrier, uint32_t count, bool waits, bool predicate);
  void wait_for_mbarrier(uint32_t address, uint32_t parity, Site site);
  /// Now and then lets another thread run. It is called after an instruction that may have made other threads ready.
  void maybe_yield();
  void poll(Site site);

  Mbarrier& find_mbarrier(uint32_t address, Site site);
  void init_mbarrier(uint32_t address, uint32_t count, Site site);
  void fence_mbarriers();
  void arrive(Mbarrier& barrier, uint32_t arrivals, int64_t expected_bytes, Site site);
  /// Issues a bulk copy from global memory, or from another block's shared memory, into this block.
  void add_bulk_copy(const PendingCopy& copy, Site site);
  /// Returns a bulk copy that reads this block's shared memory there. Faults unless what was written there has been
  /// fenced.
  PendingCopy bulk_copy_from(uint32_t from, uint32_t bytes, Site site);
  void add_arrival(const PendingArrival& arrival) { arrivals_.push_back(arrival); }
  /// Returns the block of the cluster that a mapped address points into, and turns `address` into that block's own.
  Block& block_of(uint32_t& address, Site site);
  /// `releases` says that stores before the barrier are seen behind it.
  void sync_cluster(Site site, bool releases);
  /// Loads from the shared memory of a block of the cluster, at a mapped address.
  void load_in_cluster(uint32_t from, void* to, uint32_t bytes, Site site);
  /// Lands a thread's copies before `end`, an index into Thread::copies.
  void land_copies(int32_t thread, size_t end);
  /// Removes landed copies from the thread's lists.
  static void forget_landed(Thread& thread);

  /// Ends the block with a fault. `text` says what is wrong, with {} for each number; the running thread and `site` are
  /// added.
  [[noreturn]] void fail(std::string_view text, std::initializer_list<int64_t> numbers, Site site);

  Counters& counters_of_block() { return counters_; }
  bool previous_grid_ends() const { return launch_.previous_grid_ends; }
  bool e4m3_sums_in_f32() const { return launch_.e4m3_sums_in_f32; }

 private:
  static void thread_main(StackPlace& from);

  void start(int64_t block);
  void end_thread();
  /// Switches from the running fiber to a thread of this block, or of another block of the cluster.
  void go_on(Block& block, int32_t thread);
  void block_current();
  int32_t next_lane(Warp& warp);
  int32_t next_thread(bool may_stay = true);
  bool land_some_bulk_copy();
  bool land_copies_of_some_arrival();
  bool land_something();
  bool copies_from(const Block& other) const;
  void land(const PendingCopy& copy);
  void land_box(const PendingCopy& copy);
  std::byte* memory_at(uint32_t address, uint32_t bytes, uint32_t alignment, Site site);
  /// Is called when no thread of the block can run. Returns another block that can run, or this one once copies have
  /// landed. Ends the cluster if no thread can ever run again.
  Block& find_runnable();
  [[noreturn]] void fail_diverged();
  void complete_phase_if_due(Mbarrier& barrier);
  void make_ready(int32_t thread);
  void make_warp_ready(int32_t warp);
  /// These set fault_ to the kernel, the block and `text`. They return before the fiber is left, since its stack may be
  /// abandoned and what lies on it is then never destroyed.
  void record(const std::string& text);
  void record_at(std::string_view text, std::initializer_list<int64_t> numbers, Site site);
  /// Records which of threads [first, last] wait, and where.
  void record_waits(std::string_view what, int32_t first, int32_t last);
  /// Records the waits of all blocks of the cluster.
  void record_deadlock();
  std::string wait_text(const Thread& thread) const;
  [[noreturn]] void leave();

  Launch launch_;
  std::vector<Thread> threads_;
  Stacks stacks_;
  Warp warps_[kMaxThreads / kWarpSize];
  Warpgroup warpgroups_[kMaxThreads / kWarpgroupSize];
  std::unique_ptr<SharedWrites> writes_;
  uint32_t ready_warps_ = 0;
  Barrier barriers_[kNumBarriers];
  std::vector<Mbarrier> mbarriers_;
  std::vector<PendingCopy> bulk_copies_;
  std::vector<PendingArrival> arrivals_;
  std::span<Block* const> cluster_;  // all blocks of the cluster, this one among them
  int32_t cluster_arrivals_ = 0;     // threads at the cluster's barrier; counted in the cluster's first block
  bool has_synced_memory_ = false;   // a barrier of the cluster has ordered stores before later loads
  Fiber own_host_;
  Fiber* host_ = nullptr;  // that of the cluster's first block
  Random random_;
  uint32_t switch_mask_ = 0;  // says how often another warp gets a turn; 0: only when this one cannot go on
  int32_t current_ = 0;
  int32_t ended_ = 0;
  int32_t started_threads_ = 0;  // threads whose fibers wait for their next block
  bool abandoned_ = true;
  std::string fault_;
  Counters counters_;
  std::byte* arena_ = nullptr;  // shared memory with a guard zone on either side
  std::byte* shared_ = nullptr;
};

/// Points at the block that the host thread is running.
extern thread_local constinit Block* current_block;
inline Block& running_block() { return *current_block; }

// ---- The path of every instruction that waits ---------------------------------------------------------------------

[[gnu::always_inline]] inline void Block::make_ready(int32_t thread) {
  warps_[thread / kWarpSize].ready |= 1U << (thread % kWarpSize);
  ready_warps_ |= 1U << (thread / kWarpSize);
}

[[gnu::always_inline]] inline void Block::make_warp_ready(int32_t warp) {
  warps_[warp].ready = warps_[warp].live;
  ready_warps_ |= 1U << warp;
}

[[gnu::always_inline]] inline int32_t Block::next_lane(Warp& warp) {
  for (;;) {
    if (warp.cursor == kWarpSize) {  // an odd factor and an exclusive or give a new order of the lanes
      const uint32_t r = random_.next();
      warp.order_mul = (r & 31U) | 1U;
      warp.order_xor = (r >> 8) & 31U;
      warp.cursor = 0;
    }
    const uint32_t lane = (warp.cursor++ * warp.order_mul & 31U) ^ warp.order_xor;
    if ((warp.ready >> lane & 1U) != 0) return static_cast<int32_t>(lane);
  }
}

/// Returns the thread to run next; -1 if none can run.
[[gnu::always_inline]] inline int32_t Block::next_thread(bool may_stay) {
  if (ready_warps_ == 0) return -1;
  int32_t warp = current_ / kWarpSize;
  const bool stay =
      may_stay && (ready_warps_ >> warp & 1U) != 0 && (switch_mask_ == 0 || (random_.next() & switch_mask_) != 0);
  if (!stay) {
    const int shift = static_cast<int>(random_.next() & 31U);
    warp = (std::countr_zero(std::rotr(ready_warps_, shift)) + shift) & 31;
  }
  return warp * kWarpSize + next_lane(warps_[warp]);
}

/// Leaves the running fiber, which cannot go on or has ended.
[[gnu::always_inline]] inline void Block::block_current() {
  const int32_t self = current_;
  Warp& warp = current_warp();
  warp.ready &= ~(1U << (self % kWarpSize));
  if (warp.ready == 0) {
    ready_warps_ &= ~(1U << (self / kWarpSize));
    if (warp.diverged) [[unlikely]]
      fail_diverged();
  }
  const int32_t next = next_thread();
  if (next < 0) [[unlikely]] {
    Block& block = find_runnable();
    return go_on(block, block.next_thread());
  }
  current_ = next;
  if (next != self) switch_fiber(threads_[static_cast<size_t>(self)].fiber, current().fiber);
}

[[gnu::always_inline]] inline void Block::collective(Wait kind, CollectiveFunction function, void* lane, Site site) {
  Warp& warp = current_warp();
  const uint32_t bit = 1U << (current_ % kWarpSize);
  if (warp.arrived == 0) {
    warp.wait = kind;
    warp.site = site;
  } else if (kind != warp.wait || site != warp.site) {
    warp.diverged = true;
  }
  if (warp.live != kFullWarp) warp.diverged = true;
  warp.arrived |= bit;
  warp.lanes[current_ % kWarpSize] = lane;
  Thread& self = current();
  self.wait = kind;
  self.site = site;
  if (warp.arrived == kFullWarp && !warp.diverged) {
    warp.arrived = 0;
    if (function(*this, warp.lanes)) {
      make_warp_ready(current_ / kWarpSize);
      self.wait = Wait::kNothing;
      return;
    }
  }
  block_current();
  self.wait = Wait::kNothing;
}

}  // namespace mla::emulator
