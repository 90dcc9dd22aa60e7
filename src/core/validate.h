// SPDX-License-Identifier: Apache-2.0
// The border: public parameters, checked once, become the arguments that backends see. Nothing is written to the
// caller's tensors here, and nothing is allocated unless a check fails.
#pragma once

#include "core/args.h"
#include "core/checks.h"
#include "mla/params.h"
#include "mla/status.h"

namespace mla::core {

/// On success `args` is complete and `device` is where all tensors live. Lists are only read if that is the CPU.
Status validate(const DecodeParams& params, Scope scope, DecodeArgs& args, Device& device);
Status validate(const PrefillParams& params, Scope scope, PrefillArgs& args, Device& device);
Status validate(const MergeStatesParams& params, MergeStatesArgs& args, Device& device);
Status validate(const AppendParams& params, AppendArgs& args, Device& device);
Status validate(const GatherParams& params, GatherArgs& args, Device& device);
Status validate(const DecodeSparseParams& params, Scope scope, DecodeSparseArgs& args, Device& device);
Status validate(const PrefillSparseParams& params, Scope scope, DecodeSparseArgs& args, Device& device);
Status validate(const AppendRopeParams& params, AppendRopeArgs& args, Device& device);
Status validate(const CopyPagesParams& params, CopyPagesArgs& args, Device& device);
Status validate(const BlockTableToCsrParams& params, BlockTableToCsrArgs& args, Device& device);
Status validate(const PhysicalSlotsParams& params, PhysicalSlotsArgs& args, Device& device);
Status validate(const AppendIndexerParams& params, AppendIndexerArgs& args, Device& device);
Status validate(const IndexerLogitsParams& params, IndexerLogitsArgs& args, Device& device);
Status validate(const TopKParams& params, TopKArgs& args, Device& device);
Status validate(const IndexerTopKParams& params, IndexerTopKArgs& args, Device& device);

}  // namespace mla::core
