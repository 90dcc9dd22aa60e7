// SPDX-License-Identifier: Apache-2.0
#include "dispatch/select.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cstdlib>

#include "dispatch/tables.h"
#include "mla/mla.h"

namespace mla {
namespace {

using dispatch::covers;
using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

/// Sets MLA_BACKEND for a scope.
class BackendVariable {
 public:
  explicit BackendVariable(const char* value) {
    if (const char* old = std::getenv("MLA_BACKEND")) before_ = old;
    value != nullptr ? setenv("MLA_BACKEND", value, 1) : unsetenv("MLA_BACKEND");
  }
  ~BackendVariable() { before_.empty() ? unsetenv("MLA_BACKEND") : setenv("MLA_BACKEND", before_.c_str(), 1); }

 private:
  std::string before_;
};

struct FakeRow {
  std::string_view name;
  core::Verdict (*verdict)(const Problem&);
};

core::Verdict yes(const Problem&) { return {true, "always"}; }
core::Verdict yes_but_yields(const Problem&) { return {.usable = true, .reason = "slower", .yields = true}; }
core::Verdict no(const Problem&) { return {false, "never"}; }
core::Verdict few_heads(const Problem& p) {
  return p.num_heads <= 16 ? core::Verdict{true, "few heads"} : core::Verdict{false, "takes 16 heads"};
}

constexpr FakeRow kRows[] = {{"cpu_best", no}, {"cpu_good", few_heads}, {"cpuid", yes}, {"reference", yes}};
constexpr FakeRow kPrefixRows[] = {{"cpu_avx512_bf16", yes}, {"cpu_avx512", yes}};

std::string chosen(const Problem& problem, std::string_view force, std::string* error = nullptr) {
  Status status;
  const FakeRow* row = dispatch::select(std::span<const FakeRow>(kRows), problem, {.backend = force}, status);
  EXPECT_EQ(row != nullptr, status.ok());
  if (error != nullptr) *error = status.message();
  return row != nullptr ? std::string(row->name) : std::string();
}

TEST(Covers, RowsFamiliesAndAll) {
  for (const char* all : {"", "auto"}) EXPECT_TRUE(covers(all, "cpu_avx2"));
  EXPECT_TRUE(covers("cpu_avx2", "cpu_avx2"));
  EXPECT_TRUE(covers("cpu", "cpu_avx2"));
  EXPECT_TRUE(covers("cpu", "cpu"));
  EXPECT_TRUE(covers("cpu_avx512", "cpu_avx512_bf16"));
  EXPECT_FALSE(covers("cpu_avx512_bf16", "cpu_avx512"));
  EXPECT_FALSE(covers("cpu", "cpuid"));
  EXPECT_FALSE(covers("cp", "cpu_avx2"));
  EXPECT_FALSE(covers("cpu_", "cpu_avx2"));
  EXPECT_FALSE(covers("CPU", "cpu_avx2"));
}

TEST(Select, TakesTheFirstThatCan) {
  EXPECT_EQ(chosen({.num_heads = 16}, ""), "cpu_good");
  EXPECT_EQ(chosen({.num_heads = 17}, ""), "cpuid");
  EXPECT_EQ(chosen({.num_heads = 16}, "cpu"), "cpu_good");
  EXPECT_EQ(chosen({.num_heads = 17}, "reference"), "reference");
}

TEST(Select, ReasonsHaveWordsOnlyWhereNoRowCan) {
  static std::string said;
  const auto tells = [](const Problem&) {
    const core::Verdict verdict{false, "never"};
    EXPECT_FALSE(verdict.reason.empty());
    said += verdict.reason.str();
    return verdict;
  };
  const FakeRow rows[] = {{"first", tells}, {"second", few_heads}};
  Status status;
  EXPECT_EQ(dispatch::select(std::span<const FakeRow>(rows), {.num_heads = 1}, {}, status)->name, "second");
  EXPECT_EQ(said, "");
  EXPECT_EQ(core::Reason("afterwards").str(), "afterwards");
  EXPECT_EQ(dispatch::select(std::span<const FakeRow>(rows), {.num_heads = 17}, {}, status), nullptr);
  EXPECT_EQ(said, "never");
  EXPECT_THAT(status.message(), AllOf(HasSubstr("first: never"), HasSubstr("second: takes 16 heads")));
}

TEST(Reason, IsEmptyWithoutText) {
  EXPECT_TRUE(core::Reason().empty());
  EXPECT_TRUE(core::Reason("").empty());
  EXPECT_EQ(core::Reason::format("{} heads", 3).str(), "3 heads");
  const core::Reason::WithoutWords without_words;
  EXPECT_TRUE(core::Reason("").empty());
  EXPECT_FALSE(core::Reason("text").empty());
}

TEST(Select, ARowThatYieldsRunsIfItIsForcedOrAlone) {
  constexpr FakeRow kYielding[] = {{"cpu_large", yes_but_yields}, {"cpu_small", few_heads}, {"reference", no}};
  const auto choose = [&](int64_t num_heads, std::string_view force) {
    Status status;
    return dispatch::select(std::span<const FakeRow>(kYielding), {.num_heads = num_heads}, {force}, status)->name;
  };
  EXPECT_EQ(choose(16, ""), "cpu_small");
  EXPECT_EQ(choose(17, ""), "cpu_large");
  EXPECT_EQ(choose(16, "cpu_large"), "cpu_large");
}

TEST(Select, TheNameOfARowIsNotAFamily) {
  Status status;
  EXPECT_EQ(dispatch::select(std::span<const FakeRow>(kPrefixRows), {}, {"cpu_avx512"}, status)->name, "cpu_avx512");
  EXPECT_EQ(dispatch::select(std::span<const FakeRow>(kPrefixRows), {}, {"cpu"}, status)->name, "cpu_avx512_bf16");
}

TEST(Select, ForcingIsNeverAFallback) {
  std::string error;
  EXPECT_EQ(chosen({.num_heads = 16}, "cpu_best", &error), "");
  EXPECT_EQ(error, "decode: backend: \"cpu_best\" cannot run this: cpu_best: never; cpu_good can");
  EXPECT_EQ(chosen({.op = Op::kPrefill, .num_heads = 17}, "cpu", &error), "");
  EXPECT_EQ(error, "prefill: backend: \"cpu\" cannot run this: cpu_best: never; cpu_good: takes 16 heads; cpuid can");
  EXPECT_EQ(chosen({}, "gpu", &error), "");
  EXPECT_EQ(error,
            "decode: backend: expected one of cpu_best, cpu_good, cpuid, reference, a family such as cpu, or auto, "
            "got \"gpu\"");
}

TEST(Tables, ReferenceIsTheLastRowOfEveryOperation) {
  for (Op op : kAllOps) {
    const std::vector<std::string> names = backend_names(op);
    ASSERT_FALSE(names.empty());
    EXPECT_EQ(names.back(), "reference") << name(op);
    EXPECT_EQ(std::count(names.begin(), names.end(), "reference"), 1);
  }
}

/// Returns what stands of `names` in `all`, in the order of `all`.
std::vector<std::string> in_order(const std::vector<std::string>& all, const std::vector<std::string>& names) {
  std::vector<std::string> found;
  for (const std::string& name : all)
    if (std::find(names.begin(), names.end(), name) != names.end()) found.push_back(name);
  return found;
}

TEST(Tables, AreInTheOrderOfTheBackends) {
  std::vector<std::string> all;
  for (const BackendInfo& backend : backends()) all.push_back(backend.name);
  for (Op op : kAllOps) EXPECT_EQ(in_order(all, backend_names(op)), backend_names(op)) << name(op);
  const std::vector<std::string> cpu = {"cpu_avx512_bf16", "cpu_avx512",   "cpu_avx2",
                                        "cpu_neon_bf16",   "cpu_portable", "reference"};
  const auto expect_after = [&](Op op, std::vector<std::string> known) {
    known.insert(known.end(), cpu.begin(), cpu.end());
    EXPECT_EQ(in_order(backend_names(op), known), known) << name(op);
  };
  for (Op op : {Op::kDecode, Op::kDecodeSparse, Op::kPrefillSparse})
    expect_after(op, {"cuda_sm90", "cuda_bulk", "cuda_portable"});
  for (Op op : {Op::kPrefill, Op::kIndexerLogits, Op::kIndexerTopK}) {
    EXPECT_THAT(backend_names(op), testing::Not(testing::Contains("cuda_bulk")));
    expect_after(op, {"cuda_sm90", "cuda_portable"});
  }
  EXPECT_THAT(backend_names(Op::kAppend), testing::Not(testing::Contains("cuda_sm90")));
  expect_after(Op::kAppend, {"cuda_portable"});
}

TEST(Backends, SayWhereTheirTensorsAre) {
  for (const BackendInfo& backend : backends()) {
    const bool on_gpu = backend.device == DeviceType::kCuda;
    EXPECT_EQ(covers("cuda", backend.name), on_gpu) << backend.name << ": its name says its family";
    for (Op op : kAllOps)
      for (const BackendVerdict& row : explain({.op = op}, "auto").rows)
        if (row.name == backend.name && on_gpu) {
          EXPECT_EQ(row.reason, "tensors are on cpu, not on a GPU");
        }
    EXPECT_TRUE(on_gpu || (backend.archs.empty() && backend.leaves.empty())) << backend.name;
  }
}

TEST(Tables, EveryRowRefusesWidthsThatAFormatDoesNotHave) {
  for (Op op : {Op::kDecode, Op::kDecodeSparse, Op::kAppend, Op::kAppendRope, Op::kGather, Op::kCopyPages})
    for (const BackendVerdict& row :
         explain({.op = op, .cache = CacheFormat::kFP8DsV4, .d_qk = 576, .d_v = 512}).rows) {
      EXPECT_FALSE(row.usable) << name(op) << ' ' << row.name;
      if (row.name == "reference") {
        EXPECT_EQ(row.reason, "rows of fp8_dsv4 have 512 channels, not 576") << name(op);
      }
    }
}

TEST(Tables, RowsSayWhyTheyLackAnArithmetic) {
  const auto reason_of = [](const Problem& problem, std::string_view row_name) {
    for (const BackendVerdict& row : explain(problem).rows)
      if (row.name == row_name) return row.reason;
    return std::string("no such row");
  };
  for (Op op : {Op::kDecode, Op::kDecodeSparse}) {
    Problem problem{.op = op, .cache = CacheFormat::kFP8DsMla, .compute = Compute::kFP8};
    EXPECT_EQ(explain(problem).selected, "reference") << name(op);
    EXPECT_EQ(reason_of(problem, "cpu_portable"),
              "multiplies numbers of f32 or pairs of bf16, not those of compute fp8");
    problem.extra_cache = CacheFormat::kFP8;
    EXPECT_EQ(reason_of(problem, "reference"),
              "compute fp8 takes rotary channels that are quantized in both pools or in none, not fp8_ds_mla and fp8");
    problem.cache = CacheFormat::kBF16;
    EXPECT_EQ(reason_of(problem, "reference"), "compute fp8 is for quantized caches, not for bf16");
    problem.device.type = DeviceType::kCuda;
    problem.gpu_arch = 90;
    for (const char* row : {"cuda_portable", "cuda_bulk", "cuda_sm90"})
      EXPECT_EQ(reason_of(problem, row), "multiplies 16-bit numbers, not those of compute fp8");
  }
  for (Op op : kAllOps)
    if (op == Op::kIndexerLogits || op == Op::kIndexerTopK) {  // only allow it
      for (const Compute compute : {Compute::kFP8, Compute::kExact})
        EXPECT_EQ(explain({.op = op, .compute = compute}).selected, explain({.op = op}).selected);
    } else if (op != Op::kDecode && op != Op::kDecodeSparse) {
      EXPECT_EQ(explain({.op = op, .compute = Compute::kFP8}).selected, "") << name(op);
      EXPECT_EQ(reason_of({.op = op, .compute = Compute::kFP8}, "reference"),
                op == Op::kPrefill
                    ? "compute fp8 is for a prefill of e4m3 tensors, not of bf16"
                    : "compute fp8 is for decode, decode_sparse, prefill, indexer_logits and indexer_top_k only");
    }
  const Problem prefill = {.op = Op::kPrefill, .q_dtype = DType::kE4M3, .compute = Compute::kFP8};
  EXPECT_EQ(explain(prefill).selected, "reference");
  EXPECT_EQ(reason_of(prefill, "cpu_portable"), "multiplies numbers of f32 or pairs of bf16, not those of compute fp8");
}

TEST(Tables, ProblemsWithoutHeadsChannelsOrQueriesAreRefused) {
  const std::pair<const char*, int64_t Problem::*> counts[] = {
      {"num_heads", &Problem::num_heads}, {"d_qk", &Problem::d_qk}, {"d_v", &Problem::d_v}, {"q_len", &Problem::q_len}};
  for (const auto& [field, count] : counts)
    for (int64_t wrong : {0, -3}) {
      Problem problem;
      problem.*count = wrong;
      const Explanation explanation = explain(problem);
      EXPECT_EQ(explanation.error,
                std::string("explain: ") + field + ": expected at least 1, got " + std::to_string(wrong));
      EXPECT_EQ(explanation.selected, "");
      EXPECT_TRUE(explanation.rows.empty());
    }
}

TEST(Tables, TheReferenceTakesEveryFormatAndType) {
  for (Op op : kAllOps) {
    SCOPED_TRACE(name(op));
    const bool e4m3 = op == Op::kDecode || op == Op::kDecodeSparse || op == Op::kPrefill || op == Op::kIndexerLogits ||
                      op == Op::kIndexerTopK;
    for (CacheFormat cache : kAllCacheFormats) {
      const KvLayout layout = kv_layout(cache);
      const int64_t d_qk = layout.is_packed() ? layout.nope_dim + layout.rope_dim : 576;
      for (DType q_dtype : {DType::kBF16, DType::kF16, DType::kF32})
        EXPECT_EQ(explain({.op = op, .q_dtype = q_dtype, .cache = cache, .d_qk = d_qk}, "reference").error, "");
      const Explanation narrow =
          explain({.op = op, .q_dtype = DType::kE4M3, .cache = cache, .d_qk = d_qk}, "reference");
      EXPECT_EQ(narrow.selected, e4m3 ? "reference" : "");
      if (!e4m3) {
        EXPECT_THAT(narrow.error, HasSubstr("reference: takes bf16, f16 and f32 only, not e4m3"));
      }
    }
    EXPECT_THAT(explain({.op = op, .q_dtype = DType::kI32}, "reference").error, HasSubstr("not int32"));
  }
}

TEST(Explain, AgreesWithTheVerdicts) {
  const BackendVariable unset(nullptr);
  for (Op op : kAllOps) {
    for (DType q_dtype : {DType::kBF16, DType::kF16, DType::kF32, DType::kE4M3}) {
      for (CacheFormat cache : kAllCacheFormats) {
        for (int64_t d_v : {512, 256, 5000, 0}) {
          const Problem problem{.op = op, .q_dtype = q_dtype, .cache = cache, .num_heads = 16, .d_qk = 576, .d_v = d_v};
          const Explanation explanation = explain(problem);
          std::string first;
          for (const BackendVerdict& row : explanation.rows) {
            EXPECT_FALSE(row.reason.empty()) << row.name;
            if (row.usable && !row.reason.starts_with("can, but") && first.empty()) first = row.name;  // it may yield
            // Forcing a row works exactly if its verdict says so, and repeats its reason otherwise.
            const Explanation forced = explain(problem, row.name);
            if (row.usable) {
              EXPECT_EQ(forced.selected, row.name);
            } else {
              EXPECT_EQ(forced.selected, "");
              EXPECT_THAT(forced.error, HasSubstr(row.reason));
            }
          }
          EXPECT_EQ(explanation.selected, first);
          EXPECT_EQ(explanation.error.empty(), !first.empty());
        }
      }
    }
  }
}

TEST(Explain, EveryRowSaysWhoseTensorsItTakes) {
  const BackendVariable unset(nullptr);
  for (Op op : kAllOps) {
    for (const BackendVerdict& row :
         explain({.op = op, .device = {DeviceType::kCuda, 0}, .q_dtype = DType::kBF16}).rows)
      if (!covers("cuda", row.name)) {
        EXPECT_EQ(row.reason, "tensors are on cuda, not on the CPU") << row.name;
      }
    EXPECT_EQ(explain({.op = op}).rows.front().reason, "tensors are on cpu, not on a GPU") << name(op);
  }
}

TEST(Environment, ForcesUnlessTheCallerDoes) {
  {
    const BackendVariable set("reference");
    EXPECT_EQ(explain({}).selected, "reference");
    EXPECT_EQ(explain({}, "auto").selected, "reference");
    EXPECT_EQ(explain({}, "cpu_portable").selected, "cpu_portable");
    EXPECT_EQ(Context::create()->backend(), "reference");
    EXPECT_EQ(Context::create({.backend = "cpu"})->backend(), "cpu");
  }
  {
    const BackendVariable set("reference");
    const Context context = Context::create().value();  // remembers where it heard of the backend
    const BackendVariable unset(nullptr);
    std::vector<float> partial(5000), lse(1), merged(5000);
    const MergeStatesParams merge{.partial_o = contiguous(partial.data(), DType::kF32, {1, 1, 1, 5000}),
                                  .partial_lse = contiguous(lse.data(), DType::kF32, {1, 1, 1}),
                                  .o = contiguous(merged.data(), DType::kF32, {1, 1, 5000})};
    EXPECT_THAT(run(context, merge).message(), StartsWith("merge_states: MLA_BACKEND: \"reference\" cannot run this"));
  }
  {
    const BackendVariable set("auto");
    EXPECT_EQ(Context::create()->backend(), "");
    EXPECT_EQ(explain({}).selected, explain({}, "cpu").selected);
  }
  {
    const BackendVariable set("nonsense");
    EXPECT_THAT(explain({}).error,
                AllOf(StartsWith("decode: MLA_BACKEND: expected one of cuda_"), HasSubstr("got \"nonsense\"")));
    EXPECT_THAT(explain({}, "wrong").error, StartsWith("decode: backend: expected one of "));
    EXPECT_THAT(Context::create().status().message(), AllOf(StartsWith("context: MLA_BACKEND: expected one of cuda_"),
                                                            HasSubstr("reference"), HasSubstr("got \"nonsense\"")));
  }
}

}  // namespace
}  // namespace mla
