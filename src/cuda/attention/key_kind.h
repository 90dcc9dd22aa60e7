// SPDX-License-Identifier: Apache-2.0
// For which rows a kernel of attention is compiled: those of 16-bit values are multiplied as they are, codes of any
// quantized format are decoded on the way.
#pragma once

#include <cstdint>

#include "cuda/ptx/machine.h"
#include "mla/kv_layout.h"

namespace mla::MLA_CUDA_NAMESPACE {

enum class KeyKind : uint8_t { kBF16, kF16, kQuantized };

constexpr KeyKind key_kind(DType element) {
  if (is_quantized(element)) return KeyKind::kQuantized;
  return element == DType::kF16 ? KeyKind::kF16 : KeyKind::kBF16;
}

}  // namespace mla::MLA_CUDA_NAMESPACE
