// SPDX-License-Identifier: Apache-2.0
// The machine's devices as `mla info` shows them.
#pragma once

#include <string>

#include "mla/backend.h"
#include "mla/output.h"

namespace mla::cli {

/// "devices" of docs/json.md: the CPU, then every GPU.
Json devices_json(const MachineInfo& machine);

/// "NVIDIA H200 at 0000:19:00.0"
std::string gpu_text(const GpuInfo& gpu);

}  // namespace mla::cli
