// SPDX-License-Identifier: Apache-2.0
#define MLA_CPU_ISA amx
#define MLA_CPU_BF16_PAIRS 1
#define MLA_CPU_TILES 1
#include "cpu/row_kernels-inl.h"
#include "cpu/tile_burst-inl.h"
#include "cpu/tile_kernels-inl.h"

namespace mla::cpu {
const TileKernels* tile_kernels_amx_pairs() { return &amx::kTable; }
const RowKernels* row_kernels_amx() { return &amx::kRowTable; }
double burst_amx() { return amx::burst_of_tiles(); }
}  // namespace mla::cpu
