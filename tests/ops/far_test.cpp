// SPDX-License-Identifier: Apache-2.0
// Runs every operation on tensors whose rows, pages and scales lie further apart than 32 bits count, on the CPU and on
// emulated GPUs, whose memory is the host's: what comes out is what the reference says of the same rows side by side.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "backend_test.h"
#include "device_test.h"
#include "far_memory.h"
#include "fenced_memory.h"

namespace mla {
namespace {

constexpr int64_t kAnySlot = INT64_MAX, kInt32Slot = INT32_MAX;

template <class Params>
void move_caches(FarMemory&, Params&) {}

void move_caches(FarMemory& far, DecodeParams& params) {
  far.move_cache(params.cache, kAnySlot);
  far.renumber(params.pages);
}
void move_caches(FarMemory& far, DecodeSparseParams& params) {
  for (SparsePool* pool : {&params.pool, &params.extra_pool}) {
    if (!pool->indices.given()) continue;
    far.move_cache(pool->cache, kInt32Slot);
    far.renumber_slots<int32_t>(pool->indices);
  }
}
void move_caches(FarMemory& far, GatherParams& params) {
  far.move_cache(params.cache, kAnySlot);
  far.renumber(params.pages);
  far.renumber_tokens(params.token_start);
}
template <class Params>
requires requires(Params params) { params.slot_mapping; }
void move_caches(FarMemory& far, Params& params) {
  far.move_cache(params.cache, kAnySlot);
  far.renumber_slots<int64_t>(params.slot_mapping);
}
void move_caches(FarMemory& far, CompressParams& params) {
  if (params.indexer.kv.given())
    far.move_cache(params.indexer, kAnySlot);
  else
    far.move_cache(params.cache, kAnySlot);
  far.renumber_slots<int64_t>(params.slot_mapping);
}
void move_caches(FarMemory& far, CopyPagesParams& params) {
  far.move_cache(params.from, kAnySlot);
  far.renumber_pages(params.from_pages);
  far.move_cache(params.to, kAnySlot);
  far.renumber_pages(params.to_pages);
}
void move_caches(FarMemory& far, IndexerLogitsParams& params) {
  far.move_cache(params.cache, kAnySlot);
  far.renumber(params.pages);
}
void move_caches(FarMemory& far, IndexerTopKParams& params) { move_caches(far, params.indexer); }

/// Returns whether the tensor is one whose elements may lie apart, too.
template <class Params>
bool has_free_elements(const Params& params, const TensorView& view) {
  bool is_one = false;
  if constexpr (requires { params.lse; }) is_one |= &view == &params.lse;
  if constexpr (requires { params.partial_lse; }) is_one |= &view == &params.partial_lse;
  if constexpr (requires { params.max_logits; }) is_one |= &view == &params.max_logits;
  return is_one;
}

template <class Case>
void run_far(const Context& context, const Case& problem, const FarLayout& layout) {
  auto params = problem.params();
  FarMemory far(layout);
  move_caches(far, params);
  kit::for_each_tensor(params, [&](TensorView& view) {
    if (!far.holds(view)) far.move_rows(view, has_free_elements(params, view));
  });
  if (testing::Test::HasFatalFailure()) return;
  if constexpr (requires { workspace_size(context, params); })
    run_params(context, params);
  else
    MLA_EXPECT_OK(run(context, params));
  far.fetch();
}

template <class Case, class Spec>
void expect_far(const Context& context, const Spec& spec, const std::vector<FarLayout>& layouts,
                const std::string& row) {
  const Case problem(spec);
  const auto expect_all = [&](const auto&... expected) {
    for (const FarLayout& layout : layouts) {
      // The reference of decode looks at every key, unused ones too.
      if (std::is_same_v<Case, kit::DecodeCase> && row == "reference" && layout.skipped > 0) continue;
      problem.reset_outputs();
      run_far(context, problem, layout);
      const kit::Outcome outcome = kit::check_outputs(problem, expected..., row);
      EXPECT_TRUE(outcome.ok) << layout.name << ": " << outcome.line();
    }
  };
  if constexpr (requires { kit::expected_of(problem); }) {
    const Result<kit::Expected> expected = kit::expected_of(problem);
    MLA_EXPECT_OK(expected);
    expect_all(*expected);
  } else {
    expect_all();
  }
}

/// Holds a problem, and the layouts that its caches can have: where all tokens of a page or of a request are visited,
/// none can be unused.
template <class Spec>
struct FarProblem {
  Spec spec;
  std::vector<FarLayout> layouts;
};
template <class Spec>
using FarProblems = std::vector<FarProblem<Spec>>;

/// Returns every format in its usual form; where it has this form, with the parts of rows in two tensors and scales in
/// a third; and with rows that are hardly aligned.
std::vector<kit::CacheSpec> far_caches() {
  std::vector<kit::CacheSpec> caches;
  for (CacheFormat format : kAllCacheFormats) {
    kit::CacheSpec cache = kit::usual_cache(format);
    cache.page_size = 16;
    cache.unowned_pages = 0;
    caches.push_back(cache);
    if (!cache.packed()) {
      kit::CacheSpec divided = cache;
      divided.two_tensors = true;
      divided.token_scales = format == CacheFormat::kFP8;
      caches.push_back(divided);
    }
    cache.page_stride_extra = 2;
    caches.push_back(cache);
  }
  return caches;
}

FarProblems<kit::DecodeSpec> decode_problems() {
  FarProblems<kit::DecodeSpec> problems;
  for (const kit::CacheSpec& cache : far_caches())
    for (int32_t heads : {7, 33}) {
      kit::DecodeSpec spec;
      spec.cache = cache;
      spec.cache.block_table = spec.split_q = heads == 33;
      spec.num_heads = heads;
      spec.q_len = {heads == 7 ? 2 : 1};
      spec.kv_len = {37, 5};
      if (cache.page_stride_extra > 0) {
        spec.q_head_extra = 1;
        if (heads == 33) spec.q_dtype = spec.o_dtype = DType::kF32;
      }
      if (heads == 7) spec.tree = kit::Tree::kMask;
      problems.push_back({spec, {kFarStrides, kFarPages}});
      if (heads == 33) continue;
      spec.tree = kit::Tree::kNone;
      spec.kv_len = {16, 13};
      spec.options.window_left = 9;
      problems.push_back({spec, {kPageEnds}});
    }
  kit::DecodeSpec split;  // between workers, so that partial states are merged; and pages that are copied as one
  split.cache = kit::usual_cache(CacheFormat::kFP8DsMla);
  split.q_len = {2};
  split.num_heads = 8;
  split.kv_len = {1100};
  problems.push_back({split, {kFarStrides}});
  return problems;
}

FarProblems<kit::DecodeSparseSpec> decode_sparse_problems() {
  FarProblems<kit::DecodeSparseSpec> problems;
  for (const kit::CacheSpec& cache : far_caches())
    for (int32_t heads : {7, 33}) {
      kit::DecodeSparseSpec spec;
      spec.num_heads = heads;
      spec.split_q = heads == 33;
      spec.q_len = {1, 1};
      spec.pool.cache = cache;
      spec.pool.num_tokens = 40;
      spec.pool.topk = 20;
      spec.extra_pool = spec.pool;
      spec.extra_pool->topk = 30;
      problems.push_back(
          {spec, heads == 7 ? std::vector{kFarStrides, kFarPages} : std::vector{kFarStrides, kPageEnds}});
    }
  for (DType o_dtype : {DType::kBF16, DType::kE4M3}) {  // outputs that are finished
    const bool quantizes = o_dtype == DType::kE4M3;
    kit::DecodeSparseSpec finished;
    finished.pool.cache = kit::usual_cache(CacheFormat::kBF16);
    finished.pool.cache.page_size = 16;
    finished.num_heads = 8;
    finished.q_len = {1, 1};
    finished.pool.num_tokens = quantizes ? 1100 : 40;
    finished.pool.topk = quantizes ? 1024 : 20;  // split, or not
    finished.o_dtype = o_dtype;
    finished.finish = kit::FinishSpec{.max_positions = 5,
                                      .gate = kit::FinishSpec::Gate::kChannel,
                                      .num_groups = quantizes ? 4 : 0,
                                      .scale_dtype = DType::kI32};
    problems.push_back({finished, {kFarStrides}});
  }
  return problems;
}

FarProblems<kit::PrefillSpec> prefill_problems() {
  FarProblems<kit::PrefillSpec> problems;
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    kit::PrefillSpec spec;
    spec.q_len = {17, 1};
    spec.kv_len = {40, 9};
    spec.num_heads = 3;
    spec.dtype = spec.o_dtype = dtype;
    if (dtype == DType::kF16) spec.k_token_extra = spec.v_token_extra = spec.o_token_extra = 1;
    problems.push_back({spec, {kFarStrides}});
  }
  return problems;
}

FarProblems<kit::PrefillSparseSpec> prefill_sparse_problems() {
  FarProblems<kit::PrefillSparseSpec> problems;
  for (int32_t heads : {7, 33}) {
    kit::PrefillSparseSpec spec;
    spec.num_tokens = heads == 7 ? 3 : 2;
    spec.num_keys = 60;
    spec.topk = heads == 7 ? 64 : 1100;  // split between workers
    spec.num_heads = heads;
    problems.push_back({spec, {kFarStrides}});
  }
  return problems;
}

FarProblems<kit::MergeSpec> merge_problems() {
  FarProblems<kit::MergeSpec> problems;
  for (bool in_place : {false, true}) {
    kit::MergeSpec spec;
    spec.num_states = in_place ? 70 : 3;
    spec.num_tokens = 2;
    spec.num_heads = 5;
    if (!in_place) spec.lse_std = 100;  // e^lse overflows without the largest lse
    spec.in_place = in_place;
    problems.push_back({spec, {kFarStrides}});
  }
  return problems;
}

FarProblems<kit::AppendSpec> append_problems() {
  FarProblems<kit::AppendSpec> problems;
  for (const kit::CacheSpec& cache : far_caches())
    for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      kit::AppendSpec spec;
      spec.cache = cache;
      spec.num_pages = 4;
      spec.num_tokens = 40;
      spec.dtype = dtype;
      spec.split_rows = cache.two_tensors;
      problems.push_back({spec, {kFarStrides, kFarPages, kPageEnds}});
    }
  return problems;
}

FarProblems<kit::AppendRopeSpec> append_rope_problems() {
  FarProblems<kit::AppendRopeSpec> problems;
  for (const kit::CacheSpec& cache : far_caches()) {
    if (cache.d_rotary() == 0) continue;
    kit::AppendRopeSpec spec;
    spec.cache = cache;
    spec.num_pages = 4;
    spec.num_tokens = 20;
    spec.num_heads = 3;
    spec.max_positions = 50;
    spec.q_norm = spec.q_norm_weight = problems.size() % 2 == 1;
    if (spec.q_norm) spec.norm = kit::AppendRopeSpec::Norm::kRow;
    problems.push_back({spec, {kFarStrides, kFarPages, kPageEnds}});
  }
  return problems;
}

FarProblems<kit::GatherSpec> gather_problems() {
  FarProblems<kit::GatherSpec> problems;
  for (const kit::CacheSpec& cache : far_caches())
    for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      kit::GatherSpec spec;
      spec.cache = cache;
      spec.cache.block_table = dtype == DType::kF32;
      spec.out_dtype = dtype;
      spec.split_out = cache.two_tensors;
      spec.kv_len = {37, 16, 5};
      spec.token_start = {1, 0, 2};
      spec.count = {36, 16, 3};
      problems.push_back({spec, {kFarStrides, kFarPages}});
      spec.kv_len = {16, 9, 5};
      spec.count = {15, 9, 3};
      problems.push_back({spec, {kPageEnds}});
    }
  return problems;
}

FarProblems<kit::CopyPagesSpec> copy_pages_problems() {
  FarProblems<kit::CopyPagesSpec> problems;
  for (const kit::CacheSpec& cache : far_caches()) {
    kit::CacheSpec other = kit::usual_cache(CacheFormat::kBF16);
    other.page_size = 8;
    other.d_qk = cache.d_qk;
    other.d_v = cache.d_ckv();
    kit::CacheSpec same = cache;
    same.page_size = 8;
    const std::vector<FarLayout> layouts = {kFarStrides, kFarPages};
    problems.push_back({{.num_tokens = 32, .from = cache, .to = same}, layouts});
    problems.push_back({{.num_tokens = 32, .from = cache, .to = other}, layouts});
    problems.push_back({{.num_tokens = 32, .from = other, .to = cache}, layouts});
  }
  return problems;
}

FarProblems<kit::AppendIndexerSpec> append_indexer_problems() {
  kit::AppendIndexerSpec spec;
  spec.num_pages = 4;
  spec.page_size = 16;
  spec.num_tokens = 40;
  kit::AppendIndexerSpec mxfp4 = spec;
  mxfp4.format = IndexerFormat::kMXFP4;
  return {{spec, {kFarStrides, kFarPages, kPageEnds}}, {mxfp4, {kFarStrides, kFarPages, kPageEnds}}};
}

FarProblems<kit::FinishOutputSpec> finish_output_problems() {
  FarProblems<kit::FinishOutputSpec> problems;
  for (DType out : {DType::kBF16, DType::kE4M3})
    for (int32_t groups : {0, 4}) {
      kit::FinishOutputSpec spec;
      spec.num_tokens = 5;
      spec.max_positions = 50;
      spec.out_dtype = out;
      spec.num_groups = groups;
      spec.scale_dtype = groups == 0 ? DType::kF32 : DType::kI32;
      spec.gate = groups == 0 ? kit::FinishSpec::Gate::kChannel : kit::FinishSpec::Gate::kNone;
      problems.push_back({spec, {kFarStrides}});
    }
  return problems;
}

FarProblems<kit::CompressSpec> compress_problems() {
  FarProblems<kit::CompressSpec> problems;
  for (int32_t ratio : {1, 4, 16}) {
    kit::CompressSpec spec;
    spec.q_len = {9, 1, 40};
    spec.kv_len = {30, 8, 48};
    spec.ratio = ratio;
    spec.overlap = ratio == 4;
    spec.num_pages = 12;
    spec.columns = ratio == 4 ? 0 : 2;
    spec.to = ratio == 16 ? kit::CompressSpec::To::kIndexer : kit::CompressSpec::To::kCache;
    spec.cache = kit::usual_cache(ratio == 1 ? CacheFormat::kBF16 : CacheFormat::kFP8DsV4);
    spec.cache.d_qk = ratio == 16 ? kIndexerLayout.head_dim : 512;
    spec.cache.d_v = spec.cache.d_qk;
    spec.cache.page_size = 8;
    problems.push_back({spec, {kFarStrides, kFarPages}});
    if (spec.to != kit::CompressSpec::To::kIndexer) continue;
    spec.indexer_format = IndexerFormat::kMXFP4;
    problems.push_back({spec, {kFarStrides, kFarPages}});
  }
  return problems;
}

FarProblems<kit::IndexerLogitsSpec> indexer_problems() {
  FarProblems<kit::IndexerLogitsSpec> problems;
  for (int32_t heads : {20, 70})
    for (DType dtype : {DType::kE4M3, DType::kBF16}) {
      kit::IndexerLogitsSpec spec;
      spec.q_dtype = dtype;
      spec.num_heads = heads;
      spec.q_len = {2};
      spec.kv_len = {37, 16, 5};
      spec.page_size = 16;
      spec.block_table = dtype == DType::kBF16;
      problems.push_back({spec, {kFarStrides, kFarPages}});
      spec.kv_len = {16, 5};
      problems.push_back({spec, {kLongPages}});
      spec.format = IndexerFormat::kMXFP4;
      problems.push_back({spec, {kFarStrides, kFarPages, kLongPages}});
    }
  kit::IndexerLogitsSpec many_heads;  // more than fit into a GPU's shared memory at once
  many_heads.num_heads = 2000;
  many_heads.kv_len = {20};
  problems.push_back({many_heads, {kFarStrides}});
  return problems;
}

FarProblems<kit::IndexerTopKSpec> indexer_top_k_problems() {
  FarProblems<kit::IndexerTopKSpec> problems;
  for (const auto& [indexer, layouts] : indexer_problems())
    problems.push_back({{.indexer = indexer, .topk = 7}, layouts});
  return problems;
}

FarProblems<kit::TopKSpec> top_k_problems() { return {{{.num_tokens = 3, .num_logits = 300, .k = 20}, {kFarStrides}}}; }

FarProblems<kit::PhysicalSlotsSpec> physical_slots_problems() {
  return {{{.q_len = {2}, .kv_len = {300, 40}, .block_table = true}, {kFarStrides}}};
}

FarProblems<kit::BlockTableToCsrSpec> block_table_problems() { return {{{}, {kFarStrides}}}; }

/// Defines the suites Far<Name> on every row of the CPU, and Far<Name>OnDevice on every emulated GPU.
#define MLA_FAR_TESTS(Name, op, problems)                                                                             \
  class Far##Name : public BackendTest<op> {};                                                                        \
  MLA_FOR_EVERY_ROW(Far##Name, op);                                                                                   \
  TEST_P(Far##Name, OffsetsBeyond32Bits) {                                                                            \
    for (const auto& [spec, layouts] : problems()) expect_far<kit::Name##Case>(context(), spec, layouts, GetParam()); \
  }                                                                                                                   \
  class Far##Name##OnDevice : public EmulatedTest<op> {};                                                             \
  MLA_FOR_EVERY_DEVICE(Far##Name##OnDevice, op);                                                                      \
  TEST_P(Far##Name##OnDevice, OffsetsBeyond32Bits) {                                                                  \
    for (const auto& problem : problems())                                                                            \
      with_fitting(problem.spec,                                                                                      \
                   [&](const auto& spec) { expect_far<kit::Name##Case>(context(), spec, problem.layouts, row()); });  \
  }                                                                                                                   \
  static_assert(true)

MLA_FAR_TESTS(Decode, Op::kDecode, decode_problems);
MLA_FAR_TESTS(DecodeSparse, Op::kDecodeSparse, decode_sparse_problems);
MLA_FAR_TESTS(Prefill, Op::kPrefill, prefill_problems);
MLA_FAR_TESTS(PrefillSparse, Op::kPrefillSparse, prefill_sparse_problems);
MLA_FAR_TESTS(Merge, Op::kMergeStates, merge_problems);
MLA_FAR_TESTS(Append, Op::kAppend, append_problems);
MLA_FAR_TESTS(AppendRope, Op::kAppendRope, append_rope_problems);
MLA_FAR_TESTS(Gather, Op::kGather, gather_problems);
MLA_FAR_TESTS(CopyPages, Op::kCopyPages, copy_pages_problems);
MLA_FAR_TESTS(AppendIndexer, Op::kAppendIndexer, append_indexer_problems);
MLA_FAR_TESTS(IndexerLogits, Op::kIndexerLogits, indexer_problems);
MLA_FAR_TESTS(IndexerTopK, Op::kIndexerTopK, indexer_top_k_problems);
MLA_FAR_TESTS(Compress, Op::kCompress, compress_problems);
MLA_FAR_TESTS(FinishOutput, Op::kFinishOutput, finish_output_problems);
MLA_FAR_TESTS(TopK, Op::kTopK, top_k_problems);
MLA_FAR_TESTS(PhysicalSlots, Op::kPhysicalSlots, physical_slots_problems);
MLA_FAR_TESTS(BlockTableToCsr, Op::kBlockTableToCsr, block_table_problems);

}  // namespace
}  // namespace mla
