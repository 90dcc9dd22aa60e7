// SPDX-License-Identifier: Apache-2.0
// Lists the fields of every params struct in the order of mla/params.h. A list that lacks a field of its struct, or
// names one too many, does not compile, so that what goes over all fields cannot forget a new one.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <type_traits>

#include "mla/params.h"

namespace mla::kit {

/// Calls f(name, field) for each of "name, name, ..." with its field.
template <class F, class... Fields>
void name_fields(std::string_view names, const F& f, Fields&... fields) {
  const auto next = [&names] {
    const std::string_view first = names.substr(0, names.find(','));
    names.remove_prefix(std::min(first.size() + 2, names.size()));  // ", "
    return first;
  };
  (f(next(), fields), ...);
}

// for_each_field(params, f) calls f(std::string_view name, field&) for every field of a struct. The structured binding
// is what counts them.
#define MLA_KIT_FIELDS(Struct, ...)                 \
  template <class F>                                \
  void for_each_field(Struct& params, const F& f) { \
    auto& [__VA_ARGS__] = params;                   \
    name_fields(#__VA_ARGS__, f, __VA_ARGS__);      \
  }                                                 \
  static_assert(true) /* so that a semicolon follows */

MLA_KIT_FIELDS(KvCache, format, kv, ckv, kpe, ckv_scale, kpe_scale, page_size, power_of_two_scales);
MLA_KIT_FIELDS(PageTable, kv_indptr, kv_indices, block_table, kv_len);
MLA_KIT_FIELDS(ContextParallel, rank, world, interleave);
MLA_KIT_FIELDS(AttentionOptions, attn_sink, window_left, logits_soft_cap, alibi_slopes);
MLA_KIT_FIELDS(DecodeParams, q, q_nope, q_pe, q_scale, cache, pages, qo_indptr, causal, tree_mask, tree_parents,
               options, context_parallel, sm_scale, lse_base, batch_invariant, o, o_scale, lse);
MLA_KIT_FIELDS(SparsePool, cache, indices, topk_length, topk_length_per);
MLA_KIT_FIELDS(DecodeSparseParams, q, q_nope, q_pe, q_scale, pool, extra_pool, qo_indptr, options, sm_scale, lse_base,
               batch_invariant, o, o_scale, lse);
MLA_KIT_FIELDS(PrefillParams, q, k, v, qo_indptr, kv_indptr, causal, options, sm_scale, lse_base, batch_invariant, o,
               lse);
MLA_KIT_FIELDS(PrefillSparseParams, q, kv, indices, topk_length, options, sm_scale, lse_base, batch_invariant, o,
               max_logits, lse);
MLA_KIT_FIELDS(MergeStatesParams, partial_o, partial_lse, lse_base, in_place, o, lse);
MLA_KIT_FIELDS(AppendParams, kv, ckv, kpe, slot_mapping, cache);
MLA_KIT_FIELDS(AppendRopeParams, q_nope, q_pe, q_out, q_scale, ckv, kpe, cos_sin, positions, interleaved, slot_mapping,
               cache);
MLA_KIT_FIELDS(GatherParams, cache, pages, token_start, out_indptr, out_kv, out_ckv, out_kpe);
MLA_KIT_FIELDS(CopyPagesParams, from, from_pages, to, to_pages);
MLA_KIT_FIELDS(BlockTableToCsrParams, block_table, kv_len, page_size, kv_indptr, kv_indices);
MLA_KIT_FIELDS(PhysicalSlotsParams, indices, topk_length, qo_indptr, pages, page_size, context_parallel, compact, slots,
               valid_count);
MLA_KIT_FIELDS(IndexerCache, kv, page_size);
MLA_KIT_FIELDS(AppendIndexerParams, k, slot_mapping, power_of_two_scales, cache);
MLA_KIT_FIELDS(IndexerLogitsParams, q, weights, cache, pages, qo_indptr, causal, logits);
MLA_KIT_FIELDS(TopKParams, logits, lengths, indices);
MLA_KIT_FIELDS(IndexerTopKParams, indexer, pages, page_size, slots, valid_count);

#undef MLA_KIT_FIELDS

/// Whether T is one of the structs above.
template <class T>
concept HasFields = requires(T& params) {
  for_each_field(params, [](std::string_view, auto&) {});
};

/// The same for the fields of fields: f("options.window_left", field).
template <class Params, class F>
void for_each_leaf(Params& params, const F& f, const std::string& prefix = "") {
  for_each_field(params, [&](std::string_view name, auto& field) {
    const std::string path = prefix + std::string(name);
    if constexpr (HasFields<std::remove_reference_t<decltype(field)>>)
      for_each_leaf(field, f, path + ".");
    else
      f(path, field);
  });
}

}  // namespace mla::kit
