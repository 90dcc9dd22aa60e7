// SPDX-License-Identifier: Apache-2.0
// Tests where GPU kernels look. It runs on emulated GPUs, whose memory is the host's: pages that nobody owns are
// protected, so that a read is a crash, and pages lie further than 2^32 elements apart.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "device_test.h"
#include "fenced_memory.h"

namespace mla {
namespace {

class DecodeMemoryOnDevice : public EmulatedTest<Op::kDecode> {};
MLA_FOR_EVERY_DEVICE(DecodeMemoryOnDevice, Op::kDecode);

TEST_P(DecodeMemoryOnDevice, EveryFormatWithUnownedPagesUnmapped) {
  for (CacheFormat format : kAllCacheFormats) {
    kit::DecodeSpec spec;
    spec.cache = fenced_cache(format);
    spec.q_len = {2};
    spec.kv_len = {129, 64, 1, 0};
    if (!is_quantized(kv_layout(format).nope.element)) spec.q_dtype = spec.o_dtype = kv_layout(format).nope.element;
    with_fitting(spec, [&](const kit::DecodeSpec& fitting) {
      const kit::DecodeCase problem(fitting);
      std::vector<std::unique_ptr<FencedMemory>> fences;
      DecodeParams params = problem.params();
      fence(params.cache.kv, problem.memory.kv, fences);
      fence(params.q, problem.q, fences);
      protect_unowned(params.cache.kv, problem.memory);
      run_params(context(), params);
      const Result<kit::Expected> expected = kit::expected_of(problem);
      MLA_EXPECT_OK(expected);
      const kit::Outcome outcome = kit::check_outputs(problem, *expected, row());
      EXPECT_TRUE(outcome.ok) << outcome.line();
    });
  }
}

}  // namespace
}  // namespace mla
