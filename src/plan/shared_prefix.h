// SPDX-License-Identifier: Apache-2.0
// Finds on the CPU which neighbouring requests of a batch begin with the same pages. The GPU's kernel of the same
// results is cuda/common/shared_prefix.cuh.
#pragma once

#include <cstdint>

#include "core/args.h"

namespace mla::schedule {

/// Says what was found.
struct SharedPrefixes {
  int32_t num_groups = 0;  // of at least two requests
  int64_t saved_keys = 0;  // that are not read, since another request of the group reads them
};

/// Fills the lists of `args`.
SharedPrefixes find_shared_prefixes(const core::SharedPrefixArgs& args);

/// Returns whether the lists have the queries and lengths that find_shared_prefixes would put there, by which work is
/// planned. Where the pages stand may differ.
bool same_shared_prefixes(const core::SharedPrefixArgs& args);

}  // namespace mla::schedule
