// SPDX-License-Identifier: Apache-2.0
// Validates the parameters of append_indexer, indexer_logits and indexer_top_k.
#include <cstdint>

#include "core/batch_checks.h"
#include "core/format.h"
#include "core/index_checks.h"
#include "core/list_checks.h"
#include "core/validate.h"

namespace mla::core {

bool check_per_token(Checks& check, std::string_view field, const TensorView& view, int64_t num_tokens,
                     const int32_t*& values) {
  if (!view.given()) return check.ok();
  if (!check.tensor(field, view, kI32Only, {{"T", &num_tokens}})) return false;
  values = static_cast<const int32_t*>(view.data);
  return true;
}

bool check_key_blocks(Checks& check, const TensorView& view, int32_t block_size, int64_t num_tokens,
                      KeyBlocks& blocks) {
  if (!check.at_least("block_size", block_size, 1)) return false;
  if (!view.given()) return true;
  int64_t count = kUnbound;
  if (!check.tensor("blocks", view, kI32Only, {{"T", &num_tokens}, {"M", &count}}) ||
      !check.fits_int32("number of blocks", count) || !check.fits_int32("number of listed keys", count * block_size))
    return false;
  blocks = {.blocks = static_cast<const int32_t*>(view.data),
            .stride_token = view.stride[0],
            .count = static_cast<int32_t>(count),
            .size = block_size};
  return true;
}

namespace {

/// Checks the parameters that indexer_logits and indexer_top_k share, which are all of those of indexer_logits.
bool check_indexer(Checks& check, const IndexerLogitsParams& params, IndexerLogitsArgs& args) {
  BatchShape batch;
  int64_t head_dim = kIndexerLayout.head_dim;
  int64_t batch_size = kUnbound;
  int64_t width = kUnbound;
  const bool shapes =
      check.tensor("q", params.q, kFloatsAndE4M3,
                   {{"T", &batch.num_tokens}, {"H", &batch.num_heads}, {"", &head_dim}}) &&
      check_batch_and_rows(check, batch) &&
      check.tensor("weights", params.weights, kF32Only, {{"T", &batch.num_tokens}, {"H", &batch.num_heads}}) &&
      check_indexer_cache(check, "cache", params.cache, Role::kInput, args.cache) &&
      check.at_least("ratio", params.ratio, 1) &&
      check_page_table(check, params.pages, args.cache.page_size, {.ratio = params.ratio}, batch_size, args.pages) &&
      check_queries(check, params.qo_indptr, batch_size, batch.num_tokens, args.queries) &&
      check_per_token(check, "key_begin", params.key_begin, batch.num_tokens, args.key_begin) &&
      check_per_token(check, "key_end", params.key_end, batch.num_tokens, args.key_end) &&
      check_key_blocks(check, params.blocks, params.block_size, batch.num_tokens, args.blocks) &&
      check_compute(check, params.compute) &&
      check.tensor("logits", params.logits, kFloats, {{"T", &batch.num_tokens}, {"N", &width}}, Role::kOutput) &&
      check.fits_int32("num_logits", width);
  if (!shapes) return false;
  if (args.blocks.given() && width < args.blocks.num_keys())
    return check.fail("logits", "expected rows of at least {} logits, for {} blocks of {} keys, got {}",
                      args.blocks.num_keys(), args.blocks.count, args.blocks.size, width);
  if (check.on_cpu()) {
    for (int64_t b = 0; b < batch_size && !args.blocks.given(); ++b)
      if (args.pages.kv_len[b] / params.ratio > width)
        return check.fail("logits", "expected rows of at least {}, got {} for request {}",
                          params.ratio == 1
                              ? core::format("`kv_len` = {}", args.pages.kv_len[b])
                              : core::format("`kv_len` / {} = {}", params.ratio, args.pages.kv_len[b] / params.ratio),
                          width, b);
    if (!check_used_pages(check, args.pages, {.ratio = params.ratio}, args.cache.num_pages)) return false;
  }
  args.batch_size = static_cast<int32_t>(batch_size);
  args.num_tokens = batch.num_tokens;
  args.num_heads = static_cast<int32_t>(batch.num_heads);
  args.q_dtype = params.q.dtype;
  args.q = params.q.data;
  args.q_stride_token = params.q.stride[0];
  args.q_stride_head = params.q.stride[1];
  args.weights = static_cast<const float*>(params.weights.data);
  args.weights_stride_token = params.weights.stride[0];
  args.causal = params.causal;
  args.ratio = params.ratio;
  args.compute = params.compute;
  args.num_logits = width;
  args.logits_dtype = params.logits.dtype;
  args.logits = params.logits.data;
  args.logits_stride_token = params.logits.stride[0];
  return true;
}

/// Checks that the latent cache holds as many tokens of each request as the indexer's cache.
bool check_same_lengths(Checks& check, const Pages& indexer, const Pages& latent) {
  if (!check.require(indexer.batch_size == latent.batch_size, "kv_len",
                     "expected {} requests, as in `indexer.kv_len`, got {}", indexer.batch_size, latent.batch_size))
    return false;
  if (!check.on_cpu()) return true;
  for (int32_t b = 0; b < latent.batch_size; ++b)
    if (latent.kv_len[b] != indexer.kv_len[b])
      return check.fail("kv_len", "expected {} as in `indexer.kv_len`, got {} for request {}", indexer.kv_len[b],
                        latent.kv_len[b], b);
  return true;
}

}  // namespace

Status validate(const AppendIndexerParams& params, AppendIndexerArgs& args, Device& device, Memory memory) {
  Checks check(Op::kAppendIndexer, Scope::kAll, memory);
  int64_t num_tokens = kUnbound;
  int64_t head_dim = kIndexerLayout.head_dim;
  args = {};
  if (!check.tensor("k", params.k, kFloats, {{"T", &num_tokens}, {"", &head_dim}}) ||
      !check_indexer_cache(check, "cache", params.cache, Role::kOutput, args.cache) ||
      !check_indexer_scales(check, args.cache, params.power_of_two_scales) ||
      !check.tensor("slot_mapping", params.slot_mapping, kI64Only, {{"T", &num_tokens}}))
    return check.take();
  args.num_tokens = num_tokens;
  args.dtype = params.k.dtype;
  args.k = params.k.data;
  args.k_stride_token = params.k.stride[0];
  args.slot_mapping = static_cast<const int64_t*>(params.slot_mapping.data);
  args.power_of_two_scales = params.power_of_two_scales;
  if (check.on_cpu())
    check_slots(check, "slot_mapping", args.slot_mapping, num_tokens, args.cache.num_pages * args.cache.page_size);
  return check.finish(device);
}

Status validate(const IndexerLogitsParams& params, IndexerLogitsArgs& args, Device& device, Memory memory) {
  Checks check(Op::kIndexerLogits, Scope::kAll, memory);
  args = {};
  check_indexer(check, params, args);
  return check.finish(device);
}

Status validate(const IndexerTopKParams& params, IndexerTopKArgs& args, Device& device, Memory memory) {
  Checks check(Op::kIndexerTopK, Scope::kAll, memory);
  int64_t batch_size = kUnbound;
  args = {};
  {
    const Checks::Within within(check, "indexer");
    if (!check_indexer(check, params.indexer, args.indexer)) return check.take();
  }
  PhysicalSlotsArgs& slots = args.slots;
  const int64_t ratio = params.indexer.ratio;
  const PagedRows rows = {.share = params.context_parallel, .ratio = params.list_tokens ? 1 : params.indexer.ratio};
  int64_t num_tokens = args.indexer.num_tokens, width = kUnbound;
  const bool shapes =
      check_page_size(check, params.page_size) && check_context_parallel(check, params.context_parallel) &&
      check_ratio_of_rank(check, "indexer.ratio", params.context_parallel, params.indexer.ratio, params.list_tokens) &&
      check_page_table(check, params.pages, params.page_size, rows, batch_size, slots.pages) &&
      check_same_lengths(check, args.indexer.pages, slots.pages) && check_slot_pages(check, slots.pages, rows) &&
      check.tensor("slots", params.slots, kI32Only, {{"T", &num_tokens}, {params.list_tokens ? "W" : "topk", &width}},
                   Role::kOutput) &&
      check.fits_int32("topk", width) && check_valid_count(check, params.valid_count, num_tokens);
  if (!shapes) return check.take();
  const int64_t room = params.list_tokens ? (width + 1) / ratio - 1 : width;
  const int64_t topk = params.topk == 0 ? room : params.topk;
  if (!check.at_least("topk", topk, 1) || (params.list_tokens && !check_listed(check, topk, ratio, width)) ||
      !check.require(topk <= room, "topk", "expected at most the {} slots of a row, got {}", width, topk))
    return check.take();

  slots.num_tokens = num_tokens;
  slots.topk = static_cast<int32_t>(topk);
  slots.num_slots = static_cast<int32_t>(width);
  slots.context_parallel = params.context_parallel;
  slots.ratio = params.indexer.ratio;
  slots.list_tokens = params.list_tokens;
  slots.compact = true;
  slots.slots = static_cast<int32_t*>(params.slots.data);
  slots.slots_stride_token = params.slots.stride[0];
  // Indices stand at the end of a row. No slot is written behind the index that it comes from, which is read before.
  slots.indices = slots.slots + (width - topk);
  slots.indices_stride_token = slots.slots_stride_token;
  slots.queries = args.indexer.queries;
  slots.valid_count = static_cast<int32_t*>(if_given(params.valid_count).data);
  args.top_k = {.num_tokens = num_tokens,
                .num_logits = args.indexer.num_logits,
                .logits_dtype = args.indexer.logits_dtype,
                .logits = args.indexer.logits,
                .logits_stride_token = args.indexer.logits_stride_token,
                .lengths = args.indexer.blocks.given() ? nullptr : args.indexer.key_end,
                .starts = args.indexer.blocks.given() ? nullptr : args.indexer.key_begin,
                .blocks = args.indexer.blocks,
                .k = slots.topk,
                .indices = slots.slots + (width - topk),
                .indices_stride_token = slots.slots_stride_token};
  return check.finish(device);
}

}  // namespace mla::core
