// SPDX-License-Identifier: Apache-2.0
// Makes key blocks of a latent cache, whatever its format, from rows that someone else finds: a page table or a list of
// slots.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/args.h"
#include "cpu/attention.h"

namespace mla::cpu {

/// Rows of one cache, block by block. Pairs read 16-bit rows as they lie; all other rows are decoded to bf16, or
/// converted into slabs, once per block. Either way the rows that come next are prefetched, since the hardware cannot
/// follow a page table.
///
/// A row is known by its parts' addresses. Those of ckv lead; a part with the same strides lies at a fixed distance,
/// one without strides is shared by all, and any other has a list of its own.
class KeyStream {
 public:
  KeyStream(const core::Cache& cache, Tiles& tiles);

  /// The next block; false if there is none. `rows.list(stream, entry, room)` lists at most `room` further rows from
  /// entry `entry` on and says how many.
  template <class Rows>
  bool next(Rows& rows, KeyBlock& block) {
    drop(block.num_keys);
    listed_ += rows.list(*this, listed_, tiles_.shape().key_block + ahead_ - listed_);
    if (listed_ == 0) return false;
    make_block(block);
    return true;
  }

  /// Enters the row (page, offset).
  void enter(int32_t entry, int64_t page, int64_t offset) {
    for (int32_t i = 0; i < num_lists_; ++i) tiles_.rows(i)[entry] = planes_[i].row(page, offset);
  }
  /// Enters rows (page, offset) ... (page, offset + count - 1).
  void enter(int32_t entry, int64_t page, int64_t offset, int32_t count);

 private:
  static constexpr int32_t kMaxLists = 3;     // ckv, kpe, scales
  static constexpr int32_t kDecodedList = 3;  // rows of bf16
  static constexpr int32_t kTilesAhead = 4;

  /// Where a part of a row lies.
  struct Part {
    int32_t list = -1;                  // its list, or
    const std::byte* shared = nullptr;  // the same for all rows, or
    int64_t distance = 0;               // behind ckv
  };

  Part add_part(const core::Plane& plane);
  const std::byte* find(const Part& part, int32_t key) const;
  void drop(int32_t count);
  void make_block(KeyBlock& block);
  void decode(int32_t count);
  void convert(int32_t list, DType dtype, int32_t width, KeyBlock& block);

  const core::Cache& cache_;
  Tiles& tiles_;
  DType dtype_;  // of the rows to be multiplied
  bool decodes_;
  bool in_place_;
  int32_t ahead_;       // rows listed beyond a block
  int32_t listed_ = 0;  // rows in the lists, the block's first
  int32_t num_lists_ = 1;
  core::Plane planes_[kMaxLists];
  int32_t bytes_[kMaxLists] = {};  // of a row's part, to be prefetched
  Part kpe_, scales_;
};

}  // namespace mla::cpu
