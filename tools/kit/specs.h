// SPDX-License-Identifier: Apache-2.0
// Descriptions of random problems: every knob, with defaults. A spec and nothing else determines a problem's bits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mla/backend.h"
#include "mla/params.h"

namespace mla::kit {

/// How a paged cache lies in memory.
struct CacheSpec {
  CacheFormat format = CacheFormat::kBF16;
  int32_t d_qk = 576;
  int32_t d_v = 512;  ///< kv_lora_rank; d_qk - d_v is qk_rope_head_dim, may be 0
  int32_t page_size = 64;
  bool two_tensors = false;        ///< ckv and kpe apart
  bool block_table = false;        ///< else CSR
  bool garbage_table_tail = true;  ///< entries past the last needed page exist and are 2147483647
  bool shuffled_pages = true;
  int32_t unowned_pages = 2;       ///< pages of the pool that belong to nobody
  int64_t page_stride_extra = 0;   ///< elements between pages, beyond the page
  int64_t token_stride_extra = 0;  ///< elements between the rows of a page
  bool poison = true;              ///< NaN in unowned pages, rows past kv_len and gaps; else left uninitialized
};

/// Requests b has q_len[b] queries (the last of) kv_len[b] tokens; both vectors have B entries, or q_len one for all.
struct DecodeSpec {
  std::vector<int32_t> q_len = {1};
  std::vector<int32_t> kv_len = {128};
  int32_t num_heads = 16;
  CacheSpec cache;
  DType q_dtype = DType::kBF16;
  DType o_dtype = DType::kBF16;  ///< q_dtype or f32
  bool split_q = false;          ///< q_nope and q_pe instead of q
  bool omit_qo_indptr = false;   ///< legal if all q_len are equal
  bool causal = true;
  bool want_lse = true;
  LseBase lse_base = LseBase::kE;
  bool batch_invariant = false;
  float sm_scale = 0.0F;     ///< 0 = 1 / sqrt(128 + qk_rope_head_dim)
  float score_std = 2.0F;    ///< spread of the scores; 40 makes them large and the softmax one-hot
  int64_t q_head_extra = 0;  ///< elements between the heads of q (q_nope, q_pe), beyond the row
  int64_t q_token_extra = 0;
  int64_t o_head_extra = 0;
  int64_t o_token_extra = 0;
  int64_t lse_token_extra = 0;
  int32_t workspace_misalign = 0;  ///< bytes, less than 64
  uint64_t seed = 1;

  int32_t batch_size() const { return static_cast<int32_t>(kv_len.size()); }
  int32_t q_len_of(size_t request) const { return q_len.size() == 1 ? q_len[0] : q_len[request]; }
  float effective_sm_scale() const;
};

struct PrefillSpec {
  std::vector<int32_t> q_len = {128};
  std::vector<int32_t> kv_len = {128};
  int32_t num_heads = 16;
  int32_t d_qk = 192;
  int32_t d_v = 128;
  DType dtype = DType::kBF16;
  DType o_dtype = DType::kBF16;  ///< dtype or f32
  bool causal = true;
  bool want_lse = true;
  LseBase lse_base = LseBase::kE;
  bool batch_invariant = false;
  float sm_scale = 0.0F;  ///< 0 = 1 / sqrt(d_qk)
  float score_std = 2.0F;
  int64_t q_head_extra = 0, q_token_extra = 0;
  int64_t k_head_extra = 0, k_token_extra = 0;
  int64_t v_head_extra = 0, v_token_extra = 0;
  int64_t o_head_extra = 0, o_token_extra = 0;
  int64_t lse_token_extra = 0;
  bool poison = true;  ///< NaN in the gaps
  int32_t workspace_misalign = 0;
  uint64_t seed = 1;

  int32_t batch_size() const { return static_cast<int32_t>(kv_len.size()); }
  int32_t q_len_of(size_t request) const { return q_len.size() == 1 ? q_len[0] : q_len[request]; }
  float effective_sm_scale() const;
};

struct MergeSpec {
  int32_t num_states = 4;
  int32_t num_tokens = 8;
  int32_t num_heads = 16;
  int32_t d_v = 512;
  DType partial_dtype = DType::kF32;
  DType o_dtype = DType::kF32;
  LseBase lse_base = LseBase::kE;
  bool in_place = false;
  bool want_lse = true;      ///< must be set if in_place
  double empty_share = 0.2;  ///< share of states with lse = -inf; their o is NaN
  float lse_std = 3.0F;
  int64_t partial_state_extra = 0, partial_token_extra = 0, partial_head_extra = 0;
  int64_t o_token_extra = 0, o_head_extra = 0;
  uint64_t seed = 1;
};

struct AppendSpec {
  int32_t num_tokens = 64;
  int32_t num_pages = 8;  ///< must hold the tokens
  CacheSpec cache;        ///< block_table, garbage_table_tail, shuffled_pages and unowned_pages have no meaning
  DType dtype = DType::kBF16;
  bool split_rows = false;  ///< ckv and kpe instead of kv
  double skip_share = 0.1;  ///< share of negative slots
  int64_t row_extra = 0;    ///< elements between source rows
  uint64_t seed = 1;
};

struct GatherSpec {
  std::vector<int32_t> kv_len = {128};
  std::vector<int32_t> token_start = {0};  ///< [B]
  std::vector<int32_t> count = {128};      ///< [B], tokens to gather; token_start + count <= kv_len
  bool omit_token_start = false;           ///< legal if all are 0
  CacheSpec cache;
  DType out_dtype = DType::kBF16;
  bool split_out = false;  ///< out_ckv and out_kpe instead of out_kv
  int64_t row_extra = 0;   ///< elements between output rows
  uint64_t seed = 1;

  int32_t batch_size() const { return static_cast<int32_t>(kv_len.size()); }
};

/// One line with every knob that is not at its default, the seed included.
std::string describe(const DecodeSpec& spec);
std::string describe(const PrefillSpec& spec);
std::string describe(const MergeSpec& spec);
std::string describe(const AppendSpec& spec);
std::string describe(const GatherSpec& spec);

/// What `explain` judges.
Problem problem_of(const DecodeSpec& spec);
Problem problem_of(const PrefillSpec& spec);
Problem problem_of(const MergeSpec& spec);
Problem problem_of(const AppendSpec& spec);
Problem problem_of(const GatherSpec& spec);

/// What a perfect kernel does: 2 flops for every multiply-add of a visible key; bytes of inputs read once and outputs
/// written once (merge, append and gather: no flops counted).
struct Work {
  double flops = 0;
  double bytes = 0;
};
Work work_of(const DecodeSpec& spec);
Work work_of(const PrefillSpec& spec);
Work work_of(const MergeSpec& spec);
Work work_of(const AppendSpec& spec);
Work work_of(const GatherSpec& spec);

/// Small random problems over every knob and the shapes that users run; the same seed gives the same spec. `format`
/// (decode, append, gather; for prefill and merge_states the data type of that name) is the cache's.
DecodeSpec random_decode_spec(uint64_t seed, CacheFormat format);
PrefillSpec random_prefill_spec(uint64_t seed, DType dtype);
MergeSpec random_merge_spec(uint64_t seed, DType partial_dtype);
AppendSpec random_append_spec(uint64_t seed, CacheFormat format);
GatherSpec random_gather_spec(uint64_t seed, CacheFormat format);

}  // namespace mla::kit
