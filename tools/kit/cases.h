// SPDX-License-Identifier: Apache-2.0
// Defines cases: problems with all their memory. Buffers are public so that tests can break them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kit/buffer.h"
#include "kit/specs.h"
#include "mla/params.h"

namespace mla::kit {

/// Holds a page table and the memory behind it.
struct TableMemory {
  Buffer kv_indptr, table, kv_len;
  PageTable pages;
  int32_t page_size = 0;
  int64_t num_pages = 0;
  std::vector<std::vector<int32_t>> pages_of;  ///< page numbers that each request needs
  std::vector<int32_t> unowned;                ///< page numbers that none needs

  /// Returns the slot of a request's local token, one that is on the rank.
  int64_t slot_of(size_t request, int64_t token) const;
};

/// Holds a paged cache with its page table.
struct PagedMemory : TableMemory {
  Buffer kv, ckv, kpe;  ///< either kv, or ckv and kpe
  Buffer ckv_scale, kpe_scale;
  KvCache cache;
  int32_t d_ckv = 0, d_kpe = 0;

  /// Returns where the latent and the rotary channels of row (page, slot) begin, in elements from the start of their
  /// buffers; not for packed formats.
  int64_t ckv_offset(int64_t page, int64_t slot) const;
  int64_t kpe_offset(int64_t page, int64_t slot) const;
  /// Points at the parts of a row, of any format; `scales` is null where a row has no scales of its own.
  struct Row {
    std::byte* ckv;
    std::byte* kpe;
    std::byte* scales;
  };
  Row row(int64_t page, int64_t slot) const;
  /// Quantizes d_ckv + d_kpe values into a row, as writers do. Writes the row's own scales.
  void write_row(int64_t page, int64_t slot, std::span<const float> values) const;
  /// Returns the values of a row as the format means them, dequantized.
  std::vector<float> read_row(int64_t page, int64_t slot) const;
  /// Returns the buffers that writers write: the rows, and the scales if writers choose them.
  std::vector<const Buffer*> written() const;
};

/// Outputs start as bytes 0xA5, so that an element that was not written, or a gap that was, shows.
inline constexpr uint8_t kUntouched = 0xA5;

/// Holds what every attention problem owns beside its keys.
struct AttentionMemory {
  Buffer q, q_nope, q_pe, q_scale;  ///< either q, or q_nope and q_pe
  Buffer attn_sink, alibi_slopes;
  Buffer o, o_scale, lse;
};

struct DecodeCase : AttentionMemory {
  explicit DecodeCase(const DecodeSpec& spec);
  /// Returns parameters whose tensors are views of the buffers.
  DecodeParams params() const;
  void reset_outputs() const;

  DecodeSpec spec;
  int64_t num_tokens = 0;
  Buffer qo_indptr, tree_mask, tree_parents;
  PagedMemory memory;
};

/// Holds the elements between neighbouring heads and tokens.
struct RowGaps {
  int64_t head = 0, token = 0;
};

/// Holds what becomes of outputs before they are stored.
struct FinishMemory {
  FinishMemory(const FinishSpec& spec, const FinishedRows& rows, uint64_t seed);
  OutputFinish params(const FinishSpec& spec, const FinishedRows& rows) const;
  /// Returns memory for the outputs.
  static Buffer output(const FinishSpec& spec, const FinishedRows& rows, const RowGaps& gaps);
  static TensorView output_view(const FinishSpec& spec, const FinishedRows& rows, const Buffer& out,
                                const RowGaps& gaps);

  Buffer cos_sin, positions, gate, scale;
};

/// Holds a pool of decode_sparse.
struct SparseMemory {
  PagedMemory memory;  ///< the pool's tokens are those of its one request; operations do not get its page table
  Buffer indices, topk_length;
};

struct DecodeSparseCase : AttentionMemory {
  explicit DecodeSparseCase(const DecodeSparseSpec& spec);
  DecodeSparseParams params() const;
  void reset_outputs() const;
  std::vector<const Buffer*> outputs() const;

  DecodeSparseSpec spec;
  int64_t num_tokens = 0;
  Buffer qo_indptr, max_logits;
  SparseMemory pool;
  std::optional<SparseMemory> extra_pool;
  std::optional<FinishMemory> finish;
};

struct PrefillCase : AttentionMemory {
  explicit PrefillCase(const PrefillSpec& spec);
  PrefillParams params() const;
  void reset_outputs() const;

  PrefillSpec spec;
  int64_t num_tokens = 0, num_keys = 0;
  Buffer k, v, k_scale, v_scale, qo_indptr, kv_indptr;
};

struct PrefillSparseCase : AttentionMemory {
  explicit PrefillSparseCase(const PrefillSparseSpec& spec);
  PrefillSparseParams params() const;
  void reset_outputs() const;

  PrefillSparseSpec spec;
  Buffer kv, indices, topk_length, max_logits;  ///< kv has a few NaN rows behind the last
};

struct MergeCase {
  explicit MergeCase(const MergeSpec& spec);
  MergeStatesParams params() const;
  /// Sets o and lse to the state they have on entry (in place), or to untouched bytes.
  void reset_outputs() const;

  MergeSpec spec;
  Buffer partial_o, partial_lse, o, lse;
};

// The cases below also say which buffers they write.

struct AppendCase {
  explicit AppendCase(const AppendSpec& spec);
  AppendParams params() const;
  void reset_outputs() const;
  std::vector<const Buffer*> outputs() const { return memory.written(); }

  AppendSpec spec;
  Buffer rows, ckv_rows, kpe_rows, slot_mapping;
  PagedMemory memory;  ///< the output; without a page table
};

struct AppendRopeCase {
  explicit AppendRopeCase(const AppendRopeSpec& spec);
  AppendRopeParams params() const;
  void reset_outputs() const;
  std::vector<const Buffer*> outputs() const;

  AppendRopeSpec spec;
  Buffer q_nope, q_pe, q_out, q_scale, ckv_rows, kpe_rows, cos_sin, positions, slot_mapping, q_norm_weight, norm_weight;
  PagedMemory memory;
};

struct GatherCase {
  explicit GatherCase(const GatherSpec& spec);
  GatherParams params() const;
  void reset_outputs() const;
  std::vector<const Buffer*> outputs() const { return {&out_kv, &out_ckv, &out_kpe}; }

  GatherSpec spec;
  int64_t num_rows = 0;
  PagedMemory memory;
  Buffer token_start, out_indptr, out_kv, out_ckv, out_kpe;
};

struct CopyPagesCase {
  explicit CopyPagesCase(const CopyPagesSpec& spec);
  CopyPagesParams params() const;
  void reset_outputs() const;
  std::vector<const Buffer*> outputs() const { return to.written(); }

  CopyPagesSpec spec;
  PagedMemory from, to;
  Buffer from_pages, to_pages;
};

struct BlockTableToCsrCase {
  explicit BlockTableToCsrCase(const BlockTableToCsrSpec& spec);
  BlockTableToCsrParams params() const;
  void reset_outputs() const;
  std::vector<const Buffer*> outputs() const { return {&kv_indptr, &kv_indices}; }

  BlockTableToCsrSpec spec;
  int64_t max_pages = 0;
  Buffer block_table, kv_len, kv_indptr, kv_indices;
};

struct PhysicalSlotsCase {
  explicit PhysicalSlotsCase(const PhysicalSlotsSpec& spec);
  PhysicalSlotsParams params() const;
  /// Sets the outputs to untouched bytes and, in place, writes the indices into `slots`.
  void reset_outputs() const;
  std::vector<const Buffer*> outputs() const { return {&slots, &valid_count}; }

  PhysicalSlotsSpec spec;
  int64_t num_tokens = 0;
  std::vector<int32_t> index_values;  ///< the indices, dense: [num_tokens, topk]
  Buffer indices, topk_length, qo_indptr, slots, valid_count;
  TableMemory table;
};

/// Holds the indexer's pages.
struct IndexerMemory {
  Buffer kv;
  IndexerCache cache;

  std::byte* key(int64_t page, int64_t slot) const;
  std::byte* scale(int64_t page, int64_t slot) const;  ///< points at scales of any alignment
  std::vector<double> values(int64_t page, int64_t slot) const;
};

struct AppendIndexerCase {
  explicit AppendIndexerCase(const AppendIndexerSpec& spec);
  AppendIndexerParams params() const;
  void reset_outputs() const;
  std::vector<const Buffer*> outputs() const { return {&memory.kv}; }

  AppendIndexerSpec spec;
  Buffer rows, slot_mapping;
  IndexerMemory memory;
};

struct IndexerLogitsCase {
  explicit IndexerLogitsCase(const IndexerLogitsSpec& spec);
  IndexerLogitsParams params() const;
  void reset_outputs() const;
  std::vector<const Buffer*> outputs() const { return {&logits}; }
  /// Returns what the errors of every row's logits are measured by: sum_h |weight| |q| times the largest |k| of its
  /// request.
  std::vector<double> row_scales() const;

  IndexerLogitsSpec spec;
  int64_t num_tokens = 0, num_columns = 0;
  Buffer q, weights, qo_indptr, key_begin, key_end, blocks, logits;
  IndexerMemory memory;
  TableMemory table;
};

struct TopKCase {
  explicit TopKCase(const TopKSpec& spec);
  TopKParams params() const;
  void reset_outputs() const;
  std::vector<const Buffer*> outputs() const { return {&indices}; }

  TopKSpec spec;
  Buffer logits, lengths, starts, blocks, indices;
};

struct IndexerTopKCase {
  explicit IndexerTopKCase(const IndexerTopKSpec& spec);
  IndexerTopKParams params() const;
  void reset_outputs() const;
  std::vector<const Buffer*> outputs() const { return {&indexer.logits, &slots, &valid_count}; }

  IndexerTopKSpec spec;
  IndexerLogitsCase indexer;
  TableMemory table;  ///< of the latent cache
  Buffer slots, valid_count;
};

struct CompressCase {
  explicit CompressCase(const CompressSpec& spec);
  CompressParams params() const;
  /// Sets the state to what it holds on entry, and the outputs to untouched bytes.
  void reset_outputs() const;
  /// Returns the buffers of appended latents.
  std::vector<const Buffer*> rows() const;
  /// Returns these, the latents and the state, and what is written beside them.
  std::vector<const Buffer*> outputs() const;
  int64_t num_blocks() const { return static_cast<int64_t>(spec.kv_len.size()) * spec.num_columns() + 2; }

  CompressSpec spec;
  int64_t num_tokens = 0;
  Buffer kv, score, position_bias, qo_indptr, kv_len, state, state_table, norm_weight, latent, slot_mapping, cos_sin;
  std::vector<std::byte> state_before;
  PagedMemory memory;     ///< kCache
  IndexerMemory indexer;  ///< kIndexer
  std::optional<AppendRopeCase> append;
};

struct FinishOutputCase {
  explicit FinishOutputCase(const FinishOutputSpec& spec);
  FinishOutputParams params() const;
  void reset_outputs() const;
  std::vector<const Buffer*> outputs() const { return {&out, &finish.scale}; }

  FinishOutputSpec spec;
  FinishMemory finish;
  Buffer o, out;
};

}  // namespace mla::kit
