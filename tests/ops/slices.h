// SPDX-License-Identifier: Apache-2.0
// Makes parts of a problem calls of their own, on the same memory.
#pragma once

#include <cstdint>
#include <vector>

#include "backend_test.h"

namespace mla {

/// Makes requests `first` ... `first + count - 1` a batch of their own, on the same memory.
struct DecodeSlice {
  DecodeSlice(const kit::DecodeCase& problem, size_t first, size_t count) : params(problem.params()) {
    int32_t begin = 0;
    for (size_t b = 0; b < first; ++b) begin += problem.spec.q_len_of(b);
    for (size_t b = first; b < first + count; ++b) indptr.push_back(indptr.back() + problem.spec.q_len_of(b));
    for (TensorView* view : {&params.q, &params.o, &params.lse}) {
      view->data =
          static_cast<std::byte*>(view->data) + static_cast<size_t>(begin * view->stride[0]) * size_of(view->dtype);
      view->shape[0] = indptr.back();
    }
    params.qo_indptr = contiguous(indptr.data(), DType::kI32, {static_cast<int64_t>(count) + 1});
    TensorView& table = params.pages.block_table;
    table.data = static_cast<int32_t*>(table.data) + static_cast<int64_t>(first) * table.stride[0];
    table.shape[0] = static_cast<int64_t>(count);
    params.pages.kv_len.data = static_cast<int32_t*>(params.pages.kv_len.data) + first;
    params.pages.kv_len.shape[0] = static_cast<int64_t>(count);
  }
  std::vector<int32_t> indptr = {0};
  DecodeParams params;
};

/// Returns query tokens first ... first + count - 1 of a sparse problem as a call of their own.
inline DecodeSparseParams slice(const DecodeSparseParams& whole, int64_t first, int64_t count) {
  DecodeSparseParams part = whole;
  for (TensorView* view :
       {&part.q, &part.o, &part.lse, &part.pool.indices, &part.pool.topk_length, &part.extra_pool.indices,
        &part.extra_pool.topk_length, &part.finish.positions, &part.finish.gate, &part.finish.scale}) {
    view->data =
        static_cast<std::byte*>(view->data) + static_cast<size_t>(first * view->stride[0]) * size_of(view->dtype);
    view->shape[0] = count;
  }
  return part;
}

}  // namespace mla
