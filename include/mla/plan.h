// SPDX-License-Identifier: Apache-2.0
// An operation runs in three steps: workspace_size -> plan -> run. The caller owns every buffer; `run` neither
// allocates nor prints. Arguments are checked before anything is written, so that a call that refuses them leaves the
// outputs unchanged.
//
// With tensors on a GPU, `plan` and `run` put kernels into the stream and return; they neither wait nor look at the
// contents of the GPU's memory, so that a CUDA graph may capture them. Lengths, page numbers, indices and scales are
// therefore not checked (shapes, strides and element types are), and a workspace is memory of the GPU, large enough for
// any lengths that fit the shapes. A plan is a kernel of its own: after kv_len or qo_indptr changed in place, enqueue
// it again, or replay a graph that holds it.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mla/params.h"
#include "mla/status.h"

namespace mla {

struct ContextOptions {
  /// Sets the number of workers, the calling thread among them; 0 = as many as `affinity` names processors, or where it
  /// is empty, as many as the process may use.
  int32_t num_threads = 0;
  /// Names the processor that each worker is pinned to: empty = not pinned, else num_threads entries. The first entry
  /// is ignored: the calling thread is worker 0 and stays where it is. Workers that are not pinned may use the
  /// processors that the thread which creates the context may use at that moment (usable_processors() of
  /// mla/backend.h). Which processors read a cache decides how fast they do where a machine has several sockets
  /// (docs/cpp.md).
  std::vector<int32_t> affinity = {};
  /// Names the row or family to force; in operations that have no such row, its family is forced. Empty = MLA_BACKEND
  /// as it is now, else the best row.
  std::string backend = {};
  /// Names the device on which the context computes:
  /// - "cpu", "cuda:1" ("cuda" is "cuda:0"): that device; tensors elsewhere are an error;
  /// - "emulated:sm120" (sm80, sm86, sm89, sm90, sm100, sm103, sm121): the kernels of that GPU on the context's
  ///   threads, in the emulator. All tensors, on the CPU or said to be on a GPU, are host memory that stands for the
  ///   GPU's;
  /// - empty: the device that MLA_EMULATE names ("sm120"), if it is set now; else, for each call, that of its tensors.
  std::string device = {};
  /// Counts, for the row `reference` with compute = fp8, the keys whose P have one scale: 32 (0), 64 or 128, as the
  /// Numerics of a row that it is compared with say. Other rows have their own.
  int32_t p_run = 0;
};

class Plan;

/// Owns the threads. Calls on one context are serialized: from several threads, one `plan` writes or one `run` computes
/// at a time, and the others wait. Several contexts may be used at once, with a workspace each.
class Context {
 public:
  static Result<Context> create(const ContextOptions& options = {});
  Context(Context&&) noexcept;
  Context& operator=(Context&&) noexcept;
  ~Context();

  int32_t num_threads() const;
  const std::string& backend() const;  ///< returns the forced backend, or ""
  const std::string& device() const;   ///< returns "cpu", "cuda:0", "emulated:sm90"; "": where the tensors are
  bool valid() const;                  ///< is false once moved from; every call with such a context is an error

  struct Impl;
  Impl& impl() const { return *impl_; }

 private:
  explicit Context(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// A Plan holds the decisions for one batch: the backend, the split of every request over the workers, and the place of
/// everything in the workspace. From `plan` on the caller's workspace belongs to the plan, all of it, and must outlive
/// it; no tensor of a `run` may lie there, which is checked. Planning again from the same address gives it to the new
/// plan: running the earlier one is an error from then on. So is running a plan whose workspace begins with other bytes
/// than `plan` wrote. Other writes into the workspace go unnoticed and are undefined, as are runs of one plan on two
/// contexts at once. On a GPU both go unnoticed: order the stream accordingly.
class Plan {
 public:
  Plan();
  Plan(Plan&&) noexcept;
  Plan& operator=(Plan&&) noexcept;
  ~Plan();

  std::string_view backend() const;  ///< returns the row that will run
  std::string describe() const;      ///< tells tasks, splits and rows per task, as text for people
  bool valid() const;                ///< is false if default-constructed or moved from
  size_t num_tasks() const;
  size_t num_splits() const;  ///< returns the partial states to be merged, 0 if no request is split

  struct Impl;
  explicit Plan(std::unique_ptr<Impl> impl);
  const Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

/// Returns the bytes of workspace (of any alignment) that `plan` and `run` need for these shapes and lengths; 0 if
/// there is no query. The reference takes 520 * (d_qk + d_v) + 128 bytes for any batch, with compute = fp8 512 * d_v +
/// 16384 more. Other backends' grows with
/// - the threads: the tiles of each (at most 1.2 MiB), and in decode, if there are several, room for 16 partial
///   states each of 4 * R * (d_v + 1) bytes, R being the rows (queries x heads) of a block, at most 256;
/// - the blocks of query rows, 40 bytes each: at most T * H / 16 + B (prefill: + B * H) of them.
/// It does not grow with kv_len, except in decode under batch_invariant, where the split of a request is a function of
/// its own lengths. The room for partial states is then, instead, the sum over the row blocks of every request that is
/// split of min(keys / 2048, 8) * 4 * R * (d_v + 1) bytes, keys being those that the block sees.
/// On a GPU it depends on shapes and on the GPU alone.
Result<size_t> workspace_size(const Context& context, const DecodeParams& params);
Result<size_t> workspace_size(const Context& context, const PrefillParams& params);
Result<size_t> workspace_size(const Context& context, const DecodeSparseParams& params);
Result<size_t> workspace_size(const Context& context, const PrefillSparseParams& params);

/// Plans a batch. Reads shapes and lengths (qo_indptr, kv_len, kv_indptr), not the page numbers nor the data, whose
/// pointers may still be null. The same holds for workspace_size.
Result<Plan> plan(const Context& context, const DecodeParams& params, std::span<std::byte> workspace,
                  Stream stream = {});
Result<Plan> plan(const Context& context, const PrefillParams& params, std::span<std::byte> workspace,
                  Stream stream = {});
Result<Plan> plan(const Context& context, const DecodeSparseParams& params, std::span<std::byte> workspace,
                  Stream stream = {});
Result<Plan> plan(const Context& context, const PrefillSparseParams& params, std::span<std::byte> workspace,
                  Stream stream = {});

/// Returns memory for a workspace of so many bytes, apart from all tensors of the call.
using WorkspaceSource = std::function<std::span<std::byte>(size_t bytes)>;

/// Do the same as workspace_size and plan in one, in memory that `source` is asked for once the size is known.
Result<Plan> plan_with(const Context& context, const DecodeParams& params, const WorkspaceSource& source,
                       Stream stream = {});
Result<Plan> plan_with(const Context& context, const PrefillParams& params, const WorkspaceSource& source,
                       Stream stream = {});
Result<Plan> plan_with(const Context& context, const DecodeSparseParams& params, const WorkspaceSource& source,
                       Stream stream = {});
Result<Plan> plan_with(const Context& context, const PrefillSparseParams& params, const WorkspaceSource& source,
                       Stream stream = {});

/// Runs a planned batch. Shapes and lengths must be those of the plan, and so must be causal, window_left, compute, the
/// presence of a draft tree, context_parallel, batch_invariant and lse_inf_without_keys; data, page numbers, indices,
/// topk_length, sm_scale, the other options, strides and the output pointers may have changed since. A context that
/// forces a backend runs only plans of that backend.
Status run(const Context& context, const Plan& plan, const DecodeParams& params, Stream stream = {});
Status run(const Context& context, const Plan& plan, const PrefillParams& params, Stream stream = {});
Status run(const Context& context, const Plan& plan, const DecodeSparseParams& params, Stream stream = {});
Status run(const Context& context, const Plan& plan, const PrefillSparseParams& params, Stream stream = {});

/// These operations need neither a plan nor a workspace.
Status run(const Context& context, const MergeStatesParams& params, Stream stream = {});
Status run(const Context& context, const AppendParams& params, Stream stream = {});
Status run(const Context& context, const GatherParams& params, Stream stream = {});
Status run(const Context& context, const AppendRopeParams& params, Stream stream = {});
Status run(const Context& context, const CopyPagesParams& params, Stream stream = {});
Status run(const Context& context, const BlockTableToCsrParams& params, Stream stream = {});
Status run(const Context& context, const PhysicalSlotsParams& params, Stream stream = {});
Status run(const Context& context, const AppendIndexerParams& params, Stream stream = {});
Status run(const Context& context, const IndexerLogitsParams& params, Stream stream = {});
Status run(const Context& context, const TopKParams& params, Stream stream = {});
Status run(const Context& context, const IndexerTopKParams& params, Stream stream = {});
Status run(const Context& context, const CompressParams& params, Stream stream = {});
Status run(const Context& context, const FinishOutputParams& params, Stream stream = {});

}  // namespace mla
