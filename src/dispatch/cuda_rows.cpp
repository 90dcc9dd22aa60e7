// SPDX-License-Identifier: Apache-2.0
#include "dispatch/cuda_rows.h"

#include <algorithm>
#include <string>

#include "core/format.h"
#include "cuda/runtime/code.h"
#include "cuda/runtime/device_runtime.h"

namespace mla::dispatch {
namespace {

using core::DirectImplementation;
using core::Executor;
using core::PlannedImplementation;
using core::PlanSummary;
using core::Reason;
using core::Verdict;

struct Widths {
  int64_t d_qk, d_v;
};
/// Head dims that the kernels are compiled for; absorbed: kv_lora_rank with and without 64 rotary channels.
constexpr Widths kAbsorbedWidths[] = {{512 + 64, 512}, {512, 512}, {256 + 64, 256}, {256, 256}};
/// cuda_portable's prefill has slower kernels for all others.
constexpr Widths kPrefillWidths[] = {{192, 128}, {128, 128}};

/// Of the problem's GPU, or why there is none.
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

/// Kernels for the problem's GPU, or why there are none.
struct Kernels {
  cuda::Code code = {};
  Reason refusal = {};
};

Kernels find_kernels(const Problem& problem) {
  if (problem.emulated) {
    const cuda::Code code = cuda::emulated_code(problem.gpu_arch);
    if (code.operations != nullptr) return {.code = code};
    return {.refusal = Reason::format("this build cannot emulate sm{}", problem.gpu_arch)};
  }
  const Architecture gpu = arch_of(problem);
  if (!gpu.refusal.empty()) return {.refusal = gpu.refusal};
  if (gpu.arch < cuda::kOldestArch)
    return {.refusal = Reason::format("needs sm{} or newer, not sm{}", cuda::kOldestArch, gpu.arch)};
  const cuda::Code code = cuda::code_for(gpu.arch);
  if (code.operations != nullptr) return {.code = code};
  if (cuda::built_archs().empty()) return {.refusal = "this build of the library has no GPU code"};
  return {.refusal = Reason::format("this build has no code for sm{}", gpu.arch)};
}

bool is_indexer(Op op) { return op == Op::kIndexerLogits || op == Op::kIndexerTopK; }
bool is_absorbed(Op op) { return op == Op::kDecode || op == Op::kDecodeSparse || op == Op::kPrefillSparse; }

/// What a format stores of a latent channel.
DType element_of(CacheFormat format) { return kv_layout(format).nope.element; }

/// Whether one block can compute keys of both: its kernel is compiled for bf16, for f16, or for quantized rows.
bool go_together(CacheFormat a, CacheFormat b) {
  return element_of(a) == element_of(b) || (is_quantized(element_of(a)) && is_quantized(element_of(b)));
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
  const bool takes_e4m3 = problem.op == Op::kDecode || problem.op == Op::kDecodeSparse || is_indexer(problem.op);
  if (!float16 && problem.q_dtype != DType::kF32 && !(takes_e4m3 && problem.q_dtype == DType::kE4M3))
    return Reason::format("takes bf16, f16{} f32{}, not {}", takes_e4m3 ? "," : " and", takes_e4m3 ? " and e4m3" : "",
                          name(problem.q_dtype));
  if (problem.extra_cache && !go_together(problem.cache, *problem.extra_cache))
    return Reason::format("takes two pools of bf16, two of f16 or two of quantized rows, not {} and {}",
                          name(problem.cache), name(*problem.extra_cache));
  if (const Reason reason = core::width_refusal(problem); !reason.empty()) return reason;
  if (is_absorbed(problem.op)) return widths_refusal(problem, kAbsorbedWidths);
  return {};
}

Verdict no(const Reason& reason) { return {.usable = false, .reason = reason}; }

/// What no kernel for GPUs does; empty if nothing.
Reason device_refusal(const Problem& problem) {
  if (problem.device.type == DeviceType::kCuda) return {};
  return Reason::format("tensors are on {}, not on a GPU", name(problem.device.type));
}

Verdict yes(const Problem& problem, const Kernels& kernels, const char* kind) {
  if (problem.emulated)
    return {.usable = true, .reason = Reason::format("emulated: {} of sm{} on the CPU", kind, problem.gpu_arch)};
  return {.usable = true, .reason = Reason::format("{} compiled for sm{}", kind, kernels.code.arch)};
}

Verdict portable_verdict(const Problem& problem) {
  if (const Reason reason = device_refusal(problem); !reason.empty()) return no(reason);
  if (const Reason reason = shape_refusal(problem); !reason.empty()) return no(reason);
  const Kernels kernels = find_kernels(problem);
  if (!kernels.refusal.empty()) return no(kernels.refusal);
  const bool multiplies = is_absorbed(problem.op) || problem.op == Op::kPrefill || is_indexer(problem.op);
  return yes(problem, kernels, multiplies ? "mma.sync kernels" : "kernels");
}

/// What cuda_sm90 leaves to cuda_portable; empty if nothing.
Reason sm90_refusal(const Problem& problem) {
  if (problem.op == Op::kPrefill) {
    if (problem.q_dtype == DType::kF32) return "takes bf16 and f16, not f32: cuda_portable does";
    return widths_refusal(problem, kPrefillWidths);
  }
  if (is_indexer(problem.op)) {
    if (problem.q_dtype == DType::kF32) return "takes e4m3, bf16 and f16, not f32: cuda_portable does";
    constexpr int64_t kFewHeads = 32;  // of the 64 that a product has
    if (problem.num_heads <= kFewHeads)
      return Reason::format("takes more than {} heads, not {}: cuda_portable does", kFewHeads, problem.num_heads);
    return {};
  }
  const DType keys = value_dtype(element_of(problem.cache));
  if (problem.q_dtype != keys && problem.q_dtype != DType::kE4M3)
    return Reason::format("takes {}{} queries with {} keys, not {}: cuda_portable does", name(keys),
                          problem.op == Op::kPrefillSparse ? "" : " and e4m3", name(problem.cache),
                          name(problem.q_dtype));
  // A block of cuda_portable holds so few rows whole: it reads each key once and is bound by memory.
  constexpr int64_t kFewRows = 16;
  const int64_t q_len = problem.op == Op::kDecode ? std::max<int64_t>(problem.q_len, 1) : 1;
  if (q_len <= kFewRows / problem.num_heads)
    return Reason::format("takes requests of more than {} query rows (tokens x heads), not {}: cuda_portable does",
                          kFewRows, q_len * problem.num_heads);
  return {};
}

Verdict sm90_verdict(const Problem& problem) {
  constexpr int32_t kSm90 = 90;
  if (const Reason reason = device_refusal(problem); !reason.empty()) return no(reason);
  const Architecture gpu = arch_of(problem);
  if (!gpu.refusal.empty()) return no(gpu.refusal);
  if (gpu.arch != kSm90) return no(Reason::format("needs sm{} (H100, H200), not sm{}", kSm90, gpu.arch));
  if (const Reason reason = shape_refusal(problem); !reason.empty()) return no(reason);
  if (const Reason reason = sm90_refusal(problem); !reason.empty()) return no(reason);
  const Kernels kernels = find_kernels(problem);
  if (!kernels.refusal.empty()) return no(kernels.refusal);
  // Older code, which a GPU runs too.
  if (kernels.code.operations->sm90 == nullptr) return no(Reason::format("this build has no code for sm{}", kSm90));
  return yes(problem, kernels, "wgmma kernels");
}

struct Portable {
  static constexpr std::string_view kName = "cuda_portable";
  static constexpr auto kVerdict = portable_verdict;
  static const cuda::BackendOperations& of(const Executor& executor) { return executor.operations->portable; }
};

struct Sm90 {
  static constexpr std::string_view kName = "cuda_sm90";
  static constexpr auto kVerdict = sm90_verdict;
  static const cuda::BackendOperations& of(const Executor& executor) { return *executor.operations->sm90; }
};

template <class Backend, class Args, cuda::PlannedOperation<Args> cuda::BackendOperations::*kMember>
PlannedImplementation<Args> planned() {
  return {.name = Backend::kName,
          .verdict = Backend::kVerdict,
          .workspace_size =
              [](const Args& args, const Executor& executor) {
                return (Backend::of(executor).*kMember).workspace_size(args, executor.queue->device());
              },
          .plan = [](const Args& args, const Executor& executor, std::span<std::byte> workspace,
                     PlanSummary& summary) -> Status {
            const cuda::DeviceProperties& device = executor.queue->device();
            summary.text =
                core::format("made on the GPU (sm{}, {} multiprocessors) for whatever lengths it finds there",
                             device.arch, device.num_sms);
            return (Backend::of(executor).*kMember).plan(args, *executor.queue, workspace);
          },
          .run = [](const Args& args, const Executor& executor, std::span<std::byte> workspace) -> Status {
            return (Backend::of(executor).*kMember).run(args, *executor.queue, workspace);
          }};
}

template <class Backend, class Args, cuda::DirectOperation<Args> cuda::BackendOperations::*kMember>
DirectImplementation<Args> direct_of() {
  return {.name = Backend::kName,
          .verdict = Backend::kVerdict,
          .run = [](const Args& args, const Executor& executor) -> Status {
            return (Backend::of(executor).*kMember)(args, *executor.queue);
          }};
}

/// What is the same for all.
template <class Args, cuda::DirectOperation<Args> cuda::Operations::*kMember>
DirectImplementation<Args> direct() {
  return {.name = Portable::kName,
          .verdict = Portable::kVerdict,
          .run = [](const Args& args, const Executor& executor) -> Status {
            return (executor.operations->*kMember)(args, *executor.queue);
          }};
}

}  // namespace

using cuda::BackendOperations;
using cuda::Operations;

std::vector<DecodeRow> cuda_decode_rows() {
  return {planned<Sm90, core::DecodeArgs, &BackendOperations::decode>(),
          planned<Portable, core::DecodeArgs, &BackendOperations::decode>()};
}
std::vector<DecodeSparseRow> cuda_decode_sparse_rows() {
  return {planned<Sm90, core::DecodeSparseArgs, &BackendOperations::decode_sparse>(),
          planned<Portable, core::DecodeSparseArgs, &BackendOperations::decode_sparse>()};
}
std::vector<PrefillRow> cuda_prefill_rows() {
  return {planned<Sm90, core::PrefillArgs, &BackendOperations::prefill>(),
          planned<Portable, core::PrefillArgs, &BackendOperations::prefill>()};
}
MergeStatesRow cuda_merge_states_row() { return direct<core::MergeStatesArgs, &Operations::merge_states>(); }
AppendRow cuda_append_row() { return direct<core::AppendArgs, &Operations::append>(); }
GatherRow cuda_gather_row() { return direct<core::GatherArgs, &Operations::gather>(); }
AppendRopeRow cuda_append_rope_row() { return direct<core::AppendRopeArgs, &Operations::append_rope>(); }
CopyPagesRow cuda_copy_pages_row() { return direct<core::CopyPagesArgs, &Operations::copy_pages>(); }
BlockTableToCsrRow cuda_block_table_to_csr_row() {
  return direct<core::BlockTableToCsrArgs, &Operations::block_table_to_csr>();
}
PhysicalSlotsRow cuda_physical_slots_row() { return direct<core::PhysicalSlotsArgs, &Operations::physical_slots>(); }
AppendIndexerRow cuda_append_indexer_row() { return direct<core::AppendIndexerArgs, &Operations::append_indexer>(); }
std::vector<IndexerLogitsRow> cuda_indexer_logits_rows() {
  return {direct_of<Sm90, core::IndexerLogitsArgs, &BackendOperations::indexer_logits>(),
          direct_of<Portable, core::IndexerLogitsArgs, &BackendOperations::indexer_logits>()};
}
TopKRow cuda_top_k_row() { return direct<core::TopKArgs, &Operations::top_k>(); }
std::vector<IndexerTopKRow> cuda_indexer_top_k_rows() {
  return {direct_of<Sm90, core::IndexerTopKArgs, &BackendOperations::indexer_top_k>(),
          direct_of<Portable, core::IndexerTopKArgs, &BackendOperations::indexer_top_k>()};
}

}  // namespace mla::dispatch
