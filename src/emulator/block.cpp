// SPDX-License-Identifier: Apache-2.0
#include "emulator/block.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <utility>

#include "emulator/sanitizers.h"

namespace mla::emulator {

thread_local constinit ThreadView* current_thread = nullptr;
thread_local constinit Block* current_block = nullptr;

namespace {

constexpr size_t kZoneBytes = 64 * 1024;
constexpr size_t kArenaBytes = kMaxSharedBytes + 2 * kZoneBytes;
/// One thread may poll this often, which is far above what a wait within a block can take.
constexpr int64_t kMaxPolls = 1 << 18;

uint64_t mix(uint64_t x) {  // the finalizer of splitmix64
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

}  // namespace

void Random::seed(uint64_t value) { state_ = mix(value) | 1; }

Block::Block() : threads_(kMaxThreads), writes_(std::make_unique<SharedWrites>()) {
  void* memory = mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  arena_ = static_cast<std::byte*>(memory);
  shared_ = arena_ + kZoneBytes;
}

Block::~Block() {
  for (Thread& thread : threads_) forget_fiber(thread.fiber);
  unpoison(arena_, kArenaBytes);
  munmap(arena_, kArenaBytes);
}

const std::string* Block::run(std::span<Block* const> cluster, const Launch& launch, int64_t first) {
  Fiber& host = cluster[0]->own_host_;
  adopt_host(host);
  for (size_t i = 0; i < cluster.size(); ++i) {
    Block& block = *cluster[i];
    block.launch_ = launch;
    block.fault_.clear();
    block.cluster_ = cluster;
    block.host_ = &host;
    if (!block.stacks_.reserve(launch.threads)) {
      block.record("no memory for the stacks of its threads");
      return &block.fault_;
    }
    block.random_.seed(launch.seed ^ mix(static_cast<uint64_t>(first) + i));
    block.start(first + static_cast<int64_t>(i));
  }
  Block& begins = *cluster[cluster.size() == 1 ? 0 : cluster[0]->random_.next() % cluster.size()];
  Block* const outer_block = std::exchange(current_block, &begins);
  ThreadView* const outer_thread = current_thread;
  begins.current_ = begins.next_thread();
  switch_fiber(host, begins.current().fiber);
  current_block = outer_block;
  current_thread = outer_thread;
  const std::string* fault = nullptr;
  for (Block* block : cluster) {
    unpoison(block->arena_, kArenaBytes);
    ++block->counters_.blocks;
    if (!block->fault_.empty()) fault = &block->fault_;
  }
  for (Block* block : cluster) block->abandoned_ = block->abandoned_ || fault != nullptr;
  return fault;
}

void Block::start(int64_t block) {
  const int32_t num_threads = launch_.threads;
  const auto shared_bytes = static_cast<uint32_t>(launch_.shared_bytes);
  std::memset(shared_, 0xFF, shared_bytes);
  poison(arena_, kZoneBytes);
  poison(shared_ + shared_bytes, kArenaBytes - kZoneBytes - shared_bytes);

  ThreadView view;
  view.grid_x = launch_.grid_x, view.grid_y = launch_.grid_y, view.grid_z = launch_.grid_z;
  view.block_x = static_cast<int32_t>(block % launch_.grid_x);
  view.block_y = static_cast<int32_t>(block / launch_.grid_x % launch_.grid_y);
  view.block_z = static_cast<int32_t>(block / launch_.grid_x / launch_.grid_y);
  view.cluster_rank = view.block_x % launch_.cluster;
  view.shared_bytes = shared_bytes;
  view.shared = shared_;
  view.writes = writes_.get();
  writes_->time = 1;
  std::fill_n(writes_->last, (shared_bytes + SharedWrites::kUnit - 1) / SharedWrites::kUnit, SharedWrites::Write{});
  if (abandoned_ || started_threads_ < num_threads) {
    for (int32_t i = 0; i < num_threads; ++i) stacks_.restart(threads_[static_cast<size_t>(i)].fiber, i, thread_main);
    started_threads_ = num_threads;
    abandoned_ = false;
  }
  for (int32_t i = 0; i < num_threads; ++i) {
    Thread& thread = threads_[static_cast<size_t>(i)];
    thread.fiber.view = view;
    thread.fiber.view.thread = i;
    thread.wait = Wait::kNothing;
    thread.polls = 0;
    thread.copies.clear();
    thread.group_ends.clear();
    thread.next_copy = thread.next_group = 0;
    thread.forgotten_copies = 0;
    thread.proxy_fence = 0;
  }
  ended_ = 0;
  ready_warps_ = 0;
  for (int32_t w = 0; w < num_threads / kWarpSize; ++w) {
    Warp& warp = warps_[w];
    warp.live = kFullWarp;
    warp.arrived = 0;
    warp.diverged = false;
    warp.cursor = kWarpSize;
    warp.wgmmas.clear();
    warp.wgmma_groups.clear();
    warp.accumulators.clear();
    warp.wgmma_fenced = false;
    warp.issued_wgmmas = 0;
    make_warp_ready(w);
  }
  std::fill(std::begin(barriers_), std::end(barriers_), Barrier{});
  mbarriers_.clear();
  for (Warpgroup& group : warpgroups_) {
    group.issued.clear();
    group.proxy_fence = 0;
  }
  bulk_copies_.clear();
  arrivals_.clear();
  cluster_arrivals_ = 0;
  has_synced_memory_ = false;
  // The mask decides whether a warp runs far ahead of the others or keeps step with them.
  constexpr uint32_t kSwitchMasks[] = {0, 0x3F, 0x3};
  switch_mask_ = kSwitchMasks[random_.next() % 3];
  current_ = static_cast<int32_t>(random_.next() % static_cast<uint32_t>(num_threads));
}

void Block::thread_main(StackPlace& from) {
  finish_switch(from, nullptr);
  // The fiber runs a thread of one launch's block after another, perhaps on different host threads. `block` stays the
  // same.
  Block& block = running_block();
  for (;;) {
    bool threw = false;
    try {
      block.launch_.entry(block.launch_.params);
    } catch (const WaitsForEver&) {
    } catch (...) {
      threw = true;
    }
    if (threw) block.fail("the kernel threw an exception", {}, {});
    block.end_thread();
  }
}

// ---- Whose turn it is --------------------------------------------------------------------------------------------

void Block::end_thread() {
  Thread& self = current();
  self.wait = Wait::kEnded;
  Warp& warp = current_warp();
  warp.live &= ~(1U << (current_ % kWarpSize));
  if (warp.arrived != 0) warp.diverged = true;
  if (++ended_ < launch_.threads) {
    block_current();
    return;
  }
  if (!bulk_copies_.empty()) record("the block ended while bulk copies were on their way into its shared memory");
  if (!arrivals_.empty()) record("the block ended before all its cp.async had reported to their mbarriers");
  for (const Block* block : cluster_)
    if (block->copies_from(*this))
      record("the block ended while bulk copies were on their way out of its shared memory");
  warp.ready = ready_warps_ = 0;
  const bool all_ended =
      std::all_of(cluster_.begin(), cluster_.end(), [&](Block* block) { return block->ended_ == launch_.threads; });
  if (!all_ended && fault_.empty()) {
    Block& block = find_runnable();
    return go_on(block, block.next_thread());
  }
  switch_fiber(self.fiber, *host_);
}

void Block::go_on(Block& block, int32_t thread) {
  Fiber& self = current().fiber;
  current_block = &block;
  block.current_ = thread;
  Fiber& next = block.current().fiber;
  if (&next != &self) switch_fiber(self, next);
}

bool Block::copies_from(const Block& other) const {
  return &other != this && std::any_of(bulk_copies_.begin(), bulk_copies_.end(), [&](const PendingCopy& copy) {
    return copy.from >= other.arena_ && copy.from < other.arena_ + kArenaBytes;
  });
}

void Block::maybe_yield() {
  if ((random_.next() & 3U) != 0) return;
  Block& block = *cluster_[cluster_.size() == 1 ? 0 : random_.next() % cluster_.size()];
  if (block.ready_warps_ != 0) go_on(block, block.next_thread(false));
}

Block& Block::find_runnable() {
  // It is random whether copies of this block land first, or other blocks run first.
  const bool others_first = cluster_.size() > 1 && (random_.next() & 1U) != 0;
  while (!others_first && land_something())
    if (ready_warps_ != 0) return *this;
  const uint32_t shift = random_.next();
  for (const bool may_land : {false, true})
    for (size_t i = 0; i < cluster_.size(); ++i) {
      Block& block = *cluster_[(shift + i) % cluster_.size()];
      while (may_land && block.ready_warps_ == 0 && block.land_something()) {
      }
      if (block.ready_warps_ != 0) return block;
    }
  record_deadlock();
  leave();
}

void Block::fail_diverged() {
  const int32_t first = current_ / kWarpSize * kWarpSize;
  record_waits("the threads of a warp diverged", first, first + kWarpSize - 1);
  leave();
}

void Block::leave() {
  switch_fiber(current().fiber, *host_);
  __builtin_unreachable();  // the ended thread's fiber is never resumed
}

void Block::poll(Site site) {
  Thread& self = current();
  if (++self.polls > kMaxPolls)
    fail(
        "load_acquire was called hundreds of thousands of times: blocks may run one after another, and cannot wait for "
        "each other",
        {}, site);
  // The thread stays ready: it only gives the others a turn.
  const int32_t index = current_;
  const int32_t next = next_thread(false);
  current_ = next;
  if (next != index) switch_fiber(self.fiber, current().fiber);
}

void Block::sync_cluster(Site site, bool releases) {
  has_synced_memory_ = has_synced_memory_ || releases;
  Block& first = *cluster_[0];
  Thread& self = current();
  if (++first.cluster_arrivals_ < static_cast<int32_t>(cluster_.size()) * launch_.threads) {
    self.wait = Wait::kCluster;
    self.site = site;
    block_current();
    self.wait = Wait::kNothing;
    return;
  }
  first.cluster_arrivals_ = 0;
  for (Block* block : cluster_)
    for (int32_t i = 0; i < launch_.threads; ++i)
      if (block->thread(i).wait == Wait::kCluster) block->make_ready(i);
}

// ---- Collectives and barriers ------------------------------------------------------------------------------------

bool Block::arrive_at_barrier(uint32_t id, uint32_t count, bool waits, bool predicate) {
  const int32_t warp = current_ / kWarpSize;
  const Site site = current().site;
  if (id >= kNumBarriers) fail("barrier {}: a block has barriers 0 to 15", {id}, site);
  if (count == 0 || count % kWarpSize != 0 || count > static_cast<uint32_t>(launch_.threads))
    fail("barrier {} for {} threads: expected a multiple of 32, at most the block's {}", {id, count, launch_.threads},
         site);
  Barrier& barrier = barriers_[id];
  if (barrier.arrived != 0 && barrier.count != static_cast<int32_t>(count))
    fail("barrier {} for {} threads: others came to it with a count of {}", {id, count, barrier.count}, site);
  if ((barrier.warps >> warp & 1U) != 0) fail("barrier {}: a warp came to it twice in one phase", {id}, site);
  ++counters_.barriers;
  barrier.count = static_cast<int32_t>(count);
  barrier.arrived += kWarpSize;
  barrier.warps |= 1U << warp;
  barrier.any |= predicate;
  if (waits) barrier.waiting |= 1U << warp;
  if (barrier.arrived < barrier.count) return !waits;
  for (uint32_t rest = barrier.waiting; rest != 0; rest &= rest - 1)
    warps_[static_cast<size_t>(std::countr_zero(rest))].barrier_any = barrier.any;
  const uint32_t waiting = barrier.waiting & ~(1U << warp);
  barrier = {};
  for (uint32_t rest = waiting; rest != 0; rest &= rest - 1) make_warp_ready(std::countr_zero(rest));
  return true;
}

}  // namespace mla::emulator
