// SPDX-License-Identifier: Apache-2.0
// Tests that block_table_to_csr and physical_slots on an emulated GPU leave the bytes that the reference leaves.
#include <vector>

#include "cuda/common/memory.h"
#include "reference/reference.h"
#include "trace.h"

namespace mla::writers_test {
namespace {

TEST(CudaBlockTableToCsr, LeavesTheBytesOfTheReference) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    MLA_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    Memory memory(random);
    const int32_t batch = random.of({0, 1, 5, 33, 1024, 1500}), page_size = random.of({1, 7, 64});
    const int32_t max_pages = random.of({1, 5, 300}), max_len = (batch > 100 ? 3 : max_pages) * page_size;
    core::BlockTableToCsrArgs args = {
        .batch_size = batch, .page_size = page_size, .block_table_stride_request = max_pages + random.integer(0, 2)};
    std::vector<int32_t> kv_len;
    int64_t needed = 0;
    for (int32_t b = 0; b < batch; ++b) {
      kv_len.push_back(random.chance(4) ? 0 : random.integer(0, std::min(max_len, max_pages * page_size)));
      needed += (kv_len.back() + page_size - 1) / page_size;
    }
    args.block_table = reinterpret_cast<int32_t*>(memory.bytes(batch * args.block_table_stride_request * 4 + 4, 4));
    args.kv_len = memory.list(kv_len);
    args.kv_indptr = reinterpret_cast<int32_t*>(memory.bytes(batch * 4 + 4, 0));
    args.kv_indices = reinterpret_cast<int32_t*>(memory.bytes(needed * 4 + 40, 8));
    TestQueue queue(seed);
    ASSERT_NO_FATAL_FAILURE(expect_same_bytes(
        memory, [&] { reference::block_table_to_csr(args); }, [&] { return run_block_table_to_csr(args, queue); }));
  }
}

TEST(CudaPhysicalSlots, LeavesTheBytesOfTheReference) {
  for (uint64_t seed = 0; seed < 120; ++seed) {
    MLA_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    Memory memory(random);
    const int32_t batch = random.of({1, 3, 50}), page_size = random.of({1, 7, 64}), width = 6;
    core::PhysicalSlotsArgs args = {.topk = random.of({1, 31, 64, 257, 2048, 5000}), .compact = random.chance(2)};
    args.num_slots = args.topk;
    args.ratio = random.of({1, 1, 4, 7});
    args.list_tokens = random.chance(2);
    if (args.list_tokens) args.num_slots = args.topk * args.ratio + args.ratio - 1 + random.of({0, 5});
    if (args.list_tokens || args.ratio == 1)
      args.context_parallel = random.of<ContextParallel>(
          {{}, {.rank = 1, .world = 2, .interleave = 1}, {.rank = 0, .world = 3, .interleave = 2}});
    std::vector<int32_t> table, kv_len, kv_indptr = {0}, qo_indptr = {0};
    const int32_t uniform = random.of({1, 2});
    for (int32_t b = 0; b < batch; ++b) {
      for (int32_t i = 0; i < width; ++i) table.push_back(random.integer(0, 1000));
      kv_len.push_back(random.integer(0, width * page_size));
      kv_indptr.push_back(width * (b + 1));
      qo_indptr.push_back(qo_indptr.back() + (args.topk > 300 && b > 2 ? 0 : random.integer(0, 2)));
    }
    args.pages = {.page_size = page_size, .batch_size = batch, .table = memory.list(table)};
    args.pages.kv_len = memory.list(kv_len);
    if (random.chance(2))
      args.pages.kv_indptr = memory.list(kv_indptr);
    else
      args.pages.table_stride_request = width;
    args.num_tokens = batch * uniform;
    args.queries.uniform_len = uniform;
    if (random.chance(2)) {
      args.queries.indptr = memory.list(qo_indptr);
      args.num_tokens = qo_indptr.back() + random.of({0, 3});  // rows of a larger capacity stay as they are
    } else if (args.topk > 300 && batch > 3) {
      continue;  // long, and nothing new
    }
    args.indices_stride_token = args.topk + random.of({0, 3});
    std::vector<int32_t> indices;
    for (int64_t i = 0; i < args.num_tokens * args.indices_stride_token; ++i)
      indices.push_back(random.chance(8) ? random.of({-1, -5, 1 << 30}) : random.integer(0, width * page_size));
    int32_t* list = memory.list(indices);
    args.indices = list;
    if (!args.list_tokens && random.chance(2)) {
      args.slots = list;
      args.slots_stride_token = args.indices_stride_token;
    } else {
      args.slots_stride_token = args.num_slots + random.of({0, 1});
      args.slots = reinterpret_cast<int32_t*>(memory.bytes(args.num_tokens * args.slots_stride_token * 4, 4));
    }
    std::vector<int32_t> lengths;
    for (int64_t t = 0; t < args.num_tokens; ++t) lengths.push_back(random.integer(-1, args.topk + 1));
    if (random.chance(2)) args.topk_length = memory.list(lengths);
    if (random.chance(2)) args.valid_count = reinterpret_cast<int32_t*>(memory.bytes(args.num_tokens * 4, 4));
    TestQueue queue(seed);
    ASSERT_NO_FATAL_FAILURE(expect_same_bytes(
        memory, [&] { reference::physical_slots(args); }, [&] { return run_physical_slots(args, queue); }));
  }
}

}  // namespace
}  // namespace mla::writers_test
