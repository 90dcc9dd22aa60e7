// SPDX-License-Identifier: Apache-2.0
// This file declares the functions that the emulated bodies of src/cuda/ptx call, on a fiber of a running launch. A
// fault ends the block: these functions then do not return.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "emulator/sanitizers.h"

namespace mla::emulator {

/// Names the place in a kernel where a wrapper is called.
struct Site {
  const char* file;
  int line;
  bool operator==(const Site&) const = default;
};

/// Records which thread wrote each 16 bytes of shared memory last, and when: wgmma reads by the asynchronous proxy, for
/// which ordinary stores and cp.async need a fence. A time is the number of fences and wgmmas in the block so far.
struct SharedWrites {
  static constexpr uint32_t kUnit = 16;
  static constexpr uint32_t kUnits = 256 * 1024 / kUnit;
  static constexpr uint32_t kNobody = 0;
  static constexpr uint32_t kBulkCopy = 0xFFFF;  // the writer was a bulk copy; other writers are thread + 1
  struct Write {
    uint32_t time, writer;
  };
  uint32_t time;
  Write last[kUnits];
};

/// Holds the special registers of a thread, and its block's shared memory.
struct ThreadView {
  int32_t thread = 0;
  int32_t block_x = 0, block_y = 0, block_z = 0;
  int32_t grid_x = 0, grid_y = 0, grid_z = 0;
  int32_t cluster_rank = 0;
  uint32_t shared_bytes = 0;
  std::byte* shared = nullptr;
  SharedWrites* writes = nullptr;
};
extern thread_local constinit ThreadView* current_thread;

/// This is the address of the first byte of a block's shared memory. It is not 0, so that an address that was never set
/// is out of range.
inline constexpr uint32_t kSharedBase = 1024;

/// Faults because `bytes` bytes at `address` are not all in shared memory, or because `address` is no multiple of
/// `alignment`.
[[noreturn]] void shared_fault(uint32_t address, uint32_t bytes, uint32_t alignment, Site site);
inline std::byte* shared_pointer(uint32_t address, uint32_t bytes, uint32_t alignment, Site site) {
  const ThreadView& view = *current_thread;
  const uint32_t offset = address - kSharedBase;
  if (offset < view.shared_bytes && view.shared_bytes - offset >= bytes && address % alignment == 0)
    return view.shared + offset;
  shared_fault(address, bytes, alignment, site);
}
/// Records an ordinary store of at most 16 bytes to an address that shared_pointer() has accepted.
inline void note_shared_store(uint32_t address) {
  SharedWrites& writes = *current_thread->writes;
  writes.last[(address - kSharedBase) / SharedWrites::kUnit % SharedWrites::kUnits] = {
      writes.time, static_cast<uint32_t>(current_thread->thread) + 1};
}
/// Returns the address of a pointer into shared memory or just behind it; faults for any other pointer.
uint32_t shared_address(const void* pointer, Site site);
/// misaligned() faults; check_aligned() calls it if `pointer` is no multiple of `bytes`.
void misaligned(const void* pointer, uint32_t bytes, Site site);
inline void check_aligned(const void* pointer, uint32_t bytes, Site site) {
  if (reinterpret_cast<uintptr_t>(pointer) % bytes != 0) misaligned(pointer, bytes, site);
}
/// Faults because a cache policy has bits that no instruction makes.
[[noreturn]] void policy_fault(uint64_t bits, Site site);
/// Gives other threads of the block a turn. Faults if one thread calls it hundreds of thousands of times.
void poll(Site site);

/// Orders the host thread's accesses between blocks. ThreadSanitizer does not know fences, and emulated atomics order
/// by themselves.
inline void fence() {
#if !MLA_EMULATOR_TSAN
  std::atomic_thread_fence(std::memory_order_acq_rel);
#endif
}

/// Ends the thread if the previous grid does not end.
void wait_for_previous_grid();
/// Reads a byte there, so that an address without memory crashes.
void prefetch(const void* at);

void sync_block(Site site);
void sync_threads(int32_t barrier, int32_t num_threads, Site site);
/// Returns, to every thread that waits, whether the predicate of any thread that arrived holds.
bool sync_threads_any(int32_t barrier, int32_t num_threads, bool predicate, Site site);
void arrive_threads(int32_t barrier, int32_t num_threads, Site site);
void sync_warp(Site site);

/// Returns the value of lane `source_lane`, which each lane chooses for itself.
uint32_t shuffle(uint32_t value, uint32_t source_lane, Site site);
uint32_t ballot(bool predicate, Site site);

void copy_async(uint32_t to, const void* from, uint32_t bytes, bool valid, Site site);
void copy_async_commit();
void copy_async_wait(uint32_t groups_left);

void mbarrier_init(uint32_t barrier, uint32_t count, Site site);
void mbarrier_arrive(uint32_t barrier, uint32_t expected_bytes, Site site);
void mbarrier_expect_bytes(uint32_t barrier, uint32_t bytes, Site site);
void mbarrier_arrive_after_copies(uint32_t barrier, Site site);
void mbarrier_wait(uint32_t barrier, uint32_t parity, Site site);
void fence_mbarrier_init();
void fence_async_proxy();

/// Returns the mapped address in block `rank` of the cluster, which the next functions take.
uint32_t map_shared(uint32_t address, int32_t rank, Site site);
void bulk_copy_in_cluster(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier, Site site);
void mbarrier_arrive_in_cluster(uint32_t barrier, Site site);
void sync_cluster(Site site);
void sync_cluster_memory(Site site);
void load_in_cluster(uint32_t from, void* to, uint32_t bytes, Site site);
void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, Site site);

/// Copies a tensor's box, which begins at {channel, row, head}, to `to`, in the order of the swizzle of 128 bytes.
/// `map` is a TensorMap (emulator.h).
void tensor_copy(uint32_t to, const void* map, const int32_t (&at)[3], uint32_t barrier, Site site);

/// Loads `num` matrices of 8 x 8 16-bit elements; lane 8 i + r gives the address of row r of matrix i.
void ldmatrix(uint32_t* registers, uint32_t row, int32_t num, bool transposed, Site site);
/// Stores four matrices of 8 x 8 16-bit elements, as ldmatrix() loads them.
void stmatrix(uint32_t row, const uint32_t* registers, Site site);
/// mma() computes c += a b with the fragments of mma.m16n8k16 (16-bit operands) and m16n8k32 (8-bit operands).
enum class MmaType : uint8_t { kBf16, kF16, kE4M3 };
void mma(float* c, const uint32_t* a, uint32_t b0, uint32_t b1, MmaType type, Site site);

/// Holds the scales that a lane gives for an operand of a block-scaled mma, and the selectors that say which bytes of
/// which lanes are taken.
struct BlockScales {
  uint32_t data;
  int32_t byte_id, thread_id;
};
/// scaled_mma() computes c += (a scale_a) (b scale_b), with e4m3 by e4m3, e4m3 by e2m1 in bytes (both m16n8k32, one
/// UE8M0 for a row of A and a column of B), and e2m1 by e2m1 (m16n8k64, two UE8M0 or four UE4M3).
enum class ScaledMma : uint8_t { kMxf8, kMxf8f4, kMxf4, kNvf4 };
void scaled_mma(float* c, const uint32_t* a, uint32_t b0, uint32_t b1, const BlockScales& scales_a,
                const BlockScales& scales_b, ScaledMma form, Site site);

/// Holds the arguments of wgmma(), by which a warpgroup computes d [64, n] = a [64, 16] b [16, n] + (accumulate ? d :
/// 0) with wgmma's fragments and descriptors. The product is computed when it is waited for.
struct Wgmma {
  float* d;                     // n / 2 registers of the calling lane
  const uint32_t* a_registers;  // the lane's 4 registers of A; null if A is in shared memory
  uint64_t a, b;                // descriptors
  int32_t n;
  MmaType type;
  bool transpose_b;
  bool accumulate;
};
void wgmma(const Wgmma& what, Site site);
void wgmma_fence(Site site);
void wgmma_commit(Site site);
void wgmma_wait(uint32_t groups_left, Site site);

}  // namespace mla::emulator
