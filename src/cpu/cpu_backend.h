// SPDX-License-Identifier: Apache-2.0
// The rows that the cpu backend puts into the tables, best instruction set first.
#pragma once

#include <span>

#include "dispatch/implementation.h"

namespace mla::cpu {

std::span<const dispatch::PlannedImplementation<core::DecodeArgs>> decode_rows();
std::span<const dispatch::PlannedImplementation<core::PrefillArgs>> prefill_rows();
std::span<const dispatch::DirectImplementation<core::MergeStatesArgs>> merge_states_rows();
std::span<const dispatch::DirectImplementation<core::AppendArgs>> append_rows();
std::span<const dispatch::DirectImplementation<core::GatherArgs>> gather_rows();

}  // namespace mla::cpu
