// SPDX-License-Identifier: Apache-2.0
// Problems with all their memory. Buffers are public so that tests can break them.
#pragma once

#include <cstdint>
#include <vector>

#include "kit/buffer.h"
#include "kit/specs.h"
#include "mla/params.h"

namespace mla::kit {

/// A paged cache with its page table.
struct PagedMemory {
  Buffer kv, ckv, kpe;  ///< kv, or ckv and kpe
  Buffer kv_indptr, table, kv_len;
  KvCache cache;
  PageTable pages;
  std::vector<std::vector<int32_t>> pages_of;  ///< page numbers that each request needs
  std::vector<int32_t> unowned;                ///< page numbers that none needs

  int32_t d_ckv = 0;

  /// Row (page, slot) of the latent and of the rotary part, in elements from the start of their buffers.
  int64_t ckv_offset(int64_t page, int64_t slot) const;
  int64_t kpe_offset(int64_t page, int64_t slot) const;
};

/// Outputs start as bytes 0xA5, so that an element that was not written, or a gap that was, shows.
inline constexpr uint8_t kUntouched = 0xA5;

struct DecodeCase {
  explicit DecodeCase(const DecodeSpec& spec);
  /// Views of the buffers below.
  DecodeParams params() const;
  void reset_outputs() const;

  DecodeSpec spec;
  int64_t num_tokens = 0;
  Buffer q, q_nope, q_pe, qo_indptr, o, lse;
  PagedMemory memory;
};

struct PrefillCase {
  explicit PrefillCase(const PrefillSpec& spec);
  PrefillParams params() const;
  void reset_outputs() const;

  PrefillSpec spec;
  int64_t num_tokens = 0, num_keys = 0;
  Buffer q, k, v, qo_indptr, kv_indptr, o, lse;
};

struct MergeCase {
  explicit MergeCase(const MergeSpec& spec);
  MergeStatesParams params() const;
  /// Sets o and lse to the state they have on entry (in place), or to untouched bytes.
  void reset_outputs() const;

  MergeSpec spec;
  Buffer partial_o, partial_lse, o, lse;
};

struct AppendCase {
  explicit AppendCase(const AppendSpec& spec);
  AppendParams params() const;
  void reset_outputs() const;

  AppendSpec spec;
  Buffer rows, ckv_rows, kpe_rows, slot_mapping;
  PagedMemory memory;  ///< the output; without a page table
};

struct GatherCase {
  explicit GatherCase(const GatherSpec& spec);
  GatherParams params() const;
  void reset_outputs() const;

  GatherSpec spec;
  int64_t num_rows = 0;
  PagedMemory memory;
  Buffer token_start, out_indptr, out_kv, out_ckv, out_kpe;
};

}  // namespace mla::kit
