// SPDX-License-Identifier: Apache-2.0
// Compares the outputs of a workload with the reference: all of them where that is cheap, else a sample of requests,
// queries and heads.
#pragma once

#include <optional>
#include <string>

#include "mla/bench/workload.h"

namespace mla::bench {

struct RefcheckResult {
  double error = 0;  ///< largest |o - reference| relative to the row's largest |reference|; 0 where bits must agree
  /// Where compute is fp8: the same against the reference that rounds nothing to e4m3, compute = default.
  std::optional<double> method_error;
  std::string failure;  ///< empty if the error is within the tolerance of the kit
  int64_t rows = 0;     ///< rows compared
};

/// Returns how far the outputs are from the reference. The workload must have run, and nothing may have touched its
/// outputs since. Throws UsageError if the reference refuses the problem.
RefcheckResult refcheck(const Workload& workload);

}  // namespace mla::bench
