// SPDX-License-Identifier: Apache-2.0
// Declares the checks of physical slots, which are page * page_size + offset, as int32.
#pragma once

#include <cstdint>

#include "core/args.h"
#include "core/checks.h"

namespace mla::core {

/// Checks that the slots of all pages in use fit int32. The size of the pool is not known here.
bool check_slot_pages(Checks& check, const Pages& pages, const ContextParallel& share);

/// Checks the optional [T] output of numbers of valid slots.
bool check_valid_count(Checks& check, const TensorView& valid_count, int64_t num_tokens);

}  // namespace mla::core
