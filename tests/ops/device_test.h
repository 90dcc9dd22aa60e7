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

/// Rows of an operation's table that are for GPUs.
inline std::vector<std::string> gpu_rows(Op op) {
  std::vector<std::string> rows = backend_names(op);
  std::erase_if(rows, [](const std::string& row) { return !row.starts_with("cuda"); });
  return rows;
}

/// The parameter is a device and a row.
template <Op op>
class DeviceTest : public testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  const std::string& device() const { return std::get<0>(GetParam()); }
  const std::string& row() const { return std::get<1>(GetParam()); }

  void SetUp() override {
    for (const BackendVerdict& verdict : explain(kit::on_device(usual_problem(op), device()), "auto").rows)
      if (verdict.name == row() && !verdict.usable) GTEST_SKIP() << row() << ": " << verdict.reason;
    Result<Context> made = Context::create({.num_threads = 2, .affinity = {}, .backend = row(), .device = device()});
    ASSERT_TRUE(made.ok()) << made.status().message();
    context_.emplace(std::move(made).value());
  }

  const Context& context() const { return *context_; }

  template <class Spec>
  bool can_run(const Spec& spec) const {
    for (const BackendVerdict& verdict : explain(kit::on_device(kit::problem_of(spec), device()), "auto").rows)
      if (verdict.name == row()) return verdict.usable;
    return false;
  }

  template <class Spec>
  void expect_ok(const Spec& spec) const {
    const kit::Outcome outcome = kit::check(context(), spec);
    EXPECT_TRUE(outcome.ok) << device() << ": " << outcome.line();
    EXPECT_EQ(outcome.backend, row());
  }

  /// Random problems that the row takes; at least one must be among them.
  template <class Draw>
  void expect_random(int count, const Draw& draw) const {
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
  std::optional<Context> context_;
};

/// "emulated_sm90_cuda_portable"
inline std::string name_of_device_and_row(const testing::TestParamInfo<std::tuple<std::string, std::string>>& info) {
  std::string name = std::get<0>(info.param) + "_" + std::get<1>(info.param);
  std::replace(name.begin(), name.end(), ':', '_');
  return name;
}

#define MLA_FOR_EVERY_DEVICE(Suite, op)                                                                 \
  INSTANTIATE_TEST_SUITE_P(                                                                             \
      Devices, Suite,                                                                                   \
      testing::Combine(testing::ValuesIn(mla::tested_devices()), testing::ValuesIn(mla::gpu_rows(op))), \
      mla::name_of_device_and_row);                                                                     \
  GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Suite)

}  // namespace mla
