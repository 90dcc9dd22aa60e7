// SPDX-License-Identifier: Apache-2.0
#include "cpu/key_stream.h"

#include <cstring>

#include "cpu/row_scales.h"

namespace mla::cpu {

KeyStream::KeyStream(const core::Cache& cache, Tiles& tiles)
    : cache_(cache),
      tiles_(tiles),
      dtype_(value_dtype(cache.ckv_dtype)),
      decodes_(cache.is_quantized()),
      in_place_(!decodes_ && tiles.kernels().pack == 2 && tiles.kernels().tile_keys == 1),
      ahead_(in_place_ ? kTilesAhead * kKeyTile : tiles.shape().key_block) {
  planes_[0] = cache.ckv;
  bytes_[0] = cache.ckv_bytes();
  const auto attach = [&](const core::Plane& plane, int32_t bytes) {
    const Part part = add_part(plane);
    if (part.list >= 0) bytes_[part.list] = bytes;
    // Parts that lie further away belong to another tensor and are not prefetched with ckv.
    constexpr int64_t kNear = 4096;
    if (part.list < 0 && part.shared == nullptr && part.distance >= 0 && part.distance < kNear)
      bytes_[0] = std::max(bytes_[0], static_cast<int32_t>(part.distance) + bytes);
    return part;
  };
  if (cache.d_kpe > 0) kpe_ = attach(cache.kpe, cache.kpe_bytes());
  if (decodes_) scales_ = attach(cache.scales, cache.num_scales * size_of(cache.scale_type));
}

KeyStream::Part KeyStream::add_part(const core::Plane& plane) {
  const core::Plane& first = planes_[0];
  const int64_t distance = plane.base - first.base;
  const bool together = plane.stride_page == first.stride_page && plane.stride_token == first.stride_token;
  // A part at a fixed distance needs no list if rows are decoded. Rows that are not decoded are multiplied where they
  // lie, so that it must also follow ckv directly.
  if (together && (decodes_ || distance == bytes_[0])) return {.distance = distance};
  if (plane.stride_page == 0 && plane.stride_token == 0) return {.shared = plane.base};
  planes_[num_lists_] = plane;
  return {.list = num_lists_++};
}

const std::byte* KeyStream::find(const Part& part, int32_t key) const {
  if (part.shared != nullptr) return part.shared;
  return static_cast<const std::byte*>(tiles_.rows(std::max(part.list, 0))[key]) + part.distance;
}

void KeyStream::enter(int32_t entry, int64_t page, int64_t offset, int32_t count) {
  for (int32_t i = 0; i < num_lists_; ++i) {
    const void** rows = tiles_.rows(i) + entry;
    const std::byte* row = planes_[i].row(page, offset);
    for (int32_t key = 0; key < count; ++key, row += planes_[i].stride_token) rows[key] = row;
  }
}

/// Removes the first `count` rows from the lists.
void KeyStream::drop(int32_t count) {
  listed_ -= std::min(count, listed_);
  for (int32_t i = 0; i < num_lists_; ++i) {
    const void** rows = tiles_.rows(i);
    std::copy_n(rows + count, listed_, rows);
  }
}

void KeyStream::make_block(KeyBlock& block) {
  const int32_t count = std::min(listed_, tiles_.shape().key_block);
  block = KeyBlock();
  block.num_keys = count;
  for (int32_t i = 0; i < num_lists_; ++i) pad_rows(tiles_.rows(i), listed_, count + ahead_);
  for (int32_t i = 0; i < std::min<int32_t>(num_lists_, 2); ++i) {
    block.prefetch.rows[i] = tiles_.rows(i) + ahead_;
    block.prefetch.lines[i] = (bytes_[i] + 63) / 64;
  }
  const bool one_part = decodes_ || kpe_.list < 0;
  const int32_t width = one_part ? tiles_.shape().d_qk : cache_.d_ckv;
  const int32_t list = decodes_ ? kDecodedList : 0;
  if (decodes_) decode(count);
  if (tiles_.kernels().pack == 1) {
    convert(list, dtype_, width, block);
    if (!one_part) convert(kpe_.list, dtype_, cache_.d_kpe, block);
    block.value_slabs = tiles_.keys();
    return;
  }
  const bool whole_tiles = tiles_.kernels().tile_keys > 1;
  if (whole_tiles && !decodes_) {
    add_tiles(0, kDecodedList, width, block);
    if (!one_part) add_tiles(kpe_.list, kTiledKpeList, cache_.d_kpe, block);
  } else {
    block.segments[block.num_segments++] = {.rows = tiles_.rows(list), .steps = width / 2};
    if (!one_part) block.segments[block.num_segments++] = {.rows = tiles_.rows(kpe_.list), .steps = cache_.d_kpe / 2};
  }
  block.value_rows = tiles_.rows(whole_tiles ? kValueList : list);
  // Values that are set aside before the scores must leave the rows of keys alone.
  if (whole_tiles) std::copy_n(tiles_.rows(kDecodedList), count, block.value_rows);
}

/// Lists `width` channels of the rows of list `from` in list `to`, and adds the segment of them. Tiles whose rows are
/// not equally spaced, or too few, are copied to key memory.
void KeyStream::add_tiles(int32_t from, int32_t to, int32_t width, KeyBlock& block) {
  const TileKernels& kernels = tiles_.kernels();
  const int32_t tile = kernels.tile_keys;
  const auto* const* rows = reinterpret_cast<const char* const*>(tiles_.rows(from));
  const void** listed = tiles_.rows(to);
  int32_t words_before = 0;
  for (int32_t i = 0; i < block.num_segments; ++i) words_before += block.segments[i].steps;
  uint32_t* copy = tiles_.keys() + int64_t{words_before} * tiles_.shape().key_block;
  const int32_t words = width / 2;
  for (int32_t key = 0; key < block.num_keys; key += tile, copy += int64_t{tile} * words) {
    const int32_t count = std::min(tile, block.num_keys - key);
    const auto* const* own = rows + key;
    bool equal = count == tile;
    for (int32_t i = 2; i < count; ++i) equal &= own[i] - own[i - 1] == own[1] - own[0];
    if (equal) {
      std::copy_n(own, tile, listed + key);
      continue;
    }
    kernels.copy_rows({.rows = reinterpret_cast<const void* const*>(own),
                       .num_rows = count,
                       .lines = width / kStepChunk / 2,
                       .to = copy});
    for (int32_t i = 0; i < tile; ++i) listed[key + i] = copy + int64_t{i} * words;
  }
  block.segments[block.num_segments++] = {.rows = listed, .steps = words};
}

/// Decodes the block's rows to bf16.
void KeyStream::decode(int32_t count) {
  const TileKernels& kernels = tiles_.kernels();
  auto* row = kernels.pack == 2 ? reinterpret_cast<uint16_t*>(tiles_.keys()) : tiles_.decoded_rows();
  const void** decoded = tiles_.rows(kDecodedList);
  for (int32_t key = 0; key < count; ++key, row += tiles_.shape().d_qk) {
    decoded[key] = row;
    const auto* ckv = static_cast<const std::byte*>(tiles_.rows(0)[key]);
    for_latent_groups(cache_, ckv, find(scales_, key),
                      [&](const QuantizedRow& groups, int32_t channel) { kernels.decode_row(groups, row + channel); });
    if (cache_.d_kpe == 0) continue;
    const std::byte* kpe = find(kpe_, key);
    if (is_quantized(cache_.kpe_dtype)) {
      const float scale = load_kpe_scale(cache_, ckv);
      kernels.decode_row(
          {.element = cache_.kpe_dtype, .elements = kpe, .scales = &scale, .num_groups = 1, .group = cache_.d_kpe},
          row + cache_.d_ckv);
    } else {
      std::memcpy(row + cache_.d_ckv, kpe, static_cast<size_t>(cache_.d_kpe) * sizeof *row);
    }
  }
  for (; count % kernels.tile_keys != 0; ++count, row += tiles_.shape().d_qk) decoded[count] = row;
  pad_rows(decoded, count, count);
}

/// Converts `width` channels of the listed rows into slabs of key memory.
void KeyStream::convert(int32_t list, DType dtype, int32_t width, KeyBlock& block) {
  for (int32_t channel = 0; channel < width; channel += kSlab)
    tiles_.add_key_slab({.rows = tiles_.rows(list),
                         .dtype = dtype,
                         .num_keys = block.num_keys,
                         .channel = channel,
                         .width = std::min(kSlab, width - channel)},
                        block);
}

}  // namespace mla::cpu
