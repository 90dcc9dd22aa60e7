// SPDX-License-Identifier: Apache-2.0
// Finds the machine's GPUs: those that the driver lists in its files, completed by what the driver's library says of
// them where it can be loaded.
#pragma once

#include <filesystem>
#include <vector>

#include "mla/backend.h"

namespace mla::dispatch {

/// Names the folder where NVIDIA's driver on Linux lists its GPUs.
inline constexpr const char* kNvidiaGpus = "/proc/driver/nvidia/gpus";

/// Returns the GPUs below `folder`, sorted by bus location. Each has a subfolder, named by its bus location, with a
/// text file "information". Files that name no model, and GPUs that the driver was told to exclude, are left out.
std::vector<GpuInfo> nvidia_gpus(const std::filesystem::path& folder);

/// Completes `listed`, which come from the driver's files, by what its library says of the same bus location
/// (`usable`), and adds GPUs that only the library knows. Sorts all of them by bus location.
void merge_gpus(std::vector<GpuInfo>& listed, const std::vector<GpuInfo>& usable);

/// Sets what a machine's info says of GPUs, of CUDA's versions, and of the architectures that this build has code for
/// or can emulate.
void find_gpus(MachineInfo& info);

}  // namespace mla::dispatch
