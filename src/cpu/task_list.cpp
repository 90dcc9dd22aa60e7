// SPDX-License-Identifier: Apache-2.0
#include "cpu/task_list.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>

namespace mla::cpu {

TaskList::TaskList(Carver& carver, const Capacity& capacity)
    : header_(carver.take<Header>(1)),
      tasks_(carver.take<plan::Task>(capacity.tasks)),
      group_begin_(carver.take<int32_t>(capacity.tasks + 1)),
      capacity_(capacity) {}

TaskList::Capacity TaskList::stored_capacity(const std::byte* workspace) {
  return reinterpret_cast<const Header*>(workspace)->capacity;
}

dispatch::PlanSummary TaskList::store(const plan::Schedule& schedule, const TileShape& shape) {
  new (header_) Header{.capacity = capacity_,
                       .num_tasks = static_cast<int32_t>(schedule.tasks.size()),
                       .num_groups = schedule.num_groups(),
                       .num_partials = schedule.num_partials,
                       .next_group = 0};
  std::copy(schedule.tasks.begin(), schedule.tasks.end(), tasks_);
  std::copy(schedule.group_begin.begin(), schedule.group_begin.end(), group_begin_);
  return {.num_tasks = schedule.tasks.size(),
          .num_splits = static_cast<size_t>(schedule.num_partials),
          .text = fmt::format("{} tasks in {} groups, {} partial states; at most {} rows and {} keys a tile",
                              schedule.tasks.size(), schedule.num_groups(), schedule.num_partials, shape.max_rows,
                              shape.key_block)};
}

float merge_weights(float* lse, int64_t stride, int32_t n) {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  float top = kLowest;
  for (int32_t i = 0; i < n; ++i) top = std::max(top, lse[i * stride]);
  if (top == kLowest) {
    for (int32_t i = 0; i < n; ++i) lse[i * stride] = 0.0F;
    return kLowest;
  }
  float sum = 0.0F;
  for (int32_t i = 0; i < n; ++i) sum += std::exp2(lse[i * stride] - top);
  const float merged = top + std::log2(sum);
  for (int32_t i = 0; i < n; ++i) lse[i * stride] = std::exp2(lse[i * stride] - merged);
  return merged;
}

}  // namespace mla::cpu
