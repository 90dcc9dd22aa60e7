// SPDX-License-Identifier: Apache-2.0
#include "core/overlap.h"

#include <algorithm>
#include <array>
#include <cstddef>

namespace mla::core {
namespace {

/// Bounds the addresses of real memory from above, so that sums of a few of them fit 64 bits.
constexpr uint64_t kAddressLimit = uint64_t{1} << 60;

/// Limits the number of candidates that are looked at. Strides that are multiples of one another need at most two per
/// dimension.
constexpr int kMaxSteps = 256;

/// Stands for the numbers step * t for all t from `least` to `most`.
struct Term {
  int64_t step = 1;
  int64_t least = 0, most = 0;

  int64_t lowest() const { return step * least; }
  int64_t highest() const { return step * most; }
};

constexpr int64_t div_floor(int64_t value, int64_t by) { return value / by - (value % by < 0 ? 1 : 0); }
constexpr int64_t div_ceil(int64_t value, int64_t by) { return -div_floor(-value, by); }

/// Holds the differences in bytes between an address of one view and an address of the other, without the distance of
/// their lowest addresses. Each is a sum of terms, one for each dimension of both views.
class Differences {
 public:
  Differences(const TensorView& a, const TensorView& b) {
    add({.step = 1, .least = -last_byte(b), .most = last_byte(a)});
    add_dims(a, 1);
    add_dims(b, -1);
    merge();
    for (int i = 0; i < count_; ++i) {
      lowest_below_[at(i + 1)] = lowest_below_[at(i)] + terms_[at(i)].lowest();
      highest_below_[at(i + 1)] = highest_below_[at(i)] + terms_[at(i)].highest();
    }
  }

  /// Returns whether the sum can be `wanted`; false if this is not known after kMaxSteps steps.
  bool can_be(int64_t wanted) { return can_be(wanted, count_); }

 private:
  static constexpr size_t at(int i) { return static_cast<size_t>(i); }
  static int64_t last_byte(const TensorView& view) { return static_cast<int64_t>(size_of(view.dtype)) - 1; }

  /// Adds a term, so that terms stay sorted by step.
  void add(const Term& term) {
    int i = count_++;
    for (; i > 0 && terms_[at(i - 1)].step > term.step; --i) terms_[at(i)] = terms_[at(i - 1)];
    terms_[at(i)] = term;
  }

  void add_dims(const TensorView& view, int sign) {
    for (int d = 0; d < view.ndim; ++d) {
      const int64_t last = view.shape[at(d)] - 1;
      if (last == 0 || view.stride[at(d)] == 0) continue;
      const int64_t step = std::abs(view.stride[at(d)]) * static_cast<int64_t>(size_of(view.dtype));
      add({.step = step, .least = sign < 0 ? -last : 0, .most = sign < 0 ? 0 : last});
    }
  }

  /// Replaces two terms by one where the larger step is a multiple of the smaller and the smaller term fills the gaps
  /// between the larger steps.
  void merge() {
    int merged = 0;
    for (int i = 1; i < count_; ++i) {
      Term& small = terms_[at(merged)];
      const Term large = terms_[at(i)];
      const int64_t ratio = large.step / small.step;
      if (large.step % small.step == 0 && ratio <= small.most - small.least + 1) {
        small.least += ratio * large.least;
        small.most += ratio * large.most;
      } else {
        terms_[at(++merged)] = large;
      }
    }
    count_ = merged + 1;
  }

  /// Returns whether the first `count` terms can sum to `wanted`, by trying every value of the largest term from which
  /// the smaller ones can reach it.
  bool can_be(int64_t wanted, int count) {
    if (count == 0) return wanted == 0;
    const Term& term = terms_[at(count - 1)];
    const int64_t first = std::max(term.least, div_ceil(wanted - highest_below_[at(count - 1)], term.step));
    const int64_t last = std::min(term.most, div_floor(wanted - lowest_below_[at(count - 1)], term.step));
    for (int64_t t = first; t <= last && steps_left_ > 0; ++t) {
      --steps_left_;
      if (can_be(wanted - term.step * t, count - 1)) return true;
    }
    return false;
  }

  static constexpr size_t kMaxTerms = size_t{2} * kMaxDims + 1;
  std::array<Term, kMaxTerms> terms_;
  // Least and greatest sums of the first i terms.
  std::array<int64_t, kMaxTerms + 1> lowest_below_ = {}, highest_below_ = {};
  int count_ = 0;
  int steps_left_ = kMaxSteps;
};

}  // namespace

ByteRange byte_range(const TensorView& view) {
  const auto element = static_cast<int64_t>(size_of(view.dtype));
  int64_t below = 0;
  int64_t above = element;
  for (int d = 0; d < view.ndim; ++d) {
    const auto dim = static_cast<size_t>(d);
    const int64_t reach = (view.shape[dim] - 1) * view.stride[dim] * element;
    (reach < 0 ? below : above) += reach;
  }
  const auto base = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(view.data));
  const auto before = static_cast<uint64_t>(-below);
  const auto behind = static_cast<uint64_t>(above);
  if (base > kAddressLimit || before > base || behind > kAddressLimit - base) return {};
  return {.begin = base - before, .end = base + behind};
}

bool overlap(const TensorView& a, const TensorView& b) {
  const ByteRange of_a = byte_range(a);
  const ByteRange of_b = byte_range(b);
  return common_bytes(of_a, of_b) > 0 &&
         Differences(a, b).can_be(static_cast<int64_t>(of_b.begin) - static_cast<int64_t>(of_a.begin));
}

}  // namespace mla::core
