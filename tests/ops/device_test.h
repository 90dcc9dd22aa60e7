// SPDX-License-Identifier: Apache-2.0
// Declares suites that run on GPUs: emulated ones of several architectures, and a real one where there is one. Problems
// are small, for the emulator takes about a microsecond and a half for the multiplication of two tiles.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "backend_test.h"
#include "kernels_seen.h"

namespace mla {

/// Returns one emulated GPU of every size of shared memory and every set of instructions; then the first real one.
inline std::vector<std::string> tested_devices() {
  std::vector<std::string> devices = {"emulated:sm80", "emulated:sm89", "emulated:sm90", "emulated:sm120"};
  for (const GpuInfo& gpu : machine_info().gpus)
    if (gpu.index == 0) devices.emplace_back("cuda:0");
  return devices;
}

/// Holds d_qk and d_v of up-projected attention for which some GPU has kernels on tensor cores.
inline constexpr int32_t kPrefillDims[][2] = {{192, 128}, {128, 128}, {256, 128}, {256, 256}};

/// Returns every tested device with every row of an operation's table that is for GPUs like it.
inline std::vector<std::tuple<std::string, std::string>> devices_and_rows(Op op) {
  const std::vector<std::string> rows = backend_names(op);
  std::vector<std::tuple<std::string, std::string>> all;
  for (const std::string& device : tested_devices())
    for (const std::string& row : kit::gpu_backends(kit::arch_of(device)))
      if (std::find(rows.begin(), rows.end(), row) != rows.end()) all.emplace_back(device, row);
  return all;
}

/// Returns the devices that have a certain row.
inline std::vector<std::tuple<std::string, std::string>> devices_with(Op op, const std::string& row) {
  std::vector<std::tuple<std::string, std::string>> all = devices_and_rows(op);
  std::erase_if(all, [&](const auto& one) { return std::get<1>(one) != row; });
  return all;
}

/// Returns the spec with compute = fp8, over fp8 caches where its caches are not quantized, and of e4m3 tensors in
/// prefill.
template <class Spec>
Spec with_fp8(Spec spec) {
  const auto quantize = [](CacheFormat& format) {
    if (!is_quantized(kv_layout(format).nope.element)) format = CacheFormat::kFP8;
  };
  if constexpr (std::is_same_v<Spec, Problem>) {
    spec.compute = Compute::kFP8;
    quantize(spec.cache);
    if (spec.op == Op::kPrefill) spec.q_dtype = DType::kE4M3;
  } else if constexpr (std::is_same_v<Spec, kit::DecodeSpec>) {
    spec.options.compute = Compute::kFP8;
    spec.shared_prefix = false;  // which is refused with it
    quantize(spec.cache.format);
  } else if constexpr (std::is_same_v<Spec, kit::DecodeSparseSpec>) {
    spec.options.compute = Compute::kFP8;
    quantize(spec.pool.cache.format);
    if (spec.extra_pool) quantize(spec.extra_pool->cache.format);
  } else if constexpr (std::is_same_v<Spec, kit::PrefillSpec>) {
    spec.options.compute = Compute::kFP8;
    spec.dtype = DType::kE4M3;
    if (spec.o_dtype == DType::kF16) spec.o_dtype = DType::kBF16;
  }
  return spec;
}

/// Runs tests on the device and the row that its parameter names. A row that is chosen where nothing is forced runs so;
/// the others are forced.
template <Op op>
class DeviceTest : public testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  const std::string& device() const { return std::get<0>(GetParam()); }
  const std::string& row() const { return std::get<1>(GetParam()); }
  bool is_emulated() const { return device().starts_with("emulated:"); }

  void SetUp() override {
    const Problem problem = fit(usual_problem(op));
    if (const BackendVerdict verdict = judge(problem); !verdict.usable) GTEST_SKIP() << row() << ": " << verdict.reason;
    Problem large = problem;  // which no row leaves to another
    large.num_heads += kMostMoreHeads;
    large.listed_keys = large.num_requests = 0;
    // A row may yield small problems of absorbed attention, as all of these are, to another.
    const bool absorbed = op == Op::kDecode || op == Op::kDecodeSparse || op == Op::kPrefillSparse;
    const std::string backend = explained(large).selected == row() && !absorbed ? "auto" : row();
    Result<Context> made = Context::create({.num_threads = 2, .affinity = {}, .backend = backend, .device = device()});
    ASSERT_TRUE(made.ok()) << made.status().message();
    context_.emplace(std::move(made).value());
  }

  /// Fails a test of which the row took nothing, for it tested nothing.
  void TearDown() override { EXPECT_TRUE(ran_ > 0 || left_ == 0) << row() << " took none of " << left_ << " problems"; }

  const Context& context() const { return *context_; }

  /// Returns whether the row multiplies nothing but e4m3, so that fit() makes quantized caches of all.
  bool is_fp8_only() const { return !judge(fit_heads(usual_problem(op))).usable; }

  /// Returns whether the row takes the usual problem over rows of a format.
  bool takes_rows_of(CacheFormat format) const {
    const KvLayout layout = kv_layout(format);
    if (is_fp8_only() && !is_quantized(layout.nope.element)) return false;
    Problem problem = is_fp8_only() ? with_fp8(usual_problem(op)) : usual_problem(op);
    problem.cache = format;
    problem.q_dtype = value_dtype(layout.nope.element);
    if (layout.is_packed()) problem.d_qk = layout.nope_dim + layout.rope_dim;
    return judge(fit_heads(problem)).usable;
  }

  /// Returns the formats that the row has problems of its own in.
  std::vector<CacheFormat> formats() const {
    std::vector<CacheFormat> all(std::begin(kAllCacheFormats), std::end(kAllCacheFormats));
    std::erase_if(all, [&](CacheFormat format) { return !takes_rows_of(format); });
    return all;
  }

  /// Returns a problem or its spec as the row takes it: with more heads if the row leaves so few to another, or with
  /// fewer if so many; in e4m3 if that is all that the row multiplies.
  template <class Spec>
  Spec fit(const Spec& spec) const {
    const Spec fitting = fit_heads(spec);
    if (judge(fitting).usable) return fitting;
    const Spec in_fp8 = fit_heads(with_fp8(spec));
    return judge(in_fp8).usable ? in_fp8 : spec;
  }

  template <class Spec>
  bool can_run(const Spec& spec) const {
    return judge(fit(spec)).usable;
  }

  /// Returns whether another row of this GPU has to take the problem.
  template <class Spec>
  bool leaves(const Spec& spec) const {
    const Explanation explanation = explained(spec);
    return !can_run(spec) && std::any_of(explanation.rows.begin(), explanation.rows.end(),
                                         [](const BackendVerdict& verdict) { return verdict.usable; });
  }

  /// Calls run_it(fit(spec)). What the row leaves to another is left out, for that one has the same test.
  template <class Spec, class RunIt>
  void with_fitting(const Spec& spec, const RunIt& run_it) {
    if (leaves(spec)) {
      ++left_;
      return;
    }
    ++ran_;
    run_it(fit(spec));
  }

  template <class Spec>
  void expect_ok(const Spec& spec) {
    with_fitting(spec, [&](const Spec& fitting) {
      const kit::Outcome outcome = kit::check(context(), fitting);
      EXPECT_TRUE(outcome.ok) << device() << ": " << outcome.line();
      EXPECT_EQ(outcome.backend, row());
    });
  }

  /// Checks a problem that a certain kernel of the row computes.
  template <class Spec>
  void expect_ok_by(const char* kernel, const Spec& spec) {
    const KernelsSeen seen;
    expect_ok(spec);
    EXPECT_TRUE(!is_emulated() || seen.contains(kernel)) << "another kernel computed it";
  }

  /// Checks the outputs of a case of a spec that was made fit, changed by the test and run.
  template <class Case>
  void expect_outputs(const Case& problem) {
    ++ran_;
    const Result<kit::Expected> expected = kit::expected_of(problem);
    ASSERT_TRUE(expected.ok()) << expected.status().message();
    const kit::Outcome outcome = kit::check_outputs(problem, *expected, row());
    EXPECT_TRUE(outcome.ok) << device() << ": " << outcome.line();
  }

  /// Checks `count` random problems that the row takes.
  template <class Draw>
  void expect_random(int count, const Draw& draw) {
    int ran = 0;
    // Seeds go on through a test: its formats do not all have the same few problems.
    for (const uint64_t last = seed_ + 20 * static_cast<uint64_t>(count); ran < count && seed_ < last;) {
      const auto spec = draw(++seed_);
      if (!can_run(spec)) continue;
      expect_ok(spec);
      ++ran;
    }
    EXPECT_EQ(ran, count);
  }

 private:
  static constexpr int32_t kMoreHeads = 16, kMostMoreHeads = 64;

  template <class Spec>
  Spec fit_heads(const Spec& spec) const {
    if constexpr (requires { spec.num_heads; }) {
      for (Spec larger = spec; larger.num_heads <= spec.num_heads + kMostMoreHeads; larger.num_heads += kMoreHeads)
        if (judge(larger).usable) return larger;
      for (Spec smaller = spec; smaller.num_heads > 1;) {
        smaller.num_heads /= 2;
        if (judge(smaller).usable) return smaller;
      }
    }
    return spec;
  }

  Explanation explained(const Problem& problem) const { return explain(kit::on_device(problem, device()), "auto"); }
  template <class Spec>
  Explanation explained(const Spec& spec) const {
    return explained(kit::problem_of(spec));
  }

  template <class Spec>
  BackendVerdict judge(const Spec& spec) const {
    for (BackendVerdict& verdict : explained(spec).rows)
      if (verdict.name == row()) return verdict;
    return {};
  }

  std::optional<Context> context_;
  int ran_ = 0, left_ = 0;
  uint64_t seed_ = 0;  // of the random problem drawn last
};

/// Runs tests on emulated GPUs only: the kit's problems are copied to a real GPU, but memory that a test brings itself
/// is not.
template <Op op>
class EmulatedTest : public DeviceTest<op> {
 protected:
  void SetUp() override {
    if (!this->device().starts_with("emulated:")) GTEST_SKIP() << "host memory is not this GPU's";
    DeviceTest<op>::SetUp();
  }
};

/// Returns a test's name such as "emulated_sm90_cuda_portable".
inline std::string name_of_device_and_row(const testing::TestParamInfo<std::tuple<std::string, std::string>>& info) {
  std::string name = std::get<0>(info.param) + "_" + std::get<1>(info.param);
  std::replace(name.begin(), name.end(), ':', '_');
  return name;
}

/// Returns all rows of an operation, those of the CPU too, with their devices.
inline std::vector<std::tuple<std::string, std::string>> all_rows(Op op) {
  std::vector<std::tuple<std::string, std::string>> all = devices_and_rows(op);
  for (const std::string& row : host_rows(op)) all.emplace_back("cpu", row);
  return all;
}

#define MLA_FOR_ALL_ROWS(Suite, op) \
  INSTANTIATE_TEST_SUITE_P(Rows, Suite, testing::ValuesIn(mla::all_rows(op)), mla::name_of_device_and_row)

#define MLA_FOR_EVERY_DEVICE(Suite, op)                                                                                \
  INSTANTIATE_TEST_SUITE_P(Devices, Suite, testing::ValuesIn(mla::devices_and_rows(op)), mla::name_of_device_and_row); \
  GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Suite)

#define MLA_FOR_ROW(Suite, op, row)                                                       \
  INSTANTIATE_TEST_SUITE_P(Devices, Suite, testing::ValuesIn(mla::devices_with(op, row)), \
                           mla::name_of_device_and_row);                                  \
  GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Suite)

}  // namespace mla
