// SPDX-License-Identifier: Apache-2.0
// This file finishes rows of attention's output: turns their rotary channels back, multiplies by a gate, quantizes.
#pragma once

#include <cstdint>

#include "core/args.h"
#include "cpu/operations.h"

namespace mla::cpu {

/// Finishes rows, one at a time, in memory of its own.
class Finisher {
 public:
  Finisher(const KernelSet& set, const core::Finish& finish, int32_t d_v) : set_(set), finish_(finish), d_v_(d_v) {}

  /// Returns where the row to finish is to be put, in f32.
  float* row() { return row_; }
  /// Finishes that row and stores it.
  void finish(int64_t token, int32_t head);

 private:
  void turn_back(const float* cos_sin);
  void apply_gate(int64_t token, int32_t head);
  void store(int64_t token, int32_t head);

  const KernelSet& set_;
  const core::Finish& finish_;
  const int32_t d_v_;
  alignas(64) float row_[kMaxFinished];
  alignas(64) float gate_[kMaxFinished];
  float scales_[kMaxFinished / 32];
};

}  // namespace mla::cpu
