// SPDX-License-Identifier: Apache-2.0
// How an operation runs: workspace_size -> plan -> run. The caller owns every buffer; `run` neither allocates nor
// prints. Arguments are checked before anything is written: a call that returns an error has left the outputs alone.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mla/params.h"
#include "mla/status.h"

namespace mla {

struct ContextOptions {
  /// Workers, the calling thread among them; 0 = as many as the process may use.
  int32_t num_threads = 0;
  /// Processor of each worker: empty = not pinned, else num_threads entries. The first is ignored: the calling thread
  /// is worker 0 and stays where it is.
  std::vector<int32_t> affinity = {};
  /// A row or family to force; empty = MLA_BACKEND as it is now, else the best.
  std::string backend = {};
};

class Plan;

/// Owns the threads. Calls on one context are serialized; several contexts may be used at once.
class Context {
 public:
  static Result<Context> create(const ContextOptions& options = {});
  Context(Context&&) noexcept;
  Context& operator=(Context&&) noexcept;
  ~Context();

  int32_t num_threads() const;
  const std::string& backend() const;  ///< the forced backend, or empty
  bool valid() const;                  ///< false once moved from; every call with such a context is an error

  struct Impl;
  Impl& impl() const { return *impl_; }

 private:
  explicit Context(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// The decisions for one batch: backend, split of every request over the workers, place of everything in the
/// workspace. It refers to the caller's workspace, which must outlive it and must not be shared by runs that overlap.
class Plan {
 public:
  Plan();
  Plan(Plan&&) noexcept;
  Plan& operator=(Plan&&) noexcept;
  ~Plan();

  std::string_view backend() const;  ///< the row that will run
  std::string describe() const;      ///< tasks, splits, rows per task: for people
  bool valid() const;                ///< false if default-constructed or moved from
  size_t num_tasks() const;
  size_t num_splits() const;  ///< partial states to be merged, 0 if no request is split

  struct Impl;
  explicit Plan(std::unique_ptr<Impl> impl);
  const Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

/// Bytes of workspace (any alignment) that `plan` and `run` need for these shapes and lengths. It grows with the
/// threads and the number of splits; it does not grow with kv_len, except under batch_invariant, where the split of a
/// request is a function of its own kv_len.
Result<size_t> workspace_size(const Context& context, const DecodeParams& params);
Result<size_t> workspace_size(const Context& context, const PrefillParams& params);

/// Plans a batch. Reads shapes and lengths (qo_indptr, kv_len, kv_indptr), not the page numbers nor the data, whose
/// pointers may still be null. The same holds for workspace_size.
Result<Plan> plan(const Context& context, const DecodeParams& params, std::span<std::byte> workspace);
Result<Plan> plan(const Context& context, const PrefillParams& params, std::span<std::byte> workspace);

/// Runs a planned batch. Shapes and lengths must be those of the plan; data, page numbers, sm_scale, strides and the
/// output pointers may have changed since.
Status run(const Context& context, const Plan& plan, const DecodeParams& params);
Status run(const Context& context, const Plan& plan, const PrefillParams& params);

/// Operations that need neither plan nor workspace.
Status run(const Context& context, const MergeStatesParams& params);
Status run(const Context& context, const AppendParams& params);
Status run(const Context& context, const GatherParams& params);

}  // namespace mla
