// SPDX-License-Identifier: Apache-2.0
// Validation: public parameters are checked once and become the arguments that backends see. Nothing is written to the
// caller's tensors here, and nothing is allocated unless a check fails.
#pragma once

#include <cstddef>
#include <span>

#include "core/args.h"
#include "core/checks.h"
#include "mla/params.h"
#include "mla/status.h"

namespace mla::core {

/// On success `args` is complete and `device` is the device of all tensors. Lists are read only if that is the CPU.
/// With Memory::kEmulated the device is an emulated GPU, whatever the tensors say. `workspace` is the memory that
/// planning, and the operation beside its outputs, writes.
Status validate(const DecodeParams& params, Scope scope, DecodeArgs& args, Device& device,
                Memory memory = Memory::kOfTensors, std::span<const std::byte> workspace = {});
Status validate(const PrefillParams& params, Scope scope, PrefillArgs& args, Device& device,
                Memory memory = Memory::kOfTensors, std::span<const std::byte> workspace = {});
Status validate(const FinishOutputParams& params, FinishOutputArgs& args, Device& device,
                Memory memory = Memory::kOfTensors);
Status validate(const MergeStatesParams& params, MergeStatesArgs& args, Device& device,
                Memory memory = Memory::kOfTensors);
Status validate(const AppendParams& params, AppendArgs& args, Device& device, Memory memory = Memory::kOfTensors);
Status validate(const GatherParams& params, GatherArgs& args, Device& device, Memory memory = Memory::kOfTensors);
Status validate(const DecodeSparseParams& params, Scope scope, DecodeSparseArgs& args, Device& device,
                Memory memory = Memory::kOfTensors, std::span<const std::byte> workspace = {});
Status validate(const PrefillSparseParams& params, Scope scope, DecodeSparseArgs& args, Device& device,
                Memory memory = Memory::kOfTensors, std::span<const std::byte> workspace = {});
Status validate(const AppendRopeParams& params, AppendRopeArgs& args, Device& device,
                Memory memory = Memory::kOfTensors);
Status validate(const CopyPagesParams& params, CopyPagesArgs& args, Device& device, Memory memory = Memory::kOfTensors);
Status validate(const BlockTableToCsrParams& params, BlockTableToCsrArgs& args, Device& device,
                Memory memory = Memory::kOfTensors);
Status validate(const PhysicalSlotsParams& params, PhysicalSlotsArgs& args, Device& device,
                Memory memory = Memory::kOfTensors);
Status validate(const AppendIndexerParams& params, AppendIndexerArgs& args, Device& device,
                Memory memory = Memory::kOfTensors);
Status validate(const IndexerLogitsParams& params, IndexerLogitsArgs& args, Device& device,
                Memory memory = Memory::kOfTensors);
Status validate(const TopKParams& params, TopKArgs& args, Device& device, Memory memory = Memory::kOfTensors);
Status validate(const IndexerTopKParams& params, IndexerTopKArgs& args, Device& device,
                Memory memory = Memory::kOfTensors);
Status validate(const CompressParams& params, CompressArgs& args, Device& device, Memory memory = Memory::kOfTensors);

}  // namespace mla::core
