// SPDX-License-Identifier: Apache-2.0
// By these parameters wrappers tell the emulator where they were called. Their default arguments find the place, no
// caller passes them, and the GPU's build does not have them.
#pragma once

#include "cuda/ptx/machine.h"

#if MLA_EMULATED
#include "emulator/device.h"
/// The macro stands last in a parameter list: MLA_PTX_SITE behind other parameters, MLA_PTX_SITE_ONLY alone.
#define MLA_PTX_SITE , const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define MLA_PTX_SITE_ONLY const char *file = __builtin_FILE(), int line = __builtin_LINE()
/// Gives the value of those parameters.
#define MLA_PTX_HERE \
  ::mla::emulator::Site { file, line }
#else
#define MLA_PTX_SITE
#define MLA_PTX_SITE_ONLY
#endif
