// SPDX-License-Identifier: Apache-2.0
#include "mla/suggest.h"

#include <gtest/gtest.h>

namespace mla::cli {
namespace {

TEST(EditDistance, CountsLettersThatChange) {
  EXPECT_EQ(edit_distance("", ""), 0U);
  EXPECT_EQ(edit_distance("", "run"), 3U);
  EXPECT_EQ(edit_distance("check", "check"), 0U);
  EXPECT_EQ(edit_distance("chek", "check"), 1U);
  EXPECT_EQ(edit_distance("chekc", "check"), 1U) << "neighbours that are swapped are one mistake";
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3U);
  EXPECT_EQ(edit_distance("sitting", "kitten"), 3U);
}

TEST(DidYouMean, NamesTheNearestWordThatIsNear) {
  const std::vector<std::string> known = {"info", "explain", "run", "replay", "check", "bench"};
  EXPECT_EQ(did_you_mean("explian", known), "; did you mean 'explain'?");
  EXPECT_EQ(did_you_mean("bnech", known), "; did you mean 'bench'?");
  EXPECT_EQ(did_you_mean("repaly", known), "; did you mean 'replay'?");
  EXPECT_EQ(did_you_mean("frobnicate", known), "");
  EXPECT_EQ(did_you_mean("x", known), "");
  EXPECT_EQ(did_you_mean("", known), "");
  EXPECT_EQ(did_you_mean("explain", {}), "");
}

}  // namespace
}  // namespace mla::cli
