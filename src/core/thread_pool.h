// SPDX-License-Identifier: Apache-2.0
// A ThreadPool holds the persistent workers of one context.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>

namespace mla::core {

/// Refers to a function object that the caller keeps alive. It allocates nothing.
class WorkerFunction {
 public:
  template <class F>
  WorkerFunction(const F& f)  // NOLINT(google-explicit-constructor): it stands in for a function parameter
      : object_(&f), call_([](const void* object, int32_t worker) { (*static_cast<const F*>(object))(worker); }) {}
  void operator()(int32_t worker) const { call_(object_, worker); }

 private:
  const void* object_;
  void (*call_)(const void*, int32_t);
};

/// Says that a worker could not be bound to its processor.
struct PinningError : std::runtime_error {
  PinningError(int32_t worker_index, int32_t processor_index)
      : std::runtime_error("cannot pin a worker"), worker(worker_index), processor(processor_index) {}
  int32_t worker;
  int32_t processor;
};

/// Holds `size` workers. The calling thread is worker 0, so that a pool of size 1 owns no thread. Idle workers spin for
/// a few tens of microseconds, then sleep.
class ThreadPool {
 public:
  /// `affinity` holds the processor of each worker (entry 0, the caller's, is ignored), or is empty. Throws
  /// PinningError, or std::system_error if a thread cannot be started.
  ThreadPool(int32_t size, std::span<const int32_t> affinity);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int32_t size() const;

  /// Calls f(worker) once on each of workers 0 .. min(max_workers, size) - 1 and returns when all are done. Calls from
  /// several threads wait for one another. Neither allocates nor throws; f must not throw.
  void run(WorkerFunction f, int32_t max_workers = INT32_MAX);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace mla::core
