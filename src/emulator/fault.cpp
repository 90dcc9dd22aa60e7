// SPDX-License-Identifier: Apache-2.0
// This file writes the texts of a block's faults.
#include <string>
#include <utility>

#include "emulator/block.h"

namespace mla::emulator {
namespace {

std::string place(Site site) {
  if (site.file == nullptr) return {};
  const std::string_view path = site.file;
  const size_t slash = path.find_last_of('/');
  return " (" + std::string(slash == std::string_view::npos ? path : path.substr(slash + 1)) + ":" +
         std::to_string(site.line) + ")";
}

std::string fill_in(std::string_view text, std::initializer_list<int64_t> numbers) {
  std::string filled;
  for (const int64_t number : numbers) {
    const size_t hole = text.find("{}");
    filled += std::string(text.substr(0, hole)) + std::to_string(number);
    text.remove_prefix(hole + 2);
  }
  return filled + std::string(text);
}

std::string range(int32_t first, int32_t last) {
  if (first == last) return std::to_string(first);
  return std::to_string(first) + "-" + std::to_string(last);
}

bool waits_alike(const Thread& a, const Thread& b) {
  if (a.wait != b.wait) return false;
  if (a.wait == Wait::kEnded) return true;
  // Only these waits set the numbers; with others, wait_a and wait_b are those of an earlier wait.
  const bool numbered = a.wait == Wait::kBarrierSync || a.wait == Wait::kMbarrier;
  return a.site == b.site && (!numbered || (a.wait_a == b.wait_a && a.wait_b == b.wait_b));
}

}  // namespace

void Block::record(const std::string& text) {
  const ThreadView& view = threads_[0].fiber.view;
  fault_ = std::string(launch_.name) + ": block (" + std::to_string(view.block_x) + ", " +
           std::to_string(view.block_y) + ", " + std::to_string(view.block_z) + "): " + text;
}

void Block::record_at(std::string_view text, std::initializer_list<int64_t> numbers, Site site) {
  record("thread " + std::to_string(current_) + ": " + fill_in(text, numbers) + place(site));
}

void Block::fail(std::string_view text, std::initializer_list<int64_t> numbers, Site site) {
  record_at(text, numbers, site);
  leave();
}

std::string Block::wait_text(const Thread& thread) const {
  const auto a = static_cast<int64_t>(thread.wait_a);
  const auto b = static_cast<int64_t>(thread.wait_b);
  switch (thread.wait) {
    case Wait::kNothing: return "did not wait";
    case Wait::kEnded: return "had ended";
    case Wait::kShuffle: return "waited at shfl" + place(thread.site);
    case Wait::kVote: return "waited at vote" + place(thread.site);
    case Wait::kSyncWarp: return "waited at bar.warp.sync" + place(thread.site);
    case Wait::kLdmatrix: return "waited at ldmatrix" + place(thread.site);
    case Wait::kStmatrix: return "waited at stmatrix" + place(thread.site);
    case Wait::kMma: return "waited at mma" + place(thread.site);
    case Wait::kWgmma: return "waited at wgmma" + place(thread.site);
    case Wait::kBarrierArrive: return "waited at bar.arrive" + place(thread.site);
    case Wait::kBarrierSync:
      return fill_in("waited at bar.sync {} for {} threads, of which {} came",
                     {a, b, barriers_[a % kNumBarriers].arrived}) +
             place(thread.site);
    case Wait::kCluster:
      return fill_in("waited at barrier.cluster for {} threads, of which {} came",
                     {static_cast<int64_t>(cluster_.size()) * launch_.threads, cluster_[0]->cluster_arrivals_}) +
             place(thread.site);
    case Wait::kMbarrier:
      for (const Mbarrier& barrier : mbarriers_)
        if (barrier.address == thread.wait_a)
          return fill_in("waited for the mbarrier at {}, parity {}, which lacks {} arrivals and {} bytes",
                         {a, b, barrier.pending, barrier.pending_bytes}) +
                 place(thread.site);
      return "waited for an mbarrier" + place(thread.site);
  }
  return {};
}

void Block::record_waits(std::string_view what, int32_t first, int32_t last) {
  std::vector<bool> told(threads_.size());
  std::string text(what);
  const char* separator = ": ";
  for (int32_t i = first; i <= last; ++i) {
    if (told[static_cast<size_t>(i)]) continue;
    const Thread& leader = threads_[static_cast<size_t>(i)];
    const char* comma = "threads ";
    text += separator;
    separator = "; ";
    for (int32_t begin = i; begin <= last; ++begin) {
      int32_t end = begin;
      for (; end <= last && waits_alike(threads_[static_cast<size_t>(end)], leader); ++end)
        told[static_cast<size_t>(end)] = true;
      if (end == begin) continue;
      text += comma + range(begin, end - 1);
      comma = ", ";
      begin = end;
    }
    text += " " + wait_text(leader);
  }
  record(text);
}

void Block::record_deadlock() {
  record_waits("deadlock", 0, launch_.threads - 1);
  for (Block* block : cluster_) {
    if (block == this) continue;
    block->record_waits("it waits as well", 0, launch_.threads - 1);
    fault_ += ". " + std::exchange(block->fault_, {});
  }
}

}  // namespace mla::emulator
