// SPDX-License-Identifier: Apache-2.0
#include "core/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "core/processors.h"

namespace mla::core {
namespace {

/// Idle workers spin this long before they sleep: long enough to bridge the gap between two operations of one layer,
/// and short enough to leave the core to others. It was chosen without a recorded measurement.
constexpr std::chrono::microseconds kSpinTime{50};
constexpr int kPausesPerClockRead = 32;  // pause instructions between two looks at the clock

void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

/// Waits until `word` is no longer `old`: spins, then sleeps.
void await_change(const std::atomic<uint32_t>& word, uint32_t old) {
  const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      if (word.load(std::memory_order_acquire) != old) return;
      pause_core();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  word.wait(old, std::memory_order_acquire);
}

bool pin(std::thread& thread, int32_t processor) {
  if (processor < 0 || processor >= CPU_SETSIZE) return false;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(processor), &set);
  return pthread_setaffinity_np(thread.native_handle(), sizeof set, &set) == 0;
}

/// Lets a thread run on all of these processors. Where that is refused, it stays where it was started.
void allow(std::thread& thread, const std::vector<int32_t>& processors) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int32_t processor : processors)
    if (processor < CPU_SETSIZE) CPU_SET(static_cast<size_t>(processor), &set);
  pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);
}

/// Returns whether the calling thread, and so a thread that it starts, may run on fewer processors than the process.
bool is_bound(const std::vector<int32_t>& processors) {
  cpu_set_t allowed;
  return pthread_getaffinity_np(pthread_self(), sizeof allowed, &allowed) == 0 &&
         static_cast<size_t>(CPU_COUNT(&allowed)) < processors.size();
}

/// Moves the calling thread off `processor`, by forbidding the processor for a moment and then allowing it again.
void leave(int32_t processor) {
  cpu_set_t allowed;
  if (processor < 0 || processor >= CPU_SETSIZE) return;
  if (pthread_getaffinity_np(pthread_self(), sizeof allowed, &allowed) != 0) return;
  cpu_set_t others = allowed;
  CPU_CLR(static_cast<size_t>(processor), &others);
  if (CPU_COUNT(&others) == 0) return;
  if (pthread_setaffinity_np(pthread_self(), sizeof others, &others) == 0)
    pthread_setaffinity_np(pthread_self(), sizeof allowed, &allowed);
}

/// Keeps an unpinned worker off the caller's processor. Schedulers tend to wake a thread where its waker runs, and to
/// leave it there: the two then take turns, and a call takes 100 us instead of 1 us (two processors, the other one busy
/// with low-priority work, Linux 6.18, November 2026). It acts so rarely that it does not matter where there are too
/// few processors.
class Separation {
 public:
  void keep(int32_t callers_processor) {
    if (sched_getcpu() != callers_processor) return;
    const auto now = std::chrono::steady_clock::now();
    if (now < next_) return;
    leave(callers_processor);
    next_ = now + kInterval;
  }

 private:
  static constexpr std::chrono::milliseconds kInterval{1};  // least time between two moves of a worker
  std::chrono::steady_clock::time_point next_;
};

/// Tells a worker of its next call. It has a cache line of its own, since the worker polls it.
struct alignas(64) Mailbox {
  std::atomic<uint32_t> calls{0};
};

}  // namespace

struct ThreadPool::State {
  std::mutex run_mutex;
  const WorkerFunction* function = nullptr;  // ordered by the mailboxes and `pending`
  std::atomic<bool> stop{false};
  bool separate = false;                       // workers keep off the caller's processor
  std::atomic<int32_t> callers_processor{-1};  // the processor that the caller runs on
  alignas(64) std::atomic<uint32_t> pending{0};
  std::vector<Mailbox> mailboxes;
  std::vector<std::thread> threads;

  explicit State(int32_t size) : mailboxes(static_cast<size_t>(size)) {}
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() {
    stop.store(true, std::memory_order_release);
    for (size_t i = 0; i < threads.size(); ++i) ring(i + 1);
    for (std::thread& thread : threads) thread.join();
  }

  void ring(size_t worker) {
    mailboxes[worker].calls.fetch_add(1, std::memory_order_release);
    mailboxes[worker].calls.notify_one();
  }

  void work(int32_t worker) {
    const std::atomic<uint32_t>& calls = mailboxes[static_cast<size_t>(worker)].calls;
    Separation separation;
    for (uint32_t seen = 0;; ++seen) {
      await_change(calls, seen);
      if (stop.load(std::memory_order_acquire)) return;
      if (separate) separation.keep(callers_processor.load(std::memory_order_relaxed));
      (*function)(worker);
      if (pending.fetch_sub(1, std::memory_order_acq_rel) == 1) pending.notify_one();
    }
  }
};

ThreadPool::ThreadPool(int32_t size, std::span<const int32_t> affinity)
    : state_(std::make_unique<State>(std::max(size, 1))) {
  const auto count = state_->mailboxes.size();
  const std::vector<int32_t> processors = affinity.empty() ? usable_processors() : std::vector<int32_t>{};
  const bool bound = is_bound(processors);
  state_->separate = affinity.empty() && processors.size() >= count;
  state_->threads.reserve(count - 1);
  for (size_t worker = 1; worker < count; ++worker) {
    State* state = state_.get();
    state_->threads.emplace_back([state, worker] { state->work(static_cast<int32_t>(worker)); });
    if (bound) allow(state_->threads.back(), processors);
    if (!affinity.empty() && !pin(state_->threads.back(), affinity[worker]))
      throw PinningError(static_cast<int32_t>(worker), affinity[worker]);
  }
}

ThreadPool::~ThreadPool() = default;

int32_t ThreadPool::size() const { return static_cast<int32_t>(state_->mailboxes.size()); }

void ThreadPool::run(WorkerFunction f, int32_t max_workers) {
  const std::lock_guard lock(state_->run_mutex);
  const auto helpers = static_cast<uint32_t>(std::max(std::min(max_workers, size()), 1) - 1);
  state_->function = &f;
  if (state_->separate) state_->callers_processor.store(sched_getcpu(), std::memory_order_relaxed);
  state_->pending.store(helpers, std::memory_order_relaxed);
  for (uint32_t worker = 1; worker <= helpers; ++worker) state_->ring(worker);
  f(0);
  for (uint32_t left = state_->pending.load(std::memory_order_acquire); left != 0;
       left = state_->pending.load(std::memory_order_acquire))
    await_change(state_->pending, left);
}

}  // namespace mla::core
