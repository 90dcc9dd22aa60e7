// SPDX-License-Identifier: Apache-2.0
// A backend of GPUs as the rest of the library sees it. Each is a folder of src/cuda/backends: backend.cpp says what
// stands here, the other files are its kernels.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/implementation.h"
#include "cuda/border/operations.h"

namespace mla::cuda {

struct Backend {
  std::string_view name = {};     ///< of its rows: "cuda_" and what it is called
  std::string_view kernels = {};  ///< that multiply on tensor cores, for its verdict: "wgmma kernels"
  std::string_view gpus = {};     ///< examples of those it is for
  std::span<const Op> ops = {};   ///< in whose tables it has a row
  /// Why not this problem, of a GPU that the backend is for; empty if it takes it.
  core::Reason (*refusal)(const Problem& problem) = nullptr;
  Numerics (*numerics)(const Problem& problem) = nullptr;
  core::Reason leaves = {};  ///< BackendInfo::leaves

  // What follows is known from its line in src/cuda/CMakeLists.txt.

  /// Its operations in code for one architecture.
  struct Compiled {
    int32_t arch;
    bool emulated;
    const Operations& (*operations)();
  };
  std::vector<int32_t> archs = {};  ///< that it is for; empty: all
  std::string needs = {};           ///< the same as text: "sm90 (H100, H200)"
  std::vector<Compiled> compiled = {};

  bool has(Op op) const;
  bool is_for(int32_t arch) const;
  /// Null if this build has none.
  const Operations* operations(int32_t arch, bool emulated) const;
};

/// All of this build, those before others that they leave problems to.
std::span<const Backend> backends();

}  // namespace mla::cuda
