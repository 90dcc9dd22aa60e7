// SPDX-License-Identifier: Apache-2.0
// Hands out the pages of the cache and counts the users of each. It knows nothing of what they hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mla::cli::replay {

class PagePool {
 public:
  explicit PagePool(int32_t num_pages);

  int32_t num_pages() const { return static_cast<int32_t>(ref_count_.size()); }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t ref_count(int32_t page) const { return ref_count_[static_cast<size_t>(page)]; }

  /// Appends `count` pages with one user each to `pages`. Returns false, and takes nothing, if fewer are free.
  bool allocate(int32_t count, std::vector<int32_t>& pages);
  /// Adds a user to a page that has some.
  void retain(int32_t page);
  /// Removes a user of a page; a page without users is free.
  void release(int32_t page);

 private:
  std::vector<int32_t> ref_count_;
  std::vector<int32_t> free_;
};

}  // namespace mla::cli::replay
