// SPDX-License-Identifier: Apache-2.0
// Tests several host threads, each with a stream of its own, on one context and on several.
#include <atomic>
#include <thread>

#include "cuda/runtime/devices.h"

namespace mla::test {
namespace {

constexpr int kThreads = 3, kRounds = 3;

class Streams : public testing::TestWithParam<std::string> {
 protected:
  /// Does one thread's work: plans and runs a problem of its own over and over, by itself and as a graph.
  static std::string work(const Gpu& gpu, const Context& context, uint64_t seed) {
    kit::DecodeSpec spec;
    spec.seed = seed;
    spec.num_heads = seed % 2 == 0 ? 16 : 24;  // on SM90: of two backends
    spec.kv_len = {90, static_cast<int32_t>(10 * seed)};
    const kit::DecodeCase problem(spec);
    const Result<kit::Expected> expected = kit::expected_of(problem);
    if (!expected.ok()) return expected.status().message();
    const Placed shapes(gpu, problem, 0);
    const Result<size_t> bytes = workspace_size(context, shapes.there(problem.params()));
    if (!bytes.ok()) return bytes.status().message();
    const Placed placed(gpu, problem, *bytes);
    const DecodeParams params = placed.there(problem.params());
    const Stream stream = gpu.create_stream().value();
    for (int round = 0; round < kRounds; ++round) {
      problem.reset_outputs();
      placed.send();
      const bool captured = round % 2 == 1;
      if (captured)
        if (Status status = gpu.begin_capture(stream); !status.ok()) return status.message();
      const Result<Plan> planned = plan(context, params, placed.workspace(), stream);
      if (!planned.ok()) return planned.status().message();
      if (Status status = run(context, *planned, params, stream); !status.ok()) return status.message();
      if (captured) {
        const Graph graph = gpu.end_capture(stream).value();
        if (Status status = gpu.launch(graph, stream); !status.ok()) return status.message();
        if (Status status = gpu.synchronize(stream); !status.ok()) return status.message();
        if (Status status = gpu.destroy(graph); !status.ok()) return status.message();
      }
      if (Status status = gpu.synchronize(stream); !status.ok()) return status.message();
      placed.fetch();
      const kit::Outcome outcome = kit::check_outputs(problem, *expected, planned->backend());
      if (!outcome.ok) return outcome.line();
    }
    return gpu.destroy(stream).message();
  }

  /// Runs the work on all threads; context_of(thread) may be the same for all.
  template <class F>
  static void expect_all_work(const Gpu& gpu, const F& context_of) {
    std::vector<std::string> said(kThreads, "not run");
    std::atomic<int> waiting{kThreads};
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i)
      threads.emplace_back([&, i] {
        for (waiting.fetch_sub(1); waiting.load() > 0;) std::this_thread::yield();
        said[static_cast<size_t>(i)] = work(gpu, context_of(i), static_cast<uint64_t>(i) + 1);
      });
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(said, std::vector<std::string>(kThreads, ""));
  }
};

TEST_P(Streams, OfOneContext) {
  const Gpu gpu = Gpu::open(GetParam()).value();
  const Context context = context_on(GetParam());
  expect_all_work(gpu, [&](int) -> const Context& { return context; });
}

TEST_P(Streams, OfSeveralContexts) {
  const Gpu gpu = Gpu::open(GetParam()).value();
  std::vector<Context> contexts;
  for (int i = 0; i < kThreads; ++i) contexts.push_back(context_on(GetParam(), 1));
  expect_all_work(gpu, [&](int i) -> const Context& { return contexts[static_cast<size_t>(i)]; });
}

INSTANTIATE_TEST_SUITE_P(Devices, Streams, testing::ValuesIn(few_devices()), test_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Streams);

}  // namespace
}  // namespace mla::test
