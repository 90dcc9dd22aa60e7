// SPDX-License-Identifier: Apache-2.0
// Tests compress of every instruction set this machine has: that its latents are those of the reference, and the same
// bits however a sequence was divided into calls and these among threads.
#include <algorithm>
#include <cmath>
#include <vector>

#include "reference/compress_problems.h"
#include "row_operations.h"
#include "trace.h"

namespace mla::cpu {
namespace {

using reference::Latents;
using reference::Layer;
using reference::Part;
using reference::Random;
using reference::Sequence;
using reference::States;

class CompressTest : public RowOperationsTest {
 protected:
  /// Calls f(form) for forms of these channels, with a seed that is noted.
  template <class F>
  void for_forms(bool norm, const F& f) {
    uint32_t seed = 0;
    for (int32_t ratio : {1, 2, 4, 9, 20})
      for (bool overlap : {false, true})
        for (int32_t channels : {2, 16, 130})
          for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
            if (overlap && ratio == 1) continue;
            const reference::Form form = {.ratio = ratio,
                                          .overlap = overlap,
                                          .bias = ratio > 1 && seed % 4 != 0,
                                          .norm = norm,
                                          .d_latent = channels,
                                          .dtype = dtype};
            MLA_TRACE(testing::Message() << form << ", " << channels << " channels, seed " << seed);
            Random random(seed++);
            f(form, random);
          }
  }

  const reference::Compute compute_ = [this](const core::CompressArgs& args) { run_compress(set_, args, pool_); };
};

/// The means are as far off as tests/cpu/pool_kernels_test.cpp derives for n tokens in calls of 8, whose scores are the
/// same f32 here; their own rounding to f32 is among that. The reference adds half of a last place.
TEST_P(CompressTest, LatentsAreThoseOfTheReference) {
  for_forms(false, [&](const reference::Form& form, Random& random) {
    const Layer layer(form, random);
    const int64_t tokens = 3 * form.ratio + 1;
    const Sequence sequence(form, tokens, random);
    double largest = 0;
    for (int64_t t = 0; t < tokens; ++t)
      for (int32_t c = 0; c < form.width(); ++c) largest = std::max(largest, std::fabs(sequence.kv.at(t, c)));
    const Latents expected = at_once(layer, sequence, tokens), actual = at_once(layer, sequence, tokens, compute_);
    ASSERT_EQ(actual.size(), expected.size());
    const double calls = (form.span() + kPooledTokens - 1) / kPooledTokens;
    for (const auto& [last, latent] : expected)
      for (size_t c = 0; c < latent.size(); ++c)
        ASSERT_NEAR(static_cast<double>(actual.at(last)[c]), static_cast<double>(latent[c]),
                    (8 * calls + 5 * form.span() + 3) * largest * 0x1p-24)
            << "position " << last << ", channel " << c;
  });
}

TEST_P(CompressTest, DivisionsIntoCallsGiveTheSameBits) {
  for_forms(true, [&](const reference::Form& form, Random& random) {
    const Layer layer(form, random);
    const int64_t tokens = 4 * form.ratio + 3;
    const std::vector<Sequence> sequences = {Sequence(form, tokens, random), Sequence(form, tokens, random)};
    std::vector<Latents> expected, actual(2);
    for (const Sequence& sequence : sequences) expected.push_back(at_once(layer, sequence, tokens, compute_));
    // Two requests go on by random steps, in blocks of two tokens.
    const int32_t columns = (std::max(form.rows(), 1) + 1) / 2;
    States states(form, 2 * columns, 2, columns);
    std::vector<Part> parts(2);
    for (size_t b = 0; b < 2; ++b) {
      parts[b] = {.sequence = &sequences[b], .begin = 0, .end = 0};
      for (int32_t column = 0; column < columns; ++column)
        parts[b].blocks.push_back(2 * column + static_cast<int32_t>(b));
    }
    while (parts[0].end < tokens || parts[1].end < tokens) {
      for (Part& part : parts) {
        part.begin = part.end;
        part.end = std::min<int64_t>(part.begin + random.integer(0, form.ratio + 1), tokens);
      }
      const std::vector<Latents> latents = run(layer, states, parts, compute_);
      for (size_t b = 0; b < 2; ++b) actual[b].insert(latents[b].begin(), latents[b].end());
    }
    ASSERT_EQ(actual, expected);
  });
}

MLA_FOR_LEVELS_OF_ALL_OPERATIONS(CompressTest);

}  // namespace
}  // namespace mla::cpu
