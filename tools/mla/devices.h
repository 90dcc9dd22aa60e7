// SPDX-License-Identifier: Apache-2.0
// Describes the machine's devices as `libmla info` shows them.
#pragma once

#include <string>
#include <string_view>

#include "mla/backend.h"
#include "mla/output.h"

namespace mla::cli {

/// Returns "devices" of docs/json.md: the CPU, then every GPU.
Json devices_json(const MachineInfo& machine);

/// Returns "NVIDIA H200 at 0000:19:00.0, cuda:0, sm90, 132 SMs, 140.0 GiB, 227 KiB of shared memory per block" and the
/// size of the L2 cache, leaving out what is not known.
std::string gpu_text(const GpuInfo& gpu);

/// Returns what code_text() says, as "code" of docs/json.md; null for none.
Json code_json(const GpuCode& code);

/// Returns "580.65.06" of what /proc/driver/nvidia/version says, or an empty text.
std::string parse_nvidia_version(std::string_view text);
/// Returns the version of NVIDIA's driver on this machine; an empty text without one.
std::string nvidia_driver();

/// Returns the device that an option names, parsed; if `text` is empty, the one that MLA_EMULATE names, else "cpu".
/// `any_gpu` is as in parse_device.
std::string device_of(std::string_view option, const std::string& text, bool any_gpu = false);

/// Does the same for a device that can compute: throws UsageError with the library's reason why there is no such GPU.
std::string usable_device(std::string_view option, const std::string& text);

}  // namespace mla::cli
