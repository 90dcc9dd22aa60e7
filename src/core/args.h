// SPDX-License-Identifier: Apache-2.0
// Defines the arguments of operations as backends see them. They are validated, and every optional form of the public
// params is folded into one. They are raw pointers with the shape beside them. Strides are named <tensor>_stride_<dim>
// and are int64, in elements; the innermost stride is always 1. Only src/core/validate.h produces them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/cache.h"
#include "core/lse_form.h"
#include "mla/context_parallel.h"
#include "mla/kv_layout.h"
#include "mla/types.h"

namespace mla::core {

/// Says where the query tokens of each request lie: by CSR, or by the same number for each request.
struct QueryRanges {
  const int32_t* indptr = nullptr;  // [B+1], or null
  int32_t uniform_len = 1;          // queries per request if indptr is null

  constexpr int32_t begin(int32_t request) const { return indptr != nullptr ? indptr[request] : request * uniform_len; }
  constexpr int32_t len(int32_t request) const {
    return indptr != nullptr ? indptr[request + 1] - indptr[request] : uniform_len;
  }
};

/// Holds the page numbers of each request, as CSR or as a block table.
struct Pages {
  int32_t page_size = 1;
  int32_t batch_size = 0;
  const int32_t* table = nullptr;      // kv_indices or block_table
  const int32_t* kv_indptr = nullptr;  // [B+1]; null for a block table
  int64_t table_stride_request = 0;    // block table only
  int64_t table_entries = 0;           // entries from `table` on; nothing behind them may be read, whatever lengths say
  const int32_t* kv_len = nullptr;     // [B]

  /// Returns the page numbers of a request, of which only the first ceil(kv_len / page_size) may be read.
  constexpr const int32_t* of(int32_t request) const {
    return kv_indptr != nullptr ? table + kv_indptr[request] : table + request * table_stride_request;
  }
};

/// Holds AttentionOptions with raw pointers, which are null for options that are not set.
struct Options {
  const float* attn_sink = nullptr;     // [H]
  int32_t window_left = -1;             // -1 for all keys
  float logits_soft_cap = 0.0F;         // 0 for none
  const float* alibi_slopes = nullptr;  // [H]
  Compute compute = Compute::kDefault;  // or kFP8, with quantized caches, and with a prefill's e4m3 tensors, only
  int32_t p_run = 32;                   // with kFP8, keys whose P have one scale; only the reference takes any
};

struct DecodeArgs {
  int32_t batch_size = 0;  // B
  int64_t num_tokens = 0;  // T
  int32_t num_heads = 0;   // H
  int32_t d_qk = 0;        // d_ckv + d_kpe
  int32_t d_v = 0;
  DType q_dtype = DType::kBF16;
  const float* q_scale = nullptr;  // [1], for e4m3
  const void* q_nope = nullptr;    // [T, H, d_ckv]
  int64_t q_nope_stride_token = 0, q_nope_stride_head = 0;
  const void* q_pe = nullptr;  // [T, H, d_kpe], null if d_kpe is 0
  int64_t q_pe_stride_token = 0, q_pe_stride_head = 0;
  Cache cache = {};
  Pages pages = {};
  QueryRanges queries = {};
  bool causal = true;
  const uint8_t* tree_mask = nullptr;  // [T, q_len of the request], or null
  int64_t tree_mask_stride_token = 0;
  const int32_t* tree_parents = nullptr;  // [T], or null
  Options options = {};
  ContextParallel context_parallel = {};
  bool batch_invariant = false;
  bool shared_prefix = false;  // backends do not see it: src/dispatch/shared_prefix.h makes two problems of one
  float sm_scale = 0.0F;
  LseForm lse_form = {};
  DType o_dtype = DType::kBF16;
  const float* o_scale = nullptr;  // [1], for e4m3
  void* o = nullptr;               // [T, H, d_v]
  int64_t o_stride_token = 0, o_stride_head = 0;
  float* lse = nullptr;  // [T, H], may be null
  int64_t lse_stride_token = 0, lse_stride_head = 0;
  int64_t expected_q_len = 0;  // query tokens of a request, where T / B says nothing of them; else 0

  /// Returns the number of query tokens of a request by which backends and kernels are chosen. It is T / B rounded up,
  /// since the lengths of a ragged batch are not known on the host of a GPU. It is 1 with batch_invariant, which must
  /// not depend on the batch.
  constexpr int64_t usual_q_len() const {
    if (expected_q_len > 0) return expected_q_len;
    if (batch_invariant || num_tokens <= batch_size) return 1;
    return (num_tokens + batch_size - 1) / std::max(batch_size, 1);
  }
};

/// Holds what shared_prefix finds in the page tables of a decode. The batch is divided into *groups* of neighbouring
/// requests; those of a group begin with the same pages. Two decodes come out of it: one of the groups, each a request
/// with all queries of its members over the shared keys, and one of the requests over the keys that are left.
struct SharedPrefixArgs {
  int32_t batch_size = 0;  // B
  Pages pages = {};
  QueryRanges queries = {};
  int32_t* common_pages = nullptr;     // [B], scratch: leading pages that a request has in common with the one before
  int32_t* group_qo_indptr = nullptr;  // [B + 1]; behind the last group come groups without queries
  int32_t* group_kv_indptr = nullptr;  // [B + 1]
  int32_t* group_kv_len = nullptr;     // [B]; 0 for a request that shares nothing
  int32_t* own_kv_indptr = nullptr;    // [B + 1]
  int32_t* own_kv_len = nullptr;       // [B]

  /// Returns where the pages of a request begin in the table. A request B ends the last one.
  constexpr int32_t table_begin(int32_t request) const {
    if (pages.kv_indptr != nullptr) return pages.kv_indptr[request];
    return static_cast<int32_t>(request * pages.table_stride_request);
  }
  /// Returns how many keys the request has; lengths that cannot be right are clamped to what its pages hold.
  constexpr int32_t kv_len(int32_t request) const {
    const int64_t entries = int64_t{table_begin(request + 1)} - table_begin(request);
    const int64_t held = std::max<int64_t>(std::min(entries, pages.table_entries - table_begin(request)), 0);
    return static_cast<int32_t>(std::clamp<int64_t>(pages.kv_len[request], 0, held * pages.page_size));
  }
  /// Returns how many leading pages of a request hold keys that all of its queries see.
  constexpr int32_t full_pages(int32_t request) const {
    return std::max(kv_len(request) - std::max(queries.len(request), 0), 0) / pages.page_size;
  }
};

/// Decides which requests form a group.
struct PrefixGroup {
  int64_t requests = 1;
  int64_t pages = 0;  // that all of them begin with; 0 for a single request

  /// Takes the next request into the group, which has `common` leading pages in common with the one before, if that
  /// saves more pages than if it began a group: the one behind it has `next` pages in common with it. Returns whether
  /// it did.
  constexpr bool take(int64_t common, int64_t next) {
    const int64_t pages_then = requests == 1 ? common : std::min(pages, common);
    const int64_t gain = pages_then * requests - pages * (requests - 1);
    if (gain <= 0 || gain + std::min(pages_then, next) < next) return false;
    *this = {.requests = requests + 1, .pages = pages_then};
    return true;
  }
};

struct PoolArgs {
  Cache cache = {};
  const int32_t* indices = nullptr;  // [T, topk]
  int64_t indices_stride_token = 0;
  int32_t topk = 0;
  const int32_t* topk_length = nullptr;  // [T] or [B], or null
  bool length_per_request = false;
};

/// Says what becomes of outputs [T, H, d_v] before they are stored in `out`.
struct Finish {
  int32_t d_rotary = 0;            // the last channels, which turn back; 0 if none do
  const float* cos_sin = nullptr;  // [max_positions, d_rotary]
  int64_t cos_sin_stride_position = 0;
  const int64_t* positions = nullptr;  // [T]
  bool interleaved = true;
  const void* gate = nullptr;  // [T, H, gate_channels], may be null
  DType gate_dtype = DType::kF32;
  int32_t gate_channels = 1;  // 1 or d_v
  int64_t gate_stride_token = 0, gate_stride_head = 0;
  int32_t heads_per_group = 1;
  DType out_dtype = DType::kBF16;
  void* out = nullptr;  // [T, H / heads_per_group, heads_per_group, d_v]
  int64_t out_stride_token = 0, out_stride_group = 0, out_stride_head = 0;
  int32_t channels_per_scale = 0;  // 0 unless out is e4m3
  bool power_of_two_scales = true;
  DType scale_dtype = DType::kNone;  // f32, u8, or i32: four of u8
  std::byte* scale = nullptr;        // [T, H / heads_per_group, heads_per_group, scales of a head, by element]
  int64_t scale_stride_token = 0, scale_stride_group = 0, scale_stride_head = 0, scale_stride_scale = 0;

  /// Returns the element of `out` with which a row begins.
  constexpr int64_t out_row(int64_t token, int32_t head) const {
    return token * out_stride_token + head / heads_per_group * out_stride_group +
           head % heads_per_group * out_stride_head;
  }
  /// Returns where a scale of a head of a group lies: four bytes of f32, or one.
  constexpr std::byte* scale_at(int64_t token, int32_t group, int32_t head_of_group, int32_t s) const {
    const int32_t packed = scale_dtype == DType::kI32 ? 4 : 1;
    const int64_t element = token * scale_stride_token + group * scale_stride_group +
                            head_of_group * scale_stride_head + s / packed * scale_stride_scale;
    return scale + element * static_cast<int64_t>(size_of(scale_dtype)) + s % packed;
  }
  constexpr std::byte* scale_at(int64_t token, int32_t head, int32_t s) const {
    return scale_at(token, head / heads_per_group, head % heads_per_group, s);
  }
};

struct FinishOutputArgs : Finish {
  int64_t num_tokens = 0;
  int32_t num_heads = 0;
  int32_t d_v = 0;
  DType o_dtype = DType::kBF16;
  const void* o = nullptr;  // [T, H, d_v]
  int64_t o_stride_token = 0, o_stride_head = 0;
};

/// Holds the arguments of decode_sparse, or those of prefill_sparse, whose keys are then a cache of one page of S
/// tokens.
struct DecodeSparseArgs {
  int64_t num_tokens = 0;  // T
  int32_t num_heads = 0;
  int32_t d_qk = 0, d_v = 0;
  DType q_dtype = DType::kBF16;
  const float* q_scale = nullptr;
  const void* q_nope = nullptr;  // [T, H, d_ckv]
  int64_t q_nope_stride_token = 0, q_nope_stride_head = 0;
  const void* q_pe = nullptr;  // [T, H, d_kpe], null if d_kpe is 0
  int64_t q_pe_stride_token = 0, q_pe_stride_head = 0;
  int32_t num_pools = 1;
  PoolArgs pools[2] = {};
  int32_t batch_size = 0;    // only with length_per_request
  QueryRanges queries = {};  // only with length_per_request
  Options options = {};
  bool batch_invariant = false;
  float sm_scale = 0.0F;
  LseForm lse_form = {};
  DType o_dtype = DType::kBF16;
  const float* o_scale = nullptr;
  void* o = nullptr;  // [T, H, d_v]
  int64_t o_stride_token = 0, o_stride_head = 0;
  float* max_logits = nullptr;  // [T, H], may be null
  int64_t max_logits_stride_token = 0, max_logits_stride_head = 0;
  float* lse = nullptr;  // [T, H], may be null
  int64_t lse_stride_token = 0, lse_stride_head = 0;
  bool finishes = false;  // outputs go to finish.out, in its type, and `o` is null
  Finish finish = {};

  /// Returns how what stands behind attention finishes outputs that lie in `from`, [T, H, d_v], one behind another.
  FinishOutputArgs finish_from(const void* from, DType dtype) const {
    FinishOutputArgs args;
    static_cast<Finish&>(args) = finish;
    args.num_tokens = num_tokens;
    args.num_heads = num_heads;
    args.d_v = d_v;
    args.o_dtype = dtype;
    args.o = from;
    args.o_stride_token = int64_t{num_heads} * d_v;
    args.o_stride_head = d_v;
    return args;
  }

  /// Returns how many entries of the token's row of indices count, 0 ... topk.
  constexpr int32_t topk_length(int32_t pool, int64_t token) const {
    const PoolArgs& p = pools[pool];
    if (p.topk_length == nullptr) return p.topk;
    return std::clamp(p.topk_length[p.length_per_request ? request_of(token) : token], 0, p.topk);
  }
  constexpr int64_t request_of(int64_t token) const {
    if (queries.indptr == nullptr) return token / queries.uniform_len;
    const int32_t* end = queries.indptr + batch_size + 1;
    return std::upper_bound(queries.indptr, end, static_cast<int32_t>(token)) - queries.indptr - 1;
  }
};

struct PrefillArgs {
  int32_t batch_size = 0;
  int64_t num_tokens = 0;  // T
  int64_t num_keys = 0;    // S
  int32_t num_heads = 0;
  int32_t d_qk = 0, d_v = 0;
  DType dtype = DType::kBF16;  // type of q, k and v
  const void* q = nullptr;     // [T, H, d_qk]
  int64_t q_stride_token = 0, q_stride_head = 0;
  const void* k = nullptr;  // [S, H, d_qk]
  int64_t k_stride_token = 0, k_stride_head = 0;
  const void* v = nullptr;  // [S, H, d_v]
  int64_t v_stride_token = 0, v_stride_head = 0;
  const int32_t* qo_indptr = nullptr;  // [B+1]
  const int32_t* kv_indptr = nullptr;  // [B+1]
  bool causal = true;
  Options options = {};
  bool batch_invariant = false;
  float sm_scale = 0.0F;
  LseForm lse_form = {};
  DType o_dtype = DType::kBF16;
  void* o = nullptr;  // [T, H, d_v]
  int64_t o_stride_token = 0, o_stride_head = 0;
  float* lse = nullptr;  // [T, H], may be null
  int64_t lse_stride_token = 0, lse_stride_head = 0;
  // They stand last, so that the others lie where kernels without scales have them: nvcc 13.0 spills 8 bytes of
  // cuda_portable's 192/128 on SM100 otherwise (2026-11-25).
  const float *q_scale = nullptr, *k_scale = nullptr, *v_scale = nullptr;  // [1] each, for e4m3
  const float* o_scale = nullptr;                                          // [1], for outputs of e4m3
};

struct MergeStatesArgs {
  int32_t num_states = 0;  // N
  int64_t num_tokens = 0;  // T
  int32_t num_heads = 0;
  int32_t d_v = 0;
  bool in_place = false;
  LseForm lse_form = {};
  DType partial_dtype = DType::kF32;
  const void* partial_o = nullptr;  // [N, T, H, d_v]
  int64_t partial_o_stride_state = 0, partial_o_stride_token = 0, partial_o_stride_head = 0;
  const float* partial_lse = nullptr;  // [N, T, H]
  int64_t partial_lse_stride_state = 0, partial_lse_stride_token = 0, partial_lse_stride_head = 0;
  DType o_dtype = DType::kF32;
  void* o = nullptr;  // [T, H, d_v]
  int64_t o_stride_token = 0, o_stride_head = 0;
  float* lse = nullptr;  // [T, H], may be null unless in_place
  int64_t lse_stride_token = 0, lse_stride_head = 0;
};

struct AppendArgs {
  int64_t num_tokens = 0;
  DType dtype = DType::kBF16;  // type of ckv and kpe
  const void* ckv = nullptr;   // [T, d_ckv]
  int64_t ckv_stride_token = 0;
  const void* kpe = nullptr;  // [T, d_kpe], null if d_kpe is 0
  int64_t kpe_stride_token = 0;
  const int64_t* slot_mapping = nullptr;  // [T]
  Cache cache = {};
};

inline constexpr int32_t kMaxNormChannels = 4096;  // of a row that append_rope normalizes

struct AppendRopeArgs {
  int64_t num_tokens = 0;
  int32_t num_heads = 0;         // 0 if only keys are written
  DType q_dtype = DType::kBF16;  // type of q_nope and q_pe
  const void* q_nope = nullptr;  // [T, H, d_ckv]
  int64_t q_nope_stride_token = 0, q_nope_stride_head = 0;
  const void* q_pe = nullptr;  // [T, H, d_kpe]
  int64_t q_pe_stride_token = 0, q_pe_stride_head = 0;
  DType q_out_dtype = DType::kBF16;
  void* q_out = nullptr;  // [T, H, d_ckv + d_kpe]
  int64_t q_out_stride_token = 0, q_out_stride_head = 0;
  const float* q_scale = nullptr;  // [1], for e4m3
  DType dtype = DType::kBF16;      // type of ckv and kpe
  const void* ckv = nullptr;       // [T, d_ckv]
  int64_t ckv_stride_token = 0;
  const void* kpe = nullptr;  // [T, d_kpe]
  int64_t kpe_stride_token = 0;
  const float* cos_sin = nullptr;  // [max_positions, d_kpe]; null if d_kpe is 0, as are positions, kpe and q_pe
  int64_t cos_sin_stride_position = 0;
  const int64_t* positions = nullptr;  // [T]
  bool interleaved = true;
  const int64_t* slot_mapping = nullptr;  // [T]
  bool q_norm = false;
  const void* q_norm_weight = nullptr;  // [d_ckv + d_kpe], or null
  DType q_norm_weight_dtype = DType::kF32;
  const void* norm_weight = nullptr;  // [norm_channels], or null
  DType norm_weight_dtype = DType::kF32;
  int32_t norm_channels = 0;  // of a key: those of ckv, or all
  float norm_eps = 0.0F;
  Cache cache = {};

  constexpr bool normalizes() const { return q_norm || norm_weight != nullptr; }
  /// Returns the cosines and sines of a token's position; null where rows have no rotary channels.
  constexpr const float* angles(int64_t token) const {
    return cos_sin != nullptr ? cos_sin + positions[token] * cos_sin_stride_position : nullptr;
  }
};

struct CopyPagesArgs {
  Cache from = {}, to = {};
  int64_t num_from = 0, num_to = 0;
  const int32_t* from_pages = nullptr;  // [num_from]
  const int32_t* to_pages = nullptr;    // [num_to]

  constexpr int64_t num_tokens() const { return num_from * from.page_size; }
};

struct BlockTableToCsrArgs {
  int32_t batch_size = 0;
  int32_t page_size = 1;
  const int32_t* block_table = nullptr;  // [B, max_pages]
  int64_t block_table_stride_request = 0;
  const int32_t* kv_len = nullptr;  // [B]
  int32_t* kv_indptr = nullptr;     // [B+1]
  int32_t* kv_indices = nullptr;
};

struct PhysicalSlotsArgs {
  int64_t num_tokens = 0;  // T
  int32_t topk = 0;
  int32_t num_slots = 0;             // of a row: topk, or more with list_tokens
  const int32_t* indices = nullptr;  // [T, topk]
  int64_t indices_stride_token = 0;
  const int32_t* topk_length = nullptr;  // [T], or null
  QueryRanges queries = {};
  Pages pages = {};
  ContextParallel context_parallel = {};
  int32_t ratio = 1;
  bool list_tokens = false;
  bool compact = false;
  int32_t* slots = nullptr;  // [T, num_slots]
  int64_t slots_stride_token = 0;
  int32_t* valid_count = nullptr;  // [T], may be null

  /// Returns how many tokens or rows the pages hold of a request.
  constexpr int32_t num_rows(int32_t request) const { return pages.kv_len[request] / (list_tokens ? 1 : ratio); }
  /// Returns how many tokens a query sees.
  constexpr int32_t num_seen(int32_t request, int64_t token) const {
    const int64_t later = int64_t{queries.begin(request)} + queries.len(request) - 1 - token;
    return static_cast<int32_t>(std::max<int64_t>(pages.kv_len[request] - later, 0));
  }
  /// Returns which token or row entry i of a row of slots is for; if none, a number below 0 or beyond all rows.
  /// `row` are the query's indices, the first `length` of which count.
  constexpr int64_t row_of_entry(const int32_t* row, int32_t length, int32_t seen, int32_t i) const {
    if (!list_tokens) return i < length ? row[i] : -1;
    const auto n = static_cast<uint32_t>(ratio);
    const uint32_t group = static_cast<uint32_t>(i) / n, in_group = static_cast<uint32_t>(i) % n;
    const bool behind = group >= static_cast<uint32_t>(topk);  // the indices: these are of the incomplete group
    if (!behind) return static_cast<int32_t>(group) < length ? int64_t{row[group]} * n + in_group : -1;
    const int64_t last = int64_t{seen} / n * n + (i - int64_t{topk} * n);
    return last < seen ? last : -1;
  }
};

struct IndexerPages {
  std::byte* base = nullptr;
  int64_t stride_page = 0;  // bytes
  int64_t num_pages = 0;
  int32_t page_size = 1;
  IndexerFormat format = IndexerFormat::kFP8;

  constexpr IndexerLayout layout() const { return indexer_layout(format); }
  /// Returns the address of a key's elements. Whoever knows the format when it is compiled says so.
  constexpr std::byte* key(int64_t page, int64_t offset) const { return key_of(layout().key_bytes, page, offset); }
  template <IndexerFormat kFormat>
  constexpr std::byte* key(int64_t page, int64_t offset) const {
    return key_of(indexer_layout(kFormat).key_bytes, page, offset);
  }
  /// Returns the address of a key's scales, which may have any alignment.
  constexpr std::byte* scale(int64_t page, int64_t offset) const {
    return scale_of(layout().key_bytes, layout().scale_bytes, page, offset);
  }
  template <IndexerFormat kFormat>
  constexpr std::byte* scale(int64_t page, int64_t offset) const {
    return scale_of(indexer_layout(kFormat).key_bytes, indexer_layout(kFormat).scale_bytes, page, offset);
  }

 private:
  constexpr std::byte* key_of(int64_t key_bytes, int64_t page, int64_t offset) const {
    return base + page * stride_page + offset * key_bytes;
  }
  constexpr std::byte* scale_of(int64_t key_bytes, int64_t scale_bytes, int64_t page, int64_t offset) const {
    return base + page * stride_page + page_size * key_bytes + offset * scale_bytes;
  }
};

struct AppendIndexerArgs {
  int64_t num_tokens = 0;
  DType dtype = DType::kBF16;
  const void* k = nullptr;  // [T, 128]
  int64_t k_stride_token = 0;
  const int64_t* slot_mapping = nullptr;  // [T]
  bool power_of_two_scales = true;
  IndexerPages cache = {};
};

/// Lists blocks of keys for each query token, to which its logits belong.
struct KeyBlocks {
  const int32_t* blocks = nullptr;  // [T, count]; null: logit j belongs to key j
  int64_t stride_token = 0;
  int32_t count = 0;
  int32_t size = 1;  // keys of a block

  constexpr bool given() const { return blocks != nullptr; }
  /// Counts the listed keys, real ones or not.
  constexpr int32_t num_keys() const { return count * size; }
  /// Returns the key that logit j < num_keys() of a token belongs to; it may be one that the request does not have.
  constexpr int64_t key(int64_t token, int32_t j) const {
    return int64_t{blocks[token * stride_token + j / size]} * size + j % size;
  }
};

struct IndexerLogitsArgs {
  int32_t batch_size = 0;
  int64_t num_tokens = 0;  // T
  int32_t num_heads = 0;
  DType q_dtype = DType::kE4M3;
  Compute compute = Compute::kDefault;
  const void* q = nullptr;  // [T, H, 128]
  int64_t q_stride_token = 0, q_stride_head = 0;
  const float* weights = nullptr;  // [T, H]
  int64_t weights_stride_token = 0;
  IndexerPages cache = {};
  Pages pages = {};
  QueryRanges queries = {};
  bool causal = true;
  int32_t ratio = 1;
  const int32_t* key_begin = nullptr;  // [T], or null
  const int32_t* key_end = nullptr;    // [T], or null
  KeyBlocks blocks = {};
  int64_t num_logits = 0;  // N
  DType logits_dtype = DType::kF32;
  void* logits = nullptr;  // [T, N]
  int64_t logits_stride_token = 0;

  /// Returns whether queries and keys may be multiplied as e4m3, and every key has a logit.
  bool multiplies_e4m3() const {
    return compute != Compute::kExact && q_dtype == DType::kE4M3 && !blocks.given() && key_begin == nullptr &&
           key_end == nullptr;
  }
};

struct TopKArgs {
  int64_t num_tokens = 0;  // T
  int64_t num_logits = 0;  // N
  DType logits_dtype = DType::kF32;
  const void* logits = nullptr;  // [T, N]
  int64_t logits_stride_token = 0;
  const int32_t* lengths = nullptr;  // [T], or null
  const int32_t* starts = nullptr;   // [T], or null, as with blocks
  KeyBlocks blocks = {};
  int32_t block_size = 1;  // logits of a block, where blocks are chosen
  int32_t k = 0;
  int32_t* indices = nullptr;  // [T, k]
  int64_t indices_stride_token = 0;
};

/// Holds the arguments of the three steps, which share the queries and kv_len. `top_k` writes into the end of each row
/// of `slots.slots`, from where `slots` reads its indices.
struct IndexerTopKArgs {
  IndexerLogitsArgs indexer;
  TopKArgs top_k;
  PhysicalSlotsArgs slots;

  constexpr int64_t num_tokens() const { return indexer.num_tokens; }
};

struct CompressArgs {
  enum class To : uint8_t { kLatents, kCache, kIndexer };  // where latents go beside `latent`

  int32_t batch_size = 0;  // B
  int64_t num_tokens = 0;  // T
  int32_t d_latent = 0;    // D
  int32_t ratio = 1;
  bool overlap = false;
  DType dtype = DType::kBF16;  // type of kv and score
  const void* kv = nullptr;    // [T, W]
  int64_t kv_stride_token = 0;
  const void* score = nullptr;  // [T, W], null if ratio is 1
  int64_t score_stride_token = 0;
  const float* position_bias = nullptr;  // [ratio, W], or null
  int64_t position_bias_stride_position = 0;
  QueryRanges queries = {};
  const int32_t* kv_len = nullptr;  // [B]
  float* state = nullptr;           // [num_blocks, block_size, 2 W], null if ratio is 1
  int64_t state_stride_block = 0, state_stride_row = 0;
  int64_t num_blocks = 0;
  int32_t block_size = 1;
  const int32_t* state_table = nullptr;  // [B, num_columns]
  int64_t state_table_stride_request = 0;
  int32_t num_columns = 1;
  const void* norm_weight = nullptr;  // [D], or null
  DType norm_weight_dtype = DType::kF32;
  float norm_eps = 0.0F;
  void* latent = nullptr;  // [T, D]
  DType latent_dtype = DType::kBF16;
  int64_t latent_stride_token = 0;
  To to = To::kLatents;
  const int64_t* slot_mapping = nullptr;  // [T], null for kLatents
  const float* cos_sin = nullptr;         // [max_positions, d_rotary], or null
  int64_t cos_sin_stride_position = 0;
  int64_t max_positions = 0;
  int32_t d_rotary = 0;  // channels that turn, the last of D; 0 if cos_sin is null
  bool interleaved = true;
  Cache cache = {};
  IndexerPages indexer = {};
  bool power_of_two_scales = true;  // of the indexer's keys
  AppendRopeArgs append = {};       // of no tokens if there is nothing to append beside the latents

  constexpr bool appends() const { return append.num_tokens > 0; }
  /// Returns W.
  constexpr int32_t width() const { return overlap ? 2 * d_latent : d_latent; }
  /// Returns from how many tokens a latent is pooled.
  constexpr int32_t span() const { return overlap ? 2 * ratio : ratio; }
  /// Returns how many positions of a request the state has room for.
  constexpr int64_t capacity() const { return int64_t{num_columns} * block_size; }
  /// Returns the position of a request's first new token; negative if kv_len is less than the number of new tokens.
  constexpr int64_t first_position(int32_t request) const { return int64_t{kv_len[request]} - queries.len(request); }
  /// Returns the state of a request's position; null if there is none.
  constexpr float* state_of(int32_t request, int64_t position) const {
    const int64_t block = state_table[request * state_table_stride_request + position / block_size % num_columns];
    if (block < 0 || block >= num_blocks) return nullptr;
    return state + block * state_stride_block + position % block_size * state_stride_row;
  }
};

struct GatherArgs {
  int32_t batch_size = 0;
  int64_t num_rows = 0;  // S = out_indptr[B]
  Cache cache = {};
  Pages pages = {};
  const int32_t* token_start = nullptr;  // [B]; null for 0
  const int32_t* out_indptr = nullptr;   // [B+1]
  DType out_dtype = DType::kBF16;
  void* out_ckv = nullptr;  // [S, d_ckv]
  int64_t out_ckv_stride_token = 0;
  void* out_kpe = nullptr;  // [S, d_kpe], null if d_kpe is 0
  int64_t out_kpe_stride_token = 0;
};

}  // namespace mla::core
