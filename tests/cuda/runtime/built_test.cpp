// SPDX-License-Identifier: Apache-2.0
// Tests that CMake compiled, for each architecture, the backends which say that they are for it: the lists of
// cmake/MlaCuda.cmake and of ptx/archs.h state the same facts.
#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <string>

#include "cuda/border/backend.h"
#include "cuda/runtime/code.h"
#include "trace.h"

namespace mla {
namespace {

void expect_backends_of(std::span<const int32_t> archs, bool emulated) {
  for (const int32_t arch : archs) {
    MLA_TRACE((emulated ? "emulated:sm" : "sm") + std::to_string(arch));
    for (const cuda::Backend& backend : cuda::backends())
      EXPECT_EQ(backend.operations(arch, emulated) != nullptr, backend.is_for(arch)) << backend.name;
  }
}

TEST(BuiltBackends, AreThoseForEachArchitecture) {
  expect_backends_of(cuda::built_archs(), false);
  expect_backends_of(cuda::emulated_archs(), true);
}

TEST(BuiltCode, OfABuildByNameIsItsOwn) {
  for (const int32_t arch : cuda::emulated_archs()) EXPECT_EQ(cuda::emulated_code(arch).arch, arch);
  if (cuda::profile().arch != 0) return;
  for (const int32_t arch : cuda::built_archs()) EXPECT_EQ(cuda::code_for(arch).arch, arch);
}

}  // namespace
}  // namespace mla
