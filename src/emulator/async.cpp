// SPDX-License-Identifier: Apache-2.0
// This file has asynchronous copies and the barriers that count their bytes. A copy overwrites its destination with NaN
// as soon as it is issued, and reads its source as late as the waits allow.
#include <algorithm>
#include <cstring>

#include "emulator/block.h"

namespace mla::emulator {
namespace {

/// The 8 bytes of a barrier hold this mark, so that a stray store into the barrier is noticed.
constexpr uint64_t kMbarrierMark = 0x6D62617272696572ULL;

}  // namespace

/// Chunks of 16 bytes of a row change places by bits of the row's address, as wgmma reads them with Swizzle::k128.
void Block::land_box(const PendingCopy& copy) {
  constexpr uint32_t kRowBytes = 128, kChunkBytes = 16;
  for (int32_t i = 0; i < copy.heads * copy.rows; ++i) {
    const int32_t head = i / copy.rows, row = i % copy.rows;
    const uint32_t at = copy.to + static_cast<uint32_t>(i) * kRowBytes;
    const std::byte* const from =
        static_cast<const std::byte*>(copy.from) + row * copy.row_stride + head * copy.head_stride;
    for (uint32_t chunk = 0; chunk < kRowBytes; chunk += kChunkBytes) {
      std::byte* const to = shared_ + ((at + chunk) ^ (at / kRowBytes % 8 * kChunkBytes)) - kSharedBase;
      if (head < copy.valid_heads && row < copy.valid_rows && chunk < copy.valid_bytes)
        std::memcpy(to, from + chunk, kChunkBytes);
      else
        std::memset(to, 0, kChunkBytes);
    }
  }
}

void Block::land(const PendingCopy& copy) {
  if (copy.rows > 0) return land_box(copy);
  std::byte* const to = shared_ + (copy.to - kSharedBase);
  if (copy.from == nullptr)
    std::memset(to, 0, copy.bytes);
  else
    std::memcpy(to, copy.from, copy.bytes);
}

void Block::land_copies(int32_t index, size_t end) {
  Thread& self = thread(index);
  for (; self.next_copy < end; ++self.next_copy) {
    const PendingCopy& copy = self.copies[self.next_copy];
    land(copy);
    writes_->last[(copy.to - kSharedBase) / SharedWrites::kUnit] = {writes_->time, static_cast<uint32_t>(index) + 1};
  }
}

void Block::forget_landed(Thread& thread) {
  constexpr size_t kMany = 1024;
  if (thread.next_group != thread.group_ends.size()) return;
  thread.group_ends.clear();
  thread.next_group = 0;
  if (thread.next_copy != thread.copies.size() && thread.next_copy < kMany) return;
  thread.forgotten_copies += thread.next_copy;
  thread.copies.erase(thread.copies.begin(), thread.copies.begin() + static_cast<std::ptrdiff_t>(thread.next_copy));
  thread.next_copy = 0;
}

std::byte* Block::memory_at(uint32_t address, uint32_t bytes, uint32_t alignment, Site site) {
  // The check uses the running block's size; all blocks of a launch have the same.
  shared_pointer(address, bytes, alignment, site);
  return shared_ + (address - kSharedBase);
}

Mbarrier& Block::find_mbarrier(uint32_t address, Site site) {
  const std::byte* const memory = memory_at(address, 8, 8, site);
  for (Mbarrier& barrier : mbarriers_) {
    if (barrier.address != address) continue;
    uint64_t mark = 0;
    std::memcpy(&mark, memory, sizeof mark);
    if (mark != kMbarrierMark) running_block().fail("the mbarrier at {} was overwritten", {address}, site);
    return barrier;
  }
  running_block().fail("the mbarrier at {} is not initialized", {address}, site);
}

void Block::init_mbarrier(uint32_t address, uint32_t count, Site site) {
  std::byte* const memory = shared_pointer(address, 8, 8, site);
  if (count == 0 || count >= 1U << 20) fail("mbarrier count {}: expected 1 to {}", {count, (1 << 20) - 1}, site);
  std::memcpy(memory, &kMbarrierMark, sizeof kMbarrierMark);
  std::erase_if(mbarriers_, [&](const Mbarrier& barrier) { return barrier.address == address; });
  mbarriers_.push_back({address, count, count, 0, 0, false, current_, {}});
}

void Block::fence_mbarriers() {
  for (Mbarrier& barrier : mbarriers_) barrier.fenced = barrier.fenced || barrier.owner == current_;
}

void Block::arrive(Mbarrier& barrier, uint32_t arrivals, int64_t expected_bytes, Site site) {
  if (barrier.pending < arrivals)
    running_block().fail("the mbarrier at {} got more arrivals in one phase than its count of {}",
                         {barrier.address, barrier.count}, site);
  barrier.pending -= arrivals;
  barrier.pending_bytes += expected_bytes;
  complete_phase_if_due(barrier);
}

void Block::complete_phase_if_due(Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.pending_bytes != 0) return;
  barrier.phase ^= 1U;
  barrier.pending = barrier.count;
  for (const int32_t thread : barrier.waiting) make_ready(thread);
  barrier.waiting.clear();
}

void Block::wait_for_mbarrier(uint32_t address, uint32_t parity, Site site) {
  Thread& self = current();
  if (parity > 1) fail("mbarrier parity {}: expected 0 or 1", {parity}, site);
  Mbarrier& barrier = find_mbarrier(address, site);
  if (barrier.phase != parity) return;
  barrier.waiting.push_back(current_);
  self.wait = Wait::kMbarrier;
  self.site = site;
  self.wait_a = address;
  self.wait_b = parity;
  block_current();
  self.wait = Wait::kNothing;
}

namespace {

/// Returns whether a part of the copy's source has been written since the copy was issued. Hardware may read it at any
/// time in between.
bool is_overwritten(const PendingCopy& copy) {
  if (copy.source == nullptr) return false;
  const SharedWrites::Write* const first = &copy.source->last[copy.source_offset / SharedWrites::kUnit];
  return std::any_of(first, first + copy.bytes / SharedWrites::kUnit,
                     [&](const SharedWrites::Write& write) { return write.time >= copy.issued; });
}

}  // namespace

/// Is called when no thread can run. Lands one bulk copy that some thread waits for; returns false if there is none.
bool Block::land_some_bulk_copy() {
  const auto count = static_cast<uint32_t>(bulk_copies_.size());
  if (count == 0) return false;
  const uint32_t first = random_.next() % count;
  for (uint32_t i = 0; i < count; ++i) {
    const auto copy = bulk_copies_.begin() + (first + i) % count;
    const auto barrier = std::find_if(mbarriers_.begin(), mbarriers_.end(),
                                      [&](const Mbarrier& b) { return b.address == copy->barrier; });
    if (barrier == mbarriers_.end() || barrier->waiting.empty()) continue;
    if (is_overwritten(*copy)) {
      record("what a bulk copy reads at offset " + std::to_string(copy->source_offset) +
             " of another block's shared memory was written after it had been issued");
      running_block().leave();
    }
    land(*copy);
    barrier->pending_bytes -= copy->bytes;
    bulk_copies_.erase(copy);
    complete_phase_if_due(*barrier);
    return true;
  }
  return false;
}

/// Is called when no thread can run. Lands the cp.async of one thread before an arrival that some thread waits for;
/// returns false if there is none.
bool Block::land_copies_of_some_arrival() {
  const auto count = static_cast<uint32_t>(arrivals_.size());
  if (count == 0) return false;
  const uint32_t first = random_.next() % count;
  for (uint32_t i = 0; i < count; ++i) {
    const auto pending = arrivals_.begin() + (first + i) % count;
    const auto barrier = std::find_if(mbarriers_.begin(), mbarriers_.end(),
                                      [&](const Mbarrier& b) { return b.address == pending->barrier; });
    if (barrier == mbarriers_.end() || barrier->waiting.empty()) continue;
    const PendingArrival arrival = *pending;
    *pending = arrivals_.back();
    arrivals_.pop_back();
    Thread& thread = threads_[static_cast<size_t>(arrival.thread)];
    if (arrival.end > thread.forgotten_copies) land_copies(arrival.thread, arrival.end - thread.forgotten_copies);
    forget_landed(thread);
    arrive(*barrier, 1, 0, arrival.site);
    return true;
  }
  return false;
}

/// Is called when no thread can run. Lands copies that some thread waits for; returns false if there are none.
bool Block::land_something() {
  const bool bulk_first = (random_.next() & 1U) != 0;
  return bulk_first ? land_some_bulk_copy() || land_copies_of_some_arrival()
                    : land_copies_of_some_arrival() || land_some_bulk_copy();
}

namespace {

/// The mapped addresses of block r of the cluster begin at (r + 1) << kRankShift.
constexpr int kRankShift = 24;

}  // namespace

Block& Block::block_of(uint32_t& address, Site site) {
  const uint32_t rank = (address >> kRankShift) - 1;
  if (rank >= cluster_.size()) fail("shared address {}: expected one of the cluster's", {address}, site);
  address &= (1U << kRankShift) - 1;
  Block& block = *cluster_[rank];
  if (block.ended_ == launch_.threads) fail("access to the shared memory of a block that has ended", {}, site);
  return block;
}

void Block::load_in_cluster(uint32_t from, void* to, uint32_t bytes, Site site) {
  Block& block = block_of(from, site);
  if (!has_synced_memory_) fail("load from another block before a barrier that orders its stores", {}, site);
  std::memcpy(to, block.memory_at(from, bytes, bytes, site), bytes);
  maybe_yield();
}

void Block::add_bulk_copy(const PendingCopy& copy, Site site) {
  Block& running = running_block();
  if (copy.bytes == 0 || copy.bytes % 16 != 0)
    running.fail("bulk copy of {} bytes: expected a multiple of 16", {copy.bytes}, site);
  if (!find_mbarrier(copy.barrier, site).fenced)
    running.fail("bulk copy reports to the mbarrier at {}, whose initialization was not fenced", {copy.barrier}, site);
  std::memset(memory_at(copy.to, copy.bytes, 16, site), 0xFF, copy.bytes);
  bulk_copies_.push_back(copy);
  std::fill_n(&writes_->last[(copy.to - kSharedBase) / SharedWrites::kUnit], copy.bytes / SharedWrites::kUnit,
              SharedWrites::Write{writes_->time, SharedWrites::kBulkCopy});
  running.counters_.bulk_copy_bytes += copy.bytes;
}

PendingCopy Block::bulk_copy_from(uint32_t from, uint32_t bytes, Site site) {
  const std::byte* const source = memory_at(from, bytes, 16, site);
  for (uint32_t at = from; at < from + bytes; at += SharedWrites::kUnit) {
    const SharedWrites::Write& write = writes_->last[(at - kSharedBase) / SharedWrites::kUnit];
    if (write.writer == SharedWrites::kNobody || write.writer == SharedWrites::kBulkCopy) continue;
    const auto writer = static_cast<int32_t>(write.writer) - 1;
    if (thread(writer).proxy_fence <= write.time && current().proxy_fence <= write.time)
      fail("bulk copy reads at offset {} of shared memory what thread {} wrote, without fence_async_proxy() since",
           {at - kSharedBase, writer}, site);
  }
  return {0, bytes, source, 0, writes_.get(), from - kSharedBase, ++writes_->time};
}

// ---- Called by kernels -------------------------------------------------------------------------------------------

void copy_async(uint32_t to, const void* from, uint32_t bytes, bool valid, Site site) {
  Block& block = running_block();
  if (valid) check_aligned(from, bytes, site);
  std::memset(shared_pointer(to, bytes, bytes, site), 0xFF, bytes);
  block.current().copies.push_back({to, bytes, valid ? from : nullptr, 0});
  note_shared_store(to);
  if (valid) block.counters_of_block().async_copy_bytes += bytes;
}

void copy_async_commit() {
  Thread& self = running_block().current();
  self.group_ends.push_back(static_cast<uint32_t>(self.copies.size()));
}

void copy_async_wait(uint32_t groups_left) {
  Block& block = running_block();
  Thread& self = block.current();
  for (; self.group_ends.size() - self.next_group > groups_left; ++self.next_group)
    block.land_copies(block.current_index(), self.group_ends[self.next_group]);
  Block::forget_landed(self);
}

void mbarrier_init(uint32_t barrier, uint32_t count, Site site) { running_block().init_mbarrier(barrier, count, site); }

void mbarrier_arrive(uint32_t barrier, uint32_t expected_bytes, Site site) {
  Block& block = running_block();
  block.arrive(block.find_mbarrier(barrier, site), 1, expected_bytes, site);
  block.maybe_yield();
}

void mbarrier_expect_bytes(uint32_t barrier, uint32_t bytes, Site site) {
  Block& block = running_block();
  block.arrive(block.find_mbarrier(barrier, site), 0, bytes, site);
}

void mbarrier_arrive_after_copies(uint32_t barrier, Site site) {
  Block& block = running_block();
  block.find_mbarrier(barrier, site);
  const Thread& self = block.current();
  block.add_arrival({barrier, block.current_index(), self.forgotten_copies + self.copies.size(), site});
}

void mbarrier_wait(uint32_t barrier, uint32_t parity, Site site) {
  running_block().wait_for_mbarrier(barrier, parity, site);
}

void fence_mbarrier_init() { running_block().fence_mbarriers(); }

void fence_async_proxy() {
  Block& block = running_block();
  const uint32_t time = ++block.shared_writes().time;
  block.current().proxy_fence = time;
  block.current_warpgroup().proxy_fence = time;
}

void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, Site site) {
  check_aligned(from, 16, site);
  running_block().add_bulk_copy({to, bytes, from, barrier}, site);
}

void tensor_copy(uint32_t to, const void* map, const int32_t (&at)[3], uint32_t barrier, Site site) {
  Block& block = running_block();
  TensorMap tensor;
  std::memcpy(&tensor, map, sizeof tensor);
  if (tensor.mark != TensorMap::kMark) block.fail("tensor copy with a map that was never made", {}, site);
  // A box that begins outside of the tensor would be zeros, or be wrapped; no kernel wants one.
  for (int i = 0; i < 3; ++i)
    if (at[i] < 0 || at[i] >= tensor.sizes[i])
      block.fail("tensor copy at {} of dimension {}: expected 0 to {}", {at[i], i, tensor.sizes[i] - 1}, site);
  if (tensor.sizes[0] % 8 != 0)
    block.fail("tensor copy of a tensor of {} channels: expected a multiple of 8", {tensor.sizes[0]}, site);
  if (to % 1024 != 0)
    block.fail("tensor copy to {}: expected a multiple of 1024, where the swizzle begins", {to}, site);
  PendingCopy copy = {to, static_cast<uint32_t>(tensor.box_rows * tensor.box_heads) * 128,
                      tensor.base + at[0] * 2 + at[1] * tensor.strides[0] + at[2] * tensor.strides[1], barrier};
  copy.heads = tensor.box_heads;
  copy.rows = tensor.box_rows;
  copy.valid_heads = static_cast<int32_t>(std::min<int64_t>(tensor.box_heads, tensor.sizes[2] - at[2]));
  copy.valid_rows = static_cast<int32_t>(std::min<int64_t>(tensor.box_rows, tensor.sizes[1] - at[1]));
  copy.valid_bytes = static_cast<uint32_t>(std::min<int64_t>(64, tensor.sizes[0] - at[0])) * 2;
  copy.row_stride = tensor.strides[0];
  copy.head_stride = tensor.strides[1];
  block.add_bulk_copy(copy, site);
}

uint32_t map_shared(uint32_t address, int32_t rank, Site site) {
  shared_pointer(address, 1, 1, site);
  return address + (static_cast<uint32_t>(rank + 1) << kRankShift);
}

void bulk_copy_in_cluster(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier, Site site) {
  Block& self = running_block();
  Block& block = self.block_of(to, site);
  if (&self.block_of(barrier, site) != &block)
    self.fail("bulk copy: expected the mbarrier in the block that is written to", {}, site);
  PendingCopy copy = self.bulk_copy_from(from, bytes, site);
  copy.to = to;
  copy.barrier = barrier;
  block.add_bulk_copy(copy, site);
}

void mbarrier_arrive_in_cluster(uint32_t barrier, Site site) {
  Block& self = running_block();
  Block& block = self.block_of(barrier, site);
  block.arrive(block.find_mbarrier(barrier, site), 1, 0, site);
  self.maybe_yield();
}

void sync_cluster(Site site) { running_block().sync_cluster(site, false); }
void sync_cluster_memory(Site site) { running_block().sync_cluster(site, true); }

void load_in_cluster(uint32_t from, void* to, uint32_t bytes, Site site) {
  running_block().load_in_cluster(from, to, bytes, site);
}

}  // namespace mla::emulator
