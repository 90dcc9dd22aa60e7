// SPDX-License-Identifier: Apache-2.0
// Absorbed decode: one KV head, key [ckv | kpe], value ckv, rows found through the page table.
#include "reference/attention.h"
#include "reference/reference.h"
#include "reference/scalar.h"

namespace mla::reference {

size_t workspace_size(const core::DecodeArgs& args) { return block_bytes(args.d_qk, args.d_v); }

void decode(const core::DecodeArgs& args, std::span<std::byte> workspace) {
  RowBlock block = make_block(args, workspace);
  const core::Cache& cache = args.cache;
  const DType kv_dtype = cache_dtype(cache.format);

  for (int32_t request = 0; request < args.batch_size; ++request) {
    const int32_t* pages = args.pages.of(request);
    const int64_t kv_len = args.pages.kv_len[request];
    const int64_t q_begin = args.queries.begin(request), q_len = args.queries.len(request);

    const auto load_ckv = [&](int64_t j, int32_t n, double* out) {
      const int64_t page = pages[j / args.pages.page_size], slot = j % args.pages.page_size;
      load_row(cache.ckv, kv_dtype, page * cache.ckv_stride_page + slot * cache.ckv_stride_token, n, out);
    };
    const auto load_kpe = [&](int64_t j, double* out) {
      const int64_t page = pages[j / args.pages.page_size], slot = j % args.pages.page_size;
      load_row(cache.kpe, kv_dtype, page * cache.kpe_stride_page + slot * cache.kpe_stride_token, cache.d_kpe, out);
    };

    // The rows of a request are its queries times the heads.
    const int64_t num_rows = q_len * args.num_heads;
    for (int64_t first = 0; first < num_rows; first += kRowsPerBlock) {
      block.rows = std::min(kRowsPerBlock, num_rows - first);
      for (int64_t r = 0; r < block.rows; ++r) {
        const int64_t query = (first + r) / args.num_heads, head = (first + r) % args.num_heads;
        const int64_t token = q_begin + query;
        double* q = block.q_row(r);
        load_row(args.q_nope, args.q_dtype, token * args.q_nope_stride_token + head * args.q_nope_stride_head,
                 cache.d_ckv, q);
        if (cache.d_kpe > 0)
          load_row(args.q_pe, args.q_dtype, token * args.q_pe_stride_token + head * args.q_pe_stride_head, cache.d_kpe,
                   q + cache.d_ckv);
        block.visible[static_cast<size_t>(r)] = visible_keys(args.causal, query, q_len, kv_len);
      }

      attend(
          block,
          [&](int64_t j, double* key) {
            load_ckv(j, cache.d_ckv, key);
            if (cache.d_kpe > 0) load_kpe(j, key + cache.d_ckv);
          },
          [&](int64_t j, double* value) { load_ckv(j, args.d_v, value); });

      for (int64_t r = 0; r < block.rows; ++r) {
        const int64_t token = q_begin + (first + r) / args.num_heads, head = (first + r) % args.num_heads;
        store_row(block.o_row(r), args.o_dtype, token * args.o_stride_token + head * args.o_stride_head, args.d_v,
                  args.o);
        if (args.lse != nullptr)
          args.lse[token * args.lse_stride_token + head * args.lse_stride_head] =
              static_cast<float>(block.lse[static_cast<size_t>(r)]);
      }
    }
  }
}

}  // namespace mla::reference
