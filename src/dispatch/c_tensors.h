// SPDX-License-Identifier: Apache-2.0
// From the C ABI's structs to the C++ API's.
#pragma once

#include "mla/c_api.h"
#include "mla/params.h"
#include "mla/status.h"

namespace mla::dispatch {

/// Converts tensors one by one; the first that cannot be converted is kept as `status`.
class TensorReader {
 public:
  explicit TensorReader(Op op) : op_(op) {}

  TensorView read(const char* field, const mla_tensor* tensor);
  KvCache read(const mla_kv_cache& cache);
  PageTable read(const mla_page_table& pages);
  bool flag(const char* field, int32_t value);
  LseBase lse_base(int32_t value) const {
    return value >= 0 && value < 256 ? static_cast<LseBase>(value) : LseBase{255};
  }
  const Status& status() const { return status_; }

 private:
  void fail(const char* field, std::string text);

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

}  // namespace mla::dispatch
