// SPDX-License-Identifier: Apache-2.0
// Keys that some queries see and others do not may hold infinities or NaN, which a probability of 0 does not silence.
//
// Whoever hides a key from a row and finds its product not finite marks the key. Before a step's values are multiplied,
// every warp that multiplies them clears what is not finite in its own channels of marked keys, and once all have seen
// the marks one of them resets these. Who sees such a key has an infinite score or NaN, and so NaN in its outputs all
// the same. Marks are rare: a step without any costs a look at one byte.
#pragma once

#include <cstdint>

#include "cuda/ptx/ptx.h"
#include "cuda/tile/element16.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// The marks of one step's keys, in shared memory.
template <int kKeys>
class PoisonMarks {
 public:
  static constexpr int kBytes = kKeys + 1;  // one for each key, then one for any

  MLA_DEVICE explicit PoisonMarks(uint8_t* marks) : marks_(marks) {}

  MLA_DEVICE void mark(int key) const { marks_[key] = marks_[kKeys] = 1; }
  MLA_DEVICE bool any() const { return marks_[kKeys] != 0; }
  /// By the threads `first`, `first` + 1 ... of `count`.
  MLA_DEVICE void reset(int first, int count) const {
    for (int i = first; i < kBytes; i += count) marks_[i] = 0;
  }
  template <class F>
  MLA_DEVICE void for_each_marked(const F& f) const {
    MLA_NO_UNROLL
    for (int key = 0; key < kKeys; ++key)
      if (marks_[key] != 0) f(key);
  }

 private:
  uint8_t* const marks_;
};

/// For a warp: zeros for those of `channels` 16-bit values that are not finite; address(c) is where value c lies.
template <DType kType, class Address>
MLA_DEVICE void silence_values(int channels, const Address& address) {
  for (int c = ptx::lane(); c < channels; c += kWarpSize) {
    const ptx::SharedAddress at = address(c);
    if (!both_finite<kType>(ptx::load_shared<uint16_t>(at))) ptx::store_shared(at, uint16_t{0});
  }
}

}  // namespace mla::MLA_CUDA_NAMESPACE
