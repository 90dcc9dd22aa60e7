// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/engine.h"

#include "mla/replay/latent_engine.h"
#include "mla/replay/pooled_engine.h"

namespace mla::cli::replay {

Seats::Seats(int32_t count) {
  for (int32_t seat = count - 1; seat >= 0; --seat) free_.push_back(seat);
}

void Seats::update(const Step& step, std::span<const Sequence> sequences) {
  std::erase_if(seats_, [&](const auto& taken) {
    const SequenceState state = sequences[static_cast<size_t>(taken.first)].state;
    const bool left = state != SequenceState::kPrefill && state != SequenceState::kDecode;
    if (left) free_.push_back(taken.second);
    return left;
  });
  const auto seat = [&](int32_t sequence) {
    if (seats_.contains(sequence)) return;
    seats_.emplace(sequence, free_.back());
    free_.pop_back();
  };
  for (const PrefillPiece& piece : step.prefill) seat(piece.sequence);
  for (const DecodePiece& piece : step.decode) seat(piece.sequence);
}

std::unique_ptr<Engine> make_engine(const EngineOptions& options, const Context& context, const Context& reference,
                                    const std::atomic<bool>& stop) {
  if (options.layer.model.value_is_row) return std::make_unique<PooledEngine>(options, context, reference, stop);
  return std::make_unique<LatentEngine>(options, context, reference, stop);
}

int64_t memory_needed(const EngineOptions& options) {
  return options.layer.model.value_is_row ? PooledEngine::memory_needed(options) : LatentEngine::memory_needed(options);
}

}  // namespace mla::cli::replay
