// SPDX-License-Identifier: Apache-2.0
// Checks of the integer lists: CSR pointers, lengths, page numbers, slots. Callers have checked shapes and device.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/checks.h"

namespace mla::core {

/// CSR: indptr[0] = 0, never decreasing; its last entry is `total`, or at most that if `exact` is false.
bool check_indptr(Checks& check, std::string_view field, const int32_t* indptr, int64_t batch_size,
                  std::string_view total_name, int64_t total, bool exact = true);

/// B + 1 entries of a CSR's indptr.
bool check_indptr_extent(Checks& check, std::string_view field, int64_t extent);

/// Whether all of values[0..count) lie in [0, limit). Cheap: one pass that vectorizes.
bool all_below(const int32_t* values, int64_t count, int64_t limit);

/// Page numbers of one request, entries [first, last) of its row: all in [0, num_pages).
bool check_pages(Checks& check, std::string_view field, const int32_t* pages, int64_t first, int64_t last,
                 int64_t num_pages, int64_t request);

/// Slots: negative, or below `num_slots`.
bool check_slots(Checks& check, std::string_view field, const int64_t* slots, int64_t count, int64_t num_slots);

}  // namespace mla::core
