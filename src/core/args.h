// SPDX-License-Identifier: Apache-2.0
// The operations as backends see them: validated, every optional form of the public params folded into one. Plain
// pointers with the shape beside them; strides are named <tensor>_stride_<dim>, int64, in elements; the innermost
// stride is always 1. Produced by src/core/validate.h only.
#pragma once

#include <cstdint>

#include "mla/kv_layout.h"
#include "mla/types.h"

namespace mla::core {

/// Where the query tokens of each request lie: CSR, or the same number for each.
struct QueryRanges {
  const int32_t* indptr = nullptr;  // [B+1], or null
  int32_t uniform_len = 1;          // queries per request if indptr is null

  int32_t begin(int32_t request) const { return indptr != nullptr ? indptr[request] : request * uniform_len; }
  int32_t len(int32_t request) const { return indptr != nullptr ? indptr[request + 1] - indptr[request] : uniform_len; }
};

/// Page numbers of each request: CSR or block table.
struct Pages {
  int32_t page_size = 1;
  int32_t batch_size = 0;
  const int32_t* table = nullptr;      // kv_indices or block_table
  const int32_t* kv_indptr = nullptr;  // [B+1], or null for a block table
  int64_t table_stride_request = 0;    // block table only
  const int32_t* kv_len = nullptr;     // [B]

  /// Page numbers of a request; only the first ceil(kv_len / page_size) may be read.
  const int32_t* of(int32_t request) const {
    return kv_indptr != nullptr ? table + kv_indptr[request] : table + request * table_stride_request;
  }
};

/// The two parts of a cache's rows. For a cache of one tensor both point into it.
struct Cache {
  CacheFormat format = CacheFormat::kBF16;
  int64_t num_pages = 0;
  int32_t page_size = 1;
  int32_t d_ckv = 0;    // kv_lora_rank
  int32_t d_kpe = 0;    // qk_rope_head_dim, may be 0
  void* ckv = nullptr;  // [num_pages, page_size, d_ckv]
  int64_t ckv_stride_page = 0, ckv_stride_token = 0;
  void* kpe = nullptr;  // [num_pages, page_size, d_kpe]
  int64_t kpe_stride_page = 0, kpe_stride_token = 0;
};

struct DecodeArgs {
  int32_t batch_size = 0;  // B
  int64_t num_tokens = 0;  // T
  int32_t num_heads = 0;   // H
  int32_t d_qk = 0;        // d_ckv + d_kpe
  int32_t d_v = 0;
  DType q_dtype = DType::kBF16;
  const void* q_nope = nullptr;  // [T, H, d_ckv]
  int64_t q_nope_stride_token = 0, q_nope_stride_head = 0;
  const void* q_pe = nullptr;  // [T, H, d_kpe], null if d_kpe is 0
  int64_t q_pe_stride_token = 0, q_pe_stride_head = 0;
  Cache cache;
  Pages pages;
  QueryRanges queries;
  bool causal = true;
  bool batch_invariant = false;
  float sm_scale = 0.0F;
  LseBase lse_base = LseBase::kE;
  DType o_dtype = DType::kBF16;
  void* o = nullptr;  // [T, H, d_v]
  int64_t o_stride_token = 0, o_stride_head = 0;
  float* lse = nullptr;  // [T, H], may be null
  int64_t lse_stride_token = 0, lse_stride_head = 0;
};

struct PrefillArgs {
  int32_t batch_size = 0;
  int64_t num_tokens = 0;  // T
  int64_t num_keys = 0;    // S
  int32_t num_heads = 0;
  int32_t d_qk = 0, d_v = 0;
  DType dtype = DType::kBF16;  // of q, k and v
  const void* q = nullptr;     // [T, H, d_qk]
  int64_t q_stride_token = 0, q_stride_head = 0;
  const void* k = nullptr;  // [S, H, d_qk]
  int64_t k_stride_token = 0, k_stride_head = 0;
  const void* v = nullptr;  // [S, H, d_v]
  int64_t v_stride_token = 0, v_stride_head = 0;
  const int32_t* qo_indptr = nullptr;  // [B+1]
  const int32_t* kv_indptr = nullptr;  // [B+1]
  bool causal = true;
  bool batch_invariant = false;
  float sm_scale = 0.0F;
  LseBase lse_base = LseBase::kE;
  DType o_dtype = DType::kBF16;
  void* o = nullptr;  // [T, H, d_v]
  int64_t o_stride_token = 0, o_stride_head = 0;
  float* lse = nullptr;  // [T, H], may be null
  int64_t lse_stride_token = 0, lse_stride_head = 0;
};

struct MergeStatesArgs {
  int32_t num_states = 0;  // N
  int64_t num_tokens = 0;  // T
  int32_t num_heads = 0;
  int32_t d_v = 0;
  bool in_place = false;
  LseBase lse_base = LseBase::kE;
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
  DType dtype = DType::kBF16;  // of ckv and kpe
  const void* ckv = nullptr;   // [T, d_ckv]
  int64_t ckv_stride_token = 0;
  const void* kpe = nullptr;  // [T, d_kpe], null if d_kpe is 0
  int64_t kpe_stride_token = 0;
  const int64_t* slot_mapping = nullptr;  // [T]
  Cache cache;
};

struct GatherArgs {
  int32_t batch_size = 0;
  int64_t num_rows = 0;  // S = out_indptr[B]
  Cache cache;
  Pages pages;
  const int32_t* token_start = nullptr;  // [B], or null for 0
  const int32_t* out_indptr = nullptr;   // [B+1]
  DType out_dtype = DType::kBF16;
  void* out_ckv = nullptr;  // [S, d_ckv]
  int64_t out_ckv_stride_token = 0;
  void* out_kpe = nullptr;  // [S, d_kpe], null if d_kpe is 0
  int64_t out_kpe_stride_token = 0;
};

}  // namespace mla::core
