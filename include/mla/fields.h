// SPDX-License-Identifier: Apache-2.0
// This header lists the fields of every params struct, for bindings and tools: what is said here once, the C ABI, the
// plans, the Python package and the tests' problems read. Callers of the library need nothing of it, and mla.h leaves
// it out.
//
// A struct whose list lacks a field, or names one too many, does not compile: what goes over all fields cannot forget a
// new one.
#pragma once

#include <string>
#include <string_view>
#include <type_traits>

#include "mla/params.h"

namespace mla {

/// Names a field, and finds it in any struct that has a field of that name.
template <class Of>
struct Member {
  std::string_view name;
  Of of;  ///< of(params) is the field of that name; it does not compile where `params` has none
};
template <class Of>
Member(std::string_view, Of) -> Member<Of>;

// The macros call `MLA_FIELD(field)` for each of up to 80 fields.
#define MLA_PARENTHESES ()
#define MLA_EXPAND(...) MLA_EXPAND_16(MLA_EXPAND_16(MLA_EXPAND_16(MLA_EXPAND_16(__VA_ARGS__))))
#define MLA_EXPAND_16(...) MLA_EXPAND_4(MLA_EXPAND_4(MLA_EXPAND_4(MLA_EXPAND_4(__VA_ARGS__))))
#define MLA_EXPAND_4(...) MLA_EXPAND_1(MLA_EXPAND_1(MLA_EXPAND_1(MLA_EXPAND_1(__VA_ARGS__))))
#define MLA_EXPAND_1(...) __VA_ARGS__
#define MLA_EACH_FIELD(field, ...) \
  MLA_FIELD(field)                 \
  __VA_OPT__(MLA_EACH_FIELD_AGAIN MLA_PARENTHESES(__VA_ARGS__))
#define MLA_EACH_FIELD_AGAIN() MLA_EACH_FIELD
#define MLA_FIELD(field) f(Member{#field, [](auto& params) -> decltype((params.field)) { return params.field; }});

// visit_members(const Struct*, f) calls f(Member) for every field. The structured binding is what counts them.
#define MLA_FIELDS(Struct, ...)                                                                     \
  inline void count_fields(Struct& params) { [[maybe_unused]] const auto& [__VA_ARGS__] = params; } \
  template <class F>                                                                                \
  constexpr void visit_members(const Struct*, const F& f) {                                         \
    MLA_EXPAND(MLA_EACH_FIELD(__VA_ARGS__))                                                         \
  }                                                                                                 \
  static_assert(true) /* so that a semicolon follows */

MLA_FIELDS(KvCache, format, kv, ckv, kpe, ckv_scale, kpe_scale, page_size, power_of_two_scales);
MLA_FIELDS(PageTable, kv_indptr, kv_indices, block_table, kv_len);
MLA_FIELDS(ContextParallel, rank, world, interleave);
MLA_FIELDS(AttentionOptions, attn_sink, window_left, logits_soft_cap, alibi_slopes, compute);
MLA_FIELDS(DecodeParams, q, q_nope, q_pe, q_scale, cache, pages, qo_indptr, causal, tree_mask, tree_parents, options,
           context_parallel, sm_scale, lse_base, lse_inf_without_keys, batch_invariant, shared_prefix, o, o_scale, lse);
MLA_FIELDS(OutputFinish, cos_sin, positions, interleaved, gate, scale, power_of_two_scales);
MLA_FIELDS(SparsePool, cache, indices, topk_length, topk_length_per);
MLA_FIELDS(DecodeSparseParams, q, q_nope, q_pe, q_scale, pool, extra_pool, qo_indptr, options, sm_scale, lse_base,
           lse_inf_without_keys, batch_invariant, o, o_scale, lse, max_logits, finish);
MLA_FIELDS(PrefillParams, q, k, v, q_scale, k_scale, v_scale, qo_indptr, kv_indptr, causal, options, sm_scale, lse_base,
           batch_invariant, o, o_scale, lse);
MLA_FIELDS(PrefillSparseParams, q, kv, indices, topk_length, options, sm_scale, lse_base, lse_inf_without_keys,
           batch_invariant, o, max_logits, lse);
MLA_FIELDS(MergeStatesParams, partial_o, partial_lse, lse_base, in_place, o, lse);
MLA_FIELDS(AppendParams, kv, ckv, kpe, slot_mapping, cache);
MLA_FIELDS(AppendRopeParams, q_nope, q_pe, q_out, q_scale, ckv, kpe, cos_sin, positions, interleaved, slot_mapping,
           q_norm, q_norm_weight, norm_weight, norm_eps, cache);
MLA_FIELDS(GatherParams, cache, pages, token_start, out_indptr, out_kv, out_ckv, out_kpe);
MLA_FIELDS(CopyPagesParams, from, from_pages, to, to_pages);
MLA_FIELDS(BlockTableToCsrParams, block_table, kv_len, page_size, kv_indptr, kv_indices);
MLA_FIELDS(PhysicalSlotsParams, indices, topk_length, qo_indptr, pages, page_size, context_parallel, ratio, list_tokens,
           compact, slots, valid_count);
MLA_FIELDS(IndexerCache, format, kv, page_size);
MLA_FIELDS(AppendIndexerParams, k, slot_mapping, power_of_two_scales, cache);
MLA_FIELDS(IndexerLogitsParams, q, weights, cache, pages, qo_indptr, causal, compute, ratio, key_begin, key_end, blocks,
           block_size, logits);
MLA_FIELDS(TopKParams, logits, lengths, starts, blocks, block_size, indices);
MLA_FIELDS(IndexerTopKParams, indexer, pages, page_size, context_parallel, list_tokens, topk, slots, valid_count);
MLA_FIELDS(CompressParams, kv, score, position_bias, qo_indptr, kv_len, ratio, overlap, state, state_table, norm_weight,
           norm_eps, latent, slot_mapping, cos_sin, interleaved, cache, indexer, power_of_two_scales, append);
MLA_FIELDS(FinishOutputParams, o, finish, out);

#undef MLA_PARENTHESES
#undef MLA_EXPAND
#undef MLA_EXPAND_16
#undef MLA_EXPAND_4
#undef MLA_EXPAND_1
#undef MLA_EACH_FIELD
#undef MLA_EACH_FIELD_AGAIN
#undef MLA_FIELD
#undef MLA_FIELDS

/// Says whether T is one of the structs above.
template <class T>
concept HasFields = requires(std::remove_const_t<T>& params) {
  count_fields(params);
};

/// Calls f(member) for every field of a params struct, in the order of mla/params.h.
template <HasFields Params, class F>
constexpr void for_each_member(const F& f) {
  visit_members(static_cast<const Params*>(nullptr), f);
}

/// Calls f(std::string_view name, field&) for every field.
template <HasFields Params, class F>
void for_each_field(Params& params, const F& f) {
  for_each_member<std::remove_const_t<Params>>([&](auto member) { f(member.name, member.of(params)); });
}

/// Does the same, but calls f for the fields of a field in its place: f("options.window_left", field).
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

}  // namespace mla
