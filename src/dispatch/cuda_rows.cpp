// SPDX-License-Identifier: Apache-2.0
#include "dispatch/cuda_rows.h"

#include "cuda/runtime/device_runtime.h"

namespace mla::dispatch {
namespace {

using core::Reason;

/// Holds the architecture of the problem's GPU, or why there is none.
struct Architecture {
  int32_t arch = 0;
  Reason refusal = {};
};

Architecture arch_of(const Problem& problem) {
  if (problem.emulated || problem.gpu_arch != 0) return {.arch = problem.gpu_arch};
  const auto gpu = cuda::cuda_device(problem.device.index);
  if (!gpu.ok()) return {.refusal = Reason::format("{}", gpu.status().message())};
  return {.arch = (*gpu)->info().arch};
}

/// Holds the code that a GPU runs, or why there is none.
struct FoundCode {
  cuda::CodeChoice code = {};
  Reason refusal = {};
};

FoundCode find_code(const Problem& problem, int32_t arch) {
  if (problem.emulated) {
    const cuda::Code code = cuda::emulated_code(arch);
    if (code.arch != 0) return {.code = {.arch = code.arch}};
    return {.refusal = Reason::format("this build cannot emulate sm{}", arch)};
  }
  if (arch < cuda::kOldestArch)
    return {.refusal = Reason::format("needs sm{} or newer, not sm{}", cuda::kOldestArch, arch)};
  const cuda::CodeChoice code = cuda::choose_code(arch, cuda::built_archs(), problem.full_build, cuda::profile());
  if (code.arch != 0) return {.code = code};
  if (cuda::built_archs().empty()) return {.refusal = "this build of the library has no GPU code"};
  return {.refusal = Reason::format("this build has no code for sm{}", arch)};
}

/// Says which kernels a GPU runs: "wgmma kernels compiled for sm90".
Reason describe(std::string_view kernels, const cuda::CodeChoice& code, bool built) {
  const std::string_view remark = built ? "" : "; not in this build";
  if (code.by_driver) return Reason::format("{} of sm{}, which the driver compiles{}", kernels, code.arch, remark);
  return Reason::format("{} compiled for {}sm{}{}", kernels, code.family ? "the family of " : "", code.arch, remark);
}

CudaVerdict no(const Reason& reason) { return {.verdict = {.usable = false, .reason = reason}}; }

}  // namespace

CudaVerdict judge(const cuda::Backend& backend, const Problem& problem) {
  if (problem.device.type != DeviceType::kCuda)
    return no(Reason::format("tensors are on {}, not on a GPU", name(problem.device.type)));
  const Architecture gpu = arch_of(problem);
  if (!gpu.refusal.empty()) return no(gpu.refusal);
  if (!backend.is_for(gpu.arch)) return no(Reason::format("needs {}, not sm{}", backend.needs, gpu.arch));
  if (const Reason reason = backend.refusal(problem); !reason.empty()) return no(reason);
  const FoundCode found = find_code(problem, gpu.arch);
  if (!found.refusal.empty()) return no(found.refusal);
  const cuda::Operations* const operations = backend.operations(found.code.arch, problem.emulated);
  // The GPU runs older code, which the backend is not in.
  if (operations == nullptr && (problem.emulated || !problem.full_build))
    return no(Reason::format("this build has no code for sm{}", gpu.arch));
  if (operations == nullptr && !backend.is_for(found.code.arch))  // in no build
    return no(Reason::format("needs {}, and sm{} runs code of sm{}", backend.needs, gpu.arch, found.code.arch));
  const bool on_tensor_cores = backend.numerics(problem).products_per_cut > 0;
  const std::string_view kernels = on_tensor_cores ? backend.kernels : "kernels";
  const Reason yields = backend.yields != nullptr ? backend.yields(problem) : Reason();
  if (!yields.empty()) return {.verdict = {.usable = true, .reason = yields, .yields = true}, .operations = operations};
  return {.verdict = {.usable = true,
                      .reason = problem.emulated
                                    ? Reason::format("emulated: {} of sm{} on the CPU", kernels, found.code.arch)
                                    : describe(kernels, found.code, operations != nullptr)},
          .operations = operations};
}

}  // namespace mla::dispatch
