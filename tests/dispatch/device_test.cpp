// SPDX-License-Identifier: Apache-2.0
// Tests which device a context computes on, and what is said of GPUs that are there, emulated, or neither.
#include <gmock/gmock.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "core/problems.h"
#include "core/validate.h"
#include "cuda/runtime/code.h"
#include "mla/c_api.h"
#include "mla/mla.h"
#include "trace.h"

namespace mla::test {
namespace {

using testing::HasSubstr;

/// Sets an environment variable, or takes it away, until the end of the scope.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) before_ = old;
    value != nullptr ? setenv(name, value, 1) : unsetenv(name);
  }
  ~Variable() { before_.empty() ? unsetenv(name_) : setenv(name_, before_.c_str(), 1); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  std::string before_;
};

/// Returns an architecture that can be emulated, or 0.
int32_t emulated_arch() {
  const auto& archs = machine_info().emulated_archs;
  return archs.empty() ? 0 : archs.front();
}
std::string emulated_device() { return "emulated:sm" + std::to_string(emulated_arch()); }

#define MLA_NEED_EMULATOR() \
  if (emulated_arch() == 0) GTEST_SKIP() << "this build has no emulator"

std::string message(const std::string& device) {
  return Context::create({.num_threads = 1, .device = device}).status().message();
}

/// Holds two states of two tokens with two heads of four channels.
struct Merge {
  std::vector<float> partial_o = std::vector<float>(2 * 2 * 2 * 4, 1.0F), partial_lse = std::vector<float>(8, 0.0F),
                     o = std::vector<float>(16, -1.0F);
  MergeStatesParams params(Device device = {}) {
    return {.partial_o = contiguous(partial_o.data(), DType::kF32, {2, 2, 2, 4}, device),
            .partial_lse = contiguous(partial_lse.data(), DType::kF32, {2, 2, 2}, device),
            .o = contiguous(o.data(), DType::kF32, {2, 2, 4}, device)};
  }
};

TEST(ContextDevice, RefusesWhatIsNoDevice) {
  for (const char* wrong : {"gpu", "CPU", "cuda:", "cuda:x", "cuda:-1", "cuda:12345", "cuda0", "emulated",
                            "emulated:90", "emulated:sm", "emulated:sm9x", "sm90", " cpu"})
    EXPECT_EQ(message(wrong), "context: device: expected cpu, cuda, cuda:<index> or emulated:sm<arch>, got \"" +
                                  std::string(wrong) + "\"");
  EXPECT_THAT(message("emulated:sm70"), testing::AnyOf(HasSubstr("context: device: this build emulates sm"),
                                                       HasSubstr("context: device: this build of the library has no")));
  EXPECT_EQ(Context::create({.device = "emulated:sm70"}).status().code(), StatusCode::kUnsupported);
  EXPECT_THAT(message("cuda:77"), testing::StartsWith("context: device: "));
  EXPECT_EQ(Context::create({.device = "cuda:77"}).status().code(), StatusCode::kUnsupported);
}

TEST(ContextDevice, IsRemembered) {
  const Variable unset("MLA_EMULATE", nullptr);
  EXPECT_EQ(Context::create()->device(), "");
  EXPECT_EQ(Context::create({.device = "cpu"})->device(), "cpu");
  MLA_NEED_EMULATOR();
  EXPECT_EQ(Context::create({.device = emulated_device()})->device(), emulated_device());
  const std::string arch = "sm" + std::to_string(emulated_arch());
  const Variable set("MLA_EMULATE", arch.c_str());
  EXPECT_EQ(Context::create()->device(), emulated_device());
  EXPECT_EQ(Context::create({.device = "cpu"})->device(), "cpu");
}

TEST(ContextDevice, EnvironmentIsChecked) {
  const Variable set("MLA_EMULATE", "sm70");
  EXPECT_THAT(Context::create().status().message(), testing::StartsWith("context: MLA_EMULATE: this build "));
  const Variable wrong("MLA_EMULATE", "hopper");
  EXPECT_EQ(Context::create().status().message(),
            "context: MLA_EMULATE: expected sm<arch>, such as sm120, got \"hopper\"");
}

TEST(ContextDevice, TensorsElsewhereAreRefused) {
  const Context context = Context::create({.num_threads = 1, .device = "cpu"}).value();
  Merge merge;
  EXPECT_EQ(run(context, merge.params({DeviceType::kCuda, 1})).message(),
            "merge_states: device: expected tensors on the cpu, where the context computes, got them on cuda:1");
  EXPECT_EQ(merge.o, std::vector<float>(16, -1.0F));
  EXPECT_EQ(run(context, merge.params()).message(), "");
}

TEST(ContextDevice, TensorsOfAGpuThatIsNotThereAreRefused) {
  const Context context = Context::create({.num_threads = 1}).value();
  Merge merge;
  const Status status = run(context, merge.params({DeviceType::kCuda, 77}));
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_THAT(status.message(),
              testing::AllOf(HasSubstr("merge_states: no backend can run this: cuda_"), HasSubstr("cuda_portable: ")));
  EXPECT_EQ(merge.o, std::vector<float>(16, -1.0F));
}

TEST(Emulated, HostTensorsAndThoseSaidToBeOnAGpuAreItsMemory) {
  MLA_NEED_EMULATOR();
  const Context context = Context::create({.num_threads = 2, .device = emulated_device()}).value();
  for (const Device device : {Device{}, Device{DeviceType::kCuda, 0}, Device{DeviceType::kCuda, 3}}) {
    Merge merge;
    EXPECT_EQ(run(context, merge.params(device)).message(), "");
    EXPECT_EQ(merge.o, std::vector<float>(16, 1.0F));
  }
  Merge mixed;
  MergeStatesParams params = mixed.params();
  params.partial_lse.device = {DeviceType::kCuda, 0};
  EXPECT_EQ(run(context, params).message(), "");
  params.partial_lse.device = {static_cast<DeviceType>(99), 0};
  EXPECT_EQ(run(context, params).message(),
            "merge_states: partial_lse: expected on cpu or cuda, got unknown device type 99");
}

TEST(Emulated, EnvironmentReachesContextsOfBothApis) {
  MLA_NEED_EMULATOR();
  const std::string arch = "sm" + std::to_string(emulated_arch());
  const Variable set("MLA_EMULATE", arch.c_str());
  // Only a GPU takes tensors of cuda:5 that nobody has.
  Merge merge;
  EXPECT_EQ(run(Context::create({.num_threads = 1}).value(), merge.params({DeviceType::kCuda, 5})).message(), "");
  mla_context_options options = mla_context_options_init();
  mla_context* context = nullptr;
  ASSERT_EQ(mla_context_create(&options, &context), MLA_OK) << mla_last_error();
  int64_t o_shape[] = {2, 2, 2, 4}, lse_shape[] = {2, 2, 2};
  const mla_device device = {MLA_DEVICE_CUDA, 5};
  const mla_dtype f32 = {MLA_DTYPE_FLOAT, 32, 1};
  Merge other;
  const mla_tensor partial_o = {other.partial_o.data(), device, 4, f32, o_shape, nullptr, 0};
  const mla_tensor partial_lse = {other.partial_lse.data(), device, 3, f32, lse_shape, nullptr, 0};
  const mla_tensor o = {other.o.data(), device, 3, f32, o_shape + 1, nullptr, 0};
  mla_merge_states_params params = mla_merge_states_params_init();
  params.partial_o = &partial_o;
  params.partial_lse = &partial_lse;
  params.o = &o;
  EXPECT_EQ(mla_merge_states_run(context, &params), MLA_OK) << mla_last_error();
  EXPECT_EQ(other.o, merge.o);
  mla_context_destroy(context);
  options.device = "cpu";
  ASSERT_EQ(mla_context_create(&options, &context), MLA_OK) << mla_last_error();
  EXPECT_EQ(mla_merge_states_run(context, &params), MLA_INVALID_ARGUMENT);
  EXPECT_THAT(mla_last_error(), HasSubstr("expected tensors on the cpu"));
  mla_context_destroy(context);
}

TEST(Emulated, StreamsMustBeItsOwn) {
  MLA_NEED_EMULATOR();
  const Context context = Context::create({.num_threads = 1, .device = emulated_device()}).value();
  Merge merge;
  int other = 0;
  EXPECT_EQ(run(context, merge.params(), Stream{&other}).message(),
            "merge_states: stream: expected a stream of an emulated GPU, got another pointer");
  EXPECT_EQ(merge.o, std::vector<float>(16, -1.0F));
}

TEST(EmulatedValidation, DoesNotLookAtLists) {
  Decode decode;
  decode.kv_len = {1000, -5};
  decode.block_table.assign(6, INT32_MAX);
  decode.qo_indptr = {7, -1, 3};
  core::DecodeArgs args;
  Device device;
  EXPECT_FALSE(core::validate(decode.params, core::Scope::kAll, args, device).ok());
  EXPECT_EQ(core::validate(decode.params, core::Scope::kAll, args, device, core::Memory::kEmulated).message(), "");
  EXPECT_EQ(device, (Device{DeviceType::kCuda, 0}));
  decode.params.q.shape[2] += 1;  // shapes are looked at
  EXPECT_FALSE(core::validate(decode.params, core::Scope::kAll, args, device, core::Memory::kEmulated).ok());
}

BackendVerdict of_portable(const Explanation& explanation) {
  for (const BackendVerdict& row : explanation.rows)
    if (row.name == "cuda_portable") return row;
  return {};
}

TEST(Explain, AnswersForGpusThatAreNotThere) {
  const Variable unset("MLA_BACKEND", nullptr);
  const auto ask = [](int32_t arch, bool emulated) {
    return explain({.device = {DeviceType::kCuda, 0}, .num_heads = 16, .gpu_arch = arch, .emulated = emulated});
  };
  const auto reason = [&](int32_t arch, bool emulated) { return of_portable(ask(arch, emulated)).reason; };
  EXPECT_EQ(ask(75, false).selected, "");
  EXPECT_EQ(reason(75, false), "needs sm80 or newer, not sm75");
  EXPECT_EQ(reason(75, true), "this build cannot emulate sm75");
  const auto expected = [](int32_t arch) { return arch >= 90 && arch < 120 ? "cuda_bulk" : "cuda_portable"; };
  for (int32_t arch : machine_info().gpu_archs) {
    EXPECT_EQ(ask(arch, false).selected, expected(arch)) << arch << ": " << ask(arch, false).error;
    EXPECT_EQ(reason(arch, false), "mma.sync kernels compiled for sm" + std::to_string(arch));
  }
  if (machine_info().gpu_archs.empty()) {
    EXPECT_EQ(reason(90, false), "this build of the library has no GPU code");
  }
  for (int32_t arch : machine_info().emulated_archs) {
    EXPECT_EQ(ask(arch, true).selected, expected(arch)) << arch;
    EXPECT_EQ(reason(arch, true), "emulated: mma.sync kernels of sm" + std::to_string(arch) + " on the CPU");
  }
}

TEST(Explain, NamesTheShapesThatAGpuTakes) {
  MLA_NEED_EMULATOR();
  Problem problem{.device = {DeviceType::kCuda, 0}, .gpu_arch = emulated_arch(), .emulated = true};
  problem.d_qk = 100;
  EXPECT_THAT(of_portable(explain(problem)).reason,
              testing::AllOf(HasSubstr("takes d_qk/d_v of "), HasSubstr("100/512")));
  problem = {.op = Op::kPrefill,
             .device = problem.device,
             .num_heads = 16,
             .d_qk = 192,
             .d_v = 128,
             .gpu_arch = emulated_arch(),
             .emulated = true};
  for (DType dtype : {DType::kBF16, DType::kF32, DType::kE4M3}) {
    problem.q_dtype = dtype;
    EXPECT_TRUE(of_portable(explain(problem)).usable) << name(dtype);
  }
  problem.compute = Compute::kFP8;
  EXPECT_EQ(of_portable(explain(problem)).reason, "multiplies 16-bit numbers, not those of compute fp8");
  problem = {.op = Op::kPrefillSparse,
             .device = problem.device,
             .q_dtype = DType::kE4M3,
             .gpu_arch = emulated_arch(),
             .emulated = true};
  EXPECT_EQ(of_portable(explain(problem)).reason, "takes bf16, f16 and f32, not e4m3");
  problem = {.op = Op::kDecodeSparse,
             .device = problem.device,
             .cache = CacheFormat::kFP8,
             .gpu_arch = emulated_arch(),
             .emulated = true,
             .extra_cache = CacheFormat::kF16};
  EXPECT_EQ(of_portable(explain(problem)).reason,
            "takes two pools of bf16, two of f16 or two of quantized rows, not fp8 and f16");
  problem.extra_cache = CacheFormat::kFP8DsMla;
  EXPECT_TRUE(of_portable(explain(problem)).usable);
}

std::string reason_of(const Explanation& explanation, std::string_view name) {
  for (const BackendVerdict& row : explanation.rows)
    if (row.name == name) return (row.usable ? "yes: " : "no: ") + row.reason;
  return {};
}

TEST(Explain, LittleSparseWorkOverQuantizedRowsGoesToSmallBlocks) {
  Problem problem{.op = Op::kDecodeSparse,
                  .device = {DeviceType::kCuda, 0},
                  .cache = CacheFormat::kFP8DsMla,
                  .num_heads = 64,
                  .gpu_arch = 90,
                  .full_build = true};
  EXPECT_EQ(explain(problem).selected, "cuda_sm90");  // as many as there may be
  problem.listed_keys = 4 * 640;
  EXPECT_EQ(explain(problem).selected, "cuda_portable");
  EXPECT_EQ(explain(problem, "cuda_sm90").selected, "cuda_sm90");
  EXPECT_THAT(reason_of(explain(problem), "cuda_sm90"), HasSubstr("yes: can, but leaves up to 163840 pairs"));
  ++problem.listed_keys;
  EXPECT_EQ(explain(problem).selected, "cuda_sm90");
  problem.cache = CacheFormat::kBF16;
  problem.listed_keys = 1;
  EXPECT_EQ(explain(problem).selected, "cuda_sm90");
}

TEST(Explain, LittleWorkOf17To32RowsOver16BitRowsGoesToBlocksOf32) {
  Problem problem{
      .op = Op::kDecode, .device = {DeviceType::kCuda, 0}, .num_heads = 32, .gpu_arch = 90, .full_build = true};
  EXPECT_EQ(explain(problem).selected, "cuda_sm90");  // as many requests as there may be
  problem.num_requests = 32;
  EXPECT_EQ(explain(problem).selected, "cuda_bulk");
  EXPECT_EQ(explain(problem, "cuda_sm90").selected, "cuda_sm90");
  EXPECT_THAT(reason_of(explain(problem), "cuda_sm90"),
              HasSubstr("yes: can, but leaves up to 32 query heads of up to 32"));
  ++problem.num_requests;
  EXPECT_EQ(explain(problem).selected, "cuda_sm90");
  problem.num_requests = 1;
  ++problem.num_heads;
  EXPECT_EQ(explain(problem).selected, "cuda_sm90");
  problem.num_heads = 16, problem.q_len = 2;  // 32 rows, which a draft tree may mask
  EXPECT_EQ(explain(problem).selected, "cuda_sm90");
  problem.num_heads = 32, problem.q_len = 1;
  problem.d_qk = 320, problem.d_v = 256;
  EXPECT_EQ(explain(problem).selected, "cuda_sm90");
  problem.d_qk = 576, problem.d_v = 512;
  EXPECT_EQ(explain(problem).selected, "cuda_bulk");
  problem.cache = CacheFormat::kFP8DsMla;
  EXPECT_EQ(explain(problem).selected, "cuda_sm90");

  problem = {.op = Op::kPrefillSparse, .device = problem.device, .num_heads = 32, .gpu_arch = 90, .full_build = true};
  EXPECT_EQ(explain(problem).selected, "cuda_sm90");
  problem.listed_keys = 32768;
  EXPECT_EQ(explain(problem).selected, "cuda_bulk");
  ++problem.listed_keys;
  EXPECT_EQ(explain(problem).selected, "cuda_sm90");
}

// Whatever this build has: the answers differ by a remark.
TEST(Explain, AnswersForAFullBuildOnAnyBuild) {
  const Variable unset("MLA_BACKEND", nullptr);
  const auto& archs = machine_info().gpu_archs;
  const auto builds = [&](int32_t arch) { return std::find(archs.begin(), archs.end(), arch) != archs.end(); };
  struct Expected {
    int32_t arch;
    const char* selected;
    int32_t code;
    bool family;
  };
  for (const Expected& expected : {Expected{80, "cuda_portable", 80, false}, Expected{90, "cuda_bulk", 90, false},
                                   Expected{100, "cuda_bulk", 100, false}, Expected{103, "cuda_bulk", 100, true},
                                   Expected{110, "cuda_bulk", 110, false}, Expected{120, "cuda_portable", 120, false},
                                   Expected{121, "cuda_portable", 120, true}}) {
    MLA_TRACE("sm" + std::to_string(expected.arch));
    const bool own = builds(expected.arch);
    const int32_t code = own ? expected.arch : expected.code;
    const bool built = builds(code), family = expected.family && !own;
    Problem problem{.device = {DeviceType::kCuda, 0}, .num_heads = 16, .gpu_arch = expected.arch, .full_build = true};
    const Explanation full = explain(problem);
    EXPECT_EQ(full.selected, expected.selected) << full.error;
    EXPECT_EQ(reason_of(full, "cuda_portable"), "yes: mma.sync kernels compiled for " +
                                                    std::string(family ? "the family of sm" : "sm") +
                                                    std::to_string(code) + (built ? "" : "; not in this build"));
    EXPECT_EQ(gpu_code(expected.arch, true),
              (GpuCode{.arch = code, .family = family, .built = built, .compiled_for = code}));
    EXPECT_EQ(full.code, gpu_code(expected.arch, true));
    // Who decides by the answer asks about this build.
    problem.full_build = false;
    const GpuCode here = gpu_code(expected.arch);
    EXPECT_EQ(explain(problem).code, here);
    EXPECT_EQ(explain(problem).note, "");
    const std::string arch = "sm" + std::to_string(expected.arch);
    EXPECT_EQ(full.note, built            ? ""
                         : here.arch == 0 ? "this build has no code for " + arch
                                          : "in this build " + arch + " runs code of " + code_text(here) +
                                                "; -DMLA_CUDA_ARCHS=" + std::to_string(code) + " builds its own");
    EXPECT_EQ(of_portable(explain(problem)).usable, here.arch != 0);
    EXPECT_EQ(here.built, here.arch != 0);
    EXPECT_EQ(here == gpu_code(expected.arch, true), built);
  }
  const Problem old{.device = {DeviceType::kCuda, 0}, .gpu_arch = 75, .full_build = true};
  EXPECT_EQ(of_portable(explain(old)).reason, "needs sm80 or newer, not sm75");
  EXPECT_EQ(explain(old).code, GpuCode());
  EXPECT_EQ(explain(old).note, "");
  // No build has the backends of sm100 in code of sm80.
  const Problem by_driver{.device = {DeviceType::kCuda, 0}, .gpu_arch = 101, .full_build = true};
  EXPECT_EQ(explain(by_driver).selected, "cuda_portable");
  EXPECT_THAT(reason_of(explain(by_driver), "cuda_bulk"), testing::EndsWith("and sm101 runs code of sm80"));
  // An emulated GPU is there or not.
  const Problem emulated{.device = {DeviceType::kCuda, 0}, .gpu_arch = 75, .emulated = true, .full_build = true};
  EXPECT_EQ(of_portable(explain(emulated)).reason, "this build cannot emulate sm75");
  EXPECT_FALSE(explain(emulated).code.has_value());
  EXPECT_FALSE(explain(Problem()).code.has_value());
}

TEST(GpuCode, InWords) {
  EXPECT_EQ(code_text({}), "none");
  EXPECT_EQ(code_text({.arch = 90, .built = true}), "sm90");
  EXPECT_EQ(code_text({.arch = 80, .by_driver = true, .built = true}), "sm80, which the driver compiles");
  EXPECT_EQ(code_text({.arch = 120, .family = true}), "the family of sm120, not in this build");
}

TEST(Explain, BackendsAreForTheKinOfTheirArchitectures) {
  for (const BackendInfo& backend : backends())
    for (const auto& [arch, model] : {std::pair{103, 100}, std::pair{110, 100}, std::pair{121, 120}}) {
      const auto has = [&](int32_t each) {
        return std::find(backend.archs.begin(), backend.archs.end(), each) != backend.archs.end();
      };
      EXPECT_EQ(has(arch), has(model)) << backend.name << " on sm" << arch;
    }
}

// An emulated GPU of 10.3 runs the emulator's code of sm100, as a real one runs sm100's cubins.
TEST(Emulated, KinRunTheCodeOfTheirFamily) {
  const Variable unset("MLA_BACKEND", nullptr);
  const auto& archs = machine_info().emulated_archs;
  const auto builds = [&](int32_t arch) { return std::find(archs.begin(), archs.end(), arch) != archs.end(); };
  for (const int32_t arch : named_gpu_archs()) {
    const std::string device = "emulated:sm" + std::to_string(arch);
    MLA_TRACE(device);
    const int32_t code = builds(arch) ? arch : arch == 103 && builds(100) ? 100 : arch == 121 && builds(120) ? 120 : 0;
    const Problem problem{.device = {DeviceType::kCuda, 0}, .num_heads = 16, .gpu_arch = arch, .emulated = true};
    const Result<Context> context = Context::create({.num_threads = 2, .device = device});
    ASSERT_EQ(context.ok(), code != 0) << context.status().message();
    if (code == 0) {
      EXPECT_EQ(of_portable(explain(problem)).reason, "this build cannot emulate sm" + std::to_string(arch));
      continue;
    }
    EXPECT_EQ(of_portable(explain(problem)).reason,
              "emulated: mma.sync kernels of sm" + std::to_string(code) + " on the CPU");
    EXPECT_EQ(explain(problem).selected, arch == 121 ? "cuda_portable" : "cuda_bulk");
    Merge merge;
    EXPECT_EQ(run(*context, merge.params()).message(), "");
    EXPECT_EQ(merge.o, std::vector<float>(16, 1.0F));
  }
}

TEST(ArchOfCode, IsTheNewestThatTheGpuRuns) {
  using cuda::arch_of_code;
  const std::vector<int32_t> all = {80, 86, 89, 90, 100, 120};
  for (int32_t arch : all) EXPECT_EQ(arch_of_code(arch, all), arch);
  EXPECT_EQ(arch_of_code(87, all), 86);
  EXPECT_EQ(arch_of_code(75, all), 0);
  EXPECT_EQ(arch_of_code(91, all), 80);  // cubins of 9.0 are for 9.0 alone
  const std::vector<int32_t> some = {86, 90};
  EXPECT_EQ(arch_of_code(80, some), 0);
  EXPECT_EQ(arch_of_code(89, some), 86);
  EXPECT_EQ(arch_of_code(90, some), 90);
  EXPECT_EQ(arch_of_code(120, some), 0);
  EXPECT_EQ(arch_of_code(90, {}), 0);
}

TEST(ArchOfCode, IsOfTheFamilyBeforeItIsPtx) {
  using cuda::choose_code, cuda::CodeChoice;
  const std::vector<int32_t> usual = {80, 86, 89, 90, 100, 120};
  const CodeChoice of_family = {.arch = 100, .family = true}, by_driver = {.arch = 80, .by_driver = true};
  EXPECT_EQ(choose_code(100, usual), (CodeChoice{.arch = 100}));
  EXPECT_EQ(choose_code(103, usual), of_family);
  EXPECT_EQ(choose_code(121, usual), (CodeChoice{.arch = 120, .family = true}));
  EXPECT_EQ(choose_code(89, std::vector<int32_t>{80, 86}), (CodeChoice{.arch = 86}));
  // No cubin of 10.x runs on 11.0.
  EXPECT_EQ(choose_code(110, usual), by_driver);
  EXPECT_EQ(choose_code(110, usual, true), (CodeChoice{.arch = 110}));
  // Builds by name, in any order.
  const std::vector<int32_t> named = {121, 120, 110, 103, 100, 80};
  for (const int32_t arch : named) EXPECT_EQ(choose_code(arch, named), (CodeChoice{.arch = arch}));
  EXPECT_EQ(choose_code(100, std::vector<int32_t>{103}), CodeChoice{});  // an older GPU runs no newer code
  EXPECT_EQ(choose_code(100, std::vector<int32_t>{103}, true), (CodeChoice{.arch = 100}));
  EXPECT_EQ(choose_code(103, std::vector<int32_t>{80}), by_driver);
  EXPECT_EQ(choose_code(103, std::vector<int32_t>{80}, true), of_family);
  EXPECT_EQ(choose_code(103, {}, true), of_family);
  EXPECT_EQ(choose_code(103, {}), CodeChoice{});
}

TEST(ArchOfCode, OfAFullBuildDoesNotDependOnThisOne) {
  using cuda::choose_code, cuda::CodeChoice;
  for (const std::vector<int32_t>& built : {std::vector<int32_t>{}, {80}, {80, 86}, {86, 90}, {89, 120}}) {
    for (const int32_t own : cuda::kFullBuild) EXPECT_EQ(choose_code(own, built, true), (CodeChoice{.arch = own}));
    EXPECT_EQ(choose_code(87, built, true), (CodeChoice{.arch = 86}));
    EXPECT_EQ(choose_code(88, built, true), (CodeChoice{.arch = 86}));
    EXPECT_EQ(choose_code(121, built, true), (CodeChoice{.arch = 120, .family = true}));
    EXPECT_EQ(choose_code(130, built, true), (CodeChoice{.arch = 80, .by_driver = true}));
  }
  // Cubins of this build that a full one lacks.
  EXPECT_EQ(choose_code(121, std::vector<int32_t>{121}, true), (CodeChoice{.arch = 121}));
}

// No cubin of sm_100f runs on Jetson Thor, by either of its numbers.
TEST(ArchOfCode, OfJetsonThorIsOfNoOtherFamily) {
  using cuda::choose_code, cuda::CodeChoice;
  for (const bool full : {false, true})
    EXPECT_EQ(choose_code(101, cuda::kFullBuild, full), (CodeChoice{.arch = 80, .by_driver = true}));
  EXPECT_EQ(choose_code(101, std::vector<int32_t>{100, 103, 110}), CodeChoice{});
}

TEST(ArchOfCode, OfAProfileIsForWhatPassesForItsArchitecture) {
  using cuda::choose_code, cuda::CodeChoice;
  const cuda::Profile of_sm120 = {.arch = 120, .gpu = 90}, of_sm80 = {.arch = 80, .gpu = 90};
  EXPECT_EQ(choose_code(120, std::vector<int32_t>{120}, false, of_sm120), (CodeChoice{.arch = 120}));
  EXPECT_EQ(choose_code(121, std::vector<int32_t>{120}, false, of_sm120), CodeChoice{});
  for (const int32_t arch : {86, 90, 103, 110})
    EXPECT_EQ(choose_code(arch, std::vector<int32_t>{80}, false, of_sm80), CodeChoice{}) << arch;
  EXPECT_EQ(choose_code(86, std::vector<int32_t>{80}, true, of_sm80), (CodeChoice{.arch = 86}));
  EXPECT_EQ(cuda::compiled_for(120, of_sm120), 90);
  EXPECT_EQ(cuda::compiled_for(89, of_sm120), 89);
  EXPECT_EQ(cuda::compiled_for(120, {}), 120);
}

TEST(ArchOfCode, NeedsTheSharedMemoryOfItsArchitecture) {
  using cuda::arch_of_code;
  for (const int32_t small : {86, 89, 120, 121}) EXPECT_EQ(arch_of_code(small, std::vector<int32_t>{80}), 0) << small;
  for (const int32_t large : {87, 90, 100, 103, 110, 130})
    EXPECT_EQ(arch_of_code(large, std::vector<int32_t>{80}), 80) << large;
}

TEST(WrittenFor, IsAnArchitectureOfTheSameSize) {
  using cuda::written_for, cuda::shared_bytes_of;
  for (const int32_t own : {80, 86, 87, 89, 90, 100, 120}) EXPECT_EQ(written_for(own), own);
  EXPECT_EQ(written_for(103), 100);
  EXPECT_EQ(written_for(110), 100);
  EXPECT_EQ(written_for(121), 120);
  for (const int32_t arch : cuda::kKindredArchs) EXPECT_EQ(shared_bytes_of(arch), shared_bytes_of(written_for(arch)));
  EXPECT_EQ(shared_bytes_of(80), 163 * 1024);
  for (const int32_t arch : {86, 89, 120, 121}) EXPECT_EQ(shared_bytes_of(arch), 99 * 1024);
  for (const int32_t arch : {90, 100, 103, 110}) EXPECT_EQ(shared_bytes_of(arch), 227 * 1024);
}

}  // namespace
}  // namespace mla::test
