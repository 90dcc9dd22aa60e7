// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace mla::dispatch {

/// Processors this process may run on. As machine_info().threads, without a look at GPUs.
int32_t usable_threads();

}  // namespace mla::dispatch
