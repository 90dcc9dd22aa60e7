// SPDX-License-Identifier: Apache-2.0
#include "mla/processors.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "mla/backend.h"
#include "mla/text.h"
#include "mla/values.h"

namespace mla::cli {

std::vector<int32_t> parse_processors(std::string_view option, std::string_view text) {
  constexpr int32_t kMost = CPU_SETSIZE - 1;
  std::vector<int32_t> processors;
  for (const std::string& item : split_list(option, text)) {
    const size_t dash = item.find('-', 1);
    const int64_t first = parse_int(option, std::string_view(item).substr(0, dash), 0, kMost);
    const int64_t last =
        dash == std::string::npos ? first : parse_int(option, std::string_view(item).substr(dash + 1), first, kMost);
    for (int64_t i = first; i <= last; ++i) {
      const auto processor = static_cast<int32_t>(i);
      if (std::ranges::find(processors, processor) != processors.end())
        throw UsageError("{}: expected every processor once, got {} again in '{}'", option, processor, text);
      processors.push_back(processor);
    }
  }
  return processors;
}

std::vector<int32_t> use_processors(std::string_view option, std::string_view text) {
  if (text.empty()) return {};
  std::vector<int32_t> processors = parse_processors(option, text);
  const std::vector<int32_t> usable = usable_processors();
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int32_t processor : processors) {
    if (std::ranges::find(usable, processor) == usable.end())
      throw UsageError("{}: expected processors that this process may use, got {}", option, processor);
    CPU_SET(static_cast<size_t>(processor), &set);
  }
  if (sched_setaffinity(0, sizeof set, &set) != 0)
    throw UsageError("{}: cannot run on '{}': {}", option, text, std::strerror(errno));
  return processors;
}

std::vector<int32_t> affinity_of(std::string_view option, const std::vector<int32_t>& processors, int32_t threads) {
  if (processors.empty()) return {};
  if (static_cast<size_t>(threads) > processors.size())
    throw UsageError("{}: expected {} processors, one for each thread, got {}", option, threads, processors.size());
  return {processors.begin(), processors.begin() + threads};
}

}  // namespace mla::cli
