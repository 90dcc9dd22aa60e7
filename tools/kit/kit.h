// SPDX-License-Identifier: Apache-2.0
// Random problems for every operation, their check against the reference, and sweeps of both. Shared by the command
// line and the tests.
#pragma once

#include "kit/buffer.h"        // IWYU pragma: export
#include "kit/case_buffers.h"  // IWYU pragma: export
#include "kit/cases.h"         // IWYU pragma: export
#include "kit/check.h"         // IWYU pragma: export
#include "kit/compare.h"       // IWYU pragma: export
#include "kit/device.h"        // IWYU pragma: export
#include "kit/specs.h"         // IWYU pragma: export
#include "kit/sweep.h"         // IWYU pragma: export
