// SPDX-License-Identifier: Apache-2.0
// The host side of absorbed attention: which block shape, how large a grid, then plan, attention, combine.
#pragma once

#include <algorithm>
#include <span>

#include "cuda/common/combine.h"
#include "cuda/common/plan.h"
#include "cuda/portable/absorbed.cuh"
#include "cuda/portable/specialized.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Calls f with the kernel for arguments of these shapes.
template <class F>
auto with_absorbed_kernel(const cuda::AbsorbedArgs& args, int32_t block_rows, const F& f) {
  const auto for_parts = [&]<int kLatentDims, KeyKind kKind>() {
    constexpr DType kType = kKind == KeyKind::kF16 ? DType::kF16 : DType::kBF16;
    if (args.q_dtype != kType && args.q_dtype != DType::kE4M3)
      return f.template operator()<AbsorbedKernel<AbsorbedConfig<16, kLatentDims, kKind, 2>>>();
    constexpr bool kSpecialized = SpecializedConfig<16, kLatentDims, kKind>::kAvailable;
    if constexpr (kSpecialized) {
      if (block_rows == 16)
        return f.template operator()<SpecializedKernel<SpecializedConfig<16, kLatentDims, kKind>>>();
    } else {
      if (block_rows == 16) return f.template operator()<AbsorbedKernel<AbsorbedConfig<16, kLatentDims, kKind, 1>>>();
    }
    if constexpr (kSpecialized && kKind != KeyKind::kE4M3) {
      return f.template operator()<SpecializedKernel<SpecializedConfig<64, kLatentDims, kKind>>>();
    } else {
      // SM100 has the memory for 64 rows, but nvcc 13.0 spills 20 to 90 bytes there. Re-check:
      // tests/cuda/ptxas_reports.py.
      constexpr int kLargeRows = kSharedBytesPerBlock >= 163 * 1024 && kArch != 100 ? 64 : 32;
      return f.template operator()<AbsorbedKernel<AbsorbedConfig<kLargeRows, kLatentDims, kKind, 1>>>();
    }
  };
  const auto for_kind = [&]<int kLatentDims>() {
    const core::Cache& cache = args.pools[0].cache;
    if (cache.num_scales > 0) return for_parts.template operator()<kLatentDims, KeyKind::kE4M3>();
    if (cache.format == CacheFormat::kF16) return for_parts.template operator()<kLatentDims, KeyKind::kF16>();
    return for_parts.template operator()<kLatentDims, KeyKind::kBF16>();
  };
  return args.d_v == 512 ? for_kind.template operator()<512>() : for_kind.template operator()<256>();
}

/// Small blocks where one holds all rows of a usual request: they read each key once and are bound by memory.
inline int32_t absorbed_block_rows(int64_t rows_per_request) { return rows_per_request <= 16 ? 16 : 64; }

/// The shape of the plan for a kernel.
template <class Config>
cuda::WorkShape absorbed_shape(const cuda::AbsorbedArgs& args, int64_t num_tokens, int64_t max_keys,
                               bool batch_invariant, const cuda::DeviceProperties& device) {
  cuda::WorkShape shape;
  shape.max_tokens = num_tokens;
  shape.batch = args.sparse() ? static_cast<int32_t>(num_tokens) : args.batch_size;
  shape.num_heads = args.num_heads;
  shape.d_v = args.d_v;
  shape.block_rows = Config::kRows;
  shape.key_block = Config::kPlanKeys;
  shape.max_grid_blocks = device.num_sms * Config::kMinBlocks;
  shape.batch_invariant = batch_invariant;
  shape.max_keys = max_keys;
  return shape;
}

/// Everything about a problem that does not depend on the configuration.
template <class Args>
struct AbsorbedProblem {
  const Args& args;
  cuda::AbsorbedArgs kernel_args;
  int64_t max_keys;
  int32_t block_rows;

  /// Spelled out: GCC 12 spoils the pools of a braced list where it fills registers with a pattern. docs/emulator.md
  AbsorbedProblem(const Args& problem, const cuda::AbsorbedArgs& launch_args, int64_t keys, int32_t rows)
      : args(problem), kernel_args(launch_args), max_keys(keys), block_rows(rows) {}

  size_t workspace_size(const cuda::DeviceProperties& device) const {
    return with([&]<class Kernel>() { return work_list_bytes(shape<Kernel>(device)); });
  }
  Status plan(cuda::Queue& queue, std::span<std::byte> workspace) const {
    return with([&]<class Kernel>() {
      const cuda::WorkShape work = shape<Kernel>(queue.device());
      return plan_work(work, args, place_work_list(work, workspace.data()), queue);
    });
  }
  Status run(cuda::Queue& queue, std::span<std::byte> workspace) const {
    return with([&]<class Kernel>() -> Status {
      const cuda::WorkShape work = shape<Kernel>(queue.device());
      cuda::AbsorbedArgs launched = kernel_args;
      launched.list = place_work_list(work, workspace.data());
      Status status = launch<Kernel>(
          queue,
          {.grid_x = work.max_grid_blocks, .shared_bytes = Kernel::Config::kSharedBytes, .overlaps_previous = true},
          launched);
      if (!status.ok()) return status;
      return combine_work(work, args, launched.list, queue);
    });
  }

 private:
  template <class Kernel>
  cuda::WorkShape shape(const cuda::DeviceProperties& device) const {
    return absorbed_shape<typename Kernel::Config>(kernel_args, args.num_tokens, max_keys, args.batch_invariant,
                                                   device);
  }
  template <class F>
  auto with(const F& f) const {
    return with_absorbed_kernel(kernel_args, block_rows, f);
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE
