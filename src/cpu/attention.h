// SPDX-License-Identifier: Apache-2.0
// Flash attention of one block of query rows over blocks of keys, for decode and prefill alike: who loads the keys and
// what the rows mean is the caller's business.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/args.h"
#include "cpu/tile_kernels.h"
#include "dispatch/implementation.h"

namespace mla::cpu {

/// Hands out 64-byte aligned pieces of a buffer; with a null base it only counts.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}

  template <class T>
  T* take(int64_t count) {
    auto* piece = base_ != nullptr ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return piece;
  }
  size_t used() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

/// Sizes of the tiles that one worker holds.
struct TileShape {
  int32_t max_rows = 0;   // query rows of a task, a multiple of lanes
  int32_t key_block = 0;  // keys loaded and scored together
  int32_t d_qk = 0, d_v = 0;

  /// Rows and keys by head widths: the working set (docs/kernels/cpu.md) must stay inside a 1 MiB L2.
  static TileShape choose(const TileKernels& kernels, int32_t d_qk, int32_t d_v);
};

inline constexpr int32_t kMaxSegments = 40;

/// One block of keys, ready to be multiplied.
struct KeyBlock {
  int32_t num_keys = 0;
  int32_t num_segments = 0;
  Segment segments[kMaxSegments];
  Prefetch prefetch;                  // what the next block needs
  const void** value_rows = nullptr;  // pack 2: rows of bf16 values, packed one slab at a time; or
  uint32_t* value_slabs = nullptr;    // slabs that are packed already, key_block * kSlab steps apart
  bool values_far = false;            // the scores did not read them
  // pack 2, where another block follows: what to get ready for it while this one is multiplied.
  int32_t next_num_keys = 0;
  const void* const* next_value_rows = nullptr;
  RowCopy next_keys = {};
};

/// One worker's tiles, in its part of the workspace.
class Tiles {
 public:
  static size_t bytes(const TileKernels& kernels, const TileShape& shape);
  Tiles(const TileKernels& kernels, const TileShape& shape, std::byte* memory);

  /// Starts a block of rows: no key seen.
  void begin(int32_t num_rows);
  /// A row's query, in one or two parts, and how many keys of the request it sees.
  void set_row(int32_t row, const void* first_part, const void* second_part, int32_t visible) {
    query_rows_[row] = first_part;
    query_rows_[shape_.max_rows + row] = second_part;
    visible_[row] = visible;
    least_visible_ = row == 0 ? visible : std::min(least_visible_, visible);
  }
  /// Packs the queries of all rows: parts of `first_width` and d_qk - first_width channels.
  void pack_queries(DType dtype, int32_t first_width);

  /// Attends to keys first_key ... first_key + block.num_keys - 1.
  void attend(const KeyBlock& block, int32_t first_key, float scale_log2);

  /// Writes row `row` of the output and returns its lse in base 2 (-inf: it saw no key, and o is 0).
  float finish(int32_t row, void* o, DType o_dtype) const;

  /// Packs a slab into key memory and appends the segment that reads it.
  void add_key_slab(const SlabSource& source, KeyBlock& block);

  // For loaders: row lists (2 * key_block + kKeyTile entries) and key memory (key_block rows of d_qk elements).
  // Pairs have two key memories, so that one block can be copied while another is in use.
  const void** rows(int32_t list) { return row_lists_ + list * (2 * shape_.key_block + kKeyTile); }
  uint32_t* keys(int32_t memory = 0) { return keys_ + memory * key_words(); }
  uint32_t* value_slabs() { return values_; }
  int64_t key_words() const { return static_cast<int64_t>(shape_.key_block) * shape_.d_qk / kernels_.pack; }
  int64_t slab_stride() const { return static_cast<int64_t>(shape_.key_block / kernels_.pack) * kSlab; }
  const TileKernels& kernels() const { return kernels_; }
  const TileShape& shape() const { return shape_; }

  static constexpr int32_t kLoaderRowLists = 2;  // lists 0 and 1 are the loader's, the others add_key_slab's

 private:
  void carve(Carver& carver);
  void score_groups(const KeyBlock& block, int32_t first_key, float scale_log2);
  void prefetch_queries(const void* const* rows, int32_t bytes) const;
  int32_t set_aside(const KeyBlock& block, int32_t first_key);
  Background prepare(const KeyBlock& block, int32_t next_slab) const;
  void take_out(const KeyBlock& block, int32_t slab, int32_t count);
  void put_back(int32_t first_key, int32_t slab, int32_t count);
  float probability(int32_t row, int32_t key) const;
  void score(const KeyBlock& block, const Prefetch& prefetch, int32_t group, const int32_t* keys, int32_t count);

  const TileKernels& kernels_;
  TileShape shape_;
  int32_t num_rows_ = 0, num_groups_ = 0;
  int32_t least_visible_ = 0;  // keys that every row sees
  bool first_ = true;
  bool packed_ahead_ = false;          // the first slab of the next block's values lies in
  int32_t value_buffer_ = 0;           // this one of two buffers
  const void** query_rows_ = nullptr;  // [2][max_rows]
  uint32_t* q_ = nullptr;
  float* s_ = nullptr;
  uint32_t* p_ = nullptr;
  uint32_t* keys_ = nullptr;
  uint32_t* values_ = nullptr;
  float* o_ = nullptr;
  float* m_ = nullptr;
  float* l_ = nullptr;
  float* alpha_ = nullptr;
  int32_t* visible_ = nullptr;
  int32_t* limit_ = nullptr;
  int32_t* key_steps_ = nullptr;
  const void** row_lists_ = nullptr;
  int32_t* aside_keys_ = nullptr;      // [key_block] keys of the block whose values are not all finite,
  const void** aside_rows_ = nullptr;  // [key_block] their rows (pack 2)
  float* aside_values_ = nullptr;      // [key_block][kSlab] and one slab of them
  uint16_t* zero_row_ = nullptr;       // [d_v], stands in for them
};

/// Repeats the last of a list's num_rows rows until it has `length` entries, and on until they fill whole key tiles.
void pad_rows(const void** rows, int32_t num_rows, int32_t length);

/// The rows of the tables of decode and prefill for one instruction set.
struct KernelSet {
  const TileKernels* pairs;  // for bf16 times bf16; null where the machine has no such instruction
  const TileKernels* floats;

  const TileKernels& pick(DType a, DType b) const {
    return pairs != nullptr && a == DType::kBF16 && b == DType::kBF16 ? *pairs : *floats;
  }
};

size_t decode_workspace_size(const KernelSet& set, const core::DecodeArgs& args, int32_t num_threads);
dispatch::PlanSummary plan_decode(const KernelSet& set, const core::DecodeArgs& args, int32_t num_threads,
                                  std::span<std::byte> workspace);
void run_decode(const KernelSet& set, const core::DecodeArgs& args, core::ThreadPool& pool,
                std::span<std::byte> workspace);

size_t prefill_workspace_size(const KernelSet& set, const core::PrefillArgs& args, int32_t num_threads);
dispatch::PlanSummary plan_prefill(const KernelSet& set, const core::PrefillArgs& args, int32_t num_threads,
                                   std::span<std::byte> workspace);
void run_prefill(const KernelSet& set, const core::PrefillArgs& args, core::ThreadPool& pool,
                 std::span<std::byte> workspace);

void run_merge_states(const KernelSet& set, const core::MergeStatesArgs& args, core::ThreadPool& pool);
void run_append(const KernelSet& set, const core::AppendArgs& args, core::ThreadPool& pool);
void run_gather(const KernelSet& set, const core::GatherArgs& args, core::ThreadPool& pool);

}  // namespace mla::cpu
