// SPDX-License-Identifier: Apache-2.0
// Tests what cuda_sm90 takes, what it leaves to cuda_bulk and cuda_portable, and that what runs is what explain
// selects.
#include <gmock/gmock.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "core/problems.h"
#include "mla/mla.h"
#include "trace.h"

namespace mla::test {
namespace {

using testing::HasSubstr;

constexpr Op kOps[] = {Op::kDecode, Op::kDecodeSparse, Op::kPrefillSparse, Op::kPrefill};

/// Returns a problem on an emulated SM90: 128 heads of DeepSeek-V3, bf16.
Problem on_sm90(Op op) {
  Problem problem{.op = op, .device = {DeviceType::kCuda, 0}, .gpu_arch = 90, .emulated = true};
  if (op == Op::kPrefill) {
    problem.d_qk = 192;
    problem.d_v = 128;
  }
  return problem;
}

constexpr CacheFormat kQuantizedFormats[] = {CacheFormat::kFP8, CacheFormat::kFP8DsMla, CacheFormat::kFP8DsV4};

Problem with_cache(Op op, CacheFormat format) {
  Problem problem = on_sm90(op);
  problem.cache = format;
  if (format == CacheFormat::kFP8DsV4) problem.d_qk = 512;
  return problem;
}

BackendVerdict of_sm90(const Problem& problem) {
  for (BackendVerdict& row : explain(problem, "auto").rows)
    if (row.name == "cuda_sm90") return row;
  ADD_FAILURE() << name(problem.op) << " has no cuda_sm90";
  return {};
}

bool emulates_sm90() {
  const auto& archs = machine_info().emulated_archs;
  return std::find(archs.begin(), archs.end(), 90) != archs.end();
}

class BackendVariable {
 public:
  explicit BackendVariable(const char* value) { setenv("MLA_BACKEND", value, 1); }
  ~BackendVariable() { unsetenv("MLA_BACKEND"); }
  BackendVariable(const BackendVariable&) = delete;
  BackendVariable& operator=(const BackendVariable&) = delete;
};

TEST(Sm90, IsForNoOtherArchitecture) {
  for (Op op : kOps)
    for (bool emulated : {false, true})
      for (int32_t arch : {75, 80, 86, 89, 91, 100, 103, 120}) {
        Problem problem = on_sm90(op);
        problem.gpu_arch = arch;
        problem.emulated = emulated;
        EXPECT_FALSE(of_sm90(problem).usable);
        EXPECT_EQ(of_sm90(problem).reason, "needs sm90 (H100, H200), not sm" + std::to_string(arch)) << name(op);
      }
}

TEST(Sm90, TakesWhatItIsFor) {
  if (!emulates_sm90()) GTEST_SKIP() << "this build does not emulate sm90";
  for (Op op : kOps) {
    MLA_TRACE(name(op));
    EXPECT_EQ(of_sm90(on_sm90(op)).reason, "emulated: wgmma kernels of sm90 on the CPU");
    EXPECT_EQ(explain(on_sm90(op), "auto").selected, "cuda_sm90");
    EXPECT_EQ(explain(on_sm90(op), "cuda").selected, "cuda_sm90");
    EXPECT_EQ(explain(on_sm90(op), "cuda_portable").selected, "cuda_portable");
    Problem f16 = on_sm90(op);
    f16.q_dtype = DType::kF16;
    f16.cache = CacheFormat::kF16;
    EXPECT_EQ(explain(f16, "auto").selected, "cuda_sm90");
  }
  for (Op op : {Op::kDecode, Op::kDecodeSparse})
    for (CacheFormat format : kQuantizedFormats)
      for (DType q_dtype : {DType::kBF16, DType::kE4M3}) {
        Problem problem = with_cache(op, format);
        problem.q_dtype = q_dtype;
        EXPECT_EQ(explain(problem, "auto").selected, "cuda_sm90") << name(op) << " " << name(format);
        problem.num_heads = 16;
        EXPECT_EQ(explain(problem, "auto").selected, "cuda_bulk") << name(op) << " " << name(format);
      }
  Problem problem = with_cache(Op::kDecodeSparse, CacheFormat::kFP8DsV4);
  problem.extra_cache = CacheFormat::kFP8DsV4;
  EXPECT_TRUE(of_sm90(problem).usable);
  problem = on_sm90(Op::kDecodeSparse);
  problem.q_dtype = DType::kE4M3;
  problem.extra_cache = CacheFormat::kBF16;
  EXPECT_TRUE(of_sm90(problem).usable);
  problem = on_sm90(Op::kPrefill);
  problem.num_heads = 1;  // rows are the tokens of a request
  EXPECT_TRUE(of_sm90(problem).usable);
}

TEST(Sm90, SaysWhatItLeavesToOthers) {
  const auto expect = [](const Problem& problem, const std::string& reason, const char* other = "cuda_portable") {
    EXPECT_FALSE(of_sm90(problem).usable) << name(problem.op);
    EXPECT_EQ(of_sm90(problem).reason, reason) << name(problem.op);
    EXPECT_THAT(explain(problem, "cuda_sm90").error,
                HasSubstr("backend: \"cuda_sm90\" cannot run this: cuda_sm90: " + reason +
                          (emulates_sm90() ? "; " + std::string(other) + " can" : "")));
    if (emulates_sm90()) {
      EXPECT_EQ(explain(problem, "auto").selected, other) << name(problem.op);
      EXPECT_EQ(explain(problem, "cuda").selected, other) << name(problem.op);
    }
  };
  for (Op op : {Op::kDecode, Op::kDecodeSparse})
    for (CacheFormat format : kQuantizedFormats)
      for (DType q_dtype : {DType::kF32, DType::kF16}) {
        Problem problem = with_cache(op, format);
        problem.q_dtype = q_dtype;
        expect(problem, "takes bf16 and e4m3 queries with " + std::string(name(format)) + " keys, not " +
                            std::string(name(q_dtype)));
      }
  for (Op op : {Op::kDecode, Op::kDecodeSparse, Op::kPrefillSparse}) {
    const std::string and_e4m3 = op == Op::kPrefillSparse ? "" : " and e4m3";
    Problem problem = on_sm90(op);
    for (DType q_dtype : {DType::kF32, DType::kF16}) {
      problem.q_dtype = q_dtype;
      expect(problem, "takes bf16" + and_e4m3 + " queries with bf16 keys, not " + std::string(name(q_dtype)));
    }
    problem.cache = CacheFormat::kF16;
    problem.q_dtype = DType::kBF16;
    expect(problem, "takes f16" + and_e4m3 + " queries with f16 keys, not bf16");
    problem = on_sm90(op);
    problem.num_heads = 16;
    expect(problem, "takes requests of more than 16 query rows (tokens x heads), not 16", "cuda_bulk");
  }
  Problem prefill = on_sm90(Op::kPrefill);
  for (DType dtype : {DType::kF32, DType::kE4M3}) {
    prefill.q_dtype = dtype;
    expect(prefill, "takes bf16 and f16, not " + std::string(name(dtype)));
  }
  prefill = on_sm90(Op::kPrefill);
  prefill.d_qk = prefill.d_v = 64;
  expect(prefill, "takes d_qk/d_v of 192/128, 128/128, 256/128, 256/256, not 64/64");
}

TEST(Sm90, LeavesIndexersOfFewHeads) {
  for (Op op : {Op::kIndexerLogits, Op::kIndexerTopK}) {
    Problem problem = on_sm90(op);
    problem.q_dtype = DType::kE4M3;
    problem.num_heads = 32;
    const std::string_view few =
        "takes 32 heads for products of e4m3 only (e4m3 queries, logits of all keys, compute not exact)";
    problem.compute = Compute::kExact;
    EXPECT_EQ(of_sm90(problem).reason, few);
    problem.compute = Compute::kDefault;
    if (emulates_sm90()) {
      EXPECT_TRUE(of_sm90(problem).usable) << of_sm90(problem).reason;
      EXPECT_EQ(of_sm90(problem).numerics.multiplied, Arithmetic::kE4M3);
    }
    problem.q_dtype = DType::kBF16;
    EXPECT_EQ(of_sm90(problem).reason, few);
    problem.q_dtype = DType::kE4M3;
    problem.compute = Compute::kExact;
    problem.num_heads = 33;
    if (emulates_sm90()) {
      EXPECT_TRUE(of_sm90(problem).usable) << of_sm90(problem).reason;
    }
    problem.q_dtype = DType::kF32;
    EXPECT_EQ(of_sm90(problem).reason, "takes e4m3, bf16 and f16, not f32");
  }
}

/// What is said of the backend as a whole has the numbers of its verdicts.
TEST(Sm90, SaysOfItselfWhatItLeaves) {
  for (const BackendInfo& backend : backends())
    if (backend.name == "cuda_sm90") {
      EXPECT_EQ(backend.archs, std::vector<int32_t>{90});
      EXPECT_EQ(backend.leaves,
                "requests of up to 16 query rows, or 32 over few 16-bit keys, exact indexers of up to 32 heads, and up "
                "to 163840 "
                "pairs of a query row and a listed, quantized key");
    }
}

TEST(Sm90, RefusesWhatTheOtherDoes) {
  for (const Op op : kOps) {
    Problem problem = on_sm90(op);
    problem.q_dtype = DType::kI32;
    EXPECT_THAT(of_sm90(problem).reason, HasSubstr("not int32"));
    problem = on_sm90(op);
    problem.d_v = 100;
    EXPECT_THAT(of_sm90(problem).reason, HasSubstr("takes d_qk/d_v of "));
    problem.device = {};
    EXPECT_EQ(of_sm90(problem).reason, "tensors are on cpu, not on a GPU");
  }
}

TEST(Sm90, CountsTheQueryRowsOfARequest) {
  if (!emulates_sm90()) GTEST_SKIP() << "this build does not emulate sm90";
  constexpr int64_t kMany = int64_t{1} << 62;
  for (int64_t heads : {int64_t{1}, int64_t{3}, int64_t{8}, int64_t{16}, int64_t{17}, kMany})
    for (int64_t q_len : {int64_t{1}, int64_t{2}, int64_t{5}, int64_t{6}, int64_t{16}, int64_t{17}, kMany}) {
      Problem problem = on_sm90(Op::kDecode);
      problem.num_heads = heads;
      problem.q_len = q_len;
      const bool many = heads > 16 || q_len > 16 || heads * q_len > 16;
      EXPECT_EQ(of_sm90(problem).usable, many) << heads << " x " << q_len;
      problem.op = Op::kDecodeSparse;  // one query token at a time
      EXPECT_EQ(of_sm90(problem).usable, heads > 16) << heads << " x " << q_len;
    }
}

/// Holds a decode of `tokens` query tokens and `requests` requests.
struct DecodeOf {
  std::vector<uint16_t> q, cache = std::vector<uint16_t>(4 * 64 * 576), o;
  std::vector<int32_t> kv_len, table, qo_indptr;
  DecodeParams params;

  DecodeOf(int64_t requests, int64_t tokens, int64_t heads, bool batch_invariant)
      : q(static_cast<size_t>(tokens * heads * 576)),
        o(static_cast<size_t>(tokens * heads * 512)),
        kv_len(static_cast<size_t>(requests), 100),
        table(static_cast<size_t>(requests) * 2, 1),
        qo_indptr(static_cast<size_t>(requests) + 1, static_cast<int32_t>(tokens)) {
    qo_indptr[0] = 0;  // all in the first request
    params = {.q = of(q, {tokens, heads, 576}),
              .cache = {.kv = of(cache, {4, 64, 576})},
              .pages = {.block_table = contiguous(table.data(), DType::kI32, {requests, 2}), .kv_len = of(kv_len)},
              .qo_indptr = of(qo_indptr),
              .sm_scale = 0.07F,
              .o = of(o, {tokens, heads, 512})};
    params.batch_invariant = batch_invariant;
  }

  std::string planned_for(const Context& context) const {
    std::vector<std::byte> workspace(workspace_size(context, params).value());
    return std::string(plan(context, params, workspace).value().backend());
  }
};

TEST(Sm90, PlansFollowTheQueryTokensOfTheBatch) {
  if (!emulates_sm90()) GTEST_SKIP() << "this build does not emulate sm90";
  const Context context = Context::create({.num_threads = 2, .device = "emulated:sm90"}).value();
  const struct {
    int64_t requests, tokens, heads;
    bool batch_invariant;
    int64_t q_len;
    const char* backend;
  } cases[] = {{1, 1, 32, false, 1, "cuda_bulk"},   {1, 1, 33, false, 1, "cuda_sm90"},
               {1, 2, 8, false, 2, "cuda_bulk"},    {1, 2, 9, false, 2, "cuda_sm90"},
               {4, 4, 32, false, 1, "cuda_bulk"},   {4, 5, 17, false, 2, "cuda_sm90"},  // rounded up
               {4, 9, 5, false, 3, "cuda_bulk"},    {4, 9, 6, false, 3, "cuda_sm90"},
               {32, 32, 17, false, 1, "cuda_bulk"}, {33, 33, 17, false, 1, "cuda_sm90"},
               {33, 33, 16, false, 1, "cuda_bulk"}, {3, 0, 16, false, 1, "cuda_bulk"},
               {4, 9, 16, true, 1, "cuda_bulk"},    {4, 9, 17, true, 1, "cuda_sm90"}};
  for (const auto& c : cases) {
    MLA_TRACE(std::to_string(c.tokens) + " tokens, " + std::to_string(c.requests) + " requests");
    const DecodeOf problem(c.requests, c.tokens, c.heads, c.batch_invariant);
    Problem asked = on_sm90(Op::kDecode);
    asked.num_heads = c.heads;
    asked.q_len = c.q_len;
    asked.num_requests = c.batch_invariant ? 0 : c.requests;
    EXPECT_EQ(explain(asked, "auto").selected, c.backend);
    EXPECT_EQ(problem.planned_for(context), c.backend);
  }
}

TEST(Sm90, IsForcedByNameAndLeftByTheNameOfTheOther) {
  if (!emulates_sm90()) GTEST_SKIP() << "this build does not emulate sm90";
  const DecodeOf many(1, 1, 33, false), few(1, 1, 8, false);
  const auto context_of = [](const char* backend) {
    const BackendVariable set(backend);
    return Context::create({.num_threads = 1, .device = "emulated:sm90"}).value();
  };
  EXPECT_EQ(many.planned_for(context_of("cuda")), "cuda_sm90");
  EXPECT_EQ(few.planned_for(context_of("cuda")), "cuda_bulk");
  EXPECT_EQ(many.planned_for(context_of("cuda_portable")), "cuda_portable");
  const Context forced = context_of("cuda_sm90");
  EXPECT_EQ(many.planned_for(forced), "cuda_sm90");
  EXPECT_THAT(
      workspace_size(forced, few.params).status().message(),
      HasSubstr(
          "decode: MLA_BACKEND: \"cuda_sm90\" cannot run this: cuda_sm90: takes requests of more than 16 query rows"));
  // It writes no caches: there it means the GPU's rows, and not those of the CPU.
  Problem append = on_sm90(Op::kAppend);
  EXPECT_EQ(explain(append, "cuda_sm90").selected, "cuda_portable");
  std::vector<float> partial(8, 1.0F), lse(2), merged(4);
  const MergeStatesParams merge{.partial_o = contiguous(partial.data(), DType::kF32, {2, 1, 1, 4}),
                                .partial_lse = contiguous(lse.data(), DType::kF32, {2, 1, 1}),
                                .o = contiguous(merged.data(), DType::kF32, {1, 1, 4})};
  EXPECT_EQ(run(forced, merge).message(), "");
  EXPECT_EQ(merged, std::vector<float>(4, 1.0F));
  append.device = {};
  EXPECT_THAT(
      explain(append, "cuda_sm90").error,
      testing::AllOf(HasSubstr("append: backend: \"cuda_sm90\" cannot run this: cuda_"), HasSubstr("cuda_portable: ")));
  EXPECT_THAT(explain(append, "cuda_sm91").error,
              testing::AllOf(HasSubstr("append: backend: expected one of cuda_"), HasSubstr("cuda_portable, ")));
  // A plan of one row does not run where the other is forced.
  std::vector<std::byte> workspace(workspace_size(forced, many.params).value());
  const Plan planned = plan(forced, many.params, workspace).value();
  EXPECT_THAT(run(context_of("cuda_portable"), planned, many.params).message(),
              HasSubstr("expected one for cuda_portable (MLA_BACKEND of the context), got one for cuda_sm90"));
}

}  // namespace
}  // namespace mla::test
