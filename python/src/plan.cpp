// SPDX-License-Identifier: Apache-2.0
#include "plan.h"

#include <tvm/ffi/cast.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/memory.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

namespace mla::python {
namespace {

/// Reads a context and a workspace, and returns to Python a plan that is yet to be made.
void new_plan(ffi::PackedArgs packed, ffi::Any* result) {
  Arguments args("Plan", packed);
  ffi::Optional<ffi::ObjectRef> context;
  if (const auto* const given = args.object<ContextObj>("context", "a Context"))
    context = ffi::GetRef<ffi::ObjectRef>(given);
  const ffi::AnyView given = args.any("workspace");
  args.end();
  ffi::Optional<ffi::Tensor> workspace;
  if (!is_none(given)) {
    workspace = given.try_cast<ffi::Tensor>();
    if (!workspace) args.fail("TypeError", "workspace", "a tensor", given.GetTypeKey());
  }
  *result = ffi::ObjectRef(ffi::make_object<PlanObj>(std::move(context), std::move(workspace)));
}

const PlanObj& plan_of(Arguments& args) {
  if (const auto* plan = args.object<PlanObj>("plan", "a Plan")) return *plan;
  args.fail("TypeError", "plan", "a Plan", "None");
}

void new_draft(ffi::PackedArgs packed, ffi::Any* result) {
  Arguments args("Plan", packed);
  *result = ffi::ObjectRef(ffi::make_object<DraftObj>(ffi::GetRef<ffi::ObjectRef>(&plan_of(args))));
}

void plan_info(ffi::PackedArgs packed, ffi::Any* result) {
  Arguments args("Plan", packed);
  const PlanObj& made = plan_of(args);
  const std::shared_lock lock(made.mutex);
  *result =
      ffi::Array<ffi::Any>{ffi::String(std::string(made.plan.backend())), ffi::String(made.plan.describe()),
                           static_cast<int64_t>(made.plan.num_tasks()), static_cast<int64_t>(made.plan.num_splits())};
}

void plan_workspace(ffi::PackedArgs packed, ffi::Any* result) {
  Arguments args("Plan", packed);
  *result = plan_of(args).workspace;
}

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef()
      .def_packed("libmla.plan", new_plan)
      .def_packed("libmla.draft", new_draft)
      .def_packed("libmla.plan_info", plan_info)
      .def_packed("libmla.plan_workspace", plan_workspace);
}

/// Returns the context of a call: the one that it names, else that of its plan, else the process's own.
const ContextObj& choose_context(const ContextObj* given, const PlanObj* plan) {
  if (given == nullptr && plan != nullptr && plan->context.has_value()) given = plan->context.value().as<ContextObj>();
  return context_or_default(given);
}

}  // namespace

Call Call::read(Arguments& args) {
  args.call_arguments(args.any("names"));
  const auto* const context = args.object<ContextObj>("context", "a Context");
  const ffi::AnyView value = args.any("plan");
  const auto* plan = value.as<PlanObj>();
  PlanObj* draft = nullptr;
  if (plan == nullptr && !is_none(value)) {
    const auto* const order = value.as<DraftObj>();
    if (order == nullptr) args.fail("TypeError", "plan", "a Plan", value.GetTypeKey());
    draft = order->plan();
  }
  return {args, plan, draft, choose_context(context, draft != nullptr ? draft : plan)};
}

Call Call::with(const Arguments& args, const PlanObj* plan) {
  return {args, plan, nullptr, choose_context(nullptr, plan)};
}

Call Call::planning(const Arguments& args, PlanObj& draft) {
  return {args, nullptr, &draft, choose_context(nullptr, &draft)};
}

Stream Call::stream(Device device) const {
  if (!on_gpu(device)) return {};
  return {TVMFFIEnvGetStream(kDLCUDA, device.index)};
}

std::span<std::byte> Call::workspace_of(PlanObj& draft, size_t bytes, Device device) const {
  const bool gpu = on_gpu(device);
  const auto bytes_of = [](const ffi::Tensor& memory) {
    return ffi::GetDataSize(static_cast<size_t>(memory.numel()), memory.dtype());
  };
  // On a GPU it stays where it is: graphs hold its address. There its size follows from shapes alone.
  const bool grows = !draft.given_workspace && !gpu;
  if (!draft.workspace.has_value() || (grows && bytes_of(*draft.workspace) < bytes))
    draft.workspace =
        allocate(args_.operation(), "workspace", DType::kU8, {static_cast<int64_t>(bytes)}, gpu ? device : Device{});
  const ffi::Tensor& memory = *draft.workspace;
  const auto refuse = [&](const std::string& expected) {
    raise("ValueError", std::string(args_.operation()) + ": workspace: expected " + expected);
  };
  if (!memory.IsContiguous()) refuse("contiguous memory, got a tensor with gaps");
  const DLDevice place = memory.device();
  const bool of_host = place.device_type == kDLCPU || place.device_type == kDLCUDAHost || context_.emulated();
  if (gpu ? place.device_type != kDLCUDA || place.device_id != device.index : !of_host)
    refuse("memory where the other tensors are, got a tensor elsewhere");
  return {static_cast<std::byte*>(memory.data_ptr()) + memory.byte_offset(), bytes_of(memory)};
}

}  // namespace mla::python
