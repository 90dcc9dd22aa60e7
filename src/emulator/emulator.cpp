// SPDX-License-Identifier: Apache-2.0
#include "emulator/emulator.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "emulator/block.h"

namespace mla::emulator {
namespace {

/// Blocks that no launch uses; their stacks and pages stay warm.
class BlockStore {
 public:
  std::unique_ptr<Block> take() {
    {
      const std::lock_guard lock(mutex_);
      if (!blocks_.empty()) {
        std::unique_ptr<Block> block = std::move(blocks_.back());
        blocks_.pop_back();
        return block;
      }
    }
    return std::make_unique<Block>();
  }
  void give(std::unique_ptr<Block> block) {
    const std::lock_guard lock(mutex_);
    blocks_.push_back(std::move(block));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Block>> blocks_;
};

BlockStore& block_store() {
  static BlockStore store;
  return store;
}

/// 0 ... count - 1 in an order that follows a seed, without a list of them: a linear map modulo the count.
class Order {
 public:
  Order(int64_t count, Random& random) : count_(count), shift_(draw(count, random)) {
    do {
      factor_ = (random.next() & 0xFFFFFF) | 1;  // times any real number of blocks: below 2^63
    } while (gcd(factor_, count) != 1);
  }
  int64_t operator()(int64_t i) const { return (i * factor_ + shift_) % count_; }

 private:
  static int64_t draw(int64_t count, Random& random) {
    const auto bits = static_cast<uint64_t>(random.next()) << 31 | random.next() >> 1;
    return static_cast<int64_t>(bits % static_cast<uint64_t>(count));
  }
  static int64_t gcd(int64_t a, int64_t b) {
    while (b != 0) a = std::exchange(b, a % b);
    return a;
  }

  int64_t count_, shift_, factor_ = 1;
};

Status fault(const Launch& launch, const std::string& text) {
  return {StatusCode::kInternal, std::string(launch.name) + ": " + text};
}

Status check(const Launch& launch) {
  if (launch.threads < kWarpSize || launch.threads > kMaxThreads || launch.threads % kWarpSize != 0)
    return fault(launch, "threads: expected a multiple of 32, at most 1024, got " + std::to_string(launch.threads));
  const int32_t limit = std::min(launch.shared_limit, kMaxSharedBytes);
  if (launch.shared_bytes < 0 || launch.shared_bytes > limit)
    return fault(launch, "shared memory: expected at most the target's " + std::to_string(limit) + " bytes, got " +
                             std::to_string(launch.shared_bytes));
  if (launch.grid_y > 65535 || launch.grid_z > 65535)
    return fault(launch, "grid: expected at most 65535 blocks in y and z, got " + std::to_string(launch.grid_y) +
                             " and " + std::to_string(launch.grid_z));
  return {};
}

/// What the workers of one launch share.
struct Progress {
  std::mutex mutex;
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  std::string fault;
  Counters counters;
};

void add(Counters& sum, const Counters& part) {
  sum.blocks += part.blocks;
  sum.mma += part.mma;
  sum.ldmatrix += part.ldmatrix;
  sum.shuffles += part.shuffles;
  sum.barriers += part.barriers;
  sum.async_copy_bytes += part.async_copy_bytes;
  sum.bulk_copy_bytes += part.bulk_copy_bytes;
  sum.prefetches += part.prefetches;
}

void work(const Launch& launch, int64_t num_blocks, const Order& order, Progress& progress) {
  const auto fail = [&](const std::string& text) {
    const std::lock_guard lock(progress.mutex);
    if (!progress.failed.exchange(true)) progress.fault = text;
  };
  try {
    std::unique_ptr<Block> block = block_store().take();
    block->clear_counters();
    while (!progress.failed.load(std::memory_order_relaxed)) {
      const int64_t i = progress.next.fetch_add(1, std::memory_order_relaxed);
      if (i >= num_blocks) break;
      if (!block->run(launch, order(i))) fail(block->fault());
    }
    const std::lock_guard lock(progress.mutex);
    add(progress.counters, block->counters());
    block_store().give(std::move(block));
  } catch (const std::bad_alloc&) {
    fail(std::string(launch.name) + ": no memory for the emulator");
  }
}

}  // namespace

Status run(const Launch& launch, core::ThreadPool& pool) {
  if (launch.grid_x <= 0 || launch.grid_y <= 0 || launch.grid_z <= 0) return {};
  if (Status status = check(launch); !status.ok()) return status;
  const int64_t num_blocks = static_cast<int64_t>(launch.grid_x) * launch.grid_y * launch.grid_z;
  Random random;
  random.seed(launch.seed);
  const Order order(num_blocks, random);
  Progress progress;
  pool.run([&](int32_t) { work(launch, num_blocks, order, progress); },
           static_cast<int32_t>(std::min<int64_t>(num_blocks, INT32_MAX)));
  if (launch.counters != nullptr) add(*launch.counters, progress.counters);
  if (progress.failed) return {StatusCode::kInternal, progress.fault};
  return {};
}

}  // namespace mla::emulator
