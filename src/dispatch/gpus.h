// SPDX-License-Identifier: Apache-2.0
// Which GPUs their driver lists, without a library of the driver's.
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

}  // namespace mla::dispatch
