// SPDX-License-Identifier: Apache-2.0
// This file finds the processors that the process may use.
#pragma once

#include <cstdint>
#include <vector>

namespace mla::core {

/// Returns the numbers of the processors that the process may use, in ascending order: those of the calling thread.
/// OpenMP binds the thread that loads it to its first place where its environment asks for that (OMP_PROC_BIND,
/// OMP_PLACES, GOMP_CPU_AFFINITY, KMP_AFFINITY), and threads that are started later inherit that. A thread that has
/// exactly the processors of that place gets those of all of OpenMP's places, which are the ones that the process had
/// before; a thread that somebody binds elsewhere keeps its own. Empty if the system does not tell.
std::vector<int32_t> usable_processors();

}  // namespace mla::core
