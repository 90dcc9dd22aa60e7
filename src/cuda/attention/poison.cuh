// SPDX-License-Identifier: Apache-2.0
// A key that some query rows see and others do not may hold infinities or NaN. In the rows that do not see it, P is 0,
// but 0 times infinity or NaN is NaN, so that the key would spoil their outputs: it is called *poison*.
//
// The warp that hides a key from a row marks the key if their score is not finite. Before the values of a step are
// multiplied, every warp that multiplies them clears the channels of marked keys that are not finite, among the
// channels that it multiplies itself. Once all these warps have seen the marks, one of them resets the marks. Rows that
// do see the key are not repaired by this: their score is infinite or NaN, so that their outputs are NaN all the same.
// Marks are rare: a step without any costs at most one test of a byte.
#pragma once

#include <cstdint>

#include "cuda/ptx/ptx.h"
#include "cuda/tile/element16.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Holds the marks of one step's keys, in shared memory.
template <int kKeys>
class PoisonMarks {
 public:
  static constexpr int kBytes = kKeys + 1;  // a byte for each key, then one that is set if any of them is

  MLA_DEVICE explicit PoisonMarks(uint8_t* marks) : marks_(marks) {}

  MLA_DEVICE void mark(int key) const { marks_[key] = marks_[kKeys] = 1; }
  MLA_DEVICE bool is_marked(int key) const { return marks_[key] != 0; }
  MLA_DEVICE bool any() const { return marks_[kKeys] != 0; }
  /// Thread `first` of `count` threads calls this; all of them together clear all marks.
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

/// Returns a word that has the top bits of those bytes of `e4m3` that are NaN. e4m3 has no infinity.
MLA_DEVICE uint32_t nan_bits(uint32_t e4m3) { return ((e4m3 & 0x7F7F7F7FU) + 0x01010101U) & 0x80808080U; }

/// Returns a word whose bytes are 0xFF where those of `e4m3` are NaN, else 0.
MLA_DEVICE uint32_t nan_bytes(uint32_t e4m3) {
  const uint32_t top_bits = nan_bits(e4m3);
  return top_bits | (top_bits - (top_bits >> 7));
}

/// All lanes of a warp call this. It overwrites those of `channels` 16-bit values that are not finite with 0.
/// address(c) returns where value c lies.
template <DType kType, class Address>
MLA_DEVICE void silence_values(int channels, const Address& address) {
  for (int c = ptx::lane(); c < channels; c += kWarpSize) {
    const ptx::SharedAddress at = address(c);
    if (!both_finite<kType>(ptx::load_shared<uint16_t>(at))) ptx::store_shared(at, uint16_t{0});
  }
}

}  // namespace mla::MLA_CUDA_NAMESPACE
