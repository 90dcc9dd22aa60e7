// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "kit/case_parts.h"
#include "kit/cases.h"
#include "kit/paged_memory.h"
#include "mla/numeric.h"

namespace mla::kit {
namespace {

/// Draws topk tokens of its request for every query, or groups of tokens: valid ones, and others that must become -1.
std::vector<int32_t> draw_local_indices(const PhysicalSlotsSpec& spec, const std::vector<int32_t>& q_len) {
  std::vector<int32_t> values;
  Random random(mix(spec.seed, kIndices));
  for (size_t request = 0; request < q_len.size(); ++request) {
    const int32_t count = spec.kv_len[request] / spec.ratio;
    const int32_t wild[] = {-1, -1, -1, count, count + 1000, 2147483647, -5};
    for (int64_t i = 0; i < int64_t{q_len[request]} * spec.topk; ++i)
      values.push_back(count == 0 || random.chance(spec.invalid_share)
                           ? random.pick(std::span<const int32_t>(wild))
                           : static_cast<int32_t>(random.integer(0, int64_t{count} - 1)));
  }
  return values;
}

/// Returns the share of a request's tokens that end groups of `ratio`.
ContextParallel last_of_groups(int32_t ratio) { return {.rank = ratio - 1, .world = ratio}; }

/// Draws a list of `count` blocks out of `blocks`, in ascending order; -1 stands for those that there are not, and
/// others take the place of `wild_share` of all.
std::vector<int32_t> draw_blocks(int32_t blocks, int32_t count, double wild_share, uint64_t seed) {
  Random random(seed);
  std::vector<int32_t> list;
  for (int32_t block = 0; block < blocks && std::ssize(list) < count; ++block)
    if (random.chance(static_cast<double>(count - std::ssize(list)) / (blocks - block))) list.push_back(block);
  list.resize(static_cast<size_t>(count), -1);
  const int32_t wild[] = {-1, -1, blocks, blocks + 7, 2147483647, -2147483647, -3};
  for (int32_t& block : list)
    if (random.chance(wild_share)) block = random.pick(std::span<const int32_t>(wild));
  return list;
}

}  // namespace

BlockTableToCsrCase::BlockTableToCsrCase(const BlockTableToCsrSpec& csr_spec) : spec(noted(csr_spec)) {
  constexpr int64_t kSpare = 5;  // indices beyond those that are needed
  int64_t total = 0;
  const auto pages_of = [&](int32_t len) { return (int64_t{len} + spec.page_size - 1) / spec.page_size; };
  for (int32_t len : spec.kv_len) {
    total += pages_of(len);
    max_pages = std::max(max_pages, pages_of(len));
  }
  max_pages = std::max<int64_t>(max_pages + spec.garbage_columns, 1);
  const std::vector<int32_t> garbage(static_cast<size_t>(max_pages), 2147483647);
  block_table = rows_buffer(DType::kI32, spec.batch_size(), max_pages, spec.row_extra);
  Random random(mix(spec.seed, kTable));
  for (size_t request = 0; request < spec.kv_len.size(); ++request) {
    int32_t* const row = block_table.as<int32_t>() + static_cast<int64_t>(request) * (max_pages + spec.row_extra);
    std::copy(garbage.begin(), garbage.end(), row);
    for (int64_t i = 0; i < pages_of(spec.kv_len[request]); ++i)
      row[i] = static_cast<int32_t>(random.integer(0, 1'000'000));
  }
  kv_len = to_buffer(spec.kv_len);
  kv_indptr = rows_buffer(DType::kI32, 1, spec.batch_size() + 1, 0);
  kv_indices = rows_buffer(DType::kI32, 1, total + kSpare, 0);
  reset_outputs();
}

BlockTableToCsrParams BlockTableToCsrCase::params() const {
  BlockTableToCsrParams p;
  p.block_table = rows_view(block_table, DType::kI32, spec.batch_size(), max_pages, spec.row_extra);
  p.kv_len = list_view(kv_len, DType::kI32, spec.batch_size());
  p.page_size = spec.page_size;
  p.kv_indptr = list_view(kv_indptr, DType::kI32, spec.batch_size() + 1);
  p.kv_indices = list_view(kv_indices, DType::kI32, static_cast<int64_t>(kv_indices.size() / sizeof(int32_t)));
  return p;
}

void BlockTableToCsrCase::reset_outputs() const { untouched(outputs()); }

PhysicalSlotsCase::PhysicalSlotsCase(const PhysicalSlotsSpec& slots_spec) : spec(noted(slots_spec)) {
  const std::vector<int32_t> q_len = q_lens(spec), indptr = prefix_sums(q_len);
  num_tokens = indptr.back();
  qo_indptr = to_buffer(indptr);
  table = make_table(
      {.page_size = spec.page_size,
       .block_table = spec.block_table,
       .row_extra = spec.table_row_extra,
       .garbage_tail = true,
       .shuffled = true,
       .unowned_pages = 3,
       .context_parallel = spec.ratio > 1 && !spec.list_tokens ? last_of_groups(spec.ratio) : spec.context_parallel},
      spec.kv_len, mix(spec.seed, kTable));
  index_values = draw_local_indices(spec, q_len);
  if (spec.topk_length) topk_length = to_buffer(random_lengths(num_tokens, spec.topk, mix(spec.seed, kLengths)));
  if (!spec.in_place) indices = padded_indices(index_values, num_tokens, spec.topk, spec.row_extra);
  slots = rows_buffer(DType::kI32, num_tokens, spec.num_slots(), spec.slots_extra);
  if (spec.want_valid_count) valid_count = rows_buffer(DType::kI32, 1, num_tokens, 0);
  reset_outputs();
}

PhysicalSlotsParams PhysicalSlotsCase::params() const {
  PhysicalSlotsParams p;
  p.slots = rows_view(slots, DType::kI32, num_tokens, spec.num_slots(), spec.slots_extra);
  p.indices = spec.in_place ? p.slots : rows_view(indices, DType::kI32, num_tokens, spec.topk, spec.row_extra);
  if (spec.topk_length) p.topk_length = list_view(topk_length, DType::kI32, num_tokens);
  if (!spec.omit_qo_indptr) p.qo_indptr = list_view(qo_indptr, DType::kI32, spec.batch_size() + 1);
  p.pages = table.pages;
  p.page_size = spec.page_size;
  p.context_parallel = spec.context_parallel;
  p.ratio = spec.ratio;
  p.list_tokens = spec.list_tokens;
  p.compact = spec.compact;
  if (spec.want_valid_count) p.valid_count = list_view(valid_count, DType::kI32, num_tokens);
  return p;
}

void PhysicalSlotsCase::reset_outputs() const {
  untouched(outputs());
  for (int64_t t = 0; spec.in_place && t < num_tokens; ++t)
    std::copy_n(index_values.begin() + t * spec.topk, spec.topk,
                slots.as<int32_t>() + t * (spec.topk + spec.slots_extra));
}

AppendIndexerCase::AppendIndexerCase(const AppendIndexerSpec& append_spec) : spec(noted(append_spec)) {
  rows = make_rows({.num_rows = spec.num_tokens,
                    .width = kIndexerLayout.head_dim,
                    .row_extra = spec.row_extra,
                    .dtype = spec.dtype,
                    .special_share = spec.special_share,
                    .seed = mix(spec.seed, kRows)});
  slot_mapping = make_slot_mapping(spec.num_tokens, int64_t{spec.num_pages} * spec.page_size, spec.skip_share,
                                   mix(spec.seed, kSlots));
  memory = make_indexer_pool(spec.format, spec.page_size, spec.num_pages, spec.page_stride_extra, false);
  reset_outputs();
}

AppendIndexerParams AppendIndexerCase::params() const {
  AppendIndexerParams p;
  p.k = rows_view(rows, spec.dtype, spec.num_tokens, kIndexerLayout.head_dim, spec.row_extra);
  p.slot_mapping = list_view(slot_mapping, DType::kI64, spec.num_tokens);
  p.power_of_two_scales = spec.power_of_two_scales;
  p.cache = memory.cache;
  return p;
}

void AppendIndexerCase::reset_outputs() const { untouched(outputs()); }

IndexerLogitsCase::IndexerLogitsCase(const IndexerLogitsSpec& logits_spec) : spec(noted(logits_spec)) {
  constexpr int64_t kDim = kIndexerLayout.head_dim;
  const std::vector<int32_t> indptr = prefix_sums(q_lens(spec));
  num_tokens = indptr.back();
  qo_indptr = to_buffer(indptr);
  table = make_table({.page_size = spec.page_size,
                      .block_table = spec.block_table,
                      .row_extra = spec.table_row_extra,
                      .garbage_tail = true,
                      .shuffled = true,
                      .unowned_pages = spec.unowned_pages,
                      .context_parallel = last_of_groups(spec.ratio)},
                     spec.kv_len, mix(spec.seed, kTable));
  memory = make_indexer_pool(spec.format, spec.page_size, table.num_pages, spec.page_stride_extra, spec.poison);
  std::vector<float> key(static_cast<size_t>(kDim));
  for (size_t request = 0; request < spec.kv_len.size(); ++request)
    for (int64_t at = 0; at < spec.kv_len[request] / spec.ratio; ++at) {
      fill_normal(key.data(), DType::kF32, 0, kDim, mix(spec.seed, kK, request, static_cast<uint64_t>(at)));
      const int64_t slot = table.slot_of(request, at);
      write_indexer_key(memory, slot / spec.page_size, slot % spec.page_size, key);
    }
  q = padded_buffer(spec.q_dtype, num_tokens, spec.num_heads, kDim, spec.q_head_extra, spec.q_token_extra);
  q.fill(kNanByte);
  weights = rows_buffer(DType::kF32, num_tokens, spec.num_heads, spec.weights_extra);
  weights.fill(kNanByte);
  if (spec.num_blocks > 0) {
    std::vector<int32_t> lists;
    for (size_t request = 0; request < spec.kv_len.size(); ++request) {
      const int32_t keys = spec.kv_len[request] / spec.ratio, all = (keys + spec.block_size - 1) / spec.block_size;
      for (int32_t i = 0; i < spec.q_len_of(request); ++i) {
        const uint64_t seed = mix(spec.seed, kIndices, request, static_cast<uint64_t>(i));
        const std::vector<int32_t> list = draw_blocks(all, spec.num_blocks, spec.wild_share, seed);
        lists.insert(lists.end(), list.begin(), list.end());
      }
    }
    blocks = padded_indices(lists, num_tokens, spec.num_blocks, spec.logits_extra);
  }
  std::vector<int32_t> begins, ends;
  for (size_t request = 0; request < spec.kv_len.size(); ++request) {
    const int32_t keys = spec.kv_len[request] / spec.ratio;
    Random random(mix(spec.seed, kLengths, request));
    for (int32_t i = 0; i < spec.q_len_of(request); ++i) {
      const auto one = [&] {
        return random.chance(0.1)   ? static_cast<int32_t>(random.integer(-9, -1))
               : random.chance(0.1) ? keys + static_cast<int32_t>(random.integer(0, 1000))
                                    : static_cast<int32_t>(random.integer(0, keys));
      };
      const int32_t first = one(), second = one();
      const bool turned = random.chance(0.1);  // a range with no key
      begins.push_back(turned ? std::max(first, second) : std::min(first, second));
      ends.push_back(turned ? std::min(first, second) : std::max(first, second));
    }
  }
  if (spec.key_begin) key_begin = to_buffer(begins);
  if (spec.key_end) key_end = to_buffer(ends);
  num_columns = num_logits(spec);
  logits = rows_buffer(spec.logits_dtype, num_tokens, num_columns, spec.logits_extra);
  fill_heads(params().q, spec.seed, kQ, 1.0F);
  for (int64_t t = 0; t < num_tokens; ++t)
    fill_normal(weights.data(), DType::kF32, t * (spec.num_heads + spec.weights_extra), spec.num_heads,
                mix(spec.seed, kWeights, static_cast<uint64_t>(t)));
  reset_outputs();
}

IndexerLogitsParams IndexerLogitsCase::params() const {
  IndexerLogitsParams p;
  p.q = padded_view(q, spec.q_dtype, num_tokens, spec.num_heads, kIndexerLayout.head_dim, spec.q_head_extra,
                    spec.q_token_extra);
  p.weights = rows_view(weights, DType::kF32, num_tokens, spec.num_heads, spec.weights_extra);
  p.cache = memory.cache;
  p.pages = table.pages;
  if (!spec.omit_qo_indptr) p.qo_indptr = list_view(qo_indptr, DType::kI32, spec.batch_size() + 1);
  p.causal = spec.causal;
  p.ratio = spec.ratio;
  if (spec.key_begin) p.key_begin = list_view(key_begin, DType::kI32, num_tokens);
  if (spec.key_end) p.key_end = list_view(key_end, DType::kI32, num_tokens);
  if (spec.num_blocks > 0) p.blocks = rows_view(blocks, DType::kI32, num_tokens, spec.num_blocks, spec.logits_extra);
  p.block_size = spec.block_size;
  p.compute = spec.compute;
  p.logits = rows_view(logits, spec.logits_dtype, num_tokens, num_columns, spec.logits_extra);
  return p;
}

void IndexerLogitsCase::reset_outputs() const { untouched(outputs()); }

std::vector<double> IndexerLogitsCase::row_scales() const {
  constexpr int64_t kDim = kIndexerLayout.head_dim;
  const TensorView queries = params().q;
  std::vector<double> scales;
  for (size_t request = 0; request < spec.kv_len.size(); ++request) {
    double largest = 0;
    for (int64_t key = 0; key < spec.kv_len[request] / spec.ratio; ++key) {
      const int64_t slot = table.slot_of(request, key), page = slot / spec.page_size, offset = slot % spec.page_size;
      double squares = 0;
      for (const double value : memory.values(page, offset)) squares += value * value;
      largest = std::max(largest, std::sqrt(squares));
    }
    for (int32_t i = 0; i < spec.q_len_of(request); ++i) {
      const auto t = std::ssize(scales);
      double sum = 0;
      for (int64_t h = 0; h < spec.num_heads; ++h) {
        double squares = 0;
        for (int64_t c = 0; c < kDim; ++c) {
          const double value = load_element(q.data(), spec.q_dtype, t * queries.stride[0] + h * queries.stride[1] + c);
          squares += value * value;
        }
        sum += std::sqrt(squares) *
               std::abs(static_cast<double>(weights.as<float>()[t * (spec.num_heads + spec.weights_extra) + h]));
      }
      scales.push_back(sum * largest);
    }
  }
  return scales;
}

TopKCase::TopKCase(const TopKSpec& top_k_spec) : spec(noted(top_k_spec)) {
  logits = rows_buffer(spec.logits_dtype, spec.num_tokens, spec.num_logits, spec.logits_extra);
  logits.fill(spec.logits_dtype == DType::kF16 ? 0x7B : 0x7F);  // 6.1e4 or 3.4e38: larger than what counts
  std::vector<float> row(static_cast<size_t>(spec.num_logits));
  std::vector<int32_t> row_lengths;
  for (int64_t t = 0; t < spec.num_tokens; ++t) {
    Random random(mix(spec.seed, kLogits, static_cast<uint64_t>(t)));
    fill_normal(row.data(), DType::kF32, 0, spec.num_logits, random.next());
    for (int64_t j = 0; j < spec.num_logits; ++j) {
      float& logit = row[static_cast<size_t>(j)];
      if (spec.levels > 0)
        logit =
            static_cast<float>(random.integer(0, int64_t{spec.levels} - 1)) - 0.5F * static_cast<float>(spec.levels);
      if (spec.levels > 0 && logit == 0 && random.chance(0.5)) logit = -0.0F;
      if (random.chance(spec.nan_share)) logit = random.chance(0.5) ? std::nanf("") : -std::nanf("");
      if (random.chance(spec.infinite_share)) logit = random.chance(0.5) ? INFINITY : -INFINITY;
      store_element(logits.data(), spec.logits_dtype, t * (spec.num_logits + spec.logits_extra) + j, logit);
    }
    const double kind = random.uniform();
    row_lengths.push_back(static_cast<int32_t>(kind < 0.1   ? 0
                                               : kind < 0.2 ? spec.num_logits
                                                            : random.integer(0, spec.num_logits)));
  }
  if (spec.lengths) lengths = to_buffer(row_lengths);
  std::vector<int32_t> row_starts;
  for (size_t t = 0; t < row_lengths.size(); ++t)
    row_starts.push_back(static_cast<int32_t>(
        Random(mix(spec.seed, kLengths, t)).integer(0, spec.lengths ? row_lengths[t] : spec.num_logits)));
  if (spec.starts) starts = to_buffer(row_starts);
  if (spec.num_blocks > 0) {
    std::vector<int32_t> lists;
    for (int64_t t = 0; t < spec.num_tokens; ++t) {
      const std::vector<int32_t> list =
          draw_blocks(4 * spec.num_blocks, spec.num_blocks, 0.0, mix(spec.seed, kIndices, static_cast<uint64_t>(t)));
      lists.insert(lists.end(), list.begin(), list.end());
    }
    blocks = padded_indices(lists, spec.num_tokens, spec.num_blocks, spec.indices_extra);
  }
  indices = rows_buffer(DType::kI32, spec.num_tokens, spec.k, spec.indices_extra);
  reset_outputs();
}

TopKParams TopKCase::params() const {
  TopKParams p;
  p.logits = rows_view(logits, spec.logits_dtype, spec.num_tokens, spec.num_logits, spec.logits_extra);
  if (spec.lengths) p.lengths = list_view(lengths, DType::kI32, spec.num_tokens);
  if (spec.starts) p.starts = list_view(starts, DType::kI32, spec.num_tokens);
  if (spec.num_blocks > 0)
    p.blocks = rows_view(blocks, DType::kI32, spec.num_tokens, spec.num_blocks, spec.indices_extra);
  p.block_size = spec.block_size;
  p.indices = rows_view(indices, DType::kI32, spec.num_tokens, spec.k, spec.indices_extra);
  return p;
}

void TopKCase::reset_outputs() const { untouched(outputs()); }

IndexerTopKCase::IndexerTopKCase(const IndexerTopKSpec& top_k_spec) : spec(top_k_spec), indexer(top_k_spec.indexer) {
  noted(spec);  // rather than its indexer
  table =
      make_table({.page_size = spec.page_size,
                  .block_table = spec.indexer.block_table,
                  .row_extra = spec.table_row_extra,
                  .garbage_tail = true,
                  .shuffled = true,
                  .unowned_pages = 1,
                  .context_parallel = spec.indexer.ratio > 1 && !spec.list_tokens ? last_of_groups(spec.indexer.ratio)
                                                                                  : spec.context_parallel},
                 spec.indexer.kv_len, mix(spec.indexer.seed, kTable, 1));
  slots = rows_buffer(DType::kI32, indexer.num_tokens, spec.num_slots(), spec.slots_extra);
  if (spec.want_valid_count) valid_count = rows_buffer(DType::kI32, 1, indexer.num_tokens, 0);
  reset_outputs();
}

IndexerTopKParams IndexerTopKCase::params() const {
  IndexerTopKParams p;
  p.indexer = indexer.params();
  p.pages = table.pages;
  p.page_size = spec.page_size;
  p.context_parallel = spec.context_parallel;
  p.list_tokens = spec.list_tokens;
  if (spec.slots_columns > 0) p.topk = spec.topk;
  p.slots = rows_view(slots, DType::kI32, indexer.num_tokens, spec.num_slots(), spec.slots_extra);
  if (spec.want_valid_count) p.valid_count = list_view(valid_count, DType::kI32, indexer.num_tokens);
  return p;
}

void IndexerTopKCase::reset_outputs() const { untouched(outputs()); }

}  // namespace mla::kit
