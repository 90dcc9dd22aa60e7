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

}  // namespace mla::dispatch
