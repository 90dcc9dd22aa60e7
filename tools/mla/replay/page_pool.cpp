// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/page_pool.h"

#include <cassert>

namespace mla::cli::replay {

PagePool::PagePool(int32_t num_pages) : ref_count_(static_cast<size_t>(num_pages), 0) {
  free_.reserve(ref_count_.size());
  for (int32_t page = num_pages - 1; page >= 0; --page) free_.push_back(page);
}

bool PagePool::allocate(int32_t count, std::vector<int32_t>& pages) {
  if (count > num_free()) return false;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t page = free_.back();
    free_.pop_back();
    ref_count_[static_cast<size_t>(page)] = 1;
    pages.push_back(page);
  }
  return true;
}

void PagePool::retain(int32_t page) {
  assert(ref_count(page) > 0);
  ++ref_count_[static_cast<size_t>(page)];
}

void PagePool::release(int32_t page) {
  assert(ref_count(page) > 0);
  if (--ref_count_[static_cast<size_t>(page)] == 0) free_.push_back(page);
}

}  // namespace mla::cli::replay
