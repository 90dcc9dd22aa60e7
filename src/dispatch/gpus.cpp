// SPDX-License-Identifier: Apache-2.0
#include "dispatch/gpus.h"

#include <algorithm>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

namespace mla::dispatch {
namespace {

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r";
  const size_t first = text.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlank) - first + 1);
}

/// One GPU's file: lines of "Key: value". The name stays empty if the GPU cannot be used.
GpuInfo read_information(const std::filesystem::path& path) {
  GpuInfo gpu;
  bool excluded = false;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const std::string_view key = trimmed(std::string_view(line).substr(0, colon));
    const std::string_view value = trimmed(std::string_view(line).substr(colon + 1));
    if (key == "Model") gpu.name = value;
    if (key == "Bus Location") gpu.bus_location = value;
    // Until somebody has used the GPU, its UUID is all question marks.
    if (key == "GPU UUID" && value.find('?') == std::string_view::npos) gpu.uuid = value;
    if (key == "GPU Excluded") excluded = value == "Yes";
  }
  if (excluded) gpu.name.clear();
  return gpu;
}

}  // namespace

std::vector<GpuInfo> nvidia_gpus(const std::filesystem::path& folder) {
  std::vector<GpuInfo> gpus;
  std::error_code error;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    GpuInfo gpu = read_information(it->path() / "information");
    if (gpu.name.empty()) continue;
    if (gpu.bus_location.empty()) gpu.bus_location = it->path().filename().string();
    gpus.push_back(std::move(gpu));
  }
  std::sort(gpus.begin(), gpus.end(),
            [](const GpuInfo& a, const GpuInfo& b) { return a.bus_location < b.bus_location; });
  return gpus;
}

}  // namespace mla::dispatch
