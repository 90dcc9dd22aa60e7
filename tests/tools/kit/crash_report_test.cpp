// SPDX-License-Identifier: Apache-2.0
// A program that crashes says in which test, and at which problem or trace.
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <thread>

#include "ops/fenced_memory.h"
#include "trace.h"

namespace mla {
namespace {

void touch_fence() {
  const FencedMemory memory(1);
  memory.data()[1] = std::byte{1};
}

TEST(CrashReportDeathTest, NamesTheTestAndTheProblem) {
  EXPECT_DEATH(
      {
        kit::AppendSpec spec;
        spec.cache = kit::usual_cache(CacheFormat::kFP8DsMla);
        spec.seed = 77;
        const kit::AppendCase problem(spec);
        touch_fence();
      },
      "Crashed in CrashReportDeathTest.NamesTheTestAndTheProblem while at append .seed=77 .*fp8_ds_mla");
}

TEST(CrashReportDeathTest, NamesTheTraceOfAnotherThread) {
  EXPECT_DEATH(
      {
        MLA_TRACE(testing::Message() << "seed " << 78);
        std::thread(touch_fence).join();
      },
      "Crashed in CrashReportDeathTest.NamesTheTraceOfAnotherThread while at seed 78");
}

TEST(CrashReportDeathTest, NamesTheTestThatAborts) {
  EXPECT_DEATH(std::abort(), "Crashed in CrashReportDeathTest.NamesTheTestThatAborts\n");
  EXPECT_DEATH(std::raise(SIGSEGV), "Crashed in CrashReportDeathTest.NamesTheTestThatAborts\n");
}

}  // namespace
}  // namespace mla
