// SPDX-License-Identifier: Apache-2.0
// A kernel of attention is compiled for one kind of rows. It multiplies rows of 16-bit values as they are, and converts
// the elements of quantized rows, whatever their format, to 16 bits before it multiplies them. kE4M3 is a special case
// of kQuantized that some kernels have: e4m3 with one scale for all latent channels of a cache, and one for the rotary.
// So is kE2M1: e2m1 with e4m3 scales of 16 channels each, in rows that are one range of bytes.
#pragma once

#include <cstdint>

#include "cuda/ptx/machine.h"
#include "mla/kv_layout.h"

namespace mla::MLA_CUDA_NAMESPACE {

enum class KeyKind : uint8_t { kBF16, kF16, kQuantized, kE4M3, kE2M1 };

constexpr KeyKind key_kind(DType element) {
  if (is_quantized(element)) return KeyKind::kQuantized;
  return element == DType::kF16 ? KeyKind::kF16 : KeyKind::kBF16;
}

}  // namespace mla::MLA_CUDA_NAMESPACE
