// SPDX-License-Identifier: Apache-2.0
// This file has a backend of GPUs as the rest of the library sees it. Each backend is a folder of src/cuda/backends:
// its backend.cpp fills this struct, and the other files are its kernels.
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
  std::string_view name = {};     ///< name of its table rows: "cuda_" and the folder's name
  std::string_view kernels = {};  ///< the kernels that use tensor cores, as text for its verdict: "wgmma kernels"
  std::string_view gpus = {};     ///< examples of GPUs that it is for
  std::span<const Op> ops = {};   ///< operations in whose tables it has a row
  /// Returns why the backend refuses a problem on a GPU that it is for; empty if it takes the problem.
  core::Reason (*refusal)(const Problem& problem) = nullptr;
  Numerics (*numerics)(const Problem& problem) = nullptr;
  /// Returns why a backend behind it is faster at a problem that it takes; empty if none is. May be null.
  core::Reason (*yields)(const Problem& problem) = nullptr;
  core::Reason leaves = {};  ///< BackendInfo::leaves

  // The fields below come from the backend's line in src/cuda/CMakeLists.txt.

  /// Holds the backend's operations in code for one architecture.
  struct Compiled {
    int32_t arch;
    bool emulated;
    const Operations& (*operations)();
  };
  std::vector<int32_t> archs = {};  ///< architectures that its kernels were written for; empty for all
  std::string needs = {};           ///< as text, with those that have the same kernels: "sm120 or sm121 (RTX 50)"
  std::vector<Compiled> compiled = {};

  bool has(Op op) const;
  /// Says whether it is for GPUs of an architecture, which may be one that has the kernels of another (ptx/archs.h).
  bool is_for(int32_t arch) const;
  /// Returns the operations for an architecture; null if this build has none.
  const Operations* operations(int32_t arch, bool emulated) const;
};

/// Returns all backends of this build. A backend that leaves problems to another one stands before it.
std::span<const Backend> backends();

}  // namespace mla::cuda
