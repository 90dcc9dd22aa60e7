// SPDX-License-Identifier: Apache-2.0
// Holds the rules of the plan that mla/estimate.h repeats for batches of equal requests to the work lists of the plan.
#include <gmock/gmock.h>

#include <algorithm>
#include <random>

#include "cuda/common/batches.h"
#include "mla/estimate.h"
#include "trace.h"

namespace mla::plan_test {
namespace {

/// Returns what the list's most loaded worker costs by the plan's own overheads, and the merge if there is one.
int64_t most_cost(const cuda::WorkShape& shape, const cuda::WorkList& list) {
  int64_t most = 0;
  for (int32_t b = 0; b < shape.max_grid_blocks; ++b) {
    int64_t cost = 0;
    for (int32_t s = list.shares[b].begin; s < list.shares[b].end; ++s) {
      const cuda::Segment& segment = list.segments[s];
      cost += (segment.key_end - segment.key_begin + shape.step_keys - 1) / shape.step_keys + shape.split_costs.segment;
      if (segment.partial_slot >= 0) cost += shape.split_costs.split;
    }
    most = std::max(most, cost);
  }
  return most + (list.header->merges.num_merges > 0 ? shape.split_costs.split : 0);
}

TEST(PlannedCost, IsThatOfTheWorkList) {
  std::mt19937 random(1);
  for (int i = 0; i < 80; ++i) {
    DecodeBatch batch;
    batch.num_heads = 16 << random() % 4;
    batch.kv_len.assign(1 + random() % (i % 2 == 0 ? 20 : 200), static_cast<int32_t>(1 + random() % 20000));
    const int32_t block_rows = 16 << random() % 3;
    const auto grid = static_cast<int32_t>(1 + random() % 200);
    const cuda::WorkShape shape = batch.shape(block_rows, 32, grid);
    MLA_TRACE(testing::Message() << batch.size() << " requests of " << batch.kv_len[0] << " keys, " << batch.num_heads
                                 << " heads, rows " << block_rows << ", grid " << grid);
    ListMemory memory(shape);
    expect_planned(shape, batch.args(), memory);
    const cli::PlannedCost cost =
        cli::planned_cost(grid, batch.size(), (batch.num_heads - 1) / block_rows + 1, (batch.kv_len[0] - 1) / 32 + 1);
    EXPECT_EQ(cost.row_lanes, memory.list.header->row_lanes);
    EXPECT_EQ(cost.steps, most_cost(shape, memory.list));
  }
}

}  // namespace
}  // namespace mla::plan_test
