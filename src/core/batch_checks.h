// SPDX-License-Identifier: Apache-2.0
// Checks of what operations on a batch of requests share: its extents, queries, page tables, scales and options.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/args.h"
#include "core/cache_checks.h"
#include "core/checks.h"
#include "mla/params.h"

namespace mla::core {

/// Extents of the queries and of their statistics.
struct BatchShape {
  int64_t num_tokens = kUnbound;  // T
  int64_t num_heads = kUnbound;   // H
};

/// As int32: CSR pointers and the backends' arguments hold no more.
bool check_batch(Checks& check, const BatchShape& batch);
/// Also their product: backends count the rows of a batch, and the sequences of a prefill, in int32.
bool check_rows_of_batch(Checks& check, std::string_view field, int64_t count, int64_t num_heads);
bool check_batch_and_rows(Checks& check, const BatchShape& batch);

/// `qo_indptr`, or T / B queries each.
bool check_queries(Checks& check, const TensorView& qo_indptr, int64_t batch_size, int64_t num_tokens,
                   QueryRanges& queries);

/// An optional [T, H] f32 output of statistics.
bool check_statistics(Checks& check, std::string_view field, const TensorView& view, BatchShape& batch);

/// The scale [1] that belongs to e4m3 elements of `of`, or none.
bool check_scale_of(Checks& check, std::string_view field, const TensorView& scale, std::string_view of, DType dtype);

/// The element types of an output in the dtype of its queries, or a wider or narrower one.
DTypes output_types(DType queries, bool e4m3);

/// What follows from a query's form: `keyed` operations know the positions of the keys.
bool check_options(Checks& check, const AttentionOptions& options, int64_t num_heads, bool keyed, Options& result);

bool check_context_parallel(Checks& check, const ContextParallel& share);

/// Shapes and lengths of a page table; binds `batch_size`. Page numbers are not looked at. The table holds what the
/// rank does.
bool check_page_table(Checks& check, const PageTable& table, int64_t page_size, const ContextParallel& share,
                      int64_t& batch_size, Pages& pages);

/// The page numbers that hold the rank's tokens of every request.
bool check_used_pages(Checks& check, const Pages& pages, const ContextParallel& share, int64_t num_pages);

}  // namespace mla::core
