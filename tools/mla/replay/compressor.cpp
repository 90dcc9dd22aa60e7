// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/compressor.h"

#include <cmath>

namespace mla::cli::replay {
namespace {

int64_t state_block_bytes(const CompressorShape& shape, int32_t drafts) {
  if (!shape.has_score()) return 0;
  return int64_t{StateTable::block_size(shape, drafts)} * 2 * shape.width() * static_cast<int64_t>(sizeof(float));
}

}  // namespace

Angles::Angles(const Generator& generator, int32_t rotary, int64_t positions, const Gpu* gpu) {
  if (rotary == 0) return;
  memory_ = PageMemory(positions * rotary * static_cast<int64_t>(sizeof(float)), 1, gpu);
  auto* row = reinterpret_cast<float*>(memory_.host());
  for (int64_t position = 0; position < positions; ++position, row += rotary)
    for (int32_t pair = 0; pair < rotary / 2; ++pair) {
      const double angle = generator.angle(static_cast<int32_t>(position), pair);
      row[pair] = static_cast<float>(std::cos(angle));
      row[rotary / 2 + pair] = static_cast<float>(std::sin(angle));
    }
  memory_.send();
  there_ = memory_.where_it_computes(contiguous(memory_.host(), DType::kF32, {positions, rotary}));
}

Compressor::Compressor(const CompressorShape& shape, const CompressorRoom& room, const Generator& generator,
                       const Angles& angles, const Operations& operations)
    : shape_(shape),
      room_(room),
      angles_(angles),
      norm_weight_(generator.norm_weight(shape)),
      position_bias_(generator.position_bias(shape)),
      state_table_(shape, room.page_size, room.num_pages, room.seats, room.drafts) {
  const auto buffer = [&](int64_t channels) {
    return bench::Buffer(static_cast<size_t>(room.tokens * channels) * size_of(room.dtype), /*huge_pages=*/true);
  };
  kv_ = buffer(shape.width());
  latents_ = buffer(shape.d_latent);
  if (!shape.has_score()) return;
  score_ = buffer(shape.width());
  state_ = PageMemory(state_block_bytes(shape, room.drafts), state_table_.num_blocks(), operations.gpu());
}

int64_t Compressor::memory_needed(const CompressorShape& shape, const CompressorRoom& room) {
  const int64_t channels = (shape.has_score() ? 2 : 1) * shape.width() + shape.d_latent;
  return room.tokens * channels * static_cast<int64_t>(size_of(room.dtype)) +
         int64_t{room.seats} * StateTable::blocks_per_seat(shape) * state_block_bytes(shape, room.drafts);
}

int64_t Compressor::page_bytes(const CompressorShape& shape, int32_t drafts) {
  return StateTable::blocks_per_page(shape) * state_block_bytes(shape, drafts);
}

void Compressor::generate(const Generator& generator, uint64_t token_seed, int32_t position, int64_t token) {
  const int64_t at = token * shape_.width() * static_cast<int64_t>(size_of(room_.dtype));
  generator.projections(token_seed, position, shape_, kv_.data() + at,
                        shape_.has_score() ? score_.data() + at : nullptr);
}

// Only tokens that end a group have a slot.
void Compressor::plan(std::span<const TokenRange> ranges) {
  const int32_t ratio = shape_.ratio, page = room_.page_size;
  qo_indptr_.assign(1, 0);
  kv_len_.clear();
  slots_.clear();
  for (const TokenRange& range : ranges) {
    qo_indptr_.push_back(qo_indptr_.back() + range.count);
    kv_len_.push_back(range.start + range.count);
    for (int32_t position = range.start; position < range.start + range.count; ++position)
      slots_.push_back((position + 1) % ratio != 0
                           ? -1
                           : int64_t{range.pages[static_cast<size_t>(position / page)]} * (page / ratio) +
                                 position % page / ratio);
  }
  if (shape_.has_score()) state_table_.update(ranges);
}

Status Compressor::run(Operations& operations, CompressParams params, const PooledTokens& tokens, Phase phase,
                       Recorder* recorder) {
  timed(recorder, Phase::kPlan, [&] { plan(tokens.ranges); });
  const int64_t count = std::ssize(slots_);
  const auto activations = [&](const bench::Buffer& buffer) {
    const int64_t before = tokens.first * shape_.width() * static_cast<int64_t>(size_of(room_.dtype));
    return contiguous(buffer.data() + before, room_.dtype, {count, shape_.width()});
  };
  params.kv = activations(kv_);
  params.qo_indptr = ints(qo_indptr_);
  params.kv_len = ints(kv_len_);
  params.ratio = shape_.ratio;
  params.overlap = shape_.overlap;
  if (shape_.has_score()) {
    params.score = activations(score_);
    params.state = state_.where_it_computes(
        contiguous(state_.host(), DType::kF32,
                   {state_table_.num_blocks(), state_table_.block_size(), int64_t{2} * shape_.width()}));
    params.state_table = state_table_.table();
  }
  if (shape_.has_bias())
    params.position_bias = contiguous(position_bias_.data(), DType::kF32, {shape_.ratio, shape_.width()});
  if (shape_.norm) params.norm_weight = contiguous(norm_weight_.data(), DType::kF32, {shape_.d_latent});
  params.latent = latents();
  params.slot_mapping = slots();
  if (shape_.d_rotary > 0) params.cos_sin = angles_.cos_sin();
  return operations.run(params, phase, recorder);
}

TensorView Compressor::latents() const {
  return contiguous(latents_.data(), room_.dtype, {std::ssize(slots_), shape_.d_latent});
}

}  // namespace mla::cli::replay
