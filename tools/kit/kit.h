// SPDX-License-Identifier: Apache-2.0
// Includes the whole kit: random problems for every operation, their check against the reference, and sweeps of both.
// The command line and the tests share it.
#pragma once

#include "kit/buffer.h"        // IWYU pragma: export
#include "kit/case_buffers.h"  // IWYU pragma: export
#include "kit/cases.h"         // IWYU pragma: export
#include "kit/check.h"         // IWYU pragma: export
#include "kit/compare.h"       // IWYU pragma: export
#include "kit/device.h"        // IWYU pragma: export
#include "kit/specs.h"         // IWYU pragma: export
#include "kit/sweep.h"         // IWYU pragma: export
