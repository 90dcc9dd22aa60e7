// SPDX-License-Identifier: Apache-2.0
// The float64 oracle: every operation and format, written to be read against spec formulas, never to be fast.
#pragma once

#include <cstddef>
#include <span>

#include "core/args.h"

namespace mla::reference {

/// Bytes that decode and prefill need, whatever the lengths.
size_t workspace_size(const core::DecodeArgs& args);
size_t workspace_size(const core::PrefillArgs& args);

/// `workspace` begins where a double may.
void decode(const core::DecodeArgs& args, std::span<std::byte> workspace);
void prefill(const core::PrefillArgs& args, std::span<std::byte> workspace);
void merge_states(const core::MergeStatesArgs& args);
void append(const core::AppendArgs& args);
void gather(const core::GatherArgs& args);

}  // namespace mla::reference
