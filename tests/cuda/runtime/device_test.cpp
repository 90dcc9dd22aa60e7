// SPDX-License-Identifier: Apache-2.0
// Tests mla/device.h: memory, streams, events, captures, and what is refused, on emulated GPUs and on a real one; and
// what is said where there is none.
#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "cuda/runtime/device_runtime.h"
#include "mla/mla.h"
#include "trace.h"

namespace mla {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

std::vector<std::string> devices() {
  std::vector<std::string> all;
  if (!machine_info().emulated_archs.empty())
    all.push_back("emulated:sm" + std::to_string(machine_info().emulated_archs.back()));
  if (Gpu::open("cuda").ok()) all.emplace_back("cuda:0");
  return all;
}

TEST(OpenGpu, RefusesWhatIsNoGpu) {
  for (const char* wrong : {"", "cpu"})
    EXPECT_THAT(Gpu::open(wrong).status().message(), StartsWith("gpu: device: expected cuda, cuda:<index> or "))
        << wrong;
  EXPECT_EQ(Gpu::open("sm90").status().message(),
            "gpu: device: expected cpu, cuda, cuda:<index> or emulated:sm<arch>, got \"sm90\"");
  EXPECT_EQ(Gpu::open("emulated:sm70").status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(Gpu::open("cuda:77").status().code(), StatusCode::kUnsupported);
}

TEST(OpenGpu, SaysWhyThereIsNone) {
  const MachineInfo& machine = machine_info();
  const auto usable =
      std::count_if(machine.gpus.begin(), machine.gpus.end(), [](const GpuInfo& g) { return g.index >= 0; });
  EXPECT_EQ(machine.cuda.empty(), usable > 0);
  EXPECT_EQ(machine.cuda_runtime == 0, machine.gpu_archs.empty());
  if (usable > 0) GTEST_SKIP() << "there is one";
  EXPECT_EQ(Gpu::open("cuda").status().message(), "gpu: " + machine.cuda);
  EXPECT_EQ(Context::create({.device = "cuda"}).status().message(), "context: device: " + machine.cuda);
  if (!machine.gpu_archs.empty() && machine.cuda_driver == 0) {
    EXPECT_EQ(machine.cuda, "no NVIDIA driver is installed");
  }
  // What would run on a GPU that is not there is told all the same; what runs here is as without GPU code.
  EXPECT_THAT(explain({.device = {DeviceType::kCuda, 0}}).error, HasSubstr("cuda_portable: " + machine.cuda));
  EXPECT_TRUE(Context::create().ok());
}

TEST(CheckLaunch, RefusesWhatNoGpuLaunches) {
  const cuda::DeviceProperties device{.arch = 89, .num_sms = 2, .shared_bytes_per_block = 1000};
  const cuda::KernelEntry kernel{.name = "k", .function = nullptr, .threads = 128, .params_bytes = 8};
  EXPECT_TRUE(check_launch(kernel, {.shared_bytes = 1000}, device).ok());
  EXPECT_EQ(check_launch(kernel, {.shared_bytes = 1001}, device).message(),
            "kernel k: bytes of shared memory: expected at most 1000 on sm89, got 1001");
  EXPECT_THAT(check_launch(kernel, {.grid_y = 65536}, device).message(), HasSubstr("expected at most 65535"));
  EXPECT_THAT(check_launch(kernel, {.grid_z = 65536}, device).message(), HasSubstr("expected at most 65535"));
  EXPECT_THAT(
      check_launch({.name = "k", .function = nullptr, .threads = 1025, .params_bytes = 8}, {}, device).message(),
      HasSubstr("threads of a block: expected at most 1024"));
  EXPECT_THAT(
      check_launch({.name = "k", .function = nullptr, .threads = 32, .params_bytes = 4097}, {}, device).message(),
      HasSubstr("bytes of parameters: expected at most 4096"));
}

class GpuTest : public testing::TestWithParam<std::string> {
 protected:
  GpuTest() : gpu_(Gpu::open(GetParam()).value()) {}
  static void ok(const Status& status) { ASSERT_EQ(status.message(), ""); }

  const Gpu gpu_;
};

TEST_P(GpuTest, TellsOfItself) {
  EXPECT_EQ(gpu_.name(), GetParam());
  EXPECT_EQ(gpu_.emulated(), GetParam().starts_with("emulated"));
  EXPECT_EQ(gpu_.device().type, DeviceType::kCuda);
  EXPECT_FALSE(gpu_.info().name.empty());
  EXPECT_GE(gpu_.info().arch, 50);
  EXPECT_GT(gpu_.info().num_sms, 0);
  EXPECT_GE(gpu_.info().shared_bytes_per_block, 48 * 1024);
  EXPECT_GT(gpu_.info().memory_bytes, 0);
  EXPECT_GT(gpu_.info().l2_bytes, 0);
}

TEST_P(GpuTest, CopiesAndFills) {
  const std::array<uint32_t, 4> from = {1, 2, 3, 4};
  std::array<uint32_t, 4> to = {};
  void* const memory = gpu_.allocate(2 * sizeof from).value();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % 256, 0U);
  void* const second = static_cast<std::byte*>(memory) + sizeof from;
  ok(gpu_.copy(memory, from.data(), sizeof from));
  ok(gpu_.copy(second, memory, sizeof from, {}));
  ok(gpu_.copy(to.data(), second, sizeof from));
  EXPECT_EQ(to, from);
  ok(gpu_.fill(memory, 0xFF, 4, {}));
  ok(gpu_.copy(to.data(), memory, sizeof from));
  EXPECT_EQ(to, (std::array<uint32_t, 4>{0xFFFFFFFF, 2, 3, 4}));
  ok(gpu_.copy(nullptr, nullptr, 0));
  ok(gpu_.free(memory));
  EXPECT_EQ(gpu_.allocate(0).value(), nullptr);
  ok(gpu_.free(nullptr));
  EXPECT_FALSE(gpu_.allocate(size_t{1} << 60).ok());
}

TEST_P(GpuTest, TimesBetweenEvents) {
  const Stream stream = gpu_.create_stream().value();
  const Event first = gpu_.create_event().value(), last = gpu_.create_event().value();
  ok(gpu_.record(first, stream));
  ok(gpu_.wait(first, {}));
  ok(gpu_.record(last, stream));
  ok(gpu_.synchronize(last));
  EXPECT_GE(gpu_.elapsed_ms(first, last).value(), 0.0F);
  const Event never = gpu_.create_event().value();
  EXPECT_FALSE(gpu_.elapsed_ms(first, never).ok());
  for (const Event event : {first, last, never}) ok(gpu_.destroy(event));
  ok(gpu_.destroy(stream));
}

TEST_P(GpuTest, CeilingsReadCopyAndMultiply) {
  std::vector<uint32_t> values(4096);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint32_t>(i);
  const size_t bytes = values.size() * sizeof(uint32_t);
  auto* const memory = static_cast<std::byte*>(gpu_.allocate(2 * bytes + 4).value());
  std::byte* const sink = memory + 2 * bytes;
  ok(gpu_.copy(memory, values.data(), bytes));
  ok(gpu_.fill(sink, 0x5A, 4, {}));
  ok(gpu_.enqueue_read(memory, bytes, sink, {}));
  ok(gpu_.enqueue_copy(memory + bytes, memory, bytes, {}));
  const Result<double> flops = gpu_.enqueue_multiply(Gpu::Multiply::kMmaSync, 2, sink, {});
  ok(flops.status());
  EXPECT_GT(*flops, 0.0);
  const Result<double> e4m3 = gpu_.enqueue_multiply(Gpu::Multiply::kMmaSyncE4M3, 2, sink, {});
  EXPECT_EQ(e4m3.ok(), gpu_.info().arch >= 89) << e4m3.status().message();
  if (e4m3.ok()) {
    EXPECT_EQ(*e4m3, 2 * *flops);
  } else {
    EXPECT_EQ(e4m3.status().message(), gpu_.name() + " has no mma.sync on e4m3");
  }
  ok(gpu_.synchronize(Stream{}));
  std::vector<uint32_t> copied(values.size());
  uint32_t sunk = 0;
  ok(gpu_.copy(copied.data(), memory + bytes, bytes));
  ok(gpu_.copy(&sunk, sink, 4));
  EXPECT_EQ(copied, values);
  EXPECT_EQ(sunk, 0x5A5A5A5AU);
  ok(gpu_.free(memory));
}

// Captures. Everything a real one refuses, the emulated one refuses too: the same test runs on both. The emulated one
// also refuses what a GPU would in the capture of a stream that the default stream waits for.

class CaptureTest : public GpuTest {
 protected:
  CaptureTest() : memory_(static_cast<std::byte*>(gpu_.allocate(64).value())), stream_(gpu_.create_stream().value()) {
    EXPECT_TRUE(gpu_.fill(memory_, 0, 64, stream_).ok());
    EXPECT_TRUE(gpu_.synchronize(stream_).ok());
  }
  ~CaptureTest() override {
    EXPECT_EQ(gpu_.destroy(stream_).message(), "");
    EXPECT_EQ(gpu_.free(memory_).message(), "");
  }
  uint8_t byte(size_t at) const {
    uint8_t value = 0;
    EXPECT_EQ(gpu_.copy(&value, memory_ + at, 1).message(), "");
    return value;
  }
  /// Expects that f fails while a capture is on, and ends it.
  template <class F>
  void expect_forbidden(const char* what, const F& f) {
    MLA_TRACE(what);
    ok(gpu_.begin_capture(stream_));
    EXPECT_FALSE(f().ok());
    EXPECT_FALSE(gpu_.end_capture(stream_).ok());
    ok(gpu_.synchronize(stream_));  // all is well again
  }

  std::byte* memory_;
  Stream stream_;
};

TEST_P(CaptureTest, RecordsAndReplays) {
  ok(gpu_.begin_capture(stream_));
  ok(gpu_.fill(memory_, 7, 4, stream_));
  ok(gpu_.copy(memory_ + 8, memory_, 4, stream_));
  const Graph graph = gpu_.end_capture(stream_).value();
  EXPECT_EQ(byte(8), 0);
  ok(gpu_.launch(graph, stream_));
  ok(gpu_.synchronize(stream_));
  EXPECT_EQ(byte(8), 7);
  ok(gpu_.fill(memory_, 0, 64, stream_));
  ok(gpu_.launch(graph, stream_));
  ok(gpu_.synchronize(stream_));
  EXPECT_EQ(byte(8), 7);
  ok(gpu_.destroy(graph));
}

TEST_P(CaptureTest, FollowsEventsIntoOtherStreams) {
  const Stream other = gpu_.create_stream().value();
  const Event fork = gpu_.create_event().value(), join = gpu_.create_event().value();
  ok(gpu_.begin_capture(stream_));
  ok(gpu_.fill(memory_, 1, 1, stream_));
  ok(gpu_.record(fork, stream_));
  ok(gpu_.wait(fork, other));
  ok(gpu_.copy(memory_ + 1, memory_, 1, other));
  ok(gpu_.record(join, other));
  ok(gpu_.wait(join, stream_));
  ok(gpu_.copy(memory_ + 2, memory_ + 1, 1, stream_));
  const Graph graph = gpu_.end_capture(stream_).value();
  ok(gpu_.launch(graph, stream_));
  ok(gpu_.synchronize(stream_));
  EXPECT_EQ(byte(2), 1);
  ok(gpu_.destroy(graph));

  ok(gpu_.begin_capture(stream_));  // and is refused if one is not joined
  ok(gpu_.record(fork, stream_));
  ok(gpu_.wait(fork, other));
  ok(gpu_.fill(memory_, 2, 1, other));
  EXPECT_FALSE(gpu_.end_capture(stream_).ok());
  for (const Event event : {fork, join}) ok(gpu_.destroy(event));
  ok(gpu_.destroy(other));
}

TEST_P(CaptureTest, ForbidsWhatWaits) {
  expect_forbidden("synchronize its stream", [&] { return gpu_.synchronize(stream_); });
  const Event event = gpu_.create_event().value();
  expect_forbidden("synchronize its event", [&] {
    EXPECT_TRUE(gpu_.record(event, stream_).ok());
    return gpu_.synchronize(event);
  });
  expect_forbidden("allocate", [&] { return gpu_.allocate(16).status(); });
  if (gpu_.emulated())
    expect_forbidden("copy and wait", [&] {
      uint8_t value = 0;
      return gpu_.copy(&value, memory_, 1);
    });
  ok(gpu_.destroy(event));
}

TEST_P(CaptureTest, IsNotForTheDefaultStreamNorTwice) {
  EXPECT_FALSE(gpu_.begin_capture({}).ok());
  EXPECT_FALSE(gpu_.end_capture(stream_).ok());
  ok(gpu_.begin_capture(stream_));
  EXPECT_FALSE(gpu_.begin_capture(stream_).ok());
  const Result<Graph> graph = gpu_.end_capture(stream_);
  if (graph.ok()) ok(gpu_.destroy(*graph));
}

TEST_P(CaptureTest, EndsWithItsStreamAndItsEventsWithIt) {
  if (!gpu_.emulated()) GTEST_SKIP() << "the CUDA runtime does not say what happens";
  const Stream brief = gpu_.create_stream().value();
  const Event event = gpu_.create_event().value();
  ok(gpu_.begin_capture(brief));
  ok(gpu_.record(event, brief));
  ok(gpu_.destroy(brief));
  EXPECT_FALSE(gpu_.wait(event, stream_).ok());
  EXPECT_FALSE(gpu_.end_capture(brief).ok());
  ok(gpu_.synchronize(stream_));  // the thread captures no longer
  ok(gpu_.destroy(event));
}

TEST_P(CaptureTest, OfOneThreadDoesNotDisturbAnother) {
  ok(gpu_.begin_capture(stream_));
  std::string said = "not run";
  std::thread([&] {
    const Result<void*> memory = gpu_.allocate(16);
    said = memory.status().message();
    if (memory.ok()) said = gpu_.free(*memory).message();
  }).join();
  EXPECT_EQ(said, "");
  ok(gpu_.fill(memory_, 3, 1, stream_));
  const Graph graph = gpu_.end_capture(stream_).value();
  ok(gpu_.destroy(graph));
}

TEST_P(CaptureTest, ForeignHandlesAreErrors) {
  if (!gpu_.emulated()) GTEST_SKIP() << "the CUDA runtime crashes on them";
  int other = 0;
  EXPECT_FALSE(gpu_.synchronize(Stream{&other}).ok());
  EXPECT_FALSE(gpu_.fill(memory_, 0, 1, Stream{&other}).ok());
  EXPECT_FALSE(gpu_.record(Event{&other}, stream_).ok());
  EXPECT_FALSE(gpu_.launch(Graph{&other}, stream_).ok());
  EXPECT_FALSE(gpu_.destroy(Stream{&other}).ok());
  EXPECT_FALSE(gpu_.destroy(Event{&other}).ok());
  EXPECT_FALSE(gpu_.destroy(Graph{&other}).ok());
}

std::string test_name(const testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), ':', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Devices, GpuTest, testing::ValuesIn(devices()), test_name);
INSTANTIATE_TEST_SUITE_P(Devices, CaptureTest, testing::ValuesIn(devices()), test_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(GpuTest);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CaptureTest);

}  // namespace
}  // namespace mla
