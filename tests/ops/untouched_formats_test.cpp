// SPDX-License-Identifier: Apache-2.0
// Tests that mistakes in formats, options, pools and indices give an error that names the field, and leave every output
// byte as it was.
#include <gtest/gtest.h>

#include <vector>

#include "backend_test.h"
#include "mistakes.h"

namespace mla {
namespace {

float zero_scale = 0.0F;
float negative_scale = -1.0F;
float nan_scale = kNan;
float infinite_scale = kInfinity;

TensorView scale_of(float& value) { return contiguous(&value, DType::kF32, {1}); }

/// Returns mistakes in the fp8 cache that `cache` picks from an operation's parameters.
template <class Params>
std::vector<Mistake<Params>> fp8_mistakes(KvCache& (*cache)(Params&)) {
  std::vector<Mistake<Params>> mistakes = {
      {"ckv_scale", [=](Params& p) { cache(p).ckv_scale = {}; }},
      {"ckv_scale", [=](Params& p) { cache(p).ckv_scale.dtype = DType::kBF16; }},
      {"ckv_scale", [=](Params& p) { cache(p).ckv_scale.shape[0] = 2; }},
      {"ckv_scale", [=](Params& p) { cache(p).ckv_scale.data = nullptr; }},
      {"kv", [=](Params& p) { cache(p).kv.dtype = DType::kU8; }},
      {"format", [=](Params& p) { cache(p).format = static_cast<CacheFormat>(77); }},
  };
  for (float* scale : {&zero_scale, &negative_scale, &nan_scale, &infinite_scale})
    mistakes.push_back({"ckv_scale", [=](Params& p) { cache(p).ckv_scale = scale_of(*scale); }});
  return mistakes;
}

template <class Params>
std::vector<Mistake<Params>> footer_mistakes(KvCache& (*cache)(Params&)) {
  return {
      {"page_size", [=](Params& p) { cache(p).page_size = 0; }},
      {"kv", [=](Params& p) { cache(p).page_size = 65; }},
      {"kv", [=](Params& p) { cache(p).kv.shape[1] -= 1; }},
      {"kv", [=](Params& p) { cache(p).kv.stride[0] = 64 * 584 - 2; }},
      {"kv", [=](Params& p) { cache(p).kv.stride[0] += 1; }},
      {"kv", [=](Params& p) { cache(p).kv.dtype = DType::kE4M3; }},
      {"ckv_scale", [=](Params& p) { cache(p).ckv_scale = scale_of(infinite_scale); }},
  };
}

class DecodeFormatsUntouched : public BackendTest<Op::kDecode> {};
MLA_FOR_EVERY_ROW(DecodeFormatsUntouched, Op::kDecode);

KvCache& decode_cache(DecodeParams& p) { return p.cache; }

TEST_P(DecodeFormatsUntouched, MistakesInTheCache) {
  kit::DecodeSpec spec;
  spec.kv_len = {130, 70};
  spec.cache = kit::usual_cache(CacheFormat::kFP8);
  expect_planned_refused<kit::DecodeCase>(context(), spec, fp8_mistakes<DecodeParams>(decode_cache));
  spec.cache = kit::usual_cache(CacheFormat::kFP8DsV4);
  expect_planned_refused<kit::DecodeCase>(context(), spec, footer_mistakes<DecodeParams>(decode_cache));
  spec.cache = kit::usual_cache(CacheFormat::kFP8DsMla);
  expect_planned_refused<kit::DecodeCase>(
      context(), spec,
      std::vector<Mistake<DecodeParams>>{{"kv", [](DecodeParams& p) { p.cache.kv.shape[2] = 584; }},
                                         {"kv", [](DecodeParams& p) { p.cache.kv.stride[1] = 657; }}});
}

TEST_P(DecodeFormatsUntouched, MistakesInScalesAndOptions) {
  static const float kSinks[16] = {};
  static const int32_t kParents[2] = {0, -1};  // a draft below itself
  static const uint8_t kMask[8] = {};
  const std::vector<Mistake<DecodeParams>> mistakes = {
      {"q_scale", [](DecodeParams& p) { p.q_scale = {}; }},
      {"q_scale", [](DecodeParams& p) { p.q_scale = scale_of(zero_scale); }},
      {"q_scale", [](DecodeParams& p) { p.q_scale = scale_of(nan_scale); }},
      {"o_scale", [](DecodeParams& p) { p.o_scale = {}; }},
      {"o_scale", [](DecodeParams& p) { p.o_scale = scale_of(negative_scale); }},
      {"attn_sink", [](DecodeParams& p) { p.options.attn_sink = contiguous(kSinks, DType::kF32, {15}); }},
      {"attn_sink", [](DecodeParams& p) { p.options.attn_sink = contiguous(kSinks, DType::kBF16, {16}); }},
      {"alibi_slopes", [](DecodeParams& p) { p.options.alibi_slopes = contiguous(kSinks, DType::kF32, {1}); }},
      {"window_left", [](DecodeParams& p) { p.options.window_left = -2; }},
      {"logits_soft_cap", [](DecodeParams& p) { p.options.logits_soft_cap = -1; }},
      {"logits_soft_cap", [](DecodeParams& p) { p.options.logits_soft_cap = kNan; }},
      {"tree_parents", [](DecodeParams& p) { p.tree_parents = contiguous(kParents, DType::kI32, {2}); }},
      {"tree_mask",
       [](DecodeParams& p) {
         p.tree_mask = contiguous(kMask, DType::kU8, {2, 0});
       }},
      {"tree_mask",
       [](DecodeParams& p) {
         p.tree_mask = contiguous(kMask, DType::kI32, {2, 1});
       }},
      {"rank", [](DecodeParams& p) { p.context_parallel = {.rank = 2, .world = 2, .interleave = 1}; }},
      {"rank", [](DecodeParams& p) { p.context_parallel = {.rank = -1, .world = 2, .interleave = 1}; }},
      {"world", [](DecodeParams& p) { p.context_parallel = {.rank = 0, .world = 0, .interleave = 1}; }},
      {"interleave", [](DecodeParams& p) { p.context_parallel = {.rank = 0, .world = 2, .interleave = 0}; }},
  };
  kit::DecodeSpec spec;
  spec.kv_len = {130, 70};
  spec.q_dtype = spec.o_dtype = DType::kE4M3;
  expect_planned_refused<kit::DecodeCase>(context(), spec, mistakes);
}

TEST_P(DecodeFormatsUntouched, TreesWithoutCausalMasksAndTwoTreesAtOnce) {
  kit::DecodeSpec spec;
  spec.q_len = {2};
  spec.kv_len = {130};
  spec.tree = kit::Tree::kMask;
  const kit::DecodeCase mask(spec);
  DecodeParams params = mask.params();
  params.causal = false;
  expect_names(planned_run(context(), params), "decode", "tree_mask");
  params = mask.params();
  params.tree_parents = contiguous(mask.tree_parents.data(), DType::kI32, {2});
  expect_names(planned_run(context(), params), "decode", "tree_");
  EXPECT_TRUE(all_bytes_are(mask.o, kit::kUntouched));
}

class DecodeSparseUntouched : public BackendTest<Op::kDecodeSparse> {};
MLA_FOR_EVERY_ROW(DecodeSparseUntouched, Op::kDecodeSparse);

KvCache& pool_cache(DecodeSparseParams& p) { return p.pool.cache; }
KvCache& extra_pool_cache(DecodeSparseParams& p) { return p.extra_pool.cache; }

TEST_P(DecodeSparseUntouched, EveryMistake) {
  const std::vector<Mistake<DecodeSparseParams>> mistakes = {
      {"indices", [](DecodeSparseParams& p) { p.pool.indices = {}; }},
      {"indices", [](DecodeSparseParams& p) { p.pool.indices.dtype = DType::kI64; }},
      {"indices", [](DecodeSparseParams& p) { p.pool.indices.shape[0] = 3; }},
      {"topk", [](DecodeSparseParams& p) { p.pool.indices.shape[1] = 0; }},
      {"indices", [](DecodeSparseParams& p) { p.pool.indices.data = nullptr; }},
      {"qo_indptr",
       [](DecodeSparseParams& p) {
         p.pool.topk_length.shape[0] = 3;  // of 3 requests?
         p.pool.topk_length_per = LengthPer::kByShape;
       }},
      {"topk_length_per", [](DecodeSparseParams& p) { p.pool.topk_length_per = static_cast<LengthPer>(3); }},
      {"topk_length", [](DecodeSparseParams& p) { p.pool.topk_length.dtype = DType::kI64; }},
      {"extra_pool", [](DecodeSparseParams& p) { p.extra_pool.indices.shape[0] = 5; }},
      {"extra_pool", [](DecodeSparseParams& p) { p.extra_pool.cache.kv.shape[2] = 512; }},
      {"extra_pool", [](DecodeSparseParams& p) { p.extra_pool.cache.kv = {}; }},
      {"window_left", [](DecodeSparseParams& p) { p.options.window_left = 5; }},
      {"alibi_slopes", [](DecodeSparseParams& p) { p.options.alibi_slopes = p.options.attn_sink; }},
      {"attn_sink", [](DecodeSparseParams& p) { p.options.attn_sink.shape[0] = 4; }},
      {"sm_scale", [](DecodeSparseParams& p) { p.sm_scale = 0; }},
      {"o", [](DecodeSparseParams& p) { p.o.shape[2] = 576; }},
      {"lse", [](DecodeSparseParams& p) { p.lse.shape[1] = 8; }},
      {"q", [](DecodeSparseParams& p) { p.q.data = nullptr; }},
  };
  kit::DecodeSparseSpec spec;
  spec.pool.topk_length = kit::LengthForm::kPerToken;
  spec.extra_pool = spec.pool;
  spec.options.attn_sink = true;
  expect_planned_refused<kit::DecodeSparseCase>(context(), spec, mistakes);
}

TEST_P(DecodeSparseUntouched, MistakesInWhatBecomesOfOutputs) {
  using Params = DecodeSparseParams;
  kit::DecodeSparseSpec spec;
  spec.o_dtype = DType::kE4M3;
  spec.finish = kit::FinishSpec{.gate = kit::FinishSpec::Gate::kHead, .num_groups = 2};
  expect_planned_refused<kit::DecodeSparseCase>(
      context(), spec,
      std::vector<Mistake<Params>>{
          {"finish.cos_sin", [](Params& p) { p.finish.cos_sin.shape[1] = 63; }},
          {"finish.positions", [](Params& p) { p.finish.positions.shape[0] = 1; }},
          {"finish.positions", [](Params& p) { p.finish.cos_sin = {}; }},
          {"finish.positions", [](Params& p) { static_cast<int64_t*>(p.finish.positions.data)[0] = 4096; }},
          {"finish.positions", [](Params& p) { static_cast<int64_t*>(p.finish.positions.data)[0] = -1; }},
          {"finish.gate", [](Params& p) { p.finish.gate.shape[1] = 3; }},
          {"finish.scale", [](Params& p) { p.finish.scale = {}; }},
          {"finish.scale", [](Params& p) { p.finish.scale.shape[3] = 5; }},
          {"finish.scale", [](Params& p) { p.finish.scale.data = nullptr; }},
          {"finish.scale", [](Params& p) { p.o.dtype = DType::kBF16; }},
          {"o", [](Params& p) { p.o.shape[1] = 3; }},
          {"o_scale", [](Params& p) { p.o_scale = p.finish.cos_sin; }}});
}

TEST_P(DecodeSparseUntouched, MistakesInTheCaches) {
  kit::DecodeSparseSpec spec;
  for (CacheFormat format : {CacheFormat::kFP8, CacheFormat::kFP8DsV4}) {
    spec.pool.cache = kit::usual_cache(format);
    spec.extra_pool = spec.pool;
    for (const auto cache : {pool_cache, extra_pool_cache})
      expect_planned_refused<kit::DecodeSparseCase>(context(), spec,
                                                    format == CacheFormat::kFP8
                                                        ? fp8_mistakes<DecodeSparseParams>(cache)
                                                        : footer_mistakes<DecodeSparseParams>(cache));
  }
}

class PrefillSparseUntouched : public BackendTest<Op::kPrefillSparse> {};
MLA_FOR_EVERY_ROW(PrefillSparseUntouched, Op::kPrefillSparse);

TEST_P(PrefillSparseUntouched, EveryMistake) {
  const std::vector<Mistake<PrefillSparseParams>> mistakes = {
      {"kv", [](PrefillSparseParams& p) { p.kv = {}; }},
      {"kv", [](PrefillSparseParams& p) { p.kv.dtype = DType::kF32; }},
      {"kv", [](PrefillSparseParams& p) { p.kv.shape[1] = 512; }},
      {"indices", [](PrefillSparseParams& p) { p.indices.shape[0] = 1; }},
      {"topk_length", [](PrefillSparseParams& p) { p.topk_length = p.indices; }},
      {"max_logits", [](PrefillSparseParams& p) { p.max_logits.dtype = DType::kBF16; }},
      {"max_logits", [](PrefillSparseParams& p) { p.max_logits.shape[0] = 1; }},
      {"window_left", [](PrefillSparseParams& p) { p.options.window_left = 0; }},
      {"o", [](PrefillSparseParams& p) { p.o.shape[2] = 1024; }},
      {"sm_scale", [](PrefillSparseParams& p) { p.sm_scale = kNan; }},
  };
  expect_planned_refused<kit::PrefillSparseCase>(context(), kit::PrefillSparseSpec{}, mistakes);
}

class AppendFormatsUntouched : public BackendTest<Op::kAppend> {};
MLA_FOR_EVERY_ROW(AppendFormatsUntouched, Op::kAppend);

TEST_P(AppendFormatsUntouched, MistakesInTheCache) {
  const auto cache = [](AppendParams& p) -> KvCache& { return p.cache; };
  kit::AppendSpec spec;
  spec.cache = kit::usual_cache(CacheFormat::kFP8);
  expect_refused<kit::AppendCase>(context(), spec, fp8_mistakes<AppendParams>(cache));
  spec.cache = kit::usual_cache(CacheFormat::kFP8DsV4);
  expect_refused<kit::AppendCase>(context(), spec, footer_mistakes<AppendParams>(cache));
  expect_refused<kit::AppendCase>(
      context(), spec,
      std::vector<Mistake<AppendParams>>{
          {"slot_mapping", [](AppendParams& p) { static_cast<int64_t*>(p.slot_mapping.data)[63] = 8 * 64; }},
          {"kv", [](AppendParams& p) { p.kv.shape[1] = 576; }}});
}

class GatherFormatsUntouched : public BackendTest<Op::kGather> {};
MLA_FOR_EVERY_ROW(GatherFormatsUntouched, Op::kGather);

TEST_P(GatherFormatsUntouched, MistakesInTheCache) {
  const auto cache = [](GatherParams& p) -> KvCache& { return p.cache; };
  kit::GatherSpec spec;
  spec.cache = kit::usual_cache(CacheFormat::kFP8);
  expect_refused<kit::GatherCase>(context(), spec, fp8_mistakes<GatherParams>(cache));
  spec.cache = kit::usual_cache(CacheFormat::kFP8DsV4);
  expect_refused<kit::GatherCase>(context(), spec, footer_mistakes<GatherParams>(cache));
}

class AppendRopeUntouched : public BackendTest<Op::kAppendRope> {};
MLA_FOR_EVERY_ROW(AppendRopeUntouched, Op::kAppendRope);

TEST_P(AppendRopeUntouched, EveryMistake) {
  expect_refused<kit::AppendRopeCase>(
      context(), kit::AppendRopeSpec{},
      std::vector<Mistake<AppendRopeParams>>{
          {"cos_sin", [](AppendRopeParams& p) { p.cos_sin = {}; }},
          {"cos_sin", [](AppendRopeParams& p) { p.cos_sin.shape[1] = 32; }},
          {"positions", [](AppendRopeParams& p) { static_cast<int64_t*>(p.positions.data)[31] = 4096; }},
          {"positions", [](AppendRopeParams& p) { static_cast<int64_t*>(p.positions.data)[31] = -1; }},
          {"positions", [](AppendRopeParams& p) { p.positions.dtype = DType::kI32; }},
          {"slot_mapping", [](AppendRopeParams& p) { static_cast<int64_t*>(p.slot_mapping.data)[31] = 1 << 20; }},
          {"q_out", [](AppendRopeParams& p) { p.q_out = {}; }},
          {"q_pe", [](AppendRopeParams& p) { p.q_pe = {}; }},
          {"q_scale", [](AppendRopeParams& p) { p.q_out.dtype = DType::kE4M3; }},
          {"norm_eps", [](AppendRopeParams& p) { p.norm_eps = -1; }},
          {"kpe", [](AppendRopeParams& p) { p.kpe = {}; }}});
}

class FinishOutputUntouched : public BackendTest<Op::kFinishOutput> {};
MLA_FOR_EVERY_ROW(FinishOutputUntouched, Op::kFinishOutput);

TEST_P(FinishOutputUntouched, EveryMistake) {
  kit::FinishOutputSpec spec;
  spec.out_dtype = DType::kE4M3;
  expect_refused<kit::FinishOutputCase>(
      context(), spec,
      std::vector<Mistake<FinishOutputParams>>{
          {"o", [](FinishOutputParams& p) { p.o = {}; }},
          {"finish.cos_sin", [](FinishOutputParams& p) { p.finish.cos_sin.shape[1] = 63; }},
          {"finish.positions", [](FinishOutputParams& p) { static_cast<int64_t*>(p.finish.positions.data)[8] = 4096; }},
          {"finish.positions", [](FinishOutputParams& p) { static_cast<int64_t*>(p.finish.positions.data)[8] = -1; }},
          {"finish.positions", [](FinishOutputParams& p) { p.finish.cos_sin = {}; }},
          {"finish.scale", [](FinishOutputParams& p) { p.finish.scale = {}; }},
          {"finish.scale", [](FinishOutputParams& p) { p.finish.scale.shape[2] = 3; }},
          {"finish.scale", [](FinishOutputParams& p) { p.out.dtype = DType::kBF16; }},
          {"out", [](FinishOutputParams& p) { p.out = {}; }}});
}

class CopyPagesUntouched : public BackendTest<Op::kCopyPages> {};
MLA_FOR_EVERY_ROW(CopyPagesUntouched, Op::kCopyPages);

TEST_P(CopyPagesUntouched, EveryMistake) {
  expect_refused<kit::CopyPagesCase>(
      context(), kit::CopyPagesSpec{},
      std::vector<Mistake<CopyPagesParams>>{
          {"from_pages", [](CopyPagesParams& p) { static_cast<int32_t*>(p.from_pages.data)[3] = 1000; }},
          {"from_pages", [](CopyPagesParams& p) { static_cast<int32_t*>(p.from_pages.data)[3] = -1; }},
          {"to_pages", [](CopyPagesParams& p) { static_cast<int32_t*>(p.to_pages.data)[3] = 1000; }},
          {"to_pages", [](CopyPagesParams& p) { p.to_pages.shape[0] = 3; }},
          {"to", [](CopyPagesParams& p) { p.to.kv.shape[2] = 512; }},
          {"from", [](CopyPagesParams& p) { p.from.kv = {}; }}});
}

class IndexToolsUntouched : public BackendTest<Op::kPhysicalSlots> {};
MLA_FOR_EVERY_ROW(IndexToolsUntouched, Op::kPhysicalSlots);

TEST_P(IndexToolsUntouched, EveryMistake) {
  expect_refused<kit::PhysicalSlotsCase>(
      context(), kit::PhysicalSlotsSpec{},
      std::vector<Mistake<PhysicalSlotsParams>>{
          {"indices", [](PhysicalSlotsParams& p) { p.indices = {}; }},
          {"slots", [](PhysicalSlotsParams& p) { p.slots.shape[1] = 3; }},
          {"page_size", [](PhysicalSlotsParams& p) { p.page_size = 0; }},
          {"kv_len", [](PhysicalSlotsParams& p) { p.pages.kv_len = contiguous(kTooLong, DType::kI32, {1}); }},
          {"valid_count", [](PhysicalSlotsParams& p) { p.valid_count.shape[0] = 2; }},
          {"rank", [](PhysicalSlotsParams& p) { p.context_parallel = {.rank = 3, .world = 2, .interleave = 1}; }}});
}

class IndexerUntouched : public BackendTest<Op::kIndexerTopK> {};
MLA_FOR_EVERY_ROW(IndexerUntouched, Op::kIndexerTopK);

TEST_P(IndexerUntouched, EveryMistake) {
  expect_refused<kit::IndexerTopKCase>(
      context(), kit::IndexerTopKSpec{},
      std::vector<Mistake<IndexerTopKParams>>{
          {"q", [](IndexerTopKParams& p) { p.indexer.q.shape[2] = 64; }},
          {"weights", [](IndexerTopKParams& p) { p.indexer.weights.dtype = DType::kBF16; }},
          {"logits", [](IndexerTopKParams& p) { p.indexer.logits.shape[1] = 299; }},
          {"logits", [](IndexerTopKParams& p) { p.indexer.logits.dtype = DType::kI32; }},
          {"kv", [](IndexerTopKParams& p) { p.indexer.cache.kv.shape[1] -= 4; }},
          {"page_size", [](IndexerTopKParams& p) { p.indexer.cache.page_size = 0; }},
          {"kv_len", [](IndexerTopKParams& p) { p.pages.kv_len = contiguous(kNegative + 1, DType::kI32, {1}); }},
          {"slots", [](IndexerTopKParams& p) { p.slots.dtype = DType::kI64; }}});
}

class TopKUntouched : public BackendTest<Op::kTopK> {};
MLA_FOR_EVERY_ROW(TopKUntouched, Op::kTopK);

TEST_P(TopKUntouched, EveryMistake) {
  kit::TopKSpec spec;
  spec.lengths = true;
  expect_refused<kit::TopKCase>(context(), spec,
                                std::vector<Mistake<TopKParams>>{
                                    {"logits", [](TopKParams& p) { p.logits.dtype = DType::kE4M3; }},
                                    {"logits", [](TopKParams& p) { p.logits = {}; }},
                                    {"lengths", [](TopKParams& p) { static_cast<int32_t*>(p.lengths.data)[7] = 1001; }},
                                    {"lengths", [](TopKParams& p) { static_cast<int32_t*>(p.lengths.data)[7] = -1; }},
                                    {"indices", [](TopKParams& p) { p.indices.shape[0] = 1; }},
                                    {"k", [](TopKParams& p) { p.indices.shape[1] = 0; }}});
}

}  // namespace
}  // namespace mla
