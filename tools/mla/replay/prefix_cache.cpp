// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/prefix_cache.h"

#include <cassert>

namespace mla::cli::replay {

void PrefixCache::use(NodeId id) {
  Node& used = node(id);
  if (used.num_users++ > 0) return;
  --num_unused_;
  evictable_.erase({used.last_used, id});
}

int32_t PrefixCache::acquire(std::span<const int64_t> hash_ids, std::vector<NodeId>& chain,
                             std::vector<int32_t>& pages) {
  NodeId parent = kRoot;
  int32_t count = 0;
  for (int64_t hash_id : hash_ids) {
    const auto found = children_.find({parent, hash_id});
    if (found == children_.end()) break;
    parent = found->second;
    use(parent);
    chain.push_back(parent);
    for (int32_t page : node(parent).pages) {
      pool_.retain(page);
      pages.push_back(page);
    }
    ++count;
  }
  return count;
}

PrefixCache::NodeId PrefixCache::publish(NodeId parent, int64_t hash_id, std::span<const int32_t> pages) {
  assert(std::ssize(pages) == pages_per_block_);
  assert(parent == kRoot || node(parent).num_users > 0);
  if (const auto found = children_.find({parent, hash_id}); found != children_.end()) {
    use(found->second);
    return found->second;
  }
  NodeId id = static_cast<NodeId>(nodes_.size());
  if (free_nodes_.empty()) {
    nodes_.emplace_back();
  } else {
    id = free_nodes_.back();
    free_nodes_.pop_back();
  }
  node(id) = {.key = {parent, hash_id}, .num_users = 1, .pages = {pages.begin(), pages.end()}};
  for (int32_t page : pages) pool_.retain(page);
  children_.emplace(Key{parent, hash_id}, id);
  if (parent != kRoot) ++node(parent).num_children;
  return id;
}

void PrefixCache::release(std::span<const NodeId> chain) {
  ++clock_;
  for (NodeId id : chain) {
    Node& released = node(id);
    assert(released.num_users > 0);
    if (--released.num_users > 0) continue;
    released.last_used = clock_;
    ++num_unused_;
    if (released.num_children == 0) evictable_.insert({released.last_used, id});
  }
}

void PrefixCache::evict(NodeId id) {
  Node& evicted = node(id);
  evictable_.erase({evicted.last_used, id});
  children_.erase(evicted.key);
  for (int32_t page : evicted.pages) pool_.release(page);
  evicted.pages.clear();
  --num_unused_;
  ++num_evicted_;
  free_nodes_.push_back(id);
  const NodeId parent = evicted.key.parent;
  if (parent != kRoot && --node(parent).num_children == 0 && node(parent).num_users == 0)
    evictable_.insert({node(parent).last_used, parent});
}

bool PrefixCache::make_room(int32_t count) {
  if (pool_.num_free() + num_evictable_pages() < count) return false;
  while (pool_.num_free() < count) evict(evictable_.begin()->second);
  return true;
}

}  // namespace mla::cli::replay
