// SPDX-License-Identifier: Apache-2.0
#include "core/processors.h"

#include <dlfcn.h>
#include <link.h>
#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace mla::core {
namespace {

/// Returns the processors of the calling thread.
std::vector<int32_t> processors_of_thread() {
  // The kernel refuses a set smaller than its own, so the size grows until it fits.
  for (int32_t most = CPU_SETSIZE; most <= 1 << 20; most *= 2) {
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(static_cast<size_t>(most)),
                                                               [](cpu_set_t* s) { CPU_FREE(s); });
    if (set == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(static_cast<size_t>(most));
    if (sched_getaffinity(0, bytes, set.get()) != 0) continue;
    std::vector<int32_t> processors;
    for (int32_t i = 0; i < most; ++i)
      if (CPU_ISSET_S(static_cast<size_t>(i), bytes, set.get())) processors.push_back(i);
    return processors;
  }
  return {};
}

/// Returns whether the environment asks OpenMP to bind threads.
bool openmp_may_bind() {
  constexpr const char* kVariables[] = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"};
  return std::ranges::any_of(kVariables, [](const char* name) { return std::getenv(name) != nullptr; });
}

/// Returns the files of the OpenMP runtimes that the process has loaded: of GCC, LLVM and Intel.
std::vector<std::string> loaded_openmp() {
  std::vector<std::string> files;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* to) {
        const std::string_view file = info->dlpi_name;
        const std::string_view name = file.substr(file.rfind('/') + 1);
        if (name.starts_with("libgomp") || name.starts_with("libomp") || name.starts_with("libiomp"))
          static_cast<std::vector<std::string>*>(to)->emplace_back(file);
        return 0;
      },
      &files);
  return files;
}

/// Returns the processors of each place of a loaded OpenMP runtime, in ascending order.
std::vector<std::vector<int32_t>> places_of(const std::string& file) {
  const std::unique_ptr<void, int (*)(void*)> runtime(dlopen(file.c_str(), RTLD_LAZY | RTLD_NOLOAD), dlclose);
  if (runtime == nullptr) return {};
  const auto num_places = reinterpret_cast<int (*)()>(dlsym(runtime.get(), "omp_get_num_places"));
  const auto num_processors = reinterpret_cast<int (*)(int)>(dlsym(runtime.get(), "omp_get_place_num_procs"));
  const auto get = reinterpret_cast<void (*)(int, int*)>(dlsym(runtime.get(), "omp_get_place_proc_ids"));
  if (num_places == nullptr || num_processors == nullptr || get == nullptr) return {};
  std::vector<std::vector<int32_t>> places;
  for (int place = 0; place < num_places(); ++place) {
    std::vector<int32_t> processors(static_cast<size_t>(std::max(num_processors(place), 0)));
    if (!processors.empty()) get(place, processors.data());
    std::ranges::sort(processors);
    places.push_back(std::move(processors));
  }
  return places;
}

}  // namespace

std::vector<int32_t> usable_processors() {
  std::vector<int32_t> processors = processors_of_thread();
  if (processors.empty() || !openmp_may_bind()) return processors;
  std::vector<int32_t> all;
  bool bound = false;
  for (const std::string& file : loaded_openmp()) {
    const std::vector<std::vector<int32_t>> places = places_of(file);
    bound = bound || (!places.empty() && places.front() == processors);  // where the thread that loads it is put
    for (const std::vector<int32_t>& place : places) std::ranges::copy(place, std::back_inserter(all));
  }
  if (!bound) return processors;
  std::ranges::sort(all);
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

}  // namespace mla::core
