// SPDX-License-Identifier: Apache-2.0
// Tests which rows of sparse attention stay in the L2 cache.
#include <gtest/gtest.h>

#include "cuda/attention/absorbed_problem.cuh"

namespace mla::MLA_CUDA_NAMESPACE {
namespace {

core::DecodeSparseArgs listing(int64_t num_tokens, int32_t topk, int64_t slots) {
  core::DecodeSparseArgs args;
  args.num_tokens = num_tokens;
  args.num_pools = 1;
  args.pools[0].topk = topk;
  args.pools[0].cache.page_size = 64;
  args.pools[0].cache.num_pages = slots / 64;
  return args;
}

bool stay(const core::DecodeSparseArgs& args) { return row_policy_of(args).bits == ptx::kEvictLast.bits; }

TEST(RowPolicy, RowsOfManyTokensStay) {
  EXPECT_TRUE(stay(listing(512, 2048, int64_t{1} << 30)));
  EXPECT_FALSE(stay(listing(511, 2048, int64_t{1} << 30)));
}

TEST(RowPolicy, RowsThatListsNameOftenStay) {
  EXPECT_TRUE(stay(listing(128, 2048, 32768)));
  EXPECT_FALSE(stay(listing(127, 2048, 32768)));
  EXPECT_FALSE(stay(listing(64, 2048, 65536)));
}

TEST(RowPolicy, BothPoolsCount) {
  core::DecodeSparseArgs args = listing(64, 1024, 8192);
  EXPECT_TRUE(stay(args));
  args.num_pools = 2;
  args.pools[1] = args.pools[0];
  args.pools[1].topk = 64;
  EXPECT_FALSE(stay(args));
}

TEST(RowPolicy, ProductsAreOf64Bits) { EXPECT_TRUE(stay(listing(500, INT32_MAX, 4096))); }

}  // namespace
}  // namespace mla::MLA_CUDA_NAMESPACE
