// SPDX-License-Identifier: Apache-2.0
// This file lists the instruction sets that the CPU backend is compiled for. Each is an object that holds all that the
// rest of the library knows of it.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "core/implementation.h"
#include "cpu/operations.h"
#include "mla/backend.h"

namespace mla::cpu {

/// Names the vector registers that the operating system must save on a task switch. kNeon belongs to 64-bit Arm, where
/// it always does; the
/// others to x86-64.
enum class Registers : uint8_t { kBaseline, kYmm, kZmm, kTiles, kNeon };

struct Level {
  std::string_view name;                    // "avx2"
  std::string_view row;                     // name of its row in every table: "cpu_avx2"
  std::span<const std::string_view> needs;  // features that the processor must report, as Linux names them
  Registers registers;
  // How bf16 queries are multiplied with keys that bf16 holds; all others are multiplied in f32.
  Arithmetic multiplied;
  bool all_operations = true;     // false: only those that multiply, attention and the indexer's logits
  const KernelSet& (*kernels)();  // null if not in this build; may be called only where the machine has the level
  // Measures, in some 10 us, what a thread multiplies and adds in a second with the level's widest instruction, in 10^9
  // operations; null if nobody needs to know.
  double (*burst)();
  bool in_software = false;  // stands in for instructions of another processor, for tests
};

/// Returns all levels, the best first.
std::span<const Level> levels();

/// Returns what this machine or this build lacks for the level; empty if nothing.
core::Reason missing(const Level& level);

/// Returns what a thread multiplies with the level's widest instruction, in 10^9 operations a second; 0 if unknown.
double gflops(const Level& level, std::span<const IsaLevel> isa);

/// Returns why, on this machine, a level that multiplies bf16 is slower than f32's FMA; empty if it is not. The bf16
/// dot product has twice that rate on some processors (AMD Zen 5: 471 and 252 GFLOP/s a thread), and half of it on
/// others (Intel with AMX: 69 and 140), whose models virtual machines hide; Arm's are
/// measured where the library runs. isa_levels() has the rates.
core::Reason slower_pairs(const Level& level, std::span<const IsaLevel> isa);

/// Returns how the level computes a problem.
Numerics numerics(const Level& level, const Problem& problem);

}  // namespace mla::cpu
