// SPDX-License-Identifier: Apache-2.0
#include "mla/bench/load.h"

#include <gmock/gmock.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

namespace mla::bench {
namespace {

constexpr const char* kStat =
    "cpu  1 1 1 1 1 1 1 1 1 1\n"
    "cpu0 100 20 30 1000 50 1 2 7 90 0\n"
    "cpu1 200 0 0 900 0 0 0 100 0 0\n"
    "cpu10 999 999 999 999 999 999 999 999 0 0\n"
    "intr 5 4 3\n";

TEST(ProcStat, SumsTheListedProcessors) {
  const auto one = parse_proc_stat(kStat, {0}, 100.0);
  ASSERT_TRUE(one);
  EXPECT_DOUBLE_EQ(one->work, 1.53);
  EXPECT_DOUBLE_EQ(one->steal, 0.07);
  EXPECT_DOUBLE_EQ(one->total, 12.10);
  const auto two = parse_proc_stat(kStat, {0, 1}, 100.0);
  ASSERT_TRUE(two);
  EXPECT_DOUBLE_EQ(two->work, 3.53);
  EXPECT_DOUBLE_EQ(two->total, 24.10);
  EXPECT_FALSE(parse_proc_stat(kStat, {0, 2}, 100.0));
  EXPECT_FALSE(parse_proc_stat(kStat, {}, 100.0));
  EXPECT_FALSE(parse_proc_stat("cpu0 1 2 3\n", {0}, 100.0));
  EXPECT_FALSE(parse_proc_stat("", {0}, 100.0));
}

TEST(LoadBetween, IsWhatIsNotTheProcess) {
  const ProcessorTimes begin{.work = 10, .steal = 1, .total = 100}, end{.work = 16, .steal = 1.5, .total = 110};
  const auto load = load_between(begin, end, 4.0);
  ASSERT_TRUE(load);
  EXPECT_DOUBLE_EQ(load->others, 0.2);
  EXPECT_DOUBLE_EQ(load->steal, 0.05);
  EXPECT_TRUE(load->busy());
  EXPECT_EQ(busy_text(*load),
            "this machine was busy: other processes took 20.0 % of its processors' time, and other "
            "virtual machines 5.0 %; times are too long");
  EXPECT_DOUBLE_EQ(load_between(begin, end, 6.1)->others, 0.0) << "clocks differ by a tick";
  EXPECT_FALSE(load_between(begin, begin, 0.0));
  EXPECT_FALSE(Load{}.busy());
  EXPECT_TRUE(Load{.others = 0.06}.busy());
  EXPECT_TRUE((Load{.others = 0.0, .steal = 0.02}.busy()));
}

// Keeps a processor busy in another process for as long as it lives.
class OtherWork {
 public:
  OtherWork() : process_(fork()) {
    if (process_ != 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (volatile unsigned count = 0;;) count = count + 1;
  }
  ~OtherWork() {
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
  }
  OtherWork(const OtherWork&) = delete;
  OtherWork& operator=(const OtherWork&) = delete;

 private:
  pid_t process_;
};

TEST(LoadMeter, SeesAnotherProcess) {
  const OtherWork other;
  const LoadMeter meter;
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  const auto load = meter.load();
  ASSERT_TRUE(load);
  cpu_set_t set;
  ASSERT_EQ(sched_getaffinity(0, sizeof set, &set), 0);
  // The other one has a processor at most, and a part of one where more want it.
  EXPECT_GT(load->others + load->steal, 0.2 / CPU_COUNT(&set));
}

}  // namespace
}  // namespace mla::bench
