// SPDX-License-Identifier: Apache-2.0
// Keeps what the checks of a replay found.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mla::cli::replay {

/// This is the largest relative error that is accepted: the l2 norm of the difference of one head's output over the
/// norm of the output. A rounding to bf16 is a relative error u of at most 2^-8. The two ways differ in about six of
/// them: keys against absorbed queries (whose scores have a standard deviation near 1), values against latent outputs,
/// and each side's probabilities. They are independent, so 4u leaves a wide margin (near 1.2u is usual), while an
/// output made of the wrong tokens is off by about 1.
inline constexpr double kTolerance = 0x1p-6;

/// Returns ||a - b|| / ||b|| over `count` values, or infinity if a value is not finite.
double relative_error(const float* a, const float* b, int64_t count);

struct CheckLog {
  int64_t num_checks = 0;
  double worst_other_way = 0.0;       ///< against the same attention computed another way
  double worst_reference = 0.0;       ///< against the float64 reference
  int64_t num_rows = 0;               ///< cached rows and keys that were compared with the activations
  double worst_row = 0.0;             ///< the largest of their errors, as a share of the tolerance
  int64_t num_queries = 0;            ///< heads' queries that were compared with the activations
  double worst_query = 0.0;           ///< as worst_row
  int64_t num_outputs = 0;            ///< heads' finished outputs that were compared with attention's
  double worst_output = 0.0;          ///< as worst_row
  std::vector<std::string> failures;  ///< one sentence for each comparison that failed; the first ten

  bool failed() const { return !failures.empty(); }
  /// Takes note of the error of `what` against `against`; an error beyond the tolerance is a failure. `worst`, one of
  /// the two above, is raised to the error.
  void note(double error, double& worst, const std::string& what, const char* against);
  /// Does the same for a cached row or key.
  void note_row(double error, double tolerance, const std::string& what);
  /// Do the same for the queries, or the finished outputs, of so many heads of a token: error is the largest of theirs.
  void note_queries(int64_t heads, double error, double tolerance, const std::string& what);
  void note_outputs(int64_t heads, double error, double tolerance, const std::string& what);
  void fail(std::string sentence);

 private:
  void note_share(double error, double tolerance, double& worst, const std::string& what, const char* source);
};

}  // namespace mla::cli::replay
