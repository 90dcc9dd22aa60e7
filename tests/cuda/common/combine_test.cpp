// SPDX-License-Identifier: Apache-2.0
// Tests combine on an emulated GPU: plans a batch, invents the partial states, and compares with a merge in double.
#include <bit>
#include <cmath>
#include <limits>
#include <numbers>
#include <random>
#include <utility>
#include <vector>

#include "cuda/common/batches.h"
#include "mla/numeric.h"
#include "trace.h"

namespace mla::plan_test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr uint8_t kUntouched = 0x5A;

struct Case {
  int32_t d_v = 512;
  DType o_dtype = DType::kBF16;
  core::LseForm lse_form = {};
  bool with_sink = false;
  bool with_lse = true;
  int32_t odd_stride = 0;  // elements between rows of o beyond d_v
  int32_t odd_offset = 0;  // elements before o
  int32_t num_heads = 16;
  bool batch_invariant = false;
  std::vector<int32_t> kv_len = {5000, 64, 0, 12345, 300};
  std::vector<int32_t> qo_indptr = {};
  int32_t uniform_len = 1;
};

float element(const std::byte* data, DType dtype, int64_t index) {
  const auto at = [&]<class T>(T value) {
    std::memcpy(&value, data + static_cast<size_t>(index) * sizeof(T), sizeof(T));
    return value;
  };
  switch (dtype) {
    case DType::kBF16: return bf16_to_f32(at(uint16_t{}));
    case DType::kF16: return f16_to_f32(at(uint16_t{}));
    case DType::kE4M3: return e4m3_to_f32(at(uint8_t{}));
    default: return at(0.0F);
  }
}

/// Returns half a unit in the last place of 1, and a little more for f32 arithmetic.
double rounding(DType dtype) {
  switch (dtype) {
    case DType::kBF16: return 0x1.01p-8;
    case DType::kF16: return 0x1.02p-11;
    case DType::kE4M3: return 0x1.002p-4;
    default: return 3e-6;
  }
}

struct Merged {
  double max = -std::numeric_limits<double>::infinity();
  double sum = 0;
  std::vector<double> o;
};

class Fixture {
 public:
  Fixture(const Case& c, uint64_t seed) : c_(c), random_(static_cast<uint32_t>(seed)) {
    batch_.num_heads = c.num_heads;
    batch_.kv_len = c.kv_len;
    batch_.qo_indptr = c.qo_indptr;
    batch_.uniform_len = c.uniform_len;
    shape_ = batch_.shape(16, 64, 20);
    shape_.d_v = c.d_v;
    shape_.batch_invariant = c.batch_invariant;
    stride_head_ = c.d_v + c.odd_stride;
    const auto rows = static_cast<size_t>(batch_.num_tokens() * c.num_heads);
    o_.assign(rows * static_cast<size_t>(stride_head_) * size_of(c.o_dtype) + 64, std::byte{kUntouched});
    lse_.assign(rows, kSentinel);
    max_logits_.assign(rows, kSentinel);
    for (int32_t h = 0; h < c.num_heads; ++h)
      sink_.push_back(h == 1 ? -kInfinity : h == 2 ? kInfinity : normal_(random_) * 5.0F);
  }

  template <class Args>
  void fill_outputs(Args& args) {
    args.num_tokens = batch_.num_tokens();
    args.num_heads = c_.num_heads;
    args.d_v = c_.d_v;
    args.options.attn_sink = c_.with_sink ? sink_.data() : nullptr;
    args.lse_form = c_.lse_form;
    args.o_dtype = c_.o_dtype;
    args.o_scale = c_.o_dtype == DType::kE4M3 ? &o_scale_ : nullptr;
    args.o = o_begin();
    args.o_stride_token = int64_t{stride_head_} * c_.num_heads;
    args.o_stride_head = stride_head_;
    args.lse = c_.with_lse ? lse_.data() : nullptr;
    args.lse_stride_token = c_.num_heads;
    args.lse_stride_head = 1;
  }

  void invent_partials(const cuda::WorkList& list) {
    const int64_t states = int64_t{list.max_slots} * list.block_rows;
    for (int64_t i = 0; i < states; ++i) {
      const bool empty = random_() % 5 == 0;
      list.partial_max[i] = empty ? -kInfinity : normal_(random_) * 20.0F;
      list.partial_sum[i] = empty ? kNan : 1.0F + std::abs(normal_(random_)) * 100.0F;
      for (int32_t c = 0; c < c_.d_v; ++c)
        list.partial_o[i * c_.d_v + c] = empty ? kNan : normal_(random_) * list.partial_sum[i];
    }
    // A row that no split saw a key for.
    for (int32_t m = 0; m < list.header->merges.num_merges; ++m)
      for (int32_t i = 0; i < list.merges[m].num_splits; ++i)
        list.partial_max[state(list, list.merges[m], kBlindRow, i)] = -kInfinity;
  }

  void check(const cuda::WorkList& list) {
    std::vector<bool> merged(lse_.size(), false);
    for (int32_t m = 0; m < list.header->merges.num_merges; ++m) {
      const cuda::Merge& merge = list.merges[m];
      const int32_t rows = std::min(merge.num_rows - merge.row_begin, list.header->row_lanes * list.block_rows);
      for (int32_t row = 0; row < rows; ++row) {
        const int32_t token = merge.token_begin + (merge.row_begin + row) / c_.num_heads;
        const int32_t head = (merge.row_begin + row) % c_.num_heads;
        merged[static_cast<size_t>(token * c_.num_heads + head)] = true;
        check_row(merge_in_double(list, merge, row), token, head);
        if (testing::Test::HasFailure()) return;
      }
    }
    EXPECT_GT(list.header->merges.num_merges, 0);
    for (size_t i = 0; i < merged.size(); ++i)
      if (!merged[i]) check_untouched(i);
  }

  const cuda::WorkShape& shape() const { return shape_; }
  const DecodeBatch& batch() const { return batch_; }
  float* max_logits() { return max_logits_.data(); }
  void expect_max_logits() { expects_max_logits_ = true; }

 private:
  static constexpr int32_t kBlindRow = 3;
  static constexpr float kSentinel = 12345.0F;

  Case c_;
  DecodeBatch batch_;
  cuda::WorkShape shape_;
  std::mt19937 random_;
  std::normal_distribution<float> normal_;
  int32_t stride_head_ = 0;
  float o_scale_ = 0.37F;
  bool expects_max_logits_ = false;
  std::vector<std::byte> o_;
  std::vector<float> lse_, max_logits_, sink_;

  std::byte* o_begin() { return o_.data() + static_cast<size_t>(c_.odd_offset) * size_of(c_.o_dtype); }

  static int64_t state(const cuda::WorkList& list, const cuda::Merge& merge, int32_t row, int32_t split) {
    const int32_t slot = split == 0 ? merge.first_slot : merge.rest_slot + (split - 1) * merge.slot_stride;
    return (int64_t{slot} + row / list.block_rows) * list.block_rows + row % list.block_rows;
  }

  Merged merge_in_double(const cuda::WorkList& list, const cuda::Merge& merge, int32_t row) const {
    Merged merged{.o = std::vector<double>(static_cast<size_t>(c_.d_v))};
    for (int32_t i = 0; i < merge.num_splits; ++i)
      merged.max = std::max<double>(merged.max, list.partial_max[state(list, merge, row, i)]);
    for (int32_t i = 0; i < merge.num_splits; ++i) {
      const int64_t at = state(list, merge, row, i);
      if (list.partial_max[at] == -kInfinity) continue;
      const double weight = std::exp2(list.partial_max[at] - merged.max);
      merged.sum += weight * list.partial_sum[at];
      for (int32_t c = 0; c < c_.d_v; ++c) merged.o[static_cast<size_t>(c)] += weight * list.partial_o[at * c_.d_v + c];
    }
    return merged;
  }

  void check_row(const Merged& merged, int32_t token, int32_t head) {
    const bool blind = merged.sum == 0;
    const double lse = blind ? -kInfinity : (merged.max + std::log2(merged.sum)) * std::numbers::ln2;
    const auto at = static_cast<size_t>(token * c_.num_heads + head);
    if (c_.with_lse) {
      const double expected = c_.lse_form.base == LseBase::kTwo ? lse * std::numbers::log2e : lse;
      if (blind) {
        EXPECT_EQ(lse_[at], c_.lse_form.inf_without_keys ? kInfinity : -kInfinity);
      } else {
        EXPECT_NEAR(lse_[at], expected, 1e-5 * (1 + std::abs(expected)));
      }
    }
    if (expects_max_logits_) {
      if (blind) {
        EXPECT_EQ(max_logits_[at], -kInfinity);
      } else {
        EXPECT_NEAR(max_logits_[at], merged.max * std::numbers::ln2, 1e-5 * (1 + std::abs(merged.max)));
      }
    }
    double factor = blind ? 0 : 1 / merged.sum;
    const float sink = sink_[static_cast<size_t>(head)];
    if (c_.with_sink && sink == kInfinity) factor = 0;
    if (c_.with_sink && std::isfinite(sink)) factor /= 1 + std::exp(sink - lse);
    if (c_.o_dtype == DType::kE4M3) factor /= o_scale_;
    const double least = c_.o_dtype == DType::kE4M3 ? 0x1p-10 : 1e-6;
    for (int32_t c = 0; c < c_.d_v; ++c) {
      double expected = blind ? 0 : merged.o[static_cast<size_t>(c)] * factor;
      if (c_.o_dtype == DType::kE4M3) expected = std::clamp<double>(expected, -kE4M3Max, kE4M3Max);
      const float o = element(o_begin(), c_.o_dtype, static_cast<int64_t>(at) * stride_head_ + c);
      const double cancelled = blind ? 0 : 3e-6 * factor * merged.sum;  // splits of either sign
      ASSERT_NEAR(o, expected, std::abs(expected) * rounding(c_.o_dtype) + least + cancelled)
          << "token " << token << " head " << head << " column " << c;
    }
  }

  void check_untouched(size_t row) {
    EXPECT_EQ(lse_[row], kSentinel) << "row " << row;
    EXPECT_EQ(max_logits_[row], kSentinel) << "row " << row;
    const size_t bytes = size_of(c_.o_dtype);
    for (size_t i = 0; i < static_cast<size_t>(c_.d_v) * bytes; ++i)
      ASSERT_EQ(o_begin()[row * static_cast<size_t>(stride_head_) * bytes + i], std::byte{kUntouched}) << "row " << row;
  }
};

void check_decode(const Case& c, uint64_t seed) {
  Fixture fixture(c, seed);
  core::DecodeArgs args = fixture.batch().args();
  fixture.fill_outputs(args);
  ListMemory memory(fixture.shape());
  expect_planned(fixture.shape(), args, memory, seed);
  fixture.invent_partials(memory.list);
  TestQueue queue(seed);
  const Status status = combine_work(fixture.shape(), args, memory.list, false, queue);
  ASSERT_TRUE(status.ok()) << status.message();
  fixture.check(memory.list);
}

/// Merges on a GPU of `num_sms` SMs, checks the outputs, and returns them. They are in f32.
std::vector<float> merged_outputs(const Case& c, uint64_t seed, int32_t num_sms) {
  MLA_TRACE(testing::Message() << num_sms << " multiprocessors");
  Fixture fixture(c, 19);
  core::DecodeArgs args = fixture.batch().args();
  fixture.fill_outputs(args);
  ListMemory memory(fixture.shape());
  expect_planned(fixture.shape(), args, memory);
  fixture.invent_partials(memory.list);
  TestQueue queue(seed, num_sms);
  EXPECT_TRUE(combine_work(fixture.shape(), args, memory.list, false, queue).ok());
  fixture.check(memory.list);
  const auto* o = static_cast<const float*>(args.o);
  return {o, o + args.num_tokens * args.num_heads * args.d_v};
}

/// Expects the same bits of outputs on GPUs of each number of SMs, in as many orders of threads.
void expect_same_bits(const Case& c, std::initializer_list<int32_t> num_sms) {
  std::vector<float> first;
  uint64_t seed = 0;
  for (const int32_t sms : num_sms) {
    const std::vector<float> now = merged_outputs(c, ++seed, sms);
    if (first.empty()) first = now;
    EXPECT_EQ(std::memcmp(first.data(), now.data(), now.size() * sizeof(float)), 0);
  }
}

TEST(Combine, EveryOutputType) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32, DType::kE4M3})
    for (const int32_t odd : {0, 1, 2}) {
      MLA_TRACE(testing::Message() << name(dtype) << " with odd strides " << odd);
      check_decode({.o_dtype = dtype, .with_sink = odd == 1, .odd_stride = odd, .odd_offset = odd}, 7);
      if (HasFailure()) return;
    }
}

TEST(Combine, EveryWidth) {
  for (const int32_t d_v : {512, 256, 128, 640}) {
    MLA_TRACE(d_v);
    check_decode({.d_v = d_v, .o_dtype = DType::kF32}, 8);
    if (HasFailure()) return;
  }
}

// Slices of few rows, more than blocks: each block's next one is another slice of another row.
TEST(Combine, MoreSlicesThanBlocks) {
  check_decode({.d_v = 640, .o_dtype = DType::kF32, .num_heads = 3, .kv_len = {5000, 64, 12345}}, 20);
  check_decode({.d_v = 384, .num_heads = 5, .kv_len = {0, 7000, 12345}}, 21);
}

TEST(Combine, SinksAndFormsOfLse) {
  for (const core::LseForm form : {core::LseForm{LseBase::kE, false}, {LseBase::kTwo, false}, {LseBase::kE, true}})
    for (const bool with_sink : {false, true})
      for (const bool with_lse : {false, true})
        check_decode({.o_dtype = DType::kF32, .lse_form = form, .with_sink = with_sink, .with_lse = with_lse}, 9);
}

TEST(Combine, LanesRaggedQueriesAndInvariantPortions) {
  check_decode({.d_v = 128, .num_heads = 128}, 10);                                  // eight lanes
  check_decode({.d_v = 128, .num_heads = 24, .uniform_len = 2}, 11);                 // three
  check_decode({.d_v = 128, .num_heads = 24, .qo_indptr = {0, 1, 3, 4, 9, 9}}, 12);  // blocks of rows that are not full
  check_decode({.d_v = 128, .num_heads = 24, .batch_invariant = true, .qo_indptr = {0, 1, 3, 4, 9, 9}}, 13);
  check_decode({.d_v = 128, .num_heads = 128, .batch_invariant = true}, 14);
}

/// Merges requests of these lengths, of which the first is cut into `least_splits` to `most_splits` splits if the grid
/// of attention has so many blocks, on a GPU of `num_sms` SMs.
void expect_merged(const std::vector<int32_t>& kv_len, int32_t grid_blocks, int32_t least_splits, int32_t most_splits,
                   int32_t num_sms = 132) {
  MLA_TRACE(testing::Message() << grid_blocks << " blocks");
  Fixture fixture({.d_v = 128, .kv_len = kv_len}, 15);
  cuda::WorkShape shape = fixture.shape();
  shape.max_grid_blocks = grid_blocks;
  core::DecodeArgs args = fixture.batch().args();
  fixture.fill_outputs(args);
  ListMemory memory(shape);
  expect_planned(shape, args, memory);
  ASSERT_EQ(memory.list.header->merges.num_merges, static_cast<int32_t>(kv_len.size()));
  EXPECT_GE(memory.list.merges[0].num_splits, least_splits);
  EXPECT_LE(memory.list.merges[0].num_splits, most_splits);
  fixture.invent_partials(memory.list);
  TestQueue queue(15, num_sms);
  ASSERT_TRUE(combine_work(shape, args, memory.list, false, queue).ok());
  fixture.check(memory.list);
}

// The states of a row are more than the lanes of a warp.
TEST(Combine, ManySplits) { expect_merged({131072}, 132, 101, 132); }

// So are the splits that one warp adds, where slices have teams of one and of two warps.
TEST(Combine, ManySplitsOfEveryWarp) {
  for (const int32_t num_sms : {1, 2}) expect_merged({131072}, 132, 101, 132, num_sms);
}

// Some warps of a team have one split more than others.
TEST(Combine, MiddlingSplits) {
  for (const int32_t splits : {9, 12, 31, 32}) expect_merged({131072}, splits, splits, splits);
}

TEST(Combine, ManySplitsOfOneOfTheRows) { expect_merged({131072, 32768}, 60, 41, 55); }

TEST(Combine, SparseWritesMaxLogits) {
  const Case c{.d_v = 128, .o_dtype = DType::kF32, .with_sink = true, .kv_len = std::vector<int32_t>(3)};
  Fixture fixture(c, 16);
  core::DecodeSparseArgs args;
  fixture.fill_outputs(args);
  args.pools[0].topk = 4096;
  args.max_logits = fixture.max_logits();
  args.max_logits_stride_token = c.num_heads;
  args.max_logits_stride_head = 1;
  fixture.expect_max_logits();
  ListMemory memory(fixture.shape());
  expect_planned(fixture.shape(), args, memory);
  fixture.invent_partials(memory.list);
  TestQueue queue;
  ASSERT_TRUE(combine_work(fixture.shape(), args, memory.list, false, queue).ok());
  fixture.check(memory.list);
}

TEST(Combine, InfiniteScoresAreNotLost) {
  Case c{.d_v = 128, .o_dtype = DType::kF32, .kv_len = {5000}};
  Fixture fixture(c, 17);
  core::DecodeArgs args = fixture.batch().args();
  fixture.fill_outputs(args);
  ListMemory memory(fixture.shape());
  expect_planned(fixture.shape(), args, memory);
  fixture.invent_partials(memory.list);
  const cuda::Merge& merge = memory.list.merges[0];
  const auto poison = [&](int32_t row, float max, float sum) {
    memory.list.partial_max[int64_t{merge.first_slot} * memory.list.block_rows + row] = max;
    memory.list.partial_sum[int64_t{merge.first_slot} * memory.list.block_rows + row] = sum;
  };
  poison(0, kInfinity, kInfinity);
  poison(1, 3.0F, kNan);
  TestQueue queue;
  ASSERT_TRUE(combine_work(fixture.shape(), args, memory.list, false, queue).ok());
  EXPECT_EQ(args.lse[0], kInfinity);
  EXPECT_TRUE(std::isnan(args.lse[1]));
  EXPECT_TRUE(std::isnan(static_cast<float*>(args.o)[args.o_stride_head]));
  EXPECT_FALSE(std::isnan(args.lse[2]));
}

TEST(Combine, NothingToMergeWritesNothing) {
  Fixture fixture({.d_v = 128, .kv_len = {64, 1, 0}}, 18);
  core::DecodeArgs args = fixture.batch().args();
  fixture.fill_outputs(args);
  ListMemory memory(fixture.shape());
  expect_planned(fixture.shape(), args, memory);
  ASSERT_EQ(memory.list.header->merges.num_merges, 0);
  TestQueue queue;
  ASSERT_TRUE(combine_work(fixture.shape(), args, memory.list, false, queue).ok());
  for (int64_t i = 0; i < args.num_tokens * args.num_heads; ++i) EXPECT_EQ(args.lse[i], 12345.0F);
}

TEST(Combine, SameBitsWhateverTheOrderOfThreads) { expect_same_bits({.d_v = 128, .o_dtype = DType::kF32}, {2, 2, 2}); }

// The more multiprocessors, the larger the teams that share a slice, but for batch_invariant.
TEST(Combine, InvariantBitsHoweverManyWarpsThereAre) {
  expect_same_bits({.o_dtype = DType::kF32, .batch_invariant = true}, {1, 16, 132});
  expect_same_bits({.d_v = 640, .o_dtype = DType::kF32, .num_heads = 3, .batch_invariant = true}, {1, 3, 132});
}

// Slices of long merges have teams of one, two, four and eight warps; of the others beside them a warp has a row, or,
// of wide rows, a slice.
TEST(Combine, LongMergesBesideOthers) {
  for (const auto& [d_v, longest] : {std::pair{512, 16000}, {512, 40000}, {640, 40000}}) {
    MLA_TRACE(testing::Message() << "d_v " << d_v << ", " << longest << " keys");
    Case c = {.d_v = d_v, .o_dtype = DType::kF32, .num_heads = 5, .kv_len = std::vector<int32_t>(12, 1500)};
    c.kv_len[2] = c.kv_len[7] = longest;
    c.kv_len[4] = 0;
    Fixture fixture(c, 19);
    core::DecodeArgs args = fixture.batch().args();
    ListMemory memory(fixture.shape());
    expect_planned(fixture.shape(), args, memory);
    const cuda::MergeCounts& counts = memory.list.header->merges;
    ASSERT_GT(counts.num_long, 0);
    ASSERT_GT(counts.num_merges, counts.num_long);
    for (const int32_t num_sms : {1, 8, 16, 132}) merged_outputs(c, 1, num_sms);
    if (HasFailure()) return;
  }
}

// Whole rows of few splits have ways of their own.
TEST(Combine, TwoThreeAndFourSplits) {
  const std::pair<int32_t, size_t> splits_of_requests[] = {{2, 10}, {3, 6}, {4, 5}};
  for (const auto& [splits, requests] : splits_of_requests) {
    MLA_TRACE(testing::Message() << splits << " splits");
    const Case c = {.o_dtype = DType::kF32, .kv_len = std::vector<int32_t>(requests, 4096)};
    Fixture fixture(c, 19);
    core::DecodeArgs args = fixture.batch().args();
    ListMemory memory(fixture.shape());
    expect_planned(fixture.shape(), args, memory);
    ASSERT_EQ(memory.list.header->merges.num_merges, static_cast<int32_t>(requests));
    for (size_t m = 0; m < requests; ++m) ASSERT_EQ(memory.list.merges[m].num_splits, splits);
    expect_same_bits(c, {1, 16, 132});
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace mla::plan_test
