// SPDX-License-Identifier: Apache-2.0
// The float64 oracle: every operation and format, written to be read against spec formulas, never to be fast.
#pragma once

#include "core/args.h"

namespace mla::reference {

void decode(const core::DecodeArgs& args);
void prefill(const core::PrefillArgs& args);
void merge_states(const core::MergeStatesArgs& args);
void append(const core::AppendArgs& args);
void gather(const core::GatherArgs& args);

}  // namespace mla::reference
