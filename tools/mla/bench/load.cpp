// SPDX-License-Identifier: Apache-2.0
#include "mla/bench/load.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <fstream>
#include <sstream>

#include "mla/backend.h"
#include "mla/text.h"

namespace mla::bench {
namespace {

// Clocks of the system tick a hundred times a second: less than this says little.
constexpr double kLeastSeconds = 0.1;

std::optional<ProcessorTimes> read_times(const std::vector<int32_t>& processors) {
  std::ifstream file("/proc/stat");
  std::stringstream text;
  text << file.rdbuf();
  return parse_proc_stat(text.str(), processors, static_cast<double>(sysconf(_SC_CLK_TCK)));
}

// Of all threads of the process.
double own_seconds() {
  timespec time = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace

std::optional<ProcessorTimes> parse_proc_stat(std::string_view text, const std::vector<int32_t>& processors,
                                              double ticks) {
  ProcessorTimes sum;
  size_t found = 0;
  std::istringstream lines{std::string(text)};
  for (std::string line; std::getline(lines, line);) {
    // "cpu3 user nice system idle iowait irq softirq steal guest guest_nice": guests' time is among that of users.
    std::istringstream words(line);
    std::string name;
    words >> name;
    const bool listed = std::any_of(processors.begin(), processors.end(),
                                    [&](int32_t processor) { return name == "cpu" + std::to_string(processor); });
    if (!listed) continue;
    std::array<double, 8> times = {};
    for (double& time : times) words >> time;
    if (!words) return std::nullopt;
    const auto [user, nice, system, idle, iowait, irq, softirq, steal] = times;
    const double work = user + nice + system + irq + softirq;
    sum.work += work / ticks;
    sum.steal += steal / ticks;
    sum.total += (work + idle + iowait + steal) / ticks;
    ++found;
  }
  return found == processors.size() && found > 0 ? std::optional(sum) : std::nullopt;
}

std::optional<Load> load_between(const ProcessorTimes& begin, const ProcessorTimes& end, double own) {
  const double total = end.total - begin.total;
  if (total < kLeastSeconds) return std::nullopt;
  const auto share = [&](double seconds) { return std::clamp(seconds / total, 0.0, 1.0); };
  return Load{.others = share(end.work - begin.work - own), .steal = share(end.steal - begin.steal)};
}

std::string busy_text(const Load& load) {
  const std::string steal =
      load.steal > 0.001 ? fmt::format(", and other virtual machines {}", cli::human_percent(load.steal)) : "";
  return fmt::format("this machine was busy: other processes took {} of its processors' time{}; times are too long",
                     cli::human_percent(load.others), steal);
}

LoadMeter::LoadMeter() : processors_(usable_processors()), begin_(read_times(processors_)), own_begin_(own_seconds()) {}

std::optional<Load> LoadMeter::load() const {
  const double own = own_seconds() - own_begin_;
  const std::optional<ProcessorTimes> end = read_times(processors_);
  return begin_ && end ? load_between(*begin_, *end, own) : std::nullopt;
}

}  // namespace mla::bench
