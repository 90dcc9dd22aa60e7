// SPDX-License-Identifier: Apache-2.0
#include "dispatch/tables.h"

#include <fmt/format.h>

#include <vector>

#include "cpu/cpu_backend.h"
#include "reference/reference.h"

namespace mla::dispatch {
namespace {

Verdict reference_verdict(const Problem& problem) {
  constexpr int64_t kWidest = 4096;
  if (problem.device.type != DeviceType::kCpu) return {false, "computes on the cpu only"};
  const bool has_cache = problem.op == Op::kDecode || problem.op == Op::kAppend || problem.op == Op::kGather;
  if (has_cache && problem.cache != CacheFormat::kBF16 && problem.cache != CacheFormat::kF16)
    return {false, Reason::format("computes with bf16 and f16 caches only, not {}", name(problem.cache))};
  if (problem.q_dtype != DType::kBF16 && problem.q_dtype != DType::kF16 && problem.q_dtype != DType::kF32)
    return {false, Reason::format("takes bf16, f16 and f32 only, not {}", name(problem.q_dtype))};
  if (problem.num_heads < 1) return {false, Reason::format("needs at least 1 head, not {}", problem.num_heads)};
  for (int64_t width : {problem.d_qk, problem.d_v})
    if (width < 1 || width > kWidest)
      return {false, Reason::format("takes head dims from 1 to {}, not {}", kWidest, width)};
  return {true, "float64 oracle"};
}

template <class Args, void (*compute)(const Args&, std::span<std::byte>)>
constexpr PlannedImplementation<Args> planned_reference() {
  return {.name = "reference",
          .verdict = reference_verdict,
          .workspace_size = [](const Args& args, int32_t) { return reference::workspace_size(args); },
          .plan = [](const Args&, int32_t, std::span<std::byte>) -> PlanSummary {
            return {.num_tasks = 1, .num_splits = 0, .text = "the whole batch on one thread, in float64"};
          },
          .run = [](const Args& args, core::ThreadPool&, std::span<std::byte> workspace) { compute(args, workspace); }};
}

template <class Args, void (*compute)(const Args&)>
constexpr DirectImplementation<Args> direct_reference() {
  return {.name = "reference", .verdict = reference_verdict, .run = [](const Args& args, core::ThreadPool&) {
            compute(args);
          }};
}

template <class Row>
std::vector<Row> join(std::span<const Row> rows, const Row& last) {
  std::vector<Row> all(rows.begin(), rows.end());
  all.push_back(last);
  return all;
}

}  // namespace

template <>
std::span<const DecodeRow> table() {
  static const auto rows = join(cpu::decode_rows(), planned_reference<core::DecodeArgs, reference::decode>());
  return rows;
}

template <>
std::span<const PrefillRow> table() {
  static const auto rows = join(cpu::prefill_rows(), planned_reference<core::PrefillArgs, reference::prefill>());
  return rows;
}

template <>
std::span<const MergeStatesRow> table() {
  static const auto rows =
      join(cpu::merge_states_rows(), direct_reference<core::MergeStatesArgs, reference::merge_states>());
  return rows;
}

template <>
std::span<const AppendRow> table() {
  static const auto rows = join(cpu::append_rows(), direct_reference<core::AppendArgs, reference::append>());
  return rows;
}

template <>
std::span<const GatherRow> table() {
  static const auto rows = join(cpu::gather_rows(), direct_reference<core::GatherArgs, reference::gather>());
  return rows;
}

}  // namespace mla::dispatch
