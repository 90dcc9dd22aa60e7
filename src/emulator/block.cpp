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
/// Of one thread. Far more than a wait within a block can take.
constexpr int64_t kMaxPolls = 1 << 18;

uint64_t mix(uint64_t x) {  // splitmix64
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

bool Block::run(const Launch& launch, int64_t block) {
  launch_ = launch;
  fault_.clear();
  if (!stacks_.reserve(launch.threads)) {
    record("no memory for the stacks of its threads");
    return false;
  }
  random_.seed(launch.seed ^ mix(static_cast<uint64_t>(block)));
  adopt_host(host_);
  start(block);
  Block* const outer_block = std::exchange(current_block, this);
  ThreadView* const outer_thread = current_thread;
  current_ = next_thread();
  switch_fiber(host_, current().fiber);
  current_block = outer_block;
  current_thread = outer_thread;
  unpoison(arena_, kArenaBytes);
  ++counters_.blocks;
  if (!fault_.empty()) abandoned_ = true;
  return fault_.empty();
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
  // A warp may run far ahead of the others, or keep step with them.
  constexpr uint32_t kSwitchMasks[] = {0, 0x3F, 0x3};
  switch_mask_ = kSwitchMasks[random_.next() % 3];
  current_ = static_cast<int32_t>(random_.next() % static_cast<uint32_t>(num_threads));
}

void Block::thread_main(boost::context::detail::transfer_t transfer) {
  finish_switch(transfer, nullptr);
  // The fiber serves one thread of a block after another, perhaps on different host threads: `block` stays the same.
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
  switch_fiber(self.fiber, host_);
}

void Block::maybe_yield() {
  if ((random_.next() & 3U) != 0) return;
  const int32_t self = current_, next = next_thread(false);
  current_ = next;
  if (next != self) switch_fiber(threads_[static_cast<size_t>(self)].fiber, current().fiber);
}

int32_t Block::wait_for_copies() {
  int32_t next = -1;
  while (next < 0) {
    const bool bulk_first = arrivals_.empty() || (!bulk_copies_.empty() && (random_.next() & 1U) != 0);
    if (bulk_first ? !land_some_bulk_copy() && !land_copies_of_some_arrival()
                   : !land_copies_of_some_arrival() && !land_some_bulk_copy())
      break;
    next = next_thread();
  }
  if (next < 0) {
    record_waits("deadlock", 0, launch_.threads - 1);
    leave();
  }
  return next;
}

void Block::fail_diverged() {
  const int32_t first = current_ / kWarpSize * kWarpSize;
  record_waits("the threads of a warp diverged", first, first + kWarpSize - 1);
  leave();
}

void Block::leave() {
  switch_fiber(current().fiber, host_);
  __builtin_unreachable();  // abandoned
}

void Block::poll(Site site) {
  Thread& self = current();
  if (++self.polls > kMaxPolls)
    fail(
        "load_acquire was called hundreds of thousands of times: blocks may run one after another, and cannot wait for "
        "each other",
        {}, site);
  // The thread stays ready, so this only gives the others a turn.
  const int32_t index = current_;
  const int32_t next = next_thread(false);
  current_ = next;
  if (next != index) switch_fiber(self.fiber, current().fiber);
}

// ---- Collectives and barriers ------------------------------------------------------------------------------------

bool Block::arrive_at_barrier(uint32_t id, uint32_t count, bool waits) {
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
  if (waits) barrier.waiting |= 1U << warp;
  if (barrier.arrived < barrier.count) return !waits;
  const uint32_t waiting = barrier.waiting & ~(1U << warp);
  barrier = {};
  for (uint32_t rest = waiting; rest != 0; rest &= rest - 1) make_warp_ready(std::countr_zero(rest));
  return true;
}

}  // namespace mla::emulator
