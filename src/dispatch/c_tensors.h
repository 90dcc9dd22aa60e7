// SPDX-License-Identifier: Apache-2.0
// From the C ABI's structs to the C++ API's.
#pragma once

#include <span>
#include <string>

#include "mla/c_api.h"
#include "mla/params.h"
#include "mla/status.h"

namespace mla::dispatch {

/// A value of an enumeration of one byte. What does not fit becomes 255, which validation refuses.
template <class Enum>
constexpr Enum enumeration(int32_t value) {
  return value >= 0 && value < 256 ? static_cast<Enum>(value) : Enum{255};
}

/// What callers in C call fields that have other names, or stand elsewhere, in mla/params.h.
std::span<const FieldName> names_in_c(Op op);

/// Converts tensors one by one; the first that cannot be converted is kept as `status`. `part` is where the fields of a
/// nested struct stand in mla/params.h ("cache"); "" for the params themselves.
class TensorReader {
 public:
  explicit TensorReader(Op op) : op_(op) {}

  TensorView read(const char* field, const mla_tensor* tensor) { return read("", field, tensor); }
  TensorView read(const char* part, const char* field, const mla_tensor* tensor);
  KvCache read(const char* part, const mla_kv_cache& cache, const mla_cache_scales& scales);
  PageTable read(const char* part, const mla_page_table& pages);
  IndexerCache read(const char* part, const mla_indexer_cache& cache);
  AttentionOptions read(const mla_attention_options& options);
  ContextParallel read(const mla_context_parallel& share);
  SparsePool read(const char* part, const mla_sparse_pool& pool, int32_t topk_length_per);
  bool flag(const char* field, int32_t value) { return flag("", field, value); }
  bool flag(const char* part, const char* field, int32_t value);
  LseBase lse_base(int32_t value);
  void zero(const char* part, const char* field, int32_t value);
  const Status& status() const { return status_; }

 private:
  void fail(const char* part, const char* field, std::string text);

  Op op_;
  Status status_;
};

/// kNone if the library has no such type.
DType dtype_of(mla_dtype dtype);

DecodeParams read(const mla_decode_params& params, TensorReader& reader);
PrefillParams read(const mla_prefill_params& params, TensorReader& reader);
MergeStatesParams read(const mla_merge_states_params& params, TensorReader& reader);
AppendParams read(const mla_append_params& params, TensorReader& reader);
GatherParams read(const mla_gather_params& params, TensorReader& reader);
DecodeSparseParams read(const mla_decode_sparse_params& params, TensorReader& reader);
PrefillSparseParams read(const mla_prefill_sparse_params& params, TensorReader& reader);
AppendRopeParams read(const mla_append_rope_params& params, TensorReader& reader);
CopyPagesParams read(const mla_copy_pages_params& params, TensorReader& reader);
BlockTableToCsrParams read(const mla_block_table_to_csr_params& params, TensorReader& reader);
PhysicalSlotsParams read(const mla_physical_slots_params& params, TensorReader& reader);
AppendIndexerParams read(const mla_append_indexer_params& params, TensorReader& reader);
IndexerLogitsParams read(const mla_indexer_logits_params& params, TensorReader& reader);
TopKParams read(const mla_top_k_params& params, TensorReader& reader);
IndexerTopKParams read(const mla_indexer_top_k_params& params, TensorReader& reader);

}  // namespace mla::dispatch
