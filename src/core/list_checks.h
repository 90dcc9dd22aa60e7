// SPDX-License-Identifier: Apache-2.0
// Declares the checks of integer lists: CSR pointers, lengths, page numbers, slots. The callers have checked shapes and
// device.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/checks.h"

namespace mla::core {

/// Checks a CSR's indptr: it begins with 0, never decreases, and ends with `total`, or with at most `total` if `exact`
/// is false.
bool check_indptr(Checks& check, std::string_view field, const int32_t* indptr, int64_t batch_size,
                  std::string_view total_name, int64_t total, bool exact = true);

/// Checks that the indptr of a CSR has a valid number of entries, B + 1.
bool check_indptr_extent(Checks& check, std::string_view field, int64_t extent);

/// Returns whether values[0] ... values[count - 1] lie in [0, limit). It is one pass, which the compiler vectorizes.
bool all_below(const int32_t* values, int64_t count, int64_t limit);

/// Checks that the page numbers of one request, entries [first, last) of its row, lie in [0, num_pages).
bool check_pages(Checks& check, std::string_view field, const int32_t* pages, int64_t first, int64_t last,
                 int64_t num_pages, int64_t request);

/// Checks that every slot is negative or below `num_slots`.
bool check_slots(Checks& check, std::string_view field, const int64_t* slots, int64_t count, int64_t num_slots);

/// Checks `positions`, [T], each of which has a row of `cos_sin`.
bool check_positions(Checks& check, const TensorView& positions, int64_t num_tokens, int64_t max_positions);

}  // namespace mla::core
