// SPDX-License-Identifier: Apache-2.0
// The PTX layer has one function per instruction that the kernels use, each with a body for the GPU and one for the
// emulator. It is the only place where `asm` is allowed, and all that kernels know of their machine.
#pragma once

#include "cuda/ptx/arithmetic.h"
#include "cuda/ptx/async_copy.h"
#include "cuda/ptx/cache_policy.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/convert.h"
#include "cuda/ptx/e4m3.h"
#include "cuda/ptx/global.h"
#include "cuda/ptx/grid.h"
#include "cuda/ptx/machine.h"
#include "cuda/ptx/matrix.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/parameters.h"
#include "cuda/ptx/reciprocal.h"
#include "cuda/ptx/registers.h"
#include "cuda/ptx/scaled_matrix.h"
#include "cuda/ptx/shared.h"
#include "cuda/ptx/shared_atomics.h"
#include "cuda/ptx/sync.h"
#include "cuda/ptx/tensor_copy.h"
#include "cuda/ptx/thread.h"
#include "cuda/ptx/warp.h"
