// SPDX-License-Identifier: Apache-2.0
// Holds kernels whose copies report to mbarriers: bulk copies, cp.async, and copies between the blocks of a cluster.
#pragma once

#include <cstdint>

#include "cuda/ptx/ptx.h"
#include "cuda/ptx/wrapper_kernel_base.cuh"

#if MLA_CUDA_ARCH >= 90
namespace mla::MLA_CUDA_NAMESPACE {

/// Fills a ring of two stages by bulk copies: out[thread] = sum of in[tile * 128 + (thread ^ 32)] over six tiles.
struct BulkCopies : WrapperKernelBase<128, 1, 1024 + 32> {
  static MLA_DEVICE void run(const Params& p) {
    const int thread = ptx::thread_index();
    const ptx::SharedAddress stages = ptx::shared_address(ptx::shared_memory());
    const ptx::SharedAddress full = stages + 1024;
    const ptx::SharedAddress empty = full + 16;
    if (thread == 0) {
      for (uint32_t stage = 0; stage < 2; ++stage) {
        ptx::mbarrier_init(full + stage * 8, 1);
        ptx::mbarrier_init(empty + stage * 8, 128);
      }
      ptx::fence_mbarrier_init();
    }
    ptx::sync_block();
    uint32_t sum = 0;
    for (uint32_t tile = 0; tile < 6; ++tile) {
      const uint32_t stage = tile % 2;
      const uint32_t parity = tile / 2 % 2;
      if (thread == 0) {
        ptx::mbarrier_wait(empty + stage * 8, parity ^ 1);
        ptx::fence_async_proxy();
        if (stage == 0) {
          ptx::mbarrier_arrive_expect_bytes(full, 512);
        } else {
          ptx::mbarrier_expect_bytes(full + 8, 512);
          ptx::mbarrier_arrive(full + 8);
        }
        // In two pieces.
        ptx::bulk_copy(stages + stage * 512, p.in + tile * 128, 496, full + stage * 8, ptx::kEvictFirst);
        ptx::bulk_copy(stages + stage * 512 + 496, p.in + tile * 128 + 124, 16, full + stage * 8, ptx::kEvictFirst);
      }
      ptx::mbarrier_wait(full + stage * 8, parity);
      sum += ptx::load_shared<uint32_t>(stages + stage * 512 + static_cast<uint32_t>(thread ^ 32) * 4);
      ptx::mbarrier_arrive(empty + stage * 8);
    }
    p.out[thread] = sum;
  }
};

/// Threads 0-63 fill a ring of two stages with cp.async that report to its barriers, and copy words for themselves;
/// threads 64-127 sum up, over six tiles, the 16 bytes that another thread copied. Two threads' copies give zeros.
struct CopiesWithBarriers : WrapperKernelBase<128, 1, 2 * 1024 + 256 + 32> {
  static MLA_DEVICE void run(const Params& p) {
    const auto thread = static_cast<uint32_t>(ptx::thread_index());
    const ptx::SharedAddress stages = ptx::shared_address(ptx::shared_memory());
    const ptx::SharedAddress own = stages + 2048 + thread % 64 * 4;
    const ptx::SharedAddress full = stages + 2048 + 256;
    const ptx::SharedAddress empty = full + 16;
    if (thread == 0) {
      for (uint32_t stage = 0; stage < 2; ++stage) {
        ptx::mbarrier_init(full + stage * 8, 64);
        ptx::mbarrier_init(empty + stage * 8, 64);
      }
      ptx::fence_mbarrier_init();
    }
    ptx::sync_block();
    uint32_t sums[4] = {};
    for (uint32_t tile = 0; tile < 6; ++tile) {
      const uint32_t stage = tile % 2;
      const uint32_t parity = tile / 2 % 2;
      if (thread < 64) {
        ptx::mbarrier_wait(empty + stage * 8, parity ^ 1);
        ptx::cp_async_16(stages + stage * 1024 + thread * 16, p.in + tile * 256 + thread * 4, thread % 32 != 7,
                         ptx::kEvictFirst);
        ptx::mbarrier_arrive_after_copies(full + stage * 8);
        ptx::cp_async_4(own, p.in + 2048 + tile * 64 + thread, true);
        ptx::cp_async_commit();
        if (tile % 3 == 2) ptx::cp_async_wait<0>();
        if (tile % 3 == 2) sums[0] += ptx::load_shared<uint32_t>(own);
      } else {
        ptx::mbarrier_wait(full + stage * 8, parity);
        const auto v = ptx::load_shared<ptx::Vec4>(stages + stage * 1024 + ((thread - 64) ^ 33) * 16);
        MLA_UNROLL
        for (int i = 0; i < 4; ++i) sums[i] += v.x[i];
        ptx::mbarrier_arrive(empty + stage * 8);
      }
    }
    for (int i = 0; i < 4; ++i) p.out[thread * 4 + static_cast<uint32_t>(i)] = sums[i];
  }
};

/// Copies two boxes of a tensor, of two heads each: out = the words of shared memory that they lie in. The first box
/// ends behind the tensor's last channel, the second behind its last row and its last head.
struct TensorCopies : WrapperKernelBase<32, 1, 2 * 2048 + 8> {
  static constexpr cuda::RowTensor kTensor = {.channels = 104,
                                              .rows = 21,
                                              .heads = 3,
                                              .row_stride = 320,
                                              .head_stride = 21 * 320 + 16,
                                              .box_rows = 8,
                                              .box_heads = 2};
  struct Params {
    cuda::WrapperParams memory;
    cuda::TensorMap map;
  };

  static MLA_DEVICE void run(const Params& p) {
    const auto thread = static_cast<uint32_t>(ptx::thread_index());
    const ptx::SharedAddress boxes = ptx::shared_address(ptx::shared_memory()), full = boxes + 2 * 2048;
    if (thread == 0) {
      ptx::mbarrier_init(full, 1);
      ptx::fence_mbarrier_init();
      ptx::mbarrier_arrive_expect_bytes(full, 2 * 2048);
      ptx::tensor_copy(boxes, &p.map, 64, 3, 1, full);
      ptx::tensor_copy(boxes + 2048, &p.map, 0, 16, 2, full);
    }
    ptx::sync_block();
    ptx::mbarrier_wait(full, 0);
    for (uint32_t word = thread; word < 1024; word += 32)
      p.memory.out[word] = ptx::load_shared<uint32_t>(boxes + word * 4);
  }
};

inline Status launch_tensor_copies(cuda::Queue& queue, const cuda::WrapperParams& memory) {
  TensorCopies::Params params = {memory, {}};
  cuda::RowTensor tensor = TensorCopies::kTensor;
  tensor.base = memory.in;
  if (!queue.make_tensor_map(tensor, params.map)) return {StatusCode::kInternal, "the tensor has no map"};
  return launch<TensorCopies>(queue, TensorCopies::kShape, params);
}

/// Runs two clusters of two blocks. Each block hands the other one six tiles: out[block * 128 + thread] = the sum of
/// what the other's thread ^ 32 had, and the block's rank.
struct Clusters : WrapperKernelBase<128> {
  static constexpr cuda::LaunchShape kShape{.grid_x = 4, .cluster = 2, .shared_bytes = 2 * 2048 + 16};

  static MLA_DEVICE void run(const Params& p) {
    const auto thread = static_cast<uint32_t>(ptx::thread_index()), block = static_cast<uint32_t>(ptx::block_index_x());
    const ptx::SharedAddress own = ptx::shared_address(ptx::shared_memory()), others = own + 2048;
    const ptx::SharedAddress full = others + 2048, room = full + 8;
    const auto in_other = [](ptx::SharedAddress address) { return ptx::map_shared(address, ptx::cluster_rank() ^ 1); };
    if (thread == 0) {
      ptx::mbarrier_init(full, 1);
      ptx::mbarrier_init(room, 128);
      ptx::fence_mbarrier_init();
    }
    ptx::sync_block();
    ptx::sync_cluster();
    uint32_t sum = static_cast<uint32_t>(ptx::cluster_rank());
    for (uint32_t tile = 0; tile < 6; ++tile) {
      if (tile > 0) ptx::mbarrier_wait(room, (tile - 1) % 2);  // and the other block has got the tile before
      ptx::store_shared(own + thread * 16, reinterpret_cast<const ptx::Vec4*>(p.in)[(tile * 4 + block) * 128 + thread]);
      ptx::fence_async_proxy();
      ptx::sync_block();
      if (thread == 0) {
        ptx::bulk_copy_in_cluster(in_other(others), own, 2048, in_other(full));
        ptx::mbarrier_arrive_expect_bytes(full, 2048);
      }
      ptx::mbarrier_wait(full, tile % 2);
      const auto v = ptx::load_shared<ptx::Vec4>(others + (thread ^ 32) * 16);
      sum += v.x[0] ^ v.x[1] ^ v.x[2] ^ v.x[3];
      ptx::mbarrier_arrive_in_cluster(in_other(room));
    }
    p.out[block * 128 + thread] = sum;
    ptx::sync_cluster();  // the other block's last arrivals
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE
#endif
