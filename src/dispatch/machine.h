// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace mla::dispatch {

/// Returns how many processors this process may run on, as machine_info().threads does, without looking at GPUs.
int32_t usable_threads();

}  // namespace mla::dispatch
