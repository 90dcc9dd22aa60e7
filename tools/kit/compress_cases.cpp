// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kit/case_parts.h"
#include "kit/cases.h"
#include "kit/paged_memory.h"

namespace mla::kit {
namespace {

/// Returns rows of normally distributed values.
Buffer normal_rows(DType dtype, int64_t rows, int64_t width, int64_t extra, uint64_t seed, float std = 1.0F) {
  Buffer buffer = rows_buffer(dtype, rows, width, extra);
  buffer.fill(kNanByte);
  for (int64_t row = 0; row < rows; ++row)
    fill_normal(buffer.data(), dtype, row * (width + extra), width, mix(seed, static_cast<uint64_t>(row)), std);
  return buffer;
}

/// Returns the table of the state. Columns that no position of a request needs hold garbage.
Buffer make_state_table(const CompressSpec& spec, int64_t num_blocks) {
  const int32_t columns = spec.num_columns();
  Buffer table = rows_buffer(DType::kI32, spec.batch_size(), columns, spec.table_extra);
  std::fill_n(table.as<int32_t>(), table.size() / sizeof(int32_t), std::numeric_limits<int32_t>::max());
  std::vector<int32_t> blocks(static_cast<size_t>(num_blocks));
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<int32_t>(i);
  Random random(mix(spec.seed, kTable));
  for (size_t i = blocks.size(); i > 1; --i)
    std::swap(blocks[i - 1], blocks[static_cast<size_t>(random.integer(0, static_cast<int64_t>(i) - 1))]);
  size_t next = 0;
  const int32_t span = spec.ratio * (spec.overlap ? 2 : 1);
  for (int32_t b = 0; b < spec.batch_size(); ++b) {
    const int64_t kv_len = spec.kv_len[static_cast<size_t>(b)];
    const int64_t first = kv_len - spec.q_len_of(static_cast<size_t>(b));
    int32_t* const row = table.as<int32_t>() + b * (columns + spec.table_extra);
    for (int64_t position = std::max<int64_t>(first - span + 1, 0); position < kv_len; ++position) {
      int32_t& entry = row[position / spec.block_size % columns];
      if (entry == std::numeric_limits<int32_t>::max()) entry = random.chance(spec.missing_share) ? -3 : blocks[next++];
    }
  }
  return table;
}

/// Writes what earlier calls have kept: as many positions before the new ones as there is room for.
void fill_state(const CompressCase& problem) {
  const CompressSpec& spec = problem.spec;
  const CompressParams p = problem.params();
  const int64_t capacity = int64_t{spec.num_columns()} * spec.block_size, kept = 2 * int64_t{spec.width()};
  problem.state.fill(kNanByte);
  for (int32_t b = 0; b < spec.batch_size(); ++b) {
    const int64_t kv_len = spec.kv_len[static_cast<size_t>(b)];
    const int64_t first = kv_len - spec.q_len_of(static_cast<size_t>(b));
    for (int64_t position = std::max<int64_t>(first - capacity, 0); position < first; ++position) {
      const int64_t column = position / spec.block_size % spec.num_columns();
      const int32_t block = problem.state_table.as<int32_t>()[b * p.state_table.stride[0] + column];
      if (block < 0 || block >= problem.num_blocks()) continue;
      const int64_t at = block * p.state.stride[0] + position % spec.block_size * p.state.stride[1];
      const uint64_t key = mix(spec.seed, kCache, static_cast<uint64_t>(b), static_cast<uint64_t>(position));
      fill_normal(problem.state.data(), DType::kF32, at, kept / 2, key);
      fill_normal(problem.state.data(), DType::kF32, at + kept / 2, kept / 2, mix(key, 1), spec.score_std);
    }
  }
}

/// Returns slots for the tokens that end a group, and nonsense for the others.
Buffer make_slots(const CompressSpec& spec, int64_t num_tokens) {
  Buffer slots =
      make_slot_mapping(std::min<int64_t>(num_tokens, int64_t{spec.num_pages} * spec.cache.page_size),
                        int64_t{spec.num_pages} * spec.cache.page_size, spec.skip_share, mix(spec.seed, kSlots));
  std::vector<int64_t> mapping;
  size_t next = 0;
  for (size_t b = 0; b < spec.kv_len.size(); ++b) {
    const int64_t first = int64_t{spec.kv_len[b]} - spec.q_len_of(b);
    for (int64_t i = 0; i < spec.q_len_of(b); ++i) {
      const bool ends = first + i >= 0 && (first + i + 1) % spec.ratio == 0;
      mapping.push_back(ends ? slots.as<int64_t>()[next++] : std::numeric_limits<int64_t>::max());
    }
  }
  return to_buffer(mapping);
}

}  // namespace

CompressCase::CompressCase(const CompressSpec& compress_spec) : spec(noted(compress_spec)) {
  const std::vector<int32_t> indptr = prefix_sums(q_lens(spec));
  num_tokens = indptr.back();
  qo_indptr = to_buffer(indptr);
  kv_len = to_buffer(spec.kv_len);
  kv = normal_rows(spec.dtype, num_tokens, spec.width(), spec.row_extra, mix(spec.seed, kRows));
  if (spec.ratio > 1) {
    score =
        normal_rows(spec.dtype, num_tokens, spec.width(), spec.score_extra, mix(spec.seed, kLogits), spec.score_std);
    if (spec.bias)
      position_bias = normal_rows(DType::kF32, spec.ratio, spec.width(), spec.bias_extra, mix(spec.seed, kWeights));
    state_table = make_state_table(spec, num_blocks());
    state = padded_buffer(DType::kF32, num_blocks(), spec.block_size, 2 * int64_t{spec.width()}, spec.state_extra,
                          spec.state_block_extra);
    fill_state(*this);
    state_before.assign(state.bytes().begin(), state.bytes().end());
  }
  if (spec.norm) norm_weight = normal_rows(spec.norm_dtype, 1, spec.cache.d_qk, 0, mix(spec.seed, kK));
  latent = rows_buffer(spec.latent_dtype, num_tokens, spec.cache.d_qk, spec.latent_extra);
  if (spec.to != CompressSpec::To::kLatents) slot_mapping = make_slots(spec, num_tokens);
  if (spec.d_rotary() > 0) {
    const int32_t longest = spec.kv_len.empty() ? 0 : *std::max_element(spec.kv_len.begin(), spec.kv_len.end());
    cos_sin = angles(std::max(longest, 1), spec.d_rotary(), spec.cos_sin_extra);
  }
  if (spec.to == CompressSpec::To::kCache) memory = make_pool(spec.cache, spec.num_pages);
  if (spec.to == CompressSpec::To::kIndexer)
    indexer = make_indexer_pool(spec.indexer_format, spec.cache.page_size, spec.num_pages, spec.cache.page_stride_extra,
                                false);
  if (spec.append) {
    append.emplace(*spec.append);
    noted(spec);  // again: the append alone is noted now
  }
  reset_outputs();
}

CompressParams CompressCase::params() const {
  const int64_t batch = spec.batch_size(), width = spec.width();
  CompressParams p;
  p.kv = rows_view(kv, spec.dtype, num_tokens, width, spec.row_extra);
  if (!spec.omit_qo_indptr) p.qo_indptr = list_view(qo_indptr, DType::kI32, batch + 1);
  p.kv_len = list_view(kv_len, DType::kI32, batch);
  p.ratio = spec.ratio;
  p.overlap = spec.overlap;
  if (spec.ratio > 1) {
    p.score = rows_view(score, spec.dtype, num_tokens, width, spec.score_extra);
    if (spec.bias) p.position_bias = rows_view(position_bias, DType::kF32, spec.ratio, width, spec.bias_extra);
    p.state = padded_view(state, DType::kF32, num_blocks(), spec.block_size, 2 * width, spec.state_extra,
                          spec.state_block_extra);
    p.state_table = rows_view(state_table, DType::kI32, batch, spec.num_columns(), spec.table_extra);
  }
  if (spec.norm) p.norm_weight = list_view(norm_weight, spec.norm_dtype, spec.cache.d_qk);
  if (append) p.append = append->params();
  p.latent = rows_view(latent, spec.latent_dtype, num_tokens, spec.cache.d_qk, spec.latent_extra);
  if (spec.to == CompressSpec::To::kLatents) return p;
  p.slot_mapping = list_view(slot_mapping, DType::kI64, num_tokens);
  if (spec.d_rotary() > 0)
    p.cos_sin = rows_view(cos_sin, DType::kF32,
                          static_cast<int64_t>(cos_sin.size() / sizeof(float)) / (spec.d_rotary() + spec.cos_sin_extra),
                          spec.d_rotary(), spec.cos_sin_extra);
  p.interleaved = spec.interleaved;
  p.power_of_two_scales = spec.power_of_two_scales;
  if (spec.to == CompressSpec::To::kCache) p.cache = memory.cache;
  if (spec.to == CompressSpec::To::kIndexer) p.indexer = indexer.cache;
  return p;
}

std::vector<const Buffer*> CompressCase::rows() const {
  std::vector<const Buffer*> buffers = memory.written();
  buffers.push_back(&indexer.kv);
  return buffers;
}

std::vector<const Buffer*> CompressCase::outputs() const {
  std::vector<const Buffer*> buffers = rows();
  for (const Buffer* buffer : {&latent, &state}) buffers.push_back(buffer);
  if (append)
    for (const Buffer* buffer : append->outputs()) buffers.push_back(buffer);
  return buffers;
}

void CompressCase::reset_outputs() const {
  untouched(outputs());
  if (!state_before.empty()) std::memcpy(state.data(), state_before.data(), state_before.size());
}

}  // namespace mla::kit
