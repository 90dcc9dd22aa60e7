// SPDX-License-Identifier: Apache-2.0
// Makes key blocks of a latent cache of any format, from rows that a page table or a list of slots gives.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/args.h"
#include "cpu/attention.h"

namespace mla::cpu {

/// Gives the rows of one cache, key block by key block. Kernels of pairs read 16-bit rows where they lie, but those of
/// AMX only where whole tiles of them are equally spaced; the others are copied. Rows that are not 16-bit are decoded
/// to bf16, or converted into slabs, once per block. In all cases the next rows are prefetched, since the hardware
/// cannot follow a page table.
///
/// A row is given by the addresses of its parts (ckv, kpe, scales). The addresses of ckv are listed. Another part with
/// the same strides lies at a fixed distance from ckv, a part without strides is shared by all rows, and any other part
/// has a list of its own.
class KeyStream {
 public:
  KeyStream(const core::Cache& cache, Tiles& tiles);

  /// Makes the next block; returns false if there is none. `rows.list(stream, entry, room)` must list at most `room`
  /// further rows from entry `entry` on, and return how many.
  template <class Rows>
  bool next(Rows& rows, KeyBlock& block) {
    drop(block.num_keys);
    listed_ += rows.list(*this, listed_, tiles_.shape().key_block + ahead_ - listed_);
    if (listed_ == 0) return false;
    make_block(block);
    return true;
  }

  /// Lists the row (page, offset) in entry `entry`.
  void enter(int32_t entry, int64_t page, int64_t offset) {
    for (int32_t i = 0; i < num_lists_; ++i) tiles_.rows(i)[entry] = planes_[i].row(page, offset);
  }
  /// Lists rows (page, offset) ... (page, offset + count - 1) from entry `entry` on.
  void enter(int32_t entry, int64_t page, int64_t offset, int32_t count);

 private:
  static constexpr int32_t kMaxLists = 3;      // lists of ckv, kpe and scales
  static constexpr int32_t kDecodedList = 3;   // the list of decoded rows, or of those in whole tiles
  static constexpr int32_t kTiledKpeList = 4;  // the list of kpe in whole tiles
  static constexpr int32_t kValueList = 5;     // rows of values beside those of whole tiles
  static constexpr int32_t kTilesAhead = 4;    // key tiles (32 keys) that are listed and prefetched ahead

  /// Says where a part of a row lies.
  struct Part {
    int32_t list = -1;                  // its list; -1 if it has none
    const std::byte* shared = nullptr;  // its address, if it is the same for all rows
    int64_t distance = 0;               // bytes from ckv, in the other cases
  };

  Part add_part(const core::Plane& plane);
  const std::byte* find(const Part& part, int32_t key) const;
  void drop(int32_t count);
  void make_block(KeyBlock& block);
  void decode(int32_t count);
  void add_tiles(int32_t from, int32_t to, int32_t width, KeyBlock& block);
  void convert(int32_t list, DType dtype, int32_t width, KeyBlock& block);

  const core::Cache& cache_;
  Tiles& tiles_;
  DType dtype_;  // type of the rows that are multiplied
  bool decodes_;
  bool in_place_;
  int32_t ahead_;       // rows that are listed beyond a block
  int32_t listed_ = 0;  // rows in the lists; those of the block come first
  int32_t num_lists_ = 1;
  core::Plane planes_[kMaxLists];
  int32_t bytes_[kMaxLists] = {};  // bytes of a row to prefetch, for each list
  Part kpe_, scales_;
};

}  // namespace mla::cpu
