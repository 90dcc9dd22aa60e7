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
  for (CacheFormat format : kAllCacheFormats)
    expect_random(turns_of(format, 20), [&](uint64_t seed) { return kit::random_append_rope_spec(seed, format); });
}

/// Queries and keys of bf16 in neighbouring pairs, which kernels of their own take where they are aligned. Elements
/// between rows leave them at multiples of 16 bytes, of 8 or of 2. There are more rows than warps that run at once.
TEST_P(AppendRopeOnDevice, RowsThatEnginesHave) {
  using Spec = kit::AppendRopeSpec;
  using Norm = Spec::Norm;
  constexpr int64_t Spec::*kExtras[] = {&Spec::q_head_extra,      &Spec::q_token_extra, &Spec::q_out_head_extra,
                                        &Spec::q_out_token_extra, &Spec::row_extra,     &Spec::cos_sin_extra};
  uint64_t seed = 1;
  for (CacheFormat format : {CacheFormat::kFP8DsV4, CacheFormat::kFP8DsV41, CacheFormat::kFP8DsMla, CacheFormat::kFP8,
                             CacheFormat::kBF16, CacheFormat::kFP4DsV41, CacheFormat::kFP8Nope})
    for (Norm norm : {Norm::kNone, Norm::kLatent, Norm::kRow})
      for (bool q_norm : {false, true})
        for (DType q_out : {DType::kBF16, DType::kE4M3}) {
          Spec spec;
          spec.cache = kit::usual_cache(format);
          if (format == CacheFormat::kBF16 && (norm == Norm::kRow || q_norm)) {  // a norm of both parts fits
            spec.cache.d_qk = 512;
            spec.cache.d_v = 448;
          }
          spec.cache.page_size = 16;
          spec.norm = norm;
          spec.q_norm = q_norm;
          spec.q_norm_weight = q_norm && seed % 2 == 0;
          spec.norm_dtype = seed % 3 == 0 ? DType::kF32 : DType::kBF16;
          spec.q_out_dtype = q_out;
          spec.max_positions = 100;
          spec.special_share = norm == Norm::kRow ? 0.2 : 0;
          spec.num_tokens = 5;
          spec.num_heads = 3;
          spec.seed = seed++;
          if (format == CacheFormat::kBF16 && norm != Norm::kNone)
            expect_ok_by("append_turned_rows", spec);
          else if (format == CacheFormat::kFP8Nope)
            expect_ok_by("append_turned_groups", spec);  // nothing turns, all else is the same
          else
            expect_ok(spec);
          for (int64_t Spec::*extra : kExtras)
            for (int64_t elements : {8, 4, 1}) {
              Spec apart = spec;
              apart.*extra = elements;
              expect_ok(apart);
            }
          spec.num_tokens = 70;
          spec.num_heads = 17;
          expect_ok(spec);
        }
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

/// The same of outputs.
TEST_P(FinishOutputOnDevice, RowsThatEnginesHave) {
  using Spec = kit::FinishOutputSpec;
  using Gate = Spec::Gate;
  int64_t* (*const kExtras[])(Spec&) = {
      [](Spec& s) { return &s.o_head_extra; },   [](Spec& s) { return &s.o_token_extra; },
      [](Spec& s) { return &s.out_head_extra; }, [](Spec& s) { return &s.out_token_extra; },
      [](Spec& s) { return &s.cos_sin_extra; },  [](Spec& s) { return &s.scale_extra; }};
  uint64_t seed = 1;
  for (DType out : {DType::kBF16, DType::kE4M3})
    for (Gate gate : {Gate::kNone, Gate::kHead})
      for (int32_t rotary : {0, 64})
        for (int32_t channels : {32, 64, 128}) {
          Spec spec;
          spec.out_dtype = out;
          spec.gate = gate;
          spec.d_rotary = rotary;
          spec.d_v = seed % 3 == 0 ? 128 : 512;
          spec.channels_per_scale = channels;
          spec.power_of_two_scales = seed % 4 != 0;
          spec.num_groups = seed % 2 == 0 ? 4 : 0;
          spec.tokens_innermost = seed % 5 < 2;
          spec.max_positions = 100;
          spec.special_share = gate == Gate::kNone ? 0.2 : 0;
          spec.num_tokens = 3;
          spec.num_heads = 4;
          spec.seed = seed++;
          expect_ok(spec);
          for (const auto extra : kExtras)
            for (int64_t elements : {16, 8, 4, 1}) {
              Spec apart = spec;
              *extra(apart) = elements;
              expect_ok(apart);
            }
          spec.num_tokens = 70;
          spec.num_heads = 20;
          expect_ok(spec);
        }
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

constexpr const char* kE4m3Kernel = "indexer_logits_e4m3";

class E4m3IndexerOnDevice : public DeviceTest<Op::kIndexerLogits> {};
MLA_FOR_ROW(E4m3IndexerOnDevice, Op::kIndexerLogits, "cuda_sm90");

/// Tests that products of e4m3 are what e4m3 queries get, but for those who ask for exact ones, or whose keys or logits
/// that kernel cannot find.
TEST_P(E4m3IndexerOnDevice, UnlessTheCallerAsksForExactSums) {
  for (const IndexerFormat format : kAllIndexerFormats)
    for (const int32_t q_len : {1, 2, 3}) {
      kit::IndexerLogitsSpec spec;
      spec.format = format;
      spec.q_dtype = DType::kE4M3;
      spec.num_heads = 64;
      spec.page_size = 64;
      spec.q_len = {q_len};
      spec.kv_len = {700, 64, 1};
      spec.omit_qo_indptr = true;
      for (const Compute arithmetic : {Compute::kDefault, Compute::kFP8}) {
        spec.compute = arithmetic;
        expect_ok_by(kE4m3Kernel, spec);
      }
      const auto expect_other = [&](const auto& change) {
        kit::IndexerLogitsSpec other = spec;
        change(other);
        const KernelsSeen seen;
        expect_ok(other);
        EXPECT_FALSE(seen.contains(kE4m3Kernel));
      };
      expect_other([](auto& s) { s.compute = Compute::kExact; });
      expect_other([](auto& s) { s.q_dtype = DType::kBF16; });
      expect_other([](auto& s) { s.page_size = 48; });
      expect_other([](auto& s) { s.key_begin = true; });
    }
}

}  // namespace
}  // namespace mla
