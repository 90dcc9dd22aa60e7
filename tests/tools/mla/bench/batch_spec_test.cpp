// SPDX-License-Identifier: Apache-2.0
#include "mla/bench/batch_spec.h"

#include "tools/mla/expect_usage_error.h"

namespace mla::bench {
namespace {

using cli::expect_usage_error;
using testing::ElementsAre;

TEST(BatchSpec, ReadsVllmsExamples) {
  EXPECT_THAT(parse_batch_spec("--batch-spec", "q2k"), ElementsAre(Request{2048, 2048}));
  EXPECT_THAT(parse_batch_spec("--batch-spec", "q1s1k"), ElementsAre(Request{1, 1024}));
  EXPECT_THAT(parse_batch_spec("--batch-spec", "q4kv1k"), ElementsAre(Request{4, 1024}));
  EXPECT_THAT(parse_batch_spec("--batch-spec", "q4kkv8k"), ElementsAre(Request{4096, 8192}));
  EXPECT_EQ(parse_batch_spec("--batch-spec", "8q1s4k"), std::vector<Request>(8, Request{1, 4096}));
  EXPECT_THAT(
      parse_batch_spec("--batch-spec", "2q2k_3q1s1k"),
      ElementsAre(Request{2048, 2048}, Request{2048, 2048}, Request{1, 1024}, Request{1, 1024}, Request{1, 1024}));
}

TEST(BatchSpec, TakesPlainNumbersAndEmptyRequests) {
  EXPECT_THAT(parse_batch_spec("--batch-spec", "q100s300"), ElementsAre(Request{100, 300}));
  EXPECT_THAT(parse_batch_spec("--batch-spec", "q1s0"), ElementsAre(Request{1, 0}));
}

TEST(BatchSpec, NamesTheSegmentAndThePlace) {
  for (const char* text : {"", "8", "s4k", "q", "q1s", "q1s4kk", "8q1s4k_", "_q1", "q1 s4k", "-1q1", "q1x"})
    expect_usage_error([&] { parse_batch_spec("--batch-spec", text); }, {"--batch-spec", "expected"});
  expect_usage_error([] { parse_batch_spec("--batch-spec", "2q2k_8z1s4k"); }, {"'8z1s4k'", "'z1s4k'"});
}

TEST(BatchSpec, RefusesNumbersOutOfRange) {
  for (const char* text : {"0q1", "q0", "99999999999999999999q1", "q99999999999999999999", "q1s2000000k", "65536q1_q1"})
    expect_usage_error([&] { parse_batch_spec("--batch-spec", text); }, {"--batch-spec", "expected"});
}

}  // namespace
}  // namespace mla::bench
