// SPDX-License-Identifier: Apache-2.0
// Visits every tensor of an operation's parameters, given or not, for what treats them all alike; and those that the
// operation writes, caches aside.
#pragma once

#include "mla/params.h"

namespace mla::kit {

// One overload per struct; `f` takes a TensorView&.

template <class F>
void for_each_tensor(KvCache& cache, const F& f) {
  for (TensorView* view : {&cache.kv, &cache.ckv, &cache.kpe, &cache.ckv_scale, &cache.kpe_scale}) f(*view);
}

template <class F>
void for_each_tensor(PageTable& pages, const F& f) {
  for (TensorView* view : {&pages.kv_indptr, &pages.kv_indices, &pages.block_table, &pages.kv_len}) f(*view);
}

template <class F>
void for_each_tensor(AttentionOptions& options, const F& f) {
  f(options.attn_sink);
  f(options.alibi_slopes);
}

template <class F>
void for_each_tensor(DecodeParams& p, const F& f) {
  for (TensorView* view :
       {&p.q, &p.q_nope, &p.q_pe, &p.q_scale, &p.qo_indptr, &p.tree_mask, &p.tree_parents, &p.o, &p.o_scale, &p.lse})
    f(*view);
  for_each_tensor(p.cache, f);
  for_each_tensor(p.pages, f);
  for_each_tensor(p.options, f);
}

template <class F>
void for_each_tensor(DecodeSparseParams& p, const F& f) {
  for (TensorView* view : {&p.q, &p.q_nope, &p.q_pe, &p.q_scale, &p.qo_indptr, &p.o, &p.o_scale, &p.lse}) f(*view);
  for (SparsePool* pool : {&p.pool, &p.extra_pool}) {
    for_each_tensor(pool->cache, f);
    f(pool->indices);
    f(pool->topk_length);
  }
  for_each_tensor(p.options, f);
}

template <class F>
void for_each_tensor(PrefillParams& p, const F& f) {
  for (TensorView* view : {&p.q, &p.k, &p.v, &p.qo_indptr, &p.kv_indptr, &p.o, &p.lse}) f(*view);
  for_each_tensor(p.options, f);
}

template <class F>
void for_each_tensor(PrefillSparseParams& p, const F& f) {
  for (TensorView* view : {&p.q, &p.kv, &p.indices, &p.topk_length, &p.o, &p.max_logits, &p.lse}) f(*view);
  for_each_tensor(p.options, f);
}

template <class F>
void for_each_tensor(MergeStatesParams& p, const F& f) {
  for (TensorView* view : {&p.partial_o, &p.partial_lse, &p.o, &p.lse}) f(*view);
}

template <class F>
void for_each_tensor(AppendParams& p, const F& f) {
  for (TensorView* view : {&p.kv, &p.ckv, &p.kpe, &p.slot_mapping}) f(*view);
  for_each_tensor(p.cache, f);
}

template <class F>
void for_each_tensor(AppendRopeParams& p, const F& f) {
  for (TensorView* view :
       {&p.q_nope, &p.q_pe, &p.q_out, &p.q_scale, &p.ckv, &p.kpe, &p.cos_sin, &p.positions, &p.slot_mapping})
    f(*view);
  for_each_tensor(p.cache, f);
}

template <class F>
void for_each_tensor(GatherParams& p, const F& f) {
  for (TensorView* view : {&p.token_start, &p.out_indptr, &p.out_kv, &p.out_ckv, &p.out_kpe}) f(*view);
  for_each_tensor(p.cache, f);
  for_each_tensor(p.pages, f);
}

template <class F>
void for_each_tensor(CopyPagesParams& p, const F& f) {
  for_each_tensor(p.from, f);
  f(p.from_pages);
  for_each_tensor(p.to, f);
  f(p.to_pages);
}

template <class F>
void for_each_tensor(BlockTableToCsrParams& p, const F& f) {
  for (TensorView* view : {&p.block_table, &p.kv_len, &p.kv_indptr, &p.kv_indices}) f(*view);
}

template <class F>
void for_each_tensor(PhysicalSlotsParams& p, const F& f) {
  for (TensorView* view : {&p.indices, &p.topk_length, &p.qo_indptr, &p.slots, &p.valid_count}) f(*view);
  for_each_tensor(p.pages, f);
}

template <class F>
void for_each_tensor(AppendIndexerParams& p, const F& f) {
  for (TensorView* view : {&p.k, &p.slot_mapping, &p.cache.kv}) f(*view);
}

template <class F>
void for_each_tensor(IndexerLogitsParams& p, const F& f) {
  for (TensorView* view : {&p.q, &p.weights, &p.cache.kv, &p.qo_indptr, &p.logits}) f(*view);
  for_each_tensor(p.pages, f);
}

template <class F>
void for_each_tensor(TopKParams& p, const F& f) {
  for (TensorView* view : {&p.logits, &p.lengths, &p.indices}) f(*view);
}

template <class F>
void for_each_tensor(IndexerTopKParams& p, const F& f) {
  for_each_tensor(p.indexer, f);
  for_each_tensor(p.pages, f);
  f(p.slots);
  f(p.valid_count);
}

template <class F>
void for_each_output(DecodeParams& p, const F& f) {
  for (TensorView* view : {&p.o, &p.lse}) f(*view);
}

template <class F>
void for_each_output(DecodeSparseParams& p, const F& f) {
  for (TensorView* view : {&p.o, &p.lse}) f(*view);
}

template <class F>
void for_each_output(PrefillParams& p, const F& f) {
  for (TensorView* view : {&p.o, &p.lse}) f(*view);
}

template <class F>
void for_each_output(PrefillSparseParams& p, const F& f) {
  for (TensorView* view : {&p.o, &p.max_logits, &p.lse}) f(*view);
}

template <class F>
void for_each_output(MergeStatesParams& p, const F& f) {
  for (TensorView* view : {&p.o, &p.lse}) f(*view);
}

template <class F>
void for_each_output(AppendParams&, const F&) {}

template <class F>
void for_each_output(AppendIndexerParams&, const F&) {}

template <class F>
void for_each_output(GatherParams& p, const F& f) {
  for (TensorView* view : {&p.out_kv, &p.out_ckv, &p.out_kpe}) f(*view);
}

template <class F>
void for_each_output(IndexerLogitsParams& p, const F& f) {
  f(p.logits);
}

template <class F>
void for_each_output(IndexerTopKParams& p, const F& f) {
  for (TensorView* view : {&p.indexer.logits, &p.slots, &p.valid_count}) f(*view);
}

}  // namespace mla::kit
