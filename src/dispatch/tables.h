// SPDX-License-Identifier: Apache-2.0
// Each operation has a table of implementations, best first. decode_sparse and prefill_sparse share one.
#pragma once

#include <span>

#include "core/implementation.h"

namespace mla::dispatch {

using DecodeRow = core::PlannedImplementation<core::DecodeArgs>;
using PrefillRow = core::PlannedImplementation<core::PrefillArgs>;
using MergeStatesRow = core::DirectImplementation<core::MergeStatesArgs>;
using AppendRow = core::DirectImplementation<core::AppendArgs>;
using GatherRow = core::DirectImplementation<core::GatherArgs>;
using DecodeSparseRow = core::PlannedImplementation<core::DecodeSparseArgs>;  // and of prefill_sparse
using AppendRopeRow = core::DirectImplementation<core::AppendRopeArgs>;
using CopyPagesRow = core::DirectImplementation<core::CopyPagesArgs>;
using BlockTableToCsrRow = core::DirectImplementation<core::BlockTableToCsrArgs>;
using PhysicalSlotsRow = core::DirectImplementation<core::PhysicalSlotsArgs>;
using AppendIndexerRow = core::DirectImplementation<core::AppendIndexerArgs>;
using IndexerLogitsRow = core::DirectImplementation<core::IndexerLogitsArgs>;
using TopKRow = core::DirectImplementation<core::TopKArgs>;
using IndexerTopKRow = core::DirectImplementation<core::IndexerTopKArgs>;
using CompressRow = core::DirectImplementation<core::CompressArgs>;
using FinishOutputRow = core::DirectImplementation<core::FinishOutputArgs>;

/// Names the row that stands last in every table.
inline constexpr std::string_view kReference = "reference";

/// Returns the table of the operation that has this type of rows. The first call builds it.
template <class Row>
std::span<const Row> table();
template <>
std::span<const DecodeRow> table();
template <>
std::span<const PrefillRow> table();
template <>
std::span<const MergeStatesRow> table();
template <>
std::span<const AppendRow> table();
template <>
std::span<const GatherRow> table();
template <>
std::span<const DecodeSparseRow> table();
template <>
std::span<const AppendRopeRow> table();
template <>
std::span<const CopyPagesRow> table();
template <>
std::span<const BlockTableToCsrRow> table();
template <>
std::span<const PhysicalSlotsRow> table();
template <>
std::span<const AppendIndexerRow> table();
template <>
std::span<const IndexerLogitsRow> table();
template <>
std::span<const TopKRow> table();
template <>
std::span<const IndexerTopKRow> table();
template <>
std::span<const CompressRow> table();
template <>
std::span<const FinishOutputRow> table();

}  // namespace mla::dispatch
