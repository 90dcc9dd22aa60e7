// SPDX-License-Identifier: Apache-2.0
#include "cpu/task_list.h"

#include <algorithm>
#include <cmath>
#include <new>

#include "core/format.h"

namespace mla::cpu {

TaskList::TaskList(Carver& carver, const Capacity& capacity)
    : header_(carver.take<Header>(1)),
      tasks_(carver.take<schedule::Task>(capacity.tasks)),
      group_begin_(carver.take<int32_t>(capacity.tasks + 1)),
      capacity_(capacity) {}

TaskList::Capacity TaskList::stored_capacity(const std::byte* workspace) {
  return reinterpret_cast<const Header*>(workspace)->capacity;
}

core::PlanSummary TaskList::store(const schedule::Schedule& schedule, const TileShape& shape) {
  new (header_) Header{.capacity = capacity_,
                       .num_tasks = static_cast<int32_t>(schedule.tasks.size()),
                       .num_groups = schedule.num_groups(),
                       .num_partials = schedule.num_partials,
                       .next_group = 0};
  std::copy(schedule.tasks.begin(), schedule.tasks.end(), tasks_);
  std::copy(schedule.group_begin.begin(), schedule.group_begin.end(), group_begin_);
  return {.num_tasks = schedule.tasks.size(),
          .num_splits = static_cast<size_t>(schedule.num_partials),
          .text = [tasks = schedule.tasks.size(), groups = schedule.num_groups(), partials = schedule.num_partials,
                   rows = shape.max_rows, keys = shape.key_block] {
            return core::format("{} task(s) in {} group(s), {} partial state(s); at most {} rows and {} keys a tile",
                                tasks, groups, partials, rows, keys);
          }};
}

}  // namespace mla::cpu
