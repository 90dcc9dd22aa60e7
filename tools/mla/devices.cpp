// SPDX-License-Identifier: Apache-2.0
#include "mla/devices.h"

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "mla/device.h"
#include "mla/text.h"
#include "mla/values.h"

namespace mla::cli {
namespace {

// 0 is what the driver could not be asked.
Json known(int64_t value) { return value == 0 ? Json(nullptr) : Json(value); }

}  // namespace

Json devices_json(const MachineInfo& machine) {
  Json devices = Json::array();
  devices.push_back({{"type", "cpu"}, {"index", 0}, {"name", machine.cpu}});
  for (size_t i = 0; i < machine.gpus.size(); ++i) {
    const GpuInfo& gpu = machine.gpus[i];
    devices.push_back({{"type", "cuda"},
                       {"index", i},
                       {"name", gpu.name},
                       {"bus_location", gpu.bus_location},
                       {"uuid", gpu.uuid.empty() ? Json(nullptr) : Json(gpu.uuid)},
                       {"device", gpu.index < 0 ? Json(nullptr) : Json(fmt::format("cuda:{}", gpu.index))},
                       {"arch", gpu.arch == 0 ? Json(nullptr) : Json(fmt::format("sm{}", gpu.arch))},
                       {"code", gpu.arch == 0 ? Json(nullptr) : code_json(gpu_code(gpu.arch))},
                       {"num_sms", known(gpu.num_sms)},
                       {"memory_bytes", known(gpu.memory_bytes)},
                       {"shared_bytes_per_block", known(gpu.shared_bytes_per_block)},
                       {"l2_bytes", known(gpu.l2_bytes)}});
  }
  return devices;
}

std::string gpu_text(const GpuInfo& gpu) {
  std::string text = gpu.name + " at " + gpu.bus_location;
  if (gpu.index >= 0) text += fmt::format(", cuda:{}", gpu.index);
  if (gpu.arch != 0) text += fmt::format(", sm{}", gpu.arch);
  if (gpu.num_sms != 0) text += fmt::format(", {} SMs", gpu.num_sms);
  if (gpu.memory_bytes != 0) text += ", " + human_bytes(static_cast<double>(gpu.memory_bytes));
  if (gpu.shared_bytes_per_block != 0)
    text += fmt::format(", {} of shared memory per block", human_bytes(gpu.shared_bytes_per_block));
  if (gpu.l2_bytes != 0) text += fmt::format(", {} L2", human_bytes(static_cast<double>(gpu.l2_bytes)));
  return text;
}

Json code_json(const GpuCode& code) {
  if (code.arch == 0) return nullptr;
  return {{"arch", fmt::format("sm{}", code.arch)},
          {"family", code.family},
          {"by_driver", code.by_driver},
          {"built", code.built}};
}

std::string parse_nvidia_version(std::string_view text) {
  // "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build ..."
  std::istringstream words{std::string(text)};
  for (std::string word; words >> word;)
    if (word.find('.') != std::string::npos && word.find_first_not_of("0123456789.") == std::string::npos) return word;
  return {};
}

std::string nvidia_driver() {
  std::ifstream file("/proc/driver/nvidia/version");
  std::string line;
  std::getline(file, line);
  return parse_nvidia_version(line);
}

std::string device_of(std::string_view option, const std::string& text, bool any_gpu) {
  if (!text.empty()) return parse_device(option, text, any_gpu);
  const char* emulate = std::getenv("MLA_EMULATE");
  if (emulate == nullptr || *emulate == '\0') return "cpu";
  return parse_device("MLA_EMULATE", fmt::format("emulated:{}", emulate));
}

std::string usable_device(std::string_view option, const std::string& text) {
  std::string device = device_of(option, text);
  if (device == "cpu") return device;
  if (const Result<Gpu> gpu = Gpu::open(device); !gpu.ok())
    throw UsageError("{}: {}", text.empty() ? "MLA_EMULATE" : fmt::format("{} {}", option, text),
                     gpu.status().message());
  return device;
}

}  // namespace mla::cli
