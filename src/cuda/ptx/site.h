// SPDX-License-Identifier: Apache-2.0
// How wrappers tell the emulator where they were called: parameters that nobody passes, and that the GPU's build lacks.
#pragma once

#include "cuda/ptx/machine.h"

#if MLA_EMULATED
#include "emulator/device.h"
/// Last in a parameter list: behind other parameters, or alone.
#define MLA_PTX_SITE , const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define MLA_PTX_SITE_ONLY const char *file = __builtin_FILE(), int line = __builtin_LINE()
/// The value of those parameters.
#define MLA_PTX_HERE \
  ::mla::emulator::Site { file, line }
#else
#define MLA_PTX_SITE
#define MLA_PTX_SITE_ONLY
#endif
