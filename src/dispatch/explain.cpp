// SPDX-License-Identifier: Apache-2.0
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <utility>

#include "core/format.h"
#include "cpu/levels.h"
#include "cuda/border/backend.h"
#include "cuda/runtime/code.h"
#include "cuda/runtime/device_runtime.h"
#include "dispatch/select.h"
#include "dispatch/tables.h"

namespace mla {
namespace dispatch {

Status unknown_backend(Op op, const Forced& force, std::span<const std::string_view> names) {
  return {StatusCode::kInvalidArgument,
          core::format("{}: {}: expected one of {}, a family such as cpu, or auto, got \"{}\"", name(op), force.source,
                       fmt::join(names, ", "), force.backend)};
}

Status unusable(Op op, const Forced& force, std::span<const BackendVerdict> refused, std::string_view other) {
  std::string text = force.backend.empty()
                         ? core::format("{}: no backend can run this", name(op))
                         : core::format("{}: {}: \"{}\" cannot run this", name(op), force.source, force.backend);
  for (const BackendVerdict& row : refused)
    text += core::format("{} {}: {}", &row == refused.data() ? ":" : ";", row.name, row.reason);
  if (!other.empty()) text += core::format("; {} can", other);
  return {StatusCode::kUnsupported, std::move(text)};
}

}  // namespace dispatch

namespace {

/// Calls f with the table of an operation.
template <class F>
auto with_table(Op op, F&& f) {
  using namespace dispatch;  // NOLINT(google-build-using-namespace): one line of row types
  switch (op) {
    case Op::kPrefill: return f(table<PrefillRow>());
    case Op::kMergeStates: return f(table<MergeStatesRow>());
    case Op::kAppend: return f(table<AppendRow>());
    case Op::kGather: return f(table<GatherRow>());
    case Op::kDecodeSparse:
    case Op::kPrefillSparse: return f(table<DecodeSparseRow>());
    case Op::kAppendRope: return f(table<AppendRopeRow>());
    case Op::kCopyPages: return f(table<CopyPagesRow>());
    case Op::kBlockTableToCsr: return f(table<BlockTableToCsrRow>());
    case Op::kPhysicalSlots: return f(table<PhysicalSlotsRow>());
    case Op::kAppendIndexer: return f(table<AppendIndexerRow>());
    case Op::kIndexerLogits: return f(table<IndexerLogitsRow>());
    case Op::kTopK: return f(table<TopKRow>());
    case Op::kIndexerTopK: return f(table<IndexerTopKRow>());
    case Op::kCompress: return f(table<CompressRow>());
    case Op::kFinishOutput: return f(table<FinishOutputRow>());
    case Op::kDecode: break;
  }
  return f(table<DecodeRow>());
}

/// Returns the architecture of the problem's GPU, 0 if it has none or an emulated one.
int32_t gpu_arch_of(const Problem& problem) {
  if (problem.device.type != DeviceType::kCuda || problem.emulated) return 0;
  if (problem.gpu_arch != 0) return problem.gpu_arch;
  const auto gpu = cuda::cuda_device(problem.device.index);
  return gpu.ok() ? (*gpu)->info().arch : 0;
}

/// Returns what somebody who asked about a full build should know of this one.
std::string build_note(int32_t arch) {
  const GpuCode full = gpu_code(arch, true), here = gpu_code(arch);
  if (full == here) return {};
  if (here.arch == 0) return core::format("this build has no code for sm{}", arch);
  return core::format("in this build sm{} runs code of {}; -DMLA_CUDA_ARCHS={} builds its own", arch, code_text(here),
                      full.arch);
}

}  // namespace

namespace dispatch {

Status check_problem(const Problem& problem) {
  const std::pair<std::string_view, int64_t> counts[] = {
      {"num_heads", problem.num_heads}, {"d_qk", problem.d_qk}, {"d_v", problem.d_v}, {"q_len", problem.q_len}};
  for (const auto& [field, count] : counts)
    if (count < 1)
      return {StatusCode::kInvalidArgument, core::format("explain: {}: expected at least 1, got {}", field, count)};
  const std::pair<std::string_view, int64_t> known[] = {{"listed_keys", problem.listed_keys},
                                                        {"num_requests", problem.num_requests}};
  for (const auto& [field, count] : known)
    if (count < 0)
      return {StatusCode::kInvalidArgument, core::format("explain: {}: expected at least 0, got {}", field, count)};
  if (problem.logits_dtype != DType::kF32 && problem.logits_dtype != DType::kBF16 &&
      problem.logits_dtype != DType::kF16)
    return {StatusCode::kInvalidArgument,
            core::format("explain: logits_dtype: expected f32, bf16 or f16, got {}", name(problem.logits_dtype))};
  return {};
}

bool names_a_row(std::string_view force) {
  return std::any_of(std::begin(kAllOps), std::end(kAllOps), [&](Op op) {
    return with_table(op, [&](auto rows) {
      return std::any_of(rows.begin(), rows.end(), [&](const auto& row) { return row.name == force; });
    });
  });
}

}  // namespace dispatch

Explanation explain(const Problem& problem, std::string_view force) try {
  if (const Status status = dispatch::check_problem(problem); !status.ok())
    return {.selected = {}, .error = status.message(), .rows = {}};
  return with_table(problem.op, [&](auto rows) {
    Explanation result;
    if (const int32_t arch = gpu_arch_of(problem); arch != 0) {
      result.code = gpu_code(arch, problem.full_build);
      if (problem.full_build) result.note = build_note(arch);
    }
    for (const auto& row : rows) {
      const core::Verdict verdict = row.verdict(problem);
      result.rows.push_back({std::string(row.name), verdict.usable, verdict.reason.str(), row.numerics(problem)});
    }
    Status error;
    if (const auto* row = dispatch::select(rows, problem, dispatch::forced_backend(force), error))
      result.selected = row->name;
    else
      result.error = error.message();
    return result;
  });
} catch (const std::exception&) {
  return {.selected = {}, .error = "out of memory", .rows = {}};
}

GpuCode gpu_code(int32_t arch, bool full_build) {
  const std::span<const int32_t> built = cuda::built_archs();
  const cuda::CodeChoice choice = cuda::choose_code(arch, built, full_build, cuda::profile());
  return {.arch = choice.arch,
          .by_driver = choice.by_driver,
          .family = choice.family,
          .built = std::find(built.begin(), built.end(), choice.arch) != built.end(),
          .compiled_for = cuda::compiled_for(choice.arch, cuda::profile())};
}

std::string code_text(const GpuCode& code) {
  if (code.arch == 0) return "none";
  return core::format("{}sm{}{}{}", code.family ? "the family of " : "", code.arch,
                      code.by_driver ? ", which the driver compiles" : "", code.built ? "" : ", not in this build");
}

std::span<const int32_t> named_gpu_archs() { return cuda::kKindredArchs; }

std::vector<BackendInfo> backends() try {
  std::vector<BackendInfo> all;
  for (const cuda::Backend& backend : cuda::backends()) {
    std::vector<int32_t> archs = backend.archs;
    for (const int32_t arch : cuda::kKindredArchs)
      if (!archs.empty() && backend.is_for(arch)) archs.push_back(arch);
    std::sort(archs.begin(), archs.end());
    all.push_back({.name = std::string(backend.name),
                   .device = DeviceType::kCuda,
                   .archs = std::move(archs),
                   .leaves = backend.leaves.str()});
  }
  for (const cpu::Level& level : cpu::levels()) all.push_back({.name = std::string(level.row)});
  all.push_back({.name = std::string(dispatch::kReference)});
  return all;
} catch (const std::exception&) {
  return {};
}

std::vector<std::string> backend_names(Op op) try {
  return with_table(op, [](auto rows) {
    std::vector<std::string> names;
    for (const auto& row : rows) names.emplace_back(row.name);
    return names;
  });
} catch (const std::exception&) {
  return {};
}

}  // namespace mla
