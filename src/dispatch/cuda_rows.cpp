// SPDX-License-Identifier: Apache-2.0
#include "dispatch/cuda_rows.h"

#include "core/format.h"
#include "cuda/runtime/code.h"
#include "cuda/runtime/device_runtime.h"

namespace mla::dispatch {
namespace {

constexpr std::string_view kName = "cuda_portable";

struct Widths {
  int64_t d_qk, d_v;
};
/// Head dims that the kernels are compiled for; absorbed: kv_lora_rank with and without 64 rotary channels.
constexpr Widths kAbsorbedWidths[] = {{512 + 64, 512}, {512, 512}, {256 + 64, 256}, {256, 256}};

/// Kernels for the problem's GPU, or why there are none.
struct Kernels {
  cuda::Code code;
  Reason refusal;
};

Kernels find_kernels(const Problem& problem) {
  if (problem.emulated) {
    const cuda::Code code = cuda::emulated_code(problem.gpu_arch);
    if (code.operations != nullptr) return {.code = code, .refusal = {}};
    return {.code = {}, .refusal = Reason::format("this build cannot emulate sm{}", problem.gpu_arch)};
  }
  int32_t arch = problem.gpu_arch;
  if (arch == 0) {
    const auto gpu = cuda::cuda_device(problem.device.index);
    if (!gpu.ok()) return {.code = {}, .refusal = Reason::format("{}", gpu.status().message())};
    arch = (*gpu)->info().arch;
  }
  if (arch < cuda::kOldestArch)
    return {.code = {}, .refusal = Reason::format("needs sm{} or newer, not sm{}", cuda::kOldestArch, arch)};
  const cuda::Code code = cuda::code_for(arch);
  if (code.operations != nullptr) return {.code = code, .refusal = {}};
  if (cuda::built_archs().empty()) return {.code = {}, .refusal = "this build of the library has no GPU code"};
  return {.code = {}, .refusal = Reason::format("this build has no code for sm{}", arch)};
}

bool is_absorbed(Op op) { return op == Op::kDecode || op == Op::kDecodeSparse || op == Op::kPrefillSparse; }

/// What the kernel for a format's rows is compiled for: a block computes keys of one kind.
DType multiplied_as(CacheFormat format) {
  if (format == CacheFormat::kBF16) return DType::kBF16;
  return format == CacheFormat::kF16 ? DType::kF16 : DType::kE4M3;
}

Reason widths_refusal(const Problem& problem, std::span<const Widths> all) {
  for (const Widths& widths : all)
    if (problem.d_qk == widths.d_qk && problem.d_v == widths.d_v) return {};
  std::string text;
  for (const Widths& widths : all) text += core::format("{}{}/{}", text.empty() ? "" : ", ", widths.d_qk, widths.d_v);
  return Reason::format("takes d_qk/d_v of {}, not {}/{}", text, problem.d_qk, problem.d_v);
}

/// What the kernels of every architecture refuse alike; empty if nothing.
Reason shape_refusal(const Problem& problem) {
  const bool float16 = problem.q_dtype == DType::kBF16 || problem.q_dtype == DType::kF16;
  const bool indexer = problem.op == Op::kIndexerLogits || problem.op == Op::kIndexerTopK;
  const bool takes_e4m3 = problem.op == Op::kDecode || problem.op == Op::kDecodeSparse || indexer;
  if (!float16 && problem.q_dtype != DType::kF32 && !(takes_e4m3 && problem.q_dtype == DType::kE4M3))
    return Reason::format("takes bf16, f16{} f32{}, not {}", takes_e4m3 ? "," : " and", takes_e4m3 ? " and e4m3" : "",
                          name(problem.q_dtype));
  if (problem.extra_cache && multiplied_as(*problem.extra_cache) != multiplied_as(problem.cache))
    return Reason::format("takes two pools of bf16, two of f16 or two of quantized rows, not {} and {}",
                          name(problem.cache), name(*problem.extra_cache));
  if (problem.num_heads < 1) return Reason::format("needs at least 1 head, not {}", problem.num_heads);
  if (const Reason reason = width_refusal(problem); !reason.empty()) return reason;
  if (is_absorbed(problem.op)) return widths_refusal(problem, kAbsorbedWidths);
  return {};
}

Verdict verdict(const Problem& problem) {
  if (problem.device.type != DeviceType::kCuda)
    return {.usable = false, .reason = Reason::format("tensors are on {}, not on a GPU", name(problem.device.type))};
  if (const Reason reason = shape_refusal(problem); !reason.empty()) return {.usable = false, .reason = reason};
  const Kernels kernels = find_kernels(problem);
  if (!kernels.refusal.empty()) return {.usable = false, .reason = kernels.refusal};
  const char* const how = is_absorbed(problem.op) || problem.op == Op::kPrefill ? "mma.sync kernels" : "kernels";
  if (problem.emulated)
    return {.usable = true, .reason = Reason::format("emulated: {} of sm{} on the CPU", how, problem.gpu_arch)};
  return {.usable = true, .reason = Reason::format("{} compiled for sm{}", how, kernels.code.arch)};
}

template <class Args, cuda::PlannedOperation<Args> cuda::Operations::*kMember>
PlannedImplementation<Args> planned() {
  return {.name = kName,
          .verdict = verdict,
          .workspace_size =
              [](const Args& args, const Executor& executor) {
                return (executor.operations->*kMember).workspace_size(args, executor.queue->device());
              },
          .plan = [](const Args& args, const Executor& executor, std::span<std::byte> workspace,
                     PlanSummary& summary) -> Status {
            const cuda::DeviceProperties& device = executor.queue->device();
            summary.text =
                core::format("made on the GPU (sm{}, {} multiprocessors) for whatever lengths it finds there",
                             device.arch, device.num_sms);
            return (executor.operations->*kMember).plan(args, *executor.queue, workspace);
          },
          .run = [](const Args& args, const Executor& executor, std::span<std::byte> workspace) -> Status {
            return (executor.operations->*kMember).run(args, *executor.queue, workspace);
          }};
}

template <class Args, cuda::DirectOperation<Args> cuda::Operations::*kMember>
DirectImplementation<Args> direct() {
  return {.name = kName, .verdict = verdict, .run = [](const Args& args, const Executor& executor) -> Status {
            return (executor.operations->*kMember)(args, *executor.queue);
          }};
}

}  // namespace

using cuda::Operations;

DecodeRow cuda_decode_row() { return planned<core::DecodeArgs, &Operations::decode>(); }
PrefillRow cuda_prefill_row() { return planned<core::PrefillArgs, &Operations::prefill>(); }
MergeStatesRow cuda_merge_states_row() { return direct<core::MergeStatesArgs, &Operations::merge_states>(); }
AppendRow cuda_append_row() { return direct<core::AppendArgs, &Operations::append>(); }
GatherRow cuda_gather_row() { return direct<core::GatherArgs, &Operations::gather>(); }
DecodeSparseRow cuda_decode_sparse_row() { return planned<core::DecodeSparseArgs, &Operations::decode_sparse>(); }
AppendRopeRow cuda_append_rope_row() { return direct<core::AppendRopeArgs, &Operations::append_rope>(); }
CopyPagesRow cuda_copy_pages_row() { return direct<core::CopyPagesArgs, &Operations::copy_pages>(); }
BlockTableToCsrRow cuda_block_table_to_csr_row() {
  return direct<core::BlockTableToCsrArgs, &Operations::block_table_to_csr>();
}
PhysicalSlotsRow cuda_physical_slots_row() { return direct<core::PhysicalSlotsArgs, &Operations::physical_slots>(); }
AppendIndexerRow cuda_append_indexer_row() { return direct<core::AppendIndexerArgs, &Operations::append_indexer>(); }
IndexerLogitsRow cuda_indexer_logits_row() { return direct<core::IndexerLogitsArgs, &Operations::indexer_logits>(); }
TopKRow cuda_top_k_row() { return direct<core::TopKArgs, &Operations::top_k>(); }
IndexerTopKRow cuda_indexer_top_k_row() { return direct<core::IndexerTopKArgs, &Operations::indexer_top_k>(); }

}  // namespace mla::dispatch
