// SPDX-License-Identifier: Apache-2.0
// Puts the kit's problems into memory whose rows lie further apart than 32 bits count, of which only the rows take any.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

#include "core/fence.h"
#include "kit/kit.h"
#include "kit/tensors.h"
#include "mla/mla.h"

namespace mla {

/// Says where a cache's tokens go: the offset in a page grows by `skipped`, and a page has `more_tokens` more.
struct FarLayout {
  std::string_view name;
  int64_t gap = 0;          ///< elements between the rows of every tensor (the pages of a cache with a footer)
  int64_t slots = 0;        ///< of the pool, about: its pages in use are spread over them; 0: they are all
  int64_t more_tokens = 0;  ///< unused ones, before or behind a page's own
  int64_t skipped = 0;
};

// Offsets that 32 bits do not hold belong to: the second row of every tensor; the second page of a pool, whose page
// stride is small; the footer of a page; and the first token in use of a page.
inline constexpr FarLayout kFarStrides = {.name = "far strides", .gap = int64_t{1} << 32};
inline constexpr FarLayout kFarPages = {.name = "far pages", .slots = int64_t{1} << 33};
inline constexpr FarLayout kLongPages = {.name = "long pages", .more_tokens = int64_t{1} << 29};
inline constexpr FarLayout kPageEnds = {
    .name = "ends of long pages", .more_tokens = int64_t{1} << 29, .skipped = int64_t{1} << 29};
inline constexpr FarLayout kFarLayouts[] = {kFarStrides, kFarPages, kLongPages, kPageEnds};

/// Copies elements between two views of one shape.
inline void copy_elements(const TensorView& from, const TensorView& to, int32_t dim = 0, int64_t from_at = 0,
                          int64_t to_at = 0) {
  const auto d = static_cast<size_t>(dim);
  const auto element = static_cast<int64_t>(size_of(from.dtype));
  const bool run = dim + 1 == from.ndim && from.stride[d] == 1 && to.stride[d] == 1;
  if (run || dim == from.ndim) {
    std::memcpy(static_cast<std::byte*>(to.data) + to_at * element,
                static_cast<const std::byte*>(from.data) + from_at * element,
                static_cast<size_t>(element * (run ? from.shape[d] : 1)));
    return;
  }
  for (int64_t i = 0; i < from.shape[d]; ++i)
    copy_elements(from, to, dim + 1, from_at + i * from.stride[d], to_at + i * to.stride[d]);
}

/// Moves the tensors of one operation's parameters; every copy's rows are those of the tensor that the case holds.
class FarMemory {
 public:
  explicit FarMemory(const FarLayout& layout) : layout_(layout) {}

  /// Moves the rows of a tensor that is no cache, `gap` further apart; with `inner` the elements of the last dimension,
  /// too.
  void move_rows(TensorView& view, bool inner) {
    if (!view.given() || (view.ndim < 2 && !inner)) return;
    TensorView far = view;
    int64_t gap = layout_.gap;
    for (int32_t d = view.ndim - (inner ? 1 : 2); d >= 0; --d) {
      far.stride[static_cast<size_t>(d)] += gap;
      gap *= view.shape[static_cast<size_t>(d)];
    }
    far.data = allocate(far);
    copy(view, far);
    view = far;
  }

  /// Moves a cache. Where the layout has `slots`, its pages are then `pages_apart_` apart, so that lists of pages and
  /// slots must be renumbered.
  template <class AnyCache>
  void move_cache(AnyCache& cache, int64_t max_slots) {
    const TensorView& rows = first_rows(cache);
    page_size_ = rows.ndim == 3 ? rows.shape[1] : cache.page_size;
    num_pages_ = rows.shape[0];
    const int64_t far_size = page_size_ + layout_.more_tokens;
    const int64_t slots = std::min({layout_.slots, max_slots, page_size_ * INT32_MAX});
    pages_apart_ = std::max<int64_t>(slots / (far_size * num_pages_), 1);
    kit::for_each_tensor(cache, [&](TensorView& view) {
      if (view.ndim == 3) move_token_rows(view);
      if (view.ndim == 2) move_footer_pages(view, footer_of(cache));
    });
    if (cache.page_size != 0) cache.page_size = static_cast<int32_t>(far_size);
  }

  /// Renumbers a list of pages, of slots, or of tokens in the only page of a request, for the cache moved last. What is
  /// none remains none.
  void renumber_pages(TensorView& list) {
    renumber<int32_t>(list, [this](int64_t page) { return is_in(page, num_pages_) ? page * pages_apart_ : page; });
  }
  template <class Slot>
  void renumber_slots(TensorView& list) {
    renumber<Slot>(list, [this](int64_t slot) {
      if (!is_in(slot, num_pages_ * page_size_)) return slot < 0 ? slot : INT32_MAX;
      return slot / page_size_ * pages_apart_ * (page_size_ + layout_.more_tokens) + far_offset(slot % page_size_);
    });
  }
  void renumber_tokens(TensorView& list) {
    renumber<int32_t>(list, [this](int64_t token) { return far_offset(token); });
  }
  void renumber(PageTable& pages) {
    renumber_pages(pages.kv_indices);
    renumber_pages(pages.block_table);
    renumber_tokens(pages.kv_len);
  }

  /// Returns whether the tensor was moved already.
  bool holds(const TensorView& view) const {
    return std::any_of(memory_.begin(), memory_.end(),
                       [&](const auto& memory) { return static_cast<void*>(memory->data()) == view.data; });
  }

  /// Copies all tensors back.
  void fetch() const {
    for (const Copy& copy : copies_) copy_elements(copy.far, copy.near);
  }

 private:
  struct Copy {
    TensorView near, far;
  };
  /// Holds the bytes of a token's row and of its scales in a page with a footer.
  struct Footer {
    int64_t row, scales;
  };

  static const TensorView& first_rows(const KvCache& cache) { return cache.kv.given() ? cache.kv : cache.ckv; }
  static const TensorView& first_rows(const IndexerCache& cache) { return cache.kv; }
  static Footer footer_of(const KvCache& cache) {
    const KvLayout layout = kv_layout(cache.format);
    return {layout.row_bytes, layout.scale_bytes_per_token};
  }
  static Footer footer_of(const IndexerCache& cache) {
    const IndexerLayout layout = indexer_layout(cache.format);
    return {layout.key_bytes, layout.scale_bytes};
  }

  static bool is_in(int64_t number, int64_t end) { return number >= 0 && number < end; }
  int64_t far_offset(int64_t offset) const { return offset + layout_.skipped; }

  void move_token_rows(TensorView& view) {
    TensorView far = view;
    far.shape = {far_pages(), view.shape[1] + layout_.more_tokens, view.shape[2]};
    far.stride[1] += layout_.gap;
    far.stride[0] += view.shape[1] * layout_.gap + layout_.more_tokens * far.stride[1];
    far.data = allocate(far);
    copy(view, part_of(far, view, layout_.skipped * far.stride[1]));
    view = far;
  }

  void move_footer_pages(TensorView& view, const Footer& footer) {
    const int64_t more_bytes = layout_.more_tokens * (footer.row + footer.scales);
    TensorView far = view;
    far.shape = {far_pages(), view.shape[1] + more_bytes};
    far.stride[0] += layout_.gap + more_bytes;
    far.data = allocate(far);
    const auto copy_part = [&](int64_t behind, int64_t width) {  // bytes of each token before the part, and in it
      TensorView near = view;
      near.ndim = 3;
      near.shape = {num_pages_, page_size_, width};
      near.stride = {view.stride[0], width, 1};
      near.data = static_cast<std::byte*>(view.data) + page_size_ * behind;
      TensorView there = near;
      there.stride[0] = far.stride[0];
      there.data = static_cast<std::byte*>(far.data) + (page_size_ + layout_.more_tokens) * behind;
      copy(near, part_of(there, near, layout_.skipped * width));
    };
    copy_part(0, footer.row);
    copy_part(footer.row, footer.scales);
    view = far;
  }

  /// Returns the tokens of `near` in a far cache, `skipped` elements behind the beginnings of their pages.
  TensorView part_of(TensorView far, const TensorView& near, int64_t skipped) const {
    far.shape = near.shape;
    far.stride[0] *= pages_apart_;
    far.data = static_cast<std::byte*>(far.data) + skipped * static_cast<int64_t>(size_of(far.dtype));
    return far;
  }

  int64_t far_pages() const { return (num_pages_ - 1) * pages_apart_ + 1; }

  std::byte* allocate(const TensorView& view) {
    int64_t elements = 1;
    for (size_t d = 0; d < static_cast<size_t>(view.ndim); ++d) elements += (view.shape[d] - 1) * view.stride[d];
    // Aligned as the kit's buffers are, for kernels choose their way by it.
    const size_t bytes = round_up(static_cast<size_t>(elements) * size_of(view.dtype), 64);
    return memory_.emplace_back(std::make_unique<FencedMemory>(bytes))->data();
  }

  void copy(const TensorView& near, const TensorView& far) {
    ASSERT_NE(far.data, nullptr) << "the system does not map memory without reserving it";
    copy_elements(near, far);
    copies_.push_back({near, far});
  }

  template <class Number, class F>
  void renumber(TensorView& list, const F& f) {
    if (!list.given()) return;
    const auto count = static_cast<size_t>(list.numel());
    TensorView to = list;
    for (int32_t d = list.ndim - 1, stride = 1; d >= 0; --d) {
      to.stride[static_cast<size_t>(d)] = stride;
      stride *= static_cast<int32_t>(list.shape[static_cast<size_t>(d)]);
    }
    const kit::Buffer& numbers = lists_.emplace_back(count * sizeof(Number));
    to.data = numbers.data();
    copy_elements(list, to);
    for (size_t i = 0; i < count; ++i) numbers.as<Number>()[i] = static_cast<Number>(f(numbers.as<Number>()[i]));
    list = to;
  }

  FarLayout layout_;
  int64_t page_size_ = 0, num_pages_ = 0, pages_apart_ = 1;  // of the cache moved last
  std::vector<std::unique_ptr<FencedMemory>> memory_;
  std::vector<kit::Buffer> lists_;
  std::vector<Copy> copies_;
};

}  // namespace mla
