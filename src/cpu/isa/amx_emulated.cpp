// SPDX-License-Identifier: Apache-2.0
#define MLA_CPU_ISA amx_emulated
#define MLA_CPU_BF16_PAIRS 1
#define MLA_CPU_TILES 2
#include "cpu/row_kernels-inl.h"
#include "cpu/tile_kernels-inl.h"

namespace mla::cpu {
const TileKernels* tile_kernels_amx_emulated_pairs() { return &amx_emulated::kTable; }
const RowKernels* row_kernels_amx_emulated() { return &amx_emulated::kRowTable; }
}  // namespace mla::cpu
