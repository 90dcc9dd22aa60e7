// SPDX-License-Identifier: Apache-2.0
// Holds what the tests of backends that multiply e4m3 by e4m3 ask of them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "cuda/runtime/emulated_queue.h"
#include "mla/mla.h"

namespace mla::test {

/// Returns a decode with compute = fp8 on an emulated GPU, of widths that rows of the format have.
inline Problem problem_in_fp8(CacheFormat format, int32_t arch) {
  Problem problem{.op = Op::kDecode, .device = {DeviceType::kCuda, 0}, .cache = format, .gpu_arch = arch};
  problem.emulated = true;
  problem.compute = Compute::kFP8;
  const KvLayout layout = kv_layout(format);
  if (layout.value_has_rope || (layout.is_packed() && layout.rope_dim == 0)) problem.d_qk = problem.d_v = 512;
  return problem;
}

/// Returns what a backend says of a problem.
inline BackendVerdict verdict_of(std::string_view backend, const Problem& problem) {
  for (BackendVerdict& row : explain(problem, "auto").rows)
    if (row.name == backend) return row;
  ADD_FAILURE() << name(problem.op) << " has no " << backend;
  return {};
}

/// Lets emulated wgmma keep the bits of f32 of sums of e4m3 products while it lives, so that small errors show.
class SumsInF32 {
 public:
  SumsInF32() { cuda::emulator_sums_in_f32() = true; }
  ~SumsInF32() { cuda::emulator_sums_in_f32() = false; }
  SumsInF32(const SumsInF32&) = delete;
  SumsInF32& operator=(const SumsInF32&) = delete;
};

inline bool emulates(int32_t arch) {
  const auto& archs = machine_info().emulated_archs;
  return std::find(archs.begin(), archs.end(), arch) != archs.end();
}

}  // namespace mla::test
