// SPDX-License-Identifier: Apache-2.0
// Holds small kernels as kernels of src/cuda are built, each with one fault that a template argument plants.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/border/launch.h"
#include "cuda/ptx/ptx.h"
#include "cuda/ptx/wgmma.h"
#include "mla/numeric.h"

namespace mla::MLA_CUDA_NAMESPACE {

/// All kernels map `in` to `out`; what `n` means is the kernel's.
struct FaultParams {
  const float* in;
  const int32_t* table;
  float* out;
  int32_t n;
};

/// Each thread copies 16 bytes and reads what the opposite thread copied: out = in, its 4-element groups reversed.
enum class CopyFault { kNone, kMissingWait, kWaitOneGroupTooFew, kMissingBarrier };

template <CopyFault kFault>
struct ReverseKernel {
  using Params = FaultParams;
  static constexpr const char* kName = "reverse";
  static constexpr int kThreads = 128;
  static constexpr int kMinBlocks = 1;
  static constexpr int32_t kSharedBytes = kThreads * 16;

  static MLA_DEVICE void run(const Params& params) {
    const int thread = ptx::thread_index();
    const ptx::SharedAddress tile = ptx::shared_address(ptx::shared_memory());
    ptx::cp_async_16(tile + static_cast<uint32_t>(thread) * 16, params.in + thread * 4, true);
    ptx::cp_async_commit();
    if constexpr (kFault == CopyFault::kWaitOneGroupTooFew) ptx::cp_async_wait<1>();
    if constexpr (kFault == CopyFault::kNone || kFault == CopyFault::kMissingBarrier) ptx::cp_async_wait<0>();
    if constexpr (kFault != CopyFault::kMissingBarrier) ptx::sync_block();
    const auto* const shared = reinterpret_cast<const float*>(ptx::shared_memory());
    for (int i = 0; i < 4; ++i) params.out[thread * 4 + i] = shared[(kThreads - 1 - thread) * 4 + i];
  }
};

/// Names the faults of MultiplyKernel, in which one warp computes out[16, 8] = a[16, 16] b[16, 8] in bf16; a and b are
/// in `in`, as f32, both row-major.
enum class FragmentFault { kNone, kSwappedRows, kUnshiftedColumn, kWrongHalf, kSumsWithoutValue };

template <FragmentFault kFault>
struct MultiplyKernel {
  using Params = FaultParams;
  static constexpr const char* kName = "multiply";
  static constexpr int kThreads = 32;
  static constexpr int kMinBlocks = 1;
  static constexpr int32_t kSharedBytes = 0;

  static MLA_DEVICE uint32_t pair(const float* from, int stride) { return ptx::pack_bf16x2(from[0], from[stride]); }

  static MLA_DEVICE void run(const Params& params) {
    const int g = ptx::lane() / 4;
    const int t = ptx::lane() % 4;
    const float* const rows = params.in + g * 16 + 2 * t;
    uint32_t a[4] = {pair(rows, 1), pair(rows + 128, 1), pair(rows + 8, 1), pair(rows + 136, 1)};
    if constexpr (kFault == FragmentFault::kSwappedRows) {
      const uint32_t swapped = a[1];
      a[1] = a[2];
      a[2] = swapped;
    }
    const int k = kFault == FragmentFault::kUnshiftedColumn ? t : 2 * t;
    const float* const columns = params.in + 256 + k * 8 + g;
    const int half = kFault == FragmentFault::kWrongHalf ? 0 : 64;
    float c[4];
    if constexpr (kFault != FragmentFault::kSumsWithoutValue)
      for (float& sum : c) sum = 0.0F;
    ptx::mma_bf16(c, a, pair(columns, 8), pair(columns + half, 8));
    for (int i = 0; i < 4; ++i) params.out[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = c[i];
  }
};

/// Sums n keys of pages of 4 floats that `table` names into out[0], by one warp. Whatever is no key of these is NaN.
template <bool kFault>
struct PagedSumKernel {
  using Params = FaultParams;
  static constexpr const char* kName = "paged_sum";
  static constexpr int kThreads = 32;
  static constexpr int kMinBlocks = 1;
  static constexpr int32_t kSharedBytes = 0;

  static MLA_DEVICE void run(const Params& params) {
    float sum = 0;
    for (int key = ptx::lane(); kFault ? key <= params.n : key < params.n; key += kWarpSize)
      sum += params.in[params.table[key / 4] * 4 + key % 4];
    for (int mask = 16; mask > 0; mask /= 2) sum += ptx::shuffle_xor(sum, mask);
    if (ptx::lane() == 0) params.out[0] = sum;
  }
};

/// Streams n tiles of 128 floats through two stages; each thread sums what another warp copied.
/// out[thread] = sum over tiles of in[tile][thread ^ 32].
template <bool kFault>
struct PipelineKernel {
  using Params = FaultParams;
  static constexpr const char* kName = "pipeline";
  static constexpr int kThreads = 128;
  static constexpr int kMinBlocks = 1;
  static constexpr int kStageBytes = kThreads * 4;
  static constexpr int32_t kSharedBytes = 2 * kStageBytes;

  static MLA_DEVICE void load(const Params& params, int tile) {
    const int thread = ptx::thread_index();
    const ptx::SharedAddress stages = ptx::shared_address(ptx::shared_memory());
    if (tile < params.n)
      ptx::cp_async_4(stages + static_cast<uint32_t>((tile % 2) * kStageBytes + thread * 4),
                      params.in + tile * kThreads + thread, true);
    ptx::cp_async_commit();
  }

  static MLA_DEVICE void run(const Params& params) {
    const int thread = ptx::thread_index();
    load(params, 0);
    load(params, 1);
    float sum = 0;
    for (int tile = 0; tile < params.n; ++tile) {
      ptx::cp_async_wait<1>();
      ptx::sync_block();  // the tile has landed for all
      sum += reinterpret_cast<const float*>(ptx::shared_memory())[(tile % 2) * kThreads + (thread ^ 32)];
      if constexpr (!kFault) ptx::sync_block();  // all have read: the stage is free
      load(params, tile + 2);
    }
    params.out[thread] = sum;
  }
};

/// Names the faults of BulkPipelineKernel, which does the same with bulk copies by thread 0 and two mbarriers per
/// stage: full and empty.
enum class PhaseFault { kNone, kFullParityStays, kEmptyParityInverted, kTooFewBytes, kMissingFence, kArriveTwice };

template <PhaseFault kFault>
struct BulkPipelineKernel {
  using Params = FaultParams;
  static constexpr const char* kName = "bulk_pipeline";
  static constexpr int kThreads = 128;
  static constexpr int kMinBlocks = 1;
  static constexpr int kStageBytes = kThreads * 4;
  static constexpr int32_t kSharedBytes = 2 * kStageBytes + 32;

  static MLA_DEVICE void run(const Params& params) {
    const int thread = ptx::thread_index();
    const ptx::SharedAddress stages = ptx::shared_address(ptx::shared_memory());
    const ptx::SharedAddress full = stages + 2 * kStageBytes;
    const ptx::SharedAddress empty = full + 16;
    if (thread == 0) {
      for (uint32_t stage = 0; stage < 2; ++stage) {
        ptx::mbarrier_init(full + stage * 8, 1);
        ptx::mbarrier_init(empty + stage * 8, kThreads);
      }
      if constexpr (kFault != PhaseFault::kMissingFence) ptx::fence_mbarrier_init();
    }
    ptx::sync_block();
    float sum = 0;
    for (int tile = 0; tile < params.n; ++tile) {
      const auto stage = static_cast<uint32_t>(tile % 2);
      const auto parity = static_cast<uint32_t>(tile / 2 % 2);
      if (thread == 0) {
        ptx::mbarrier_wait(empty + stage * 8, kFault == PhaseFault::kEmptyParityInverted ? parity : parity ^ 1);
        ptx::mbarrier_arrive_expect_bytes(full + stage * 8,
                                          kFault == PhaseFault::kTooFewBytes ? kStageBytes / 2 : kStageBytes);
        ptx::bulk_copy(stages + stage * kStageBytes, params.in + tile * kThreads, kStageBytes, full + stage * 8,
                       ptx::kEvictFirst);
      }
      ptx::mbarrier_wait(full + stage * 8, kFault == PhaseFault::kFullParityStays ? 0 : parity);
      sum += reinterpret_cast<const float*>(ptx::shared_memory())[tile % 2 * kThreads + (thread ^ 32)];
      ptx::mbarrier_arrive(empty + stage * 8);
      if constexpr (kFault == PhaseFault::kArriveTwice) ptx::mbarrier_arrive(empty + stage * 8);
    }
    params.out[thread] = sum;
  }
};

/// Computes out[lane] = in[lane ^ 1] for n lanes, and copies the rest.
template <bool kFault>
struct ShuffleKernel {
  using Params = FaultParams;
  static constexpr const char* kName = "shuffle";
  static constexpr int kThreads = 32;
  static constexpr int kMinBlocks = 1;
  static constexpr int32_t kSharedBytes = 0;

  static MLA_DEVICE void run(const Params& params) {
    const int lane = ptx::lane();
    float value = params.in[lane];
    if constexpr (kFault) {
      if (lane < params.n) value = ptx::shuffle_xor(value, 1);
    } else {
      const float other = ptx::shuffle_xor(value, 1);
      if (lane < params.n) value = other;
    }
    params.out[lane] = value;
  }
};

/// Two warps hand 32 floats over by named barriers: warp 0 produces, warp 1 reverses.
enum class NamedFault { kNone, kWrongCount, kWrongBarrier, kCountsDiffer, kOppositeOrder };

template <NamedFault kFault>
struct HandoverKernel {
  using Params = FaultParams;
  static constexpr const char* kName = "handover";
  static constexpr int kThreads = 96;  // the third warp keeps out of it
  static constexpr int kMinBlocks = 1;
  static constexpr int32_t kSharedBytes = 128;

  static MLA_DEVICE void run(const Params& params) {
    auto* const tile = reinterpret_cast<float*>(ptx::shared_memory());
    const int lane = ptx::lane();
    constexpr int kCount = kFault == NamedFault::kWrongCount ? 96 : 64;
    if (ptx::warp() == 0) {
      tile[lane] = params.in[lane];
      if constexpr (kFault == NamedFault::kOppositeOrder) {
        ptx::sync_threads(2, kCount);
        ptx::sync_threads(1, kCount);
      } else {
        ptx::arrive_threads(kFault == NamedFault::kWrongBarrier ? 2 : 1, kCount);
      }
    } else if (ptx::warp() == 1) {
      ptx::sync_threads(1, kFault == NamedFault::kCountsDiffer ? 96 : kCount);
      if constexpr (kFault == NamedFault::kOppositeOrder) ptx::sync_threads(2, kCount);
      params.out[lane] = tile[31 - lane];
    }
  }
};

/// Names the faults of WarpgroupKernel, in which one warpgroup computes out[64, 256] = a[64, 16] b[256, 16]^T in bf16;
/// a and b are in `in`, as f32.
enum class WgmmaFault { kNone, kMissingWait, kWaitOneGroupTooFew, kMissingCommit, kMissingFence, kSwappedStrides };

template <WgmmaFault kFault>
struct WarpgroupKernel {
  using Params = FaultParams;
  static constexpr const char* kName = "warpgroup";
  static constexpr int kThreads = 128;
  static constexpr int kMinBlocks = 1;
  static constexpr int32_t kSharedBytes = (64 + 256) * 32;

  static MLA_DEVICE void run(const Params& params) {
    auto* const shared = reinterpret_cast<uint16_t*>(ptx::shared_memory());
    for (int i = ptx::thread_index(); i < (64 + 256) * 16; i += kThreads) {
      const int row = i / 16;
      const int k = i % 16;
      shared[(row / 8 * 2 + k / 8) * 64 + row % 8 * 8 + k % 8] = f32_to_bf16(params.in[i]);
    }
    ptx::fence_async_proxy();
    ptx::sync_block();
    float d[128] = {};
    constexpr uint32_t kAlongK = kFault == WgmmaFault::kSwappedStrides ? 256 : 128;
    const ptx::SharedAddress a = ptx::shared_address(shared);
    if constexpr (kFault != WgmmaFault::kMissingFence) ptx::wgmma_fence();
    ptx::wgmma_bf16<256>(d, ptx::matrix_descriptor(a, kAlongK, 384 - kAlongK),
                         ptx::matrix_descriptor(a + 64 * 32, kAlongK, 384 - kAlongK), true);
    if constexpr (kFault != WgmmaFault::kMissingCommit) ptx::wgmma_commit();
    if constexpr (kFault == WgmmaFault::kWaitOneGroupTooFew) {
      ptx::wgmma_wait<1>();
    } else if constexpr (kFault != WgmmaFault::kMissingWait) {
      ptx::wgmma_wait<0>();
    }
    const int row = ptx::warp() * 16 + ptx::lane() / 4;
    for (int i = 0; i < 128; ++i)
      params.out[(row + i % 4 / 2 * 8) * 256 + i / 4 * 8 + ptx::lane() % 4 * 2 + i % 2] = d[i];
  }
};

/// Names the faults of RegisterOperandKernel, which does the same with A in registers, and B in rows of 128 bytes with
/// a swizzle.
enum class OperandFault {
  kNone,
  kMissingProxyFence,
  kProxyFenceTooEarly,
  kWrongSwizzle,
  kTransposed,
  kDescriptorPerWarp,
  kRowAsBegin,
  kChangedA,
  kChangedB,
  kWrittenSums,
  kSumsOfBefore,
};

template <OperandFault kFault>
struct RegisterOperandKernel {
  using Params = FaultParams;
  static constexpr const char* kName = "register_operand";
  static constexpr int kThreads = 128;
  static constexpr int kMinBlocks = 1;
  static constexpr int32_t kSharedBytes = 256 * 128;

  static MLA_DEVICE void run(const Params& params) {
    const ptx::SharedAddress b = ptx::shared_address(ptx::shared_memory());
    if constexpr (kFault == OperandFault::kProxyFenceTooEarly) ptx::fence_async_proxy();
    for (int i = ptx::thread_index(); i < 256 * 16; i += kThreads) {
      const int column = i / 16;
      const int place = column * 128 + (i % 16 * 2 ^ column % 8 * 16);
      ptx::store_shared(b + static_cast<uint32_t>(place), f32_to_bf16(params.in[64 * 16 + i]));
    }
    if constexpr (kFault != OperandFault::kMissingProxyFence && kFault != OperandFault::kProxyFenceTooEarly)
      ptx::fence_async_proxy();
    ptx::sync_block();
    const int row = ptx::warp() * 16 + ptx::lane() / 4;
    const int column = ptx::lane() % 4 * 2;
    uint32_t a[4];
    for (int i = 0; i < 4; ++i) {
      const float* const from = params.in + (row + i % 2 * 8) * 16 + column + i / 2 * 8;
      a[i] = ptx::pack_bf16x2(from[0], from[1]);
    }
    ptx::SharedAddress begin = b;
    if constexpr (kFault == OperandFault::kDescriptorPerWarp) begin += static_cast<uint32_t>(ptx::warp()) * 1024;
    if constexpr (kFault == OperandFault::kRowAsBegin) begin += 128;
    constexpr bool kWrong = kFault == OperandFault::kWrongSwizzle;
    const uint64_t descriptor =
        ptx::matrix_descriptor(begin, 1024, 1024, kWrong ? ptx::Swizzle::k64 : ptx::Swizzle::k128);
    float d[128];
    for (float& sum : d) sum = 3;
    ptx::wgmma_fence();
    ptx::wgmma_bf16<256, kFault == OperandFault::kTransposed>(d, a, descriptor, kFault == OperandFault::kSumsOfBefore);
    ptx::wgmma_commit();
    if constexpr (kFault == OperandFault::kChangedA) a[2] = 0;
    if constexpr (kFault == OperandFault::kChangedB) ptx::store_shared(b + 16, uint32_t{0});
    if constexpr (kFault == OperandFault::kWrittenSums) d[77] = 0;
    ptx::wgmma_wait<0>();
    for (int i = 0; i < 128; ++i) params.out[(row + i % 4 / 2 * 8) * 256 + i / 4 * 8 + column + i % 2] = d[i];
  }
};

/// Names the faults of ArrivalPipelineKernel, the pipeline of BulkPipelineKernel with cp.async by every thread, which
/// report to the mbarrier of their stage.
enum class ArrivalFault { kNone, kOrdinaryArrival, kArrivalBeforeCopy, kMissingWait };

template <ArrivalFault kFault>
struct ArrivalPipelineKernel {
  using Params = FaultParams;
  static constexpr const char* kName = "arrival_pipeline";
  static constexpr int kThreads = 128;
  static constexpr int kMinBlocks = 1;
  static constexpr int kStageBytes = kThreads * 4;
  static constexpr int32_t kSharedBytes = 2 * kStageBytes + 16;

  static MLA_DEVICE void run(const Params& params) {
    const int thread = ptx::thread_index();
    const ptx::SharedAddress stages = ptx::shared_address(ptx::shared_memory());
    const ptx::SharedAddress full = stages + 2 * kStageBytes;
    if (thread < 2) ptx::mbarrier_init(full + static_cast<uint32_t>(thread) * 8, kThreads);
    ptx::sync_block();
    float sum = 0;
    for (int tile = 0; tile < params.n; ++tile) {
      const auto stage = static_cast<uint32_t>(tile % 2);
      if constexpr (kFault == ArrivalFault::kArrivalBeforeCopy) ptx::mbarrier_arrive_after_copies(full + stage * 8);
      ptx::cp_async_4(stages + stage * kStageBytes + static_cast<uint32_t>(thread) * 4,
                      params.in + tile * kThreads + thread, true);
      if constexpr (kFault == ArrivalFault::kOrdinaryArrival) ptx::mbarrier_arrive(full + stage * 8);
      if constexpr (kFault == ArrivalFault::kNone || kFault == ArrivalFault::kMissingWait)
        ptx::mbarrier_arrive_after_copies(full + stage * 8);
      if constexpr (kFault != ArrivalFault::kMissingWait)
        ptx::mbarrier_wait(full + stage * 8, static_cast<uint32_t>(tile / 2 % 2));
      sum += reinterpret_cast<const float*>(ptx::shared_memory())[tile % 2 * kThreads + (thread ^ 32)];
    }
    params.out[thread] = sum;
  }
};

/// Names the faults of ExchangeKernel, in which each of two blocks of a cluster sums up the tiles that the other one
/// hands it: out = sums of in's rows of 256, their halves exchanged, and in each half thread and thread ^ 32.
enum class ClusterFault {
  kNone,
  kMissingProxyFence,
  kMissingSync,
  kTooFewBytes,
  kSourceChanged,
  kMissingRoom,
  kMissingLastSync
};

template <ClusterFault kFault>
struct ExchangeKernel {
  using Params = FaultParams;
  static constexpr const char* kName = "exchange";
  static constexpr int kThreads = 128;
  static constexpr int kMinBlocks = 1;
  static constexpr int kCluster = 2;
  static constexpr int kTileBytes = kThreads * 4;
  static constexpr int32_t kSharedBytes = 2 * kTileBytes + 16;

  static MLA_DEVICE ptx::SharedAddress in_other(ptx::SharedAddress address) {
    return ptx::map_shared(address, ptx::cluster_rank() ^ 1);
  }

  static MLA_DEVICE void run(const Params& params) {
    const int thread = ptx::thread_index(), first = ptx::cluster_rank() * kThreads;
    const ptx::SharedAddress own = ptx::shared_address(ptx::shared_memory()), others = own + kTileBytes;
    const ptx::SharedAddress full = others + kTileBytes, room = full + 8;
    if (thread == 0) {
      ptx::mbarrier_init(full, 1);
      ptx::mbarrier_init(room, kThreads);
      ptx::fence_mbarrier_init();
    }
    ptx::sync_block();
    ptx::sync_cluster();
    float sum = 0;
    for (int tile = 0; tile < params.n; ++tile) {
      if (kFault != ClusterFault::kMissingRoom && tile > 0)
        ptx::mbarrier_wait(room, static_cast<uint32_t>((tile - 1) % 2));
      const ptx::SharedAddress word = own + static_cast<uint32_t>(thread) * 4;
      ptx::store_shared(word, params.in[tile * 2 * kThreads + first + thread]);
      if constexpr (kFault != ClusterFault::kMissingProxyFence) ptx::fence_async_proxy();
      if constexpr (kFault != ClusterFault::kMissingSync) ptx::sync_block();
      if (thread == 0) {
        ptx::bulk_copy_in_cluster(in_other(others), own, kTileBytes, in_other(full));
        ptx::mbarrier_arrive_expect_bytes(full, kFault == ClusterFault::kTooFewBytes ? kTileBytes / 2 : kTileBytes);
      }
      if constexpr (kFault == ClusterFault::kSourceChanged) {
        ptx::sync_block();
        ptx::store_shared(word, -1.0F);
      }
      ptx::mbarrier_wait(full, static_cast<uint32_t>(tile % 2));
      sum += ptx::load_shared<float>(others + static_cast<uint32_t>(thread ^ 32) * 4);
      if constexpr (kFault != ClusterFault::kMissingRoom) ptx::mbarrier_arrive_in_cluster(in_other(room));
    }
    params.out[first + thread] = sum;
    if constexpr (kFault != ClusterFault::kMissingLastSync) ptx::sync_cluster();
  }
};

/// Each thread of a block adds up the words that its neighbours in both blocks of a cluster have stored, which it loads
/// from where they lie.
enum class ClusterLoadFault { kNone, kMissingSync, kRelaxedSync, kMissingLastSync };

template <ClusterLoadFault kFault>
struct ClusterLoadKernel {
  using Params = FaultParams;
  static constexpr const char* kName = "cluster_load";
  static constexpr int kThreads = 128;
  static constexpr int kMinBlocks = 1;
  static constexpr int kCluster = 2;
  static constexpr int32_t kSharedBytes = 2 * kThreads * 8;

  static MLA_DEVICE void run(const Params& params) {
    const int thread = ptx::thread_index(), first = ptx::cluster_rank() * kThreads;
    const ptx::SharedAddress own = ptx::shared_address(ptx::shared_memory());
    float sum = 0;
    for (int tile = 0; tile < params.n; ++tile) {
      const ptx::SharedAddress words = own + static_cast<uint32_t>(tile % 2) * kThreads * 8;
      const uint64_t word = std::bit_cast<uint32_t>(params.in[tile * 2 * kThreads + first + thread]);
      ptx::store_shared(words + static_cast<uint32_t>(thread) * 8, word);
      if constexpr (kFault == ClusterLoadFault::kRelaxedSync)
        ptx::sync_cluster();
      else if (kFault != ClusterLoadFault::kMissingSync || tile == 0)
        ptx::sync_cluster_memory();
      const ptx::SharedAddress neighbour = words + static_cast<uint32_t>(thread ^ 32) * 8;
      const uint64_t other = ptx::load_in_cluster(ptx::map_shared(neighbour, ptx::cluster_rank() ^ 1));
      sum += std::bit_cast<float>(static_cast<uint32_t>(other));
    }
    params.out[first + thread] = sum;
    if constexpr (kFault != ClusterLoadFault::kMissingLastSync) ptx::sync_cluster();
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE
