// SPDX-License-Identifier: Apache-2.0
// This file has the prefetches beside AMX's products, and shares of work that is done in steps. It is included like
// tile_unit-inl.h.
#pragma once

#include "cpu/block_parts-inl.h"

namespace mla::cpu::MLA_CPU_ISA {
namespace {

/// Returns how many steps each of `calls` calls must do.
template <class Work>
int32_t share(const Work& work, int32_t calls) {
  return (work.remaining() + calls - 1) / HWY_MAX(calls, 1);
}
template <class Work>
HWY_INLINE void some(Work& work, int32_t steps) {
  for (; steps > 0 && work.remaining() > 0; --steps) work.step();
}

/// Prefetches rows into L2 in the order in which scores read them: each call of `step` takes one line of 16 rows.
class TilePrefetcher {
 public:
  TilePrefetcher(const Prefetch& prefetch, int32_t num_keys)
      : prefetch_(prefetch), num_rows_(prefetch.lines[0] > 0 ? HWY_MIN(num_keys, prefetch.num_rows) : 0) {
    remaining_ = (num_rows_ + kTileRows - 1) / kTileRows * (prefetch.lines[0] + prefetch.lines[1]);
  }

  int32_t remaining() const { return remaining_; }

  HWY_INLINE void step() {
    constexpr int kIntoL2 = 2;
    const int32_t end = HWY_MIN(row_ + kTileRows, num_rows_);
    for (int32_t row = row_; row < end; ++row)
      __builtin_prefetch(static_cast<const char*>(prefetch_.rows[list_][row]) + 64 * line_, 0, kIntoL2);
    --remaining_;
    if (++line_ < prefetch_.lines[list_]) return;
    line_ = 0;
    list_ ^= prefetch_.lines[1] > 0;
    if (list_ == 0) row_ = end;
  }

 private:
  const Prefetch prefetch_;
  const int32_t num_rows_;
  int32_t remaining_, row_ = 0, list_ = 0, line_ = 0;
};

}  // namespace
}  // namespace mla::cpu::MLA_CPU_ISA
