// SPDX-License-Identifier: Apache-2.0
#include "cuda/tile/key_range.cuh"

#include <gtest/gtest.h>

#include <cstdint>

namespace mla::MLA_CUDA_NAMESPACE {
namespace {

/// Returns whether the query sees the key, by the definition.
bool sees(int64_t position, int64_t key, int64_t kv_len, bool causal, int64_t window_left) {
  if (key >= kv_len || (causal && key > position)) return false;
  return window_left < 0 || key >= position - window_left;
}

TEST(VisibleKeys, AreThoseOfTheDefinition) {
  for (int kv_len = 0; kv_len <= 9; ++kv_len)
    for (int position = -4; position < 12; ++position)
      for (int window_left = -1; window_left <= 12; ++window_left)
        for (const bool causal : {false, true}) {
          const KeyRange range = visible_keys(position, kv_len, causal, window_left);
          for (int key = 0; key < 14; ++key)
            ASSERT_EQ(range.contains(key), sees(position, key, kv_len, causal, window_left))
                << "key " << key << " of " << kv_len << ", position " << position << ", window " << window_left << ", "
                << causal;
        }
}

TEST(VisibleKeys, FarPositionsAndWindowsDoNotWrap) {
  EXPECT_EQ(visible_keys(INT32_MAX - 1, INT32_MAX, true, INT32_MAX).begin, 0);
  EXPECT_EQ(visible_keys(INT32_MAX - 1, INT32_MAX, true, 0).begin, INT32_MAX - 1);
  EXPECT_EQ(visible_keys(INT32_MAX - 1, INT32_MAX, true, -1).end, INT32_MAX);
  EXPECT_EQ(visible_keys(INT32_MIN + 1, 5, true, INT32_MAX).end, 0);
  EXPECT_EQ(visible_keys(INT32_MIN + 1, 5, true, INT32_MAX).begin, 0);
}

}  // namespace
}  // namespace mla::MLA_CUDA_NAMESPACE
