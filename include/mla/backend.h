// SPDX-License-Identifier: Apache-2.0
// What this machine has, which backends there are, and which one a problem would get, with every row's reason.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
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
  // Counts, all of them at least 1.
  int64_t num_heads = 128;
  int64_t d_qk = 576;  ///< also the width of a cache's rows, and of the indexer's keys (128)
  int64_t d_v = 512;
  /// Tensors on a GPU: its architecture, 80 for sm80, whether or not this machine has one; 0 = that of `device`.
  int32_t gpu_arch = 0;
  /// The GPU is an emulated one (ContextOptions::device), whose memory is the host's.
  bool emulated = false;
  /// decode_sparse with a second pool: its format.
  std::optional<CacheFormat> extra_cache = {};
  /// decode: query tokens of a request, over all requests on average, rounded up; 1 with batch_invariant. Others: as it
  /// is.
  int64_t q_len = 1;

  friend bool operator==(const Problem&, const Problem&) = default;
};

/// What numbers are multiplied and summed as.
enum class Arithmetic : uint8_t { kF64, kF32, kF16, kBF16, kE4M3 };

/// "f32", "bf16", ...
std::string_view name(Arithmetic arithmetic);

/// How a row computes scores and outputs, which bounds how far they are from exact ones. Rows that only move or rotate
/// channels say f32.
struct Numerics {
  Arithmetic multiplied = Arithmetic::kF32;  ///< both factors: queries and keys, softmax weights and values
  Arithmetic summed = Arithmetic::kF32;      ///< products
  /// Tensor cores add so many products to a sum at once and cut it off, towards zero. 0: every sum is rounded.
  int32_t products_per_cut = 0;
  /// Significant bits of a query that take part, where it has more than `multiplied` holds: 16 for two parts of bf16.
  int32_t query_bits = 24;

  friend bool operator==(const Numerics&, const Numerics&) = default;
};

/// One row of an operation's table, judged for one problem.
struct BackendVerdict {
  std::string name = {};  ///< "cpu_avx512_bf16", "reference", ...
  bool usable = false;
  std::string reason = {};  ///< why it is (not) usable
  Numerics numerics = {};   ///< how it computes this, or would
};

/// The whole table of `problem.op`, best first, and the row that would run.
struct Explanation {
  std::string selected = {};              ///< empty if no row can run the problem, or the forced one cannot
  std::string error = {};                 ///< why `selected` is empty
  std::vector<BackendVerdict> rows = {};  ///< empty if a count of the problem is below 1, as `error` says
};

/// Judges every row. `force` names a row ("cpu_avx2") or a family ("cpu"); a row that only other operations have
/// ("cuda_sm90") means its family; empty or "auto" means the environment variable MLA_BACKEND, and if that is unset,
/// the first usable row. MLA_EMULATE is not looked at: `problem` says what is emulated.
Explanation explain(const Problem& problem, std::string_view force = {});

/// One instruction-set level the CPU backend has code for.
struct IsaLevel {
  std::string name = {};    ///< "avx512_bf16", "avx512", "avx2", "portable"
  bool cpu_has = false;     ///< the processor reports every instruction set of the level
  bool os_allows = false;   ///< the operating system saves its registers
  bool built = false;       ///< this build holds code for it
  std::string detail = {};  ///< what is missing, or the instruction sets
};

/// A GPU as its driver lists it. What stands below `uuid` is 0 if the driver's library could not be asked.
struct GpuInfo {
  std::string name = {};               ///< "NVIDIA H200"
  std::string bus_location = {};       ///< "0000:19:00.0"
  std::string uuid = {};               ///< "GPU-...", empty if the driver does not know it yet
  int32_t index = -1;                  ///< N of "cuda:N"; -1 if this process cannot use it
  int32_t arch = 0;                    ///< 90 for compute capability 9.0
  int32_t num_sms = 0;                 ///< multiprocessors
  int64_t memory_bytes = 0;            ///< of the device
  int32_t shared_bytes_per_block = 0;  ///< most that a block may ask for
  int64_t l2_bytes = 0;                ///< second-level cache
};

struct MachineInfo {
  std::string cpu = {};                 ///< the processor's name
  int32_t threads = 1;                  ///< threads this process may run on
  std::vector<IsaLevel> isa = {};       ///< best first
  std::vector<GpuInfo> gpus = {};       ///< by bus location; empty without a driver
  std::string cuda = {};                ///< why no GPU can be used ("no NVIDIA driver"), empty if one can
  int32_t cuda_driver = 0;              ///< CUDA version that the driver supports, 13000 for 13.0; 0 without a driver
  int32_t cuda_runtime = 0;             ///< CUDA version of this build; 0 if it has no GPU code
  std::vector<int32_t> gpu_archs = {};  ///< architectures that this build has code for
  std::vector<int32_t> emulated_archs = {};  ///< architectures that this build can emulate
};

/// What was detected, once per process. Loads the GPUs' driver if there is one.
const MachineInfo& machine_info();
/// Its `isa`, without a look at GPUs: a process that has not touched the driver yet may still fork and use GPUs there.
const std::vector<IsaLevel>& isa_levels();

/// "0.1.0"
std::string_view version();

/// Names of all rows of an operation's table, best first.
std::vector<std::string> backend_names(Op op);

/// A backend, whichever machine this is: it has a row of its name in the table of each of its operations.
struct BackendInfo {
  std::string name = {};
  DeviceType device = DeviceType::kCpu;  ///< where its tensors are
  std::vector<int32_t> archs = {};       ///< architectures of GPUs that it is for; empty: all, or the CPU
  /// What it could run and leaves to the rows behind it, of which one does it faster: "indexers with up to 32 heads".
  /// Empty: nothing.
  std::string leaves = {};
};

/// All of them, in the order of the tables: those of GPUs, those of the CPU, the reference.
std::vector<BackendInfo> backends();

}  // namespace mla
