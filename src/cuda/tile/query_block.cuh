// SPDX-License-Identifier: Apache-2.0
// A block's query rows in a ragged batch are found on the device, since the grid depends on T and B but not on where
// requests begin.
#pragma once

#include <cstdint>

#include "core/args.h"
#include "cuda/ptx/ptx.h"

namespace mla::MLA_CUDA_NAMESPACE {

/// This is the limit of a grid's y dimension. Further heads go to the third dimension.
inline constexpr int kMaxGridY = 65535;

/// Describes neighbouring query rows of one request.
struct QueryBlock {
  int first_token;  // first query token, counted over all requests
  int first_key;    // the request's first key, counted over all requests
  int rows;         // 0 or less if the slot has no rows
  int position;     // position of the first row in its request
  int kv_len;
};

/// Returns how many slots hold the query blocks of any batch of these sizes. Request b begins at slot qo_indptr[b] /
/// rows + b, and so has room for its ceil(q_len / rows) blocks.
constexpr int num_query_blocks(int64_t num_tokens, int batch_size, int rows) {
  return static_cast<int>(num_tokens / rows) + batch_size;
}

/// Returns the query block in a slot. Within a request, slots and rows have the same order.
MLA_DEVICE QueryBlock find_query_block(const core::PrefillArgs& args, int rows, int slot) {
  int low = 0, high = args.batch_size - 1;  // the search is for the last request that begins at or before the slot
  while (low < high) {
    const int middle = low + (high - low + 1) / 2;
    if (args.qo_indptr[middle] / rows + middle <= slot)
      low = middle;
    else
      high = middle - 1;
  }
  const int begin = args.qo_indptr[low], q_len = args.qo_indptr[low + 1] - begin;
  const int kv_len = args.kv_indptr[low + 1] - args.kv_indptr[low];
  const int first = (slot - begin / rows - low) * rows;
  return {.first_token = begin + first,
          .first_key = args.kv_indptr[low],
          .rows = q_len - first < rows ? q_len - first : rows,
          .position = kv_len - q_len + first,
          .kv_len = kv_len};
}

}  // namespace mla::MLA_CUDA_NAMESPACE
