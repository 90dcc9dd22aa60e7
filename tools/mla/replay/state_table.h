// SPDX-License-Identifier: Apache-2.0
// Says where a compressor keeps its state: what the next latents need of the tokens that are there already.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "mla/mla.h"
#include "mla/replay/compressor_shape.h"
#include "mla/replay/operations.h"

namespace mla::cli::replay {

/// Names the tokens `start` ... `start + count - 1` of a request, all of them in the cache.
struct TokenRange {
  std::span<const int32_t> pages;  ///< of the whole request
  int32_t start = 0;
  int32_t count = 0;
  int32_t seat = 0;  ///< the request's number among the running ones
};

/// Makes the state tables of compress. Without overlap every seat has one block, a ring. With overlap the first group
/// behind a shared prefix needs tokens of the prefix, so that state has to be shared as pages are: every page keeps the
/// state of its last tokens (its tail), and every seat has spare blocks for the newest tokens.
class StateTable {
 public:
  /// `drafts` may be rejected of a request's last tokens.
  StateTable(const CompressorShape& shape, int32_t page_size, int32_t num_pages, int32_t seats, int32_t drafts);

  /// Returns how many tokens a block holds. With overlap a page must be a multiple of it.
  static int32_t block_size(const CompressorShape& shape, int32_t drafts);
  /// Returns how many blocks every page, and every seat, has.
  static int32_t blocks_per_page(const CompressorShape& shape) { return shape.overlap ? 1 : 0; }
  static int32_t blocks_per_seat(const CompressorShape& shape) { return shape.overlap ? kSpares : 1; }

  int32_t block_size() const { return block_size_; }
  int64_t num_blocks() const { return num_blocks_; }
  /// Makes the table of a call that computes these ranges.
  void update(std::span<const TokenRange> ranges);
  /// Returns it, [B, C]; it is valid until the next update.
  TensorView table() const;

 private:
  static constexpr int32_t kSpares = 4;  // two that a call reads, and two for its newest tokens
  /// Says which of its spares a seat uses for a block of its request.
  struct Spare {
    int32_t block = 0;
    int32_t place = 0;
  };
  bool is_tail(int32_t block) const { return (block + 1) * block_size_ % page_size_ == 0; }
  int32_t oldest_read(const TokenRange& range) const;
  int32_t oldest_kept(const TokenRange& range) const;
  void assign_spares(const TokenRange& range);
  int32_t block_of(const TokenRange& range, int32_t block) const;

  int32_t span_, page_size_, num_pages_, block_size_;
  bool overlap_;
  int64_t num_blocks_;
  std::vector<std::vector<Spare>> spares_;  // by seat
  std::vector<int32_t> table_;
  int64_t columns_ = 1;
};

}  // namespace mla::cli::replay
