// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <random>

namespace mla::cli::replay {
namespace {

// The last answer token is never fed back, so it needs no place in the cache.
int64_t tokens_needed(const Request& request) {
  return int64_t{request.input_length} + std::max(request.output_length - 1, 0);
}

int64_t pages_needed(const Request& request, int32_t page_size) {
  return (tokens_needed(request) + page_size - 1) / page_size;
}

}  // namespace

Scheduler::Scheduler(std::span<const Request> requests, const SchedulerOptions& options)
    : options_(options),
      share_(kBlockTokens % options.page_size == 0),
      pool_(options.num_pages),
      cache_(pool_, share_ ? kBlockTokens / options.page_size : 1) {
  sequences_.reserve(requests.size());
  for (const Request& request : requests) {
    Sequence sequence;
    sequence.request = &request;
    sequence.arrival_ms = options.as_fast_as_possible ? 0.0 : request.arrival_ms;
    waiting_.push_back(static_cast<int32_t>(sequences_.size()));
    sequences_.push_back(std::move(sequence));
  }
}

Status Scheduler::check(std::span<const Request> requests, const SchedulerOptions& options) {
  const auto bad = [](std::string text) { return Status(StatusCode::kInvalidArgument, std::move(text)); };
  if (options.page_size < 1) return bad(fmt::format("page_size: expected at least 1, got {}", options.page_size));
  if (options.num_pages < 1) return bad(fmt::format("pool: expected at least one page, got {}", options.num_pages));
  if (options.chunk < 1) return bad(fmt::format("chunk: expected at least 1, got {}", options.chunk));
  if (options.drafts < 0) return bad(fmt::format("drafts: expected at least 0, got {}", options.drafts));
  if (options.max_batch < 1) return bad(fmt::format("max_batch: expected at least 1, got {}", options.max_batch));
  for (const Request& request : requests) {
    const int64_t needed = pages_needed(request, options.page_size);
    if (needed > options.num_pages)
      return bad(fmt::format(
          "pool: expected at least {} pages of {} tokens for the request of line {} (input {}, output {}), got {}",
          needed, options.page_size, request.line, request.input_length, request.output_length, options.num_pages));
  }
  return {};
}

// Takes all pages the request will ever need, so that a running request never waits and nobody has to be thrown out.
bool Scheduler::admit(int32_t index, double now_ms) {
  Sequence& sequence = sequences_[static_cast<size_t>(index)];
  const Request& request = *sequence.request;
  if (share_) {
    // The last prompt token is always computed: its output is the first answer token.
    const auto max_blocks = static_cast<size_t>((request.input_length - 1) / kBlockTokens);
    const int32_t blocks =
        cache_.acquire(std::span(request.hash_ids).first(max_blocks), sequence.chain, sequence.pages);
    sequence.num_hit = blocks * kBlockTokens;
  }
  const auto missing = static_cast<int32_t>(pages_needed(request, options_.page_size) - std::ssize(sequence.pages));
  if (!cache_.make_room(missing)) {
    for (int32_t page : sequence.pages) pool_.release(page);
    cache_.release(sequence.chain);
    sequence.pages.clear();
    sequence.chain.clear();
    sequence.num_hit = 0;
    return false;
  }
  [[maybe_unused]] const bool allocated = pool_.allocate(missing, sequence.pages);
  assert(allocated);
  sequence.num_computed = sequence.num_hit;
  sequence.state = SequenceState::kPrefill;
  sequence.admitted_ms = now_ms;
  running_.push_back(index);
  return true;
}

// Asks for no more tokens than the request still wants. Which drafts are right depends on the request and the place
// alone.
DecodePiece Scheduler::next_answer(int32_t index) const {
  const Sequence& sequence = sequences_[static_cast<size_t>(index)];
  DecodePiece piece{.sequence = index,
                    .count = std::min(options_.drafts + 1, sequence.request->output_length - sequence.num_output),
                    .accepted = 1};
  std::mt19937_64 random(options_.seed ^ (static_cast<uint64_t>(index) << 32) ^
                         static_cast<uint64_t>(sequence.num_computed));
  constexpr double kRange = 18446744073709551616.0;  // 2^64
  while (piece.accepted < piece.count && static_cast<double>(random()) < kDraftAcceptance * kRange) ++piece.accepted;
  return piece;
}

Step Scheduler::next(double now_ms, const std::function<bool(const Sequence&)>& admits) {
  Step step;
  int32_t budget = options_.chunk;
  const auto add_piece = [&](int32_t index) {
    const Sequence& sequence = sequences_[static_cast<size_t>(index)];
    const int32_t count = std::min(budget, sequence.request->input_length - sequence.num_computed);
    step.prefill.push_back({.sequence = index, .start = sequence.num_computed, .count = count});
    budget -= count;
  };
  for (int32_t index : running_) {
    if (sequences_[static_cast<size_t>(index)].state == SequenceState::kDecode)
      step.decode.push_back(next_answer(index));
    else if (budget > 0)
      add_piece(index);
  }
  if (options_.sharers_side_by_side)
    std::stable_sort(step.decode.begin(), step.decode.end(), [&](const DecodePiece& a, const DecodePiece& b) {
      return sequences_[static_cast<size_t>(a.sequence)].pages < sequences_[static_cast<size_t>(b.sequence)].pages;
    });
  // Requests are admitted as late as possible: blocks that earlier requests finish meanwhile can be shared.
  size_t refused = 0;
  while (budget > 0 && refused < waiting_.size() && num_running() < options_.max_batch &&
         sequences_[static_cast<size_t>(waiting_[refused])].arrival_ms <= now_ms) {
    const int32_t index = waiting_[refused];
    if (admits && !admits(sequences_[static_cast<size_t>(index)])) {
      ++refused;
      continue;
    }
    if (!admit(index, now_ms)) break;
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(refused));
    add_piece(index);
  }
  if (step.empty()) {
    const auto end = waiting_.begin() + static_cast<std::ptrdiff_t>(refused);
    std::for_each(waiting_.begin(), end, [&](int32_t index) { leave_out(sequences_[static_cast<size_t>(index)]); });
    waiting_.erase(waiting_.begin(), end);
  }
  return step;
}

void Scheduler::publish_blocks(Sequence& sequence) {
  if (!share_) return;
  const auto pages_per_block = static_cast<size_t>(kBlockTokens / options_.page_size);
  const int32_t in_prompt = std::min(sequence.num_computed, sequence.request->input_length);
  const auto finished = static_cast<size_t>(in_prompt / kBlockTokens);
  while (sequence.chain.size() < finished) {
    const size_t block = sequence.chain.size();
    const auto parent = sequence.chain.empty() ? PrefixCache::kRoot : sequence.chain.back();
    sequence.chain.push_back(
        cache_.publish(parent, sequence.request->hash_ids[block],
                       std::span(sequence.pages).subspan(block * pages_per_block, pages_per_block)));
  }
}

void Scheduler::release(Sequence& sequence) {
  for (int32_t page : sequence.pages) pool_.release(page);
  cache_.release(sequence.chain);
  sequence.pages.clear();
  sequence.chain.clear();
}

void Scheduler::leave_out(Sequence& sequence) {
  sequence.state = SequenceState::kLeftOut;
  ++num_left_out_;
}

void Scheduler::give_up(int32_t index) {
  Sequence& sequence = sequences_[static_cast<size_t>(index)];
  leave_out(sequence);
  release(sequence);
  std::erase(running_, index);
}

void Scheduler::complete(const Step& step, double now_ms) {
  for (const PrefillPiece& piece : step.prefill) {
    Sequence& sequence = sequences_[static_cast<size_t>(piece.sequence)];
    sequence.num_computed += piece.count;
    publish_blocks(sequence);
    if (sequence.num_computed < sequence.request->input_length) continue;
    sequence.state = SequenceState::kDecode;
    sequence.first_token_ms = now_ms;
    sequence.num_output = std::min(sequence.request->output_length, 1);
  }
  for (const DecodePiece& piece : step.decode) {
    Sequence& sequence = sequences_[static_cast<size_t>(piece.sequence)];
    sequence.num_computed += piece.accepted;
    sequence.num_output += piece.accepted;
    sequence.num_drafts += piece.count - 1;
    sequence.num_accepted += piece.accepted - 1;
  }
  std::erase_if(running_, [&](int32_t index) {
    Sequence& sequence = sequences_[static_cast<size_t>(index)];
    if (sequence.state != SequenceState::kDecode || sequence.num_output < sequence.request->output_length) return false;
    sequence.state = SequenceState::kFinished;
    sequence.finished_ms = now_ms;
    ++num_finished_;
    release(sequence);
    return true;
  });
}

double Scheduler::next_arrival_ms() const {
  if (waiting_.empty()) return std::numeric_limits<double>::infinity();
  return sequences_[static_cast<size_t>(waiting_.front())].arrival_ms;
}

int64_t Scheduler::num_queued(double now_ms) const {
  const auto last = std::upper_bound(waiting_.begin(), waiting_.end(), now_ms, [&](double now, int32_t index) {
    return now < sequences_[static_cast<size_t>(index)].arrival_ms;
  });
  return last - waiting_.begin();
}

}  // namespace mla::cli::replay
