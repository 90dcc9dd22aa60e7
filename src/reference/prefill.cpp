// SPDX-License-Identifier: Apache-2.0
// This file computes up-projected prefill, where every head has its own keys and values and the requests are
// contiguous.
#include <algorithm>

#include "reference/attention.h"
#include "reference/reference.h"

namespace mla::reference {
namespace {

/// Gives the keys of one request and head.
struct PrefillKeys {
  const core::PrefillArgs& args;
  int32_t request;
  int64_t head;

  int64_t begin() const { return args.kv_indptr[request]; }
  int64_t count() const { return args.kv_indptr[request + 1] - begin(); }
  static int64_t position(int64_t j) { return j; }
  bool sees(const QueryRow& row, int64_t j) const { return is_visible(args.options, args.causal, row.position, j); }

  void load(int64_t j, RowBlock& block) const {
    load_row(args.k, args.dtype, (begin() + j) * args.k_stride_token + head * args.k_stride_head, args.d_qk,
             block.key_of(j));
    double* value = block.value_of(j);
    if (block.keys.given()) {
      value = block.keys.elements_of(j);
      *block.keys.scales_of(j) = 1;  // v_scale is a factor of the outputs
    }
    load_row(args.v, args.dtype, (begin() + j) * args.v_stride_token + head * args.v_stride_head, args.d_v, value);
  }

  int64_t run_end(int64_t j) const { return end_of_run(args.options.p_run, j, 0, count()); }
  ValueScales scales_of(int64_t) const { return {.num_scales = 1, .channels_per_scale = args.d_v}; }
};

}  // namespace

size_t workspace_size(const core::PrefillArgs& args) { return block_bytes(args); }

void prefill(const core::PrefillArgs& args, std::span<std::byte> workspace) {
  RowBlock block = make_block(args, workspace);
  for (int32_t request = 0; request < args.batch_size; ++request) {
    const int64_t q_begin = args.qo_indptr[request], q_len = args.qo_indptr[request + 1] - q_begin;
    for (int64_t head = 0; head < args.num_heads; ++head) {
      const PrefillKeys keys{args, request, head};
      attend_rows(
          block, args, keys, q_len,
          [&](int64_t i) -> QueryRow {
            return {.token = q_begin + i, .head = head, .index = i, .position = keys.count() - q_len + i};
          },
          [&](const QueryRow& row, double* q) {
            load_row(args.q, args.dtype, row.token * args.q_stride_token + row.head * args.q_stride_head, args.d_qk, q);
          });
    }
  }
}

}  // namespace mla::reference
