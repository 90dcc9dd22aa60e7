// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cuda/ptx/machine.h"

namespace mla::MLA_CUDA_NAMESPACE {

/// What the cache's elements are.
enum class KeyKind : uint8_t { kBF16, kF16, kE4M3 };

}  // namespace mla::MLA_CUDA_NAMESPACE
