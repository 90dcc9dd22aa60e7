// SPDX-License-Identifier: Apache-2.0
// This file makes the maps that the emulator's tensor copies read.
#pragma once

#include <cstddef>
#include <cstring>

#include "cuda/border/queue.h"
#include "emulator/emulator.h"

namespace mla::cuda {

/// Does what Queue::make_tensor_map does, for emulated GPUs that have tensor copies.
inline bool make_emulated_map(const RowTensor& tensor, TensorMap& map) {
  static_assert(sizeof(emulator::TensorMap) <= sizeof(TensorMap));
  if (!has_tensor_map(tensor)) return false;
  const emulator::TensorMap made = {.mark = emulator::TensorMap::kMark,
                                    .base = static_cast<const std::byte*>(tensor.base),
                                    .sizes = {tensor.channels, tensor.rows, tensor.heads},
                                    .strides = {tensor.row_stride, tensor.head_stride},
                                    .box_rows = tensor.box_rows,
                                    .box_heads = tensor.box_heads};
  map = {};
  std::memcpy(&map, &made, sizeof made);
  return true;
}

}  // namespace mla::cuda
