// SPDX-License-Identifier: Apache-2.0
// Implements workspace_size, plan and run: each validates, selects a row, and hands over to it.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string_view>
#include <type_traits>

#include "core/format.h"
#include "core/validate.h"
#include "cuda/runtime/emulated_queue.h"
#include "cuda/runtime/stream_queue.h"
#include "dispatch/context.h"
#include "dispatch/guard.h"
#include "dispatch/problems.h"
#include "dispatch/shared_prefix.h"
#include "mla/fields.h"

namespace mla {
namespace {

using core::Scope;

using core::kWorkspaceAlignment;
/// Says how many bytes stand in front of the backend's part of a workspace. They hold the stamp: the id of the plan
/// that owns the workspace.
constexpr size_t kStampBytes = kWorkspaceAlignment;

// The structs below hold each operation's types, and tell what a plan must know of its arguments.

template <class Params>
struct Operation;

template <>
struct Operation<DecodeParams> {
  using Args = core::DecodeArgs;
  using Row = dispatch::DecodeRow;
  static constexpr Op kOp = Op::kDecode;

  template <class F>
  static void tell_shape(const Args& a, const F& tell) {
    tell("batch_size", a.batch_size);
    tell("num_tokens", a.num_tokens);
    tell("num_heads", a.num_heads);
    tell("d_qk", a.d_qk);
    tell("d_v", a.d_v);
    tell("q.dtype", static_cast<int64_t>(a.q_dtype));
    tell("o.dtype", static_cast<int64_t>(a.o_dtype));
    tell("page_size", a.cache.page_size);
    tell("cache.format", static_cast<int64_t>(a.cache.format));
    tell("tree_mask or tree_parents", static_cast<int64_t>(a.tree_mask != nullptr || a.tree_parents != nullptr));
  }
  static int32_t q_len(const Args& a, int32_t request) { return a.queries.len(request); }
  static int32_t kv_len(const Args& a, int32_t request) { return a.pages.kv_len[request]; }
  static Problem problem(const Args& a, Device device) {
    Problem problem = {kOp, device, a.q_dtype, a.cache.format, a.num_heads, a.d_qk, a.d_v};
    problem.q_len = a.usual_q_len();
    if (!a.batch_invariant) problem.num_requests = a.batch_size;
    problem.compute = a.options.compute;
    return problem;
  }
};

template <>
struct Operation<PrefillParams> {
  using Args = core::PrefillArgs;
  using Row = dispatch::PrefillRow;
  static constexpr Op kOp = Op::kPrefill;

  template <class F>
  static void tell_shape(const Args& a, const F& tell) {
    tell("batch_size", a.batch_size);
    tell("num_tokens", a.num_tokens);
    tell("num_keys", a.num_keys);
    tell("num_heads", a.num_heads);
    tell("d_qk", a.d_qk);
    tell("d_v", a.d_v);
    tell("q.dtype", static_cast<int64_t>(a.dtype));
    tell("o.dtype", static_cast<int64_t>(a.o_dtype));
  }
  static int32_t q_len(const Args& a, int32_t b) { return a.qo_indptr[b + 1] - a.qo_indptr[b]; }
  static int32_t kv_len(const Args& a, int32_t b) { return a.kv_indptr[b + 1] - a.kv_indptr[b]; }
  static Problem problem(const Args& a, Device device) {
    Problem problem = {kOp, device, a.dtype, CacheFormat::kBF16, a.num_heads, a.d_qk, a.d_v};
    problem.compute = a.options.compute;
    return problem;
  }
};

/// Describes both sparse operations, which need no lengths.
template <Op op>
struct SparseOperation {
  using Args = core::DecodeSparseArgs;
  using Row = dispatch::DecodeSparseRow;
  static constexpr Op kOp = op;

  template <class F>
  static void tell_shape(const Args& a, const F& tell) {
    tell("num_tokens", a.num_tokens);
    tell("num_heads", a.num_heads);
    tell("d_qk", a.d_qk);
    tell("d_v", a.d_v);
    tell("q.dtype", static_cast<int64_t>(a.q_dtype));
    tell("o.dtype", static_cast<int64_t>(a.o_dtype));
    tell("number of pools", a.num_pools);
    tell("topk", a.pools[0].topk);
    tell("cache.format", static_cast<int64_t>(a.pools[0].cache.format));
    tell("extra_pool.topk", a.pools[1].topk);
    tell("extra_pool.cache.format", static_cast<int64_t>(a.pools[1].cache.format));
    tell("finish", static_cast<int64_t>(a.finishes));
  }
  static Problem problem(const Args& a, Device device) {
    Problem problem = {kOp, device, a.q_dtype, a.pools[0].cache.format, a.num_heads, a.d_qk, a.d_v};
    if (a.num_pools == 2) problem.extra_cache = a.pools[1].cache.format;
    if (!a.batch_invariant) problem.listed_keys = a.num_tokens * (int64_t{a.pools[0].topk} + a.pools[1].topk);
    problem.compute = a.options.compute;
    return problem;
  }
};

template <>
struct Operation<DecodeSparseParams> : SparseOperation<Op::kDecodeSparse> {};
template <>
struct Operation<PrefillSparseParams> : SparseOperation<Op::kPrefillSparse> {};

/// Says what a plan remembers of a field, as a message names it.
std::string told(int64_t value) { return core::format("{}", value); }
std::string told(Compute compute) { return std::string(name(compute)); }

/// Calls tell(part, name, value) for the options that a plan depends on: switches and counts (bool, int32), which say
/// what there is to do, and the arithmetic (Compute), which says which row does it. Numbers (f32), other enumerations
/// and tensors say how it is done, and may change from run to run. Caches are left out, since tell_shape tells of them.
template <class Params, class F>
void tell_options(const Params& params, const F& tell, std::string_view part = {}) {
  for_each_field(params, [&](std::string_view name, const auto& field) {
    using Field = std::remove_cvref_t<decltype(field)>;
    if constexpr (std::is_same_v<Field, bool> || std::is_same_v<Field, int32_t>)
      tell(part, name, int64_t{field});
    else if constexpr (std::is_same_v<Field, Compute>)
      tell(part, name, field);
    else if constexpr (HasFields<Field> && !std::is_same_v<Field, KvCache>)
      tell_options(field, tell, name);
  });
}

/// Calls tell(part, name, value) for all that a plan remembers of its parameters: `name` stands in their field `part`,
/// or, if that is empty, in themselves.
template <class Params, class F>
void tell_planned(const Params& params, const typename Operation<Params>::Args& args, const F& tell) {
  Operation<Params>::tell_shape(args, [&](std::string_view name, int64_t value) { tell("", name, value); });
  tell_options(params, tell);
}

/// Says whether a plan depends on the lengths of the requests.
template <class O>
constexpr bool kHasLengths = requires(const typename O::Args& args) {
  O::kv_len(args, 0);
};

/// Returns whether a direct operation writes nothing.
template <class Args>
bool nothing_to_do(const Args& args) {
  if constexpr (requires { args.num_rows == 0; })
    return args.num_rows == 0;
  else if constexpr (requires { args.num_tokens == 0; })
    return args.num_tokens == 0;
  else if constexpr (requires { args.num_tokens() == 0; })
    return args.num_tokens() == 0;
  else
    return false;  // block_table_to_csr: kv_indptr of no request still has its 0
}

/// Returns a backend's error with the operation's name before it, since backends do not name the operation.
Status failed(Op op, const Status& status) {
  return {status.code(), core::format("{}: {}", name(op), status.message())};
}

Status no_context(Op op) {
  return {StatusCode::kInvalidArgument,
          core::format("{}: context: expected a live context, got one moved from", name(op))};
}

/// Calls f(executor) with what the place computes with.
template <class F>
auto execute(Context::Impl& context, const dispatch::Place& place, Stream stream, const F& f) {
  if (!place.on_gpu()) return f(core::Executor{.pool = context.pool});
  const cuda::Code& code = place.gpu->code();
  if (place.emulated) {
    cuda::EmulatedQueue queue(*place.gpu, context.pool, stream);
    return f(core::Executor{.pool = context.pool, .queue = &queue, .code = &code});
  }
  cuda::StreamQueue queue(*place.gpu, stream);
  return f(core::Executor{.pool = context.pool, .queue = &queue, .code = &code});
}

/// Locks the context where only one call may compute at a time: backends of the CPU keep counters in workspaces and in
/// the pool, and the emulator computes with the pool. Enqueuing on a GPU locks nothing.
std::unique_lock<std::mutex> take_turn(Context::Impl& context, const dispatch::Place& place) {
  return place.on_gpu() && !place.emulated ? std::unique_lock<std::mutex>()
                                           : std::unique_lock<std::mutex>(context.mutex);
}

/// Returns the row that computes `problem` at `place`, or null with the reasons in `error`.
template <class Row>
const Row* select_at(Context::Impl& context, const dispatch::Place& place, Problem problem, Status& error) {
  place.apply(problem);
  return dispatch::select(dispatch::table<Row>(), problem, context.forced(), error);
}

/// Tells the reference the context's p_run.
template <class Args>
void set_p_run(const Context::Impl& impl, Args& args) {
  if constexpr (requires { args.options.p_run; }) args.options.p_run = impl.p_run;
}

/// Holds validated parameters and, for planning, the row that will run them.
template <class Params>
struct Prepared {
  typename Operation<Params>::Args args;
  dispatch::Place place;
  const typename Operation<Params>::Row* row = nullptr;
  std::unique_ptr<const typename Operation<Params>::Row> made;  // the row, where it is none of the table
  size_t workspace_bytes = 0;                                   // what the row needs from an aligned address on
};

template <class Params>
Status prepare(const Context& context, const Params& params, std::span<const std::byte> workspace,
               Prepared<Params>& prepared) {
  using O = Operation<Params>;
  if (!context.valid()) return no_context(O::kOp);
  Context::Impl& impl = context.impl();
  Device device;
  Status status =
      core::validate(params, Scope::kShapesAndLengths, prepared.args, device, impl.choice.memory(), workspace);
  if (!status.ok()) return status;
  set_p_run(impl, prepared.args);
  status = dispatch::find_place(O::kOp, impl.choice, device, prepared.place);
  if (!status.ok()) return status;
  Problem problem = O::problem(prepared.args, device);
  prepared.place.apply(problem);
  prepared.row = dispatch::select(dispatch::table<typename O::Row>(), problem, impl.forced(), status);
  if constexpr (O::kOp == Op::kDecode)
    if (prepared.row != nullptr && prepared.args.shared_prefix) {
      prepared.made = dispatch::shared_prefix_row(prepared.args, problem, prepared.place, impl.forced(), status);
      prepared.row = prepared.made.get();
    }
  if (prepared.row == nullptr) return status;
  if (prepared.args.num_tokens > 0)
    prepared.workspace_bytes = execute(impl, prepared.place, {}, [&](const core::Executor& executor) {
      return prepared.row->workspace_size(prepared.args, executor);
    });
  return {};
}

/// Returns how many bytes the caller must bring so that the stamp, which only the CPU's plans have, and the backend's
/// part fit, wherever the buffer starts.
size_t caller_bytes(size_t backend_bytes) {
  return backend_bytes == 0 ? 0 : kStampBytes + backend_bytes + kWorkspaceAlignment;
}

/// Returns an id that no other plan of the process has, and that memory is unlikely to hold by chance.
uint64_t next_plan_id() {
  static std::atomic<uint64_t> next{0x9E37'79B9'7F4A'7C15};
  return next.fetch_add(1, std::memory_order_relaxed);
}

/// Divides a workspace that is large enough into stamp and backend's part, and makes it the plan's. A GPU's memory is
/// not touched.
void claim(std::span<std::byte> workspace, size_t backend_bytes, Plan::Impl& plan) {
  if (backend_bytes == 0) return;
  void* start = workspace.data();
  size_t space = workspace.size();
  auto* const aligned =
      static_cast<std::byte*>(std::align(kWorkspaceAlignment, kStampBytes + backend_bytes, start, space));
  plan.workspace = {aligned + kStampBytes, backend_bytes};
  if (plan.place.on_gpu()) return;
  plan.stamp = aligned;
  std::memcpy(plan.stamp, &plan.id, sizeof plan.id);
}

/// Returns whether the workspace still holds the stamp that the plan wrote there; true if the plan wrote none.
bool owns_workspace(const Plan::Impl& plan) {
  return plan.stamp == nullptr || std::memcmp(plan.stamp, &plan.id, sizeof plan.id) == 0;
}

template <class Params>
Result<size_t> size_for(const Context& context, const Params& params) {
  return dispatch::guarded([&]() -> Result<size_t> {
    Prepared<Params> prepared;
    if (Status status = prepare(context, params, {}, prepared); !status.ok()) return status;
    return caller_bytes(prepared.workspace_bytes);
  });
}

/// Checks that the caller's workspace is large enough and, as far as can be known, where it must be.
Status check_workspace(Op op, std::span<std::byte> workspace, size_t needed, const dispatch::Place& place) {
  if (workspace.size() < needed)
    return {StatusCode::kWorkspaceTooSmall,
            core::format("{}: workspace: expected at least {} bytes, got {}", name(op), needed, workspace.size())};
  if (needed == 0) return {};
  const auto invalid = [&](std::string_view text) {
    return Status(StatusCode::kInvalidArgument, core::format("{}: workspace: {}", name(op), text));
  };
  if (workspace.data() == nullptr) return invalid("expected data, got a null pointer");
  if (!place.on_gpu()) return {};
  const Status status = place.gpu->check_memory(workspace.data());
  return status.ok() ? status : invalid(status.message());
}

/// Plans in `workspace`, or, if `source` is not null, in what that brings.
template <class Params>
Result<Plan> make_plan(const Context& context, const Params& params, std::span<std::byte> workspace,
                       const WorkspaceSource* source, Stream stream) {
  using O = Operation<Params>;
  return dispatch::guarded([&]() -> Result<Plan> {
    Prepared<Params> prepared;
    if (Status status = prepare(context, params, workspace, prepared); !status.ok()) return status;
    const size_t needed = caller_bytes(prepared.workspace_bytes);
    if (source != nullptr) {
      workspace = (*source)(needed);
      typename O::Args args;  // the same again; what is new is whether the workspace is apart from the tensors
      Device device;
      const core::Memory memory = context.impl().choice.memory();
      Status status = core::validate(params, Scope::kShapesAndLengths, args, device, memory, workspace);
      if (!status.ok()) return status;
    }
    if (Status status = check_workspace(O::kOp, workspace, needed, prepared.place); !status.ok()) return status;
    auto impl = std::make_unique<Plan::Impl>();
    impl->op = O::kOp;
    impl->row = prepared.row;
    if constexpr (O::kOp == Op::kDecode) impl->made = std::move(prepared.made);
    impl->place = prepared.place;
    impl->id = next_plan_id();
    impl->given_workspace = workspace;
    impl->num_threads = context.num_threads();
    impl->planned.reserve(32);  // more than any operation has
    tell_planned(params, prepared.args, [&](std::string_view, std::string_view, auto value) {
      impl->planned.push_back(static_cast<int64_t>(value));
    });
    if constexpr (kHasLengths<O>)
      for (int32_t b = 0; !prepared.place.on_gpu() && b < prepared.args.batch_size; ++b) {
        impl->q_len.push_back(O::q_len(prepared.args, b));
        impl->kv_len.push_back(O::kv_len(prepared.args, b));
      }
    const auto turn = take_turn(context.impl(), prepared.place);
    claim(workspace, prepared.workspace_bytes, *impl);
    impl->summary.text = [] { return std::string("no query tokens: nothing to do"); };
    if (prepared.args.num_tokens > 0) {
      const Status status = execute(context.impl(), prepared.place, stream, [&](const core::Executor& executor) {
        return prepared.row->plan(prepared.args, executor, impl->workspace, impl->summary);
      });
      if (!status.ok()) return failed(O::kOp, status);
    }
    return Plan(std::move(impl));
  });
}

/// Checks that the parameters are what was planned. The error names the first difference.
template <class Params>
Status check_planned(const Plan::Impl& plan, const Params& params, const typename Operation<Params>::Args& args) {
  using O = Operation<Params>;
  const auto differs = [](std::string_view field, auto planned, auto given, const std::string& where) {
    return Status::naming_fields(StatusCode::kInvalidArgument,
                                 core::format("{}: `{}`: expected {} as planned, got {}{}", name(O::kOp), field,
                                              told(planned), told(given), where));
  };
  Status status;
  auto planned = plan.planned.begin();
  tell_planned(params, args, [&](std::string_view part, std::string_view name, auto value) {
    const auto expected = static_cast<decltype(value)>(*planned++);
    if (status.ok() && value != expected)
      status = differs(core::format("{}{}{}", part, part.empty() ? "" : ".", name), expected, value, "");
  });
  if (!status.ok()) return status;
  if constexpr (kHasLengths<O>)
    for (int32_t b = 0; !plan.place.on_gpu() && b < args.batch_size; ++b) {
      const auto at = static_cast<size_t>(b);
      if (O::q_len(args, b) != plan.q_len[at])
        return differs("q_len", plan.q_len[at], O::q_len(args, b), core::format(" for request {}", b));
      if (O::kv_len(args, b) != plan.kv_len[at])
        return differs("kv_len", plan.kv_len[at], O::kv_len(args, b), core::format(" for request {}", b));
    }
  return {};
}

template <class Params>
Status run_planned(const Context& context, const Plan& plan, const Params& params, Stream stream) {
  using O = Operation<Params>;
  return dispatch::guarded([&]() -> Status {
    const auto wrong_plan = [](std::string_view expected, std::string_view given) {
      return Status(StatusCode::kInvalidArgument,
                    core::format("{}: plan: expected {}, got {}", name(O::kOp), expected, given));
    };
    if (!context.valid()) return no_context(O::kOp);
    if (!plan.valid()) return wrong_plan("one that plan() made", "an empty one");
    const Plan::Impl& planned = plan.impl();
    const auto* row = std::get_if<const typename O::Row*>(&planned.row);
    if (planned.op != O::kOp || row == nullptr)
      return wrong_plan(core::format("one for {}", name(O::kOp)), core::format("one for {}", name(planned.op)));
    if (!planned.place.on_gpu() && planned.num_threads != context.num_threads())
      return wrong_plan(core::format("one for a context of {} threads", context.num_threads()),
                        core::format("one for {}", planned.num_threads));
    const dispatch::Forced forced = context.impl().forced();
    if (!dispatch::Admitted(dispatch::table<typename O::Row>(), forced.backend)(**row))
      return wrong_plan(core::format("one for {} ({} of the context)", forced.backend, forced.source),
                        core::format("one for {}", (*row)->name));
    typename O::Args args;
    Device device;
    dispatch::Place place;
    Status status =
        core::validate(params, Scope::kAll, args, device, context.impl().choice.memory(), planned.given_workspace);
    if (status.ok()) status = dispatch::find_place(O::kOp, context.impl().choice, device, place);
    if (!status.ok()) return status;
    if (place != planned.place)
      return wrong_plan(core::format("one for {}", place.text()), core::format("one for {}", planned.place.text()));
    status = check_planned(planned, params, args);
    if (!status.ok()) return status;
    set_p_run(context.impl(), args);
    const auto turn = take_turn(context.impl(), place);
    if (!owns_workspace(planned))
      return {
          StatusCode::kInvalidArgument,
          core::format("{}: workspace: expected the one this plan was written to, got one that another plan or write "
                       "has overwritten",
                       name(O::kOp))};
    if (args.num_tokens == 0) return {};
    status = execute(context.impl(), place, stream,
                     [&](const core::Executor& executor) { return (*row)->run(args, executor, planned.workspace); });
    return status.ok() ? status : failed(O::kOp, status);
  });
}

/// Runs an operation that needs no plan.
template <class Row, class Args, class Params>
Status run_direct(const Context& context, Op op, const Params& params, Stream stream) {
  return dispatch::guarded([&]() -> Status {
    if (!context.valid()) return no_context(op);
    Context::Impl& impl = context.impl();
    Args args;
    Device device;
    dispatch::Place place;
    Status status = core::validate(params, args, device, impl.choice.memory());
    if (status.ok()) status = dispatch::find_place(op, impl.choice, device, place);
    if (!status.ok()) return status;
    const Row* row = select_at<Row>(impl, place, dispatch::problem_of(args, device), status);
    if (row == nullptr) return status;
    if (nothing_to_do(args)) return {};
    set_p_run(impl, args);
    const auto turn = take_turn(impl, place);
    status = execute(impl, place, stream, [&](const core::Executor& executor) { return row->run(args, executor); });
    return status.ok() ? status : failed(op, status);
  });
}

}  // namespace

Result<size_t> workspace_size(const Context& context, const DecodeParams& params) { return size_for(context, params); }
Result<size_t> workspace_size(const Context& context, const PrefillParams& params) { return size_for(context, params); }
Result<size_t> workspace_size(const Context& context, const DecodeSparseParams& params) {
  return size_for(context, params);
}
Result<size_t> workspace_size(const Context& context, const PrefillSparseParams& params) {
  return size_for(context, params);
}

Result<Plan> plan(const Context& context, const DecodeParams& params, std::span<std::byte> workspace, Stream stream) {
  return make_plan(context, params, workspace, nullptr, stream);
}
Result<Plan> plan(const Context& context, const PrefillParams& params, std::span<std::byte> workspace, Stream stream) {
  return make_plan(context, params, workspace, nullptr, stream);
}
Result<Plan> plan(const Context& context, const DecodeSparseParams& params, std::span<std::byte> workspace,
                  Stream stream) {
  return make_plan(context, params, workspace, nullptr, stream);
}
Result<Plan> plan(const Context& context, const PrefillSparseParams& params, std::span<std::byte> workspace,
                  Stream stream) {
  return make_plan(context, params, workspace, nullptr, stream);
}
Result<Plan> plan_with(const Context& context, const DecodeParams& params, const WorkspaceSource& source,
                       Stream stream) {
  return make_plan(context, params, {}, &source, stream);
}
Result<Plan> plan_with(const Context& context, const PrefillParams& params, const WorkspaceSource& source,
                       Stream stream) {
  return make_plan(context, params, {}, &source, stream);
}
Result<Plan> plan_with(const Context& context, const DecodeSparseParams& params, const WorkspaceSource& source,
                       Stream stream) {
  return make_plan(context, params, {}, &source, stream);
}
Result<Plan> plan_with(const Context& context, const PrefillSparseParams& params, const WorkspaceSource& source,
                       Stream stream) {
  return make_plan(context, params, {}, &source, stream);
}

Status run(const Context& context, const Plan& plan, const DecodeParams& params, Stream stream) {
  return run_planned(context, plan, params, stream);
}
Status run(const Context& context, const Plan& plan, const PrefillParams& params, Stream stream) {
  return run_planned(context, plan, params, stream);
}
Status run(const Context& context, const Plan& plan, const DecodeSparseParams& params, Stream stream) {
  return run_planned(context, plan, params, stream);
}
Status run(const Context& context, const Plan& plan, const PrefillSparseParams& params, Stream stream) {
  return run_planned(context, plan, params, stream);
}

Status run(const Context& context, const MergeStatesParams& params, Stream stream) {
  return run_direct<dispatch::MergeStatesRow, core::MergeStatesArgs>(context, Op::kMergeStates, params, stream);
}
Status run(const Context& context, const AppendParams& params, Stream stream) {
  return run_direct<dispatch::AppendRow, core::AppendArgs>(context, Op::kAppend, params, stream);
}
Status run(const Context& context, const GatherParams& params, Stream stream) {
  return run_direct<dispatch::GatherRow, core::GatherArgs>(context, Op::kGather, params, stream);
}
Status run(const Context& context, const AppendRopeParams& params, Stream stream) {
  return run_direct<dispatch::AppendRopeRow, core::AppendRopeArgs>(context, Op::kAppendRope, params, stream);
}
Status run(const Context& context, const CopyPagesParams& params, Stream stream) {
  return run_direct<dispatch::CopyPagesRow, core::CopyPagesArgs>(context, Op::kCopyPages, params, stream);
}
Status run(const Context& context, const BlockTableToCsrParams& params, Stream stream) {
  return run_direct<dispatch::BlockTableToCsrRow, core::BlockTableToCsrArgs>(context, Op::kBlockTableToCsr, params,
                                                                             stream);
}
Status run(const Context& context, const PhysicalSlotsParams& params, Stream stream) {
  return run_direct<dispatch::PhysicalSlotsRow, core::PhysicalSlotsArgs>(context, Op::kPhysicalSlots, params, stream);
}
Status run(const Context& context, const AppendIndexerParams& params, Stream stream) {
  return run_direct<dispatch::AppendIndexerRow, core::AppendIndexerArgs>(context, Op::kAppendIndexer, params, stream);
}
Status run(const Context& context, const IndexerLogitsParams& params, Stream stream) {
  return run_direct<dispatch::IndexerLogitsRow, core::IndexerLogitsArgs>(context, Op::kIndexerLogits, params, stream);
}
Status run(const Context& context, const TopKParams& params, Stream stream) {
  return run_direct<dispatch::TopKRow, core::TopKArgs>(context, Op::kTopK, params, stream);
}
Status run(const Context& context, const IndexerTopKParams& params, Stream stream) {
  return run_direct<dispatch::IndexerTopKRow, core::IndexerTopKArgs>(context, Op::kIndexerTopK, params, stream);
}
Status run(const Context& context, const CompressParams& params, Stream stream) {
  return run_direct<dispatch::CompressRow, core::CompressArgs>(context, Op::kCompress, params, stream);
}
Status run(const Context& context, const FinishOutputParams& params, Stream stream) {
  return run_direct<dispatch::FinishOutputRow, core::FinishOutputArgs>(context, Op::kFinishOutput, params, stream);
}

}  // namespace mla
