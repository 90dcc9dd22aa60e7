// SPDX-License-Identifier: Apache-2.0
#include "dispatch/tables.h"

#include <vector>

#include "cpu/cpu_backend.h"
#include "dispatch/cuda_rows.h"
#include "reference/reference.h"

namespace mla::dispatch {
namespace {

using core::DirectImplementation;
using core::Executor;
using core::PlannedImplementation;
using core::PlanSummary;
using core::Reason;
using core::Verdict;
using cuda::Operations;

bool is_float(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32; }

Verdict reference_verdict(const Problem& problem) {
  constexpr int64_t kWidest = 4096;
  if (problem.device.type != DeviceType::kCpu)
    return {false, Reason::format("tensors are on {}, not on the CPU", name(problem.device.type))};
  const bool takes_e4m3 = problem.op == Op::kDecode || problem.op == Op::kDecodeSparse || problem.op == Op::kPrefill ||
                          problem.op == Op::kIndexerLogits || problem.op == Op::kIndexerTopK;
  if (problem.q_dtype == DType::kE4M3 ? !takes_e4m3 : !is_float(problem.q_dtype))
    return {false, Reason::format("takes bf16, f16{} f32{} only, not {}", takes_e4m3 ? "," : " and",
                                  takes_e4m3 ? " and e4m3" : "", name(problem.q_dtype))};
  for (const Reason& reason : {core::width_refusal(problem), core::compute_refusal(problem)})
    if (!reason.empty()) return {false, reason};
  for (int64_t width : {problem.d_qk, problem.d_v})
    if (width < 1 || width > kWidest)
      return {false, Reason::format("takes head dims from 1 to {}, not {}", kWidest, width)};
  return {true, "float64 oracle"};
}

Numerics reference_numerics(const Problem&) { return {.multiplied = Arithmetic::kF64, .summed = Arithmetic::kF64}; }

template <class Args, void (*compute)(const Args&, std::span<std::byte>)>
PlannedImplementation<Args> planned_reference() {
  return {.name = kReference,
          .verdict = reference_verdict,
          .numerics = reference_numerics,
          .workspace_size = [](const Args& args, const Executor&) { return reference::workspace_size(args); },
          .plan = [](const Args&, const Executor&, std::span<std::byte>, PlanSummary& summary) -> Status {
            summary = {.num_tasks = 1, .num_splits = 0, .text = [] {
                         return std::string("the whole batch on one thread, in float64");
                       }};
            return {};
          },
          .run = [](const Args& args, const Executor&, std::span<std::byte> workspace) -> Status {
            compute(args, workspace);
            return {};
          }};
}

template <class Args, void (*compute)(const Args&)>
DirectImplementation<Args> direct_reference() {
  return {.name = kReference,
          .verdict = reference_verdict,
          .numerics = reference_numerics,
          .run = [](const Args& args, const Executor&) -> Status {
            compute(args);
            return {};
          }};
}

template <class Row>
std::vector<Row> join(std::vector<Row> first, std::span<const Row> rows, const Row& last) {
  first.insert(first.end(), rows.begin(), rows.end());
  first.push_back(last);
  return first;
}

}  // namespace

template <>
std::span<const DecodeRow> table() {
  static const auto rows = join(cuda_rows(Op::kDecode, &Operations::decode), cpu::decode_rows(),
                                planned_reference<core::DecodeArgs, reference::decode>());
  return rows;
}

template <>
std::span<const PrefillRow> table() {
  static const auto rows = join(cuda_rows(Op::kPrefill, &Operations::prefill), cpu::prefill_rows(),
                                planned_reference<core::PrefillArgs, reference::prefill>());
  return rows;
}

template <>
std::span<const MergeStatesRow> table() {
  static const auto rows = join(cuda_rows(Op::kMergeStates, &Operations::merge_states), cpu::merge_states_rows(),
                                direct_reference<core::MergeStatesArgs, reference::merge_states>());
  return rows;
}

template <>
std::span<const AppendRow> table() {
  static const auto rows = join(cuda_rows(Op::kAppend, &Operations::append), cpu::append_rows(),
                                direct_reference<core::AppendArgs, reference::append>());
  return rows;
}

template <>
std::span<const GatherRow> table() {
  static const auto rows = join(cuda_rows(Op::kGather, &Operations::gather), cpu::gather_rows(),
                                direct_reference<core::GatherArgs, reference::gather>());
  return rows;
}

template <>
std::span<const DecodeSparseRow> table() {
  static const auto rows = join(cuda_rows(Op::kDecodeSparse, &Operations::decode_sparse), cpu::decode_sparse_rows(),
                                planned_reference<core::DecodeSparseArgs, reference::decode_sparse>());
  return rows;
}

template <>
std::span<const AppendRopeRow> table() {
  static const auto rows = join(cuda_rows(Op::kAppendRope, &Operations::append_rope), cpu::append_rope_rows(),
                                direct_reference<core::AppendRopeArgs, reference::append_rope>());
  return rows;
}

template <>
std::span<const CopyPagesRow> table() {
  static const auto rows = join(cuda_rows(Op::kCopyPages, &Operations::copy_pages), cpu::copy_pages_rows(),
                                direct_reference<core::CopyPagesArgs, reference::copy_pages>());
  return rows;
}

template <>
std::span<const BlockTableToCsrRow> table() {
  static const auto rows =
      join(cuda_rows(Op::kBlockTableToCsr, &Operations::block_table_to_csr), cpu::block_table_to_csr_rows(),
           direct_reference<core::BlockTableToCsrArgs, reference::block_table_to_csr>());
  return rows;
}

template <>
std::span<const PhysicalSlotsRow> table() {
  static const auto rows = join(cuda_rows(Op::kPhysicalSlots, &Operations::physical_slots), cpu::physical_slots_rows(),
                                direct_reference<core::PhysicalSlotsArgs, reference::physical_slots>());
  return rows;
}

template <>
std::span<const AppendIndexerRow> table() {
  static const auto rows = join(cuda_rows(Op::kAppendIndexer, &Operations::append_indexer), cpu::append_indexer_rows(),
                                direct_reference<core::AppendIndexerArgs, reference::append_indexer>());
  return rows;
}

template <>
std::span<const IndexerLogitsRow> table() {
  static const auto rows = join(cuda_rows(Op::kIndexerLogits, &Operations::indexer_logits), cpu::indexer_logits_rows(),
                                direct_reference<core::IndexerLogitsArgs, reference::indexer_logits>());
  return rows;
}

template <>
std::span<const TopKRow> table() {
  static const auto rows = join(cuda_rows(Op::kTopK, &Operations::top_k), cpu::top_k_rows(),
                                direct_reference<core::TopKArgs, reference::top_k>());
  return rows;
}

template <>
std::span<const IndexerTopKRow> table() {
  static const auto rows = join(cuda_rows(Op::kIndexerTopK, &Operations::indexer_top_k), cpu::indexer_top_k_rows(),
                                direct_reference<core::IndexerTopKArgs, reference::indexer_top_k>());
  return rows;
}

template <>
std::span<const CompressRow> table() {
  static const auto rows = join(cuda_rows(Op::kCompress, &Operations::compress), cpu::compress_rows(),
                                direct_reference<core::CompressArgs, reference::compress>());
  return rows;
}

template <>
std::span<const FinishOutputRow> table() {
  static const auto rows = join(cuda_rows(Op::kFinishOutput, &Operations::finish_output), cpu::finish_output_rows(),
                                direct_reference<core::FinishOutputArgs, reference::finish_output>());
  return rows;
}

}  // namespace mla::dispatch
