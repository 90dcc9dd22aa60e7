// SPDX-License-Identifier: Apache-2.0
// These functions say what this machine has, which backends there are, and which one would run a problem, with every
// row's reason.
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

/// Holds the part of an operation's parameters that decides which backend can run it.
struct Problem {
  Op op = Op::kDecode;
  Device device = {};
  /// Names the type of queries (attention, indexer), of rows (append, append_rope, append_indexer, gather) or of states
  /// (merge_states). Other operations do not use it.
  DType q_dtype = DType::kBF16;
  /// Names the format of the latent cache: in decode_sparse that of the first pool, in copy_pages that of the
  /// destination, in prefill_sparse bf16 or f16 as its rows.
  CacheFormat cache = CacheFormat::kBF16;
  // All counts must be at least 1.
  int64_t num_heads = 128;
  int64_t d_qk = 576;  ///< also the width of a cache's rows, and of the indexer's keys (128)
  int64_t d_v = 512;
  /// Names, for tensors on a GPU, the GPU's architecture, 80 for sm80, whether or not this machine has one; 0 = that of
  /// `device`.
  int32_t gpu_arch = 0;
  /// Is set if the GPU is an emulated one (ContextOptions::device), whose memory is the host's.
  bool emulated = false;
  /// Asks what a build with code for every GPU would do (gpu_code). Verdicts then say "not in this build" of what this
  /// one lacks. Nothing runs by such a verdict: only `explain` looks at it, and only for GPUs that are not emulated.
  bool full_build = false;
  /// Names the format of the second pool of decode_sparse, if there is one.
  std::optional<CacheFormat> extra_cache = {};
  /// Counts, in decode, the query tokens per request, averaged over all requests and rounded up; 1 with
  /// batch_invariant. Other operations do not use it.
  int64_t q_len = 1;
  /// Counts, in decode_sparse and prefill_sparse, the call's query tokens times the entries of a token's lists, those
  /// of both pools; 0 = unknown: many. Few are computed by other kernels. 0 with batch_invariant. Other operations do
  /// not use it.
  int64_t listed_keys = 0;
  /// Counts, in decode, the requests; 0 = unknown: many. A few requests of some shapes are computed by other kernels. 0
  /// with batch_invariant. Other operations do not use it.
  int64_t num_requests = 0;
  /// Names the arithmetic of decode, decode_sparse and prefill, AttentionOptions::compute, and what indexer_logits and
  /// indexer_top_k allow, IndexerLogitsParams::compute, where every key has a logit (else kDefault). Others have only
  /// kDefault.
  Compute compute = Compute::kDefault;
  /// Names the format of the indexer's keys, in append_indexer, indexer_logits and indexer_top_k. Other operations do
  /// not use it.
  IndexerFormat indexer_format = IndexerFormat::kFP8;
  /// Names the type of the logits, in indexer_logits, indexer_top_k and top_k. Other operations do not use it.
  DType logits_dtype = DType::kF32;

  friend bool operator==(const Problem&, const Problem&) = default;
};

/// Names the types in which numbers are multiplied and summed.
enum class Arithmetic : uint8_t { kF64, kF32, kF16, kBF16, kE4M3 };

/// Returns "f32", "bf16", ...
std::string_view name(Arithmetic arithmetic);

/// Says how a row computes scores and outputs, which bounds their error. Rows that only move or rotate channels have
/// f32.
struct Numerics {
  Arithmetic multiplied = Arithmetic::kF32;  ///< type of both factors: queries and keys, P and values
  Arithmetic summed = Arithmetic::kF32;      ///< type in which products are summed
  /// Counts the products that tensor cores add to a sum at once before they truncate it, towards zero. 0: every sum is
  /// rounded.
  int32_t products_per_cut = 0;
  /// Counts the significant bits of a query that are used where it has more than `multiplied` holds: 16 for two terms
  /// of bf16.
  int32_t query_bits = 24;
  /// Counts the significant bits that tensor cores keep of a sum before they truncate it. Hopper keeps 14 of sums of
  /// e4m3 products.
  int32_t sum_bits = 24;
  /// Counts, with compute = fp8, the keys of a run, whose P have one scale (AttentionOptions::compute).
  int32_t p_run = 32;

  friend bool operator==(const Numerics&, const Numerics&) = default;
};

/// Holds the verdict on one row of an operation's table, for one problem.
struct BackendVerdict {
  std::string name = {};  ///< "cpu_avx512_bf16", "reference", ...
  bool usable = false;
  std::string reason = {};  ///< why the row is, or is not, usable
  Numerics numerics = {};   ///< how the row computes the problem, or would
};

/// Says which code a GPU runs, whether or not this machine has one.
struct GpuCode {
  int32_t arch = 0;        ///< architecture that the code was compiled for, 80 for sm80; 0 if there is none
  bool by_driver = false;  ///< the GPU's driver compiles it, from the PTX of `arch`
  bool family = false;     ///< it was compiled for another GPU of the same family
  bool built = false;      ///< this build has it
  /// Names the architecture whose instructions the code has: `arch`, but in a build with a profile (MLA_CUDA_PROFILE)
  /// that of the GPU which passes for one of `arch`.
  int32_t compiled_for = 0;

  friend bool operator==(const GpuCode&, const GpuCode&) = default;
};

/// Holds the table of `problem.op`, best row first, and the row that would run.
struct Explanation {
  std::string selected = {};              ///< empty if no row can run the problem, or the forced one cannot
  std::string error = {};                 ///< why `selected` is empty
  std::vector<BackendVerdict> rows = {};  ///< empty if a count of the problem is below 1, as `error` says
  /// Says what the problem's GPU runs, in a full build if the problem asks about one. There is none on the CPU, of an
  /// emulated GPU, and of a device that this machine lacks.
  std::optional<GpuCode> code = {};
  /// Says what this build does otherwise than the full one that was asked about; empty if nothing.
  std::string note = {};
};

/// Judges every row. `force` names a row ("cpu_avx2") or a family ("cpu"); a row that only other operations have
/// ("cuda_sm90") means its family; empty or "auto" means the environment variable MLA_BACKEND, and if that is unset,
/// the first usable row. MLA_EMULATE is not looked at: `problem` says what is emulated.
Explanation explain(const Problem& problem, std::string_view force = {});

/// Returns the code that a GPU of an architecture (103 for compute capability 10.3) runs in this build. With
/// `full_build` it is the code of a build that has what this one has, and cubins for every GPU.
GpuCode gpu_code(int32_t arch, bool full_build = false);

/// Returns what a GPU runs, in words: "sm90", "the family of sm100", "sm80, which the driver compiles"; with "not in
/// this build" or "none" where that is so.
std::string code_text(const GpuCode& code);

/// Returns the architectures of GPUs, beside those that a build has by default, that can have a build by name
/// (MLA_CUDA_ARCHS): 103, 110 and 121.
std::span<const int32_t> named_gpu_archs();

/// Describes one instruction set that the CPU backend has code for.
struct IsaLevel {
  std::string name = {};    ///< "avx512_bf16", "avx512", "avx2", "neon_bf16", "portable"
  bool cpu_has = false;     ///< the processor reports every instruction set of the level
  bool os_allows = false;   ///< the operating system saves its registers
  bool built = false;       ///< this build holds code for it
  std::string detail = {};  ///< what is missing, or the instruction sets
  /// What a thread multiplies and adds in a second with the level's widest instruction, in 10^9 operations, measured
  /// once per process in less than a millisecond; 0 if it is not. Of two levels that could compute a problem the choice
  /// is by it.
  double gflops = 0;
};

/// Describes a GPU as its driver lists it. The fields below `uuid` are 0 if the driver's library could not be asked.
struct GpuInfo {
  std::string name = {};               ///< "NVIDIA H200"
  std::string bus_location = {};       ///< "0000:19:00.0"
  std::string uuid = {};               ///< "GPU-...", empty if the driver does not know it yet
  int32_t index = -1;                  ///< N of "cuda:N"; -1 if this process cannot use it
  int32_t arch = 0;                    ///< 90 for compute capability 9.0
  int32_t num_sms = 0;                 ///< streaming multiprocessors
  int64_t memory_bytes = 0;            ///< device memory
  int32_t shared_bytes_per_block = 0;  ///< most shared memory that a block may have
  int64_t l2_bytes = 0;                ///< second-level cache
};

struct MachineInfo {
  std::string cpu = {};                 ///< the processor's name
  int32_t threads = 1;                  ///< processors this process may use
  std::vector<IsaLevel> isa = {};       ///< best first
  std::vector<GpuInfo> gpus = {};       ///< by bus location; empty without a driver
  std::string cuda = {};                ///< why no GPU can be used ("no NVIDIA driver"), empty if one can
  int32_t cuda_driver = 0;              ///< CUDA version that the driver supports, 13000 for 13.0; 0 without a driver
  int32_t cuda_runtime = 0;             ///< CUDA version of this build; 0 if it has no GPU code
  std::vector<int32_t> gpu_archs = {};  ///< architectures that this build has code for
  std::vector<int32_t> emulated_archs = {};  ///< architectures that this build can emulate
};

/// Returns what was detected, once per process. Loads the GPUs' driver if there is one.
const MachineInfo& machine_info();
/// Returns machine_info().isa without looking at GPUs, since only a process that has not loaded the driver may still
/// fork and use GPUs in the child.
const std::vector<IsaLevel>& isa_levels();

/// Returns the numbers of the processors that the process may use, in ascending order; empty if the system does not
/// tell. These are the calling thread's; where OpenMP has bound that to the first of its places (OMP_PROC_BIND), those
/// of all of them. Threads of a Context run on them.
std::vector<int32_t> usable_processors();

/// Returns the version, as "0.1.0"; in a wheel of `make wheels` with its label, "0.1.0+cpu" or "0.1.0+cu130".
std::string_view version();

/// Returns the names of all rows of an operation's table, best first.
std::vector<std::string> backend_names(Op op);

/// Describes a backend of the library, on any machine. It has a row of its name in the table of each of its operations.
struct BackendInfo {
  std::string name = {};
  DeviceType device = DeviceType::kCpu;  ///< where its tensors are
  /// Lists the architectures of GPUs that it is for, those with the kernels of another one among them; empty: all, or
  /// the CPU.
  std::vector<int32_t> archs = {};
  /// Names the problems that it could run and leaves to the rows behind it, one of which is faster: "indexers with up
  /// to 32 heads". It is empty if there are none.
  std::string leaves = {};
};

/// Returns all backends in the order of the tables: those of GPUs, those of the CPU, the reference.
std::vector<BackendInfo> backends();

}  // namespace mla
