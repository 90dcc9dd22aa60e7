// SPDX-License-Identifier: Apache-2.0
// Tests context, plan and run as objects: what they check of one another, and that run allocates nothing.
#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#include "core/index_problems.h"
#include "core/sparse_problems.h"
#include "core/writer_problems.h"
#include "dispatch/context.h"
#include "trace.h"

namespace {

std::atomic<size_t> allocations{0};

void* counted_or_null(size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(bytes == 0 ? 1 : bytes);
}
void* counted_or_null(size_t bytes, std::align_val_t align) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  const auto alignment = static_cast<size_t>(align);
  return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}
template <class... Alignment>
void* counted(size_t bytes, Alignment... alignment) {
  if (void* p = counted_or_null(bytes, alignment...)) return p;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(size_t bytes) { return counted(bytes); }
void* operator new[](size_t bytes) { return counted(bytes); }
void* operator new(size_t bytes, std::align_val_t alignment) { return counted(bytes, alignment); }
void* operator new[](size_t bytes, std::align_val_t alignment) { return counted(bytes, alignment); }
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return counted_or_null(bytes); }
void* operator new[](size_t bytes, const std::nothrow_t&) noexcept { return counted_or_null(bytes); }
void* operator new(size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return counted_or_null(bytes, alignment);
}
void* operator new[](size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return counted_or_null(bytes, alignment);
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t, std::align_val_t) noexcept { std::free(p); }

namespace mla::test {
namespace {

Context context_of(int32_t threads, std::string backend = "cpu") {
  return Context::create({.num_threads = threads, .backend = std::move(backend)}).value();
}

/// Holds a decode whose shapes the fast kernels take: one request of `kv_len` tokens, 16 heads, 576/512.
struct RealDecode {
  static constexpr int64_t kRealPages = 4, kRealPageSize = 64;
  std::vector<uint16_t> q = std::vector<uint16_t>(16 * 576, 0x3C00),
                        cache = std::vector<uint16_t>(4 * 64 * 576, 0x3C00),
                        o = std::vector<uint16_t>(16 * 512, kSentinel);
  std::vector<int32_t> kv_len = {200}, table = {3, 2, 1, 0};
  DecodeParams params;
  RealDecode() {
    params = {.q = of(q, {1, 16, 576}),
              .cache = {.kv = of(cache, {kRealPages, kRealPageSize, 576})},
              .pages = {.block_table = contiguous(table.data(), DType::kI32, {1, 4}), .kv_len = of(kv_len)},
              .sm_scale = 0.07F,
              .o = of(o, {1, 16, 512})};
  }
};

TEST(CreateContext, RefusesBadOptions) {
  const auto message = [](const ContextOptions& options) { return Context::create(options).status().message(); };
  EXPECT_EQ(message({.num_threads = -1}), "context: num_threads: expected 0 to 1024, got -1");
  EXPECT_EQ(message({.num_threads = 1025}), "context: num_threads: expected 0 to 1024, got 1025");
  EXPECT_EQ(message({.num_threads = 2, .affinity = {0}}),
            "context: affinity: expected 2 entries, one for each thread, got 1");
  EXPECT_EQ(message({.num_threads = 2, .affinity = {0, 1023}}),
            "context: affinity: expected processors this process may use, got 1023 for worker 1");
  EXPECT_EQ(message({.affinity = {0, -1}}),
            "context: affinity: expected processors this process may use, got -1 for worker 1");
  EXPECT_EQ(message({.affinity = std::vector<int32_t>(1025, 0)}), "context: num_threads: expected 0 to 1024, got 1025");
  EXPECT_EQ(message({.p_run = 33}), "context: p_run: expected 0 or one of 32, 64, 128, got 33");
  std::string rows;
  for (const std::string& row : backend_names(Op::kDecode)) rows += (rows.empty() ? "" : ", ") + row;
  EXPECT_THAT(message({.backend = "tpu"}),
              testing::AllOf(testing::StartsWith("context: backend: expected one of " + rows + ", a family"),
                             testing::EndsWith("reference, a family such as cpu, or auto, got \"tpu\"")));
  EXPECT_EQ(Context::create({.backend = "tpu"}).status().code(), StatusCode::kInvalidArgument);
}

TEST(CreateContext, TakesTheThreadsOfTheProcess) {
  EXPECT_EQ(Context::create()->num_threads(), machine_info().threads);
  EXPECT_EQ(context_of(3).num_threads(), 3);
}

TEST(CreateContext, PinsEachWorkerToItsProcessor) {
  const std::vector<int32_t> usable = usable_processors();
  ASSERT_FALSE(usable.empty());
  const std::vector<int32_t> affinity = {usable.front(), usable.back(), usable.front()};
  for (const int32_t num_threads : {0, 3}) {
    const Context context = Context::create({.num_threads = num_threads, .affinity = affinity}).value();
    ASSERT_EQ(context.num_threads(), 3);
    std::vector<std::vector<int32_t>> of_worker(3);
    context.impl().pool.run([&](int32_t worker) { of_worker[static_cast<size_t>(worker)] = usable_processors(); });
    EXPECT_EQ(of_worker[0], usable);  // the caller's stay
    EXPECT_EQ(of_worker[1], std::vector<int32_t>{affinity[1]});
    EXPECT_EQ(of_worker[2], std::vector<int32_t>{affinity[2]});
  }
}

// Selection puts no reasons into words; what backends say of themselves, which is made once, has them all the same. A
// process of its own runs this test.
TEST(Backends, SayWhatTheyLeaveAfterAnyCall) {
  const Context context = context_of(2);
  const RealDecode p;
  ASSERT_TRUE(workspace_size(context, p.params).ok());
  const std::vector<BackendInfo> all = backends();
  const auto bulk = std::find_if(all.begin(), all.end(), [](const BackendInfo& b) { return b.name == "cuda_bulk"; });
  if (bulk == all.end()) GTEST_SKIP() << "this build has no backends of GPUs";
  EXPECT_THAT(bulk->leaves, testing::HasSubstr("quantized"));
}

TEST(Workspace, TooSmallOrNullIsAnError) {
  const Context context = context_of(2);
  RealDecode p;
  const size_t size = workspace_size(context, p.params).value();
  ASSERT_GT(size, 64U);
  std::vector<std::byte> workspace(size);
  const Status small = plan(context, p.params, std::span(workspace).first(size - 1)).status();
  EXPECT_EQ(small.code(), StatusCode::kWorkspaceTooSmall);
  EXPECT_EQ(small.message(),
            "decode: workspace: expected at least " + std::to_string(size) + " bytes, got " + std::to_string(size - 1));
  EXPECT_EQ(plan(context, p.params, {}).status().code(), StatusCode::kWorkspaceTooSmall);
  EXPECT_EQ(plan(context, p.params, {static_cast<std::byte*>(nullptr), size}).status().message(),
            "decode: workspace: expected data, got a null pointer");
}

TEST(PlanWith, AsksForTheWorkspaceOnce) {
  const Context context = context_of(2);
  RealDecode expected, p;
  std::vector<std::byte> given(workspace_size(context, expected.params).value()), brought;
  ASSERT_TRUE(run(context, plan(context, expected.params, given).value(), expected.params).ok());
  const auto bring = [&](size_t bytes) {
    EXPECT_TRUE(brought.empty());
    brought.resize(bytes);
    return std::span(brought);
  };
  const Plan planned = plan_with(context, p.params, bring).value();
  EXPECT_EQ(brought.size(), given.size());
  ASSERT_TRUE(run(context, planned, p.params).ok());
  EXPECT_EQ(p.o, expected.o);
  p.params.lse = contiguous(brought.data(), DType::kF32, {1, 16});
  EXPECT_THAT(run(context, planned, p.params).message(), testing::HasSubstr("lse"));
}

TEST(PlanWith, RefusesWhatPlanRefuses) {
  const Context context = context_of(2);
  RealDecode p;
  std::vector<std::byte> small(64);
  const auto bring_little = [&](size_t) { return std::span(small); };
  EXPECT_EQ(plan_with(context, p.params, bring_little).status().code(), StatusCode::kWorkspaceTooSmall);
  std::vector<std::byte> tensor(workspace_size(context, p.params).value());
  std::memcpy(tensor.data(), p.kv_len.data(), sizeof(int32_t));
  const std::vector<std::byte> before = tensor;
  p.params.pages.kv_len.data = tensor.data();
  const Status status = plan_with(context, p.params, [&](size_t) { return std::span(tensor); }).status();
  EXPECT_EQ(status.message(), plan(context, p.params, tensor).status().message());
  EXPECT_THAT(status.message(), testing::HasSubstr("expected memory apart from that of"));
  EXPECT_TRUE(tensor == before);
  p.params.pages.kv_len.data = p.kv_len.data();
  const auto fail = [](size_t) -> std::span<std::byte> { throw std::bad_alloc(); };
  EXPECT_EQ(plan_with(context, p.params, fail).status().message(), "out of memory");
  p.params.sm_scale = -1.0F;  // for which nothing is asked
  EXPECT_EQ(plan_with(context, p.params, fail).status().message(), plan(context, p.params, small).status().message());
}

TEST(Workspace, OfTheReferenceDependsOnTheHeadDimsOnly) {
  constexpr size_t kScores = sizeof(double) * 64 * 512;  // of a block of rows and the keys whose scores it keeps
  const Context context = reference_context();
  Decode decode;
  EXPECT_EQ(workspace_size(context, decode.params).value(), 544U * (kCkv + kKpe + kCkv) + kScores + 128);
  decode.kv_len = {1, 12};
  EXPECT_EQ(workspace_size(context, decode.params).value(), 544U * (kCkv + kKpe + kCkv) + kScores + 128);
  const Prefill prefill;
  EXPECT_EQ(workspace_size(context, prefill.params).value(), 544U * (6 + 4) + kScores + 128);
}

TEST(Workspace, AnyAlignmentDoesAndNothingOutsideIsWritten) {
  const Context context = context_of(2);
  RealDecode expected;
  std::vector<std::byte> aligned(workspace_size(context, expected.params).value());
  const Plan first = plan(context, expected.params, aligned).value();
  ASSERT_TRUE(run(context, first, expected.params).ok());
  for (size_t offset : {1U, 7U, 33U, 63U}) {
    RealDecode p;
    std::vector<std::byte> buffer(aligned.size() + 128, std::byte{0xAB});
    const auto workspace = std::span(buffer).subspan(offset, aligned.size());
    const Plan planned = plan(context, p.params, workspace).value();
    ASSERT_TRUE(run(context, planned, p.params).ok());
    EXPECT_EQ(p.o, expected.o);
    for (size_t i = 0; i < buffer.size(); ++i) {
      if (i >= offset && i < offset + aligned.size()) continue;
      ASSERT_EQ(buffer[i], std::byte{0xAB}) << i;
    }
  }
}

TEST(Workspace, ASecondPlanInItInvalidatesTheFirst) {
  const Context context = context_of(2);
  constexpr const char* kOverwritten =
      "decode: workspace: expected the one this plan was written to, got one that another plan or write has "
      "overwritten";
  RealDecode p;
  std::vector<std::byte> workspace(workspace_size(context, p.params).value());
  const Plan first = plan(context, p.params, workspace).value();
  ASSERT_EQ(run(context, first, p.params).message(), "");
  const std::vector<uint16_t> expected = p.o;
  const Plan second = plan(context, p.params, workspace).value();  // even of the same batch
  std::fill(p.o.begin(), p.o.end(), kSentinel);
  EXPECT_EQ(run(context, first, p.params).message(), kOverwritten);
  EXPECT_EQ(run(context, first, p.params).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(p.o, std::vector<uint16_t>(p.o.size(), kSentinel));
  EXPECT_EQ(run(context, second, p.params).message(), "");
  EXPECT_EQ(p.o, expected);
  for (int byte : {0x00, 0xFF}) {
    const Plan planned = plan(context, p.params, workspace).value();
    std::fill(workspace.begin(), workspace.end(), std::byte(byte));
    EXPECT_EQ(run(context, planned, p.params).message(), kOverwritten) << byte;
  }
}

TEST(Plan, RunsOnWhatExplainSelects) {
  RealDecode p;
  const Problem problem{.num_heads = 16, .d_qk = 576, .d_v = 512};
  std::vector<std::string> forced = backend_names(Op::kDecode);
  forced.insert(forced.end(), {"auto", "cpu"});
  for (const std::string& force : forced) {
    MLA_TRACE(force);
    const Context context = context_of(2, force);
    const Explanation explanation = explain(problem, force);
    const Result<size_t> size = workspace_size(context, p.params);
    ASSERT_EQ(size.ok(), !explanation.selected.empty()) << size.status().message();
    if (!size.ok()) {
      EXPECT_EQ(size.status().code(), StatusCode::kUnsupported);
      EXPECT_EQ(size.status().message(), explanation.error);
      continue;
    }
    std::vector<std::byte> workspace(*size);
    EXPECT_EQ(plan(context, p.params, workspace)->backend(), explanation.selected);
  }
}

TEST(RunPlanned, RefusesWhatWasNotPlanned) {
  const Context context = reference_context();
  const struct {
    const char* name;
    std::function<void(Decode&)> changes;
    std::string message;
  } cases[] = {
      {"kv_len", [](Decode& p) { p.kv_len[1] = 8; }, "decode: kv_len: expected 9 as planned, got 8 for request 1"},
      {"q_len", [](Decode& p) { p.qo_indptr[1] = 2; }, "decode: q_len: expected 1 as planned, got 2 for request 0"},
      {"causal", [](Decode& p) { p.params.causal = false; }, "decode: causal: expected 1 as planned, got 0"},
      {"batch_invariant", [](Decode& p) { p.params.batch_invariant = true; },
       "decode: batch_invariant: expected 0 as planned, got 1"},
      {"lse_inf_without_keys", [](Decode& p) { p.params.lse_inf_without_keys = true; },
       "decode: lse_inf_without_keys: expected 0 as planned, got 1"},
      {"heads",
       [](Decode& p) {
         for (TensorView* view : {&p.params.q, &p.params.o, &p.params.lse}) set_extent(*view, 1, 1);
         set_stride(p.params.lse, 1, 1);
       },
       "decode: num_heads: expected 2 as planned, got 1"},
      {"tokens",
       [](Decode& p) {
         for (TensorView* view : {&p.params.q, &p.params.o, &p.params.lse}) set_extent(*view, 0, 2);
         p.qo_indptr = {0, 1, 2};
       },
       "decode: num_tokens: expected 3 as planned, got 2"},
      {"window", [](Decode& p) { p.params.options.window_left = 3; },
       "decode: options.window_left: expected -1 as planned, got 3"},
      {"tree", [](Decode& p) { p.params.tree_parents = of(p.kv_indptr); },
       "decode: tree_mask or tree_parents: expected 0 as planned, got 1"},
      {"rank", [](Decode& p) { p.params.context_parallel = {.rank = 1, .world = 2}; },
       "decode: context_parallel.rank: expected 0 as planned, got 1"},
      {"world", [](Decode& p) { p.params.context_parallel.world = 2; },
       "decode: context_parallel.world: expected 1 as planned, got 2"},
      {"interleave", [](Decode& p) { p.params.context_parallel.interleave = 64; },
       "decode: context_parallel.interleave: expected 1 as planned, got 64"},
      {"page size",
       [](Decode& p) {
         p.params.cache.kv = of(p.cache.data, {4, 8, kCkv + kKpe});
         p.block_table = {0, 1, 1, 2, 3, 0};
       },
       "decode: page_size: expected 4 as planned, got 8"},
  };
  for (const auto& change : cases) {
    MLA_TRACE(change.name);
    Decode p;
    const Plan planned = plan(context, p.params, p.workspace).value();
    p.kv_indptr = {-1, -1, 0};  // as parents
    change.changes(p);
    const Status status = run(context, planned, p.params);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message(), change.message);
    EXPECT_TRUE(p.untouched());
  }
}

TEST(RunPlanned, RefusesSparseBatchesOfOtherShapes) {
  const Context context = reference_context();
  const struct {
    const char* name;
    std::function<void(DecodeSparse&)> changes;
    std::string message;
  } cases[] = {
      {"topk",
       [](DecodeSparse& p) {
         p.params.pool.indices = contiguous(p.indices.data(), DType::kI32, {4, 3});
       },
       "decode_sparse: topk: expected 4 as planned, got 3"},
      {"second pool", [](DecodeSparse& p) { p.use_extra_pool(); },
       "decode_sparse: number of pools: expected 1 as planned, got 2"},
      {"format",
       [](DecodeSparse& p) {
         p.params.q = of(p.q, {4, kHeads, 512});
         p.params.pool.cache = p.quantized.dsv4();
       },
       "decode_sparse: d_qk: expected 576 as planned, got 512"},
      {"queries",
       [](DecodeSparse& p) {
         p.params.q.dtype = DType::kF16;
         p.params.o.dtype = DType::kF16;
       },
       "decode_sparse: q.dtype: expected 3 as planned, got 2"},
      {"batch_invariant", [](DecodeSparse& p) { p.params.batch_invariant = true; },
       "decode_sparse: batch_invariant: expected 0 as planned, got 1"},
      {"arithmetic", [](DecodeSparse& p) { p.params.options.compute = Compute::kFP8; },
       "decode_sparse: options.compute: expected default as planned, got fp8"},
  };
  for (const auto& change : cases) {
    MLA_TRACE(change.name);
    DecodeSparse p;
    const Plan planned = plan(context, p.params, p.workspace).value();
    change.changes(p);
    EXPECT_EQ(run(context, planned, p.params).message(), change.message);
    EXPECT_TRUE(p.untouched());
  }
}

TEST(RunPlanned, SparseLengthsAndOptionsMayChange) {
  const Context context = reference_context();
  DecodeSparse p;
  const Plan planned = plan(context, p.params, p.workspace).value();
  p.lengths = {0, 0, 0, 0};
  p.params.options = {.attn_sink = {}, .window_left = -1, .logits_soft_cap = 5.0F, .alibi_slopes = {}};
  p.use_per_request();
  p.params.qo_indptr = of(p.qo_indptr);
  EXPECT_EQ(run(context, planned, p.params).message(), "");
  EXPECT_EQ(p.o, std::vector<uint16_t>(p.o.size(), 0));  // no key counts
}

TEST(RunPlanned, DataScalePagesAndStridesMayChange) {
  const Context context = reference_context();
  Decode p;
  const Plan planned = plan(context, p.params, p.workspace).value();
  p.use_csr();  // the same lengths, told otherwise
  p.params.sm_scale = 1.0F;
  p.params.lse = {};
  set_stride(p.params.q, 0, 0);
  std::vector<uint16_t> o(p.o.size(), 0);
  p.params.o.data = o.data();
  EXPECT_EQ(run(context, planned, p.params).message(), "");
  EXPECT_TRUE(p.untouched());
}

TEST(RunPlanned, RefusesForeignAndEmptyPlans) {
  const Context context = reference_context();
  Decode decode;
  Prefill prefill;
  DecodeSparse decode_sparse;
  PrefillSparse prefill_sparse;
  const Plan of_decode = plan(context, decode.params, decode.workspace).value();
  EXPECT_EQ(run(context, of_decode, prefill.params).message(),
            "prefill: plan: expected one for prefill, got one for decode");
  // Two operations with the same arguments and table.
  const Plan of_prefill_sparse = plan(context, prefill_sparse.params, prefill_sparse.workspace).value();
  EXPECT_EQ(run(context, of_prefill_sparse, decode_sparse.params).message(),
            "decode_sparse: plan: expected one for decode_sparse, got one for prefill_sparse");
  EXPECT_TRUE(decode_sparse.untouched());
  EXPECT_EQ(run(context, Plan(), decode.params).message(),
            "decode: plan: expected one that plan() made, got an empty one");
  const Context wider = context_of(3, "reference");
  EXPECT_EQ(run(wider, of_decode, decode.params).message(),
            "decode: plan: expected one for a context of 3 threads, got one for 1");
  EXPECT_TRUE(decode.untouched());
  EXPECT_TRUE(prefill.untouched());
}

TEST(RunPlanned, AForcedBackendRefusesPlansOfOthers) {
  const Context reference = context_of(2, "reference"), portable = context_of(2, "cpu_portable");
  RealDecode p;
  std::vector<std::byte> scratch(workspace_size(reference, p.params).value());
  const Plan of_reference = plan(reference, p.params, scratch).value();
  std::vector<std::byte> workspace(workspace_size(portable, p.params).value());
  const Plan of_portable = plan(portable, p.params, workspace).value();
  EXPECT_EQ(run(portable, of_reference, p.params).message(),
            "decode: plan: expected one for cpu_portable (backend of the context), got one for reference");
  EXPECT_EQ(run(reference, of_portable, p.params).message(),
            "decode: plan: expected one for reference (backend of the context), got one for cpu_portable");
  EXPECT_EQ(p.o, std::vector<uint16_t>(p.o.size(), kSentinel));
  EXPECT_EQ(run(context_of(2, "cpu"), of_portable, p.params).message(), "");
}

TEST(RunPlanned, MovedFromObjectsAreErrorsNotCrashes) {
  Context context = reference_context();
  Decode p;
  MergeStates merge;
  Plan planned = plan(context, p.params, p.workspace).value();
  EXPECT_EQ(planned.backend(), "reference");
  EXPECT_EQ(planned.num_tasks(), 1U);
  EXPECT_EQ(planned.num_splits(), 0U);
  EXPECT_FALSE(planned.describe().empty());
  const Plan kept = std::move(planned);
  EXPECT_FALSE(planned.valid());  // NOLINT(bugprone-use-after-move): what a moved-from plan says
  EXPECT_EQ(planned.backend(), "");
  EXPECT_EQ(planned.describe(), "");
  EXPECT_EQ(planned.num_tasks() + planned.num_splits(), 0U);
  const Context moved = std::move(context);
  EXPECT_FALSE(context.valid());  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(context.num_threads(), 0);
  EXPECT_EQ(context.backend(), "");
  for (const std::string& message :
       {run(context, kept, p.params).message(), workspace_size(context, p.params).status().message()})
    EXPECT_EQ(message, "decode: context: expected a live context, got one moved from");
  EXPECT_EQ(run(context, merge.params).message(), "merge_states: context: expected a live context, got one moved from");
  EXPECT_TRUE(run(moved, kept, p.params).ok());
}

TEST(Run, AllocatesNothing) {
  const Context context = context_of(2);
  RealDecode p;
  p.params.q.dtype = DType::kBF16;
  std::vector<std::byte> workspace(workspace_size(context, p.params).value());
  const Plan planned = plan(context, p.params, workspace).value();
  std::vector<float> partial_o(2 * 16 * 512), partial_lse(2 * 16), merged(16 * 512);
  const MergeStatesParams merge{.partial_o = contiguous(partial_o.data(), DType::kF32, {2, 1, 16, 512}),
                                .partial_lse = contiguous(partial_lse.data(), DType::kF32, {2, 1, 16}),
                                .o = contiguous(merged.data(), DType::kF32, {1, 16, 512})};
  std::vector<uint16_t> rows(576);
  const std::vector<int64_t> slots = {77};
  const AppendParams append{
      .kv = of(rows, {1, 576}), .slot_mapping = contiguous(slots.data(), DType::kI64, {1}), .cache = p.params.cache};
  std::vector<uint16_t> gathered(200 * 576);
  std::vector<int32_t> out_indptr = {0, 200};
  const GatherParams gather{.cache = p.params.cache,
                            .pages = p.params.pages,
                            .out_indptr = of(out_indptr),
                            .out_kv = of(gathered, {200, 576})};
  const auto run_all = [&] {
    return run(context, planned, p.params).ok() && run(context, merge).ok() && run(context, append).ok() &&
           run(context, gather).ok();
  };
  const size_t before = allocations.load();
  bool ok = true;
  for (int round = 0; round < 10; ++round) ok = run_all() && ok;
  EXPECT_EQ(allocations.load(), before);
  EXPECT_TRUE(ok);
}

/// Calls `run` of a valid problem twice: the second time nothing may be allocated.
template <class Problem>
void expect_no_allocation(const char* name, Problem problem) {
  MLA_TRACE(name);
  const Context context = context_of(2, "auto");
  EXPECT_EQ(run(context, problem.params).message(), "");
  const size_t before = allocations.load();
  const bool ok = run(context, problem.params).ok();
  EXPECT_EQ(allocations.load(), before);
  EXPECT_TRUE(ok);
}

TEST(Run, OperationsWithoutAPlanAllocateNothing) {
  expect_no_allocation("append", QuantizingAppend());
  expect_no_allocation("append_rope", AppendRope());
  expect_no_allocation("copy_pages", CopyPages());
  expect_no_allocation("block_table_to_csr", BlockTableToCsr());
  expect_no_allocation("physical_slots", PhysicalSlots());
  expect_no_allocation("append_indexer", AppendIndexer());
  expect_no_allocation("indexer_logits", IndexerLogits());
  expect_no_allocation("top_k", TopK());
  expect_no_allocation("indexer_top_k", IndexerTopK());
}

/// Does the same for a planned operation.
template <class Problem>
void expect_planned_run_without_allocation(const char* name, Problem problem) {
  MLA_TRACE(name);
  const Context context = context_of(2, "auto");
  std::vector<std::byte> workspace(workspace_size(context, problem.params).value());
  const Plan planned = plan(context, problem.params, workspace).value();
  const size_t before = allocations.load();
  const bool ok = run(context, planned, problem.params).ok();
  EXPECT_EQ(allocations.load(), before);
  EXPECT_TRUE(ok);
}

TEST(Run, SparseAndQuantizedAttentionAllocateNothing) {
  expect_planned_run_without_allocation("decode_sparse", DecodeSparse());
  expect_planned_run_without_allocation("prefill_sparse", PrefillSparse());
  expect_planned_run_without_allocation("decode, fp8_ds_mla", WideDecode());
  expect_planned_run_without_allocation("decode, fp8", Fp8Decode());
}

TEST(Run, PrefillAllocatesNothing) {
  const Context context = context_of(2);
  std::vector<uint16_t> q(40 * 2 * 192, 0x3C00), k(90 * 2 * 192, 0x3C00), v(90 * 2 * 128, 0x3C00), o(40 * 2 * 128);
  std::vector<int32_t> qo_indptr = {0, 40}, kv_indptr = {0, 90};
  const PrefillParams params{.q = of(q, {40, 2, 192}),
                             .k = of(k, {90, 2, 192}),
                             .v = of(v, {90, 2, 128}),
                             .qo_indptr = of(qo_indptr),
                             .kv_indptr = of(kv_indptr),
                             .sm_scale = 0.07F,
                             .o = of(o, {40, 2, 128})};
  std::vector<std::byte> workspace(workspace_size(context, params).value());
  const Plan planned = plan(context, params, workspace).value();
  const size_t before = allocations.load();
  const bool ok = run(context, planned, params).ok();
  EXPECT_EQ(allocations.load(), before);
  EXPECT_TRUE(ok);
}

}  // namespace
}  // namespace mla::test
