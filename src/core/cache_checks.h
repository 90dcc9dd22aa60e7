// SPDX-License-Identifier: Apache-2.0
// Declares the checks that the operations on a paged latent cache share: those of its tensors and scales, and of rows
// that are given as one tensor or as two.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/args.h"
#include "core/checks.h"
#include "mla/params.h"

namespace mla::core {

/// Holds the widths of a latent row. They are bound by the tensors that determine them.
struct RowWidths {
  int64_t ckv = kUnbound;    // kv_lora_rank
  int64_t kpe = kUnbound;    // qk_rope_head_dim
  int64_t total = kUnbound;  // their sum
  bool divided = true;       // false if `finish` found nothing that says where kpe begins

  /// Binds the widths that a format fixes; fails for a value that is no format.
  bool begin(Checks& check, std::string_view part, CacheFormat format);
  /// Derives the third width from the other two where possible. Fails, naming `field`, if the three disagree.
  bool settle(Checks& check, std::string_view field);
  /// Is called once all tensors have been checked. Rows that nothing divides count as ckv. Checks that the widths are
  /// usable.
  bool finish(Checks& check);
};

/// Returns the width of a value: the latent channels, or in some formats the whole row.
inline Dim value_dim(CacheFormat format, RowWidths& widths) {
  if (kv_layout(format).value_has_rope) return {"d_v", &widths.total};
  return {"kv_lora_rank", &widths.ckv};
}

/// Holds rows that may be given as one tensor (`whole`) or as two (`ckv` and `kpe`).
struct RowForms {
  std::string_view whole_name, ckv_name, kpe_name;
  const TensorView& whole;
  const TensorView& ckv;
  const TensorView& kpe;

  /// Returns a tensor that is given in either form.
  const TensorView& first() const { return whole.given() ? whole : ckv; }
};

/// Checks the form that is given. Its element types are `dtypes` (the same type in both tensors) and its dimensions
/// [outer..., width].
bool check_rows(Checks& check, const RowForms& rows, DTypes dtypes, std::initializer_list<Dim> outer, Role role,
                RowWidths& widths);

/// Holds the addresses of the parts of checked rows, with the strides of their outer dimensions.
struct RowPointers {
  void* ckv = nullptr;
  const int64_t* ckv_stride = nullptr;
  void* kpe = nullptr;  // null if kpe has a width of 0
  const int64_t* kpe_stride = nullptr;
};
RowPointers point_to_rows(const RowForms& rows, const RowWidths& widths);

struct CacheShape {
  int64_t num_pages = kUnbound;
  int64_t page_size = kUnbound;

  int64_t num_slots() const { return num_pages * page_size; }
};

/// Checks the cache that is `part` of the parameters: its format, its shape and the layout of its rows. Binds `shape`.
bool check_cache(Checks& check, std::string_view part, const KvCache& cache, Role role, RowWidths& widths,
                 CacheShape& shape);
/// Is called once the widths are finished. Checks the cache's scales, and sets `result` to the cache as backends see
/// it.
bool finish_cache(Checks& check, std::string_view part, const KvCache& cache, Role role, const RowWidths& widths,
                  const CacheShape& shape, Cache& result);

/// Checks pages of bytes, at least `needed` bytes each. Binds `num_pages`.
bool check_byte_pages(Checks& check, const TensorView& kv, int64_t needed, int64_t page_size, Role role,
                      int64_t& num_pages);

/// Checks the indexer's cache that is `part` of the parameters.
bool check_indexer_cache(Checks& check, std::string_view part, const IndexerCache& cache, Role role,
                         IndexerPages& pages);
/// Checks that keys of the format can have such scales.
bool check_indexer_scales(Checks& check, const IndexerPages& pages, bool power_of_two_scales);

/// Checks the number of tokens of a page.
bool check_page_size(Checks& check, int64_t page_size);

}  // namespace mla::core
