// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>

namespace mla::cpu {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

int32_t round_up(int32_t a, int32_t b) { return (a + b - 1) / b * b; }

}  // namespace

TileShape TileShape::choose(const TileKernels& kernels, int32_t d_qk, int32_t d_v) {
  // Queries, P and outputs of all rows share a 1 MiB L2 with the keys; with more rows the keys are read less often. In
  // prefill of 1k tokens 256 rows reached 5 to 6 percent of the peak more than 128 or 176, and 3 more than 512 (AMD
  // EPYC, Zen 4, 2026-11-20; docs/notebook/2026-11-20-cpu.md).
  // Machines with AMX have 2 MiB.
  const int64_t room = (kernels.tile_keys > 1 ? 512 : 448) << 10;
  constexpr int32_t kMostRows = 256;
  const int64_t bytes_per_row = int64_t{4} * ((d_qk + kernels.key_block) / kernels.pack + d_v);
  int32_t rows = kMostRows;
  while (rows > kMaxLanes && rows * bytes_per_row > room) rows /= 2;
  return {.max_rows = rows, .key_block = kernels.key_block, .d_qk = d_qk, .d_v = d_v};
}

TileShape TileShape::choose_for_many_rows(const TileKernels& kernels, int32_t d_qk, int32_t d_v) {
  TileShape shape = choose(kernels, d_qk, d_v);
  if (kernels.key_lanes == nullptr) return shape;
  shape.key_lanes = true;
  // Queries and outputs fill half of 1 MiB; the other half is for keys, values, scores and P. 512 rows instead of 256
  // took a sixth less for each, 1,024 gained 1 to 3 % more with half the tasks (Intel, Emerald Rapids, 2026-11-28;
  // docs/notebook/2026-11-28-amx-prefill.md).
  constexpr int64_t kRoom = 512 << 10;
  constexpr int32_t kMostRows = 512;
  const int64_t bytes_per_row = int64_t{2} * d_qk + int64_t{4} * d_v;
  shape.max_rows = kMostRows;
  while (shape.max_rows > kMaxLanes && shape.max_rows * bytes_per_row > kRoom) shape.max_rows /= 2;
  return shape;
}

size_t Tiles::bytes(const TileKernels& kernels, const TileShape& shape) {
  Carver counter(nullptr);
  Tiles(kernels, shape, nullptr).carve(counter);
  return counter.used();
}

Tiles::Tiles(const TileKernels& kernels, const TileShape& shape, std::byte* memory) : kernels_(kernels), shape_(shape) {
  if (memory == nullptr) return;
  Carver carver(memory);
  carve(carver);
}

void Tiles::carve(Carver& carver) {
  const int64_t rows = shape_.max_rows;
  const int64_t keys = shape_.key_block;
  const int64_t d_qk = round_up(shape_.d_qk, kSlab);  // where keys are converted, their memory consists of slabs
  query_rows_ = carver.take<const void*>(2 * rows);
  q_ = carver.take<uint32_t>(rows * shape_.d_qk / kernels_.pack);
  s_ = carver.take<float>((whole_tiles() && !shape_.key_lanes ? 2 : 1) * kPanelGroups * s_stride());
  p_ = carver.take<uint32_t>((shape_.key_lanes ? panel_size() : rows) * keys / kernels_.pack);
  keys_ = carver.take<uint32_t>(keys * d_qk / kernels_.pack);
  copied_values_ = carver.take<uint32_t>(shape_.copied_values ? keys * shape_.d_v / kernels_.pack : 0);
  values_ = carver.take<uint32_t>(keys / kernels_.pack * (packs_slab_by_slab() ? 2 * kSlab : shape_.d_v));
  o_ = carver.take<float>(rows * shape_.d_v);
  max_ = carver.take<float>(rows);
  base_ = carver.take<float>(rows);
  sum_ = carver.take<float>(rows);
  alpha_ = carver.take<float>(rows);
  visible_begin_ = carver.take<int32_t>(rows);
  visible_ = carver.take<int32_t>(rows);
  slope_ = carver.take<float>(rows);
  position_ = carver.take<int32_t>(rows);
  key_position_ = carver.take<int32_t>(keys);
  decoded_rows_ = carver.take<uint16_t>(shape_.decoded_rows ? keys * d_qk : 0);
  decoded_queries_ = carver.take<uint16_t>(shape_.decoded_queries ? rows * d_qk : 0);
  group_visible_ = carver.take<Extent>(rows / kernels_.lanes);
  limit_ = carver.take<int32_t>(rows);
  key_steps_ = carver.take<int32_t>(rows);
  aside_keys_ = carver.take<int32_t>(keys);
  aside_rows_ = carver.take<const void*>(keys);
  aside_values_ = carver.take<float>(keys * kSlab);
  zero_row_ = carver.take<uint16_t>(shape_.d_v);
  row_lists_ = carver.take<const void*>((kLoaderRowLists + kMaxSegments) * (2 * keys + kKeyTile));
}

void Tiles::begin(int32_t num_rows) {
  num_rows_ = num_rows;
  num_groups_ = (num_rows + kernels_.lanes - 1) / kernels_.lanes;
  first_ = true;
  packed_ahead_ = false;
  const int32_t padded = num_groups_ * kernels_.lanes;
  std::fill_n(max_, padded, kLowest);
  std::fill_n(base_, padded, kLowest);
  std::fill_n(sum_, padded, 0.0F);
  for (int32_t row = num_rows; row < padded; ++row) {
    set_row(row, nullptr, nullptr, {});
    set_bias(row, 0.0F, 0);
  }
}

/// Replaces e4m3 query rows by copies in bf16.
void Tiles::decode_queries(int32_t first_width) {
  uint16_t* to = decoded_queries_;
  for (int32_t row = 0; row < num_rows_; ++row)
    for (int32_t part = 0; part < 2; ++part) {
      const int32_t width = part == 0 ? first_width : shape_.d_qk - first_width;
      const void*& from = query_rows_[part * shape_.max_rows + row];
      if (width > 0) kernels_.decode_row(unscaled_row(from, width), to);
      from = to;
      to += width;
    }
}

void Tiles::set_queries(DType dtype, int32_t first_width) {
  if (dtype == DType::kE4M3) {
    decode_queries(first_width);
    dtype = DType::kBF16;
  }
  query_dtype_ = dtype;
  query_width_[0] = first_width;
  query_width_[1] = shape_.d_qk - first_width;
  for (int32_t g = 0; g < num_groups_; ++g) {
    const int32_t* visible = visible_ + g * kernels_.lanes;
    const auto [least, most] = std::minmax_element(visible, visible + kernels_.lanes);
    group_visible_[g] = {.least = *least, .most = *most};
  }
  for (int32_t row = 0; row < std::min(panel_size(), num_rows_); ++row)
    for (int32_t i = 0; i < first_width * static_cast<int32_t>(size_of(dtype)); i += 64)
      __builtin_prefetch(static_cast<const char*>(query_rows_[row]) + i);
}

void Tiles::pack_queries(int32_t group) {
  uint32_t* q = q_ + static_cast<int64_t>(group) * (shape_.d_qk / kernels_.pack) * kernels_.lanes;
  const void** rows = query_rows_ + group * kernels_.lanes;
  for (int32_t width : query_width_) {
    if (width > 0 && shape_.key_lanes)
      kernels_.key_lanes->pack_queries(rows, width, q);
    else if (width > 0)
      kernels_.pack_queries(rows, query_dtype_, width, q);
    q += width / kernels_.pack * kernels_.lanes;
    rows += shape_.max_rows;
  }
}

/// Computes the scores of `count` neighbouring groups, of group i with the block's first keys[i] keys.
void Tiles::score(const KeyBlock& block, const Prefetch& prefetch, int32_t group, const int32_t* keys, int32_t count,
                  float* s, const Background& background) {
  const int64_t q_stride = static_cast<int64_t>(shape_.d_qk / kernels_.pack) * kernels_.lanes;
  const uint32_t* q = q_ + group * q_stride;
  if (shape_.key_lanes)
    return kernels_.key_lanes->scores(q, count, shape_.d_qk / kernels_.pack, keys_,
                                      *std::max_element(keys, keys + count), s, s_row_stride(), prefetch);
  const int32_t common =
      round_up(whole_tiles() ? *std::max_element(keys, keys + count) : *std::min_element(keys, keys + count), kKeyTile);
  kernels_.scores(q, q_stride, count, block.segments, block.num_segments, prefetch, 0, common, s, s_stride(),
                  background);
  for (int32_t i = 0; i < count; ++i)
    if (keys[i] > common)
      kernels_.scores(q + i * q_stride, q_stride, 1, block.segments, block.num_segments, prefetch, common, keys[i],
                      s + i * s_stride(), s_stride(), {});
}

bool Tiles::sees(int32_t row, int32_t key, const HiddenKeys* hidden) const {
  return key >= visible_begin_[row] && key < visible_[row] &&
         (hidden == nullptr || key < hidden->first() || !hidden->hidden(row, key));
}

/// Sets the scores of a group to -inf where a key lies before the row's range or is hidden in it.
void Tiles::hide(int32_t first_row, int32_t first_key, int32_t num_keys, const HiddenKeys* hidden, float* s) const {
  const int64_t key_stride = shape_.key_lanes ? 1 : kernels_.lanes;
  const int64_t row_stride = shape_.key_lanes ? s_row_stride() : 1;
  for (int32_t row = first_row; row < first_row + kernels_.lanes; ++row, s += row_stride) {
    for (int32_t key = 0; key < std::min(num_keys, visible_begin_[row] - first_key); ++key)
      s[key * key_stride] = kLowest;
    if (hidden == nullptr || row >= num_rows_) continue;
    for (int32_t key = std::max(0, hidden->first() - first_key); key < num_keys; ++key)
      if (hidden->hidden(row, first_key + key)) s[key * key_stride] = kLowest;
  }
}

/// Returns what to prefetch while the scores of the groups from `group` on are computed. Where rows lie far apart,
/// these are the queries that are packed next, and with the last groups, which see the most keys, the next key block.
Prefetch Tiles::prefetch_beside(const KeyBlock& block, int32_t group) const {
  const int32_t next = group + kPanelGroups;
  if (shape_.key_lanes) return prefetch_share(block, group);
  if (block.far ? next >= num_groups_ : group == 0 && reads_ahead()) return block.prefetch;
  if (!block.far || !first_) return {};
  const int32_t row = next * kernels_.lanes;
  const auto lines = [&](int32_t part) {
    return static_cast<int32_t>((query_width_[part] * static_cast<int64_t>(size_of(query_dtype_)) + 63) / 64);
  };
  return {.rows = {query_rows_ + row, query_rows_ + shape_.max_rows + row},
          .lines = {lines(0), lines(1)},
          .num_rows = std::min(panel_size(), num_rows_ - row) / kKeyTile * kKeyTile};
}

/// Returns the share that the panel of groups from `group` on has of the next block's rows.
Prefetch Tiles::prefetch_share(const KeyBlock& block, int32_t group) const {
  const int32_t rows = round_up((shape_.key_block * kPanelGroups + num_groups_ - 1) / num_groups_, kernels_.tile_keys);
  const int32_t first = group / kPanelGroups * rows;
  Prefetch prefetch = block.prefetch;
  prefetch.num_rows = std::min(rows, shape_.key_block - first);
  if (prefetch.num_rows <= 0 || prefetch.lines[0] == 0) return {};
  for (const void* const*& list : prefetch.rows) list += first;
  return prefetch;
}

/// Computes the scores of the panel of groups from `group` on. Returns how many of these see keys of the block; their
/// softmax is described in `softmax`, and is still to be computed.
int32_t Tiles::score_panel(const KeyBlock& block, int32_t first_key, const Scoring& scoring, int32_t group, float* s,
                           const Background& background, SoftmaxBlock* softmax) {
  const float scale_log2 = (scoring.needs_only_scale() ? scoring.scale : 1.0F) * std::numbers::log2e_v<float>;
  const bool hiding =
      first_key < most_begin_ || (scoring.hidden != nullptr && first_key + block.num_keys > scoring.hidden->first());
  const int32_t lanes = kernels_.lanes;
  const int32_t count = std::min(kPanelGroups, num_groups_ - group);
  int32_t least[kPanelGroups];
  int32_t keys[kPanelGroups];
  for (int32_t i = 0; i < count; ++i) {
    if (first_) pack_queries(group + i);
    const Extent& visible = group_visible_[group + i];
    least[i] = std::clamp(visible.least - first_key, 0, block.num_keys);
    keys[i] = std::clamp(visible.most - first_key, 0, block.num_keys);
  }
  score(block, prefetch_beside(block, group), group, keys, count, s, background);
  int32_t num_softmax = 0;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t row = (group + i) * lanes;
    const int32_t n = round_up(keys[i], kernels_.pack);
    key_steps_[group + i] = n / kernels_.pack;
    if (n == 0) {
      std::fill_n(alpha_ + row, lanes, 1.0F);
      continue;
    }
    float* own = s + i * s_stride();
    const float* slope = scoring.biased ? slope_ + row : nullptr;
    if (!scoring.needs_only_scale() && shape_.key_lanes)
      kernels_.key_lanes->shape_scores(own, s_row_stride(), n, scoring.scale, scoring.soft_cap, slope, position_ + row,
                                       key_position_);
    else if (!scoring.needs_only_scale())
      kernels_.shape_scores(own, n, scoring.scale, scoring.soft_cap, slope, position_ + row, key_position_);
    if (hiding) hide(row, first_key, n, scoring.hidden, own);
    const bool masked = least[i] < n;
    for (int32_t lane = 0; masked && lane < lanes; ++lane)
      limit_[row + lane] = std::min(visible_[row + lane] - first_key, block.num_keys);
    softmax[num_softmax++] = {.s = own,
                              .num_keys = n,
                              .limit = masked ? limit_ + row : nullptr,
                              .s_stride = s_row_stride(),
                              .scale_log2 = scale_log2,
                              .max = max_ + row,
                              .base = base_ + row,
                              .sum = sum_ + row,
                              .alpha = alpha_ + row,
                              .p = p_of(group + i)};
  }
  return num_softmax;
}

void Tiles::place_keys(const KeyBlock& block, int32_t first_key, const Scoring& scoring) {
  for (int32_t key = 0; scoring.biased && key < block.num_keys; ++key)
    key_position_[key] = static_cast<int32_t>(global_position(scoring.share, first_key + key));
}

// The P of a key that a row does not see is 0, but 0 * NaN is NaN. So values that are not finite are taken out of the
// product, and added to the rows that see them. Only keys that some row does not see must be checked for this.

/// Finds the keys of the block that some row does not see and whose values are not all finite. Returns how many there
/// are.
int32_t Tiles::set_aside(const KeyBlock& block, int32_t first_key, const HiddenKeys* hidden) {
  const int32_t all_see_before = std::min(least_visible_, hidden != nullptr ? hidden->first() : least_visible_);
  int32_t count = 0;
  for (int32_t key = 0; key < block.num_keys; ++key) {
    if (first_key + key >= most_begin_ && first_key + key < all_see_before) continue;
    bool finite = true;
    if (block.value_rows != nullptr) {
      finite = kernels_.finite(block.value_rows[key], DType::kBF16, shape_.d_v);
    } else {
      for (int32_t slab = 0; finite && slab < shape_.d_v / kSlab; ++slab)
        finite = kernels_.finite(block.value_slabs + slab * slab_stride() + int64_t{key} * kSlab, DType::kF32, kSlab);
    }
    if (finite) continue;
    aside_keys_[count] = key;
    if (block.value_rows != nullptr) {
      aside_rows_[count] = block.value_rows[key];
      std::fill_n(zero_row_, shape_.d_v, uint16_t{0});
      block.value_rows[key] = zero_row_;
    }
    ++count;
  }
  return count;
}

/// Keeps a slab of the values of the keys that set_aside() found, and clears them where they are packed already.
void Tiles::take_out(const KeyBlock& block, int32_t slab, int32_t count) {
  for (int32_t i = 0; i < count; ++i) {
    float* values = aside_values_ + int64_t{i} * kSlab;
    if (block.value_rows != nullptr) {
      kernels_.convert(static_cast<const uint16_t*>(aside_rows_[i]) + slab * kSlab, DType::kBF16, values, DType::kF32,
                       kSlab);
    } else {
      uint32_t* packed = block.value_slabs + slab * slab_stride() + int64_t{aside_keys_[i]} * kSlab;
      std::memcpy(values, packed, kSlab * sizeof(float));
      std::fill_n(packed, kSlab, 0U);
    }
  }
}

/// Adds the values of these keys to those rows of the slab that see them.
void Tiles::put_back(int32_t first_key, int32_t slab, int32_t count, const HiddenKeys* hidden, int32_t row_begin,
                     int32_t row_end) {
  for (int32_t i = 0; i < count; ++i)
    for (int32_t row = row_begin; row < row_end; ++row) {
      if (!sees(row, first_key + aside_keys_[i], hidden)) continue;
      const float p = probability(row, aside_keys_[i]);
      float* o = o_ + (int64_t{slab} * shape_.max_rows + row) * kSlab;
      for (int32_t c = 0; c < kSlab; ++c)
        o[kernels_.slab_positions != nullptr ? kernels_.slab_positions[c] : c] +=
            p * aside_values_[int64_t{i} * kSlab + c];
    }
}

float Tiles::probability(int32_t row, int32_t key) const {
  const int32_t lanes = kernels_.lanes, lane = row % lanes;
  const uint32_t* p = p_of(row / lanes);
  if (whole_tiles()) {  // of 32 keys, where a step holds key i and key i + 16
    const int32_t steps = kernels_.tile_keys, tile = key / (2 * steps);
    const uint32_t word = p[(tile * lanes + lane) * steps + key % steps];
    return std::bit_cast<float>(key / steps % 2 == 0 ? word << 16 : word & 0xFFFF0000U);
  }
  const uint32_t word = p[key / kernels_.pack * lanes + lane];
  if (kernels_.pack == 1) return std::bit_cast<float>(word);
  return std::bit_cast<float>(key % 2 == 0 ? word << 16 : word & 0xFFFF0000U);
}

/// Returns what to do while one slab is multiplied: pack the block's next slab, or begin with the next block.
Background Tiles::prepare(const KeyBlock& block, int32_t next_slab) const {
  uint32_t* v = values_ + (value_buffer_ ^ 1) * slab_stride();
  if (next_slab < shape_.d_v / kSlab)
    return {.slab = {.rows = block.value_rows, .num_keys = block.num_keys, .channel = int64_t{next_slab} * kSlab},
            .v = v};
  if (block.next_value_rows == nullptr) return {};
  return {
      .copies = block.next_copies, .slab = {.rows = block.next_value_rows, .num_keys = block.next_num_keys}, .v = v};
}

void Tiles::attend(const KeyBlock& block, int32_t first_key, const Scoring& scoring) {
  place_keys(block, first_key, scoring);
  if (shape_.key_lanes)
    attend_by_key_lanes(block, first_key, scoring);
  else if (whole_tiles())
    attend_by_panels(block, first_key, scoring);
  else
    attend_by_slabs(block, first_key, scoring);
  first_ = false;
}

void Tiles::attend_by_slabs(const KeyBlock& block, int32_t first_key, const Scoring& scoring) {
  SoftmaxBlock softmax[kPanelGroups];
  for (int32_t group = 0; group < num_groups_; group += kPanelGroups) {
    const int32_t count = score_panel(block, first_key, scoring, group, s_, {}, softmax);
    for (int32_t i = 0; i < count; ++i) kernels_.softmax(softmax[i]);
  }
  const bool packing = block.value_rows != nullptr;
  const int32_t aside = set_aside(block, first_key, scoring.hidden);
  if (packing && (!packed_ahead_ || aside > 0))
    kernels_.pack_slab({.rows = block.value_rows, .num_keys = block.num_keys}, values_ + value_buffer_ * slab_stride());
  for (int32_t slab = 0; slab < shape_.d_v / kSlab; ++slab) {
    take_out(block, slab, aside);
    const uint32_t* values =
        packing ? values_ + value_buffer_ * slab_stride() : block.value_slabs + slab * slab_stride();
    kernels_.accumulate({.p = p_,
                         .p_group_stride = p_stride(),
                         .v = values,
                         .key_steps = key_steps_,
                         .num_rows = num_rows_,
                         .alpha = alpha_,
                         .first = first_,
                         .o = o_ + slab * o_stride()},
                        packing ? prepare(block, slab + 1) : Background{});
    put_back(first_key, slab, aside, scoring.hidden, 0, num_rows_);
    value_buffer_ ^= 1;
  }
  packed_ahead_ = block.next_value_rows != nullptr;
}

/// Returns all slabs of the block's values, which are packed into values_.
SlabSource Tiles::values_of(const KeyBlock& block) const {
  return {.rows = block.value_rows,
          .num_keys = block.num_keys,
          .num_slabs = shape_.d_v / kSlab,
          .slab_stride = slab_stride()};
}

/// Returns the products of the panel of groups from `group` on with all values.
ValueProducts Tiles::panel_products(int32_t group) const {
  const int32_t row = group * kernels_.lanes;
  return {.p = p_of(group),
          .p_group_stride = p_stride(),
          .v = values_,
          .key_steps = key_steps_ + group,
          .num_rows = std::min(num_rows_ - row, panel_size()),
          .alpha = alpha_ + row,
          .first = first_,
          .o = o_ + int64_t{row} * kSlab,
          .num_slabs = shape_.d_v / kSlab,
          .v_stride = slab_stride(),
          .o_stride = o_stride()};
}

/// Attends with kernels of whole tiles. The tiles hide what vectors do: the values are packed beside the scores of the
/// first panel, the softmax of each panel but the last is computed beside the scores of the next, and that of the last
/// beside the first panel's products with values.
void Tiles::attend_by_panels(const KeyBlock& block, int32_t first_key, const Scoring& scoring) {
  const int32_t aside = set_aside(block, first_key, scoring.hidden);
  Background background = {.slab = values_of(block), .v = values_};
  SoftmaxBlock softmax[2][kPanelGroups];
  int32_t buffer = 0, count = 0;
  for (int32_t group = 0; group < num_groups_; group += kPanelGroups, buffer ^= 1) {
    count = score_panel(block, first_key, scoring, group, s_ + buffer * kPanelGroups * s_stride(), background,
                        softmax[buffer]);
    background = {.softmax = softmax[buffer], .num_softmax = count};
  }
  if (num_groups_ <= kPanelGroups) {
    for (int32_t i = 0; i < count; ++i) kernels_.softmax(background.softmax[i]);
    background = {};
  }
  for (int32_t group = 0; group < num_groups_; group += kPanelGroups) {
    clear_unseen(group);
    kernels_.accumulate(panel_products(group), background);
    background = {};
  }
  for (int32_t slab = 0; aside > 0 && slab < shape_.d_v / kSlab; ++slab) {
    take_out(block, slab, aside);
    put_back(first_key, slab, aside, scoring.hidden, 0, num_rows_);
  }
}

/// Attends panel by panel. Keys and values are packed once for all.
void Tiles::attend_by_key_lanes(const KeyBlock& block, int32_t first_key, const Scoring& scoring) {
  const KeyLaneKernels& key_lanes = *kernels_.key_lanes;
  const int32_t aside = set_aside(block, first_key, scoring.hidden);
  key_lanes.pack_keys(block.segments[0].rows, block.num_keys, block.segments[0].steps, keys_);
  kernels_.pack_slab(values_of(block), values_);
  SoftmaxBlock softmax[kPanelGroups];
  for (int32_t group = 0; group < num_groups_; group += kPanelGroups) {
    const int32_t count = score_panel(block, first_key, scoring, group, s_, {}, softmax);
    for (int32_t i = 0; i < count; ++i) key_lanes.softmax(softmax[i]);
    clear_unseen(group);
    kernels_.accumulate(panel_products(group), {});
    const int32_t row = group * kernels_.lanes;
    for (int32_t slab = 0; aside > 0 && slab < shape_.d_v / kSlab; ++slab) {
      take_out(block, slab, aside);
      put_back(first_key, slab, aside, scoring.hidden, row, std::min(num_rows_, row + panel_size()));
    }
  }
}

/// Sets P to 0 in the tiles of keys that a group of the panel does not see, but another one does.
void Tiles::clear_unseen(int32_t group) {
  const int32_t count = std::min(kPanelGroups, num_groups_ - group);
  const int32_t tile_steps = kernels_.tile_keys;  // a tile of P has as many steps as one of keys has rows
  const int32_t most = round_up(*std::max_element(key_steps_ + group, key_steps_ + group + count), tile_steps);
  for (int32_t g = group; g < group + count; ++g) {
    const int32_t own = round_up(key_steps_[g], tile_steps);
    std::fill_n(p_of(g) + own * kernels_.lanes, (most - own) * kernels_.lanes, 0U);
  }
}

float Tiles::lse(int32_t row) const { return saw_none(row) ? kLowest : base_[row] + std::log2(sum_[row]); }

void Tiles::store(int32_t row, float factor, void* o, DType o_dtype) const {
  if (saw_none(row)) {
    std::memset(o, 0, static_cast<size_t>(shape_.d_v) * size_of(o_dtype));
    return;
  }
  kernels_.store_row(o_ + static_cast<int64_t>(row) * kSlab, static_cast<int64_t>(shape_.max_rows) * kSlab, shape_.d_v,
                     factor / sum_[row], o, o_dtype);
}

void Tiles::add_key_slab(const SlabSource& source, KeyBlock& block) {
  uint32_t* slab = keys_ + block.num_segments * slab_stride();
  kernels_.pack_slab(source, slab);
  const void** list = this->rows(kLoaderRowLists + block.num_segments);
  for (int32_t key = 0; key < block.num_keys; ++key) list[key] = slab + static_cast<int64_t>(key) * kSlab;
  pad_rows(list, block.num_keys, block.num_keys);
  block.segments[block.num_segments++] = {.rows = list, .steps = source.width};
}

void pad_rows(const void** rows, int32_t num_rows, int32_t length) {
  const int32_t end = round_up(std::max(num_rows, length), kKeyTile);
  for (int32_t row = num_rows; row < end; ++row) rows[row] = rows[num_rows - 1];
}

}  // namespace mla::cpu
