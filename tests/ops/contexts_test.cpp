// SPDX-License-Identifier: Apache-2.0
// Tests several contexts at once, and one context from several threads.
#include <gtest/gtest.h>

#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "backend_test.h"

namespace mla {
namespace {

/// Collects lines of failures from any thread; gtest's own expectations stay on the main one.
class Failures {
 public:
  void add(const std::string& line) {
    const std::lock_guard lock(mutex_);
    lines_.push_back(line);
  }
  const std::vector<std::string>& lines() const { return lines_; }

 private:
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

/// Checks a few random problems of every operation.
void check_everything(const Context& context, uint64_t first_seed, Failures& failures) {
  const auto check = [&](const auto& spec) {
    const kit::Outcome outcome = kit::check(context, spec);
    if (!outcome.ok) failures.add(outcome.line());
  };
  for (uint64_t seed = first_seed; seed < first_seed + 4; ++seed) {
    check(kit::random_decode_spec(seed, CacheFormat::kBF16));
    check(kit::random_prefill_spec(seed, DType::kBF16));
    check(kit::random_merge_spec(seed, DType::kF32));
    check(kit::random_append_spec(seed, CacheFormat::kF16));
    check(kit::random_gather_spec(seed, CacheFormat::kBF16));
  }
}

template <class F>
void on_threads(int count, const F& f) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back([&f, i] { f(i); });
  for (std::thread& thread : threads) thread.join();
}

class ContextsTest : public BackendTest<Op::kDecode> {};
MLA_FOR_EVERY_ROW(ContextsTest, Op::kDecode);

TEST_P(ContextsTest, OneContextPerThread) {
  Failures failures;
  on_threads(4, [&](int thread) {
    Result<Context> made = Context::create({.num_threads = 1 + thread, .affinity = {}, .backend = GetParam()});
    if (!made.ok())
      failures.add(made.status().message());
    else
      check_everything(*made, 100 + 10 * static_cast<uint64_t>(thread), failures);
  });
  EXPECT_EQ(failures.lines(), std::vector<std::string>{});
}

TEST_P(ContextsTest, OneContextForAllThreads) {
  Failures failures;
  const Context shared = make_context(3);
  on_threads(4, [&](int thread) { check_everything(shared, 200 + 10 * static_cast<uint64_t>(thread), failures); });
  EXPECT_EQ(failures.lines(), std::vector<std::string>{});
}

TEST_P(ContextsTest, ContextsComeAndGo) {
  Failures failures;
  on_threads(3, [&](int thread) {
    for (int32_t round = 0; round < 20; ++round) {
      Result<Context> made = Context::create({.num_threads = 1 + round % 4, .affinity = {}, .backend = GetParam()});
      if (!made.ok()) {
        failures.add(made.status().message());
        return;
      }
      if (round % 3 == 0) continue;  // gone without a call
      kit::DecodeSpec spec;
      spec.kv_len = {10 + round, 64 * thread};
      spec.num_heads = 2;
      const kit::Outcome outcome = kit::check(*made, spec);
      if (!outcome.ok) failures.add(outcome.line());
    }
  });
  EXPECT_EQ(failures.lines(), std::vector<std::string>{});
}

TEST_P(ContextsTest, MovedContextsKeepTheirThreads) {
  Context first = make_context(3);
  const Context second = std::move(first);
  EXPECT_EQ(second.num_threads(), 3);
  Failures failures;
  check_everything(second, 300, failures);
  EXPECT_EQ(failures.lines(), std::vector<std::string>{});
}

}  // namespace
}  // namespace mla
