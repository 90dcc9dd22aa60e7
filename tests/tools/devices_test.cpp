// SPDX-License-Identifier: Apache-2.0
#include "mla/devices.h"

#include <gtest/gtest.h>

namespace mla::cli {
namespace {

const MachineInfo kMachine{.cpu = "Some CPU",
                           .threads = 2,
                           .isa = {},
                           .gpus = {{.name = "NVIDIA H200", .bus_location = "0000:19:00.0", .uuid = "GPU-12"},
                                    {.name = "NVIDIA L4", .bus_location = "0000:3b:00.0", .uuid = ""}}};

TEST(Devices, JsonHasTheCpuThenEveryGpu) {
  EXPECT_EQ(devices_json(kMachine), Json::parse(R"([
    {"type": "cpu", "index": 0, "name": "Some CPU"},
    {"type": "cuda", "index": 0, "name": "NVIDIA H200", "bus_location": "0000:19:00.0", "uuid": "GPU-12"},
    {"type": "cuda", "index": 1, "name": "NVIDIA L4", "bus_location": "0000:3b:00.0", "uuid": null}])"));
}

TEST(Devices, TextSaysWhere) { EXPECT_EQ(gpu_text(kMachine.gpus[0]), "NVIDIA H200 at 0000:19:00.0"); }

}  // namespace
}  // namespace mla::cli
