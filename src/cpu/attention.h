// SPDX-License-Identifier: Apache-2.0
// This file computes flash attention of one block of query rows over key blocks, for decode and prefill. The caller
// loads the keys and knows what the rows are.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "cpu/carver.h"
#include "cpu/tile_kernels.h"
#include "plan/schedule.h"

namespace mla::cpu {

/// Holds the sizes of the tiles of one worker.
struct TileShape {
  int32_t max_rows = 0;   // query rows of a task, a multiple of lanes
  int32_t key_block = 0;  // keys that are loaded and scored together
  int32_t d_qk = 0, d_v = 0;
  bool decoded_rows = false;     // room for a key block in bf16, for formats that need decoding
  bool decoded_queries = false;  // room for the queries in bf16
  bool copied_values = false;    // room for a key block of bf16 values
  bool key_lanes = false;        // KeyLaneKernels are used, which only keep P of one panel

  /// Chooses rows and keys by the head widths, so that the working set (docs/kernels/cpu.md) stays inside a 1 MiB L2.
  static TileShape choose(const TileKernels& kernels, int32_t d_qk, int32_t d_v);
  /// Does the same for many rows, with KeyLaneKernels where there are some.
  static TileShape choose_for_many_rows(const TileKernels& kernels, int32_t d_qk, int32_t d_v);
};

inline constexpr int32_t kMaxSegments = 40;

/// Holds one key block, ready to be multiplied.
struct KeyBlock {
  int32_t num_keys = 0;
  int32_t num_segments = 0;
  Segment segments[kMaxSegments];
  Prefetch prefetch;                  // rows of the next block
  bool far = false;                   // rows of keys and of queries lie far apart in memory
  const void** value_rows = nullptr;  // with pack 2: rows of bf16 values, which are packed one slab at a time
  uint32_t* value_slabs = nullptr;    // with pack 1: packed slabs, key_block * kSlab steps apart
  // These say, with pack 2, vectors, and where another block follows, what to prepare for it while this block's values
  // are multiplied. The copies may overwrite this block's rows, and the next block's value rows may be such copies.
  int32_t next_num_keys = 0;
  const void* const* next_value_rows = nullptr;
  std::array<RowCopy, 2> next_copies = {};
};

/// Says which keys a row does not see although they lie in its range.
class HiddenKeys {
 public:
  explicit HiddenKeys(int32_t first) : first_(first) {}
  HiddenKeys(const HiddenKeys&) = delete;
  HiddenKeys& operator=(const HiddenKeys&) = delete;

  int32_t first() const { return first_; }  // all earlier keys of a range are visible
  virtual bool hidden(int32_t row, int32_t key) const = 0;

 protected:
  ~HiddenKeys() = default;

 private:
  int32_t first_;
};

/// Says how dot products become scores: cap * tanh(scale * dot / cap) + slope of the row * (key's position - query's
/// position).
struct Scoring {
  float scale = 1.0F;
  float soft_cap = 0.0F;       // 0 for none
  bool biased = false;         // rows have slopes
  ContextParallel share = {};  // gives the keys' positions
  const HiddenKeys* hidden = nullptr;

  bool needs_only_scale() const { return soft_cap == 0.0F && !biased; }
};

/// Computes attention in one worker's tiles, which lie in its part of the workspace.
class Tiles {
 public:
  static size_t bytes(const TileKernels& kernels, const TileShape& shape);
  Tiles(const TileKernels& kernels, const TileShape& shape, std::byte* memory);

  /// Starts a block of rows that have seen no key yet.
  void begin(int32_t num_rows);
  /// Sets a row's query, in one or two parts, and the keys of the request that it sees.
  void set_row(int32_t row, const void* first_part, const void* second_part, schedule::KeyRange visible) {
    query_rows_[row] = first_part;
    query_rows_[shape_.max_rows + row] = second_part;
    visible_begin_[row] = visible.begin;
    visible_[row] = visible.end;
    least_visible_ = row == 0 ? visible.end : std::min(least_visible_, visible.end);
    most_begin_ = row == 0 ? visible.begin : std::max(most_begin_, visible.begin);
  }
  /// Sets a row's slope and position, which a biased Scoring needs.
  void set_bias(int32_t row, float slope, int32_t position) {
    slope_[row] = slope;
    position_[row] = position;
  }
  /// Prepares the queries; it must be called once all rows are set. The queries are of type `dtype`, in parts of
  /// `first_width` and of d_qk - first_width channels.
  void set_queries(DType dtype, int32_t first_width);

  /// Attends to keys first_key ... first_key + block.num_keys - 1.
  void attend(const KeyBlock& block, int32_t first_key, const Scoring& scoring);

  /// Returns a row's lse to base 2; -inf if the row saw no key.
  float lse(int32_t row) const;
  /// Returns a row's largest score in base 2.
  float largest_score(int32_t row) const { return max_[row]; }
  /// Writes `factor` times a row of the output; zeros if the row saw no key.
  void store(int32_t row, float factor, void* o, DType o_dtype) const;

  /// Packs a slab into key memory and appends the segment that reads it.
  void add_key_slab(const SlabSource& source, KeyBlock& block);

  // Loaders fill row lists (2 * key_block + kKeyTile entries) and key memory (key_block rows of d_qk elements).
  const void** rows(int32_t list) { return row_lists_ + list * (2 * shape_.key_block + kKeyTile); }
  uint32_t* keys() { return keys_; }
  uint32_t* copied_values() { return copied_values_; }  // [key_block][d_v], if the shape says so
  uint32_t* value_slabs() { return values_; }
  uint16_t* decoded_rows() { return decoded_rows_; }  // [key_block][d_qk]
  int64_t slab_stride() const { return static_cast<int64_t>(shape_.key_block / kernels_.pack) * kSlab; }
  const TileKernels& kernels() const { return kernels_; }
  const TileShape& shape() const { return shape_; }

  static constexpr int32_t kLoaderRowLists = 6;  // lists 0 ... 5 belong to the loader, the others to add_key_slab

 private:
  void carve(Carver& carver);
  bool saw_none(int32_t row) const { return first_ || sum_[row] == 0.0F; }
  bool whole_tiles() const { return kernels_.tile_keys > 1; }
  bool packs_slab_by_slab() const { return kernels_.pack == 2 && !whole_tiles(); }
  /// Returns whether rows that lie together are prefetched. Tiles with more than one panel multiply for so long that
  /// the processor's own prefetches suffice, and others hold them up; a single panel waits for DRAM without (by a
  /// third).
  bool reads_ahead() const { return !whole_tiles() || num_groups_ <= kPanelGroups; }
  int32_t panel_size() const { return kPanelGroups * kernels_.lanes; }
  int64_t s_row_stride() const { return shape_.key_block + (shape_.key_lanes ? kMaxLanes : kKeyTile); }
  int64_t s_stride() const { return kernels_.lanes * s_row_stride(); }
  int64_t p_stride() const { return int64_t{kernels_.lanes} * (shape_.key_block / kernels_.pack); }
  uint32_t* p_of(int32_t group) const { return p_ + (shape_.key_lanes ? group % kPanelGroups : group) * p_stride(); }
  int64_t o_stride() const { return int64_t{shape_.max_rows} * kSlab; }
  void place_keys(const KeyBlock& block, int32_t first_key, const Scoring& scoring);
  int32_t score_panel(const KeyBlock& block, int32_t first_key, const Scoring& scoring, int32_t group, float* s,
                      const Background& background, SoftmaxBlock* softmax);
  void attend_by_slabs(const KeyBlock& block, int32_t first_key, const Scoring& scoring);
  void attend_by_panels(const KeyBlock& block, int32_t first_key, const Scoring& scoring);
  void attend_by_key_lanes(const KeyBlock& block, int32_t first_key, const Scoring& scoring);
  SlabSource values_of(const KeyBlock& block) const;
  ValueProducts panel_products(int32_t group) const;
  void clear_unseen(int32_t group);
  void decode_queries(int32_t first_width);
  void hide(int32_t first_row, int32_t first_key, int32_t num_keys, const HiddenKeys* hidden, float* s) const;
  bool sees(int32_t row, int32_t key, const HiddenKeys* hidden) const;
  void pack_queries(int32_t group);
  Prefetch prefetch_beside(const KeyBlock& block, int32_t group) const;
  Prefetch prefetch_share(const KeyBlock& block, int32_t group) const;
  int32_t set_aside(const KeyBlock& block, int32_t first_key, const HiddenKeys* hidden);
  Background prepare(const KeyBlock& block, int32_t next_slab) const;
  void take_out(const KeyBlock& block, int32_t slab, int32_t count);
  void put_back(int32_t first_key, int32_t slab, int32_t count, const HiddenKeys* hidden, int32_t row_begin,
                int32_t row_end);
  float probability(int32_t row, int32_t key) const;
  void score(const KeyBlock& block, const Prefetch& prefetch, int32_t group, const int32_t* keys, int32_t count,
             float* s, const Background& background);

  struct Extent {
    int32_t least, most;
  };

  const TileKernels& kernels_;
  TileShape shape_;
  DType query_dtype_ = DType::kNone;
  int32_t query_width_[2] = {};
  int32_t num_rows_ = 0, num_groups_ = 0;
  int32_t least_visible_ = 0;  // some row does not see the keys from here on
  int32_t most_begin_ = 0;     // some row does not see the keys before here
  bool first_ = true;
  bool packed_ahead_ = false;          // the first slab of the next block's values is packed already
  int32_t value_buffer_ = 0;           // which of two buffers holds the current slab
  const void** query_rows_ = nullptr;  // [2][max_rows]
  uint32_t* q_ = nullptr;
  float* s_ = nullptr;
  uint32_t* p_ = nullptr;
  uint32_t* keys_ = nullptr;
  uint32_t* copied_values_ = nullptr;
  uint32_t* values_ = nullptr;
  float* o_ = nullptr;
  float* max_ = nullptr;   // of a row's scores in base 2
  float* base_ = nullptr;  // of the powers of two that sum_ and o_ sum
  float* sum_ = nullptr;
  float* alpha_ = nullptr;
  int32_t* visible_begin_ = nullptr;
  int32_t* visible_ = nullptr;       // end of a row's range
  Extent* group_visible_ = nullptr;  // least and largest end of the ranges of a group's rows
  float* slope_ = nullptr;
  int32_t* position_ = nullptr;
  int32_t* key_position_ = nullptr;
  uint16_t* decoded_rows_ = nullptr;
  uint16_t* decoded_queries_ = nullptr;
  int32_t* limit_ = nullptr;
  int32_t* key_steps_ = nullptr;
  const void** row_lists_ = nullptr;
  int32_t* aside_keys_ = nullptr;      // [key_block] keys that set_aside() found
  const void** aside_rows_ = nullptr;  // [key_block] their rows (pack 2)
  float* aside_values_ = nullptr;      // [key_block][kSlab] one slab of their values
  uint16_t* zero_row_ = nullptr;       // [d_v] zeros, in place of their values
};

/// Repeats the last of a list's num_rows rows until the list has `length` entries, and further until they fill whole
/// key tiles.
void pad_rows(const void** rows, int32_t num_rows, int32_t length);

}  // namespace mla::cpu
