// SPDX-License-Identifier: Apache-2.0
// Runs compress: activations of new tokens become rows of a pool or keys of an indexer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "mla/bench/memory.h"
#include "mla/mla.h"
#include "mla/replay/cache_pool.h"
#include "mla/replay/compressor_shape.h"
#include "mla/replay/generator.h"
#include "mla/replay/operations.h"
#include "mla/replay/recorder.h"
#include "mla/replay/state_table.h"

namespace mla::cli::replay {

/// Holds the cosines and sines of the rotary channels of every position, where the layer computes.
class Angles {
 public:
  Angles() = default;
  Angles(const Generator& generator, int32_t rotary, int64_t positions, const Gpu* gpu);

  const TensorView& cos_sin() const { return there_; }  ///< [positions, rotary channels], not given without any

 private:
  PageMemory memory_;
  TensorView there_;
};

/// Says how much a compressor has to hold.
struct CompressorRoom {
  DType dtype = DType::kBF16;  ///< of activations and latents
  int32_t page_size = 0;       ///< tokens
  int32_t num_pages = 0;
  int32_t seats = 1;   ///< requests that run at once
  int32_t drafts = 0;  ///< beside each answer token
  int64_t tokens = 0;  ///< of a step
};

/// Names tokens of a step whose activations have been generated: ranges, one behind the other, of which the first token
/// is number `first` of the step.
struct PooledTokens {
  std::span<const TokenRange> ranges = {};
  int64_t first = 0;
};

class Compressor {
 public:
  /// `angles` must outlive the compressor.
  Compressor(const CompressorShape& shape, const CompressorRoom& room, const Generator& generator, const Angles& angles,
             const Operations& operations);

  /// Returns the bytes of activations, and of the state of all seats.
  static int64_t memory_needed(const CompressorShape& shape, const CompressorRoom& room);
  /// Returns the bytes of state that every page has.
  static int64_t page_bytes(const CompressorShape& shape, int32_t drafts);

  const CompressorShape& shape() const { return shape_; }
  /// Writes what the generator has for number `token` of the step's tokens.
  void generate(const Generator& generator, uint64_t token_seed, int32_t position, int64_t token);
  /// Compresses tokens to what `params` have: rows of their cache or keys of their indexer, and what is appended
  /// beside.
  Status run(Operations& operations, CompressParams params, const PooledTokens& tokens, Phase phase,
             Recorder* recorder);
  /// Returns the last call's latents [T, d_latent], not yet rotated, of tokens that end a group, and their slots [T].
  TensorView latents() const;
  TensorView slots() const { return contiguous(slots_.data(), DType::kI64, {std::ssize(slots_)}); }

 private:
  void plan(std::span<const TokenRange> ranges);

  CompressorShape shape_;
  CompressorRoom room_;
  const Angles& angles_;
  std::vector<float> norm_weight_, position_bias_;
  StateTable state_table_;
  PageMemory state_;
  bench::Buffer kv_, score_, latents_;
  // These are of the current call.
  std::vector<int32_t> qo_indptr_, kv_len_;
  std::vector<int64_t> slots_;
};

}  // namespace mla::cli::replay
