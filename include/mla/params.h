// SPDX-License-Identifier: Apache-2.0
// This header has one plain struct per operation. T = query tokens of the batch, B = requests, H = heads, S = key
// tokens. A view left default-constructed is "not given". The innermost dimension of every tensor is contiguous (stride
// 1), but for lse, partial_lse, max_logits and scale; all other strides are free. Integers are int32 unless said.
// Scales are f32, finite and above 0. A request has at most 2^30 keys, a page at most 2^30 tokens, and T * H (in
// prefill also B * H) is at most 2^31 - 1.
//
// An output, and a cache that is written, has memory of its own: it shares no byte with another tensor of the call nor
// with the plan's workspace, except where its field says so. Views that interleave without touching are apart: slices
// of one tensor, layers whose pages take turns in one buffer. `run` decides by addresses, shapes and strides, on a GPU
// too, and refuses the call; `plan`, which writes the workspace alone, compares that with the lengths it reads. Two
// cases go unnoticed: memory with two addresses, and, where strides are no multiples of one another, elements that meet
// so rarely that 256 steps do not find one.
#pragma once

#include "mla/context_parallel.h"
#include "mla/kv_layout.h"
#include "mla/types.h"

namespace mla {

/// Describes a paged latent cache.
/// - bf16, f16, fp8: either `kv`, one row [ckv | kpe] per token, or `ckv` and `kpe` as two tensors with their own page
///   and token strides; of bf16, f16 or e4m3 elements. `kpe` is not given when qk_rope_head_dim is 0 ("NoPE").
/// - all others: `kv` as bytes (u8), laid out as kv_layout.h says.
/// A quantized element means e4m3 or e2m1 times its scale, rounded to bf16.
struct KvCache {
  CacheFormat format = CacheFormat::kBF16;
  /// Has the shape [num_pages, page_size, kv_lora_rank + qk_rope_head_dim]; in rows of bytes [num_pages, page_size, row
  /// bytes], in pages with footers (fp8_dsv4, fp8_dsv41, fp4_dsv41, nvfp4_dsv4) [num_pages, page bytes or more]. Bytes
  /// lie at an even address, with even strides.
  TensorView kv = {};
  TensorView ckv = {};  ///< [num_pages, page_size, kv_lora_rank]
  TensorView kpe = {};  ///< [num_pages, page_size, qk_rope_head_dim]
  /// Has, in fp8, the shape [1], or [num_pages, page_size, 4] with one scale for each quarter of a token's ckv. Writers
  /// take a scale [1] as it is, and choose and write the scales of the second form (some tensor must say where kpe
  /// begins in a row). In nvfp4_ds_mla of all lengths it is [1], the outer scale that multiplies all others; not given:
  /// 1. Calibration gives max |ckv| / (6 * 448) of a layer.
  TensorView ckv_scale = {};
  TensorView kpe_scale = {};  ///< fp8: [1]; not given: that of ckv, which must then be [1]
  int32_t page_size = 0;      ///< pages with footers: their tokens, which the shape does not say; else 0
  /// For fp8_ds_mla, fp8_nope and fp8 with quarter scales: whether scales are powers of two (V3.2) or any numbers
  /// (GLM). Writers choose 2^ceil(log2(max(amax, 1e-4) / 448)) or amax / 448, of a group's largest finite magnitude;
  /// readers take scales as they are.
  bool power_of_two_scales = true;
};

/// Says which pages hold which tokens, by either CSR (`kv_indptr`, `kv_indices`) or a padded `block_table`. Entries
/// past the last page that a request needs, ceil(kv_len / page_size), are never read.
struct PageTable {
  TensorView kv_indptr = {};    ///< [B+1], offsets into kv_indices, in pages
  TensorView kv_indices = {};   ///< [kv_indptr[B]] or more, page numbers
  TensorView block_table = {};  ///< [B, max_pages], page numbers
  TensorView kv_len = {};       ///< [B], tokens of each request, those of the queries included; 0 is legal
};

/// Holds the options that attention operations have in common. Positions are the request's global ones.
struct AttentionOptions {
  /// Holds [H] f32 natural-log logits: o is multiplied by exp(lse) / (exp(lse) + exp(sink)); lse excludes the sink.
  /// -inf changes nothing, +inf gives o = 0.
  TensorView attn_sink = {};
  /// A query sees its own position and this many before it; -1: all.
  int32_t window_left = -1;
  float logits_soft_cap = 0.0F;  ///< scores become cap * tanh(score / cap), sm_scale included; 0: as they are
  TensorView alibi_slopes = {};  ///< [H] f32: score += slope * (position of the key - position of the query)
  /// kFP8 says, in decode and decode_sparse over quantized caches and in prefill of e4m3 tensors, that products are
  /// those of e4m3 numbers:
  /// - A latent channel of a key is its element times its scale, not rounded, and so is a quantized rotary channel.
  /// - The channels of a query that meet quantized channels become e4m3, with one f32 scale for each token and head:
  ///   their largest finite magnitude / 448, or 1 where that is 0. Queries of e4m3 are taken as they are. Channels that
  ///   meet 16-bit rotary channels are rounded to bf16.
  /// - The keys of a query are taken in runs of 32, in cuda_sm90_fp8 of 64 or 128 (Numerics::p_run): in decode as the
  ///   rank holds them, in prefill from the request's first key on, in decode_sparse as the indices of each pool stand.
  ///   In a run, and for each group of latent channels with one scale, P of a key times that scale becomes e4m3, in
  ///   units of the largest such product of the query's visible keys / 448; it multiplies the key's elements. 16-bit
  ///   rotary channels of a value are multiplied by P unrounded. The denominator and lse sum P unrounded. In prefill,
  ///   v_scale is the one scale of all channels of all values.
  /// Rounding to e4m3 saturates, and is to nearest, ties to even. Rotary channels are quantized in both pools or in
  /// none. kExact is kDefault.
  Compute compute = Compute::kDefault;
};

/// Computes dense decode in the absorbed form: o = softmax(sm_scale * (q_nope . ckv + q_pe . kpe)) . ckv, with one KV
/// head (in fp8_dsv4 the value is the whole row, rotary part included). Query i of a request with q_len queries sees
/// key j iff j <= kv_len - q_len + i (causal), or every key. A query without a visible key gets o = 0 and lse = -inf,
/// or +inf with lse_inf_without_keys. What lies past kv_len is never read, and a NaN in a key that a query does not see
/// never reaches it.
struct DecodeParams {
  TensorView q = {};        ///< [T, H, d_qk]; or
  TensorView q_nope = {};   ///< [T, H, kv_lora_rank] and
  TensorView q_pe = {};     ///< [T, H, qk_rope_head_dim] (not given when that is 0); bf16, f16, f32 or e4m3
  TensorView q_scale = {};  ///< [1] f32, with e4m3 queries: what a stored query must be multiplied by
  KvCache cache = {};
  PageTable pages = {};
  TensorView qo_indptr = {};  ///< [B+1], first query of each request; not given: T / B queries each
  bool causal = true;
  /// For speculative drafts, the last q_len tokens of a request form a tree, and query i sees of them those that its
  /// row names; all earlier keys are visible. At most one of the two is given, with `causal` set.
  TensorView tree_mask = {};     ///< u8 [T, q_len_max or more]: not 0 where query t sees its request's draft j
  TensorView tree_parents = {};  ///< [T]: the draft's parent as an index among its request's drafts, below its own; -1
                                 ///< for a root. A query sees itself and its ancestors.
  AttentionOptions options = {};
  /// Describes this rank's share of every request. kv_len stays global; cache and page table hold the local tokens
  /// only.
  ContextParallel context_parallel = {};
  /// Multiplies the scores. It is the scale before absorption, 1/sqrt(qk_nope_head_dim + qk_rope_head_dim); it must be
  /// above 0, and sm_scale * log2(e) finite.
  float sm_scale = 0.0F;
  LseBase lse_base = LseBase::kE;
  bool lse_inf_without_keys = false;  ///< lse of a query that sees no key is +inf, as FlashMLA's, instead of -inf
  bool batch_invariant = false;       ///< the bits of a request do not depend on the other requests of the batch
  /// Reads the rows that neighbouring requests share once for all of them. `plan` finds these rows: whole pages that
  /// stand first in the page tables of requests next to each other, before each request's own queries. So the page
  /// tables must be there when planning, and `run` gets the same. A group of n requests with a prefix of p keys reads p
  /// keys instead of n * p. Results are those without it but for rounding. It is refused with batch_invariant,
  /// attn_sink, window_left, alibi_slopes, compute, context_parallel, e4m3 outputs, and block tables whose rows
  /// overlap.
  bool shared_prefix = false;
  TensorView o = {};        ///< out [T, H, d_v]: the query's dtype (bf16 for e4m3 queries), f32, or e4m3 with o_scale
  TensorView o_scale = {};  ///< [1] f32, with e4m3 outputs: o is divided by it
  TensorView lse = {};      ///< out [T, H] f32, optional
};

/// Says what an entry of topk_length belongs to.
enum class LengthPer : uint8_t {
  kByShape,  ///< as its shape [T] or [B] says; refused where it says neither: T = B > 1, with qo_indptr
  kToken,    ///< one query token: [T]
  kRequest   ///< all query tokens of a request: [B]
};

/// Describes one pool of latent rows, and names the rows that each query attends to.
struct SparsePool {
  KvCache cache = {};
  /// Holds [T, topk] physical slots, page * page_size + offset, with topk >= 1. A negative one, or one beyond the pool,
  /// is skipped wherever it stands, and never dereferenced. A slot counts as often as it stands.
  TensorView indices = {};
  /// Holds lengths, [T], or [B] with one for all queries of a request: entries from the length on are skipped. A length
  /// below 0 counts as 0, one above topk as topk. If none are given, all are topk.
  TensorView topk_length = {};
  LengthPer topk_length_per = LengthPer::kByShape;
};

/// Says what becomes of attention's outputs o on their way to `out`, which is what the output projection multiplies:
/// the rotary channels turn back, a gate multiplies, and groups are quantized. In f32:
///
///     (x, y) = (x cos a + y sin a, y cos a - x sin a)   for pairs of rotary channels and the angles of the position
///     out[c] = o[c] / (1 + exp(-gate[c])), rounded once
///
/// DeepSeek V4's values have rotary channels, whose rotation the output still has; Kimi K3's output has a gate.
///
/// An output of e4m3 is quantized in groups of 32, 64 or 128 channels, d_v divided by the scales of a head. A scale is
/// made of the group's largest finite magnitude, as writers of caches choose it (KvCache::power_of_two_scales).
/// Infinities saturate, NaN stays NaN.
///
/// `out` has the shape [T, H, d_v], or [T, G, H / G, d_v], where the groups of heads that are projected together lie
/// apart.
struct OutputFinish {
  TensorView cos_sin = {};    ///< [max_positions, rotary channels] f32, as in append_rope: of the last channels of o;
                              ///< not given: nothing turns
  TensorView positions = {};  ///< [T] int64, from 0 to max_positions - 1; with cos_sin
  bool interleaved = true;    ///< as in append_rope
  TensorView gate = {};       ///< [T, H, d_v], or [T, H, 1] with one gate for a head; bf16, f16 or f32; optional
  /// out [T, H, S], or [T, G, H / G, S] as `out`, with any strides: f32; u8, the exponents of powers of two (UE8M0); or
  /// int32 [.., S / 4], four such bytes each, the first in the lowest. With an `out` of e4m3.
  TensorView scale = {};
  bool power_of_two_scales = true;  ///< set unless `scale` is f32
};

/// Computes sparse decode in the absorbed form: the queries of decode attend to the rows that `indices` name, in one or
/// two pools under one softmax. With the tokens of a prompt as queries it is sparse prefill from the pages of a cache
/// of any format. Of the options, window_left and alibi_slopes have no meaning here and are refused.
struct DecodeSparseParams {
  TensorView q = {};        ///< [T, H, d_qk]; or
  TensorView q_nope = {};   ///< [T, H, kv_lora_rank] and
  TensorView q_pe = {};     ///< [T, H, qk_rope_head_dim]; bf16, f16, f32 or e4m3
  TensorView q_scale = {};  ///< [1] f32, with e4m3 queries
  SparsePool pool = {};
  SparsePool extra_pool = {};  ///< optional (indices not given); a cache of its own, of the same row widths
  TensorView qo_indptr = {};   ///< [B+1], only with a topk_length per request; not given: T / B queries each
  AttentionOptions options = {};
  float sm_scale = 0.0F;
  LseBase lse_base = LseBase::kE;
  bool lse_inf_without_keys = false;
  bool batch_invariant = false;
  TensorView o = {};           ///< out [T, H, d_v], as in decode
  TensorView o_scale = {};     ///< [1] f32, with e4m3 outputs that have no finish.scale
  TensorView lse = {};         ///< out [T, H] f32, optional
  TensorView max_logits = {};  ///< out [T, H] f32, optional: the largest score, sm_scale included; -inf without a key
  /// Finishes o, with a tensor of it or with an `o` [T, G, H / G, d_v]; e4m3 outputs have `scale` then. Before that, o
  /// may be rounded to bf16 where queries are bf16 or e4m3.
  OutputFinish finish = {};
};

/// Computes ragged prefill in the up-projected form. Query i of a request sees key j iff j <= kv_len - q_len + i
/// (causal), or every key of the request. A NaN in a key or value that a query does not see never reaches it. An
/// element of e4m3 means its exact value times its tensor's scale: scores are multiplied by q_scale * k_scale, outputs
/// by v_scale.
struct PrefillParams {
  TensorView q = {};          ///< [T, H, d_qk]; bf16, f16, f32 or e4m3
  TensorView k = {};          ///< [S, H, d_qk], the query's dtype
  TensorView v = {};          ///< [S, H, d_v], the query's dtype
  TensorView q_scale = {};    ///< [1] f32, with e4m3 tensors: what a stored query must be multiplied by
  TensorView k_scale = {};    ///< [1] f32, with e4m3 tensors: the same of keys
  TensorView v_scale = {};    ///< [1] f32, with e4m3 tensors: the same of values
  TensorView qo_indptr = {};  ///< [B+1], first query of each request
  TensorView kv_indptr = {};  ///< [B+1], first key of each request
  bool causal = true;
  AttentionOptions options = {};
  float sm_scale = 0.0F;  ///< above 0, and sm_scale * log2(e) finite
  LseBase lse_base = LseBase::kE;
  bool batch_invariant = false;
  TensorView o = {};        ///< out [T, H, d_v]: the query's dtype or f32; for e4m3 bf16, f32, or e4m3 with o_scale
  TensorView o_scale = {};  ///< [1] f32, with e4m3 outputs: o is divided by it
  TensorView lse = {};      ///< out [T, H] f32, optional
};

/// Computes sparse prefill in the absorbed form over one dense tensor of rows, whose first d_v channels are the value.
/// The options are as in decode_sparse.
struct PrefillSparseParams {
  TensorView q = {};            ///< [T, H, d_qk]; bf16, f16 or f32
  TensorView kv = {};           ///< [S, d_qk]; bf16 or f16
  TensorView indices = {};      ///< [T, topk]: rows of kv; negative or >= S: skipped
  TensorView topk_length = {};  ///< [T], optional
  AttentionOptions options = {};
  float sm_scale = 0.0F;
  LseBase lse_base = LseBase::kE;
  bool lse_inf_without_keys = false;
  bool batch_invariant = false;
  TensorView o = {};           ///< out [T, H, d_v], the query's dtype or f32
  TensorView max_logits = {};  ///< out [T, H] f32, optional: the largest score, sm_scale included; -inf without a key
  TensorView lse = {};         ///< out [T, H] f32, optional
};

/// Merges N partial attention states into one: lse = log(sum_n exp(lse_n)), o = sum_n exp(lse_n - lse) o_n. States with
/// lse = -inf are ignored; if all are, o = 0 and lse = -inf. States that have lse = +inf by lse_inf_without_keys cannot
/// be merged.
struct MergeStatesParams {
  TensorView partial_o = {};    ///< [N, T, H, d_v]; bf16, f16 or f32
  TensorView partial_lse = {};  ///< [N, T, H] f32
  LseBase lse_base = LseBase::kE;
  bool in_place = false;  ///< o and lse hold one more state on entry, which is merged too
  TensorView o = {};      ///< out (in/out if in_place) [T, H, d_v]; bf16, f16 or f32
  TensorView lse = {};    ///< out (in/out if in_place) [T, H] f32; optional unless in_place
};

/// Writes token t's latent row into cache slot slot_mapping[t] = page * page_size + offset; a negative slot skips it.
/// Two tokens of one call must not name the same slot. In quantized formats, a group's scale is made of its largest
/// finite magnitude (numeric.h), infinities saturate, NaN stays NaN.
struct AppendParams {
  TensorView kv = {};            ///< [T, kv_lora_rank + qk_rope_head_dim]; or
  TensorView ckv = {};           ///< [T, kv_lora_rank] and
  TensorView kpe = {};           ///< [T, qk_rope_head_dim]; bf16, f16 or f32, rounded to the cache's type
  TensorView slot_mapping = {};  ///< [T] int64
  KvCache cache = {};            ///< out
};

/// Rotates the rotary parts of queries and keys, quantizes, and appends the keys: append with RoPE in one pass. The
/// angles a_i of the token's position rotate pairs of channels: (x, y) -> (x cos a_i - y sin a_i, x sin a_i + y cos
/// a_i), in f32. Results are rounded once, to the output's type.
///
/// Where a norm is asked for, x / sqrt(mean(x^2) + norm_eps) * weight, in f32, is what is rotated and rounded; rows
/// have at most 4096 channels then. All backends sum the squares in one order, so that they leave the same bits.
///
/// Rows without rotary channels (GLM-5.3-Flash, Kimi K3; formats such as fp8_nope) have no q_pe, kpe, cos_sin and
/// positions: nothing turns, and all else is done.
struct AppendRopeParams {
  TensorView q_nope = {};     ///< [T, H, kv_lora_rank], optional with q_pe: only keys are written then
  TensorView q_pe = {};       ///< [T, H, qk_rope_head_dim], the dtype of q_nope; bf16, f16 or f32
  TensorView q_out = {};      ///< out [T, H, kv_lora_rank + qk_rope_head_dim]: bf16, f16, f32, or e4m3 with q_scale
  TensorView q_scale = {};    ///< [1] f32: e4m3 queries are divided by it
  TensorView ckv = {};        ///< [T, kv_lora_rank]; bf16, f16 or f32
  TensorView kpe = {};        ///< [T, qk_rope_head_dim], not yet rotated, the dtype of ckv
  TensorView cos_sin = {};    ///< [max_positions, qk_rope_head_dim] f32: cosines of all angles, then sines (YaRN's too)
  TensorView positions = {};  ///< [T] int64, from 0 to max_positions - 1
  bool interleaved = true;    ///< pairs are channels (2i, 2i + 1), as DeepSeek's; else (i, i + qk_rope_head_dim / 2)
  TensorView slot_mapping = {};   ///< [T] int64; a negative slot writes no key, the query still
  bool q_norm = false;            ///< normalizes [q_nope | q_pe] of each token and head, as DeepSeek V4
  TensorView q_norm_weight = {};  ///< [kv_lora_rank + qk_rope_head_dim], with q_norm; bf16, f16 or f32; not given: 1
  /// Normalizes keys: their whole rows [ckv | kpe] if it has the shape [kv_lora_rank + qk_rope_head_dim] (V4), or ckv
  /// alone if it has [kv_lora_rank] (V3.2); bf16, f16 or f32. Not given: keys are as they come.
  TensorView norm_weight = {};
  float norm_eps = 1e-6F;  ///< of both norms; finite and not negative
  KvCache cache = {};      ///< out
};

/// Copies a range of every request into a dense workspace, dequantized: tokens token_start[b] ... token_start[b] +
/// (out_indptr[b+1] - out_indptr[b]) - 1 go to rows out_indptr[b] ...
struct GatherParams {
  KvCache cache = {};
  PageTable pages = {};
  TensorView token_start = {};  ///< [B]; not given: 0 everywhere
  TensorView out_indptr = {};   ///< [B+1], first output row of each request
  TensorView out_kv = {};       ///< out [S, kv_lora_rank + qk_rope_head_dim]; or
  TensorView out_ckv = {};      ///< out [S, kv_lora_rank] and
  TensorView out_kpe = {};      ///< out [S, qk_rope_head_dim]; bf16, f16 or f32
};

/// Copies whole pages from one cache into another, token by token in order: the tokens of pages from_pages[0],
/// from_pages[1], ... fill pages to_pages[0], to_pages[1], ... Formats and page sizes may differ, so this also
/// quantizes, dequantizes, and splits 256-token footer pages into 64-token ones. Rows of equal formats are copied bit
/// for bit, their scales too: a cache of any scales takes powers of two as they are. Only where scales are any numbers
/// in `from` and powers of two in `to` are latent rows dequantized to bf16 and quantized anew. `from` and `to` may be
/// one cache, or views of one. Whether pages repeat in `to_pages`, or overlap those that are read, is not checked.
struct CopyPagesParams {
  KvCache from = {};
  TensorView from_pages = {};  ///< [N], pages of `from`
  KvCache to = {};             ///< out; of the same row widths; must not overlap the pages that are read
  TensorView to_pages = {};    ///< [M], pages of `to`, all different; M * its page size = N * that of `from`
};

/// Turns a padded block table into CSR.
struct BlockTableToCsrParams {
  TensorView block_table = {};  ///< [B, max_pages]
  TensorView kv_len = {};       ///< [B]
  int32_t page_size = 0;
  TensorView kv_indptr = {};   ///< out [B+1]
  TensorView kv_indices = {};  ///< out [at least the sum of ceil(kv_len / page_size)]
};

/// Turns request-local token indices into physical slots. -1, what lies beyond topk_length, and what is not below
/// kv_len become -1. Where keys are pooled, an index may stand for a group of tokens instead: index i for tokens
/// [ratio * i, ratio * (i + 1)).
struct PhysicalSlotsParams {
  TensorView indices = {};      ///< [T, topk]: tokens of the query's request, or groups of them
  TensorView topk_length = {};  ///< [T], optional
  TensorView qo_indptr = {};    ///< [B+1]; not given: T / B queries each
  PageTable pages = {};
  int32_t page_size = 0;
  /// Tokens of other ranks become -1, and the rank's own are looked up by their local index. kv_len stays global.
  ContextParallel context_parallel = {};
  int32_t ratio = 1;  ///< tokens of a group; kv_len counts tokens, so that a request has kv_len / ratio groups
  /// Says where the slots are: in a pool that has a row for each group (false: pages has its page table; DeepSeek V4),
  /// or in the cache of the tokens (true; GLM-5.3). All tokens of each group are listed then, and behind those of the
  /// last index the tokens that the query sees of the group that is not complete yet; causal as in decode.
  bool list_tokens = false;
  bool compact = false;  ///< the valid slots of a row move to its front, in order, and -1 fills the rest
  /// out [T, topk], may be `indices`, row by row; with list_tokens [T, at least topk * ratio + ratio - 1], -1 beyond
  TensorView slots = {};
  TensorView valid_count = {};  ///< out [T], optional: valid slots of each row
};

/// Holds the paged cache of the indexer, whose bytes indexer_layout(format) describes.
struct IndexerCache {
  IndexerFormat format = IndexerFormat::kFP8;
  TensorView kv = {};  ///< u8 [num_pages, indexer_page_bytes(page_size, format) or more]
  int32_t page_size = 0;
};

/// Quantizes one indexer key per token, 128 channels, into slot slot_mapping[t]; a negative slot skips the token. In
/// FP8 all channels have one scale; in MXFP4 32 neighbours have one, 2^ceil(log2(max(amax, 1e-4) / 6)).
struct AppendIndexerParams {
  TensorView k = {};                ///< [T, 128]; bf16, f16 or f32
  TensorView slot_mapping = {};     ///< [T] int64
  bool power_of_two_scales = true;  ///< those of MXFP4 are always; false is refused there
  IndexerCache cache = {};          ///< out
};

/// Computes logits[t][j] = sum_h weights[t][h] * max(0, q[t][h] . k[j]) * scale[j], in f32, as in DeepSeek V3.2; scales
/// of the queries belong into the weights. Logits of 16 bits are rounded once, to nearest even; finite ones beyond the
/// range of their type become its largest finite number, so that none looks like that of a key that is not seen. Keys
/// of MXFP4 have scales in k, and scale[j] is 1; where an element is 2^128 or more, its key's logit has no meaning.
/// Keys that query t does not see (causal as in decode, kv_len) get -inf. If blocks of keys are listed for each query
/// (DeepSeek V4.1), a row has the logits of the listed keys, in the order of the list.
struct IndexerLogitsParams {
  TensorView q = {};        ///< [T, H, 128]; e4m3, bf16, f16 or f32
  TensorView weights = {};  ///< [T, H] f32
  IndexerCache cache = {};
  PageTable pages = {};
  TensorView qo_indptr = {};  ///< [B+1]; not given: T / B queries each
  bool causal = true;
  /// kDefault and kFP8 allow q[t][h] . k[j] of e4m3 queries to be summed as tensor cores sum products of e4m3. Hopper's
  /// keep about 14 bits of a sum, so that a logit may be off by some 2^-12 of sum_h |weights[t][h]|
  /// sum_c |q[t][h][c] k[j][c]| scale[j]. Keys of MXFP4 may become e4m3 of one scale each: groups of channels whose
  /// scale is 2^15 times smaller than the key's largest are rounded, and from 2^16 on they are lost. Backends without
  /// such products compute as with kExact, which sums in f32 everywhere.
  Compute compute = Compute::kDefault;
  /// Counts the tokens that a key stands for: key j for tokens [ratio * j, ratio * (j + 1)), all of which a query must
  /// see to see the key. kv_len counts tokens.
  int32_t ratio = 1;
  /// [T], optional: query t sees keys [key_begin[t], key_end[t]) of its request, as far as it has them. Without
  /// key_begin they begin with key 0; without key_end `causal` says where they end.
  TensorView key_begin = {};
  TensorView key_end = {};
  /// [T, M], optional: logit j of query t is that of key blocks[t][j / block_size] * block_size + j % block_size. Of a
  /// block that is negative or has no key, all logits are -inf.
  TensorView blocks = {};
  int32_t block_size = 1;
  TensorView logits = {};  ///< out [T, N] f32, bf16 or f16; N at least the most keys of a request, or M * block_size
};

/// Finds the indices of the k largest logits of every row, in ascending order. Of equal logits those with lower indices
/// are taken; NaN counts as less than -inf. Rows shorter than k end in -1.
struct TopKParams {
  TensorView logits = {};   ///< [T, N] f32, bf16 or f16
  TensorView lengths = {};  ///< [T]: the first lengths[t] <= N logits count; not given: all
  TensorView starts = {};   ///< [T]: of these, those before starts[t] do not; not with blocks
  /// If `blocks` are given, they and block_size are those of indexer_logits: indices are of keys, in the order of the
  /// list, and logits of -inf and NaN are never chosen. Otherwise a block_size above 1 chooses blocks of so many
  /// neighbouring logits: the one that has the last logit, which is seldom whole, and the k - 1 others with the largest
  /// logits. Indices are of blocks then.
  TensorView blocks = {};
  int32_t block_size = 1;
  TensorView indices = {};  ///< out [T, k], k >= 1
};

/// Computes the slots that sparse attention takes from the indexer's queries, by indexer_logits, top_k and
/// physical_slots. Keys that a query does not see are never selected. The valid slots of a row stand at its front.
struct IndexerTopKParams {
  /// Its `logits` are scratch here, -inf where a key is not seen. The largest of them are taken as they are stored:
  /// those of 16 bits have more ties.
  IndexerLogitsParams indexer = {};
  /// Those of the latent cache; or, if indexer.ratio > 1 and tokens are not listed, of the pool. kv_len is that of
  /// indexer.pages.
  PageTable pages = {};
  int32_t page_size = 0;  ///< of the latent cache
  /// Lists, of the selected keys, the rank's own, as in physical_slots. The indexer's cache has the keys of all ranks.
  ContextParallel context_parallel = {};
  bool list_tokens = false;  ///< as in physical_slots: all tokens of each selected key, and of the group that is open
  int32_t topk = 0;          ///< keys that are selected for a query; 0: as many as a row of slots has room for
  /// out [T, at least topk], with list_tokens [T, at least topk * ratio + ratio - 1]; -1 behind the valid ones
  TensorView slots = {};
  TensorView valid_count = {};  ///< out [T], optional
};

/// Pools groups of `ratio` neighbouring tokens of a request into one latent each, and appends it to the pool that the
/// compressed layers of DeepSeek V4, V4.1 and GLM-5.3 attend to. For every group that ends with a new token
///
///     weight[p][c] = softmax over the group's tokens p of score[p][c] + position_bias[p mod ratio][c]
///     latent[c]    = norm(sum_p weight[p][c] * kv[p][c]),  norm(x) = x / sqrt(mean(x^2) + norm_eps) * norm_weight
///
/// in f32, for each channel c of D. The latent goes to `latent`, rounded to its type. From there it goes to the cache,
/// its rotary channels (the last ones) rotated by the angles of the group's first position; or to the indexer's cache.
/// A group without its last token writes nothing.
///
/// With `overlap` (V4's ratio of 4) kv and score have 2 D channels, and a latent is pooled from 2 ratio tokens: from
/// channels 0 ... D - 1 of the tokens of the group before, where there is one, and D ... 2 D - 1 of its own. With a
/// ratio of 1 nothing is pooled: a token's latent is its norm. Scores may be -inf, but not all of a channel's, and none
/// +inf: these give NaN.
///
/// What later calls need of the new tokens is kept in `state`, by position: that of position p lies in row
/// p mod block_size of block state_table[b][p / block_size mod C]. With C = 1 the state is a ring of each request; with
/// as many columns as a request has blocks it is paged as a cache is, so that requests can share a prefix, and as there
/// no two requests of a call may write one block. A group takes the tokens of this call from kv, and those before them
/// from the state. So the results do not depend, bit by bit, on how a prompt was divided into calls. A request whose
/// last j tokens were rejected goes on with kv_len reduced by j, as if they had never been there, provided that
/// C * block_size is at least j + span - 1, where span is the number of tokens that a latent is pooled from. With less
/// room its next latents are wrong, which no call can see. Negative entries of the table keep nothing; a token without
/// state counts as absent. New tokens at negative positions, where kv_len is less than their number, are padding.
struct CompressParams {
  TensorView kv = {};             ///< [T, W], W = D, or 2 D with overlap; bf16, f16 or f32
  TensorView score = {};          ///< [T, W], the dtype of kv; given unless ratio is 1
  TensorView position_bias = {};  ///< [ratio, W] f32, optional
  TensorView qo_indptr = {};      ///< [B+1]; not given: T / B tokens each
  TensorView kv_len = {};         ///< [B], tokens of each request, the new ones included
  int32_t ratio = 1;
  bool overlap = false;
  TensorView state = {};        ///< in and out [num_blocks, block_size, 2 W] f32: kv, then score + position_bias
  TensorView state_table = {};  ///< [B, C], block numbers; given with `state`, unless ratio is 1
  TensorView norm_weight = {};  ///< [D], bf16, f16 or f32; not given: latents are not normalized
  float norm_eps = 1e-6F;
  TensorView latent = {};        ///< out [T, D], bf16, f16 or f32; only rows of tokens that end a group are written
  TensorView slot_mapping = {};  ///< [T] int64, optional: slots of `cache` or `indexer`, of tokens that end a group;
                                 ///< negative: written nowhere but to `latent`
  TensorView cos_sin = {};       ///< [max_positions, rotary channels] f32, as in append_rope; not given: nothing turns
  bool interleaved = true;       ///< as in append_rope
  KvCache cache = {};            ///< out, optional
  IndexerCache indexer = {};     ///< out, optional; D is 128 then
  bool power_of_two_scales = true;  ///< of the indexer's keys, as in append_indexer
  /// Does in the same call, with the same bits, what append_rope does: it appends the latents of the same T tokens, and
  /// makes their queries ready. Its cache is one of its own, V4's window. Optional: none of its tensors is given. On a
  /// GPU keys of bf16 that become e4m3 need no launch of their own.
  AppendRopeParams append = {};
};

/// Finishes stored outputs of attention, in one pass. decode_sparse can do the same before it stores them.
struct FinishOutputParams {
  TensorView o = {};  ///< [T, H, d_v]; bf16, f16 or f32
  OutputFinish finish = {};
  TensorView out = {};  ///< out [T, H, d_v] or [T, G, H / G, d_v]; bf16, f16, f32, or e4m3 with `finish.scale`
};

}  // namespace mla
