// SPDX-License-Identifier: Apache-2.0
// Declares the checks that operations on a batch of requests share: those of extents, queries, page tables, scales and
// options.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/args.h"
#include "core/cache_checks.h"
#include "core/checks.h"
#include "mla/params.h"

namespace mla::core {

/// Holds the extents of the queries and of their statistics (lse, max_logits).
struct BatchShape {
  int64_t num_tokens = kUnbound;  // T
  int64_t num_heads = kUnbound;   // H
};

/// Checks that the extents fit int32, since CSR pointers and the backends' arguments hold no more.
bool check_batch(Checks& check, const BatchShape& batch);
/// Check that the product fits int32 too, since backends count the rows of a batch, and the sequences of a prefill, in
/// int32.
bool check_rows_of_batch(Checks& check, std::string_view field, int64_t count, int64_t num_heads);
bool check_batch_and_rows(Checks& check, const BatchShape& batch);

/// Checks `qo_indptr`, or, if it is not given, that each request has T / B queries.
bool check_queries(Checks& check, const TensorView& qo_indptr, int64_t batch_size, int64_t num_tokens,
                   QueryRanges& queries);

/// Checks an optional [T, H] f32 output of statistics.
bool check_statistics(Checks& check, std::string_view field, const TensorView& view, BatchShape& batch);

/// Checks the scale [1], which must be given if and only if `of` has e4m3 elements.
bool check_scale_of(Checks& check, std::string_view field, const TensorView& scale, std::string_view of, DType dtype);

/// Returns the element types that an output may have, given the type of its queries; `e4m3` says whether e4m3 is one of
/// them.
DTypes output_types(DType queries, bool e4m3);

/// Checks the options. Only `keyed` operations know the positions of keys, which some options need.
bool check_options(Checks& check, const AttentionOptions& options, int64_t num_heads, bool keyed, Options& result);

/// Checks that the arithmetic is one of those that there are.
bool check_compute(Checks& check, Compute compute);
/// Checks what the options say of the arithmetic. `cache` is that of the keys; `extra` is that of the second pool, null
/// if there is none.
bool check_compute(Checks& check, const AttentionOptions& options, const Cache& cache, const Cache* extra,
                   Options& result);
/// Does the same where keys are in no cache, but in a tensor of `keys` elements.
bool check_compute(Checks& check, const AttentionOptions& options, DType keys, Options& result);

/// Checks an output `view`, named `field`, of [T, H, d_v] or [T, G, H / G, d_v], and what becomes of outputs before
/// they are stored there.
bool check_finish(Checks& check, const OutputFinish& params, std::string_view field, const TensorView& view,
                  DTypes dtypes, BatchShape& batch, Dim d_v, Finish& args);

/// Checks what append_rope is given for `num_tokens` tokens, which may be unbound.
bool check_append_rope(Checks& check, const AppendRopeParams& params, int64_t num_tokens, AppendRopeArgs& args);

bool check_context_parallel(Checks& check, const ContextParallel& share);

/// Says which rows of a request its pages hold: one for each token of a rank, or for each whole group of tokens.
struct PagedRows {
  ContextParallel share = {};
  int32_t ratio = 1;  // tokens of a group

  constexpr int64_t count(int64_t kv_len) const { return local_length(share, kv_len) / ratio; }
};

/// Checks the shapes and lengths of a page table, and binds `batch_size`. It does not look at page numbers.
bool check_page_table(Checks& check, const PageTable& table, int64_t page_size, const PagedRows& rows,
                      int64_t& batch_size, Pages& pages);

/// Checks the page numbers that hold the rows of every request.
bool check_used_pages(Checks& check, const Pages& pages, const PagedRows& rows, int64_t num_pages);

}  // namespace mla::core
