// SPDX-License-Identifier: Apache-2.0
// Up-projected prefill: every head has its own keys and values, requests lie one after another.
#include "reference/attention.h"
#include "reference/reference.h"
#include "reference/scalar.h"

namespace mla::reference {
namespace {

void prefill_head(const core::PrefillArgs& args, int32_t request, int64_t head, RowBlock& block) {
  const int64_t q_begin = args.qo_indptr[request], q_len = args.qo_indptr[request + 1] - q_begin;
  const int64_t kv_begin = args.kv_indptr[request], kv_len = args.kv_indptr[request + 1] - kv_begin;

  for (int64_t first = 0; first < q_len; first += kRowsPerBlock) {
    block.rows = std::min(kRowsPerBlock, q_len - first);
    for (int64_t r = 0; r < block.rows; ++r) {
      load_row(args.q, args.dtype, (q_begin + first + r) * args.q_stride_token + head * args.q_stride_head, args.d_qk,
               block.q_row(r));
      block.visible[static_cast<size_t>(r)] = visible_keys(args.causal, first + r, q_len, kv_len);
    }

    attend(
        block,
        [&](int64_t j, double* key) {
          load_row(args.k, args.dtype, (kv_begin + j) * args.k_stride_token + head * args.k_stride_head, args.d_qk,
                   key);
        },
        [&](int64_t j, double* value) {
          load_row(args.v, args.dtype, (kv_begin + j) * args.v_stride_token + head * args.v_stride_head, args.d_v,
                   value);
        });

    for (int64_t r = 0; r < block.rows; ++r) {
      const int64_t token = q_begin + first + r;
      store_row(block.o_row(r), args.o_dtype, token * args.o_stride_token + head * args.o_stride_head, args.d_v,
                args.o);
      if (args.lse != nullptr)
        args.lse[token * args.lse_stride_token + head * args.lse_stride_head] =
            static_cast<float>(block.lse[static_cast<size_t>(r)]);
    }
  }
}

}  // namespace

size_t workspace_size(const core::PrefillArgs& args) { return block_bytes(args.d_qk, args.d_v); }

void prefill(const core::PrefillArgs& args, std::span<std::byte> workspace) {
  RowBlock block = make_block(args, workspace);
  for (int32_t request = 0; request < args.batch_size; ++request)
    for (int64_t head = 0; head < args.num_heads; ++head) prefill_head(args, request, head, block);
}

}  // namespace mla::reference
