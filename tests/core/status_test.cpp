// SPDX-License-Identifier: Apache-2.0
// Tests messages in the words of a binding.
#include "mla/status.h"

#include <gtest/gtest.h>

#include "core/checks.h"

namespace mla::test {
namespace {

TEST(Status, CallsFieldsWhatABindingCallsThem) {
  const Status status =
      Status::naming_fields(StatusCode::kUnsupported,
                            "decode: `pool.cache.kv`: expected `o`, `o_scale` or `options.attn_sink`, got `o.dtype`");
  EXPECT_EQ(status.message(), "decode: pool.cache.kv: expected o, o_scale or options.attn_sink, got o.dtype");
  const FieldName names[] = {{"o", "out"}, {"o.", "out."}, {"options.", ""}, {"pool.cache.", "cache."}, {"pool.", ""}};
  const Status renamed = status.renamed(names);
  EXPECT_EQ(renamed.message(), "decode: cache.kv: expected out, o_scale or attn_sink, got out.dtype");
  EXPECT_EQ(renamed.code(), StatusCode::kUnsupported);
  const FieldName again[] = {{"out", "result"}, {"cache.kv", "k_cache"}};
  EXPECT_EQ(renamed.renamed(again).message(), "decode: k_cache: expected result, o_scale or attn_sink, got out.dtype");
}

TEST(Status, LeavesMessagesAloneThatNameNoField) {
  const Status status(StatusCode::kInternal, "what `somebody` said of o");
  const FieldName names[] = {{"o", "out"}, {"somebody", "nobody"}};
  EXPECT_EQ(status.renamed(names).message(), "what `somebody` said of o");
  EXPECT_TRUE(Status().renamed(names).ok());
}

TEST(Checks, NameFieldsByTheirWholePaths) {
  core::Checks check(Op::kDecodeSparse, core::Scope::kAll);
  {
    const core::Checks::Within pool(check, "pool");
    const core::Checks::Within cache(check, "cache");
    check.fail("kv", "expected `ckv`, where `/q` is, got {}", 3);
  }
  const Status status = check.take();
  EXPECT_EQ(status.message(), "decode_sparse: pool.cache.kv: expected pool.cache.ckv, where q is, got 3");
  const FieldName names[] = {{"pool.", ""}, {"q", "query"}};
  EXPECT_EQ(status.renamed(names).message(), "decode_sparse: cache.kv: expected cache.ckv, where query is, got 3");
}

}  // namespace
}  // namespace mla::test
