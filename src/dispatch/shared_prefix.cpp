// SPDX-License-Identifier: Apache-2.0
#include "dispatch/shared_prefix.h"

#include <algorithm>
#include <span>
#include <string>

#include "core/format.h"
#include "cuda/border/backend.h"
#include "plan/shared_prefix.h"

namespace mla::dispatch {
namespace {

using core::Executor;
using core::PlanSummary;

constexpr int32_t kNumStates = 2;  // that of the group's keys, and that of the request's own

/// Says what lies where in the workspace. Sizes depend on shapes alone.
class Layout {
 public:
  Layout(const core::DecodeArgs& args, std::byte* base) : base_(base) {
    const int64_t batch = args.batch_size, rows = args.num_tokens * args.num_heads;
    found = {.batch_size = args.batch_size, .pages = args.pages, .queries = args.queries};
    found.common_pages = take<int32_t>(batch);
    found.group_qo_indptr = take<int32_t>(batch + 1);
    found.group_kv_indptr = take<int32_t>(batch + 1);
    found.group_kv_len = take<int32_t>(batch);
    found.own_kv_indptr = take<int32_t>(batch + 1);
    found.own_kv_len = take<int32_t>(batch);
    partial_lse = take<float>(kNumStates * rows);
    partial_o = take<float>(kNumStates * rows * args.d_v);
  }

  /// Returns the next `bytes` bytes.
  std::span<std::byte> take_bytes(size_t bytes) {
    std::byte* const at = base_ != nullptr ? base_ + used_ : nullptr;
    used_ += (bytes + core::kWorkspaceAlignment - 1) / core::kWorkspaceAlignment * core::kWorkspaceAlignment;
    return {at, base_ != nullptr ? bytes : 0};
  }
  size_t used() const { return used_; }

  core::SharedPrefixArgs found;
  float* partial_lse;  // [2, T, H]
  float* partial_o;    // [2, T, H, d_v]

 private:
  template <class T>
  T* take(int64_t count) {
    return reinterpret_cast<T*>(take_bytes(static_cast<size_t>(count) * sizeof(T)).data());
  }

  std::byte* base_;
  size_t used_ = 0;
};

/// Returns the element `offset` places behind `base`; null for null, where memory is only counted.
float* behind(float* base, int64_t offset) { return base != nullptr ? base + offset : nullptr; }

/// Returns the decode whose outputs are one of the partial states.
core::DecodeArgs partial(core::DecodeArgs args, const Layout& layout, int32_t state) {
  const int64_t rows = args.num_tokens * args.num_heads;
  args.shared_prefix = false;
  args.lse_form.inf_without_keys = false;  // merge_states knows states without keys by -inf
  args.o_dtype = DType::kF32;
  args.o = behind(layout.partial_o, state * rows * args.d_v);
  args.o_stride_token = int64_t{args.num_heads} * args.d_v;
  args.o_stride_head = args.d_v;
  args.lse = behind(layout.partial_lse, state * rows);
  args.lse_stride_token = args.num_heads;
  args.lse_stride_head = 1;
  return args;
}

core::Pages pages_from(core::Pages pages, const int32_t* kv_indptr, const int32_t* kv_len) {
  pages.kv_indptr = kv_indptr;
  pages.table_stride_request = 0;
  pages.kv_len = kv_len;
  return pages;
}

/// Returns the decode of the groups. Nobody knows on the host of a GPU how long they are: kernels are chosen for one
/// group of all requests.
core::DecodeArgs groups_of(const core::DecodeArgs& args, const Layout& layout) {
  core::DecodeArgs groups = partial(args, layout, 0);
  groups.pages = pages_from(args.pages, layout.found.group_kv_indptr, layout.found.group_kv_len);
  groups.queries = {.indptr = layout.found.group_qo_indptr};
  groups.expected_q_len = args.num_tokens;
  groups.causal = false;
  groups.tree_mask = nullptr;
  groups.tree_parents = nullptr;
  return groups;
}

core::DecodeArgs own_of(const core::DecodeArgs& args, const Layout& layout) {
  core::DecodeArgs own = partial(args, layout, 1);
  own.pages = pages_from(args.pages, layout.found.own_kv_indptr, layout.found.own_kv_len);
  return own;
}

core::MergeStatesArgs merge_of(const core::DecodeArgs& args, const Layout& layout) {
  const int64_t heads = args.num_heads, rows = args.num_tokens * heads;
  return {.num_states = kNumStates,
          .num_tokens = args.num_tokens,
          .num_heads = args.num_heads,
          .d_v = args.d_v,
          .lse_form = args.lse_form,
          .partial_dtype = DType::kF32,
          .partial_o = layout.partial_o,
          .partial_o_stride_state = rows * args.d_v,
          .partial_o_stride_token = heads * args.d_v,
          .partial_o_stride_head = args.d_v,
          .partial_lse = layout.partial_lse,
          .partial_lse_stride_state = rows,
          .partial_lse_stride_token = heads,
          .partial_lse_stride_head = 1,
          .o_dtype = args.o_dtype,
          .o = args.o,
          .o_stride_token = args.o_stride_token,
          .o_stride_head = args.o_stride_head,
          .lse = args.lse,
          .lse_stride_token = args.lse_stride_token,
          .lse_stride_head = args.lse_stride_head};
}

/// Returns the GPU's code that finds shared prefixes; null if the executor's has none.
cuda::DirectOperation<core::SharedPrefixArgs> finder(const Executor& executor) {
  for (const cuda::Backend& backend : cuda::backends()) {
    const cuda::Operations* const all = backend.operations(executor.code->arch, executor.code->emulated);
    if (all != nullptr && all->find_shared_prefixes != nullptr) return all->find_shared_prefixes;
  }
  return nullptr;
}

/// Selects the row of the groups. They have more query rows than the requests: where the forced row is for few rows,
/// another one of its family takes them.
const DecodeRow* select_kin(const Problem& problem, const Forced& forced, Status& error) {
  const DecodeRow* row = select(table<DecodeRow>(), problem, forced, error);
  if (row != nullptr) return row;
  const Forced family = {.backend = forced.backend.substr(0, forced.backend.find('_')), .source = forced.source};
  return select(table<DecodeRow>(), problem, family, error);
}

/// Computes with the rows that were selected for the steps.
struct Steps {
  const DecodeRow* groups;
  const DecodeRow* own;
  const MergeStatesRow* merge;

  size_t workspace_size(const core::DecodeArgs& args, const Executor& executor) const {
    Layout layout(args, nullptr);
    layout.take_bytes(groups->workspace_size(groups_of(args, layout), executor));
    layout.take_bytes(own->workspace_size(own_of(args, layout), executor));
    return layout.used();
  }

  Status plan(const core::DecodeArgs& args, const Executor& executor, std::span<std::byte> workspace,
              PlanSummary& summary) const {
    Layout layout(args, workspace.data());
    std::string found = "those that the GPU finds";
    if (executor.queue != nullptr) {
      const auto find = finder(executor);
      if (find == nullptr) return {StatusCode::kUnsupported, "shared_prefix: this build has no kernel that finds them"};
      if (Status status = find(layout.found, *executor.queue); !status.ok()) return status;
    } else {
      const schedule::SharedPrefixes prefixes = schedule::find_shared_prefixes(layout.found);
      found = core::format("{} group{}, {} keys saved", prefixes.num_groups, prefixes.num_groups == 1 ? "" : "s",
                           prefixes.saved_keys);
    }
    PlanSummary of_groups, of_own;
    const core::DecodeArgs group_args = groups_of(args, layout), own_args = own_of(args, layout);
    const auto group_space = layout.take_bytes(groups->workspace_size(group_args, executor));
    Status status = groups->plan(group_args, executor, group_space, of_groups);
    if (!status.ok()) return status;
    const auto own_space = layout.take_bytes(own->workspace_size(own_args, executor));
    status = own->plan(own_args, executor, own_space, of_own);
    summary = {
        .num_tasks = of_groups.num_tasks + of_own.num_tasks,
        .num_splits = of_groups.num_splits + of_own.num_splits,
        .text = [found, by = groups->name, own_by = own->name, of_groups = of_groups.text, of_own = of_own.text] {
          return core::format("shared prefixes ({}) by {}: {}; own keys by {}: {}", found, by, of_groups(), own_by,
                              of_own());
        }};
    return status;
  }

  Status run(const core::DecodeArgs& args, const Executor& executor, std::span<std::byte> workspace) const {
    Layout layout(args, workspace.data());
    if (executor.queue == nullptr) {
      if (!schedule::same_shared_prefixes(layout.found))
        return {StatusCode::kInvalidArgument,
                "shared_prefix: expected requests that share as many pages as when this was planned, got others"};
      schedule::find_shared_prefixes(layout.found);  // the pages may stand elsewhere in the table
    }
    const core::DecodeArgs group_args = groups_of(args, layout), own_args = own_of(args, layout);
    const auto group_space = layout.take_bytes(groups->workspace_size(group_args, executor));
    const auto own_space = layout.take_bytes(own->workspace_size(own_args, executor));
    Status status = groups->run(group_args, executor, group_space);
    if (status.ok()) status = own->run(own_args, executor, own_space);
    if (status.ok()) status = merge->run(merge_of(args, layout), executor);
    return status;
  }
};

}  // namespace

std::unique_ptr<const DecodeRow> shared_prefix_row(const core::DecodeArgs& args, const Problem& problem,
                                                   const Place& place, const Forced& forced, Status& error) {
  Problem of_groups = problem;
  of_groups.q_len = std::max<int64_t>(args.num_tokens, 1);
  Problem of_merge = {Op::kMergeStates, problem.device, DType::kF32, CacheFormat::kBF16,
                      args.num_heads,   args.d_v,       args.d_v};
  place.apply(of_merge);
  Steps steps{};
  steps.own = select(table<DecodeRow>(), problem, forced, error);
  if (steps.own != nullptr) steps.groups = select_kin(of_groups, forced, error);
  if (steps.groups != nullptr) steps.merge = select(table<MergeStatesRow>(), of_merge, forced, error);
  if (steps.merge == nullptr) return nullptr;
  return std::make_unique<const DecodeRow>(
      DecodeRow{.name = steps.own->name,
                .verdict = steps.own->verdict,
                .numerics = steps.own->numerics,
                .workspace_size = [steps](const core::DecodeArgs& a,
                                          const Executor& executor) { return steps.workspace_size(a, executor); },
                .plan = [steps](const core::DecodeArgs& a, const Executor& executor, std::span<std::byte> workspace,
                                PlanSummary& summary) { return steps.plan(a, executor, workspace, summary); },
                .run = [steps](const core::DecodeArgs& a, const Executor& executor,
                               std::span<std::byte> workspace) { return steps.run(a, executor, workspace); }});
}

}  // namespace mla::dispatch
