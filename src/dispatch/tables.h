// SPDX-License-Identifier: Apache-2.0
// One ordered table of implementations per operation, best first.
#pragma once

#include <span>

#include "dispatch/implementation.h"

namespace mla::dispatch {

using DecodeRow = PlannedImplementation<core::DecodeArgs>;
using PrefillRow = PlannedImplementation<core::PrefillArgs>;
using MergeStatesRow = DirectImplementation<core::MergeStatesArgs>;
using AppendRow = DirectImplementation<core::AppendArgs>;
using GatherRow = DirectImplementation<core::GatherArgs>;
using DecodeSparseRow = PlannedImplementation<core::DecodeSparseArgs>;  // and of prefill_sparse
using AppendRopeRow = DirectImplementation<core::AppendRopeArgs>;
using CopyPagesRow = DirectImplementation<core::CopyPagesArgs>;
using BlockTableToCsrRow = DirectImplementation<core::BlockTableToCsrArgs>;
using PhysicalSlotsRow = DirectImplementation<core::PhysicalSlotsArgs>;
using AppendIndexerRow = DirectImplementation<core::AppendIndexerArgs>;
using IndexerLogitsRow = DirectImplementation<core::IndexerLogitsArgs>;
using TopKRow = DirectImplementation<core::TopKArgs>;
using IndexerTopKRow = DirectImplementation<core::IndexerTopKArgs>;

/// The table of an operation, by its row type. Built by the first call.
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

}  // namespace mla::dispatch
