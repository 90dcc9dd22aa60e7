// SPDX-License-Identifier: Apache-2.0
// Measures how much of the processors' time went to others while the bench ran.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace mla::bench {

/// Holds shares of the time of all processors that the process may use.
struct Load {
  double others = 0;  ///< other processes, and what the kernel does for them
  double steal = 0;   ///< other virtual machines, which the hypervisor ran meanwhile

  /// Returns whether that is enough to make times wrong.
  bool busy() const { return others > 0.05 || steal > 0.01; }
};

/// Holds seconds of processors since the machine started.
struct ProcessorTimes {
  double work = 0, steal = 0, total = 0;
};

/// Returns the sums over these processors of what a /proc/stat says, whose unit is 1/ticks seconds; nothing if a
/// processor is not in it.
std::optional<ProcessorTimes> parse_proc_stat(std::string_view text, const std::vector<int32_t>& processors,
                                              double ticks);

/// Returns the load between two moments in which the process itself worked for `own` seconds; nothing if no time passed
/// that could be told.
std::optional<Load> load_between(const ProcessorTimes& begin, const ProcessorTimes& end, double own);

/// Returns one sentence about a load that is busy.
std::string busy_text(const Load& load);

/// Measures from when it is made, on the processors that the process may use then.
class LoadMeter {
 public:
  LoadMeter();
  /// Returns nothing where the system does not tell.
  std::optional<Load> load() const;

 private:
  std::vector<int32_t> processors_;
  std::optional<ProcessorTimes> begin_;
  double own_begin_ = 0;
};

}  // namespace mla::bench
