// SPDX-License-Identifier: Apache-2.0
// Tests what a folder and a line of CMake make of a backend.
#include <gmock/gmock.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cuda/border/backend.h"
#include "mla/mla.h"

namespace mla {
namespace {

/// Returns the first architecture that the backend is for and this build emulates; 0 if there is none.
int32_t arch_of_nothing() {
  const std::vector<int32_t> archs = backends().front().archs;
  for (const int32_t arch : machine_info().emulated_archs)
    if (std::find(archs.begin(), archs.end(), arch) != archs.end()) return arch;
  return 0;
}

Problem on_emulated(Op op, int32_t arch) {
  return {.op = op, .device = {DeviceType::kCuda, 0}, .gpu_arch = arch, .emulated = true};
}

TEST(NothingBackend, StandsInFrontWithTheArchitecturesOfItsLine) {
  const BackendInfo nothing = backends().front();
  EXPECT_EQ(nothing.name, "cuda_nothing");
  EXPECT_EQ(nothing.device, DeviceType::kCuda);
  EXPECT_EQ(nothing.archs, (std::vector<int32_t>{80, 90}));
  EXPECT_EQ(nothing.leaves, "nearly everything");
  for (Op op : kAllOps) EXPECT_EQ(backend_names(op).front(), "cuda_nothing") << name(op);
}

TEST(NothingBackend, IsExplained) {
  const int32_t arch = arch_of_nothing();
  if (arch == 0) GTEST_SKIP() << "this build emulates no GPU that it is for";
  for (Op op : kAllOps) {
    const Explanation found = explain(on_emulated(op, arch), "auto");
    const BackendVerdict& nothing = found.rows.front();
    EXPECT_EQ(nothing.usable, op == Op::kTopK) << name(op);
    EXPECT_EQ(found.selected == "cuda_nothing", op == Op::kTopK) << name(op);
    if (op == Op::kTopK)
      EXPECT_EQ(nothing.reason, "emulated: kernels of sm" + std::to_string(arch) + " on the CPU");
    else if (op == Op::kCopyPages)
      EXPECT_EQ(nothing.reason, "has no kernel of copy_pages for this GPU");
    else
      EXPECT_EQ(nothing.reason, "has nothing of its own") << name(op);
  }
  EXPECT_EQ(explain(on_emulated(Op::kDecode, arch), "cuda_nothing").error,
            "decode: backend: \"cuda_nothing\" cannot run this: cuda_nothing: has nothing of its own; " +
                explain(on_emulated(Op::kDecode, arch)).selected + " can");
}

TEST(NothingBackend, IsForNoOtherArchitecture) {
  for (const int32_t arch : {86, 89, 100, 120})
    EXPECT_EQ(explain(on_emulated(Op::kTopK, arch), "auto").rows.front().reason,
              "needs sm80 or sm90, not sm" + std::to_string(arch));
}

TEST(NothingBackend, RunsWhatItTakesAndLeavesTheRest) {
  const int32_t arch = arch_of_nothing();
  if (arch == 0) GTEST_SKIP() << "this build emulates no GPU that it is for";
  const Context context = Context::create({.num_threads = 1, .device = "emulated:sm" + std::to_string(arch)}).value();
  std::vector<float> logits = {1, 4, 2, 8};
  std::vector<int32_t> indices(2, -7);
  const TopKParams top_k{.logits = contiguous(logits.data(), DType::kF32, {1, 4}),
                         .indices = contiguous(indices.data(), DType::kI32, {1, 2})};
  EXPECT_EQ(run(context, top_k).message(), "");
  std::sort(indices.begin(), indices.end());
  EXPECT_EQ(indices, (std::vector<int32_t>{1, 3}));
  std::vector<float> partial(8, 1.0F), lse(2), merged(4);
  const MergeStatesParams merge{.partial_o = contiguous(partial.data(), DType::kF32, {2, 1, 1, 4}),
                                .partial_lse = contiguous(lse.data(), DType::kF32, {2, 1, 1}),
                                .o = contiguous(merged.data(), DType::kF32, {1, 1, 4})};
  EXPECT_EQ(run(context, merge).message(), "");
  EXPECT_EQ(merged, std::vector<float>(4, 1.0F));
}

TEST(NothingBackend, StandsBeforeTheLibrarysOwn) {
  std::vector<std::string_view> names;
  for (const cuda::Backend& backend : cuda::backends()) names.push_back(backend.name);
  EXPECT_EQ(names.front(), "cuda_nothing");
  EXPECT_THAT(names, testing::Contains("cuda_sm90"));
  EXPECT_EQ(names.back(), "cuda_portable") << "which takes what the others leave";
}

}  // namespace
}  // namespace mla
