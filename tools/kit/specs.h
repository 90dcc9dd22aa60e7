// SPDX-License-Identifier: Apache-2.0
// Describes random problems: every knob, with defaults. A spec and nothing else determines a problem's bits.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "mla/backend.h"
#include "mla/params.h"

namespace mla::kit {

/// Describes how a paged cache lies in memory.
struct CacheSpec {
  CacheFormat format = CacheFormat::kBF16;
  int32_t d_qk = 576;
  int32_t d_v = 512;  ///< width of the value: kv_lora_rank; in fp8_dsv4 the whole row
  int32_t page_size = 64;
  bool two_tensors = false;        ///< ckv and kpe are two tensors; bf16, f16 and fp8
  bool block_table = false;        ///< else CSR
  bool garbage_table_tail = true;  ///< entries past the last needed page exist and are 2147483647
  bool shuffled_pages = true;
  int32_t unowned_pages = 2;  ///< pages of the pool that belong to nobody
  /// Says with how many pages of the request before it a request begins, as far as both have pages: one number for
  /// each request, or one for all; empty: none.
  std::vector<int32_t> shared_pages = {};
  int64_t page_stride_extra = 0;   ///< elements (packed formats: bytes) between pages, beyond the page
  int64_t token_stride_extra = 0;  ///< the same between the rows of a page; not in formats with footers
  int64_t scale_page_extra = 0;    ///< token_scales: f32 between the scales of pages, beyond those of a page
  int64_t scale_token_extra = 0;   ///< the same between those of tokens
  int64_t table_row_extra = 0;     ///< entries between the rows of a block table
  bool poison = true;              ///< NaN in unowned pages, rows past kv_len and gaps; else left uninitialized
  bool token_scales = false;       ///< fp8: four f32 scales for every token's ckv, else one for the tensor
  bool own_kpe_scale = false;  ///< fp8: kpe has a scale of its own (always with token_scales). Both need a tensor that
                               ///< says where kpe begins: two_tensors, or rows in two parts
  // 448 times the scales of tensors is about the largest value of a row. They are no powers of two, so that products
  // round.
  float tensor_scale = 0.018F;      ///< fp8: the one scale of ckv
  float kpe_scale = 0.013F;         ///< that of kpe, if it has one of its own
  float outer_scale = 0.0F;         ///< nvfp4_ds_mla: what multiplies all scales; 0: none is given
  bool power_of_two_scales = true;  ///< what writers of fp8_ds_mla, fp8_nope and of token_scales choose
  bool few_long_scales = false;     ///< ten rows of eleven are drawn so that their scales come out as powers of two
  bool padded_pages = false;        ///< fp8_dsv4: pages padded to the format's alignment
  bool uneven_rows = false;         ///< groups of 64 channels differ in magnitude; quantized formats always

  int32_t d_ckv() const;  ///< kv_lora_rank; fp8_dsv4: the quantized channels
  int32_t d_kpe() const { return d_qk - d_ckv(); }
  /// Return the channels that append_rope takes as they are, and those that it rotates.
  int32_t d_plain() const { return d_ckv() - kv_layout(format).rotary_in_nope; }
  int32_t d_rotary() const { return d_qk - d_plain(); }
  bool packed() const { return kv_layout(format).is_packed(); }
};

/// Returns a cache with the usual head dims of a format: 576/512; those of V4, V4.1 and fp8_nope 512/512.
CacheSpec usual_cache(CacheFormat format);
/// Returns the formats whose rows are as wide as those of this one: those of tensors, or the packed ones of its widths.
std::vector<CacheFormat> formats_like(CacheFormat format);
/// Returns the formats whose caches are tensors of elements, of any widths.
std::span<const CacheFormat> tensor_formats();

/// Says which AttentionOptions are drawn, and how.
struct OptionsSpec {
  bool attn_sink = false;
  bool infinite_sinks = false;  ///< a third of the sinks is -inf, a third +inf
  int32_t window_left = -1;
  float logits_soft_cap = 0.0F;
  bool alibi_slopes = false;            ///< 2^(-8 (h + 1) / H), as usual
  Compute compute = Compute::kDefault;  ///< kFP8 over quantized caches, and in prefill of e4m3 tensors
};

/// Holds what all attention problems have in common.
struct AttentionSpec {
  int32_t num_heads = 16;
  DType o_dtype = DType::kBF16;
  OptionsSpec options = {};
  bool want_lse = true;
  LseBase lse_base = LseBase::kE;
  bool lse_inf_without_keys = false;  ///< prefill has no such option
  bool batch_invariant = false;
  float sm_scale = 0.0F;     ///< 0: what the shape usually has
  float score_std = 2.0F;    ///< spread of the scores; 40 makes them large and the softmax one-hot
  int64_t q_head_extra = 0;  ///< elements between the heads of q (q_nope, q_pe), beyond the row
  int64_t q_token_extra = 0;
  int64_t o_head_extra = 0;
  int64_t o_token_extra = 0;
  int64_t lse_head_extra = 0;
  int64_t lse_token_extra = 0;
  int32_t workspace_misalign = 0;  ///< bytes, less than 64
  uint64_t seed = 1;
};

/// Describes the queries and outputs of decode and decode_sparse. o_dtype is q_dtype (bf16 for e4m3), f32, or e4m3.
struct AbsorbedSpec : AttentionSpec {
  DType q_dtype = DType::kBF16;
  float q_scale = 0.0F;         ///< of e4m3 queries; 0: a sixteenth of their spread
  float o_scale = 0.01F;        ///< of e4m3 outputs
  bool split_q = false;         ///< q_nope and q_pe instead of q
  bool omit_qo_indptr = false;  ///< legal if all q_len are equal
};

/// Says how the drafts of a request see each other.
enum class Tree : uint8_t { kNone, kMask, kParents };

/// Describes a decode. Request b has kv_len[b] tokens, the last q_len[b] of which are its queries; both vectors have B
/// entries, or q_len has one for all.
struct DecodeSpec : AbsorbedSpec {
  std::vector<int32_t> q_len = {1};
  std::vector<int32_t> kv_len = {128};
  CacheSpec cache = {};
  bool causal = true;
  Tree tree = Tree::kNone;      ///< random masks, future drafts among them; or random parents
  int64_t tree_mask_extra = 0;  ///< bytes between the rows of the mask
  ContextParallel context_parallel = {};
  bool shared_prefix = false;

  int32_t batch_size() const { return static_cast<int32_t>(kv_len.size()); }
  int32_t q_len_of(size_t request) const { return q_len.size() == 1 ? q_len[0] : q_len[request]; }
  float effective_sm_scale() const;  ///< 1 / sqrt(128 + qk_rope_head_dim) by default
};

/// Describes what becomes of outputs before they are stored.
struct FinishSpec {
  enum class Gate : uint8_t { kNone, kHead, kChannel };

  int32_t d_rotary = 64;  ///< 0: nothing turns
  bool interleaved = true;
  int32_t max_positions = 4096;
  Gate gate = Gate::kNone;
  DType gate_dtype = DType::kBF16;
  int32_t num_groups = 0;  ///< of heads, one behind another in the output and `scale`; 0: these have no groups
  int32_t channels_per_scale = 128;  ///< of e4m3 outputs
  DType scale_dtype = DType::kF32;
  bool power_of_two_scales = true;
  bool tokens_innermost = false;  ///< whether the scales of neighbouring tokens lie side by side
  int64_t gate_head_extra = 0, gate_token_extra = 0, scale_extra = 0, cos_sin_extra = 0;
};

/// Says how many outputs are finished, and what they become.
struct FinishedRows {
  int64_t num_tokens = 0;
  int32_t num_heads = 0, d_v = 0;
  DType out_dtype = DType::kBF16;

  bool is_quantized() const { return out_dtype == DType::kE4M3; }
  /// Returns the elements of `scale` that a head has.
  int32_t num_scales(const FinishSpec& spec) const {
    return d_v / spec.channels_per_scale / (spec.scale_dtype == DType::kI32 ? 4 : 1);
  }
};

/// Says how topk_length is given, if at all: for every query token or for every request.
enum class LengthForm : uint8_t { kNone, kPerToken, kPerRequest };

/// Describes a pool of rows and the indices into it. What lies beyond topk_length is garbage: NaN rows and wild
/// numbers.
struct SparsePoolSpec {
  CacheSpec cache = {};       ///< block_table and garbage_table_tail have no meaning
  int32_t num_tokens = 1000;  ///< rows that the pool holds
  int32_t topk = 64;
  LengthForm topk_length = LengthForm::kNone;
  std::vector<int32_t> lengths = {};  ///< what topk_length holds, repeated; if empty: random, -1 to topk + 1
  double invalid_share = 0.1;         ///< share of -1, 2147483647 and the like among the indices that count
  double duplicate_share = 0.1;       ///< share of repetitions of the row's first index
  double empty_share = 0.0;           ///< share of query tokens whose indices are all invalid
  int64_t row_extra = 0;              ///< elements between the rows of indices
};

struct DecodeSparseSpec : AbsorbedSpec {
  std::vector<int32_t> q_len = {1, 1, 1, 1};  ///< [B]
  SparsePoolSpec pool = {};
  std::optional<SparsePoolSpec> extra_pool = {};
  bool want_max_logits = false;
  int64_t max_logits_head_extra = 0, max_logits_token_extra = 0;
  std::optional<FinishSpec> finish = {};

  FinishedRows finished_rows() const;
  int32_t batch_size() const { return static_cast<int32_t>(q_len.size()); }
  int64_t num_tokens() const;
  /// Returns whether a pool has a length per request: the operation then gets qo_indptr, unless it is to be omitted.
  bool per_request() const;
  float effective_sm_scale() const;
};

/// Describes a prefill. o_dtype is dtype or f32; with e4m3 tensors bf16, f32 or e4m3.
struct PrefillSpec : AttentionSpec {
  std::vector<int32_t> q_len = {128};
  std::vector<int32_t> kv_len = {128};
  int32_t d_qk = 192;
  int32_t d_v = 128;
  DType dtype = DType::kBF16;  ///< of q, k and v
  float q_scale = 0.0F;        ///< of e4m3 queries; 0: a sixteenth of their spread
  float k_scale = 0.07F;       ///< of e4m3 keys, whose spread is 1
  float v_scale = 0.05F;       ///< of e4m3 values, whose spread is 1
  float o_scale = 0.01F;       ///< of e4m3 outputs
  bool causal = true;
  int64_t k_head_extra = 0, k_token_extra = 0;
  int64_t v_head_extra = 0, v_token_extra = 0;
  bool poison = true;  ///< NaN in the gaps

  int32_t batch_size() const { return static_cast<int32_t>(kv_len.size()); }
  int32_t q_len_of(size_t request) const { return q_len.size() == 1 ? q_len[0] : q_len[request]; }
  float effective_sm_scale() const;  ///< 1 / sqrt(d_qk) by default
};

/// Describes a sparse prefill. o_dtype is q_dtype or f32.
struct PrefillSparseSpec : AttentionSpec {
  int32_t num_tokens = 16;
  int32_t num_keys = 500;
  int32_t d_qk = 576;
  int32_t d_v = 512;
  DType q_dtype = DType::kBF16;
  DType kv_dtype = DType::kBF16;
  int32_t topk = 64;
  bool topk_length = false;  ///< random from -1 to topk + 1, for every token
  double invalid_share = 0.1;
  double duplicate_share = 0.1;
  double empty_share = 0.0;
  int64_t kv_extra = 0;   ///< elements between the rows of kv
  int64_t row_extra = 0;  ///< between the rows of indices
  bool want_max_logits = true;
  int64_t max_logits_head_extra = 0, max_logits_token_extra = 0;

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
  int64_t partial_lse_state_extra = 0, partial_lse_token_extra = 0, partial_lse_head_extra = 0;
  int64_t o_token_extra = 0, o_head_extra = 0;
  int64_t lse_token_extra = 0, lse_head_extra = 0;
  uint64_t seed = 1;
};

struct AppendSpec {
  int32_t num_tokens = 64;
  int32_t num_pages = 8;  ///< must hold the tokens
  CacheSpec cache = {};   ///< block_table, garbage_table_tail, shuffled_pages and unowned_pages have no meaning
  DType dtype = DType::kBF16;
  bool split_rows = false;     ///< ckv and kpe instead of kv
  double skip_share = 0.1;     ///< share of negative slots
  double special_share = 0.0;  ///< share of rows that hold zeros, infinities, NaN, huge and tiny values
  int64_t row_extra = 0;       ///< elements between source rows
  uint64_t seed = 1;
};

struct AppendRopeSpec {
  int32_t num_tokens = 32;
  int32_t num_heads = 4;  ///< 0: keys only
  int32_t num_pages = 8;
  CacheSpec cache = {};
  DType q_dtype = DType::kBF16;
  DType q_out_dtype = DType::kBF16;
  float q_scale = 0.05F;  ///< of e4m3 q_out
  DType dtype = DType::kBF16;
  bool interleaved = true;
  int32_t max_positions = 4096;
  /// Says what of the keys is normalized.
  enum class Norm : uint8_t { kNone, kLatent, kRow };
  bool q_norm = false, q_norm_weight = false;
  Norm norm = Norm::kNone;
  DType norm_dtype = DType::kBF16;  ///< of the weights
  double skip_share = 0.1;
  double special_share = 0.0;  ///< as AppendSpec's, of the keys
  int64_t q_head_extra = 0, q_token_extra = 0, q_out_head_extra = 0, q_out_token_extra = 0;
  int64_t row_extra = 0;  ///< between the rows of ckv, and of kpe
  int64_t cos_sin_extra = 0;
  uint64_t seed = 1;

  int32_t norm_channels() const { return norm == Norm::kLatent ? cache.d_plain() : cache.d_qk; }
};

struct GatherSpec {
  std::vector<int32_t> kv_len = {128};
  std::vector<int32_t> token_start = {0};  ///< [B]
  std::vector<int32_t> count = {128};      ///< [B], tokens to gather; token_start + count <= kv_len
  bool omit_token_start = false;           ///< legal if all are 0
  CacheSpec cache = {};
  DType out_dtype = DType::kBF16;
  bool split_out = false;  ///< out_ckv and out_kpe instead of out_kv
  int64_t row_extra = 0;   ///< elements between output rows
  uint64_t seed = 1;

  int32_t batch_size() const { return static_cast<int32_t>(kv_len.size()); }
};

/// Describes a copy of pages. `num_tokens` fill whole pages of both caches, which have equal head dims.
struct CopyPagesSpec {
  int32_t num_tokens = 256;
  CacheSpec from = {};
  CacheSpec to = {};
  uint64_t seed = 1;
};

struct BlockTableToCsrSpec {
  std::vector<int32_t> kv_len = {128, 0, 77};
  int32_t page_size = 64;
  int32_t garbage_columns = 2;  ///< columns beyond the longest request's pages
  int64_t row_extra = 0;        ///< elements between the rows of the table
  uint64_t seed = 1;

  int32_t batch_size() const { return static_cast<int32_t>(kv_len.size()); }
};

struct PhysicalSlotsSpec {
  std::vector<int32_t> q_len = {1};  ///< as DecodeSpec's
  std::vector<int32_t> kv_len = {300};
  int32_t topk = 64;
  bool topk_length = false;  ///< random from -1 to topk + 1, for every token
  int32_t page_size = 64;
  bool block_table = false;
  bool omit_qo_indptr = false;
  ContextParallel context_parallel = {};
  int32_t ratio = 1;
  bool list_tokens = false;
  int32_t slots_columns = 0;  ///< with list_tokens: columns beyond those that are needed
  bool compact = false;
  bool in_place = false;  ///< slots are written over the indices
  bool want_valid_count = true;
  double invalid_share = 0.2;  ///< -1 inside the row, and tokens that the request does not have
  int64_t row_extra = 0;       ///< elements between the rows of indices
  int64_t slots_extra = 0;     ///< between those of slots, which in place are the indices too
  int64_t table_row_extra = 0;
  uint64_t seed = 1;

  int32_t batch_size() const { return static_cast<int32_t>(kv_len.size()); }
  int32_t q_len_of(size_t request) const { return q_len.size() == 1 ? q_len[0] : q_len[request]; }
  int32_t num_slots() const { return list_tokens ? topk * ratio + ratio - 1 + slots_columns : topk; }
};

struct AppendIndexerSpec {
  int32_t num_tokens = 64;
  int32_t num_pages = 8;
  int32_t page_size = 64;
  int64_t page_stride_extra = 0;  ///< bytes
  DType dtype = DType::kBF16;
  IndexerFormat format = IndexerFormat::kFP8;
  bool power_of_two_scales = true;
  double skip_share = 0.1;
  double special_share = 0.0;  ///< as AppendSpec's
  int64_t row_extra = 0;
  uint64_t seed = 1;
};

struct IndexerLogitsSpec {
  std::vector<int32_t> q_len = {1};  ///< as DecodeSpec's
  std::vector<int32_t> kv_len = {300};
  int32_t num_heads = 64;
  DType q_dtype = DType::kE4M3;
  IndexerFormat format = IndexerFormat::kFP8;
  int32_t page_size = 64;
  bool block_table = false;
  bool omit_qo_indptr = false;
  bool causal = true;
  int32_t ratio = 1;
  bool key_begin = false, key_end = false;  ///< random, and some that the request does not have
  int32_t num_blocks = 0;  ///< that are listed for a query, as many real ones as there are, in order; 0: no list
  int32_t block_size = 1;
  double wild_share = 0.0;  ///< of the listed blocks, which are none of the request's
  Compute compute = Compute::kDefault;
  int32_t unowned_pages = 2;
  int64_t page_stride_extra = 0;  ///< bytes
  int64_t q_head_extra = 0, q_token_extra = 0;
  int64_t weights_extra = 0;  ///< elements between the rows of weights
  int64_t table_row_extra = 0;
  DType logits_dtype = DType::kF32;
  int64_t logits_columns = 0;  ///< columns beyond the logits of the longest request
  int64_t logits_extra = 0;    ///< elements between the rows of the logits
  bool poison = true;
  uint64_t seed = 1;

  int32_t batch_size() const { return static_cast<int32_t>(kv_len.size()); }
  int32_t q_len_of(size_t request) const { return q_len.size() == 1 ? q_len[0] : q_len[request]; }
  /// Returns how many keys query i of a request sees without key_begin and key_end.
  int64_t num_visible(size_t request, int64_t i) const {
    const int64_t later = causal ? q_len_of(request) - 1 - i : 0;
    return std::max<int64_t>(kv_len[request] - later, 0) / ratio;
  }
};

struct TopKSpec {
  int32_t num_tokens = 8;
  int32_t num_logits = 1000;
  int32_t k = 64;
  bool lengths = false;    ///< random, 0 and num_logits among them
  bool starts = false;     ///< random, up to the lengths
  int32_t num_blocks = 0;  ///< listed blocks of each row; 0: no list
  int32_t block_size = 1;
  int32_t levels = 0;  ///< logits take this many values, so that many are equal; 0: all that their type has
  double nan_share = 0.0;
  double infinite_share = 0.0;  ///< half of them -inf
  DType logits_dtype = DType::kF32;
  int64_t logits_extra = 0, indices_extra = 0;
  uint64_t seed = 1;
};

struct IndexerTopKSpec {
  IndexerLogitsSpec indexer = {};
  int32_t topk = 64;
  int32_t page_size = 64;  ///< of the latent cache
  ContextParallel context_parallel = {};
  bool list_tokens = false;
  int32_t slots_columns = 0;  ///< beyond those that the selected keys take
  bool want_valid_count = true;
  int64_t slots_extra = 0;      ///< elements between the rows of slots
  int64_t table_row_extra = 0;  ///< of the latent cache's table

  int32_t num_slots() const { return slots_columns + (list_tokens ? topk * indexer.ratio + indexer.ratio - 1 : topk); }
};

struct FinishOutputSpec : FinishSpec {
  int32_t num_tokens = 9;
  int32_t num_heads = 16;
  int32_t d_v = 512;
  DType dtype = DType::kBF16;
  DType out_dtype = DType::kBF16;
  double special_share = 0.0;  ///< as AppendSpec's
  int64_t o_head_extra = 0, o_token_extra = 0, out_head_extra = 0, out_token_extra = 0;
  uint64_t seed = 1;

  FinishedRows rows() const { return {num_tokens, num_heads, d_v, out_dtype}; }
};

/// Describes a step of a compressor: the new tokens of requests, whose earlier ones are in the state as far as it has
/// room.
struct CompressSpec {
  enum class To : uint8_t { kLatents, kCache, kIndexer };

  std::vector<int32_t> q_len = {9};  ///< as DecodeSpec's; new tokens
  std::vector<int32_t> kv_len = {300};
  int32_t ratio = 4;
  bool overlap = true;
  DType dtype = DType::kBF16;
  DType latent_dtype = DType::kBF16;
  DType norm_dtype = DType::kBF16;
  bool bias = true, norm = true;
  float score_std = 1.0F;
  To to = To::kCache;
  IndexerFormat indexer_format = IndexerFormat::kFP8;
  CacheSpec cache = {};  ///< d_qk is the width of a latent, 128 for the indexer; kLatents use nothing else
  int32_t num_pages = 8;
  bool rotary = true;  ///< whether rotary channels turn, where the format has any
  bool interleaved = true;
  int32_t block_size = 8;
  int32_t columns = 1;          ///< of the state's table; 0: as many as the longest request has blocks
  double missing_share = 0.0;   ///< of the blocks
  double skip_share = 0.1;      ///< of the slots
  bool omit_qo_indptr = false;  ///< legal if all q_len are equal
  bool power_of_two_scales = true;
  int64_t row_extra = 0;          ///< elements between the rows of kv
  int64_t score_extra = 0;        ///< between the rows of score
  int64_t bias_extra = 0;         ///< between the rows of position_bias
  int64_t state_extra = 0;        ///< between the rows of the state
  int64_t state_block_extra = 0;  ///< between its blocks, beside that
  int64_t table_extra = 0;        ///< between the rows of its table
  int64_t latent_extra = 0, cos_sin_extra = 0;
  std::optional<AppendRopeSpec> append = {};  ///< what is appended beside the latents, of as many tokens
  uint64_t seed = 1;

  int32_t batch_size() const { return static_cast<int32_t>(kv_len.size()); }
  int32_t q_len_of(size_t request) const { return q_len.size() == 1 ? q_len[0] : q_len[request]; }
  int32_t width() const { return overlap ? 2 * cache.d_qk : cache.d_qk; }
  int32_t d_rotary() const;  ///< channels that turn
  int32_t num_columns() const;
};

/// Returns one line with every knob that is not at its default, the seed included.
std::string describe(const DecodeSpec& spec);
std::string describe(const DecodeSparseSpec& spec);
std::string describe(const PrefillSpec& spec);
std::string describe(const PrefillSparseSpec& spec);
std::string describe(const MergeSpec& spec);
std::string describe(const AppendSpec& spec);
std::string describe(const AppendRopeSpec& spec);
std::string describe(const GatherSpec& spec);
std::string describe(const CopyPagesSpec& spec);
std::string describe(const BlockTableToCsrSpec& spec);
std::string describe(const PhysicalSlotsSpec& spec);
std::string describe(const AppendIndexerSpec& spec);
std::string describe(const IndexerLogitsSpec& spec);
std::string describe(const TopKSpec& spec);
std::string describe(const IndexerTopKSpec& spec);
std::string describe(const CompressSpec& spec);
std::string describe(const FinishOutputSpec& spec);

/// Returns the problem that `explain` judges.
Problem problem_of(const DecodeSpec& spec);
Problem problem_of(const DecodeSparseSpec& spec);
Problem problem_of(const PrefillSpec& spec);
Problem problem_of(const PrefillSparseSpec& spec);
Problem problem_of(const MergeSpec& spec);
Problem problem_of(const AppendSpec& spec);
Problem problem_of(const AppendRopeSpec& spec);
Problem problem_of(const GatherSpec& spec);
Problem problem_of(const CopyPagesSpec& spec);
Problem problem_of(const BlockTableToCsrSpec& spec);
Problem problem_of(const PhysicalSlotsSpec& spec);
Problem problem_of(const AppendIndexerSpec& spec);
Problem problem_of(const IndexerLogitsSpec& spec);
Problem problem_of(const TopKSpec& spec);
Problem problem_of(const IndexerTopKSpec& spec);
Problem problem_of(const CompressSpec& spec);
Problem problem_of(const FinishOutputSpec& spec);

/// Holds what a perfect kernel does: 2 flops for every multiply-add of a visible key; bytes of inputs read once and
/// outputs written once (no flops where only bytes move). For trees, random lengths and shares it is what is to be
/// expected.
struct Work {
  double flops = 0;
  double bytes = 0;
};
Work work_of(const DecodeSpec& spec);
Work work_of(const DecodeSparseSpec& spec);
Work work_of(const PrefillSpec& spec);
Work work_of(const PrefillSparseSpec& spec);
Work work_of(const MergeSpec& spec);
Work work_of(const AppendSpec& spec);
Work work_of(const AppendRopeSpec& spec);
Work work_of(const GatherSpec& spec);
Work work_of(const CopyPagesSpec& spec);
/// Returns the width of rows of logits.
int64_t num_logits(const IndexerLogitsSpec& spec);

Work work_of(const BlockTableToCsrSpec& spec);
Work work_of(const PhysicalSlotsSpec& spec);
Work work_of(const AppendIndexerSpec& spec);
Work work_of(const IndexerLogitsSpec& spec);
Work work_of(const TopKSpec& spec);
Work work_of(const IndexerTopKSpec& spec);
Work work_of(const CompressSpec& spec);
Work work_of(const FinishOutputSpec& spec);

/// Returns a small random problem, drawn over every knob and the shapes that users run; the same seed gives the same
/// spec. `format` is the cache's (decode_sparse: the first pool's; copy_pages: where tokens come from); prefill and
/// merge_states have a data type instead, and the index tools neither.
DecodeSpec random_decode_spec(uint64_t seed, CacheFormat format);
DecodeSparseSpec random_decode_sparse_spec(uint64_t seed, CacheFormat format);
PrefillSpec random_prefill_spec(uint64_t seed, DType dtype);
PrefillSparseSpec random_prefill_sparse_spec(uint64_t seed, DType kv_dtype);
MergeSpec random_merge_spec(uint64_t seed, DType partial_dtype);
AppendSpec random_append_spec(uint64_t seed, CacheFormat format);
AppendRopeSpec random_append_rope_spec(uint64_t seed, CacheFormat format);
GatherSpec random_gather_spec(uint64_t seed, CacheFormat format);
CopyPagesSpec random_copy_pages_spec(uint64_t seed, CacheFormat from);
BlockTableToCsrSpec random_block_table_to_csr_spec(uint64_t seed);
PhysicalSlotsSpec random_physical_slots_spec(uint64_t seed);
AppendIndexerSpec random_append_indexer_spec(uint64_t seed);
IndexerLogitsSpec random_indexer_logits_spec(uint64_t seed);
TopKSpec random_top_k_spec(uint64_t seed);
IndexerTopKSpec random_indexer_top_k_spec(uint64_t seed);
CompressSpec random_compress_spec(uint64_t seed, CacheFormat format);
FinishOutputSpec random_finish_output_spec(uint64_t seed, DType dtype);

}  // namespace mla::kit
