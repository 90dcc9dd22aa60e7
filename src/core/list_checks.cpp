// SPDX-License-Identifier: Apache-2.0
#include "core/list_checks.h"

#include <algorithm>

namespace mla::core {

bool check_indptr(Checks& check, std::string_view field, const int32_t* indptr, int64_t batch_size,
                  std::string_view total_name, int64_t total, bool exact) {
  if (!check.ok()) return false;
  if (indptr[0] != 0) return check.fail(field, "expected 0 as the first entry, got {}", indptr[0]);
  uint32_t decreases = 0;
  for (int64_t i = 0; i < batch_size; ++i) decreases |= indptr[i + 1] < indptr[i] ? 1U : 0U;
  if (decreases != 0) {
    int64_t i = 0;
    while (indptr[i + 1] >= indptr[i]) ++i;
    return check.fail(field, "expected entries that never decrease, got {} after {} for request {}", indptr[i + 1],
                      indptr[i], i);
  }
  const int64_t last = indptr[batch_size];
  if (exact ? last == total : last <= total) return true;
  return check.fail(field, "expected {} {} ({}) as the last entry, got {}", exact ? "exactly" : "at most", total,
                    total_name, last);
}

bool check_indptr_extent(Checks& check, std::string_view field, int64_t extent) {
  return check.require(extent >= 1 && extent <= INT32_MAX, field, "expected shape [B + 1] of 1 to {}, got [{}]",
                       INT32_MAX, extent);
}

bool all_below(const int32_t* values, int64_t count, int64_t limit) {
  // The sign bit of `outside` is set once a value is negative or above `most`. There is no comparison, so that even
  // baseline vector instructions check four values at a time.
  const int64_t most = std::min<int64_t>(limit, int64_t{INT32_MAX} + 1) - 1;
  if (count > 0 && most < 0) return false;
  const auto most32 = static_cast<uint32_t>(most);
  uint32_t outside = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<uint32_t>(values[i]);
    outside |= value | (most32 - value);
  }
  return outside >> 31 == 0;
}

bool check_pages(Checks& check, std::string_view field, const int32_t* pages, int64_t first, int64_t last,
                 int64_t num_pages, int64_t request) {
  if (!check.ok()) return false;
  if (first >= last || all_below(pages + first, last - first, num_pages)) return true;
  int64_t i = first;
  while (pages[i] >= 0 && pages[i] < num_pages) ++i;
  return check.fail(field, "expected page numbers from 0 to {}, got {} as page {} of request {}", num_pages - 1,
                    pages[i], i, request);
}

bool check_slots(Checks& check, std::string_view field, const int64_t* slots, int64_t count, int64_t num_slots) {
  if (!check.ok()) return false;
  const auto most = static_cast<uint64_t>(num_slots) - 1;
  uint64_t outside = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto slot = static_cast<uint64_t>(slots[i]);
    outside |= ~slot & (most - slot);
  }
  if (num_slots > 0 && outside >> 63 == 0) return true;
  for (int64_t i = 0; i < count; ++i)
    if (slots[i] >= num_slots)
      return check.fail(field, "expected at most {} (the last slot of the cache), got {} for token {}", num_slots - 1,
                        slots[i], i);
  return true;
}

bool check_positions(Checks& check, const TensorView& positions, int64_t num_tokens, int64_t max_positions) {
  if (!check.tensor("positions", positions, kI64Only, {{"T", &num_tokens}})) return false;
  if (!check.reads_data()) return true;
  const auto* values = static_cast<const int64_t*>(positions.data);
  for (int64_t t = 0; t < num_tokens; ++t)
    if (values[t] < 0 || values[t] >= max_positions)
      return check.fail("positions", "expected 0 to {} (the rows of `cos_sin`), got {} for token {}", max_positions - 1,
                        values[t], t);
  return true;
}

}  // namespace mla::core
