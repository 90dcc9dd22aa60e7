// SPDX-License-Identifier: Apache-2.0
// Tests compress against its definition over a whole sequence, which knows no calls and no states; and that its results
// do not depend on how a sequence was divided into calls, on drafts that were rejected, and on what else was in a call.
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "compress_problems.h"
#include "trace.h"

namespace mla::reference {
namespace {

std::vector<Form> forms(std::initializer_list<int32_t> ratios) {
  std::vector<Form> all;
  for (int32_t ratio : ratios)
    for (bool overlap : {false, true})
      if (!overlap || ratio > 1) all.push_back({.ratio = ratio, .overlap = overlap, .bias = ratio > 1});
  return all;
}

TEST(ReferenceCompress, ByHand) {
  // Two groups of two tokens with one channel: weights 3/4 and 1/4, then 1/2 and 1/2. A bias multiplies the second of
  // each by three.
  const float kv[] = {8, 4, 6, 10}, score[] = {kLn3, 0, 0, 0};
  Random random(1);
  for (bool biased : {false, true}) {
    Layer layer({.ratio = 2, .bias = biased, .norm = false, .d_latent = 1}, random);
    layer.bias = {0, kLn3};
    Sequence sequence(layer.form, 4, random);
    std::memcpy(sequence.kv.bytes.data(), kv, sizeof kv);
    std::memcpy(sequence.score.bytes.data(), score, sizeof score);
    const Latents latents = at_once(layer, sequence, 4);
    ASSERT_EQ(latents.size(), 2U);
    EXPECT_NEAR(latents.at(1)[0], biased ? 6 : 7, 1e-5);
    EXPECT_NEAR(latents.at(3)[0], biased ? 9 : 8, 1e-5);
  }
  // The norm of two channels, 3 and 4 times a weight: their mean square is 12.5.
  Layer layer({.ratio = 1, .bias = false}, random);
  layer.norm = {2, -1};
  Sequence sequence(layer.form, 1, random);
  const float row[] = {3, 4};
  std::memcpy(sequence.kv.bytes.data(), row, sizeof row);
  const Latent latent = at_once(layer, sequence, 1).at(0);
  EXPECT_NEAR(latent[0], 6 / std::sqrt(12.5), 1e-6);
  EXPECT_NEAR(latent[1], -4 / std::sqrt(12.5), 1e-6);
}

TEST(ReferenceCompress, EqualsTheDefinition) {
  uint32_t seed = 0;
  for (Form form : forms({1, 2, 3, 4, 128}))
    for (bool bias : {false, true})
      for (bool norm : {false, true})
        for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
          form.bias = bias && form.ratio > 1;
          form.norm = norm;
          form.dtype = dtype;
          form.d_latent = 5;
          MLA_TRACE(testing::Message() << form << ", seed " << seed);
          Random random(seed++);
          const Layer layer(form, random);
          const int64_t tokens = 3 * form.ratio + 1;
          const Sequence sequence(form, tokens, random);
          const Latents latents = at_once(layer, sequence, tokens);
          ASSERT_EQ(static_cast<int64_t>(latents.size()), tokens / form.ratio);
          for (const auto& [last, latent] : latents)
            expect_near(latent, by_definition(layer, sequence, last, all_known));
        }
}

/// Goes on after `begin` tokens with every division of the others into calls.
void divide(const Layer& layer, const Sequence& sequence, const Latents& expected, int64_t begin, int64_t tokens,
            const States& states) {
  for (int64_t end = begin + 1; end <= tokens; ++end) {
    States next = states;
    const Latents latents = run(layer, next, {{&sequence, begin, end}})[0];
    ASSERT_EQ(latents, between(expected, begin, end)) << begin << " ... " << end - 1;
    divide(layer, sequence, expected, end, tokens, next);
    if (testing::Test::HasFailure()) return;  // one is enough
  }
}

/// Returns a ring of the fewest rows, a larger one, blocks in a ring, and blocks as many as `tokens` tokens take.
std::vector<States> all_states(const Form& form, int64_t tokens, int32_t rejected = 0) {
  const int32_t least = std::max(form.rows(rejected), 1);
  std::vector<States> states = {States(form, 1, least, 1), States(form, 1, least + 3, 1)};
  for (int32_t block : {1, 2, 3}) {
    const int32_t columns = (least + block - 1) / block, all = static_cast<int32_t>(tokens + block - 1) / block;
    states.emplace_back(form, columns, block, columns);
    if (all > columns) states.emplace_back(form, all, block, all);
  }
  return states;
}

TEST(ReferenceCompress, EveryDivisionIntoCallsGivesTheSameLatents) {
  for (const Form& form : forms({1, 2, 3, 4})) {
    Random random(static_cast<uint32_t>(form.ratio));
    const int64_t tokens = 2 * form.ratio + 3;
    const Layer layer(form, random);
    const Sequence sequence(form, tokens, random);
    const Latents expected = at_once(layer, sequence, tokens);
    for (const States& states : all_states(form, tokens)) {
      MLA_TRACE(testing::Message() << form << ", " << states.num_columns << " blocks of " << states.block_size);
      divide(layer, sequence, expected, 0, tokens, states);
    }
  }
}

TEST(ReferenceCompress, PromptsResumeAtEveryLength) {
  for (const Form& form : forms({4, 128}))
    for (int64_t groups : {1, 2})
      for (int64_t tokens = groups * form.ratio - 1; tokens <= groups * form.ratio + 1; ++tokens) {
        Random random(static_cast<uint32_t>(tokens));
        const Layer layer(form, random);
        // The prompt is resumed, and goes on by single tokens until another group ends.
        const int64_t all = (tokens / form.ratio + 1) * form.ratio;
        const Sequence sequence(form, all, random);
        const Latents expected = at_once(layer, sequence, all);
        for (const auto& [last, latent] : expected)
          expect_near(latent, by_definition(layer, sequence, last, all_known));
        for (int64_t resumed = 0; resumed <= tokens; ++resumed) {
          MLA_TRACE(testing::Message() << form << ", " << tokens << " tokens, resumed at " << resumed);
          States states(form, 1, form.rows(), 1);
          Latents latents = run(layer, states, {{&sequence, 0, resumed}})[0];
          latents.merge(run(layer, states, {{&sequence, resumed, tokens}})[0]);
          const int64_t step = form.ratio > 4 ? 31 : 1;
          for (int64_t at = tokens; at < all; at += step)
            latents.merge(run(layer, states, {{&sequence, at, std::min(at + step, all)}})[0]);
          ASSERT_EQ(latents, expected);
        }
      }
}

/// Returns tokens as drafts that will be rejected: none of their channels goes unnoticed.
Sequence loud_drafts(const Form& form, int64_t tokens, Random& random) {
  Sequence drafts(form, tokens, random);
  drafts.kv.fill(random, 1e6F);
  drafts.score.fill(random, 20.0F);
  return drafts;
}

/// Appends tokens [begin, begin + appended) of a sequence, of which the last `rejected` ones are drafts.
void append_drafts(const Layer& layer, const Sequence& sequence, const Sequence& drafts, const Latents& expected,
                   int64_t begin, int64_t appended, int64_t rejected, States& states) {
  Sequence mixed = sequence;
  const int64_t accepted = begin + appended - rejected;
  for (int64_t p = accepted; p < begin + appended; ++p) mixed.replace(p, drafts);
  const Latents latents = run(layer, states, {{&mixed, begin, begin + appended}})[0];
  ASSERT_EQ(between(latents, begin, accepted), between(expected, begin, accepted)) << begin << " + " << appended;
}

TEST(ReferenceCompress, RejectedDraftsLeaveNoTrace) {
  constexpr int64_t kDrafts = 3;
  for (const Form& form : forms({2, 3, 4})) {
    Random random(static_cast<uint32_t>(form.ratio) + 7);
    const Layer layer(form, random);
    const int64_t most = 2 * form.ratio + 1, all = most + 2 * kDrafts + 2 * form.ratio;
    const Sequence sequence(form, all, random), drafts = loud_drafts(form, all, random);
    const Latents expected = at_once(layer, sequence, all);
    for (const States& empty : all_states(form, all, kDrafts))
      for (int64_t begin = 0; begin <= most; ++begin) {
        States prefix = empty;
        ASSERT_EQ(run(layer, prefix, {{&sequence, 0, begin}})[0], between(expected, 0, begin));
        for (int64_t appended = 1; appended <= kDrafts; ++appended)
          for (int64_t rejected = 0; rejected <= appended; ++rejected) {
            States first = prefix;
            append_drafts(layer, sequence, drafts, expected, begin, appended, rejected, first);
            const int64_t middle = begin + appended - rejected;
            for (int64_t again = 1; again <= kDrafts; ++again)
              for (int64_t once_more = 0; once_more <= again; ++once_more) {
                MLA_TRACE(testing::Message()
                          << form << ", " << empty.num_columns << " blocks of " << empty.block_size << ", " << begin
                          << " + " << appended << " - " << rejected << " + " << again << " - " << once_more);
                States second = first;
                append_drafts(layer, sequence, drafts, expected, middle, again, once_more, second);
                const int64_t end = middle + again - once_more;
                ASSERT_EQ(run(layer, second, {{&sequence, end, all}})[0], between(expected, end, all));
              }
          }
      }
  }
}

/// Tests the promise of CompressParams at its limit: as many rejected tokens as the rows allow, wherever they end.
TEST(ReferenceCompress, TheRowsAreAsManyAsRejectedTokensNeed) {
  for (const Form& form : forms({2, 3, 4}))
    for (int64_t rejected : {1, 2, 5}) {
      Random random(static_cast<uint32_t>(form.ratio) + 9);
      const Layer layer(form, random);
      const int64_t most = 3 * form.ratio, all = most + 2 * form.ratio + rejected;
      const Sequence sequence(form, all, random), drafts = loud_drafts(form, all, random);
      const Latents expected = at_once(layer, sequence, all);
      for (bool enough : {true, false}) {
        const auto rows = form.rows(static_cast<int32_t>(rejected)) - (enough ? 0 : 1);
        ASSERT_GE(rows, form.rows());
        int wrong = 0;
        for (int64_t accepted = 0; accepted <= most; ++accepted) {
          States states(form, 1, rows, 1);
          append_drafts(layer, sequence, drafts, expected, 0, accepted + rejected, rejected, states);
          if (run(layer, states, {{&sequence, accepted, all}})[0] != between(expected, accepted, all)) {
            ++wrong;
            // The oldest token is lost where the next one ends a group, which takes all of its rows.
            EXPECT_EQ((accepted + 1) % form.ratio, 0) << form << ", " << rejected << " rejected";
          }
        }
        EXPECT_EQ(wrong > 0, !enough) << form << ", " << rejected << " rejected, " << rows << " rows";
      }
    }
}

TEST(ReferenceCompress, RaggedAndPaddedRequestsAreAsIfAlone) {
  for (const Form& form : forms({1, 2, 4})) {
    MLA_TRACE(testing::Message() << form);
    Random random(static_cast<uint32_t>(form.ratio) + 3);
    const Layer layer(form, random);
    std::vector<Sequence> sequences;
    for (int i = 0; i < 5; ++i) sequences.emplace_back(form, 20, random);
    const int32_t block = form.rows() + 1;
    States states(form, 5, block, 1);
    // Each call begins where the one before ended; the last request has nothing, or is all padding.
    const int64_t ends[4][5] = {{9, 3, 1, 0, 0}, {10, 3, 8, 2, 0}, {18, 7, 9, 2, 0}, {19, 20, 20, 20, 0}};
    std::vector<Latents> all(5);
    for (int call = 0; call < 4; ++call) {
      std::vector<Part> parts;
      for (int b = 0; b < 5; ++b) {
        const int64_t begin = call == 0 ? 0 : ends[call - 1][b];
        parts.push_back({.sequence = &sequences[static_cast<size_t>(b)],
                         .begin = begin,
                         .end = ends[call][b],
                         .blocks = {4 - b},
                         .padding = begin == 0 ? b : 0});
      }
      const std::vector<Latents> latents = run(layer, states, parts);
      for (size_t b = 0; b < 5; ++b) all[b].insert(latents[b].begin(), latents[b].end());
    }
    for (size_t b = 0; b < 5; ++b) EXPECT_EQ(all[b], at_once(layer, sequences[b], ends[3][b])) << "request " << b;
    // Nothing was ever kept for the last one.
    for (int64_t i = 0; form.ratio > 1 && i < block * 2 * form.width(); ++i)
      ASSERT_TRUE(std::isnan(states.rows[static_cast<size_t>(i)])) << i;
  }
}

TEST(ReferenceCompress, RequestsOfEqualLengthNeedNoIndptr) {
  const Form form = {.ratio = 3};
  Random random(5);
  const Layer layer(form, random);
  const std::vector<Sequence> sequences = {Sequence(form, 9, random), Sequence(form, 9, random)};
  States states(form, 2, 3, 1);
  const std::vector<Part> parts = {{&sequences[0], 0, 7, {0}}, {&sequences[1], 0, 7, {1}}};
  Call call(layer, states, parts);
  call.args.queries = {.uniform_len = 7};
  compress(call.args);
  for (size_t b = 0; b < 2; ++b) EXPECT_EQ(call.of(parts[b], static_cast<int32_t>(b)), at_once(layer, sequences[b], 7));
}

TEST(ReferenceCompress, PagedStatesShareAPrefix) {
  for (const Form& form : forms({2, 3, 4}))
    for (int32_t block : {1, 2, 5}) {
      MLA_TRACE(testing::Message() << form << ", blocks of " << block);
      Random random(static_cast<uint32_t>(form.ratio) + 11);
      const Layer layer(form, random);
      const int32_t shared = 10, all = 22, columns = (all + block - 1) / block;
      const Sequence a(form, all, random);
      Sequence b(form, all, random);
      for (int64_t p = 0; p < shared; ++p) b.replace(p, a);
      std::vector<int32_t> of_a, of_b;  // entries of blocks that a request does not have yet are negative
      for (int32_t column = 0; column < columns; ++column) {
        of_a.push_back(2 * column);
        of_b.push_back(column < shared / block ? 2 * column : 2 * column + 1);
      }
      States states(form, 2 * columns, block, columns);
      const Latents expected_a = at_once(layer, a, all), expected_b = at_once(layer, b, all);
      EXPECT_EQ(run(layer, states, {{&a, 0, shared, of_a}})[0], between(expected_a, 0, shared));
      // Both go on, b for the first time; then a leaves, and b goes on alone.
      int64_t end_a = shared, end_b = shared;
      for (int64_t step : {1, 2, 3, 1, 4}) {
        const std::vector<Latents> latents =
            run(layer, states, {{&b, end_b, end_b + 1, of_b}, {&a, end_a, end_a + step, of_a}});
        EXPECT_EQ(latents[0], between(expected_b, end_b, end_b + 1));
        EXPECT_EQ(latents[1], between(expected_a, end_a, end_a + step));
        end_a += step;
        ++end_b;
      }
      EXPECT_EQ(run(layer, states, {{&b, end_b, all, of_b}})[0], between(expected_b, end_b, all));
    }
}

TEST(ReferenceCompress, TokensWithoutStateAreAbsent) {
  for (const Form& form : forms({2, 4})) {
    MLA_TRACE(testing::Message() << form);
    Random random(static_cast<uint32_t>(form.ratio) + 13);
    const Layer layer(form, random);
    const Sequence sequence(form, 20, random);
    // Blocks of two tokens. Those of tokens 4 ... 7 keep nothing.
    const std::vector<int32_t> blocks = {0, 1, -1, INT32_MIN, 2, 3, 4, 5, 6, 7};
    States states(form, 8, 2, 10);
    run(layer, states, {{&sequence, 0, 3, blocks}});
    for (int64_t begin = 3; begin < 20; ++begin) {
      // What the call itself brings is known in any case.
      const auto known = [&](int64_t p) { return p >= begin || p < 4 || p >= 8; };
      const Latents latents = run(layer, states, {{&sequence, begin, begin + 1, blocks}})[0];
      for (const auto& [last, latent] : latents) expect_near(latent, by_definition(layer, sequence, last, known));
    }
  }
}

}  // namespace
}  // namespace mla::reference
