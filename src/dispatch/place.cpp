// SPDX-License-Identifier: Apache-2.0
#include "dispatch/place.h"

#include <charconv>
#include <cstdlib>

#include "core/format.h"

namespace mla::dispatch {
namespace {

constexpr std::string_view kCuda = "cuda", kEmulated = "emulated:";

/// Parses all of `text` as a number of at most four digits. Returns false if it is none.
bool parse_number(std::string_view text, int32_t& value) {
  if (text.empty() || text.size() > 4 || text.front() < '0' || text.front() > '9') return false;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

bool parse_arch(std::string_view text, int32_t& arch) {
  return text.starts_with("sm") && parse_number(text.substr(2), arch);
}

}  // namespace

Result<DeviceChoice> parse_device(std::string_view text, std::string_view where, std::string_view source) {
  using Kind = DeviceChoice::Kind;
  DeviceChoice choice;
  if (text.empty()) return choice;
  if (text == "cpu") return DeviceChoice{.kind = Kind::kCpu};
  if (text == kCuda) return DeviceChoice{.kind = Kind::kCuda};
  if (text.starts_with(kCuda) && text.substr(kCuda.size()).starts_with(':') &&
      parse_number(text.substr(kCuda.size() + 1), choice.index)) {
    choice.kind = Kind::kCuda;
    return choice;
  }
  if (text.starts_with(kEmulated) && parse_arch(text.substr(kEmulated.size()), choice.arch)) {
    choice.kind = Kind::kEmulated;
    if (const auto device = cuda::emulated_device(choice.arch); !device.ok())
      return Status(StatusCode::kUnsupported, core::format("{}: {}: {}", where, source, device.status().message()));
    return choice;
  }
  return Status(
      StatusCode::kInvalidArgument,
      core::format("{}: {}: expected cpu, cuda, cuda:<index> or emulated:sm<arch>, got \"{}\"", where, source, text));
}

std::string DeviceChoice::text() const {
  switch (kind) {
    case Kind::kCpu: return "cpu";
    case Kind::kCuda: return core::format("{}:{}", kCuda, index);
    case Kind::kEmulated: return core::format("{}sm{}", kEmulated, arch);
    case Kind::kOfTensors: break;
  }
  return {};
}

Result<DeviceChoice> choose_device(std::string_view asked, std::string_view where) {
  if (!asked.empty()) return parse_device(asked, where, "device");
  const char* const emulate = std::getenv("MLA_EMULATE");
  if (emulate == nullptr || *emulate == '\0') return DeviceChoice{};
  int32_t arch = 0;
  if (!parse_arch(emulate, arch))
    return Status(StatusCode::kInvalidArgument,
                  core::format("{}: MLA_EMULATE: expected sm<arch>, such as sm120, got \"{}\"", where, emulate));
  return parse_device(core::format("{}{}", kEmulated, emulate), where, "MLA_EMULATE");
}

std::string Place::text() const {
  if (emulated) return core::format("{}sm{}", kEmulated, arch);
  return on_gpu() ? core::format("{}:{}", name(device.type), device.index) : std::string(name(device.type));
}

void Place::apply(Problem& problem) const {
  problem.device = device;
  problem.emulated = emulated;
  problem.gpu_arch = arch;
}

Status find_place(Op op, const DeviceChoice& choice, Device tensors, Place& place) {
  using Kind = DeviceChoice::Kind;
  place = {.device = tensors};
  const auto elsewhere = [&](const std::string& expected) {
    return Status(StatusCode::kInvalidArgument,
                  core::format("{}: device: expected tensors on {}, where the context computes, got them on {}:{}",
                               name(op), expected, name(tensors.type), tensors.index));
  };
  if (choice.kind == Kind::kEmulated) {
    place.emulated = true;
    const auto gpu = cuda::emulated_device(choice.arch);
    if (!gpu.ok()) return gpu.status();
    place.gpu = *gpu;
    place.arch = choice.arch;
    return {};
  }
  if (choice.kind == Kind::kCpu && tensors.type != DeviceType::kCpu) return elsewhere("the cpu");
  if (choice.kind == Kind::kCuda && tensors != Device{DeviceType::kCuda, choice.index})
    return elsewhere(core::format("cuda:{}", choice.index));
  if (tensors.type != DeviceType::kCuda) return {};
  if (const auto gpu = cuda::cuda_device(tensors.index); gpu.ok()) {
    place.gpu = *gpu;
    place.arch = place.gpu->info().arch;
  }
  return {};
}

}  // namespace mla::dispatch
