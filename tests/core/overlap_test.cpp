// SPDX-License-Identifier: Apache-2.0
// Tests whether tensors share memory, against the sets of their bytes.
#include "core/overlap.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "mla/types.h"

namespace mla::test {
namespace {

std::array<std::byte, 1 << 20> arena;  // nobody reads or writes it

TensorView strided(int64_t first_byte, DType dtype, std::initializer_list<int64_t> shape,
                   std::initializer_list<int64_t> strides) {
  TensorView view = contiguous(arena.data() + first_byte, dtype, shape);
  size_t d = 0;
  for (int64_t stride : strides) view.stride[d++] = stride;
  return view;
}

void collect(const TensorView& view, int32_t dim, int64_t offset, std::set<int64_t>& bytes) {
  const auto element = static_cast<int64_t>(size_of(view.dtype));
  const auto d = static_cast<size_t>(dim);
  if (dim == view.ndim) {
    for (int64_t byte = 0; byte < element; ++byte) bytes.insert(offset + byte);
    return;
  }
  for (int64_t i = 0; i < view.shape[d]; ++i) collect(view, dim + 1, offset + i * view.stride[d] * element, bytes);
}

std::set<int64_t> bytes_of(const TensorView& view) {
  std::set<int64_t> bytes;
  collect(view, 0, static_cast<std::byte*>(view.data) - arena.data(), bytes);
  return bytes;
}

bool share_a_byte(const TensorView& a, const TensorView& b) {
  const std::set<int64_t> of_b = bytes_of(b);
  for (int64_t byte : bytes_of(a))
    if (of_b.count(byte) != 0) return true;
  return false;
}

std::string text_of(const TensorView& view) {
  std::string text = "at " + std::to_string(static_cast<std::byte*>(view.data) - arena.data()) + ", " +
                     std::string(name(view.dtype)) + ":";
  for (size_t d = 0; d < static_cast<size_t>(view.ndim); ++d)
    text += " " + std::to_string(view.shape[d]) + " by " + std::to_string(view.stride[d]);
  return text;
}

void expect_exact(const TensorView& a, const TensorView& b, bool shares) {
  EXPECT_EQ(core::overlap(a, b), shares) << text_of(a) << "; " << text_of(b);
  EXPECT_EQ(core::overlap(b, a), shares) << text_of(b) << "; " << text_of(a);
}

TEST(Overlap, BytesBehindOneAnother) {
  const TensorView a = strided(64, DType::kF32, {4}, {1});
  EXPECT_EQ(core::common_bytes(core::byte_range(a), core::byte_range(a)), 16U);
  for (int64_t at : {48, 80}) expect_exact(a, strided(at, DType::kF32, {4}, {1}), false);
  for (int64_t at : {49, 79}) expect_exact(a, strided(at, DType::kU8, {16}, {1}), true);
}

TEST(Overlap, RangesFollowStridesOfEitherSign) {
  const core::ByteRange range = core::byte_range(strided(100, DType::kBF16, {3, 4}, {-10, 2}));
  const auto base = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(arena.data()));
  EXPECT_EQ(range.begin - base, 60U);
  EXPECT_EQ(range.end - base, 114U);
}

TEST(Overlap, WhatCannotBeMemoryHasNoRange) {
  TensorView view = contiguous(arena.data(), DType::kU8, {2, 1});
  for (int64_t stride : {INT64_MAX - 1, int64_t{1} << 61, -(int64_t{1} << 61)}) {
    view.stride[0] = stride;
    const core::ByteRange range = core::byte_range(view);
    EXPECT_EQ(range.end - range.begin, 0U) << stride;
  }
}

TEST(Overlap, SlicesOfOneTensorAreApart) {
  constexpr int64_t kTokens = 7, kHeads = 5, kRow = 1088;
  const auto slice = [](int64_t first, int64_t width) {
    return strided(2 * first, DType::kBF16, {kTokens, kHeads, width}, {kHeads * kRow, kRow, 1});
  };
  expect_exact(slice(0, 512), slice(512, 64), false);
  expect_exact(slice(0, 576), slice(576, 512), false);
  expect_exact(slice(0, 576), slice(575, 513), true);
  // Heads of one tensor, and its tokens.
  const auto heads = [](int64_t first, int64_t count) {
    return strided(2 * first * 64, DType::kBF16, {kTokens, count, 64}, {8 * 64, 64, 1});
  };
  expect_exact(heads(0, 4), heads(4, 4), false);
  expect_exact(heads(0, 5), heads(4, 4), true);
  const auto every_other = [](int64_t first) { return strided(2 * first * 64, DType::kBF16, {50, 64}, {128, 1}); };
  expect_exact(every_other(0), every_other(1), false);
  expect_exact(every_other(0), every_other(2), true);
  // f32 statistics in the gaps of bf16 rows.
  expect_exact(slice(0, 512), strided(1024, DType::kF32, {kTokens, kHeads}, {kHeads * kRow / 2, kRow / 2}), false);
  expect_exact(slice(0, 513), strided(1024, DType::kF32, {kTokens, kHeads}, {kHeads * kRow / 2, kRow / 2}), true);
}

TEST(Overlap, LayersOfOneBufferAreApart) {
  constexpr int64_t kPages = 30, kPageSize = 4, kRow = 576, kPage = kPageSize * kRow;
  const auto layer = [](int64_t index) {
    return strided(2 * index * kPage, DType::kBF16, {kPages, kPageSize, kRow}, {5 * kPage, kRow, 1});
  };
  for (int64_t i = 0; i < 5; ++i)
    for (int64_t j = 0; j < 5; ++j) expect_exact(layer(i), layer(j), i == j);
  // Rows in one page of the next layer, and rows that reach into the page after it.
  const auto rows = [](int64_t first, int64_t count) {
    return strided(2 * (6 * kPage + first * kRow), DType::kBF16, {count, kRow}, {kRow, 1});
  };
  expect_exact(layer(0), rows(0, kPageSize), false);
  expect_exact(layer(0), rows(0, 4 * kPageSize), false);
  expect_exact(layer(0), rows(1, 4 * kPageSize), true);
  expect_exact(layer(2), rows(0, kPageSize), false);
  expect_exact(layer(2), rows(1, kPageSize), true);
  // Pages of four and of one, in the same buffer.
  const TensorView large = strided(0, DType::kU8, {7, 3 * 100}, {400, 1});
  expect_exact(large, strided(300, DType::kU8, {7, 100}, {400, 1}), false);
  expect_exact(large, strided(0, DType::kU8, {28, 100}, {100, 1}), true);
}

/// Returns a view of up to three dimensions, with shifts and strides small enough to meet others often.
TensorView random_view(std::mt19937& random) {
  const auto below = [&](int limit) { return static_cast<int64_t>(random() % static_cast<unsigned>(limit)); };
  TensorView view{.data = arena.data() + (1 << 19) + 8 * below(40),
                  .dtype = std::array{DType::kU8, DType::kBF16, DType::kF32}[static_cast<size_t>(below(3))],
                  .ndim = static_cast<int32_t>(below(4))};
  int64_t unit = 1;
  for (size_t d = static_cast<size_t>(view.ndim); d-- > 0;) {
    view.shape[d] = 1 + below(5);
    switch (below(4)) {
      case 0: view.stride[d] = below(60) - 20; break;  // anything
      case 1: view.stride[d] = -unit; break;
      default: view.stride[d] = unit + (below(2) == 0 ? below(9) : 0);  // a tensor's, with gaps or without
    }
    unit = std::max<int64_t>(1, std::abs(view.stride[d]) * view.shape[d]);
  }
  return view;
}

TEST(Overlap, RandomViewsAgainstTheirBytes) {
  std::mt19937 random(20261123);
  int apart_but_interleaved = 0, shared = 0;
  for (int i = 0; i < 20000; ++i) {
    const TensorView a = random_view(random), b = random_view(random);
    const bool shares = share_a_byte(a, b);
    ASSERT_EQ(core::overlap(a, b), shares) << "case " << i << ", " << text_of(a) << "; " << text_of(b);
    const bool ranges_meet = core::common_bytes(core::byte_range(a), core::byte_range(b)) > 0;
    shared += shares ? 1 : 0;
    apart_but_interleaved += ranges_meet && !shares ? 1 : 0;
  }
  EXPECT_GT(shared, 1000);
  EXPECT_GT(apart_but_interleaved, 1000);
}

TEST(Overlap, WhatWouldTakeTooLongCountsAsApart) {
  // Of 900 bytes each, far from one another, the first alone is the same.
  const TensorView a = strided(0, DType::kU8, {900}, {1006}), b = strided(0, DType::kU8, {900}, {1007});
  EXPECT_TRUE(share_a_byte(a, b));
  EXPECT_FALSE(core::overlap(a, b));
}

}  // namespace
}  // namespace mla::test
