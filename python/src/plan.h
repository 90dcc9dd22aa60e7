// SPDX-License-Identifier: Apache-2.0
// Implements libmla.Plan for Python, and runs attention calls: with a plan, without one, or only to be planned.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/object.h>
#include <tvm/ffi/optional.h>

#include <exception>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <utility>

#include "context.h"
#include "outputs.h"

namespace mla::python {

/// Holds a plan, the context that it was made for, and its workspace.
class PlanObj : public ffi::Object {
 public:
  PlanObj(ffi::Optional<ffi::ObjectRef> given, ffi::Optional<ffi::Tensor> memory)
      : context(std::move(given)), given_workspace(memory.has_value()), workspace(std::move(memory)) {}

  ffi::Optional<ffi::ObjectRef> context;  ///< none: the process's own
  const bool given_workspace;             ///< whether the workspace is the caller's
  ffi::Optional<ffi::Tensor> workspace;
  Plan plan;
  mutable std::shared_mutex mutex;  ///< a call that plans again waits for calls that run

  static constexpr bool _type_mutable = true;  // NOLINT(readability-identifier-naming): a name of apache-tvm-ffi
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("libmla.Plan", PlanObj, ffi::Object);
};

/// Is given to an operation in place of a plan: the call is then not run but planned, into plan().
class DraftObj : public ffi::Object {
 public:
  explicit DraftObj(ffi::ObjectRef to_plan) : plan_(std::move(to_plan)) {}

  PlanObj* plan() const { return const_cast<PlanObj*>(plan_.as<PlanObj>()); }

  static constexpr bool _type_mutable = true;  // NOLINT(readability-identifier-naming): a name of apache-tvm-ffi
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("libmla.Draft", DraftObj, ffi::Object);

 private:
  ffi::ObjectRef plan_;
};

/// Holds the first three arguments of every operation: what its callers' callers call its arguments, the context, and
/// the plan.
class Call {
 public:
  static Call read(Arguments& args);
  /// Makes a call that does not carry them: in the process's own context, with a plan unless that is null.
  static Call with(const Arguments& args, const PlanObj* plan);
  /// Does the same for a call that is not run but planned, into `draft`.
  static Call planning(const Arguments& args, PlanObj& draft);

  Outputs::Memory outputs() const { return draft_ != nullptr ? Outputs::Memory::kLater : Outputs::Memory::kNow; }

  template <class Params>
  void carry_out(const Params& params) const {
    const Device device = params.q.given() ? params.q.device : device_beside_q(params);
    if (draft_ != nullptr) {
      const std::unique_lock lock(draft_->mutex);
      draft_->plan =
          draft_->given_workspace
              ? args_.value_of(plan(context_.get(), params, workspace_of(*draft_, 0, device), stream(device)))
              : plan_in(params, device, [&](size_t bytes) { return workspace_of(*draft_, bytes, device); });
    } else if (plan_ != nullptr) {
      const std::shared_lock lock(plan_->mutex);
      args_.check(run(context_.get(), plan_->plan, params, stream(device)));
    } else {
      run_once(params, device);
    }
  }

  /// Runs an operation that has no plan; raises TypeError if the caller gave one.
  template <class Params>
  void carry_out_unplanned(const Params& params, Device device) const {
    if (plan_ != nullptr || draft_ != nullptr)
      raise("TypeError", std::string(args_.operation()) + ": plan: expected none");
    args_.check(run(context_.get(), params, stream(device)));
  }

  /// Returns whether what tensors on `device` hold is out of the processor's reach.
  bool on_gpu(Device device) const { return device.type == DeviceType::kCuda && !context_.emulated(); }
  /// Returns the stream that the caller's framework uses on a GPU; the default stream elsewhere.
  Stream stream(Device device) const;

 private:
  template <class Params>
  static Device device_beside_q(const Params& params) {
    if constexpr (requires { params.q_nope; }) return params.q_nope.device;
    return {};
  }

  std::span<std::byte> workspace_of(PlanObj& draft, size_t bytes, Device device) const;

  template <class Params>
  void run_once(const Params& params, Device device) const {
    std::optional<ContextObj::Lease> of_host;
    std::optional<ffi::Tensor> of_gpu;
    const Plan once = plan_in(params, device, [&](size_t bytes) -> std::span<std::byte> {
      if (!on_gpu(device)) return of_host.emplace(context_, bytes).span();
      of_gpu = allocate(args_.operation(), "workspace", DType::kU8, {static_cast<int64_t>(bytes)}, device);
      return {static_cast<std::byte*>(of_gpu->data_ptr()) + of_gpu->byte_offset(), bytes};
    });
    args_.check(run(context_.get(), once, params, stream(device)));
  }

  /// Plans in memory that `source(bytes)` returns. What it throws is thrown.
  template <class Params, class Source>
  Plan plan_in(const Params& params, Device device, const Source& source) const {
    std::exception_ptr thrown;
    Result<Plan> made = plan_with(
        context_.get(), params,
        [&](size_t bytes) -> std::span<std::byte> {
          try {
            return source(bytes);
          } catch (...) {
            thrown = std::current_exception();
            return {};
          }
        },
        stream(device));
    if (thrown) std::rethrow_exception(thrown);
    return args_.value_of(std::move(made));
  }

  Call(const Arguments& args, const PlanObj* plan, PlanObj* draft, const ContextObj& context)
      : args_(args), plan_(plan), draft_(draft), context_(context) {}

  const Arguments& args_;
  const PlanObj* plan_;  // at most one of the two
  PlanObj* draft_;
  const ContextObj& context_;
};

}  // namespace mla::python
