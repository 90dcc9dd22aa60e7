// SPDX-License-Identifier: Apache-2.0
// Keeps finished prompt blocks, which later requests may share. A block is known by the chain of hash ids up to it: the
// nodes form a tree, a node's children are the blocks that followed it. Pages of a node are never written again.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "mla/replay/page_pool.h"

namespace mla::cli::replay {

class PrefixCache {
 public:
  using NodeId = int32_t;
  static constexpr NodeId kRoot = -1;

  /// `pages_per_block` pages hold one block. The pool must outlive the cache.
  PrefixCache(PagePool& pool, int32_t pages_per_block) : pool_(pool), pages_per_block_(pages_per_block) {}

  /// Uses the longest known chain that `hash_ids` begin with: appends its nodes to `chain` and its pages, retained for
  /// the caller, to `pages`. Returns the number of blocks.
  int32_t acquire(std::span<const int64_t> hash_ids, std::vector<NodeId>& chain, std::vector<int32_t>& pages);

  /// Makes a finished block known as the child `hash_id` of `parent` (which the caller uses, or kRoot) and uses it.
  /// If another request was faster, its block stays and `pages` remain the caller's alone.
  NodeId publish(NodeId parent, int64_t hash_id, std::span<const int32_t> pages);

  /// Ends the use of a chain. The pages that `acquire` gave are the caller's to release.
  void release(std::span<const NodeId> chain);

  /// Forgets unused blocks, the least recently used first, until `count` pages are free. Returns false, and forgets
  /// nothing, if that cannot be reached.
  bool make_room(int32_t count);

  /// Returns the number of pages of blocks that nobody uses.
  int32_t num_evictable_pages() const { return num_unused_ * pages_per_block_; }
  int64_t num_evicted_blocks() const { return num_evicted_; }
  int32_t num_blocks() const { return static_cast<int32_t>(children_.size()); }

 private:
  struct Key {
    NodeId parent;
    int64_t hash_id;
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    size_t operator()(const Key& key) const {
      return std::hash<uint64_t>()((static_cast<uint64_t>(key.hash_id) * 0x9E3779B97F4A7C15U) ^
                                   static_cast<uint64_t>(static_cast<uint32_t>(key.parent)));
    }
  };
  struct Node {
    Key key = {};
    int32_t num_users = 0;  // requests; a user of a node uses its ancestors too
    int32_t num_children = 0;
    uint64_t last_used = 0;
    std::vector<int32_t> pages;
  };

  Node& node(NodeId id) { return nodes_[static_cast<size_t>(id)]; }
  void use(NodeId id);
  void evict(NodeId id);

  PagePool& pool_;
  int32_t pages_per_block_;
  uint64_t clock_ = 0;
  int32_t num_unused_ = 0;
  int64_t num_evicted_ = 0;
  std::vector<Node> nodes_;
  std::vector<NodeId> free_nodes_;
  std::unordered_map<Key, NodeId, KeyHash> children_;
  std::set<std::pair<uint64_t, NodeId>> evictable_;  // unused leaves by last_used
};

}  // namespace mla::cli::replay
