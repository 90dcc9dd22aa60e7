// SPDX-License-Identifier: Apache-2.0
// This is the host side of absorbed attention, whichever kernels compute it. It brings the arguments into the kernels'
// form, chooses the size of the grid, and launches plan, attention and combine.
#pragma once

#include <algorithm>
#include <bit>
#include <span>

#include "cuda/attention/absorbed_args.h"
#include "cuda/attention/block_rows.h"
#include "cuda/attention/key_kind.h"
#include "cuda/border/launch.h"
#include "cuda/border/operations.h"
#include "cuda/common/combine.h"
#include "cuda/common/operations.h"
#include "cuda/common/plan.h"
#include "cuda/tile/channels.cuh"
#include "cuda/tile/tile.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Returns the query rows of a block: small blocks are chosen where one holds all rows of a usual request.
inline int32_t absorbed_block_rows(int64_t rows_per_request) {
  constexpr int32_t kLargeBlockRows = 64;
  return rows_per_request <= cuda::kSmallBlockRows ? cuda::kSmallBlockRows : kLargeBlockRows;
}

/// Returns the shape of the work list that the plan makes for a kernel.
template <class Kernel>
cuda::WorkShape absorbed_shape(const cuda::AbsorbedArgs& args, int64_t num_tokens, int64_t max_keys,
                               bool batch_invariant, const cuda::DeviceProperties& device) {
  cuda::WorkShape shape;
  shape.max_tokens = num_tokens;
  shape.batch = args.sparse() ? static_cast<int32_t>(num_tokens) : args.batch_size;
  shape.num_heads = args.num_heads.value;
  shape.d_v = args.d_v;
  shape.block_rows = Kernel::Config::kRows;
  shape.step_keys = Kernel::Config::kPlanKeys;
  shape.max_grid_blocks = std::max(device.num_sms * Kernel::kMinBlocks / Kernel::kCluster, 1) * Kernel::kCluster;
  shape.batch_invariant = batch_invariant;
  shape.max_keys = max_keys;
  // A step of scattered rows takes longer than one of pages, so that a split costs fewer of them. With 3, lists of 512
  // keys stayed whole and most multiprocessors idle: 16 tokens of 16, 64 and 128 heads took 20.1, 24.8, 25.6 us instead
  // of 11.2, 20.2, 24.5; with 1, 32 tokens of 128 heads take 29.2 instead of 26.6 (bf16, H100, 2026-11-27).
  if (args.sparse()) shape.split_costs = {.segment = 2, .split = 2};
  if constexpr (requires { Kernel::split_costs(args, shape.split_costs); })
    shape.split_costs = Kernel::split_costs(args, shape.split_costs);
  return shape;
}

/// Returns whether a kernel for KeyKind::kE4M3 can compute the rows.
inline bool has_plain_e4m3(const cuda::AbsorbedArgs& args) {
  const core::Cache& cache = args.pools[0].cache;
  return args.num_pools() == 1 && cache.has_common_e4m3() && cache.num_scales == 1 && !cache.writes_scales &&
         cache.d_ckv == args.d_v && (cache.d_kpe == 0 || cache.kpe_dtype == DType::kE4M3);
}

/// Calls f.operator()<kLatentDims, kKind>() with the width and the kind of the rows of the arguments' caches. Kernels
/// are compiled for the widths and kinds that are listed here.
template <class F>
auto with_key_rows(const cuda::AbsorbedArgs& args, const F& f) {
  const auto for_width = [&]<int kLatentDims>() {
    switch (key_kind(args.pools[0].cache.ckv_dtype)) {
      case KeyKind::kQuantized: return f.template operator()<kLatentDims, KeyKind::kQuantized>();
      case KeyKind::kF16: return f.template operator()<kLatentDims, KeyKind::kF16>();
      default: break;
    }
    return f.template operator()<kLatentDims, KeyKind::kBF16>();
  };
  return args.d_v == 512 ? for_width.template operator()<512>() : for_width.template operator()<256>();
}

/// Stands for a number of steps that is not known on the host.
inline constexpr int64_t kUnknownSteps = INT64_MAX;

/// Returns how many steps of 32 keys the smallest blocks have in all, as far as the lists of decode_sparse tell.
inline int64_t steps_of_small_blocks(const core::DecodeSparseArgs& args) {
  constexpr int32_t kStepKeys = 32;
  // With batch_invariant the choice of a kernel must not depend on how many tokens there are.
  if (args.batch_invariant) return kUnknownSteps;
  int64_t steps = 0;
  for (int32_t i = 0; i < args.num_pools; ++i) steps += (args.pools[i].topk + kStepKeys - 1) / kStepKeys;
  return args.num_tokens * ((args.num_heads + cuda::kSmallBlockRows - 1) / cuda::kSmallBlockRows) * steps;
}

/// Launches the kernel that Kernels::with() picked, or another one that takes the same work list, if `Kernels` has a
/// function launch() that says so.
template <class Kernels, class Kernel>
Status launch_attention(cuda::Queue& queue, const cuda::LaunchShape& shape, const cuda::AbsorbedArgs& args) {
  if constexpr (requires { Kernels::template launch<Kernel>(queue, shape, args); })
    return Kernels::template launch<Kernel>(queue, shape, args);
  else
    return launch<Kernel>(queue, shape, args);
}

/// Holds a problem in the kernels' form: all that does not depend on which kernel computes it. Kernels::with(args,
/// block_rows, small_steps, f) calls f with the kernel for arguments of these shapes: blocks of up to `block_rows`
/// query rows are enough, and the smallest ones would have `small_steps` steps on each multiprocessor.
template <class Kernels, class Args>
struct AbsorbedProblem {
  const Args& args;
  cuda::AbsorbedArgs kernel_args;
  int64_t max_keys;
  int32_t block_rows;
  int64_t small_steps;  // steps_of_small_blocks(), or kUnknownSteps

  /// The constructor is spelled out because GCC 12 spoils the pools of a braced list where it is told to fill registers
  /// with a pattern (docs/emulator.md).
  AbsorbedProblem(const Args& problem, const cuda::AbsorbedArgs& launch_args, int64_t keys, int32_t rows, int64_t steps)
      : args(problem), kernel_args(launch_args), max_keys(keys), block_rows(rows), small_steps(steps) {}

  size_t workspace_size(const cuda::DeviceProperties& device) const {
    return with(device, [&]<class Kernel>() { return work_list_bytes(shape<Kernel>(device)); });
  }
  Status plan(cuda::Queue& queue, std::span<std::byte> workspace) const {
    return with(queue.device(), [&]<class Kernel>() {
      const cuda::WorkShape work = shape<Kernel>(queue.device());
      return plan_work(work, args, place_work_list(work, workspace.data()), queue);
    });
  }
  Status run(cuda::Queue& queue, std::span<std::byte> workspace) const {
    return with(queue.device(), [&]<class Kernel>() -> Status {
      const cuda::WorkShape work = shape<Kernel>(queue.device());
      cuda::AbsorbedArgs launched = kernel_args;
      launched.list = place_work_list(work, workspace.data());
      Status status = launch_attention<Kernels, Kernel>(queue,
                                                        {.grid_x = work.max_grid_blocks,
                                                         .cluster = Kernel::kCluster,
                                                         .shared_bytes = Kernel::Config::kSharedBytes,
                                                         .overlaps_previous = true},
                                                        launched);
      if (!status.ok()) return status;
      return combine_work(work, args, launched.list, Kernel::kStartsEarly, queue);
    });
  }

 private:
  template <class Kernel>
  cuda::WorkShape shape(const cuda::DeviceProperties& device) const {
    return absorbed_shape<Kernel>(kernel_args, args.num_tokens, max_keys, args.batch_invariant, device);
  }
  template <class F>
  auto with(const cuda::DeviceProperties& device, const F& f) const {
    return Kernels::with(kernel_args, block_rows, small_steps / device.num_sms, f);
  }
};

/// Returns whether a plane has all its rows at multiples of `bytes`.
inline bool has_rows_at(const core::Plane& plane, int bytes) {
  return reinterpret_cast<uintptr_t>(plane.base) % static_cast<uintptr_t>(bytes) == 0 &&
         plane.stride_page % bytes == 0 && plane.stride_token % bytes == 0;
}

/// Returns how many bytes lie between the end of a row's elements in one plane (`row_bytes` of them) and the beginning
/// of its elements in another; -1 if that differs from row to row, or `next` does not follow `plane`.
inline int64_t bytes_between(const core::Plane& plane, int64_t row_bytes, const core::Plane& next) {
  const int64_t distance = static_cast<const std::byte*>(next.base) - static_cast<const std::byte*>(plane.base);
  const bool together = next.stride_page == plane.stride_page && next.stride_token == plane.stride_token;
  return together && distance >= row_bytes ? distance - row_bytes : -1;
}

/// Returns all that kernels need to know of the rows of a cache.
inline cuda::KeyPool pool_of(const core::Cache& cache) {
  cuda::KeyPool pool{.cache = cache, .page_size = cuda::FastDivisor(cache.page_size)};
  const int scale_bytes = cache.num_scales * size_of(cache.scale_type);
  pool.ckv_bytes = cache.ckv_bytes();
  pool.kpe_bytes = cache.kpe_bytes();
  pool.scale_words = (scale_bytes + 3) / 4;
  pool.ue8m0 = cache.scale_type == ScaleType::kUE8M0;
  pool.quantized_kpe = cache.has_quantized_kpe();
  pool.row_kpe_scale = cache.writes_kpe_scale();
  pool.common_e4m3 = cache.has_common_e4m3();
  pool.common_e2m1 = cache.ckv_dtype == DType::kE2M1 && size_of(cache.scale_type) == 1 && cache.outer_scale == nullptr;
  pool.aligned = has_rows_at(cache.ckv, kChunkBytes) && (cache.d_kpe == 0 || has_rows_at(cache.kpe, kChunkBytes));
  const bool scales_follow =
      cache.num_scales > 1 && scale_bytes <= kChunkBytes && bytes_between(cache.ckv, pool.ckv_bytes, cache.scales) == 0;
  // Of rows without rotary channels it is the bytes that one copy also brings.
  const int64_t gap = !pool.aligned     ? -1
                      : cache.d_kpe > 0 ? bytes_between(cache.ckv, pool.ckv_bytes, cache.kpe)
                      : scales_follow && scale_bytes == kChunkBytes ? kChunkBytes
                                                                    : 0;
  pool.direct = gap >= 0 && has_rows_at(cache.scales, 4);
  pool.kpe_distance = pool.ckv_bytes + gap;
  pool.scales_inside = gap == kChunkBytes && scales_follow;
  pool.contiguous = gap == 0 || pool.scales_inside;
  pool.landed_rope_at = static_cast<int32_t>(pool.ckv_bytes + (pool.scales_inside ? gap : 0));
  // In all formats the number of channels that share a scale is a power of two.
  if (cache.num_scales > 1)
    pool.scale_shift =
        static_cast<int32_t>(std::bit_width(static_cast<uint32_t>(cache.channels_per_scale / kVector))) - 1;
  return pool;
}

/// Returns how long the L2 cache keeps the rows of sparse attention. The tokens of a prompt read the same rows again
/// and again while queries and outputs stream past: these rows stay. Others leave first, as those of decode do. A
/// prompt is known by its many tokens, or by lists that name each row often (docs/notebook/2026-11-27-row-policy.md:
/// 4,096 tokens of 16 heads from 3.12 to 2.18 ms; but 64 single tokens of 128 heads would take 110 us instead of 102).
inline ptx::CachePolicy row_policy_of(const core::DecodeSparseArgs& args) {
  constexpr int64_t kManyTokens = 512, kManyReads = 8;
  int64_t listed = 0, slots = 0;
  for (int32_t i = 0; i < args.num_pools; ++i) {
    listed += args.num_tokens * args.pools[i].topk;
    slots += args.pools[i].cache.num_slots();
  }
  return args.num_tokens >= kManyTokens || listed >= kManyReads * slots ? ptx::kEvictLast : ptx::kEvictFirst;
}

/// Returns the arguments that decode, decode_sparse and prefill_sparse have in common.
template <class Args>
cuda::AbsorbedArgs common_args(const Args& args) {
  cuda::AbsorbedArgs to;
  to.num_heads = cuda::FastDivisor(args.num_heads);
  to.d_qk = args.d_qk;
  to.d_v = args.d_v;
  to.q_dtype = args.q_dtype;
  to.q_scale = args.q_scale;
  to.q_nope = args.q_nope;
  to.q_nope_stride_token = args.q_nope_stride_token;
  to.q_nope_stride_head = args.q_nope_stride_head;
  to.q_pe = args.q_pe;
  to.q_pe_stride_token = args.q_pe_stride_token;
  to.q_pe_stride_head = args.q_pe_stride_head;
  to.batch_size = args.batch_size;
  to.num_tokens = args.num_tokens;
  to.batch_invariant = args.batch_invariant;
  to.queries = args.queries;
  to.options = args.options;
  to.sm_scale = args.sm_scale;
  to.lse_form = args.lse_form;
  to.o_dtype = args.o_dtype;
  to.o_scale = args.o_scale;
  to.o = args.o;
  to.o_stride_token = args.o_stride_token;
  to.o_stride_head = args.o_stride_head;
  to.lse = args.lse;
  to.lse_stride_token = args.lse_stride_token;
  to.lse_stride_head = args.lse_stride_head;
  return to;
}

template <class Kernels>
AbsorbedProblem<Kernels, core::DecodeArgs> problem_of(const core::DecodeArgs& args) {
  cuda::AbsorbedArgs to = common_args(args);
  to.pools[0] = pool_of(args.cache);
  to.row_policy = ptx::kEvictFirst.bits;
  to.pages = args.pages;
  to.causal = args.causal;
  to.tree_mask = args.tree_mask;
  to.tree_mask_stride_token = args.tree_mask_stride_token;
  to.tree_parents = args.tree_parents;
  to.context_parallel = args.context_parallel;
  return {args, to, args.cache.num_slots(), absorbed_block_rows(args.usual_q_len() * args.num_heads), kUnknownSteps};
}

template <class Kernels>
AbsorbedProblem<Kernels, core::DecodeSparseArgs> problem_of(const core::DecodeSparseArgs& args) {
  constexpr int64_t kMostPlanKeys = 64;  // no kernel's Config::kPlanKeys is larger
  cuda::AbsorbedArgs to = common_args(args);
  to.row_policy = row_policy_of(args).bits;
  int64_t max_keys = 0;
  for (int32_t i = 0; i < args.num_pools; ++i) {
    const core::PoolArgs& pool = args.pools[i];
    to.pools[i] = pool_of(pool.cache);
    to.pools[i].indices = pool.indices;
    to.pools[i].indices_stride_token = pool.indices_stride_token;
    to.pools[i].topk = pool.topk;
    to.pools[i].topk_length = pool.topk_length;
    to.pools[i].length_per_request = pool.length_per_request;
    max_keys += pool.topk + kMostPlanKeys;  // make_key_list() rounds the length of pool 0 up to a multiple of kPlanKeys
  }
  to.max_logits = args.max_logits;
  to.max_logits_stride_token = args.max_logits_stride_token;
  to.max_logits_stride_head = args.max_logits_stride_head;
  return {args, to, max_keys, absorbed_block_rows(args.num_heads), steps_of_small_blocks(args)};
}

/// Returns the attention of a problem. If outputs are finished behind it, it stores them one behind another, in a type
/// that holds what queries of that type do; bf16 is what the fast kernels of finish_output take.
template <class Args>
Args attention_of(const Args& args) {
  Args attention = args;
  if constexpr (requires { args.finishes; }) {
    if (!args.finishes) return attention;
    attention.finishes = false;
    attention.o_dtype = args.q_dtype == DType::kBF16 || args.q_dtype == DType::kE4M3 ? DType::kBF16 : DType::kF32;
    attention.o_stride_token = int64_t{args.num_heads} * args.d_v;
    attention.o_stride_head = args.d_v;
  }
  return attention;
}

/// Returns whether the outputs of the attention lie in the workspace, behind the work list, and are finished from
/// there.
template <class Args>
bool finishes_outputs(const Args& args) {
  if constexpr (requires { args.finishes; }) return args.finishes;
  return false;
}

/// Returns decode or decode_sparse of a backend whose kernels of absorbed attention are `Kernels`.
template <class Kernels, class Args>
cuda::PlannedOperation<Args> absorbed_operation() {
  struct Calls {
    static size_t workspace_size(const Args& args, const cuda::DeviceProperties& device) {
      const Args attention = attention_of(args);
      size_t bytes = problem_of<Kernels>(attention).workspace_size(device);
      if (finishes_outputs(args))
        bytes += static_cast<size_t>(args.num_tokens * attention.o_stride_token) * size_of(attention.o_dtype);
      return bytes;
    }
    static Status plan(const Args& args, cuda::Queue& queue, std::span<std::byte> workspace) {
      const Args attention = attention_of(args);
      return problem_of<Kernels>(attention).plan(queue, workspace);
    }
    static Status run(const Args& args, cuda::Queue& queue, std::span<std::byte> workspace) {
      Args attention = attention_of(args);
      if (finishes_outputs(args))
        attention.o = workspace.data() + problem_of<Kernels>(attention).workspace_size(queue.device());
      const Status status = problem_of<Kernels>(attention).run(queue, workspace);
      if constexpr (requires { args.finishes; }) {
        if (args.finishes && status.ok())
          return run_finish_output(args.finish_from(attention.o, attention.o_dtype), queue);
      }
      return status;
    }
  };
  return {.workspace_size = Calls::workspace_size, .plan = Calls::plan, .run = Calls::run};
}

}  // namespace mla::MLA_CUDA_NAMESPACE
