// SPDX-License-Identifier: Apache-2.0
// Tests which neighbours form a group, and what the lists of the two decodes say then.
#include "plan/shared_prefix.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <vector>

namespace mla::schedule {
namespace {

using List = std::vector<int32_t>;

/// Holds requests with pages of four tokens, and what is found.
struct Batch {
  std::vector<List> pages;
  List kv_len, q_len;

  core::SharedPrefixArgs args = {};
  SharedPrefixes found = {};
  List table = {}, indptr = {0}, qo_indptr = {0};
  List common = {}, group_qo = {}, group_kv = {}, group_len = {}, own_kv = {}, own_len = {};

  void find() {
    const size_t n = pages.size();
    for (size_t b = 0; b < n; ++b) {
      table.insert(table.end(), pages[b].begin(), pages[b].end());
      indptr.push_back(static_cast<int32_t>(table.size()));
      qo_indptr.push_back(qo_indptr.back() + q_len[b]);
    }
    for (List* list : {&common, &group_len, &own_len}) list->assign(n, -7);
    for (List* list : {&group_qo, &group_kv, &own_kv}) list->assign(n + 1, -7);
    args = {.batch_size = static_cast<int32_t>(n),
            .pages = {.page_size = 4,
                      .batch_size = static_cast<int32_t>(n),
                      .table = table.data(),
                      .kv_indptr = indptr.data(),
                      .table_entries = static_cast<int64_t>(table.size()),
                      .kv_len = kv_len.data()},
            .queries = {.indptr = qo_indptr.data()},
            .common_pages = common.data(),
            .group_qo_indptr = group_qo.data(),
            .group_kv_indptr = group_kv.data(),
            .group_kv_len = group_len.data(),
            .own_kv_indptr = own_kv.data(),
            .own_kv_len = own_len.data()};
    found = find_shared_prefixes(args);
  }
};

TEST(SharedPrefixes, ListsOfTwoGroupsAndASingle) {
  Batch batch{.pages = {{5, 6, 7}, {5, 6, 8}, {5, 6}, {1, 2}, {3, 4, 9}, {3, 4}},
              .kv_len = {12, 9, 9, 8, 12, 9},
              .q_len = {1, 1, 1, 2, 1, 1}};
  batch.pages[2].push_back(11);
  batch.pages[5].push_back(12);
  batch.find();
  EXPECT_EQ(batch.group_qo, (List{0, 3, 5, 7, 7, 7, 7}));
  EXPECT_EQ(batch.group_len, (List{8, 0, 8, 0, 0, 0}));
  EXPECT_EQ(batch.group_kv, (List{0, 9, 11, 17, 17, 17, 17}));
  EXPECT_EQ(batch.own_kv, (List{2, 5, 8, 9, 13, 16, 17}));
  EXPECT_EQ(batch.own_len, (List{4, 1, 1, 8, 4, 1}));
  EXPECT_EQ(batch.found.num_groups, 2);
  EXPECT_EQ(batch.found.saved_keys, 24);
  EXPECT_TRUE(same_shared_prefixes(batch.args));
  batch.table[4] = 7;  // request 1 shares a page less
  EXPECT_FALSE(same_shared_prefixes(batch.args));
}

TEST(SharedPrefixes, QueriesAndPartlyFilledPagesAreNotShared) {
  // Of 8 keys the last is the query: one page of earlier keys is full. A request without queries has all its pages.
  Batch batch{.pages = {{5, 6}, {5, 6}, {5, 6}}, .kv_len = {8, 8, 8}, .q_len = {1, 5, 0}};
  batch.find();
  EXPECT_EQ(batch.common, (List{0, 0, 0}));
  Batch whole{.pages = {{5, 6}, {5, 6}}, .kv_len = {8, 8}, .q_len = {0, 0}};
  whole.find();
  EXPECT_EQ(whole.common, (List{0, 2}));
  EXPECT_EQ(whole.own_len, (List{0, 0}));
}

TEST(SharedPrefixes, ALongerPrefixBehindBeatsAShortOne) {
  // Requests 1 to 3 share three pages, 0 and 1 only the first.
  Batch batch{.pages = {{1, 9, 9, 9}, {1, 2, 3, 4}, {1, 2, 3, 5}, {1, 2, 3, 6}},
              .kv_len = {14, 14, 14, 14},
              .q_len = {1, 1, 1, 1}};
  batch.find();
  EXPECT_EQ(batch.group_len, (List{0, 12, 0, 0}));
  EXPECT_EQ(batch.own_len, (List{14, 2, 2, 2}));
}

TEST(SharedPrefixes, ARequestThatWouldShortenThePrefixTooMuchBeginsAGroup) {
  Batch batch{.pages = {{1, 2, 3, 4}, {1, 2, 3, 5}, {1, 7, 8, 9}, {1, 7, 8, 9}},
              .kv_len = {13, 13, 13, 13},
              .q_len = {1, 1, 1, 1}};
  batch.find();
  EXPECT_EQ(batch.group_len, (List{12, 12, 0, 0}));
  EXPECT_EQ(batch.found.saved_keys, 24);
}

TEST(SharedPrefixes, LengthsBeyondTheTableAreClamped) {
  Batch batch{.pages = {{1, 2}, {1, 2}, {1}}, .kv_len = {100, 2147483647, -5}, .q_len = {1, 1, 1}};
  batch.find();
  EXPECT_EQ(batch.own_len, (List{4, 4, 0}));
  EXPECT_EQ(batch.group_len, (List{4, 0, 0}));
}

}  // namespace
}  // namespace mla::schedule
