// SPDX-License-Identifier: Apache-2.0
// Tests merge_states on an emulated GPU against the reference: the results are the same up to rounding, and NaN and
// infinity are in the same places.
#include <cmath>
#include <limits>
#include <vector>

#include "cuda/common/memory.h"
#include "reference/reference.h"
#include "reference/scalar.h"
#include "trace.h"

namespace mla::writers_test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Merged {
  std::vector<float> o, lse;
};

Merged merged(const core::MergeStatesArgs& args) {
  Merged result;
  for (int64_t t = 0; t < args.num_tokens; ++t)
    for (int64_t h = 0; h < args.num_heads; ++h) {
      for (int64_t d = 0; d < args.d_v; ++d)
        result.o.push_back(reference::load(args.o, args.o_dtype, t * args.o_stride_token + h * args.o_stride_head + d));
      if (args.lse != nullptr) result.lse.push_back(args.lse[t * args.lse_stride_token + h * args.lse_stride_head]);
    }
  return result;
}

void expect_close(const std::vector<float>& actual, const std::vector<float>& expected, float tolerance) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (std::isfinite(expected[i]))
      ASSERT_NEAR(actual[i], expected[i], tolerance * std::max(1.0F, std::fabs(expected[i]))) << "element " << i;
    else if (std::isnan(expected[i]))
      ASSERT_TRUE(std::isnan(actual[i])) << "element " << i << " is " << actual[i];
    else
      ASSERT_EQ(actual[i], expected[i]) << "element " << i;
  }
}

TEST(CudaMergeStates, IsTheReferenceUpToRounding) {
  for (uint64_t seed = 0; seed < 150; ++seed) {
    MLA_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    Memory memory(random);
    core::MergeStatesArgs args = {.num_states = random.of({1, 2, 3, 7, 40}),
                                  .num_tokens = random.integer(0, 4),
                                  .num_heads = random.of({1, 3, 16}),
                                  .d_v = random.of({512, 128, 12, 264, 5}),
                                  .in_place = random.chance(2),
                                  .lse_form = {random.of({LseBase::kE, LseBase::kTwo}), random.chance(2)},
                                  .partial_dtype = random.of({DType::kF32, DType::kBF16, DType::kF16}),
                                  .o_dtype = random.of({DType::kF32, DType::kBF16, DType::kF16})};
    const int64_t extra = random.of({0, 0, 3, 8}), rows = args.num_tokens * args.num_heads;
    args.partial_o_stride_head = args.d_v + extra;
    args.partial_o_stride_token = args.num_heads * args.partial_o_stride_head;
    args.partial_o_stride_state = args.num_tokens * args.partial_o_stride_token;
    args.o_stride_head = args.d_v + extra;
    args.o_stride_token = args.num_heads * args.o_stride_head;
    args.partial_lse_stride_head = args.lse_stride_head = 2;
    args.partial_lse_stride_token = args.lse_stride_token = 2 * args.num_heads;
    args.partial_lse_stride_state = 2 * rows;
    const auto finite = [&](DType dtype, int64_t n) {
      std::byte* base = memory.bytes(n * static_cast<int64_t>(size_of(dtype)), random.of({0, 4}));
      for (int64_t i = 0; i < n; ++i)
        reference::store(static_cast<float>(random.integer(-1000, 1000)) / 256.0F, dtype, i, base);
      return base;
    };
    args.partial_o = finite(args.partial_dtype, args.num_states * args.partial_o_stride_state);
    args.o = finite(args.o_dtype, rows * args.o_stride_head);
    const auto lse = [&](int64_t n) {
      std::vector<float> values;
      const float base = random.of({0.0F, 700.0F, -90.0F});
      for (int64_t i = 0; i < n; ++i)
        values.push_back(random.chance(4) ? -kInfinity
                                          : base + static_cast<float>(random.integer(-4000, 4000)) / 512.0F);
      return memory.list(values);
    };
    args.partial_lse = lse(2 * args.num_states * rows);
    float* own = lse(2 * rows);
    if (args.in_place || random.chance(2)) args.lse = own;
    const std::vector<std::byte> before = memory.copy();
    reference::merge_states(args);
    const Merged expected = merged(args);
    memory.assign(before);
    TestQueue queue(seed);
    const Status status = run_merge_states(args, queue);
    ASSERT_TRUE(status.ok()) << status.message();
    const Merged actual = merged(args);
    const float rounding = args.o_dtype == DType::kF32 ? 4e-6F : args.o_dtype == DType::kF16 ? 1e-3F : 8e-3F;
    ASSERT_NO_FATAL_FAILURE(expect_close(actual.o, expected.o, rounding));
    ASSERT_NO_FATAL_FAILURE(expect_close(actual.lse, expected.lse, 2e-6F));
  }
}

/// Merges one state with keys and one without; the latter's o is NaN.
TEST(CudaMergeStates, DoesNotReadStatesThatWeighNothing) {
  Random random(1);
  Memory memory(random);
  std::vector<float> o(64, std::numeric_limits<float>::quiet_NaN()), out(32);
  for (int i = 0; i < 32; ++i) o[static_cast<size_t>(i)] = static_cast<float>(i);
  core::MergeStatesArgs args = {
      .num_states = 2, .num_tokens = 1, .num_heads = 1, .d_v = 32, .partial_o_stride_state = 32};
  args.partial_o = memory.list(o);
  args.partial_lse = memory.list<float>({3.0F, -kInfinity});
  args.partial_lse_stride_state = 1;
  args.o = memory.list(out);
  args.lse = memory.list<float>({0.0F});
  TestQueue queue(0);
  ASSERT_TRUE(run_merge_states(args, queue).ok());
  for (int i = 0; i < 32; ++i) EXPECT_EQ(static_cast<float*>(args.o)[i], static_cast<float>(i));
  EXPECT_EQ(*args.lse, 3.0F);
}

}  // namespace
}  // namespace mla::writers_test
