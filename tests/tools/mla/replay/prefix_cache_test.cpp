// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/prefix_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "mla/replay/page_pool.h"

namespace mla::cli::replay {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::IsEmpty;

TEST(PagePool, TakesAllOrNothing) {
  PagePool pool(3);
  std::vector<int32_t> pages;
  EXPECT_FALSE(pool.allocate(4, pages));
  EXPECT_THAT(pages, IsEmpty());
  EXPECT_EQ(pool.num_free(), 3);
  ASSERT_TRUE(pool.allocate(2, pages));
  ASSERT_TRUE(pool.allocate(1, pages));
  EXPECT_THAT(pages, ::testing::UnorderedElementsAre(0, 1, 2));
  EXPECT_FALSE(pool.allocate(1, pages));
}

TEST(PagePool, APageIsFreeOnlyAfterItsLastUser) {
  PagePool pool(1);
  std::vector<int32_t> pages;
  ASSERT_TRUE(pool.allocate(1, pages));
  pool.retain(pages[0]);
  pool.release(pages[0]);
  EXPECT_EQ(pool.num_free(), 0);
  EXPECT_EQ(pool.ref_count(pages[0]), 1);
  pool.release(pages[0]);
  EXPECT_EQ(pool.num_free(), 1);
}

// Uses the cache as one request does, with one page a block.
struct User {
  std::vector<PrefixCache::NodeId> chain;
  std::vector<int32_t> pages;

  // Computes blocks with these ids, sharing what is known; returns how many were known.
  int32_t run(PagePool& pool, PrefixCache& cache, std::vector<int64_t> ids) {
    const int32_t hits = cache.acquire(ids, chain, pages);
    const auto missing = static_cast<int32_t>(ids.size()) - hits;
    EXPECT_TRUE(cache.make_room(missing));
    EXPECT_TRUE(pool.allocate(missing, pages));
    for (size_t i = static_cast<size_t>(hits); i < ids.size(); ++i)
      chain.push_back(
          cache.publish(chain.empty() ? PrefixCache::kRoot : chain.back(), ids[i], std::span(pages).subspan(i, 1)));
    return hits;
  }
  void finish(PagePool& pool, PrefixCache& cache) {
    for (int32_t page : pages) pool.release(page);
    cache.release(chain);
    *this = {};
  }
};

TEST(PrefixCache, SharesTheLongestPrefix) {
  PagePool pool(8);
  PrefixCache cache(pool, 1);
  User a, b, c;
  EXPECT_EQ(a.run(pool, cache, {1, 2, 3}), 0);
  EXPECT_EQ(b.run(pool, cache, {1, 2, 4}), 2);
  EXPECT_THAT(std::span(b.pages).first(2), ElementsAre(a.pages[0], a.pages[1]));
  EXPECT_NE(b.pages[2], a.pages[2]);
  EXPECT_EQ(pool.ref_count(a.pages[0]), 3);  // two requests and the cache
  // The same id behind another prefix is another block.
  EXPECT_EQ(c.run(pool, cache, {2, 3}), 0);
  EXPECT_EQ(pool.num_free(), 8 - 6);
}

TEST(PrefixCache, KnowsBlocksAfterTheirRequestIsGone) {
  PagePool pool(4);
  PrefixCache cache(pool, 1);
  User a;
  a.run(pool, cache, {1, 2});
  const std::vector<int32_t> pages = a.pages;
  a.finish(pool, cache);
  EXPECT_EQ(pool.num_free(), 2);
  EXPECT_EQ(cache.num_evictable_pages(), 2);
  EXPECT_EQ(a.run(pool, cache, {1, 2}), 2);
  EXPECT_THAT(a.pages, ElementsAreArray(pages));
  EXPECT_EQ(cache.num_evictable_pages(), 0);
}

TEST(PrefixCache, ForgetsTheLeastRecentlyUsedLeafFirst) {
  PagePool pool(4);
  PrefixCache cache(pool, 1);
  User a;
  a.run(pool, cache, {1, 2});
  a.finish(pool, cache);
  a.run(pool, cache, {7, 8});
  a.finish(pool, cache);
  a.run(pool, cache, {1});  // uses block 1 again, so its child 2 is the oldest
  a.finish(pool, cache);
  ASSERT_TRUE(cache.make_room(1));
  EXPECT_EQ(a.run(pool, cache, {1, 9}), 1);  // 1 is still known; its child 2 gave up its page
  EXPECT_EQ(cache.num_evicted_blocks(), 1);
  a.finish(pool, cache);
  ASSERT_TRUE(cache.make_room(2));
  std::vector<PrefixCache::NodeId> chain;
  std::vector<int32_t> pages;
  const std::vector<int64_t> old = {7, 8};
  EXPECT_EQ(cache.acquire(old, chain, pages), 0);  // 8, then 7
}

TEST(PrefixCache, NeverForgetsWhatIsUsed) {
  PagePool pool(3);
  PrefixCache cache(pool, 1);
  User a;
  a.run(pool, cache, {1, 2});
  EXPECT_FALSE(cache.make_room(2));
  EXPECT_TRUE(cache.make_room(1));
  EXPECT_EQ(cache.num_evicted_blocks(), 0);
}

TEST(PrefixCache, TheSecondOfTwoEqualBlocksStaysPrivate) {
  PagePool pool(4);
  PrefixCache cache(pool, 1);
  User a, b;
  a.run(pool, cache, {1});
  ASSERT_TRUE(pool.allocate(1, b.pages));
  b.chain.push_back(cache.publish(PrefixCache::kRoot, 1, b.pages));
  EXPECT_EQ(b.chain, a.chain);
  EXPECT_EQ(pool.ref_count(b.pages[0]), 1);
  b.finish(pool, cache);
  EXPECT_EQ(pool.num_free(), 3);
  a.finish(pool, cache);
  EXPECT_EQ(cache.num_evictable_pages(), 1);
}

TEST(PrefixCache, BlocksOfSeveralPages) {
  PagePool pool(4);
  PrefixCache cache(pool, 2);
  std::vector<int32_t> pages;
  ASSERT_TRUE(pool.allocate(4, pages));
  std::vector<PrefixCache::NodeId> chain = {cache.publish(PrefixCache::kRoot, 5, std::span(pages).first(2))};
  chain.push_back(cache.publish(chain[0], 6, std::span(pages).last(2)));
  for (int32_t page : pages) pool.release(page);
  cache.release(chain);
  EXPECT_EQ(cache.num_evictable_pages(), 4);
  ASSERT_TRUE(cache.make_room(1));
  EXPECT_EQ(pool.num_free(), 2);
  std::vector<PrefixCache::NodeId> found;
  std::vector<int32_t> shared;
  const std::vector<int64_t> ids = {5, 6};
  EXPECT_EQ(cache.acquire(ids, found, shared), 1);
  EXPECT_THAT(shared, ElementsAre(pages[0], pages[1]));
}

}  // namespace
}  // namespace mla::cli::replay
