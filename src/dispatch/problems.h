// SPDX-License-Identifier: Apache-2.0
// Says which problem a call of an operation without a plan is, by which a row is selected.
#pragma once

#include <algorithm>

#include "core/args.h"
#include "mla/backend.h"

namespace mla::dispatch {

inline Problem problem_of(const core::MergeStatesArgs& a, Device device) {
  return {Op::kMergeStates, device, a.partial_dtype, CacheFormat::kBF16, a.num_heads, a.d_v, a.d_v};
}
/// Returns the problem of an operation that brings rows of `dtype` to or from a cache.
inline Problem cache_problem(Op op, Device device, DType dtype, const core::Cache& cache, int64_t num_heads = 1) {
  return {op, device, dtype, cache.format, num_heads, cache.d_ckv + cache.d_kpe, cache.d_ckv};
}
inline Problem problem_of(const core::AppendArgs& a, Device device) {
  return cache_problem(Op::kAppend, device, a.dtype, a.cache);
}
inline Problem problem_of(const core::AppendRopeArgs& a, Device device) {
  return cache_problem(Op::kAppendRope, device, a.dtype, a.cache, std::max(a.num_heads, 1));
}
inline Problem problem_of(const core::GatherArgs& a, Device device) {
  return cache_problem(Op::kGather, device, a.out_dtype, a.cache);
}
inline Problem problem_of(const core::CopyPagesArgs& a, Device device) {
  return cache_problem(Op::kCopyPages, device, DType::kBF16, a.to);
}
inline Problem problem_of(const core::BlockTableToCsrArgs&, Device device) {
  return {.op = Op::kBlockTableToCsr, .device = device};
}
inline Problem problem_of(const core::PhysicalSlotsArgs&, Device device) {
  return {.op = Op::kPhysicalSlots, .device = device};
}
/// Returns the problem of an operation on the indexer's keys, which are as wide as their layout says.
inline Problem indexer_problem(Op op, Device device, DType dtype, int64_t num_heads, const core::IndexerPages& cache) {
  Problem problem = {
      op, device, dtype, CacheFormat::kBF16, num_heads, kIndexerLayout.head_dim, kIndexerLayout.head_dim};
  problem.indexer_format = cache.format;
  return problem;
}
inline Problem problem_of(const core::AppendIndexerArgs& a, Device device) {
  return indexer_problem(Op::kAppendIndexer, device, a.dtype, 1, a.cache);
}
inline Problem problem_of(const core::IndexerLogitsArgs& a, Device device) {
  Problem problem = indexer_problem(Op::kIndexerLogits, device, a.q_dtype, a.num_heads, a.cache);
  problem.logits_dtype = a.logits_dtype;
  if (!a.multiplies_e4m3()) problem.compute = Compute::kExact;
  return problem;
}
inline Problem problem_of(const core::TopKArgs& a, Device device) {
  Problem problem{.op = Op::kTopK, .device = device, .q_dtype = DType::kF32};
  problem.logits_dtype = a.logits_dtype;
  return problem;
}
inline Problem problem_of(const core::IndexerTopKArgs& a, Device device) {
  Problem problem = problem_of(a.indexer, device);
  problem.op = Op::kIndexerTopK;
  return problem;
}

inline Problem problem_of(const core::CompressArgs& a, Device device) {
  if (a.to == core::CompressArgs::To::kCache) return cache_problem(Op::kCompress, device, a.dtype, a.cache);
  return {Op::kCompress, device, a.dtype, CacheFormat::kBF16, 1, a.d_latent, a.d_latent};
}

inline Problem problem_of(const core::FinishOutputArgs& a, Device device) {
  return {Op::kFinishOutput, device, a.o_dtype, CacheFormat::kBF16, a.num_heads, a.d_v, a.d_v};
}

}  // namespace mla::dispatch
