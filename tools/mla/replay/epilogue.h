// SPDX-License-Identifier: Apache-2.0
// Runs what stands between attention and the output projection where values are rows: the outputs are turned back and
// quantized.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "mla/mla.h"
#include "mla/replay/compressor.h"
#include "mla/replay/operations.h"
#include "mla/replay/recorder.h"

namespace mla::cli::replay {

/// Returns how many channels of an output share a scale: 128, as the projection of DeepSeek V4 takes them, or 64 or 32
/// where heads are no multiple of that; 0 where they are no multiple of 32, which cannot be quantized.
int32_t channels_per_scale(const ModelConfig& model);

/// This is the largest error of a finished output that is accepted, a share of its norm: what is beyond the rounding to
/// e4m3 of channels that were computed in f32 of the same outputs.
inline constexpr double kOutputTolerance = 0x1p-10;

class Epilogue {
 public:
  /// `angles` must outlive the epilogue.
  Epilogue(const ModelConfig& model, const Angles& angles) : model_(model), angles_(angles) {}

  /// Returns the bytes of the outputs of so many tokens, and of their scales.
  static int64_t memory_needed(const ModelConfig& model, int64_t tokens);

  /// Finishes outputs o [T, H, d_v] of tokens at these positions: e4m3 with f32 scales, which are powers of two. Groups
  /// of heads that are projected together lie apart.
  Status run(Operations& operations, const TensorView& o, std::span<const int64_t> positions, Phase phase,
             Recorder* recorder);
  /// Returns by how much a head's output of the last call is farther from `truth` [d_v], the output before it is
  /// quantized, than rounding explains, as a share of its norm; infinity if a scale is not that of the channels.
  double error(int64_t token, int64_t head, std::span<const double> truth) const;

 private:
  int64_t heads_per_group() const;
  /// Returns a view [T, G, H / G, n] of values whose groups lie one behind the other.
  TensorView grouped(const void* values, DType dtype, int64_t n) const;

  ModelConfig model_;
  const Angles& angles_;
  int64_t num_tokens_ = 0;  // of the last call
  std::vector<uint8_t> out_;
  std::vector<float> scale_;
};

}  // namespace mla::cli::replay
