// SPDX-License-Identifier: Apache-2.0
// Where a context computes, and where a call does.
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

/// ContextOptions::device, understood.
struct DeviceChoice {
  enum class Kind : uint8_t { kOfTensors, kCpu, kCuda, kEmulated };
  Kind kind = Kind::kOfTensors;
  int32_t index = 0;  // cuda
  int32_t arch = 0;   // emulated

  std::string text() const;  // as parse_device takes it
  core::Memory memory() const { return kind == Kind::kEmulated ? core::Memory::kEmulated : core::Memory::kOfTensors; }
};

/// "", "cpu", "cuda:1", "emulated:sm120"; what `source` ("device", "MLA_EMULATE") says is named in errors of `where`.
Result<DeviceChoice> parse_device(std::string_view text, std::string_view where, std::string_view source);
/// What the caller asked for, else MLA_EMULATE as it is now.
Result<DeviceChoice> choose_device(std::string_view asked, std::string_view where);

/// Where a call computes: the device of its tensors, if the context allows it.
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

/// `tensors` is what validation found. A GPU that is missing is no error here: the rows' verdicts say so.
Status find_place(Op op, const DeviceChoice& choice, Device tensors, Place& place);

}  // namespace mla::dispatch
