// SPDX-License-Identifier: Apache-2.0
// Which GPUs their driver lists: in its files, and, where its library can be loaded, what it says of them.
#pragma once

#include <filesystem>
#include <vector>

#include "mla/backend.h"

namespace mla::dispatch {

/// Where NVIDIA's driver on Linux lists its GPUs.
inline constexpr const char* kNvidiaGpus = "/proc/driver/nvidia/gpus";

/// The GPUs below `folder`: a subfolder each, named by the bus location, with a text file "information". By bus
/// location. Left out: what names no model, and GPUs that the driver was told to exclude.
std::vector<GpuInfo> nvidia_gpus(const std::filesystem::path& folder);

/// Completes `listed`, which come from the driver's files, by what its library says of the same bus location, and adds
/// GPUs that only the library knows. By bus location.
void merge_gpus(std::vector<GpuInfo>& listed, const std::vector<GpuInfo>& usable);

/// What a machine's info says of GPUs.
void find_gpus(MachineInfo& info);

}  // namespace mla::dispatch
