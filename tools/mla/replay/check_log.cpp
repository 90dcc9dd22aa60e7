// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/check_log.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace mla::cli::replay {

double relative_error(const float* a, const float* b, int64_t count) {
  double difference = 0.0, norm = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    const double x = a[i], y = b[i];
    difference += (x - y) * (x - y);
    norm += y * y;
  }
  if (!std::isfinite(difference) || !std::isfinite(norm)) return std::numeric_limits<double>::infinity();
  if (difference == 0.0) return 0.0;
  return std::sqrt(difference / norm);
}

void CheckLog::note(double error, double& worst, const std::string& what, const char* against) {
  worst = std::max(worst, error);
  if (error > kTolerance)
    fail(fmt::format("{}: expected an error of at most {:.4f} against {}, got {:.4g}", what, kTolerance, against,
                     error));
}

void CheckLog::note_row(double error, double tolerance, const std::string& what) {
  ++num_rows;
  note_share(error, tolerance, worst_row, what, "its activations come to");
}

void CheckLog::note_queries(int64_t heads, double error, double tolerance, const std::string& what) {
  num_queries += heads;
  note_share(error, tolerance, worst_query, what, "its activations come to");
}

void CheckLog::note_outputs(int64_t heads, double error, double tolerance, const std::string& what) {
  num_outputs += heads;
  note_share(error, tolerance, worst_output, what, "attention's output comes to");
}

void CheckLog::note_share(double error, double tolerance, double& worst, const std::string& what, const char* source) {
  worst = std::max(worst, error / tolerance);
  if (!(error <= tolerance))
    fail(fmt::format("{}: expected at most {:.4f} from what {}, rounding aside, got {:.4g}", what, tolerance, source,
                     error));
}

void CheckLog::fail(std::string sentence) {
  constexpr size_t kMost = 10;
  if (failures.size() < kMost) failures.push_back(std::move(sentence));
}

}  // namespace mla::cli::replay
