// SPDX-License-Identifier: Apache-2.0
// Option values: integers with a k suffix, lists, ranges, and the library's names. Every error is a UsageError that
// names the option, what it takes and what it got.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "mla/kv_layout.h"
#include "mla/model.h"
#include "mla/types.h"

namespace mla::cli {

/// "4096", "4k" (x 1024), "1m" (x 1024^2). Between `min` and `max`.
int64_t parse_int(std::string_view option, std::string_view text, int64_t min, int64_t max = INT64_MAX);

/// A number above 0 and at most `max`; `unit` says of what: "--min-time: expected seconds above 0, got 0".
double parse_positive(std::string_view option, std::string_view unit, std::string_view text, double max = 1e6);

/// The model of a preset, of a config.json, or of a folder that holds one.
ModelConfig parse_model(std::string_view option, const std::string& text);

/// Whether the operation works on a cache of a format (prefill_sparse: on rows of bf16 or f16); the others' tensors
/// have an element type alone.
bool has_cache(Op op);
/// Whether the operation works on pages: those with a cache, the indexer's, and the index tools.
bool has_pages(Op op);
/// Attention over paged or gathered latent rows, as d_qk/d_v such as 576/512.
bool is_attention(Op op);
/// Whether the operation has query heads.
bool has_heads(Op op);
/// "decode, prefill, ..."
std::string op_names();

/// A list of integers and ranges, separated by commas: "16,128", "1k:8k:*2" (doubling), "1:9:+2" or "1:9:2", "1:4"
/// (steps of one). Ends are inclusive.
std::vector<int64_t> parse_int_list(std::string_view option, std::string_view text, int64_t min,
                                    int64_t max = INT64_MAX);

/// The items of a list separated by commas; empty items are errors.
std::vector<std::string> split_list(std::string_view option, std::string_view text);

Op parse_op(std::string_view option, std::string_view text);
CacheFormat parse_cache(std::string_view option, std::string_view text);
/// A floating-point element type: bf16, f16 or f32, and e4m3 where queries may be quantized.
DType parse_float_dtype(std::string_view option, std::string_view text, bool allow_e4m3 = false);
/// "cpu", "cuda:1" ("cuda" is "cuda:0") or "emulated:sm90", as ContextOptions and kit::on_device take it; with
/// `any_gpu` also "sm90", a GPU that need not be there.
std::string parse_device(std::string_view option, std::string_view text, bool any_gpu = false);

/// "auto" and the empty text pass; otherwise a row of some operation's table or a family of rows ("cpu").
void check_backend_name(std::string_view option, const std::string& name);

}  // namespace mla::cli
