// SPDX-License-Identifier: Apache-2.0
// The instruction sets that the backend of the CPU is compiled for, each an object that says all the rest of the
// library knows of it.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "core/implementation.h"
#include "cpu/operations.h"
#include "mla/backend.h"

namespace mla::cpu {

/// Vector registers that the operating system must save on a task switch.
enum class Registers : uint8_t { kBaseline, kYmm, kZmm };

struct Level {
  std::string_view name;                    // "avx2"
  std::string_view row;                     // in every table: "cpu_avx2"
  std::span<const std::string_view> needs;  // what the processor must report, as Linux names it; empty: nothing
  Registers registers;
  Arithmetic multiplied;          // of bf16 queries with keys that bf16 holds; all others in f32
  const KernelSet& (*kernels)();  // null: not in this build. Only called where the machine has the level
};

/// Best first.
std::span<const Level> levels();

/// What this machine or this build lacks for the level; empty if nothing.
core::Reason missing(const Level& level);

/// How the level computes a problem.
Numerics numerics(const Level& level, const Problem& problem);

}  // namespace mla::cpu
