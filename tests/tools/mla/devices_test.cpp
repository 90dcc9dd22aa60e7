// SPDX-License-Identifier: Apache-2.0
#include "mla/devices.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "tools/mla/expect_usage_error.h"

namespace mla::cli {
namespace {

const MachineInfo kMachine{.cpu = "Some CPU",
                           .threads = 2,
                           .isa = {},
                           .gpus = {{.name = "NVIDIA H200",
                                     .bus_location = "0000:19:00.0",
                                     .uuid = "GPU-12",
                                     .index = 0,
                                     .arch = 90,
                                     .num_sms = 132,
                                     .memory_bytes = int64_t{140} << 30,
                                     .shared_bytes_per_block = 227 * 1024,
                                     .l2_bytes = int64_t{50} << 20},
                                    {.name = "NVIDIA L4", .bus_location = "0000:3b:00.0", .uuid = ""}}};

TEST(Devices, ReadsTheVersionOfTheDriver) {
  EXPECT_EQ(parse_nvidia_version("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build"),
            "580.65.06");
  EXPECT_EQ(parse_nvidia_version("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC"),
            "535.104.05");
  EXPECT_EQ(parse_nvidia_version("NVRM version: none"), "");
  EXPECT_EQ(parse_nvidia_version(""), "");
}

TEST(Devices, JsonHasTheCpuThenEveryGpu) {
  Json expected = Json::parse(R"([
    {"type": "cpu", "index": 0, "name": "Some CPU"},
    {"type": "cuda", "index": 0, "name": "NVIDIA H200", "bus_location": "0000:19:00.0", "uuid": "GPU-12",
     "device": "cuda:0", "arch": "sm90", "code": null, "num_sms": 132, "memory_bytes": 150323855360,
     "shared_bytes_per_block": 232448, "l2_bytes": 52428800},
    {"type": "cuda", "index": 1, "name": "NVIDIA L4", "bus_location": "0000:3b:00.0", "uuid": null,
     "device": null, "arch": null, "code": null, "num_sms": null, "memory_bytes": null, "shared_bytes_per_block": null,
     "l2_bytes": null}])");
  expected[1]["code"] = code_json(gpu_code(90));  // follows the build
  EXPECT_EQ(devices_json(kMachine), expected);
}

TEST(Devices, TextSaysWhatIsKnown) {
  EXPECT_EQ(gpu_text(kMachine.gpus[0]),
            "NVIDIA H200 at 0000:19:00.0, cuda:0, sm90, 132 SMs, 140.0 GiB, 227.0 KiB of shared memory per block, "
            "50.0 MiB L2");
  EXPECT_EQ(gpu_text(kMachine.gpus[1]), "NVIDIA L4 at 0000:3b:00.0");
}

TEST(Devices, TheOptionWinsOverTheEnvironment) {
  unsetenv("MLA_EMULATE");
  EXPECT_EQ(device_of("--device", ""), "cpu");
  EXPECT_EQ(device_of("--device", "sm120", true), "sm120");
  setenv("MLA_EMULATE", "sm89", 1);
  EXPECT_EQ(device_of("--device", ""), "emulated:sm89");
  EXPECT_EQ(device_of("--device", "cpu"), "cpu");
  setenv("MLA_EMULATE", "a100", 1);
  expect_usage_error([] { device_of("--device", ""); }, {"MLA_EMULATE", "a100"});
  unsetenv("MLA_EMULATE");
}

}  // namespace
}  // namespace mla::cli
