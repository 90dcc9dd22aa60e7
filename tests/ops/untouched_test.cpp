// SPDX-License-Identifier: Apache-2.0
// Tests that, whatever is wrong with a call, the error names the field and every output byte stays as it was.
#include <gtest/gtest.h>

#include <vector>

#include "backend_test.h"
#include "mistakes.h"

namespace mla {
namespace {

class DecodeUntouched : public BackendTest<Op::kDecode> {};
MLA_FOR_EVERY_ROW(DecodeUntouched, Op::kDecode);

const std::vector<Mistake<DecodeParams>> kDecodeMistakes = {
    {"sm_scale", [](DecodeParams& p) { p.sm_scale = kNan; }},
    {"sm_scale", [](DecodeParams& p) { p.sm_scale = kInfinity; }},
    {"sm_scale", [](DecodeParams& p) { p.sm_scale = 0; }},
    {"sm_scale", [](DecodeParams& p) { p.sm_scale = -1; }},
    {"q", [](DecodeParams& p) { p.q = {}; }},
    {"q", [](DecodeParams& p) { p.q.data = nullptr; }},
    {"q", [](DecodeParams& p) { p.q.dtype = DType::kI32; }},
    {"q", [](DecodeParams& p) { p.q.dtype = DType::kE4M3; }},
    {"num_heads", [](DecodeParams& p) { p.q.shape[1] = 0; }},
    {"q", [](DecodeParams& p) { p.q.ndim = 2; }},
    {"q", [](DecodeParams& p) { p.q.stride[2] = 2; }},
    {"q", [](DecodeParams& p) { p.q_nope = p.q; }},
    {"q", [](DecodeParams& p) { p.q.device = {.type = DeviceType::kCuda, .index = 0}; }},
    {"o", [](DecodeParams& p) { p.o = {}; }},
    {"o", [](DecodeParams& p) { p.o.data = nullptr; }},
    {"o", [](DecodeParams& p) { p.o.dtype = DType::kF16; }},
    {"o", [](DecodeParams& p) { p.o.shape[0] = 3; }},
    {"o", [](DecodeParams& p) { p.o.shape[1] = 8; }},
    {"o", [](DecodeParams& p) { p.o.shape[2] = 576; }},
    {"lse", [](DecodeParams& p) { p.lse.dtype = DType::kBF16; }},
    {"lse", [](DecodeParams& p) { p.lse.shape[1] = 8; }},
    {"kv", [](DecodeParams& p) { p.cache.kv = {}; }},
    {"kv", [](DecodeParams& p) { p.cache.kv.data = nullptr; }},
    {"kv", [](DecodeParams& p) { p.cache.kv.dtype = DType::kF16; }},
    {"kv", [](DecodeParams& p) { p.cache.kv.shape[2] = 512; }},
    {"page_size", [](DecodeParams& p) { p.cache.kv.shape[1] = 0; }},
    {"kv_indices", [](DecodeParams& p) { p.pages.kv_indices = {}; }},
    {"kv_indices", [](DecodeParams& p) { static_cast<int32_t*>(p.pages.kv_indices.data)[1] = 1000; }},
    {"kv_indices", [](DecodeParams& p) { static_cast<int32_t*>(p.pages.kv_indices.data)[1] = -1; }},
    {"kv_indices", [](DecodeParams& p) { p.pages.kv_indices.dtype = DType::kI64; }},
    {"kv_indptr", [](DecodeParams& p) { p.pages.kv_indptr = contiguous(kDecreasing, DType::kI32, {3}); }},
    {"kv_indptr", [](DecodeParams& p) { p.pages.kv_indptr.shape[0] = 2; }},
    {"kv_len", [](DecodeParams& p) { p.pages.kv_len = {}; }},
    {"kv_len", [](DecodeParams& p) { p.pages.kv_len = contiguous(kTooLong, DType::kI32, {2}); }},
    {"kv_len", [](DecodeParams& p) { p.pages.kv_len = contiguous(kNegative, DType::kI32, {2}); }},
    {"qo_indptr", [](DecodeParams& p) { p.qo_indptr = contiguous(kDecreasing, DType::kI32, {3}); }},
    {"qo_indptr", [](DecodeParams& p) { p.qo_indptr.shape[0] = 2; }},
    {"block_table",
     [](DecodeParams& p) {
       p.pages.block_table = contiguous(kDecreasing, DType::kI32, {2, 1});
     }},
};

TEST_P(DecodeUntouched, EveryMistake) {
  for (const Mistake<DecodeParams>& mistake : kDecodeMistakes) {
    kit::DecodeSpec spec;
    spec.kv_len = {130, 70};
    const kit::DecodeCase problem(spec);
    DecodeParams params = problem.params();
    mistake.make(params);
    expect_names(planned_run(context(), params), "decode", mistake.field);
    EXPECT_TRUE(all_bytes_are(problem.o, kit::kUntouched)) << mistake.field;
    EXPECT_TRUE(all_bytes_are(problem.lse, kit::kUntouched)) << mistake.field;
  }
}

TEST_P(DecodeUntouched, MistakesMadeBetweenPlanAndRun) {
  for (const Mistake<DecodeParams>& mistake : kDecodeMistakes) {
    kit::DecodeSpec spec;
    spec.kv_len = {130, 70};
    const kit::DecodeCase problem(spec);
    DecodeParams params = problem.params();
    const Result<size_t> size = workspace_size(context(), params);
    MLA_EXPECT_OK(size);
    const kit::Buffer workspace(*size);
    Result<Plan> made = plan(context(), params, workspace.bytes());
    MLA_EXPECT_OK(made);
    mistake.make(params);
    EXPECT_FALSE(run(context(), *made, params).ok()) << mistake.field;
    EXPECT_TRUE(all_bytes_are(problem.o, kit::kUntouched)) << mistake.field;
    EXPECT_TRUE(all_bytes_are(problem.lse, kit::kUntouched)) << mistake.field;
  }
}

TEST_P(DecodeUntouched, WorkspaceTooSmall) {
  kit::DecodeSpec spec;
  spec.kv_len = {5000, 70};
  const kit::DecodeCase problem(spec);
  const Result<size_t> size = workspace_size(context(), problem.params());
  MLA_EXPECT_OK(size);
  ASSERT_GT(*size, 0U);
  const kit::Buffer workspace(*size);
  workspace.fill(0xEE);
  const Result<Plan> made = plan(context(), problem.params(), workspace.bytes().first(*size - 1));
  EXPECT_FALSE(made.ok());
  EXPECT_EQ(made.status().code(), StatusCode::kWorkspaceTooSmall);
  EXPECT_TRUE(all_bytes_are(workspace, 0xEE));
}

TEST_P(DecodeUntouched, OtherLengthsThanThePlans) {
  kit::DecodeSpec spec;
  spec.kv_len = {130, 70};
  const kit::DecodeCase planned(spec);
  const Result<kit::PlannedRun> done = kit::plan_and_run(context(), planned);
  MLA_EXPECT_OK(done);
  const auto expect_refused = [&](const kit::DecodeSpec& other) {
    const kit::DecodeCase problem(other);
    EXPECT_FALSE(run(context(), done->plan, problem.params()).ok()) << describe(other);
    EXPECT_TRUE(all_bytes_are(problem.o, kit::kUntouched)) << describe(other);
  };
  kit::DecodeSpec other = spec;
  other.kv_len = {130, 71};
  expect_refused(other);
  other = spec;
  other.kv_len = {130, 70, 1};
  expect_refused(other);
  other = spec;
  other.q_len = {2};
  expect_refused(other);
  other = spec;
  other.num_heads = 8;
  expect_refused(other);
  other = spec;
  other.cache.d_qk = 512;
  expect_refused(other);
}

TEST_P(DecodeUntouched, HeadDimsThatNoFastRowHas) {
  kit::DecodeSpec spec;
  spec.cache.d_qk = 100;
  spec.cache.d_v = 77;
  const kit::DecodeCase problem(spec);
  const Status status = planned_run(context(), problem.params());
  if (GetParam() == "reference") {
    EXPECT_TRUE(status.ok()) << status.message();
  } else {
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    EXPECT_NE(status.message().find(GetParam()), std::string::npos) << status.message();
    EXPECT_TRUE(all_bytes_are(problem.o, kit::kUntouched));
  }
}

class PrefillUntouched : public BackendTest<Op::kPrefill> {};
MLA_FOR_EVERY_ROW(PrefillUntouched, Op::kPrefill);

TEST_P(PrefillUntouched, EveryMistake) {
  const std::vector<Mistake<PrefillParams>> mistakes = {
      {"sm_scale", [](PrefillParams& p) { p.sm_scale = kNan; }},
      {"q", [](PrefillParams& p) { p.q.data = nullptr; }},
      {"q", [](PrefillParams& p) { p.q.dtype = DType::kU8; }},
      {"num_heads", [](PrefillParams& p) { p.q.shape[1] = 0; }},
      {"k", [](PrefillParams& p) { p.k = {}; }},
      {"k", [](PrefillParams& p) { p.k.dtype = DType::kF32; }},
      {"k", [](PrefillParams& p) { p.k.shape[1] = 3; }},
      {"k", [](PrefillParams& p) { p.k.shape[2] = 128; }},
      {"v", [](PrefillParams& p) { p.v.data = nullptr; }},
      {"v", [](PrefillParams& p) { p.v.shape[0] = 3; }},
      {"v", [](PrefillParams& p) { p.v.stride[2] = 3; }},
      {"o", [](PrefillParams& p) { p.o.shape[2] = 192; }},
      {"o", [](PrefillParams& p) { p.o.dtype = DType::kF16; }},
      {"lse", [](PrefillParams& p) { p.lse.shape[0] = 1; }},
      {"qo_indptr", [](PrefillParams& p) { p.qo_indptr = {}; }},
      {"qo_indptr", [](PrefillParams& p) { p.qo_indptr = contiguous(kDecreasing, DType::kI32, {3}); }},
      {"kv_indptr", [](PrefillParams& p) { p.kv_indptr = contiguous(kDecreasing, DType::kI32, {3}); }},
      {"kv_indptr", [](PrefillParams& p) { p.kv_indptr.dtype = DType::kI64; }},
  };
  for (const Mistake<PrefillParams>& mistake : mistakes) {
    kit::PrefillSpec spec;
    spec.q_len = {20, 3};
    spec.kv_len = {30, 3};
    const kit::PrefillCase problem(spec);
    PrefillParams params = problem.params();
    mistake.make(params);
    expect_names(planned_run(context(), params), "prefill", mistake.field);
    EXPECT_TRUE(all_bytes_are(problem.o, kit::kUntouched)) << mistake.field;
    EXPECT_TRUE(all_bytes_are(problem.lse, kit::kUntouched)) << mistake.field;
  }
}

class MergeUntouched : public BackendTest<Op::kMergeStates> {};
MLA_FOR_EVERY_ROW(MergeUntouched, Op::kMergeStates);

TEST_P(MergeUntouched, EveryMistake) {
  const std::vector<Mistake<MergeStatesParams>> mistakes = {
      {"partial_o", [](MergeStatesParams& p) { p.partial_o = {}; }},
      {"partial_o", [](MergeStatesParams& p) { p.partial_o.dtype = DType::kI32; }},
      {"partial_o", [](MergeStatesParams& p) { p.partial_o.data = nullptr; }},
      {"partial_lse", [](MergeStatesParams& p) { p.partial_lse = {}; }},
      {"partial_lse", [](MergeStatesParams& p) { p.partial_lse.shape[0] = 3; }},
      {"partial_lse", [](MergeStatesParams& p) { p.partial_lse.dtype = DType::kBF16; }},
      {"o", [](MergeStatesParams& p) { p.o.shape[2] = 8; }},
      {"o", [](MergeStatesParams& p) { p.o.dtype = DType::kI64; }},
      {"lse", [](MergeStatesParams& p) { p.lse.shape[0] = 1; }},
      {"lse",
       [](MergeStatesParams& p) {
         p.in_place = true;
         p.lse = {};
       }},
  };
  for (const Mistake<MergeStatesParams>& mistake : mistakes) {
    const kit::MergeCase problem(kit::MergeSpec{});
    MergeStatesParams params = problem.params();
    mistake.make(params);
    expect_names(run(context(), params), "merge_states", mistake.field);
    EXPECT_TRUE(all_bytes_are(problem.o, kit::kUntouched)) << mistake.field;
    EXPECT_TRUE(all_bytes_are(problem.lse, kit::kUntouched)) << mistake.field;
  }
}

class AppendUntouched : public BackendTest<Op::kAppend> {};
MLA_FOR_EVERY_ROW(AppendUntouched, Op::kAppend);

TEST_P(AppendUntouched, EveryMistake) {
  const std::vector<Mistake<AppendParams>> mistakes = {
      {"kv", [](AppendParams& p) { p.kv = {}; }},
      {"kv", [](AppendParams& p) { p.kv.shape[1] = 512; }},
      {"kv", [](AppendParams& p) { p.kv.dtype = DType::kI32; }},
      {"slot_mapping", [](AppendParams& p) { p.slot_mapping = {}; }},
      {"slot_mapping", [](AppendParams& p) { p.slot_mapping.dtype = DType::kI32; }},
      {"slot_mapping", [](AppendParams& p) { p.slot_mapping.shape[0] = 3; }},
      {"slot_mapping", [](AppendParams& p) { static_cast<int64_t*>(p.slot_mapping.data)[63] = 8 * 64; }},
      {"kv", [](AppendParams& p) { p.cache.kv.data = nullptr; }},
  };
  for (const Mistake<AppendParams>& mistake : mistakes) {
    const kit::AppendCase problem(kit::AppendSpec{});
    AppendParams params = problem.params();
    mistake.make(params);
    expect_names(run(context(), params), "append", mistake.field);
    EXPECT_TRUE(all_bytes_are(problem.memory.kv, kit::kUntouched)) << mistake.field;
  }
}

class GatherUntouched : public BackendTest<Op::kGather> {};
MLA_FOR_EVERY_ROW(GatherUntouched, Op::kGather);

TEST_P(GatherUntouched, EveryMistake) {
  static const int32_t kBeyond[] = {1};
  const std::vector<Mistake<GatherParams>> mistakes = {
      {"out_kv", [](GatherParams& p) { p.out_kv = {}; }},
      {"out_kv", [](GatherParams& p) { p.out_kv.shape[1] = 512; }},
      {"out_kv", [](GatherParams& p) { p.out_kv.dtype = DType::kI32; }},
      {"out_indptr", [](GatherParams& p) { p.out_indptr = {}; }},
      {"token_start", [](GatherParams& p) { p.token_start = contiguous(kBeyond, DType::kI32, {1}); }},
      {"token_start", [](GatherParams& p) { p.token_start = contiguous(kNegative, DType::kI32, {1}); }},
      {"kv_indices", [](GatherParams& p) { static_cast<int32_t*>(p.pages.kv_indices.data)[1] = 77; }},
      {"kv_len", [](GatherParams& p) { p.pages.kv_len = contiguous(kTooLong, DType::kI32, {1}); }},
  };
  for (const Mistake<GatherParams>& mistake : mistakes) {
    const kit::GatherCase problem(kit::GatherSpec{});
    GatherParams params = problem.params();
    mistake.make(params);
    expect_names(run(context(), params), "gather", mistake.field);
    EXPECT_TRUE(all_bytes_are(problem.out_kv, kit::kUntouched)) << mistake.field;
  }
}

}  // namespace
}  // namespace mla
