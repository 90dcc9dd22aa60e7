// SPDX-License-Identifier: Apache-2.0
// A kernel of attention is compiled for one kind of rows. It multiplies rows of 16-bit values as they are, and converts
// the elements of quantized rows, whatever their format, to 16 bits before it multiplies them.
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
