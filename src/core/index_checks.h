// SPDX-License-Identifier: Apache-2.0
// Checks of physical slots: page * page_size + offset, as int32.
#pragma once

#include <cstdint>

#include "core/args.h"
#include "core/checks.h"

namespace mla::core {

/// Page numbers in use: those whose slots fit int32. The pool is not known here.
bool check_slot_pages(Checks& check, const Pages& pages, const ContextParallel& share);

/// The optional [T] output of valid slots.
bool check_valid_count(Checks& check, const TensorView& valid_count, int64_t num_tokens);

}  // namespace mla::core
