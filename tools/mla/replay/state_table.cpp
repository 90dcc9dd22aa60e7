// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/state_table.h"

#include <algorithm>
#include <bit>

namespace mla::cli::replay {

StateTable::StateTable(const CompressorShape& shape, int32_t page_size, int32_t num_pages, int32_t seats,
                       int32_t drafts)
    : span_(shape.span()),
      page_size_(page_size),
      num_pages_(shape.overlap ? num_pages : 0),
      block_size_(block_size(shape, drafts)),
      overlap_(shape.overlap),
      num_blocks_(num_pages_ + int64_t{seats} * blocks_per_seat(shape)),
      spares_(static_cast<size_t>(seats)) {}

// A latent needs up to span - 1 tokens before its last one, of which drafts may have taken the place in a ring.
int32_t StateTable::block_size(const CompressorShape& shape, int32_t drafts) {
  const int32_t least = shape.span() - 1 + drafts;
  if (!shape.overlap) return std::max(least, 1);
  return static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(least)));
}

// Returns the first block that the range's call reads or writes.
int32_t StateTable::oldest_read(const TokenRange& range) const {
  return std::max(range.start - (span_ - 1), 0) / block_size_;
}

// Returns the first block that later calls may read. One block is as long as what they need, so this is the range's
// last block or the one before it.
int32_t StateTable::oldest_kept(const TokenRange& range) const {
  return std::max(range.start + range.count - block_size_, 0) / block_size_;
}

void StateTable::assign_spares(const TokenRange& range) {
  std::vector<Spare>& spares = spares_[static_cast<size_t>(range.seat)];
  const int32_t last = (range.start + range.count - 1) / block_size_;
  // Blocks with nothing but rejected drafts, or with tokens of the request that sat there before, begin behind the
  // tokens that are there: a new request begins with a page, and reads no more than the tail in front of it.
  std::erase_if(spares, [&](const Spare& one) {
    return one.block < oldest_read(range) || one.block * block_size_ >= range.start;
  });
  for (int32_t block = oldest_kept(range); block <= last; ++block) {
    if (is_tail(block) || std::ranges::find(spares, block, &Spare::block) != spares.end()) continue;
    int32_t place = 0;
    while (std::ranges::find(spares, place, &Spare::place) != spares.end()) ++place;
    spares.push_back({.block = block, .place = place});
  }
}

// Returns where a block of the request lies. Between what is read and what is kept lies nothing but tails.
int32_t StateTable::block_of(const TokenRange& range, int32_t block) const {
  if (is_tail(block)) return range.pages[static_cast<size_t>(block * block_size_ / page_size_)];
  const std::vector<Spare>& spares = spares_[static_cast<size_t>(range.seat)];
  const auto at = std::ranges::find(spares, block, &Spare::block);
  return at == spares.end() ? -1 : num_pages_ + range.seat * kSpares + at->place;
}

void StateTable::update(std::span<const TokenRange> ranges) {
  columns_ = 1;
  table_.clear();
  if (!overlap_) {
    for (const TokenRange& range : ranges) table_.push_back(range.seat);
    return;
  }
  for (const TokenRange& range : ranges) {
    const int32_t last = (range.start + range.count - 1) / block_size_;
    columns_ = std::max<int64_t>(columns_, last - oldest_read(range) + 1);
  }
  table_.assign(ranges.size() * static_cast<size_t>(columns_), -1);
  for (size_t i = 0; i < ranges.size(); ++i) {
    assign_spares(ranges[i]);
    const int32_t last = (ranges[i].start + ranges[i].count - 1) / block_size_;
    for (int32_t block = oldest_read(ranges[i]); block <= last; ++block)
      table_[i * static_cast<size_t>(columns_) + static_cast<size_t>(block % columns_)] = block_of(ranges[i], block);
  }
}

TensorView StateTable::table() const {
  return contiguous(table_.data(), DType::kI32, {std::ssize(table_) / columns_, columns_});
}

}  // namespace mla::cli::replay
