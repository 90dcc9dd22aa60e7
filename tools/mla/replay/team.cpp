// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/team.h"

#include <dlfcn.h>

#include <atomic>
#include <exception>
#include <mutex>

namespace mla::cli::replay {
namespace {

// oneDNN parallelizes with OpenMP, whose threads spin after each region and would steal time from the library's. It is
// asked for at run time: a oneDNN without OpenMP has no such function and needs none.
void keep_openmp_on_this_thread() {
  using SetNumThreads = void (*)(int);
  if (auto* set_num_threads = reinterpret_cast<SetNumThreads>(dlsym(RTLD_DEFAULT, "omp_set_num_threads")))
    set_num_threads(1);
}

}  // namespace

Team::Team(int32_t size) : team_(size) {
  team_.run([](int32_t) { keep_openmp_on_this_thread(); });
}

void Team::run(int64_t count, const Task& f) {
  if (count == 1) return f(0, 0);
  std::atomic<int64_t> next = 0;
  std::mutex mutex;
  std::exception_ptr error;
  team_.run([&](int32_t worker) {
    try {
      for (int64_t task = next++; task < count; task = next++) f(task, worker);
    } catch (...) {
      const std::lock_guard lock(mutex);
      error = std::current_exception();
      next = count;
    }
  });
  if (error) std::rethrow_exception(error);
}

}  // namespace mla::cli::replay
