// SPDX-License-Identifier: Apache-2.0
// Tests cache writers, index tools and the indexer on GPUs, which must say the same as the reference, byte for byte
// where bytes are moved.
#include <gtest/gtest.h>

#include "device_test.h"
#include "turns.h"

namespace mla {
namespace {

class AppendOnDevice : public DeviceTest<Op::kAppend> {};
MLA_FOR_EVERY_DEVICE(AppendOnDevice, Op::kAppend);

TEST_P(AppendOnDevice, SpecialValuesInEveryFormat) {
  for (CacheFormat format : kAllCacheFormats)
    for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      kit::AppendSpec spec;
      spec.cache = kit::usual_cache(format);
      spec.cache.page_size = 16;
      spec.dtype = dtype;
      spec.special_share = 0.7;
      expect_ok(spec);
      spec.cache.power_of_two_scales = false;
      spec.split_rows = true;
      spec.cache.token_scales = spec.cache.two_tensors = format == CacheFormat::kFP8;
      expect_ok(spec);
    }
}

TEST_P(AppendOnDevice, RandomProblems) {
  for (CacheFormat format : kAllCacheFormats)
    expect_random(turns_of(format, 20), [&](uint64_t seed) { return kit::random_append_spec(seed, format); });
}

class AppendRopeOnDevice : public DeviceTest<Op::kAppendRope> {};
MLA_FOR_EVERY_DEVICE(AppendRopeOnDevice, Op::kAppendRope);

TEST_P(AppendRopeOnDevice, RandomProblems) {
  for (CacheFormat format : kit::rotary_formats())
    expect_random(turns_of(format, 20), [&](uint64_t seed) { return kit::random_append_rope_spec(seed, format); });
}

class GatherOnDevice : public DeviceTest<Op::kGather> {};
MLA_FOR_EVERY_DEVICE(GatherOnDevice, Op::kGather);

TEST_P(GatherOnDevice, RandomProblems) {
  for (CacheFormat format : kAllCacheFormats)
    expect_random(turns_of(format, 20), [&](uint64_t seed) { return kit::random_gather_spec(seed, format); });
}

class CopyPagesOnDevice : public DeviceTest<Op::kCopyPages> {};
MLA_FOR_EVERY_DEVICE(CopyPagesOnDevice, Op::kCopyPages);

TEST_P(CopyPagesOnDevice, SplitsFooterPages) {
  kit::CopyPagesSpec spec;
  spec.from = spec.to = kit::usual_cache(CacheFormat::kFP8DsV4);
  spec.from.page_size = 256;
  spec.to.page_size = 64;
  spec.num_tokens = 512;
  expect_ok(spec);
}

TEST_P(CopyPagesOnDevice, RandomProblems) {
  for (CacheFormat format : kAllCacheFormats)
    expect_random(turns_of(format, 20), [&](uint64_t seed) { return kit::random_copy_pages_spec(seed, format); });
}

class IndexToolsOnDevice : public DeviceTest<Op::kBlockTableToCsr> {};
MLA_FOR_EVERY_DEVICE(IndexToolsOnDevice, Op::kBlockTableToCsr);

TEST_P(IndexToolsOnDevice, RandomProblems) {
  expect_random(60, kit::random_block_table_to_csr_spec);
  expect_random(60, kit::random_physical_slots_spec);
}

class AppendIndexerOnDevice : public DeviceTest<Op::kAppendIndexer> {};
MLA_FOR_EVERY_DEVICE(AppendIndexerOnDevice, Op::kAppendIndexer);

TEST_P(AppendIndexerOnDevice, Random) { expect_random(30, kit::random_append_indexer_spec); }

class CompressOnDevice : public DeviceTest<Op::kCompress> {};
MLA_FOR_EVERY_DEVICE(CompressOnDevice, Op::kCompress);

TEST_P(CompressOnDevice, RandomProblems) {
  for (CacheFormat format : kAllCacheFormats)
    expect_random(turns_of(format, 20), [&](uint64_t seed) { return kit::random_compress_spec(seed, format); });
}

class FinishOutputOnDevice : public DeviceTest<Op::kFinishOutput> {};
MLA_FOR_EVERY_DEVICE(FinishOutputOnDevice, Op::kFinishOutput);

TEST_P(FinishOutputOnDevice, RandomProblems) {
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32})
    expect_random(40, [&](uint64_t seed) { return kit::random_finish_output_spec(seed, dtype); });
}

class TopKOnDevice : public DeviceTest<Op::kTopK> {};
MLA_FOR_EVERY_DEVICE(TopKOnDevice, Op::kTopK);

TEST_P(TopKOnDevice, AmongEqualsInfinitiesAndNan) {
  for (int32_t levels : {0, 1, 3})
    for (double share : {0.0, 0.5}) {
      kit::TopKSpec spec;
      spec.num_logits = 3001;
      spec.num_tokens = 3;
      spec.k = 512;
      spec.levels = levels;
      spec.nan_share = spec.infinite_share = share;
      spec.lengths = share > 0;
      expect_ok(spec);
    }
}

TEST_P(TopKOnDevice, Random) { expect_random(30, kit::random_top_k_spec); }

class IndexerOnDevice : public DeviceTest<Op::kIndexerLogits> {};
MLA_FOR_EVERY_DEVICE(IndexerOnDevice, Op::kIndexerLogits);

TEST_P(IndexerOnDevice, LogitsOfEveryType) {
  for (DType dtype : {DType::kE4M3, DType::kBF16, DType::kF16, DType::kF32}) {
    kit::IndexerLogitsSpec spec;
    spec.q_dtype = dtype;
    spec.q_len = {2, 0, 1};
    spec.kv_len = {130, 10, 0};
    spec.num_heads = 20;
    expect_ok(spec);
  }
}

TEST_P(IndexerOnDevice, RandomLogits) { expect_random(30, kit::random_indexer_logits_spec); }

TEST_P(IndexerOnDevice, RandomIndexerTopK) { expect_random(30, kit::random_indexer_top_k_spec); }

}  // namespace
}  // namespace mla
