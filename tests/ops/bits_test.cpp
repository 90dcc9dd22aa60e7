// SPDX-License-Identifier: Apache-2.0
// Tests determinism: what must leave every bit of the result as it was.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "backend_test.h"
#include "slices.h"

namespace mla {
namespace {

using kit::DecodeCase;
using kit::DecodeSpec;
using kit::PrefillCase;
using kit::PrefillSpec;

/// Returns the values of o and lse; equal values of doubles from one narrow type are equal bits, NaN aside.
template <class Case>
std::vector<double> results(const Context& context, const Case& problem) {
  problem.reset_outputs();
  MLA_EXPECT_OK(kit::plan_and_run(context, problem));
  std::vector<double> values = kit::to_dense(problem.params().o);
  const std::vector<double> lse = kit::to_dense(problem.params().lse);
  values.insert(values.end(), lse.begin(), lse.end());
  return values;
}

class DecodeBits : public BackendTest<Op::kDecode> {};
MLA_FOR_EVERY_ROW(DecodeBits, Op::kDecode);

DecodeSpec ragged_decode() {
  DecodeSpec spec;
  spec.q_len = {2, 1, 4, 1};
  spec.kv_len = {700, 65, 4, 2500};
  spec.num_heads = 20;
  spec.o_dtype = DType::kF32;
  return spec;
}

TEST_P(DecodeBits, SameInputsSamePlanTwice) {
  const DecodeCase problem(ragged_decode());
  EXPECT_EQ(results(context(), problem), results(context(), problem));
}

TEST_P(DecodeBits, TwoContextsOfOneSize) {
  const DecodeCase problem(ragged_decode());
  const std::vector<double> first = results(make_context(3), problem);
  for (int round = 0; round < 5; ++round) EXPECT_EQ(results(make_context(3), problem), first);
}

TEST_P(DecodeBits, CsrOrBlockTable) {
  DecodeSpec spec = ragged_decode();
  const std::vector<double> csr = results(context(), DecodeCase(spec));
  spec.cache.block_table = true;
  EXPECT_EQ(results(context(), DecodeCase(spec)), csr);
}

TEST_P(DecodeBits, OneTensorOrTwo) {
  DecodeSpec spec = ragged_decode();
  const std::vector<double> one = results(context(), DecodeCase(spec));
  spec.cache.two_tensors = true;
  EXPECT_EQ(results(context(), DecodeCase(spec)), one);
}

TEST_P(DecodeBits, OneQueryTensorOrTwo) {
  DecodeSpec spec = ragged_decode();
  const std::vector<double> one = results(context(), DecodeCase(spec));
  spec.split_q = true;
  EXPECT_EQ(results(context(), DecodeCase(spec)), one);
}

TEST_P(DecodeBits, PageOrderAndStrides) {
  DecodeSpec spec = ragged_decode();
  const std::vector<double> first = results(context(), DecodeCase(spec));
  spec.cache.shuffled_pages = false;
  EXPECT_EQ(results(context(), DecodeCase(spec)), first);
  spec.cache.page_stride_extra = 1000;
  EXPECT_EQ(results(context(), DecodeCase(spec)), first);
  spec.cache.token_stride_extra = 3;
  EXPECT_EQ(results(context(), DecodeCase(spec)), first);
  spec.q_head_extra = spec.o_head_extra = 5;
  spec.q_token_extra = spec.o_token_extra = spec.lse_token_extra = 7;
  EXPECT_EQ(results(context(), DecodeCase(spec)), first);
}

TEST_P(DecodeBits, UniformQueriesWithoutIndptr) {
  DecodeSpec spec = ragged_decode();
  spec.q_len = {3};
  const std::vector<double> with = results(context(), DecodeCase(spec));
  spec.omit_qo_indptr = true;
  EXPECT_EQ(results(context(), DecodeCase(spec)), with);
}

TEST_P(DecodeBits, GarbageNobodyOwns) {
  DecodeSpec spec = ragged_decode();
  const std::vector<double> poisoned = results(context(), DecodeCase(spec));
  DecodeCase problem(spec);
  for (int32_t page : problem.memory.unowned)
    kit::fill_normal(problem.memory.kv.data(), DType::kBF16, problem.memory.ckv_offset(page, 0), int64_t{64} * 576, 5,
                     1e3F);
  EXPECT_EQ(results(context(), problem), poisoned);
}

TEST_P(DecodeBits, BatchInvariantWhateverTheOtherRequestsAndThreads) {
  DecodeSpec spec;
  spec.kv_len = {9000, 1, 64, 700, 0, 4096, 130, 33};
  spec.q_len = {1, 1, 3, 2, 1, 1, 16, 1};
  spec.num_heads = 12;
  spec.batch_invariant = true;
  spec.cache.block_table = true;
  spec.o_dtype = DType::kF32;
  const DecodeCase problem(spec);
  MLA_EXPECT_OK(planned_run(context(), problem.params()));
  const std::vector<std::byte> o = bits_of(problem.o), lse = bits_of(problem.lse);
  const size_t batch = spec.kv_len.size();
  for (int32_t threads : {1, 2, 3, 8}) {
    const Context other = make_context(threads);
    for (size_t size : {size_t{1}, size_t{2}, size_t{3}, batch}) {
      problem.reset_outputs();
      for (size_t first = 0; first < batch; first += size)
        MLA_EXPECT_OK(planned_run(other, DecodeSlice(problem, first, std::min(size, batch - first)).params));
      EXPECT_EQ(bits_of(problem.o), o) << threads << " threads, " << size << " requests at once";
      EXPECT_EQ(bits_of(problem.lse), lse) << threads << " threads, " << size << " requests at once";
    }
  }
}

class PrefillBits : public BackendTest<Op::kPrefill> {};
MLA_FOR_EVERY_ROW(PrefillBits, Op::kPrefill);

PrefillSpec ragged_prefill() {
  PrefillSpec spec;
  spec.q_len = {70, 1, 0, 200};
  spec.kv_len = {70, 300, 5, 260};
  spec.num_heads = 5;
  spec.o_dtype = DType::kF32;
  return spec;
}

TEST_P(PrefillBits, SameInputsSamePlanTwice) {
  const PrefillCase problem(ragged_prefill());
  EXPECT_EQ(results(context(), problem), results(context(), problem));
}

TEST_P(PrefillBits, TwoContextsOfOneSize) {
  const PrefillCase problem(ragged_prefill());
  const std::vector<double> first = results(make_context(3), problem);
  for (int round = 0; round < 5; ++round) EXPECT_EQ(results(make_context(3), problem), first);
}

TEST_P(PrefillBits, Strides) {
  PrefillSpec spec = ragged_prefill();
  const std::vector<double> first = results(context(), PrefillCase(spec));
  for (int64_t* stride :
       {&spec.q_head_extra, &spec.q_token_extra, &spec.k_head_extra, &spec.k_token_extra, &spec.v_head_extra,
        &spec.v_token_extra, &spec.o_head_extra, &spec.o_token_extra, &spec.lse_token_extra}) {
    *stride = 11;
    EXPECT_EQ(results(context(), PrefillCase(spec)), first);
  }
}

struct PrefillSlice {
  PrefillSlice(const PrefillCase& problem, size_t first, size_t count) : params(problem.params()) {
    int32_t q_begin = 0, kv_begin = 0;
    for (size_t b = 0; b < first; ++b) {
      q_begin += problem.spec.q_len_of(b);
      kv_begin += problem.spec.kv_len[b];
    }
    for (size_t b = first; b < first + count; ++b) {
      qo_indptr.push_back(qo_indptr.back() + problem.spec.q_len_of(b));
      kv_indptr.push_back(kv_indptr.back() + problem.spec.kv_len[b]);
    }
    const auto narrow = [](TensorView& view, int32_t begin, int32_t rows) {
      view.data =
          static_cast<std::byte*>(view.data) + static_cast<size_t>(begin * view.stride[0]) * size_of(view.dtype);
      view.shape[0] = rows;
    };
    for (TensorView* view : {&params.q, &params.o, &params.lse}) narrow(*view, q_begin, qo_indptr.back());
    for (TensorView* view : {&params.k, &params.v}) narrow(*view, kv_begin, kv_indptr.back());
    params.qo_indptr = contiguous(qo_indptr.data(), DType::kI32, {static_cast<int64_t>(count) + 1});
    params.kv_indptr = contiguous(kv_indptr.data(), DType::kI32, {static_cast<int64_t>(count) + 1});
  }
  std::vector<int32_t> qo_indptr = {0}, kv_indptr = {0};
  PrefillParams params;
};

TEST_P(PrefillBits, BatchInvariantWhateverTheOtherRequestsAndThreads) {
  PrefillSpec spec = ragged_prefill();
  spec.q_len = {70, 1, 0, 200, 3};
  spec.kv_len = {70, 3000, 5, 260, 64};
  spec.batch_invariant = true;
  const PrefillCase problem(spec);
  MLA_EXPECT_OK(planned_run(context(), problem.params()));
  const std::vector<std::byte> o = bits_of(problem.o), lse = bits_of(problem.lse);
  for (int32_t threads : {1, 2, 3, 8}) {
    const Context other = make_context(threads);
    for (size_t size : {size_t{1}, size_t{2}, size_t{5}}) {
      problem.reset_outputs();
      for (size_t first = 0; first < 5; first += size)
        MLA_EXPECT_OK(planned_run(other, PrefillSlice(problem, first, std::min(size, 5 - first)).params));
      EXPECT_EQ(bits_of(problem.o), o) << threads << " threads, " << size << " requests at once";
      EXPECT_EQ(bits_of(problem.lse), lse) << threads << " threads, " << size << " requests at once";
    }
  }
}

// Operations of every format: the same inputs twice, on other contexts, in other memory.

TEST_P(DecodeBits, EveryFormatAndItsStrides) {
  for (CacheFormat format : kAllCacheFormats) {
    DecodeSpec spec = ragged_decode();
    spec.cache = kit::usual_cache(format);
    spec.options.attn_sink = true;
    const std::vector<double> first = results(context(), DecodeCase(spec));
    EXPECT_EQ(results(context(), DecodeCase(spec)), first) << name(format);
    spec.cache.page_stride_extra = 1000;
    spec.cache.shuffled_pages = false;
    spec.cache.padded_pages = kv_layout(format).has_footer();
    spec.split_q = true;
    EXPECT_EQ(results(context(), DecodeCase(spec)), first) << name(format);
  }
}

class SparseBits : public BackendTest<Op::kDecodeSparse> {};
MLA_FOR_EVERY_ROW(SparseBits, Op::kDecodeSparse);

kit::DecodeSparseSpec ragged_sparse(CacheFormat format) {
  kit::DecodeSparseSpec spec;
  spec.pool.cache = kit::usual_cache(format);
  spec.pool.topk = 300;
  spec.pool.topk_length = kit::LengthForm::kPerToken;
  spec.extra_pool = spec.pool;
  spec.extra_pool->topk = 40;
  spec.q_len = {1, 3, 2, 1, 1, 1, 1};
  spec.o_dtype = DType::kF32;
  return spec;
}

TEST_P(SparseBits, SameInputsSamePlanTwiceAndOtherStrides) {
  for (CacheFormat format : kAllCacheFormats) {
    kit::DecodeSparseSpec spec = ragged_sparse(format);
    const std::vector<double> first = results(context(), kit::DecodeSparseCase(spec));
    EXPECT_EQ(results(context(), kit::DecodeSparseCase(spec)), first) << name(format);
    spec.pool.row_extra = 5;
    spec.pool.cache.page_stride_extra = 1000;
    spec.q_head_extra = spec.o_head_extra = 8;
    EXPECT_EQ(results(context(), kit::DecodeSparseCase(spec)), first) << name(format);
  }
}

TEST_P(SparseBits, BatchInvariantWhateverTheOtherTokensAndThreads) {
  for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kFP8DsMla, CacheFormat::kFP8DsV4}) {
    kit::DecodeSparseSpec spec = ragged_sparse(format);
    spec.batch_invariant = true;
    spec.pool.topk = 3000;
    const kit::DecodeSparseCase problem(spec);
    const DecodeSparseParams params = problem.params();
    MLA_EXPECT_OK(planned_run(context(), params));
    const std::vector<std::byte> o = bits_of(problem.o), lse = bits_of(problem.lse);
    for (int32_t threads : {1, 3, 8}) {
      const Context other = make_context(threads);
      for (int64_t size : {int64_t{1}, int64_t{3}, problem.num_tokens}) {
        problem.reset_outputs();
        for (int64_t first = 0; first < problem.num_tokens; first += size)
          MLA_EXPECT_OK(planned_run(other, slice(params, first, std::min(size, problem.num_tokens - first))));
        EXPECT_EQ(bits_of(problem.o), o) << threads << " threads, " << size << " tokens at once, " << name(format);
        EXPECT_EQ(bits_of(problem.lse), lse) << threads << " threads, " << size << " tokens at once, " << name(format);
      }
    }
  }
}

class PrefillSparseBits : public BackendTest<Op::kPrefillSparse> {};
MLA_FOR_EVERY_ROW(PrefillSparseBits, Op::kPrefillSparse);

TEST_P(PrefillSparseBits, SameInputsTwiceAndOtherStrides) {
  kit::PrefillSparseSpec spec;
  spec.topk = 300;
  spec.o_dtype = DType::kF32;
  const std::vector<double> first = results(context(), kit::PrefillSparseCase(spec));
  EXPECT_EQ(results(context(), kit::PrefillSparseCase(spec)), first);
  spec.kv_extra = spec.row_extra = spec.q_head_extra = spec.o_token_extra = 8;
  EXPECT_EQ(results(context(), kit::PrefillSparseCase(spec)), first);
}

class IndexerBits : public BackendTest<Op::kIndexerLogits> {};
MLA_FOR_EVERY_ROW(IndexerBits, Op::kIndexerLogits);

TEST_P(IndexerBits, TokensAloneAndOnAnyNumberOfThreads) {
  kit::IndexerLogitsSpec spec;
  spec.kv_len = {700, 33, 64, 5};
  const kit::IndexerLogitsCase problem(spec);
  const IndexerLogitsParams params = problem.params();
  MLA_EXPECT_OK(run(context(), params));
  const std::vector<double> logits = kit::to_dense(params.logits);
  for (int32_t threads : {1, 3, 8}) {
    problem.reset_outputs();
    MLA_EXPECT_OK(run(make_context(threads), params));
    EXPECT_EQ(kit::to_dense(params.logits), logits) << threads;
  }
}

}  // namespace
}  // namespace mla
