// SPDX-License-Identifier: Apache-2.0
// What this machine has, which backends there are, and which one a problem would get, with every row's reason.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "mla/kv_layout.h"
#include "mla/status.h"
#include "mla/types.h"

namespace mla {

/// The part of an operation's parameters that decides which backend can run it.
struct Problem {
  Op op = Op::kDecode;
  Device device = {};
  /// Queries (attention, indexer), rows (append, append_rope, append_indexer, gather), states (merge_states). Others:
  /// as it is.
  DType q_dtype = DType::kBF16;
  /// Operations on a latent cache; of the first pool in decode_sparse, of the destination in copy_pages.
  /// prefill_sparse: bf16 or f16, as its rows.
  CacheFormat cache = CacheFormat::kBF16;
  int64_t num_heads = 128;
  int64_t d_qk = 576;  ///< also the width of a cache's rows, and of the indexer's keys (128)
  int64_t d_v = 512;

  friend bool operator==(const Problem&, const Problem&) = default;
};

/// One row of an operation's table, judged for one problem.
struct BackendVerdict {
  std::string name = {};  ///< "cpu_avx512_bf16", "reference", ...
  bool usable = false;
  std::string reason = {};  ///< why it is (not) usable
};

/// The whole table of `problem.op`, best first, and the row that would run.
struct Explanation {
  std::string selected = {};  ///< empty if no row can run the problem, or the forced one cannot
  std::string error = {};     ///< why `selected` is empty
  std::vector<BackendVerdict> rows = {};
};

/// Judges every row. `force` names a row ("cpu_avx2") or a family ("cpu"); empty or "auto" means the environment
/// variable MLA_BACKEND, and if that is unset, the first usable row.
Explanation explain(const Problem& problem, std::string_view force = {});

/// One instruction-set level the CPU backend has code for.
struct IsaLevel {
  std::string name = {};    ///< "avx512_bf16", "avx512", "avx2", "portable"
  bool cpu_has = false;     ///< the processor reports every instruction set of the level
  bool os_allows = false;   ///< the operating system saves its registers
  bool built = false;       ///< this build holds code for it
  std::string detail = {};  ///< what is missing, or the instruction sets
};

/// A GPU as its driver lists it.
struct GpuInfo {
  std::string name = {};          ///< "NVIDIA H200"
  std::string bus_location = {};  ///< "0000:19:00.0"
  std::string uuid = {};          ///< "GPU-...", empty if the driver does not know it yet
};

struct MachineInfo {
  std::string cpu = {};            ///< the processor's name
  int32_t threads = 1;             ///< threads this process may run on
  std::vector<IsaLevel> isa = {};  ///< best first
  std::vector<GpuInfo> gpus = {};  ///< by bus location; empty without a driver
};

/// What was detected, once per process.
const MachineInfo& machine_info();

/// "0.1.0"
std::string_view version();

/// Names of all rows of an operation's table, best first.
std::vector<std::string> backend_names(Op op);

}  // namespace mla
