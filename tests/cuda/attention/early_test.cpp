// SPDX-License-Identifier: Apache-2.0
// Tests what kernels do before the grid in front of them has ended: it may still be writing all they will read, and
// reading all they will write. They run on an emulated GPU where it never ends.
#include <cstring>
#include <random>
#include <span>
#include <string_view>

#include "core/fence.h"
#include "cuda/backends/bulk/operations.h"
#include "cuda/common/batches.h"
#include "cuda/common/combine.cuh"

namespace mla::plan_test {
namespace {

constexpr int32_t kHeads = 16, kDims = 576, kPageSize = 64, kNumPages = 40, kTokens = 2, kTopk = 128;
constexpr int64_t kRowBytes = kDims * 2;

/// Holds a problem whose rows and lists are there; queries and outputs may not be touched.
struct Problem {
  FencedMemory rows{kNumPages * kPageSize * kRowBytes, size_t{256} << 20};  // no slot is farther behind them
  FencedMemory table{kNumPages * sizeof(int32_t)};
  FencedMemory indptr{(kTokens + 1) * sizeof(int32_t)};
  FencedMemory indices{kTokens * kTopk * sizeof(int32_t)};
  FencedMemory closed{1 << 20};
  std::vector<int32_t> kv_len = {1024, 1024};

  Problem() {
    int32_t pages = 0;
    for (int32_t i = 0; i < kNumPages; ++i) table.as<int32_t>()[i] = kNumPages - 1 - i;
    for (int32_t b = 0; b < kTokens; ++b) {
      indptr.as<int32_t>()[b] = pages;
      pages += (kv_len[static_cast<size_t>(b)] + kPageSize - 1) / kPageSize;
    }
    indptr.as<int32_t>()[kTokens] = pages;
    for (int32_t i = 0; i < kTokens * kTopk; ++i) indices.as<int32_t>()[i] = i * 7 % (kNumPages * kPageSize);
    EXPECT_TRUE(closed.close());
  }

  core::Cache cache(CacheFormat format) const {
    core::Cache cache;
    cache.format = format;
    cache.num_pages = kNumPages;
    cache.page_size = kPageSize;
    cache.d_ckv = 512;
    cache.d_kpe = 64;
    const KvLayout layout = kv_layout(format);
    core::set_codecs(layout, cache);
    const int64_t row_bytes = layout.is_packed() ? layout.row_bytes : kRowBytes;
    // The last of the rows stands right before the fence.
    auto* const base = rows.data() + kNumPages * kPageSize * (kRowBytes - row_bytes);
    const auto plane = [&](int64_t offset) { return core::Plane{base + offset, kPageSize * row_bytes, row_bytes}; };
    cache.ckv = plane(0);
    cache.kpe = plane(layout.is_packed() ? layout.rope_offset : 1024);
    if (layout.is_packed()) cache.scales = plane(layout.scale_offset);
    return cache;
  }
  template <class Args>
  Args common() const {
    Args args;
    args.batch_size = args.num_tokens = kTokens;
    args.num_heads = kHeads;
    args.d_qk = kDims;
    args.d_v = 512;
    args.q_nope = args.q_pe = closed.data();
    args.q_nope_stride_token = args.q_pe_stride_token = kHeads * kDims;
    args.q_nope_stride_head = args.q_pe_stride_head = kDims;
    args.o = closed.data();
    args.lse = closed.as<float>();
    return args;
  }
  core::DecodeArgs decode(bool csr, CacheFormat format = CacheFormat::kBF16) const {
    auto args = common<core::DecodeArgs>();
    args.cache = cache(format);
    args.pages.page_size = kPageSize;
    args.pages.batch_size = kTokens;
    args.pages.table = table.as<int32_t>();
    args.pages.kv_indptr = csr ? indptr.as<int32_t>() : nullptr;
    args.pages.table_stride_request = kNumPages / kTokens;
    args.pages.table_entries = kNumPages;
    args.pages.kv_len = kv_len.data();
    return args;
  }
  core::DecodeSparseArgs decode_sparse() const {
    auto args = common<core::DecodeSparseArgs>();
    args.num_pools = 1;
    args.pools[0].cache = cache(CacheFormat::kBF16);
    args.pools[0].indices = indices.as<int32_t>();
    args.pools[0].indices_stride_token = kTopk;
    args.pools[0].topk = kTopk;
    return args;
  }
};

const cuda::PlannedOperation<core::DecodeArgs> kDecode = bulk::decode();
const cuda::PlannedOperation<core::DecodeSparseArgs> kDecodeSparse = bulk::decode_sparse();

/// Launches attention without combine; attention knows that the plan was there when it was let start.
class AttentionQueue final : public cuda::Queue {
 public:
  explicit AttentionQueue(TestQueue& to) : to_(to) {}
  const cuda::DeviceProperties& device() const override { return to_.device(); }
  Status launch(const cuda::KernelEntry& kernel, const cuda::LaunchShape& shape, const void* params) override {
    return std::string_view(kernel.name) == CombineKernel::kName ? Status{} : to_.launch(kernel, shape, params);
  }

 private:
  TestQueue& to_;
};

/// Returns how many lines attention has brought into the cache before its wait. `spoil` may do what it likes to the
/// workspace.
template <class Args, class Spoil>
int64_t lines_before_wait(const cuda::PlannedOperation<Args>& operation, const Args& args, uint64_t seed,
                          const Spoil& spoil) {
  TestQueue queue(seed, 16);
  const size_t size = operation.workspace_size(args, queue.device());
  const FencedMemory workspace(round_up(size, 64));
  const std::span<std::byte> bytes(workspace.data(), size);
  EXPECT_TRUE(operation.plan(args, queue, bytes).ok());
  spoil(bytes);
  const std::vector<std::byte> before(bytes.begin(), bytes.end());
  queue.let_previous_grid_run_for_ever();
  AttentionQueue attention(queue);
  const Status status = operation.run(args, attention, bytes);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(std::memcmp(before.data(), bytes.data(), bytes.size()), 0);
  return queue.counters().prefetches;
}

constexpr auto kAsPlanned = [](std::span<std::byte>) {};

TEST(Early, AttentionsFirstRowsComeIntoTheCache) {
  const Problem problem;
  // 16 multiprocessors have 128 keys each, of which three steps of 32 come early, nine lines a row.
  for (const bool csr : {false, true})
    EXPECT_EQ(lines_before_wait(kDecode, problem.decode(csr), 1, kAsPlanned), int64_t{16} * 96 * 9);
  core::DecodeArgs of_32_rows = problem.decode(false);
  of_32_rows.num_heads = 2 * kHeads;
  EXPECT_EQ(lines_before_wait(kDecode, of_32_rows, 1, kAsPlanned), int64_t{16} * 96 * 9);
  // Of fp8_ds_mla's all 128, in steps of 64: 54 lines for eight rows of 656 bytes, 512 codes and 128 bytes behind
  // scales.
  EXPECT_EQ(lines_before_wait(kDecode, problem.decode(true, CacheFormat::kFP8DsMla), 1, kAsPlanned), 16 * 128 / 8 * 54);
  const int64_t lines = lines_before_wait(kDecodeSparse, problem.decode_sparse(), 2, kAsPlanned);
  EXPECT_GE(lines, int64_t{kTokens} * 96 * 9);
  EXPECT_LE(lines, int64_t{kTokens} * kTopk * 9);
}

TEST(Early, AttentionBelievesNoPlan) {
  const Problem problem;
  std::mt19937 random(3);
  // Words as they may be, but for some that are anything.
  const auto spoil = [&](std::span<std::byte> bytes) {
    auto* const words = reinterpret_cast<uint32_t*>(bytes.data());
    const auto some = 1 + random() % 4;
    for (size_t i = 0; i < bytes.size() / 4; ++i)
      if (random() % 4 < some) words[i] = random() % 2 == 0 ? static_cast<uint32_t>(random()) : random() % 2048;
  };
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const CacheFormat format = seed % 4 < 2 ? CacheFormat::kBF16 : CacheFormat::kFP8DsMla;
    lines_before_wait(kDecode, problem.decode(seed % 2 != 0, format), seed, spoil);
    lines_before_wait(kDecodeSparse, problem.decode_sparse(), seed, spoil);
  }
}

TEST(Early, AttentionBelievesNoPageTable) {
  const Problem problem;
  const auto spoil_lists = [&](std::span<std::byte>) {
    std::mt19937 random(4);
    const auto anything = [&](int32_t usual) {
      return random() % 2 == 0 ? static_cast<int32_t>(random()) : static_cast<int32_t>(random()) % usual;
    };
    for (int32_t i = 0; i < kNumPages; ++i) problem.table.as<int32_t>()[i] = anything(2 * kNumPages);
    for (int32_t i = 0; i <= kTokens; ++i) problem.indptr.as<int32_t>()[i] = anything(2 * kNumPages);
    for (int32_t i = 0; i < kTokens * kTopk; ++i)
      problem.indices.as<int32_t>()[i] = anything(2 * kNumPages * kPageSize);
  };
  for (uint64_t seed = 0; seed < 10; ++seed) {
    lines_before_wait(kDecode, problem.decode(seed % 2 != 0), seed, spoil_lists);
    lines_before_wait(kDecodeSparse, problem.decode_sparse(), seed, spoil_lists);
  }
}

TEST(Early, CombineTouchesNoStateAndNoOutput) {
  // Whole rows, which are rehearsed unless they have more slices than are merged at once; slices by warps, slices by
  // blocks.
  struct Lengths {
    int32_t d_v;
    std::vector<int32_t> kv_len;
    bool has_long;
  };
  for (const auto& [d_v, kv_len, has_long] : {Lengths{512, std::vector<int32_t>(50, 1500), false},
                                              {1024, std::vector<int32_t>(50, 1500), false},
                                              {512, {5000, 64, 0, 12345}, true},
                                              {512, {131072}, true}}) {
    DecodeBatch batch;
    batch.num_heads = kHeads;
    batch.kv_len = kv_len;
    cuda::WorkShape shape = batch.shape(16, 64, 132);
    shape.d_v = d_v;
    core::DecodeArgs args = batch.args();
    ListMemory memory(shape);
    expect_planned(shape, args, memory);
    ASSERT_GT(memory.list.header->merges.num_merges, 0);
    ASSERT_EQ(memory.list.header->merges.num_long > 0, has_long);
    const FencedMemory closed(1 << 20);
    ASSERT_TRUE(closed.close());
    args.num_heads = kHeads;
    args.d_v = d_v;
    args.o = closed.data();
    args.o_stride_token = int64_t{kHeads} * d_v;
    args.o_stride_head = d_v;
    args.lse = closed.as<float>();
    args.lse_stride_token = kHeads;
    args.lse_stride_head = 1;
    cuda::WorkList list = memory.list;
    list.partial_o = list.partial_max = list.partial_sum = closed.as<float>();
    for (uint64_t seed = 0; seed < 3; ++seed) {
      TestQueue queue(seed);
      queue.let_previous_grid_run_for_ever();
      const Status status = combine_work(shape, args, list, true, queue);
      EXPECT_TRUE(status.ok()) << status.message();
    }
  }
}

}  // namespace
}  // namespace mla::plan_test
