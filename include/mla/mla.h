// SPDX-License-Identifier: Apache-2.0
// This header includes the whole API. Link libmla::mla.
#pragma once

#include "mla/backend.h"           // IWYU pragma: export
#include "mla/context_parallel.h"  // IWYU pragma: export
#include "mla/device.h"            // IWYU pragma: export
#include "mla/kv_layout.h"         // IWYU pragma: export
#include "mla/model.h"             // IWYU pragma: export
#include "mla/numeric.h"           // IWYU pragma: export
#include "mla/params.h"            // IWYU pragma: export
#include "mla/plan.h"              // IWYU pragma: export
#include "mla/status.h"            // IWYU pragma: export
#include "mla/types.h"             // IWYU pragma: export
