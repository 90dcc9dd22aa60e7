// SPDX-License-Identifier: Apache-2.0
// Checks shared by the operations on a paged latent cache: its tensors, its page table, rows given whole or in two.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/args.h"
#include "core/checks.h"
#include "mla/params.h"

namespace mla::core {

/// Widths of a latent row, bound by whichever tensors say them.
struct RowWidths {
  int64_t ckv = kUnbound;    // kv_lora_rank
  int64_t kpe = kUnbound;    // qk_rope_head_dim
  int64_t total = kUnbound;  // their sum

  /// Derives what can be derived; fails, naming `field`, if the three disagree.
  bool settle(Checks& check, std::string_view field);
  /// Once every tensor has spoken: undivided rows count as ckv. Checks that the widths are usable.
  bool finish(Checks& check);
};

/// A row tensor that may be given whole (`whole`) or as `ckv` and `kpe`.
struct RowForms {
  std::string_view whole_name, ckv_name, kpe_name;
  const TensorView& whole;
  const TensorView& ckv;
  const TensorView& kpe;

  /// The tensor that is surely there.
  const TensorView& first() const { return whole.given() ? whole : ckv; }
};

/// Checks the form given, of element types `dtypes` (the same in both parts) and dimensions [outer..., width].
bool check_rows(Checks& check, const RowForms& rows, DTypes dtypes, std::initializer_list<Dim> outer, Role role,
                RowWidths& widths);

/// Where the parts of checked rows start, with the strides of their outer dimensions.
struct RowPointers {
  void* ckv = nullptr;
  const int64_t* ckv_stride = nullptr;
  void* kpe = nullptr;  // null if kpe has no width
  const int64_t* kpe_stride = nullptr;
};
RowPointers point_to_rows(const RowForms& rows, const RowWidths& widths);

RowForms cache_rows(const KvCache& cache);

/// Format, shapes and layout of a cache; binds `num_pages` and `page_size`.
bool check_cache(Checks& check, const KvCache& cache, Role role, RowWidths& widths, int64_t& num_pages,
                 int64_t& page_size);
Cache make_cache(const KvCache& cache, const RowWidths& widths, int64_t num_pages, int64_t page_size);

/// Shapes and lengths of a page table; binds `batch_size`. Page numbers are not looked at.
bool check_page_table(Checks& check, const PageTable& table, int64_t page_size, int64_t& batch_size, Pages& pages);

/// The page numbers that hold tokens 0 .. kv_len of every request.
bool check_used_pages(Checks& check, const Pages& pages, int64_t num_pages);

}  // namespace mla::core
