// SPDX-License-Identifier: Apache-2.0
// The machine's devices as `mla info` shows them.
#pragma once

#include <string>
#include <string_view>

#include "mla/backend.h"
#include "mla/output.h"

namespace mla::cli {

/// "devices" of docs/json.md: the CPU, then every GPU.
Json devices_json(const MachineInfo& machine);

/// "NVIDIA H200 at 0000:19:00.0, cuda:0, sm90, 132 SMs, 140.0 GiB, 227 KiB of shared memory per block", as far as
/// known.
std::string gpu_text(const GpuInfo& gpu);

/// The device that an option names, parsed; without one what MLA_EMULATE says, else "cpu". `any_gpu` as in
/// parse_device.
std::string device_of(std::string_view option, const std::string& text, bool any_gpu = false);

/// The same, of a device that can compute: throws UsageError with the library's reason why there is no such GPU.
std::string usable_device(std::string_view option, const std::string& text);

}  // namespace mla::cli
