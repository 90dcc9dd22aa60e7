// SPDX-License-Identifier: Apache-2.0
#include "mla/devices.h"

namespace mla::cli {

Json devices_json(const MachineInfo& machine) {
  Json devices = Json::array();
  devices.push_back({{"type", "cpu"}, {"index", 0}, {"name", machine.cpu}});
  for (size_t i = 0; i < machine.gpus.size(); ++i) {
    const GpuInfo& gpu = machine.gpus[i];
    devices.push_back({{"type", "cuda"},
                       {"index", i},
                       {"name", gpu.name},
                       {"bus_location", gpu.bus_location},
                       {"uuid", gpu.uuid.empty() ? Json(nullptr) : Json(gpu.uuid)}});
  }
  return devices;
}

std::string gpu_text(const GpuInfo& gpu) { return gpu.name + " at " + gpu.bus_location; }

}  // namespace mla::cli
