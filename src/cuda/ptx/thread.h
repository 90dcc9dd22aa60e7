// SPDX-License-Identifier: Apache-2.0
// These functions say which thread is running (PTX ISA, "Special Registers"). Blocks are one-dimensional.
#pragma once

#include "cuda/ptx/site.h"

namespace mla::MLA_CUDA_NAMESPACE::ptx {

#if MLA_EMULATED
#define MLA_PTX_SPECIAL_REGISTER(name, reg, field) \
  MLA_DEVICE int name() { return emulator::current_thread->field; }
#else
#define MLA_PTX_SPECIAL_REGISTER(name, reg, field) \
  MLA_DEVICE int name() {                          \
    int value;                                     \
    asm("mov.u32 %0, %%" reg ";" : "=r"(value));   \
    return value;                                  \
  }
#endif

/// %tid.x: returns the thread's index in its block.
MLA_PTX_SPECIAL_REGISTER(thread_index, "tid.x", thread)
/// %ctaid.x, .y, .z: return the block's indices in the grid.
MLA_PTX_SPECIAL_REGISTER(block_index_x, "ctaid.x", block_x)
MLA_PTX_SPECIAL_REGISTER(block_index_y, "ctaid.y", block_y)
MLA_PTX_SPECIAL_REGISTER(block_index_z, "ctaid.z", block_z)
/// %nctaid.x, .y, .z: return the numbers of blocks of the grid.
MLA_PTX_SPECIAL_REGISTER(grid_size_x, "nctaid.x", grid_x)
MLA_PTX_SPECIAL_REGISTER(grid_size_y, "nctaid.y", grid_y)
MLA_PTX_SPECIAL_REGISTER(grid_size_z, "nctaid.z", grid_z)
#undef MLA_PTX_SPECIAL_REGISTER

/// %tid.x, read anew by every call: the compiler does not keep in registers what it computed of an earlier one.
MLA_DEVICE int thread_index_anew() {
#if MLA_EMULATED
  return thread_index();
#else
  int value;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(value));
  return value;
#endif
}

/// Returns the thread's index in its warp. It is computed and not read from %laneid, so that the compiler knows how it
/// depends on thread_index(). kAnew reads thread_index() anew.
template <bool kAnew = false>
MLA_DEVICE int lane() {
  return (kAnew ? thread_index_anew() : thread_index()) & (kWarpSize - 1);
}
/// Returns the warp's index in its block.
template <bool kAnew = false>
MLA_DEVICE int warp() {
  return static_cast<int>(static_cast<uint32_t>(kAnew ? thread_index_anew() : thread_index()) / kWarpSize);
}

}  // namespace mla::MLA_CUDA_NAMESPACE::ptx
