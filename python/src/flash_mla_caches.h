// SPDX-License-Identifier: Apache-2.0
// Turns FlashMLA's caches, [num_blocks, page_block_size, num_heads_k, width], into those of the library.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "arguments.h"

namespace mla::python::flash_mla {

/// Raises "<operation>: <field>: <text>".
[[noreturn]] void refuse(const Arguments& args, const char* exception, const char* field, const std::string& text);

/// Raises ValueError unless a tensor has as many dimensions as `dims` names: "batch_size, seq_len_q, topk". Raises
/// TypeError if it is not given.
void expect_dims(const Arguments& args, const char* field, const TensorView& view, std::string_view dims);

/// Returns a shape as Python writes it: "(2,)", "(2, 6, 576)".
std::string shape_text(const TensorView& view);

/// Returns the part of a tensor that has this index in dimension `dim`, without that dimension.
TensorView select(const TensorView& view, int dim, int64_t index);

/// Returns `count` entries of dimension `dim`, from `first` on.
TensorView narrow(const TensorView& view, int dim, int64_t first, int64_t count);

/// Holds a cache as the caller gave it: one-byte elements as bytes, and what they were.
struct GivenCache {
  const char* name;
  TensorView view = {};
  DLDataType type = {};
};

/// Reads a tensor [num_blocks, page_block_size, num_heads_k, width], or None.
void read_cache(Arguments& args, GivenCache& given);

/// Says how the bytes of a call's caches are to be read.
struct CacheForm {
  int64_t d_qk;
  bool is_fp8;                           ///< whether rows are quantized
  TensorView descale = {};               ///< [1] f32, of rows of d_qk e4m3 values
  std::optional<std::string> kv_format;  ///< the layout of packed rows; nothing: as their width says
};

/// Returns one KV head of a cache.
KvCache cache_of(const Arguments& args, const GivenCache& given, const CacheForm& form, int64_t kv_head);

}  // namespace mla::python::flash_mla
