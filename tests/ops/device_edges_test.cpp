// SPDX-License-Identifier: Apache-2.0
// Attention on GPUs where keys begin and end to be seen: a NaN in a key says sharply which queries see it.
#include <gtest/gtest.h>

#include <limits>
#include <utility>
#include <vector>

#include "device_test.h"
#include "kit/paged_memory.h"

namespace mla {
namespace {

using kit::DecodeCase;
using kit::DecodeSpec;

DecodeSpec edge_decode(CacheFormat format, int32_t heads) {
  DecodeSpec spec;
  spec.cache = kit::usual_cache(format);
  spec.q_dtype = spec.o_dtype = format == CacheFormat::kF16 ? DType::kF16 : DType::kBF16;
  spec.num_heads = heads;
  return spec;
}

class DecodeEdges : public DeviceTest<Op::kDecode> {
 protected:
  /// Runs the case and compares.
  void expect_case(const DecodeCase& problem) {
    const Result<kit::PlannedRun> done = kit::plan_and_run(context(), problem);
    ASSERT_TRUE(done.ok()) << done.status().message();
    expect_outputs(problem);
  }
};
MLA_FOR_EVERY_DEVICE(DecodeEdges, Op::kDecode);

/// Makes a NaN of one channel of a request's key; not of keys that it does not have.
void poison_key(const DecodeCase& problem, size_t request, int64_t key) {
  if (key < 0 || key >= problem.spec.kv_len[request]) return;
  std::vector<float> values(static_cast<size_t>(problem.spec.cache.d_qk));
  kit::fill_row_values(values, static_cast<uint64_t>(key) + 1);
  values[3] = std::numeric_limits<float>::quiet_NaN();
  const int64_t slot = problem.memory.slot_of(request, key), page_size = problem.spec.cache.page_size;
  problem.memory.write_row(slot / page_size, slot % page_size, values);
}

// Steps take 32 or 64 keys, with a fast path for those whose keys all rows see.
TEST_P(DecodeEdges, OfCausalityAndWindowsAroundSteps) {
  for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kFP8DsMla})
    for (const auto& [heads, q_len] : {std::pair(3, 5), std::pair(9, 2), std::pair(5, 33)})
      for (int32_t window : {-1, 31, 32, 64, 65}) {
        DecodeSpec spec = edge_decode(format, heads);
        spec.q_len = {q_len};
        spec.kv_len = q_len > 5 ? std::vector<int32_t>{65, 97} : std::vector<int32_t>{33, 63, 64, 65, 96, 97, 127, 129};
        spec.options.window_left = window;
        const DecodeCase problem(fit(spec));
        for (size_t b = 0; b < spec.kv_len.size(); ++b) {
          // The last key that one query sees, which hides from those before it; or the first one of a window.
          const int64_t position = spec.kv_len[b] - q_len + static_cast<int64_t>(b) % q_len;
          poison_key(problem, b, b % 2 == 0 || window < 0 ? position : position - window);
        }
        expect_case(problem);
      }
}

}  // namespace
}  // namespace mla
