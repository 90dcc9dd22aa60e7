// SPDX-License-Identifier: Apache-2.0
// Writes the text of a spec, and sums over its requests.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kit/specs.h"

namespace mla::kit {

std::string text(bool value);
std::string text(int32_t value);
std::string text(int64_t value);
std::string text(uint64_t value);
std::string text(double value);
std::string text(float value);
std::string text(DType value);
std::string text(CacheFormat value);
std::string text(IndexerFormat value);
std::string text(LseBase value);
std::string text(Compute value);
std::string text(Tree value);
std::string text(LengthForm value);
std::string text(const ContextParallel& value);  ///< "rank/world/interleave"
std::string text(const std::vector<int32_t>& values);

/// Collects "name=value" of a spec's fields, those of its bases too; `knob` leaves out what is at its default.
template <class Spec>
class Line {
 public:
  explicit Line(const Spec& spec) : spec_(spec) {}

  template <class Class, class T>
  Line& always(const char* name, T Class::*field) {
    return append(std::string(name).append("=").append(text(spec_.*field)));
  }
  template <class Class, class T>
  Line& knob(const char* name, T Class::*field) {
    return spec_.*field == usual_.*field ? *this : always(name, field);
  }
  Line& append(std::string_view part) {
    if (part.empty()) return *this;
    if (!line_.empty()) line_ += ' ';
    line_ += part;
    return *this;
  }
  std::string take() { return std::move(line_); }

 private:
  const Spec& spec_;
  const Spec usual_ = {};
  std::string line_;
};

std::string describe(const CacheSpec& spec);
std::string describe(const FinishSpec& spec);

/// Returns the bytes that finishing reads and writes beside the rows of outputs.
double bytes_beside_rows(const FinishSpec& spec, const FinishedRows& rows);

/// Returns the bytes of one token's row in the cache, its scales included.
double cache_row_bytes(const CacheSpec& spec);
inline double bytes_of(DType dtype) { return static_cast<double>(size_of(dtype)); }

template <class Spec>
int64_t total_queries(const Spec& spec) {
  int64_t total = 0;
  for (size_t request = 0; request < spec.kv_len.size(); ++request) total += spec.q_len_of(request);
  return total;
}

double total(const std::vector<int32_t>& values);

/// Returns how many query-key pairs of one head see each other: causal or not, within the window, on the rank.
template <class Spec>
double visible_pairs(const Spec& spec, bool causal, int32_t window_left = -1, const ContextParallel& share = {}) {
  double pairs = 0;
  for (size_t request = 0; request < spec.kv_len.size(); ++request) {
    const int64_t q_len = spec.q_len_of(request), kv_len = spec.kv_len[request];
    for (int64_t i = 0; i < q_len; ++i) {
      const int64_t position = kv_len - q_len + i;
      const int64_t end = causal ? position + 1 : kv_len;
      const int64_t begin = window_left < 0 ? 0 : std::max<int64_t>(position - window_left, 0);
      if (end > begin) pairs += static_cast<double>(local_length(share, end) - local_length(share, begin));
    }
  }
  return pairs;
}

}  // namespace mla::kit
