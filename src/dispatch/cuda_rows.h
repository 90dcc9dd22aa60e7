// SPDX-License-Identifier: Apache-2.0
// Makes the table rows of the GPUs' backends. They stand first in every table, in the order of cuda::backends().
#pragma once

#include <vector>

#include "core/format.h"
#include "core/implementation.h"
#include "cuda/border/backend.h"
#include "cuda/runtime/code.h"

namespace mla::dispatch {

/// Says whether a backend can run a problem, and why. Holds its operations for the problem's GPU if it can, else null;
/// null too if it could in a full build (Problem::full_build), and not in this one.
struct CudaVerdict {
  core::Verdict verdict = {};
  const cuda::Operations* operations = nullptr;
};

/// Judges a problem for one backend. Every backend is asked the same in the same order: where the tensors are, whether
/// it is for the GPU, whether it takes the problem, whether this build has it.
CudaVerdict judge(const cuda::Backend& backend, const Problem& problem);

/// Returns the verdict of `judge`, or a refusal if the backend has no kernel of the operation `member` for the
/// problem's GPU.
template <class Operation>
core::Verdict cuda_verdict(const cuda::Backend& backend, const Problem& problem, Operation cuda::Operations::*member) {
  const CudaVerdict judged = judge(backend, problem);
  if (judged.operations == nullptr || judged.operations->*member) return judged.verdict;
  return {.usable = false, .reason = core::Reason::format("has no kernel of {} for this GPU", name(problem.op))};
}

/// Returns the operations of a backend in the code that the executor runs. The verdict of the backend's row must have
/// been yes.
inline const cuda::Operations& operations_of(const cuda::Backend& backend, const core::Executor& executor) {
  return *backend.operations(executor.code->arch, executor.code->emulated);
}

/// Return the rows of an operation: one for each backend that has the operation, which is `member` of its operations.
template <class Args>
std::vector<core::PlannedImplementation<Args>> cuda_rows(Op op,
                                                         cuda::PlannedOperation<Args> cuda::Operations::*member) {
  using core::Executor;
  std::vector<core::PlannedImplementation<Args>> rows;
  for (const cuda::Backend& backend : cuda::backends()) {
    if (!backend.has(op)) continue;
    rows.push_back(
        {.name = backend.name,
         .verdict = [&backend, member](const Problem& problem) { return cuda_verdict(backend, problem, member); },
         .numerics = backend.numerics,
         .workspace_size =
             [&backend, member](const Args& args, const Executor& executor) {
               return (operations_of(backend, executor).*member).workspace_size(args, executor.queue->device());
             },
         .plan = [&backend, member](const Args& args, const Executor& executor, std::span<std::byte> workspace,
                                    core::PlanSummary& summary) -> Status {
           const cuda::DeviceProperties& device = executor.queue->device();
           summary.text = [arch = device.arch, num_sms = device.num_sms] {
             return core::format("made on the GPU (sm{}, {} multiprocessors) for whatever lengths it finds there", arch,
                                 num_sms);
           };
           return (operations_of(backend, executor).*member).plan(args, *executor.queue, workspace);
         },
         .run = [&backend, member](const Args& args, const Executor& executor, std::span<std::byte> workspace)
             -> Status { return (operations_of(backend, executor).*member).run(args, *executor.queue, workspace); }});
  }
  return rows;
}

template <class Args>
std::vector<core::DirectImplementation<Args>> cuda_rows(Op op, cuda::DirectOperation<Args> cuda::Operations::*member) {
  std::vector<core::DirectImplementation<Args>> rows;
  for (const cuda::Backend& backend : cuda::backends()) {
    if (!backend.has(op)) continue;
    rows.push_back(
        {.name = backend.name,
         .verdict = [&backend, member](const Problem& problem) { return cuda_verdict(backend, problem, member); },
         .numerics = backend.numerics,
         .run = [&backend, member](const Args& args, const core::Executor& executor) -> Status {
           return (operations_of(backend, executor).*member)(args, *executor.queue);
         }});
  }
  return rows;
}

}  // namespace mla::dispatch
