// SPDX-License-Identifier: Apache-2.0
// Judges finished outputs by a computation of its own, in double.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kit/specs.h"
#include "mla/params.h"

namespace mla::kit {

/// Holds a row of outputs, and for each channel what its errors are relative to.
struct ExactRow {
  std::vector<double> values, magnitudes;

  /// Returns what becomes of the row before it is rounded.
  ExactRow finished(const FinishSpec& spec, const OutputFinish& p, int64_t token, int64_t head) const;
};

/// Holds the outputs of an operation.
struct FinishedOutputs {
  FinishedRows rows;
  TensorView out, scale;
};

/// Says what is wrong with a row of outputs and its scales. `row` is finished, and before it was rounded off by at most
/// `error` of its magnitudes.
std::string judge_finished(const FinishSpec& spec, const FinishedOutputs& outputs, const ExactRow& row, double error,
                           int64_t token, int64_t head);

}  // namespace mla::kit
