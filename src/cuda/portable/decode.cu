// SPDX-License-Identifier: Apache-2.0
// decode, decode_sparse and prefill_sparse: their arguments in the absorbed kernel's form.
#include <algorithm>
#include <bit>

#include "cuda/portable/absorbed_host.cuh"
#include "cuda/portable_operations.h"

namespace mla::MLA_CUDA_NAMESPACE {
namespace {

bool is_chunked(const core::Plane& plane) {
  return reinterpret_cast<uintptr_t>(plane.base) % kChunkBytes == 0 && plane.stride_page % kChunkBytes == 0 &&
         plane.stride_token % kChunkBytes == 0;
}

/// How far behind the end of one part of every row another begins; -1: that differs.
int64_t bytes_behind(const core::Plane& part, int64_t part_bytes, const core::Plane& other) {
  const int64_t distance = static_cast<const std::byte*>(other.base) - static_cast<const std::byte*>(part.base);
  const bool together = other.stride_page == part.stride_page && other.stride_token == part.stride_token;
  return together && distance >= part_bytes ? distance - part_bytes : -1;
}

cuda::KeyPool pool_of(const core::Cache& cache) {
  cuda::KeyPool pool{.cache = cache};
  pool.aligned = is_chunked(cache.ckv) && (cache.d_kpe == 0 || is_chunked(cache.kpe));
  const int64_t latent_bytes = int64_t{cache.d_ckv} * (cache.num_scales > 0 ? 1 : 2);
  const int64_t gap = pool.aligned ? bytes_behind(cache.ckv, latent_bytes, cache.kpe) : -1;
  pool.scales_inside =
      gap == kChunkBytes && cache.num_scales > 1 && bytes_behind(cache.ckv, latent_bytes, cache.scales) == 0;
  pool.whole = cache.d_kpe > 0 && (gap == 0 || pool.scales_inside);
  pool.landed_rope_at = static_cast<int32_t>(latent_bytes + (pool.scales_inside ? gap : 0));
  // Channels of a scale are a power of two in all formats.
  if (cache.num_scales > 1)
    pool.scale_shift = std::countr_zero(static_cast<uint32_t>(cache.d_ckv / cache.num_scales / kVector));
  return pool;
}

/// What all three have.
template <class Args>
cuda::AbsorbedArgs common_args(const Args& args) {
  cuda::AbsorbedArgs to;
  to.num_heads = args.num_heads;
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
  to.queries = args.queries;
  to.options = args.options;
  to.sm_scale = args.sm_scale;
  to.lse_base = args.lse_base;
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

AbsorbedProblem<core::DecodeArgs> problem_of(const core::DecodeArgs& args) {
  cuda::AbsorbedArgs to = common_args(args);
  to.pools[0] = pool_of(args.cache);
  to.pages = args.pages;
  to.causal = args.causal;
  to.tree_mask = args.tree_mask;
  to.tree_mask_stride_token = args.tree_mask_stride_token;
  to.tree_parents = args.tree_parents;
  to.context_parallel = args.context_parallel;
  // A request's share of a ragged batch is not known here. batch_invariant may not even look at the batch.
  const int64_t queries =
      args.batch_invariant ? 1 : (args.num_tokens + args.batch_size - 1) / std::max(args.batch_size, 1);
  return {args, to, args.cache.num_slots(), absorbed_block_rows(std::max<int64_t>(queries, 1) * args.num_heads)};
}

AbsorbedProblem<core::DecodeSparseArgs> problem_of(const core::DecodeSparseArgs& args) {
  cuda::AbsorbedArgs to = common_args(args);
  int64_t max_keys = 0;
  for (int32_t i = 0; i < args.num_pools; ++i) {
    const core::PoolArgs& pool = args.pools[i];
    to.pools[i] = pool_of(pool.cache);
    to.pools[i].indices = pool.indices;
    to.pools[i].indices_stride_token = pool.indices_stride_token;
    to.pools[i].topk = pool.topk;
    to.pools[i].topk_length = pool.topk_length;
    to.pools[i].length_per_request = pool.length_per_request;
    max_keys += pool.topk + 64;
  }
  to.max_logits = args.max_logits;
  to.max_logits_stride_token = args.max_logits_stride_token;
  to.max_logits_stride_head = args.max_logits_stride_head;
  return {args, to, max_keys, absorbed_block_rows(args.num_heads)};
}

}  // namespace

size_t decode_workspace_size(const core::DecodeArgs& args, const cuda::DeviceProperties& device) {
  return problem_of(args).workspace_size(device);
}
Status plan_decode(const core::DecodeArgs& args, cuda::Queue& queue, std::span<std::byte> workspace) {
  return problem_of(args).plan(queue, workspace);
}
Status run_decode(const core::DecodeArgs& args, cuda::Queue& queue, std::span<std::byte> workspace) {
  return problem_of(args).run(queue, workspace);
}

size_t decode_sparse_workspace_size(const core::DecodeSparseArgs& args, const cuda::DeviceProperties& device) {
  return problem_of(args).workspace_size(device);
}
Status plan_decode_sparse(const core::DecodeSparseArgs& args, cuda::Queue& queue, std::span<std::byte> workspace) {
  return problem_of(args).plan(queue, workspace);
}
Status run_decode_sparse(const core::DecodeSparseArgs& args, cuda::Queue& queue, std::span<std::byte> workspace) {
  return problem_of(args).run(queue, workspace);
}

}  // namespace mla::MLA_CUDA_NAMESPACE
