// SPDX-License-Identifier: Apache-2.0
// Tests that the kernels which find shared prefixes leave the lists that the CPU's function leaves.
#include "plan/shared_prefix.h"

#include <vector>

#include "cuda/common/memory.h"
#include "trace.h"

namespace mla::writers_test {
namespace {

int32_t* room(Memory& memory, int64_t count) { return reinterpret_cast<int32_t*>(memory.bytes(count * 4, 0)); }

void make_lists(Memory& memory, core::SharedPrefixArgs& args) {
  const int32_t batch = args.batch_size;
  for (int32_t** list : {&args.common_pages, &args.group_kv_len, &args.own_kv_len}) *list = room(memory, batch);
  for (int32_t** list : {&args.group_qo_indptr, &args.group_kv_indptr, &args.own_kv_indptr})
    *list = room(memory, batch + 1);
}

TEST(CudaSharedPrefixes, LeaveTheListsOfTheCpu) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    MLA_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    Memory memory(random);
    const int32_t batch = random.of({1, 2, 7, 64, 1023, 1024, 1025, 2100}), page_size = random.of({1, 16, 64});
    const int32_t most = batch > 100 ? 9 : random.of({3, 300, 700}), row_extra = random.of({0, 5});
    std::vector<int32_t> table, kv_len, indptr = {0}, qo_indptr = {0};
    std::vector<int32_t> pages;
    const bool csr = random.chance(2);
    for (int32_t b = 0; b < batch; ++b) {
      // The next request keeps the first pages of this one.
      pages.resize(static_cast<size_t>(random.chance(4) ? 0 : random.integer(0, static_cast<int32_t>(pages.size()))));
      const int32_t count = csr ? random.integer(0, most) : most;
      while (static_cast<int32_t>(pages.size()) < count) pages.push_back(random.integer(0, 5));
      table.insert(table.end(), pages.begin(), pages.end());
      if (!csr) table.resize(table.size() + static_cast<size_t>(row_extra), -1);
      const auto held = static_cast<int32_t>(pages.size()) * page_size;
      kv_len.push_back(random.chance(10) ? random.of({-1, 0}) : random.integer(held / 2, held));
      indptr.push_back(static_cast<int32_t>(table.size()));
      qo_indptr.push_back(qo_indptr.back() + random.integer(0, 3));
    }
    if (!csr) table.resize(table.size() - static_cast<size_t>(row_extra));  // nothing stands behind the last row
    core::SharedPrefixArgs args = {.batch_size = batch};
    args.pages = {.page_size = page_size,
                  .batch_size = batch,
                  .table = memory.list(table),
                  .kv_indptr = csr ? memory.list(indptr) : nullptr,
                  .table_stride_request = csr ? 0 : most + row_extra,
                  .table_entries = static_cast<int64_t>(table.size()),
                  .kv_len = memory.list(kv_len)};
    if (random.chance(2)) args.queries = {.indptr = memory.list(qo_indptr)};
    make_lists(memory, args);
    TestQueue queue(seed);
    ASSERT_NO_FATAL_FAILURE(expect_same_bytes(
        memory, [&] { schedule::find_shared_prefixes(args); }, [&] { return find_shared_prefixes(args, queue); }));
  }
}

// The request behind a chunk's last one decides whether that one joins the group before it.
TEST(CudaSharedPrefixes, LookBeyondTheEndOfAChunk) {
  constexpr int32_t kBatch = 1030, kPages = 4, kLast = 1023;
  Random random(1);
  Memory memory(random);
  std::vector<int32_t> table;
  for (int32_t i = 0; i < kBatch * kPages; ++i) table.push_back(i);
  table[kLast * kPages] =
      table[(kLast - 1) * kPages];  // a page in common with the one before, three with the one behind
  for (int32_t i = 0; i < 3; ++i) table[(kLast + 1) * kPages + i] = table[kLast * kPages + i];
  core::SharedPrefixArgs args = {.batch_size = kBatch};
  args.pages = {.page_size = 1,
                .batch_size = kBatch,
                .table = memory.list(table),
                .table_stride_request = kPages,
                .table_entries = kBatch * kPages,
                .kv_len = memory.list(std::vector<int32_t>(kBatch, kPages))};
  make_lists(memory, args);
  TestQueue queue(1);
  ASSERT_NO_FATAL_FAILURE(expect_same_bytes(
      memory, [&] { schedule::find_shared_prefixes(args); }, [&] { return find_shared_prefixes(args, queue); }));
  EXPECT_EQ(args.own_kv_len[kLast - 1], kPages);
  EXPECT_EQ(args.own_kv_len[kLast], 1);
}

}  // namespace
}  // namespace mla::writers_test
