// SPDX-License-Identifier: Apache-2.0
// This file computes the collectives of a warp, by the fragment layouts of the PTX ISA ("Warp-level Matrix
// Instructions").
#include <atomic>
#include <cstring>

#include "emulator/block.h"
#include "emulator/elements.h"
#include "emulator/mma_tiles.h"

namespace mla::emulator {
namespace {

struct ShuffleLane {
  uint32_t value;
  uint32_t source;
  uint32_t result;
};

bool complete_shuffle(Block& block, void* const* lanes) {
  ++block.counters_of_block().shuffles;
  for (int i = 0; i < kWarpSize; ++i) {
    auto& lane = *static_cast<ShuffleLane*>(lanes[i]);
    lane.result = static_cast<const ShuffleLane*>(lanes[lane.source & 31U])->value;
  }
  return true;
}

struct VoteLane {
  bool predicate;
  uint32_t result;
};

bool complete_vote(Block& block, void* const* lanes) {
  ++block.counters_of_block().shuffles;
  uint32_t votes = 0;
  for (int i = 0; i < kWarpSize; ++i)
    votes |= static_cast<uint32_t>(static_cast<const VoteLane*>(lanes[i])->predicate) << i;
  for (int i = 0; i < kWarpSize; ++i) static_cast<VoteLane*>(lanes[i])->result = votes;
  return true;
}

struct BarrierLane {
  uint32_t barrier;
  uint32_t count;
  bool predicate = false;
};

template <bool kWaits>
bool complete_barrier(Block& block, void* const* lanes) {
  const auto& first = *static_cast<const BarrierLane*>(lanes[0]);
  bool any = first.predicate;
  for (int i = 1; i < kWarpSize; ++i) {
    const auto& lane = *static_cast<const BarrierLane*>(lanes[i]);
    any |= lane.predicate;
    if (lane.barrier != first.barrier || lane.count != first.count)
      block.fail("the lanes of a warp came to barriers {} and {}, with counts {} and {}",
                 {first.barrier, lane.barrier, first.count, lane.count}, block.current().site);
  }
  return block.arrive_at_barrier(first.barrier, first.count, kWaits, any);
}

struct LdmatrixLane {
  const std::byte* row;
  uint32_t* registers;
  int32_t num;
};

template <bool kTransposed>
bool complete_ldmatrix(Block& block, void* const* lanes) {
  ++block.counters_of_block().ldmatrix;
  const int32_t num = static_cast<const LdmatrixLane*>(lanes[0])->num;
  for (int32_t i = 0; i < num; ++i) {
    uint16_t matrix[8][8];
    for (int r = 0; r < 8; ++r) std::memcpy(matrix[r], static_cast<const LdmatrixLane*>(lanes[8 * i + r])->row, 16);
    for (int l = 0; l < kWarpSize; ++l) {
      const int g = l / 4;
      const int t = 2 * (l % 4);
      const uint32_t low = kTransposed ? matrix[t][g] : matrix[g][t];
      const uint32_t high = kTransposed ? matrix[t + 1][g] : matrix[g][t + 1];
      static_cast<const LdmatrixLane*>(lanes[l])->registers[i] = low | high << 16;
    }
  }
  return true;
}

struct StmatrixLane {
  std::byte* row;
  const uint32_t* registers;
};

bool complete_stmatrix(Block&, void* const* lanes) {
  constexpr int kMatrices = 4;
  for (int l = 0; l < kWarpSize; ++l)
    for (int i = 0; i < kMatrices; ++i)
      std::memcpy(static_cast<const StmatrixLane*>(lanes[8 * i + l / 4])->row + l % 4 * 4,
                  &static_cast<const StmatrixLane*>(lanes[l])->registers[i], 4);
  return true;
}

template <class Element>
[[gnu::always_inline]] inline void multiply(MmaTiles<Element::kPerRegister>& tiles) {
  constexpr int kK = MmaTiles<Element::kPerRegister>::kDepth;
  float a[16][kK];
  Row b[kK];
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < kK; ++k) a[i][k] = Element::to_float(tiles.a[i][k]);
  for (int k = 0; k < kK; ++k)
    for (int j = 0; j < 8; ++j) b[k][j] = Element::to_float(tiles.b[k][j]);
  for (int i = 0; i < 16; ++i) {
    Row sum;
    std::memcpy(&sum, tiles.c[i], sizeof sum);
    for (int k = 0; k < kK; ++k) sum += a[i][k] * b[k];
    std::memcpy(tiles.c[i], &sum, sizeof sum);
  }
}

template <class Element>
void multiply_anywhere(MmaTiles<Element::kPerRegister>& tiles) {
  multiply<Element>(tiles);
}

template <class Element>
MLA_AVX2 void multiply_avx2(MmaTiles<Element::kPerRegister>& tiles) {
  multiply<Element>(tiles);
}

/// Computes m16n8k16 where a register has two elements, and m16n8k32 where it has four.
template <class Element>
bool complete_mma(Block& block, void* const* lanes) {
  ++block.counters_of_block().mma;
  const auto lane = [lanes](int l) -> const MmaLane& { return *static_cast<const MmaLane*>(lanes[l]); };
  MmaTiles<Element::kPerRegister> tiles;
  tiles.gather(lane);
  kHasAvx2 ? multiply_avx2<Element>(tiles) : multiply_anywhere<Element>(tiles);
  tiles.scatter(lane);
  return true;
}

}  // namespace

void shared_fault(uint32_t address, uint32_t bytes, uint32_t alignment, Site site) {
  const ThreadView& view = *current_thread;
  Block& block = running_block();
  if (address % alignment != 0) block.fail("shared address {}: expected a multiple of {}", {address, alignment}, site);
  block.fail("access to {} bytes at offset {} of {} bytes of shared memory",
             {bytes, static_cast<int64_t>(address) - kSharedBase, view.shared_bytes}, site);
}

void policy_fault(uint64_t bits, Site site) {
  running_block().fail("cache policy {}: expected one that createpolicy makes", {static_cast<int64_t>(bits)}, site);
}

uint32_t shared_address(const void* pointer, Site site) {
  const ThreadView& view = *current_thread;
  const auto offset = reinterpret_cast<uintptr_t>(pointer) - reinterpret_cast<uintptr_t>(view.shared);
  if (offset > view.shared_bytes)
    running_block().fail("shared_address of a pointer that is not into shared memory", {}, site);
  return kSharedBase + static_cast<uint32_t>(offset);
}

void misaligned(const void* pointer, uint32_t bytes, Site site) {
  running_block().fail("address {}: expected a multiple of {}",
                       {static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer)), bytes}, site);
}

void poll(Site site) { running_block().poll(site); }

void wait_for_previous_grid() {
  if (!running_block().previous_grid_ends()) throw WaitsForEver{};
}

void prefetch(const void* at) {
  // Another thread may be writing there, which is no race of the kernel: the value that is read here is not used.
  static_cast<void>(std::atomic_ref(*static_cast<std::byte*>(const_cast<void*>(at))).load(std::memory_order_relaxed));
  ++running_block().counters_of_block().prefetches;
}

bool sync_threads_any(int32_t barrier, int32_t num_threads, bool predicate, Site site) {
  Block& block = running_block();
  BarrierLane lane{static_cast<uint32_t>(barrier), static_cast<uint32_t>(num_threads), predicate};
  block.current().wait_a = lane.barrier;
  block.current().wait_b = lane.count;
  block.collective(Wait::kBarrierSync, complete_barrier<true>, &lane, site);
  return block.current_warp().barrier_any;
}

void sync_threads(int32_t barrier, int32_t num_threads, Site site) {
  sync_threads_any(barrier, num_threads, false, site);
}

void sync_block(Site site) { sync_threads(0, running_block().num_threads(), site); }

void arrive_threads(int32_t barrier, int32_t num_threads, Site site) {
  BarrierLane lane{static_cast<uint32_t>(barrier), static_cast<uint32_t>(num_threads)};
  running_block().collective(Wait::kBarrierArrive, complete_barrier<false>, &lane, site);
}

void sync_warp(Site site) {
  running_block().collective(
      Wait::kSyncWarp, [](Block&, void* const*) { return true; }, nullptr, site);
}

uint32_t shuffle(uint32_t value, uint32_t source_lane, Site site) {
  ShuffleLane lane{value, source_lane, 0};
  running_block().collective(Wait::kShuffle, complete_shuffle, &lane, site);
  return lane.result;
}

uint32_t ballot(bool predicate, Site site) {
  VoteLane lane{predicate, 0};
  running_block().collective(Wait::kVote, complete_vote, &lane, site);
  return lane.result;
}

void ldmatrix(uint32_t* registers, uint32_t row, int32_t num, bool transposed, Site site) {
  LdmatrixLane lane{nullptr, registers, num};
  if (current_thread->thread % kWarpSize < 8 * num) lane.row = shared_pointer(row, 16, 16, site);
  running_block().collective(Wait::kLdmatrix, transposed ? complete_ldmatrix<true> : complete_ldmatrix<false>, &lane,
                             site);
}

void stmatrix(uint32_t row, const uint32_t* registers, Site site) {
  StmatrixLane lane{shared_pointer(row, 16, 16, site), registers};
  note_shared_store(row);
  running_block().collective(Wait::kStmatrix, complete_stmatrix, &lane, site);
}

void mma(float* c, const uint32_t* a, uint32_t b0, uint32_t b1, MmaType type, Site site) {
  MmaLane lane{c, a, {b0, b1}};
  const CollectiveFunction function = type == MmaType::kBf16  ? complete_mma<Bf16>
                                      : type == MmaType::kF16 ? complete_mma<F16>
                                                              : complete_mma<E4M3>;
  running_block().collective(Wait::kMma, function, &lane, site);
}

}  // namespace mla::emulator
