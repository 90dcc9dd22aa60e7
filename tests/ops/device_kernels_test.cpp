// SPDX-License-Identifier: Apache-2.0
// Tests kernels of attention that a row of a GPU has beside others, where the tests of all rows seldom choose them.
#include <gtest/gtest.h>

#include <iterator>
#include <limits>

#include "device_test.h"
#include "turns.h"

namespace mla {
namespace {

using kit::DecodeSparseSpec;
using kit::DecodeSpec;
using kit::PrefillSparseSpec;
using kit::PrefillSpec;

DType value_type(CacheFormat format) { return format == CacheFormat::kF16 ? DType::kF16 : DType::kBF16; }

DecodeSpec dense_problem(CacheFormat format) {
  DecodeSpec spec;
  spec.cache = kit::usual_cache(format);
  spec.q_dtype = spec.o_dtype = value_type(format);
  spec.kv_len = {70, 0, 33};
  return spec;
}

// cuda_sm90's paired kernel: requests of several query tokens, or in caches with room for many, and many queries with
// wide lists of keys.

constexpr const char* kPairedKernel = "sm90_paired";

class PairedDecode : public DeviceTest<Op::kDecode> {};
MLA_FOR_ROW(PairedDecode, Op::kDecode, "cuda_sm90");

/// Gives a cache so many pages that this kernel is chosen. That of many requests would be large, and stays as it is.
void make_room(DecodeSpec& spec) {
  constexpr int32_t kTokens = 2048, kMostRequests = 4;
  const auto requests = static_cast<int32_t>(spec.kv_len.size());
  if (requests <= kMostRequests) spec.cache.unowned_pages = kTokens * requests / spec.cache.page_size + 1;
}

TEST_P(PairedDecode, LongCaches) {
  for (int32_t page_size : {64, 128, 32, 48, 16})
    for (bool causal : {true, false}) {
      DecodeSpec spec = dense_problem(page_size == 128 ? CacheFormat::kF16 : CacheFormat::kBF16);
      spec.num_heads = 70;
      spec.cache.page_size = page_size;
      spec.q_len = {1, 2, 3};
      spec.kv_len = {330, 64, 197};
      spec.causal = causal;
      make_room(spec);
      expect_ok_by(kPairedKernel, spec);
      spec.options.window_left = 70;  // chosen all the same: there are two query tokens a request
      expect_ok_by(kPairedKernel, spec);
    }
  DecodeSpec spec = dense_problem(CacheFormat::kBF16);
  spec.num_heads = 128;
  for (int32_t rotary : {64, 0}) {
    spec.cache.d_qk = 512 + rotary;
    spec.kv_len = {0, 1, 65};
    make_room(spec);
    expect_ok_by(kPairedKernel, spec);
  }
  spec.cache.d_qk = 576;
  for (float std : {0.0F, 60.0F}) {  // the rows' maxima hardly change, or again and again
    spec.kv_len = {700, 128, 129};
    spec.score_std = std;
    expect_ok_by(kPairedKernel, spec);
  }
  // Units without keys, or with one step, behind those of a request that is cut.
  for (const std::vector<int32_t>& lengths :
       std::vector<std::vector<int32_t>>{{2000, 0, 0, 0}, {1500, 0, 0, 700}, {640, 64, 0, 640}, {0, 900, 0, 10}}) {
    spec.kv_len = lengths;
    make_room(spec);
    expect_ok_by(kPairedKernel, spec);
  }
}

TEST_P(PairedDecode, RandomProblemsInLongCaches) {
  const KernelsSeen seen;
  for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kF16})
    expect_random(turns_of(format, 16), [&](uint64_t seed) {
      DecodeSpec spec = kit::random_decode_spec(seed, format);
      spec.num_heads += 64;
      make_room(spec);
      return spec;
    });
  EXPECT_TRUE(!is_emulated() || seen.contains(kPairedKernel));
}

// The tree's keys are the last of a step and the first of the next one.
TEST_P(PairedDecode, DraftTreesAcrossSteps) {
  for (kit::Tree tree : {kit::Tree::kMask, kit::Tree::kParents}) {
    DecodeSpec spec = dense_problem(CacheFormat::kBF16);
    spec.num_heads = 70;
    spec.tree = tree;
    spec.q_len = {7};
    spec.kv_len = {67, 131, 64};
    make_room(spec);
    expect_ok_by(kPairedKernel, spec);
  }
}

TEST_P(PairedDecode, RequestsOfOneUnit) {
  for (const auto& [heads, q_len] : {std::pair{40, 1}, {64, 1}, {16, 4}}) {
    DecodeSpec spec = dense_problem(heads == 40 ? CacheFormat::kF16 : CacheFormat::kBF16);
    spec.num_heads = heads;
    spec.q_len = {q_len};
    spec.kv_len = {330, 64, 197, 0};
    make_room(spec);
    expect_ok_by(kPairedKernel, spec);
  }
}

// Whatever room their cache has, and with requests of one token among them.
TEST_P(PairedDecode, SeveralQueryTokens) {
  for (const std::vector<int32_t>& q_len : std::vector<std::vector<int32_t>>{{2}, {5, 1, 0}, {17}})
    for (bool causal : {true, false}) {
      DecodeSpec spec = dense_problem(CacheFormat::kBF16);
      spec.num_heads = 12;
      spec.q_len = q_len;
      spec.kv_len = {70, 20, 33};
      spec.causal = causal;
      expect_ok_by(kPairedKernel, spec);
    }
}

/// What would not gain there stays with the other kernel.
TEST_P(PairedDecode, WhatTheOtherKernelKeeps) {
  const auto expect_other = [&](const auto& change) {
    DecodeSpec spec = dense_problem(CacheFormat::kBF16);
    spec.num_heads = 128;
    make_room(spec);
    change(spec);
    const KernelsSeen seen;
    expect_ok(spec);
    EXPECT_FALSE(seen.contains(kPairedKernel));
  };
  expect_other([](DecodeSpec& spec) { spec.cache.unowned_pages = 0; });
  expect_other([](DecodeSpec& spec) { spec.options.window_left = 200; });
  expect_other([](DecodeSpec& spec) { spec.cache.page_size = 24; });
  expect_other([](DecodeSpec& spec) {  // one query token on average, but for one more
    spec.cache.unowned_pages = 0;
    spec.q_len = {2, 1, 2};
  });
  expect_other([](DecodeSpec& spec) { spec.batch_invariant = true; });
  expect_other([](DecodeSpec& spec) { spec.options.logits_soft_cap = 20; });
}

class PairedDecodeSparse : public DeviceTest<Op::kDecodeSparse> {};
MLA_FOR_ROW(PairedDecodeSparse, Op::kDecodeSparse, "cuda_sm90");

/// Returns a problem of which every query has 1,024 indices, most of which topk_length cuts off. With half as many
/// tokens it would not go there.
DecodeSparseSpec wide_lists(CacheFormat format) {
  DecodeSparseSpec spec;
  spec.pool.cache = kit::usual_cache(format);
  spec.pool.num_tokens = 200;
  spec.q_dtype = spec.o_dtype = value_type(format);
  spec.num_heads = 100;
  spec.q_len = std::vector<int32_t>(12, 1);
  spec.pool.topk = 1024;
  spec.pool.topk_length = kit::LengthForm::kPerToken;
  spec.pool.lengths = {0, 1, 63, 64, 65, 128, 129, 200, 5, 300, 2, 64};
  return spec;
}

TEST_P(PairedDecodeSparse, WideLists) {
  for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kF16})
    for (int32_t rotary : {64, 0}) {
      DecodeSparseSpec spec = wide_lists(format);
      spec.pool.cache.d_qk = 512 + rotary;
      expect_ok_by(kPairedKernel, spec);
      spec.want_max_logits = spec.options.attn_sink = true;
      spec.pool.empty_share = 0.2;
      expect_ok_by(kPairedKernel, spec);
      spec.extra_pool = spec.pool;
      spec.extra_pool->topk = 70;
      spec.extra_pool->cache.page_size = 2;
      spec.pool.lengths = {700, 64, 0};  // splits
      expect_ok_by(kPairedKernel, spec);
      spec.extra_pool.reset();
      spec.pool.lengths = {900, 0, 0};
      expect_ok_by(kPairedKernel, spec);
      spec.split_q = true;  // rows of latent and of rotary channels lie at distances of their own
      expect_ok_by(kPairedKernel, spec);
      spec.q_head_extra = 8;
      expect_ok_by(kPairedKernel, spec);
    }
  for (float std : {0.0F, 60.0F}) {  // the rows' maxima hardly change, or again and again
    DecodeSparseSpec spec = wide_lists(CacheFormat::kBF16);
    spec.score_std = std;
    spec.want_max_logits = true;
    expect_ok_by(kPairedKernel, spec);
  }
}

// Where a token has no rows for a whole block, those of the next one take their places. A key of the tokens between has
// an infinite channel and a score of -inf, so that what is cleared because of a NaN would show.
TEST_P(PairedDecodeSparse, QueriesOfTheNextTokenMayBeNaN) {
  const DecodeSparseSpec spec = wide_lists(CacheFormat::kBF16);
  const kit::DecodeSparseCase problem(spec);
  const DecodeSparseParams params = problem.params();
  constexpr int64_t kToken = 4, kChannel = 5;  // one of 65 keys: hidden ones follow
  for (int64_t token = 0; token < std::ssize(spec.q_len); ++token)
    for (int64_t head = 0; head < spec.num_heads; ++head)
      kit::store_element(params.q.data, spec.q_dtype, token * params.q.stride[0] + head * params.q.stride[1] + kChannel,
                         token % 2 == 0 ? -1.0F : std::numeric_limits<float>::quiet_NaN());
  const TensorView& indices = params.pool.indices;
  const TensorView& rows = params.pool.cache.kv;
  const int32_t slot = static_cast<const int32_t*>(indices.data)[kToken * indices.stride[0]];
  ASSERT_GE(slot, 0);
  kit::store_element(const_cast<void*>(rows.data), spec.q_dtype,
                     slot / rows.shape[1] * rows.stride[0] + slot % rows.shape[1] * rows.stride[1] + kChannel,
                     std::numeric_limits<float>::infinity());
  const KernelsSeen seen;
  const Result<kit::PlannedRun> done = kit::plan_and_run(context(), problem);
  ASSERT_TRUE(done.ok()) << done.status().message();
  EXPECT_TRUE(!is_emulated() || seen.contains(kPairedKernel));
  expect_outputs(problem);
}

// Rows of e4m3 whose scales are those of 64 channels or more are decoded, in clusters of two blocks.
constexpr CacheFormat kDecoded[] = {CacheFormat::kFP8DsMla, CacheFormat::kFP8DsV4, CacheFormat::kFP8Nope,
                                    CacheFormat::kFP8};

/// Returns a problem with 512 indices for every query, the fewest that go there.
DecodeSparseSpec lists_to_decode(CacheFormat format) {
  DecodeSparseSpec spec = wide_lists(format);
  spec.pool.topk = 512;
  if (format == CacheFormat::kFP8) spec.pool.cache.d_qk = 512;  // its rotary channels would be quantized
  return spec;
}

TEST_P(PairedDecodeSparse, ListsOfQuantizedRows) {
  for (CacheFormat format : kDecoded) {
    DecodeSparseSpec spec = lists_to_decode(format);
    for (int32_t num_heads : {100, 65, 127}) {
      spec.num_heads = num_heads;
      expect_ok_by(kPairedKernel, spec);
    }
    spec.num_heads = 128;
    spec.q_len.resize(3);
    spec.want_max_logits = spec.options.attn_sink = true;
    spec.pool.empty_share = 0.2;
    spec.pool.invalid_share = 0.3;
    for (int32_t extra_topk : {0, 70, 128, 512}) {
      if (extra_topk > 0) {
        spec.extra_pool = spec.pool;
        spec.extra_pool->topk = extra_topk;
        spec.extra_pool->cache.page_size = 2;
      }
      spec.pool.lengths = {700, 64, 0};  // splits
      expect_ok_by(kPairedKernel, spec);
      spec.pool.lengths = {512, 1, 65};
      expect_ok_by(kPairedKernel, spec);
    }
    spec.extra_pool.reset();
    for (float std : {0.0F, 60.0F}) {  // the rows' maxima hardly change, or again and again
      spec.score_std = std;
      expect_ok_by(kPairedKernel, spec);
    }
    spec.split_q = true;
    expect_ok_by(kPairedKernel, spec);
  }
}

/// Pools of different formats have their scales in different places.
TEST_P(PairedDecodeSparse, QuantizedRowsOfTwoFormats) {
  for (const auto& [first, second] :
       {std::pair{CacheFormat::kFP8Nope, CacheFormat::kFP8}, std::pair{CacheFormat::kFP8, CacheFormat::kFP8Nope}}) {
    DecodeSparseSpec spec = lists_to_decode(first);
    spec.extra_pool = lists_to_decode(second).pool;
    spec.extra_pool->topk = 130;
    expect_ok_by(kPairedKernel, spec);
  }
}

TEST_P(PairedDecodeSparse, RandomListsOfQuantizedRows) {
  for (CacheFormat format : {CacheFormat::kFP8DsMla, CacheFormat::kFP8DsV4, CacheFormat::kFP8Nope}) {
    const KernelsSeen seen;
    expect_random(std::max(turns_of(format, 24), 6), [&](uint64_t seed) {
      DecodeSparseSpec spec = kit::random_decode_sparse_spec(seed, format);
      spec.num_heads = 72 + spec.num_heads % 8 * 8;
      spec.pool.topk += 512;
      spec.q_dtype = DType::kBF16;
      if (spec.o_dtype == DType::kF16) spec.o_dtype = DType::kBF16;
      return spec;
    });
    EXPECT_TRUE(!is_emulated() || seen.contains(kPairedKernel)) << name(format);
  }
}

/// What the paired kernel cannot compute stays with the other one.
TEST_P(PairedDecodeSparse, WhatTheOtherKernelKeeps) {
  const auto expect_other = [&](const auto& change) {
    DecodeSparseSpec spec = wide_lists(CacheFormat::kBF16);
    change(spec);
    const KernelsSeen seen;
    expect_ok(spec);
    EXPECT_FALSE(seen.contains(kPairedKernel));
  };
  expect_other([](DecodeSparseSpec& spec) { spec.options.logits_soft_cap = 20; });
  expect_other([](DecodeSparseSpec& spec) { spec.q_dtype = spec.o_dtype = DType::kF32; });
  expect_other([](DecodeSparseSpec& spec) { spec.q_token_extra = spec.q_head_extra = 1; });
  expect_other([](DecodeSparseSpec& spec) { spec.pool.cache.token_stride_extra = 3; });
  expect_other([](DecodeSparseSpec& spec) { spec.batch_invariant = true; });
  expect_other([](DecodeSparseSpec& spec) { spec.pool.topk = 511; });
  expect_other([](DecodeSparseSpec& spec) { spec.q_len.resize(3); });
  expect_other([](DecodeSparseSpec& spec) {
    spec.extra_pool = spec.pool;
    spec.extra_pool->topk = 70;
    spec.extra_pool->cache.two_tensors = true;
  });
}

/// Quantized rows that the paired kernel does not decode, and units that have no neighbour with the same list.
TEST_P(PairedDecodeSparse, QuantizedRowsThatTheOtherKernelKeeps) {
  const auto expect_other = [&](CacheFormat format, const auto& change) {
    DecodeSparseSpec spec = wide_lists(format);
    change(spec);
    const KernelsSeen seen;
    expect_ok(spec);
    EXPECT_FALSE(seen.contains(kPairedKernel));
  };
  const auto nothing = [](DecodeSparseSpec&) {};
  expect_other(CacheFormat::kFP8, nothing);  // its rotary channels are quantized
  expect_other(CacheFormat::kFP8DsV41, nothing);
  expect_other(CacheFormat::kFP8DsMla, [](DecodeSparseSpec& spec) { spec.pool.topk = 511; });
  expect_other(CacheFormat::kFP8DsMla, [](DecodeSparseSpec& spec) { spec.num_heads = 64; });
  expect_other(CacheFormat::kFP8DsMla, [](DecodeSparseSpec& spec) { spec.num_heads = 129; });
  expect_other(CacheFormat::kFP8DsMla, [](DecodeSparseSpec& spec) { spec.options.logits_soft_cap = 20; });
  expect_other(CacheFormat::kFP8DsMla, [](DecodeSparseSpec& spec) { spec.batch_invariant = true; });
  expect_other(CacheFormat::kFP8DsMla, [](DecodeSparseSpec& spec) {  // too few tokens for its multiprocessors
    spec.q_len = {1};
    spec.pool.lengths = {512};
    spec.pool.topk = 512;
  });
  expect_other(CacheFormat::kFP8DsMla, [](DecodeSparseSpec& spec) {
    spec.extra_pool = spec.pool;
    spec.extra_pool->topk = 70;
    spec.extra_pool->cache = kit::usual_cache(CacheFormat::kNvFP4DsMla);
  });
  expect_other(CacheFormat::kFP8DsMla, [](DecodeSparseSpec& spec) { spec.q_token_extra = spec.q_head_extra = 1; });
  expect_other(CacheFormat::kFP8DsMla, [](DecodeSparseSpec& spec) { spec.pool.cache.token_stride_extra = 4; });
}

class PairedPrefillSparse : public DeviceTest<Op::kPrefillSparse> {};
MLA_FOR_ROW(PairedPrefillSparse, Op::kPrefillSparse, "cuda_sm90");

TEST_P(PairedPrefillSparse, WideLists) {
  for (DType dtype : {DType::kBF16, DType::kF16})
    for (int32_t extra : {0, 8}) {
      PrefillSparseSpec spec;
      spec.num_heads = 64;
      spec.num_tokens = 24;
      spec.num_keys = 300;
      spec.topk = 1024;
      spec.q_dtype = spec.o_dtype = spec.kv_dtype = dtype;
      spec.topk_length = true;
      spec.kv_extra = spec.q_token_extra = spec.o_head_extra = extra;
      expect_ok_by(kPairedKernel, spec);
    }
}

// cuda_portable.

class PortableDecode : public DeviceTest<Op::kDecode> {};
MLA_FOR_ROW(PortableDecode, Op::kDecode, "cuda_portable");

TEST_P(PortableDecode, NarrowRowsOfManyHeads) {
  for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kF16, CacheFormat::kFP8}) {
    DecodeSpec spec = dense_problem(format);
    spec.num_heads = 70;
    spec.cache.d_qk = 320;
    spec.cache.d_v = 256;
    expect_ok(spec);
  }
}

/// No emulated GPU of the other tests is an sm100, whose 16-bit rows have smaller blocks.
TEST(PortableDecodeOnSm100, ManyHeads) {
  const Result<Context> context =
      Context::create({.num_threads = 2, .affinity = {}, .backend = "cuda_portable", .device = "emulated:sm100"});
  if (!context.ok()) GTEST_SKIP() << context.status().message();  // this build does not emulate it
  for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kF16, CacheFormat::kFP8})
    for (int32_t d_v : {512, 256}) {
      DecodeSpec spec;
      spec.cache = kit::usual_cache(format);
      spec.cache.d_v = d_v;
      spec.cache.d_qk = d_v + 64;
      spec.q_dtype = spec.o_dtype = value_type(format);
      spec.num_heads = 40;
      spec.kv_len = {130, 0, 7};
      const kit::Outcome outcome = kit::check(*context, spec);
      EXPECT_TRUE(outcome.ok) << outcome.line();
      EXPECT_EQ(outcome.backend, "cuda_portable");
    }
}

class PortablePrefill : public DeviceTest<Op::kPrefill> {};
MLA_FOR_ROW(PortablePrefill, Op::kPrefill, "cuda_portable");

TEST_P(PortablePrefill, WidthsWithoutKernelsOfTheirOwn) {
  for (DType dtype : {DType::kBF16, DType::kF16})
    for (const auto& [d_qk, d_v] : {std::pair{96, 64}, std::pair{64, 32}, std::pair{192, 192}}) {
      PrefillSpec spec;
      spec.num_heads = 2;
      spec.dtype = spec.o_dtype = dtype;
      spec.d_qk = d_qk;
      spec.d_v = d_v;
      spec.q_len = {20, 0, 9};
      spec.kv_len = {31, 7, 9};
      expect_ok(spec);
    }
}

}  // namespace
}  // namespace mla
