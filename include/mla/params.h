// SPDX-License-Identifier: Apache-2.0
// One plain struct per operation. T = query tokens of the batch, B = requests, H = heads, S = key tokens.
// A view left default-constructed is "not given". The innermost dimension of every tensor is contiguous (stride 1),
// but for lse and partial_lse; all other strides are free. Integers are int32 unless said. A request has at most 2^30
// keys, a page at most 2^30 tokens, and T * H (in prefill also B * H) is at most 2^31 - 1.
#pragma once

#include "mla/kv_layout.h"
#include "mla/types.h"

namespace mla {

/// A paged latent cache: either `kv`, one row [ckv | kpe] per token, or `ckv` and `kpe` as two tensors with their own
/// page and token strides. `kpe` is not given when qk_rope_head_dim is 0 ("NoPE").
struct KvCache {
  CacheFormat format = CacheFormat::kBF16;
  TensorView kv = {};   ///< [num_pages, page_size, kv_lora_rank + qk_rope_head_dim]
  TensorView ckv = {};  ///< [num_pages, page_size, kv_lora_rank]
  TensorView kpe = {};  ///< [num_pages, page_size, qk_rope_head_dim]
};

/// Which pages hold which tokens: either CSR (`kv_indptr`, `kv_indices`) or a padded `block_table`. Entries past the
/// last page a request needs, ceil(kv_len / page_size), are never read.
struct PageTable {
  TensorView kv_indptr = {};    ///< [B+1], offsets into kv_indices, in pages
  TensorView kv_indices = {};   ///< [kv_indptr[B]] or more, page numbers
  TensorView block_table = {};  ///< [B, max_pages], page numbers
  TensorView kv_len = {};       ///< [B], tokens of each request, those of the queries included; 0 is legal
};

/// Dense decode in the absorbed form: o = softmax(sm_scale * (q_nope . ckv + q_pe . kpe)) . ckv, one KV head.
/// Query i of a request with q_len queries sees key j iff j <= kv_len - q_len + i (causal), or every key.
/// A query without a visible key gets o = 0 and lse = -inf. What lies past kv_len is never read, and a NaN in a key
/// that a query does not see never reaches it.
struct DecodeParams {
  TensorView q = {};       ///< [T, H, d_qk]; or
  TensorView q_nope = {};  ///< [T, H, kv_lora_rank] and
  TensorView q_pe = {};    ///< [T, H, qk_rope_head_dim] (not given when qk_rope_head_dim is 0); bf16, f16 or f32
  KvCache cache = {};
  PageTable pages = {};
  TensorView qo_indptr = {};  ///< [B+1], first query of each request; not given: T / B queries each
  bool causal = true;
  /// Scale before absorption, 1/sqrt(qk_nope_head_dim + qk_rope_head_dim); above 0, and sm_scale * log2(e) finite.
  float sm_scale = 0.0F;
  LseBase lse_base = LseBase::kE;
  bool batch_invariant = false;  ///< the bits of a request do not depend on the other requests of the batch
  TensorView o = {};             ///< out [T, H, d_v = kv_lora_rank], the query's dtype or f32
  TensorView lse = {};           ///< out [T, H] f32, optional
};

/// Ragged prefill in the up-projected form. Query i of a request sees key j iff j <= kv_len - q_len + i (causal), or
/// every key of the request. A NaN in a key or value that a query does not see never reaches it.
struct PrefillParams {
  TensorView q = {};          ///< [T, H, d_qk]; bf16, f16 or f32
  TensorView k = {};          ///< [S, H, d_qk], the query's dtype
  TensorView v = {};          ///< [S, H, d_v], the query's dtype
  TensorView qo_indptr = {};  ///< [B+1], first query of each request
  TensorView kv_indptr = {};  ///< [B+1], first key of each request
  bool causal = true;
  float sm_scale = 0.0F;  ///< above 0, and sm_scale * log2(e) finite
  LseBase lse_base = LseBase::kE;
  bool batch_invariant = false;
  TensorView o = {};    ///< out [T, H, d_v], the query's dtype or f32
  TensorView lse = {};  ///< out [T, H] f32, optional
};

/// Merges N partial attention states into one: lse = log(sum_n exp(lse_n)), o = sum_n exp(lse_n - lse) o_n.
/// States with lse = -inf weigh nothing; if all do, o = 0 and lse = -inf.
struct MergeStatesParams {
  TensorView partial_o = {};    ///< [N, T, H, d_v]; bf16, f16 or f32
  TensorView partial_lse = {};  ///< [N, T, H] f32
  LseBase lse_base = LseBase::kE;
  bool in_place = false;  ///< o and lse hold one more state on entry, which is merged too
  TensorView o = {};      ///< out (in/out if in_place) [T, H, d_v]; bf16, f16 or f32
  TensorView lse = {};    ///< out (in/out if in_place) [T, H] f32; optional unless in_place
};

/// Writes token t's latent row into cache slot slot_mapping[t] = page * page_size + offset; a negative slot skips it.
/// Two tokens of one call must not name the same slot.
struct AppendParams {
  TensorView kv = {};            ///< [T, kv_lora_rank + qk_rope_head_dim]; or
  TensorView ckv = {};           ///< [T, kv_lora_rank] and
  TensorView kpe = {};           ///< [T, qk_rope_head_dim]; bf16, f16 or f32, rounded to the cache's type
  TensorView slot_mapping = {};  ///< [T] int64
  KvCache cache = {};            ///< out
};

/// Copies tokens token_start[b] .. token_start[b] + (out_indptr[b+1] - out_indptr[b]) of every request b into rows
/// out_indptr[b] ... of a dense workspace.
struct GatherParams {
  KvCache cache = {};
  PageTable pages = {};
  TensorView token_start = {};  ///< [B]; not given: 0 everywhere
  TensorView out_indptr = {};   ///< [B+1], first output row of each request
  TensorView out_kv = {};       ///< out [S, kv_lora_rank + qk_rope_head_dim]; or
  TensorView out_ckv = {};      ///< out [S, kv_lora_rank] and
  TensorView out_kpe = {};      ///< out [S, qk_rope_head_dim]; bf16, f16 or f32
};

}  // namespace mla
