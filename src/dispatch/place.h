// SPDX-License-Identifier: Apache-2.0
// Finds out where a context computes, and where a call does.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/checks.h"
#include "cuda/runtime/device_runtime.h"
#include "mla/backend.h"
#include "mla/status.h"
#include "mla/types.h"

namespace mla::dispatch {

/// Holds what the text of ContextOptions::device says.
struct DeviceChoice {
  enum class Kind : uint8_t { kOfTensors, kCpu, kCuda, kEmulated };
  Kind kind = Kind::kOfTensors;
  int32_t index = 0;  // only for kCuda
  int32_t arch = 0;   // only for kEmulated

  std::string text() const;  // as parse_device takes it
  core::Memory memory() const { return kind == Kind::kEmulated ? core::Memory::kEmulated : core::Memory::kOfTensors; }
};

/// Parses a device: "", "cpu", "cuda", "cuda:1" or "emulated:sm120". Errors begin with `where`, and name `source`
/// ("device", "MLA_EMULATE"), which `text` comes from.
Result<DeviceChoice> parse_device(std::string_view text, std::string_view where, std::string_view source);
/// Returns the device that the caller asked for, or, if `asked` is empty, the one that MLA_EMULATE names now.
Result<DeviceChoice> choose_device(std::string_view asked, std::string_view where);

/// Says where a call computes: on the device of its tensors, if the context allows it.
struct Place {
  Device device = {};
  cuda::DeviceRuntime* gpu = nullptr;  // null on the CPU, and if there is no such GPU
  bool emulated = false;
  int32_t arch = 0;

  bool on_gpu() const { return device.type != DeviceType::kCpu; }
  std::string text() const;  // "cpu", "cuda:0", "emulated:sm90"
  void apply(Problem& problem) const;
  friend bool operator==(const Place&, const Place&) = default;
};

/// Finds the place of a call whose tensors are on the device `tensors`, as validation found. Fails if the context
/// computes elsewhere. A GPU that is missing is no error here: the rows' verdicts say so.
Status find_place(Op op, const DeviceChoice& choice, Device tensors, Place& place);

}  // namespace mla::dispatch
