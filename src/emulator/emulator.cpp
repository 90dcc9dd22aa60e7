// SPDX-License-Identifier: Apache-2.0
#include "emulator/emulator.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "emulator/block.h"

namespace mla::emulator {
namespace {

/// Keeps the blocks that no launch uses, so that their stacks and pages are already mapped for the next one.
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

/// Gives 0 ... count - 1 in an order that depends on a seed, without a list of them, by a linear map modulo the count.
class Order {
 public:
  Order(int64_t count, Random& random) : count_(count), shift_(draw(count, random)) {
    do {
      factor_ = (random.next() & 0xFFFFFF) | 1;  // its product with any real number of blocks is below 2^63
    } while (std::gcd(factor_, count) != 1);
  }
  int64_t operator()(int64_t i) const { return (i * factor_ + shift_) % count_; }

 private:
  static int64_t draw(int64_t count, Random& random) {
    const auto bits = static_cast<uint64_t>(random.next()) << 31 | random.next() >> 1;
    return static_cast<int64_t>(bits % static_cast<uint64_t>(count));
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
  if (launch.cluster < 1 || launch.cluster > kMaxCluster || launch.grid_x % launch.cluster != 0)
    return fault(launch, "cluster: expected 1 to " + std::to_string(kMaxCluster) + " blocks, a divisor of the grid's " +
                             std::to_string(launch.grid_x) + ", got " + std::to_string(launch.cluster));
  if (launch.grid_y > 65535 || launch.grid_z > 65535)
    return fault(launch, "grid: expected at most 65535 blocks in y and z, got " + std::to_string(launch.grid_y) +
                             " and " + std::to_string(launch.grid_z));
  return {};
}

/// Holds the state that the workers of one launch share.
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

void work(const Launch& launch, int64_t num_clusters, const Order& order, Progress& progress) {
  const auto fail = [&](const std::string& text) {
    const std::lock_guard lock(progress.mutex);
    if (!progress.failed.exchange(true)) progress.fault = text;
  };
  try {
    std::unique_ptr<Block> owned[kMaxCluster];
    Block* blocks[kMaxCluster];
    for (int32_t i = 0; i < launch.cluster; ++i) {
      owned[i] = block_store().take();
      owned[i]->clear_counters();
      blocks[i] = owned[i].get();
    }
    const std::span<Block* const> cluster(blocks, static_cast<size_t>(launch.cluster));
    while (!progress.failed.load(std::memory_order_relaxed)) {
      const int64_t i = progress.next.fetch_add(1, std::memory_order_relaxed);
      if (i >= num_clusters) break;
      if (const std::string* fault = Block::run(cluster, launch, order(i) * launch.cluster)) fail(*fault);
    }
    const std::lock_guard lock(progress.mutex);
    for (std::unique_ptr<Block>& block : std::span(owned, cluster.size())) {
      add(progress.counters, block->counters());
      block_store().give(std::move(block));
    }
  } catch (const std::bad_alloc&) {
    fail(std::string(launch.name) + ": no memory for the emulator");
  }
}

}  // namespace

Status run(const Launch& launch, core::ThreadPool& pool) {
  if (launch.grid_x <= 0 || launch.grid_y <= 0 || launch.grid_z <= 0) return {};
  if (Status status = check(launch); !status.ok()) return status;
  if (const LaunchObserver observer = launch_observer.load(std::memory_order_relaxed)) observer(launch);
  const int64_t num_clusters = static_cast<int64_t>(launch.grid_x / launch.cluster) * launch.grid_y * launch.grid_z;
  Random random;
  random.seed(launch.seed);
  const Order order(num_clusters, random);
  Progress progress;
  pool.run([&](int32_t) { work(launch, num_clusters, order, progress); },
           static_cast<int32_t>(std::min<int64_t>(num_clusters, INT32_MAX)));
  if (launch.counters != nullptr) add(*launch.counters, progress.counters);
  if (progress.failed) return {StatusCode::kInternal, progress.fault};
  return {};
}

}  // namespace mla::emulator
