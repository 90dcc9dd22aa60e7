// SPDX-License-Identifier: Apache-2.0
// Tests what cuda_bulk takes, and what it leaves to cuda_portable.
#include <gmock/gmock.h>

#include <algorithm>
#include <string>

#include "mla/mla.h"
#include "trace.h"

namespace mla::test {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr Op kOpsOfBulk[] = {Op::kDecode, Op::kDecodeSparse, Op::kPrefillSparse};
constexpr int64_t kFewRows = 16, kManyRows = 17;

Problem of_rows(Op op, int64_t rows, int32_t arch = 90) {
  return {.op = op, .device = {DeviceType::kCuda, 0}, .num_heads = rows, .gpu_arch = arch, .emulated = true};
}

Problem of_format(Op op, int64_t rows, CacheFormat format) {
  Problem problem = of_rows(op, rows);
  problem.cache = format;
  if (kv_layout(format).nope_dim != 0) problem.d_qk = kv_layout(format).nope_dim + kv_layout(format).rope_dim;
  if (kv_layout(format).value_has_rope) problem.d_v = problem.d_qk;
  return problem;
}

BackendVerdict of_bulk(const Problem& problem) {
  for (BackendVerdict& row : explain(problem, "auto").rows)
    if (row.name == "cuda_bulk") return row;
  ADD_FAILURE() << name(problem.op) << " has no cuda_bulk";
  return {};
}

bool emulates(int32_t arch) {
  const auto& archs = machine_info().emulated_archs;
  return std::find(archs.begin(), archs.end(), arch) != archs.end();
}

bool is_quantized(CacheFormat format) { return mla::is_quantized(kv_layout(format).nope.element); }

/// Rows of these formats have more scales than the kernel for e4m3 has room for, or are not the e2m1 of the other one.
constexpr CacheFormat kOtherFormats[] = {CacheFormat::kFP8DsV41, CacheFormat::kFP4DsV41, CacheFormat::kNvFP4DsV4,
                                         CacheFormat::kMxFP4DsV4};

bool takes(CacheFormat format) { return std::ranges::find(kOtherFormats, format) == std::end(kOtherFormats); }

TEST(Bulk, LeavesOtherQuantizedFormats) {
  for (CacheFormat format : kOtherFormats)
    EXPECT_EQ(of_bulk(of_format(Op::kDecodeSparse, kFewRows, format)).reason,
              "takes quantized rows of e4m3 with up to 8 scales of f32 or UE8M0, and nvfp4_ds_mla, not " +
                  std::string(name(format)));
}

TEST(Bulk, LeavesTwoCachesWithRowsOfE2m1) {
  constexpr CacheFormat kPairs[][2] = {{CacheFormat::kNvFP4DsMla, CacheFormat::kNvFP4DsMla416},
                                       {CacheFormat::kNvFP4DsMla368, CacheFormat::kFP8DsMla},
                                       {CacheFormat::kFP8DsMla, CacheFormat::kNvFP4DsMla}};
  for (const auto& [first, second] : kPairs) {
    Problem problem = of_format(Op::kDecodeSparse, kFewRows, first);
    problem.extra_cache = second;
    EXPECT_EQ(of_bulk(problem).reason, "takes rows of e2m1 from one cache alone, not from " + std::string(name(first)) +
                                           " and " + std::string(name(second)));
    if (emulates(90)) {
      EXPECT_EQ(explain(problem, "auto").selected, "cuda_portable");
    }
  }
}

TEST(Bulk, YieldsShortListsOfQuantizedKeys) {
  if (!emulates(90)) GTEST_SKIP() << "this build does not emulate sm90";
  for (CacheFormat format : {CacheFormat::kFP8DsMla, CacheFormat::kFP8DsV4, CacheFormat::kNvFP4DsMla}) {
    MLA_TRACE(std::string(name(format)));
    Problem problem = of_format(Op::kDecodeSparse, kFewRows, format);
    problem.listed_keys = 8192;
    EXPECT_EQ(explain(problem, "auto").selected, "cuda_portable");
    EXPECT_TRUE(of_bulk(problem).usable);
    EXPECT_EQ(of_bulk(problem).reason,
              "can, but leaves up to 8192 listed keys of quantized rows to others, which are faster");
    EXPECT_EQ(explain(problem, "cuda_bulk").selected, "cuda_bulk");
    ++problem.listed_keys;
    EXPECT_EQ(explain(problem, "auto").selected, "cuda_bulk");
  }
  Problem plain = of_format(Op::kDecodeSparse, kFewRows, CacheFormat::kBF16);
  plain.listed_keys = 1;
  EXPECT_EQ(explain(plain, "auto").selected, "cuda_bulk");
}

TEST(Bulk, IsForSm90AndSm100) {
  for (Op op : kOpsOfBulk)
    for (int32_t arch : {75, 80, 86, 89, 91, 120, 121}) {
      const BackendVerdict verdict = of_bulk(of_rows(op, kFewRows, arch));
      EXPECT_FALSE(verdict.usable) << name(op);
      EXPECT_EQ(verdict.reason,
                "needs sm90 or sm100 or sm103 or sm110 (H100, H200, B200), not sm" + std::to_string(arch));
    }
  for (int32_t arch : {103, 110})  // its kin: whether they are there is another question
    EXPECT_THAT(of_bulk(of_rows(Op::kDecode, kFewRows, arch)).reason, Not(HasSubstr("needs")));
  for (int32_t arch : {90, 100})
    if (emulates(arch)) {
      EXPECT_EQ(of_bulk(of_rows(Op::kDecode, kFewRows, arch)).reason,
                "emulated: mma.sync kernels with bulk copies of sm" + std::to_string(arch) + " on the CPU");
    }
}

TEST(Bulk, TakesFewRowsOfEveryFormat) {
  if (!emulates(90)) GTEST_SKIP() << "this build does not emulate sm90";
  for (Op op : {Op::kDecode, Op::kDecodeSparse})
    for (CacheFormat format : kAllCacheFormats) {
      if (!takes(format)) continue;
      MLA_TRACE(std::string(name(op)) + " " + std::string(name(format)));
      Problem problem = of_format(op, kFewRows, format);
      for (DType q_dtype : {value_dtype(kv_layout(format).nope.element), DType::kE4M3}) {
        problem.q_dtype = q_dtype;
        EXPECT_EQ(explain(problem, "auto").selected, "cuda_bulk") << of_bulk(problem).reason;
      }
    }
  EXPECT_EQ(explain(of_rows(Op::kPrefillSparse, kFewRows), "auto").selected, "cuda_bulk");
}

TEST(Bulk, TakesManyRowsOf16BitFormats) {
  if (!emulates(100)) GTEST_SKIP() << "this build does not emulate sm100, where no other backend takes them first";
  Problem many = of_rows(Op::kDecode, kManyRows, 100);
  EXPECT_EQ(explain(many, "auto").selected, "cuda_bulk");
  many.num_heads = 8;
  many.q_len = 100;
  EXPECT_EQ(explain(many, "auto").selected, "cuda_bulk");
}

TEST(Bulk, LeavesManyQuantizedRows) {
  for (Op op : {Op::kDecode, Op::kDecodeSparse})
    for (CacheFormat format : kAllCacheFormats) {
      if (!is_quantized(format) || !takes(format)) continue;
      MLA_TRACE(std::string(name(op)) + " " + std::string(name(format)));
      const Problem many = of_format(op, kManyRows, format);
      EXPECT_FALSE(of_bulk(many).usable);
      EXPECT_EQ(of_bulk(many).reason,
                "takes requests of up to 16 query rows (tokens x heads) with quantized keys, not 17");
      if (emulates(90)) {
        EXPECT_EQ(explain(many, "cuda_portable").selected, "cuda_portable");
        EXPECT_THAT(explain(many, "cuda_bulk").error, HasSubstr("quantized keys, not 17; cuda_sm90 can"));
      }
    }
  Problem tokens = of_format(Op::kDecode, 8, CacheFormat::kFP8DsMla);
  tokens.q_len = 3;
  EXPECT_THAT(of_bulk(tokens).reason, HasSubstr("not 24"));
  tokens.q_len = int64_t{1} << 62;  // rows that no int64 can count
  EXPECT_FALSE(of_bulk(tokens).usable);
}

TEST(Bulk, LeavesQueriesThatAreMorePrecise) {
  Problem problem = of_rows(Op::kDecode, kFewRows);
  for (DType q_dtype : {DType::kF32, DType::kF16}) {
    problem.q_dtype = q_dtype;
    EXPECT_EQ(of_bulk(problem).reason, "takes bf16 and e4m3 queries with bf16 keys, not " + std::string(name(q_dtype)));
    if (emulates(90)) {
      EXPECT_EQ(explain(problem, "auto").selected, "cuda_portable");
    }
  }
}

TEST(Bulk, SaysOfItselfWhatItLeaves) {
  for (const BackendInfo& backend : backends())
    if (backend.name == "cuda_bulk") {
      EXPECT_EQ(backend.archs, (std::vector<int32_t>{90, 100, 103, 110}));
      EXPECT_EQ(backend.leaves,
                "attention to quantized rows with more than 16 query rows of a request (query tokens times heads), and "
                "sparse attention to up to 8192 quantized keys");
    }
}

}  // namespace
}  // namespace mla::test
