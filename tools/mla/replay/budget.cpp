// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/budget.h"

#include <algorithm>
#include <initializer_list>
#include <numeric>

namespace mla::cli::replay {
namespace {

// The amounts and seconds of a step fade by this factor with every later step: machines are shared.
constexpr double kMemory = 0.98;
// New requests may be predicted to fill this share of the time that is left: predictions err, and a request that turns
// out not to fit has been computed in vain.
constexpr double kAdmittedShare = 0.85;

/// Returns the number of pairs of `count` queries from `start` on and the keys that they see.
double causal_pairs(double start, double count) { return count * start + count * (count + 1.0) / 2.0; }

}  // namespace

Work& Work::operator+=(const Work& other) {
  const double steps = std::max(amount[kDecodeSteps], other.amount[kDecodeSteps]);
  for (size_t kind = 0; kind < kKinds; ++kind) amount[kind] += other.amount[kind];
  amount[kDecodeSteps] = steps;
  return *this;
}

Work work_of(const Step& step, std::span<const Sequence> sequences) {
  Work work;
  for (const PrefillPiece& piece : step.prefill) {
    work.amount[Work::kPrefillTokens] += piece.count;
    work.amount[Work::kPrefillKeys] += piece.start + piece.count;
    work.amount[Work::kPrefillPairs] += causal_pairs(piece.start, piece.count);
  }
  for (const DecodePiece& piece : step.decode)
    work.amount[Work::kDecodeKeys] +=
        causal_pairs(sequences[static_cast<size_t>(piece.sequence)].num_computed, piece.count);
  work.amount[Work::kDecodeSteps] = step.decode.empty() ? 0.0 : 1.0;
  return work;
}

Work work_left(const Sequence& sequence, const SchedulerOptions& options) {
  Work work;
  const Request& request = *sequence.request;
  for (int32_t start = sequence.num_computed; start < request.input_length; start += options.chunk) {
    const int32_t count = std::min(options.chunk, request.input_length - start);
    work.amount[Work::kPrefillTokens] += count;
    work.amount[Work::kPrefillKeys] += start + count;
    work.amount[Work::kPrefillPairs] += causal_pairs(start, count);
  }
  // A prompt's last token gives the first answer token. Of every step's drafts some stay.
  const double answers = std::max(request.output_length - std::max(sequence.num_output, 1), 0);
  double stay = 1.0, chance = 1.0;
  for (int32_t draft = 0; draft < options.drafts; ++draft) stay += chance *= kDraftAcceptance;
  const double keys = std::max(sequence.num_computed, request.input_length);
  work.amount[Work::kDecodeSteps] = answers / stay;
  work.amount[Work::kDecodeKeys] = causal_pairs(keys, answers) * (options.drafts + 1) / stay;
  return work;
}

WorkSeconds seconds_by_kind(const Recorder& before, const Recorder& after, double total, bool with_prefill) {
  const auto of = [&](std::initializer_list<Phase> phases) {
    double seconds = 0.0;
    for (Phase phase : phases) seconds += after.seconds(phase) - before.seconds(phase);
    return seconds;
  };
  WorkSeconds seconds = {};
  seconds[Work::kPrefillKeys] = of({Phase::kGather, Phase::kUpProjection});
  seconds[Work::kPrefillPairs] =
      of({Phase::kPrefillIndexer, Phase::kPrefillTopK, Phase::kPrefillSlots, Phase::kPrefillAttention, Phase::kMerge});
  seconds[Work::kDecodeKeys] = of(
      {Phase::kDecodeIndexer, Phase::kDecodeTopK, Phase::kDecodeSlots, Phase::kDecodeAttention, Phase::kDecodeMerge});
  seconds[Work::kDecodeSteps] =
      of({Phase::kDecodePrologue, Phase::kDecodeCompress, Phase::kDecodeProjection, Phase::kDecodeFinish});
  seconds[Work::kChecks] = of({Phase::kCheck});
  const double rest = total - std::accumulate(seconds.begin(), seconds.end(), 0.0);
  seconds[with_prefill ? Work::kPrefillTokens : Work::kDecodeSteps] += std::max(rest, 0.0);
  return seconds;
}

void TimeBudget::observe(const Work& work, const WorkSeconds& seconds) {
  for (size_t kind = 0; kind < Work::kKinds; ++kind) {
    if (work.amount[kind] <= 0.0) continue;
    observed_amount_[kind] = observed_amount_[kind] * kMemory + work.amount[kind];
    observed_seconds_[kind] = observed_seconds_[kind] * kMemory + seconds[kind];
  }
}

double TimeBudget::predict(const Work& work) const {
  std::array<double, Work::kKinds> amount = work.amount;
  if (check_every_ > 0) {
    const double steps = amount[Work::kPrefillTokens] / options_.chunk + amount[Work::kDecodeSteps];
    amount[Work::kChecks] = steps / static_cast<double>(check_every_);
  }
  double seconds = 0.0;
  for (size_t kind = 0; kind < Work::kKinds; ++kind)
    if (observed_amount_[kind] > 0.0) seconds += amount[kind] * observed_seconds_[kind] / observed_amount_[kind];
  return seconds;
}

bool TimeBudget::admits(const Sequence& waiting, const Scheduler& scheduler, double elapsed) const {
  Work all = work_left(waiting, options_);
  for (int32_t index : scheduler.running())
    all += work_left(scheduler.sequences()[static_cast<size_t>(index)], options_);
  return elapsed < seconds_ && predict(all) <= kAdmittedShare * (seconds_ - elapsed);
}

void TimeBudget::cut(Scheduler& scheduler, double elapsed) const {
  while (scheduler.num_running() > 0) {
    Work all;
    double longest = -1.0;
    int32_t worst = 0;
    for (int32_t index : scheduler.running()) {
      const Work left = work_left(scheduler.sequences()[static_cast<size_t>(index)], options_);
      all += left;
      if (const double seconds = predict(left); seconds > longest) {
        longest = seconds;
        worst = index;
      }
    }
    if (elapsed + predict(all) <= seconds_) return;
    scheduler.give_up(worst);
  }
}

}  // namespace mla::cli::replay
