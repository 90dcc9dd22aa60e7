// SPDX-License-Identifier: Apache-2.0
// Checks shared by the operations on a paged latent cache: its tensors and scales, and rows given whole or in two.
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
  bool divided = true;       // false once `finish` found nothing that says where kpe begins

  /// Binds the widths that a format fixes; fails for a value that is no format.
  bool begin(Checks& check, std::string_view part, CacheFormat format);
  /// Derives what can be derived; fails, naming `field`, if the three disagree.
  bool settle(Checks& check, std::string_view field);
  /// Once every tensor has spoken: undivided rows count as ckv. Checks that the widths are usable.
  bool finish(Checks& check);
};

/// Width of a value: the latent channels, or in some formats the whole row.
inline Dim value_dim(CacheFormat format, RowWidths& widths) {
  if (kv_layout(format).value_has_rope) return {"d_v", &widths.total};
  return {"kv_lora_rank", &widths.ckv};
}

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

struct CacheShape {
  int64_t num_pages = kUnbound;
  int64_t page_size = kUnbound;

  int64_t num_slots() const { return num_pages * page_size; }
};

/// The cache `part` of the parameters: format, shape and layout of its rows; binds `shape`.
bool check_cache(Checks& check, std::string_view part, const KvCache& cache, Role role, RowWidths& widths,
                 CacheShape& shape);
/// The rest, once the widths are finished: its scales. Then the cache as backends see it.
bool finish_cache(Checks& check, std::string_view part, const KvCache& cache, Role role, const RowWidths& widths,
                  const CacheShape& shape, Cache& result);

/// Pages of bytes, of `needed` each at least; binds `num_pages`.
bool check_byte_pages(Checks& check, const TensorView& kv, int64_t needed, int64_t page_size, Role role,
                      int64_t& num_pages);

/// Tokens of a page.
bool check_page_size(Checks& check, int64_t page_size);

}  // namespace mla::core
