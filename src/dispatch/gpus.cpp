// SPDX-License-Identifier: Apache-2.0
#include "dispatch/gpus.h"

#include <algorithm>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "cuda/runtime/device_runtime.h"

namespace mla::dispatch {
namespace {

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r";
  const size_t first = text.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlank) - first + 1);
}

/// Reads one GPU's file, which has lines of "Key: value". The name stays empty if the GPU cannot be used.
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

namespace {

/// Returns "0000:3b:00.0" for "00000000:3B:00.0", since domains come with four or eight digits, and letters in either
/// case.
std::string short_location(std::string_view location) {
  constexpr size_t kShort = 12;
  if (location.size() > kShort) location.remove_prefix(location.size() - kShort);
  std::string text(location);
  for (char& c : text) c = c >= 'A' && c <= 'F' ? static_cast<char>(c - 'A' + 'a') : c;
  return text;
}

void sort_by_location(std::vector<GpuInfo>& gpus) {
  std::sort(gpus.begin(), gpus.end(),
            [](const GpuInfo& a, const GpuInfo& b) { return a.bus_location < b.bus_location; });
}

}  // namespace

void merge_gpus(std::vector<GpuInfo>& listed, const std::vector<GpuInfo>& usable) {
  for (const GpuInfo& gpu : usable) {
    const auto same = std::find_if(listed.begin(), listed.end(), [&](const GpuInfo& each) {
      return short_location(each.bus_location) == short_location(gpu.bus_location);
    });
    if (same == listed.end()) {
      listed.push_back(gpu);
      listed.back().bus_location = short_location(gpu.bus_location);
      continue;
    }
    const std::string location = same->bus_location;
    *same = gpu;
    same->bus_location = location;
  }
  sort_by_location(listed);
}

void find_gpus(MachineInfo& info) {
  info.gpus = nvidia_gpus(kNvidiaGpus);
  std::vector<GpuInfo> usable;
  for (int32_t index = 0; index < cuda::num_cuda_devices(); ++index)
    if (const auto gpu = cuda::cuda_device(index); gpu.ok()) usable.push_back((*gpu)->info());
  merge_gpus(info.gpus, usable);
  if (usable.empty()) info.cuda = cuda::cuda_device(0).status().message();
  const cuda::Versions versions = cuda::cuda_versions();
  info.cuda_driver = versions.driver;
  info.cuda_runtime = versions.runtime;
  const auto built = cuda::built_archs();
  const auto emulated = cuda::emulated_archs();
  info.gpu_archs.assign(built.begin(), built.end());
  info.emulated_archs.assign(emulated.begin(), emulated.end());
}

std::vector<GpuInfo> nvidia_gpus(const std::filesystem::path& folder) {
  std::vector<GpuInfo> gpus;
  std::error_code error;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    GpuInfo gpu = read_information(it->path() / "information");
    if (gpu.name.empty()) continue;
    if (gpu.bus_location.empty()) gpu.bus_location = it->path().filename().string();
    gpus.push_back(std::move(gpu));
  }
  sort_by_location(gpus);
  return gpus;
}

}  // namespace mla::dispatch
