// SPDX-License-Identifier: Apache-2.0
// Suites that run on GPUs: emulated ones of several architectures, and a real one where there is one. Problems are
// small, for the emulator takes about a microsecond and a half for the multiplication of two tiles.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "backend_test.h"

namespace mla {

/// One GPU of every size of shared memory and every set of instructions; then the first real one.
inline std::vector<std::string> tested_devices() {
  std::vector<std::string> devices = {"emulated:sm80", "emulated:sm89", "emulated:sm90", "emulated:sm120"};
  for (const GpuInfo& gpu : machine_info().gpus)
    if (gpu.index == 0) devices.emplace_back("cuda:0");
  return devices;
}

inline bool is_sm90_device(const std::string& device) {
  const std::vector<GpuInfo>& gpus = machine_info().gpus;
  return device == "emulated:sm90" ||
         (device == "cuda:0" &&
          std::any_of(gpus.begin(), gpus.end(), [](const GpuInfo& gpu) { return gpu.index == 0 && gpu.arch == 90; }));
}

/// Every tested device with every row of an operation's table that is for GPUs like it.
inline std::vector<std::tuple<std::string, std::string>> devices_and_rows(Op op) {
  std::vector<std::tuple<std::string, std::string>> all;
  for (const std::string& device : tested_devices())
    for (const std::string& row : backend_names(op))
      if (row.starts_with("cuda") && (row != "cuda_sm90" || is_sm90_device(device))) all.emplace_back(device, row);
  return all;
}

/// The parameter is a device and a row. cuda_sm90 runs where it is chosen, with nothing forced; the other rows are
/// forced.
template <Op op>
class DeviceTest : public testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  const std::string& device() const { return std::get<0>(GetParam()); }
  const std::string& row() const { return std::get<1>(GetParam()); }
  bool is_sm90() const { return row() == "cuda_sm90"; }

  void SetUp() override {
    Problem problem = usual_problem(op);
    if (is_sm90()) problem.num_heads += kMoreHeads;
    if (const BackendVerdict verdict = judge(problem); !verdict.usable) GTEST_SKIP() << row() << ": " << verdict.reason;
    Result<Context> made =
        Context::create({.num_threads = 2, .affinity = {}, .backend = is_sm90() ? "auto" : row(), .device = device()});
    ASSERT_TRUE(made.ok()) << made.status().message();
    context_.emplace(std::move(made).value());
  }

  /// A test of which cuda_sm90 takes nothing is none.
  void TearDown() override { EXPECT_TRUE(ran_ > 0 || left_ == 0) << row() << " took none of " << left_ << " problems"; }

  const Context& context() const { return *context_; }

  /// cuda_sm90 leaves requests of up to 16 query rows, and indexers of up to 32 heads, to cuda_portable: here they get
  /// more heads.
  template <class Spec>
  Spec fit(Spec spec) const {
    if constexpr (requires { spec.num_heads; })
      if (is_sm90() && !judge(kit::problem_of(spec)).usable) spec.num_heads += kMoreHeads;
    return spec;
  }

  template <class Spec>
  bool can_run(const Spec& spec) const {
    return judge(kit::problem_of(fit(spec))).usable;
  }

  /// Calls run_it(fit(spec)). What cuda_sm90 leaves to cuda_portable is left out, for that row has the same test.
  template <class Spec, class RunIt>
  void with_fitting(const Spec& spec, const RunIt& run_it) {
    if (is_sm90() && !can_run(spec)) {
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

  /// A case of a spec that was made fit, changed by the test and run.
  template <class Case>
  void expect_outputs(const Case& problem) {
    ++ran_;
    const Result<kit::Expected> expected = kit::expected_of(problem);
    ASSERT_TRUE(expected.ok()) << expected.status().message();
    const kit::Outcome outcome = kit::check_outputs(problem, *expected, row());
    EXPECT_TRUE(outcome.ok) << device() << ": " << outcome.line();
  }

  /// Random problems that the row takes.
  template <class Draw>
  void expect_random(int count, const Draw& draw) {
    int ran = 0;
    for (uint64_t seed = 1; ran < count && seed < 20 * static_cast<uint64_t>(count); ++seed) {
      const auto spec = draw(seed);
      if (!can_run(spec)) continue;
      expect_ok(spec);
      ++ran;
    }
    EXPECT_EQ(ran, count);
  }

 private:
  static constexpr int32_t kMoreHeads = op == Op::kIndexerLogits ? 32 : 16;

  BackendVerdict judge(const Problem& problem) const {
    for (BackendVerdict& verdict : explain(kit::on_device(problem, device()), "auto").rows)
      if (verdict.name == row()) return verdict;
    return {};
  }

  std::optional<Context> context_;
  int ran_ = 0, left_ = 0;
};

/// The kit's problems on a real GPU are copied there; tests that bring memory of their own run on emulated ones.
template <Op op>
class EmulatedTest : public DeviceTest<op> {
 protected:
  void SetUp() override {
    if (!this->device().starts_with("emulated:")) GTEST_SKIP() << "host memory is not this GPU's";
    DeviceTest<op>::SetUp();
  }
};

/// "emulated_sm90_cuda_portable"
inline std::string name_of_device_and_row(const testing::TestParamInfo<std::tuple<std::string, std::string>>& info) {
  std::string name = std::get<0>(info.param) + "_" + std::get<1>(info.param);
  std::replace(name.begin(), name.end(), ':', '_');
  return name;
}

#define MLA_FOR_EVERY_DEVICE(Suite, op)                                                                                \
  INSTANTIATE_TEST_SUITE_P(Devices, Suite, testing::ValuesIn(mla::devices_and_rows(op)), mla::name_of_device_and_row); \
  GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Suite)

}  // namespace mla
