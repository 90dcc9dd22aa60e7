// SPDX-License-Identifier: Apache-2.0
// Parses option values: integers with a k suffix, lists, ranges, and the library's names. Every error is a UsageError
// that names the option, what it takes and what it got.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "mla/kv_layout.h"
#include "mla/model.h"
#include "mla/types.h"

namespace mla::cli {

/// Parses "4096", "4k" (x 1024) or "1m" (x 1024^2); the value must lie between `min` and `max`.
int64_t parse_int(std::string_view option, std::string_view text, int64_t min, int64_t max = INT64_MAX);

/// Parses a number above 0 and at most `max`; `unit` says of what: "--min-time: expected seconds above 0, got 0".
double parse_positive(std::string_view option, std::string_view unit, std::string_view text, double max = 1e6);

/// Returns the model of a preset, of a config.json, or of a folder that holds one.
ModelConfig parse_model(std::string_view option, const std::string& text);

/// Returns whether the operation works on a cache of a format (prefill_sparse: on rows of bf16 or f16); the others'
/// tensors have an element type alone.
bool has_cache(Op op);
/// Returns whether the operation works on pages: those with a cache but prefill_sparse, the indexer's, and the index
/// tools but top_k.
bool has_pages(Op op);
/// Returns whether the operation is attention, which has a d_qk and a d_v such as 576 and 512.
bool is_attention(Op op);
/// Returns whether the operation is attention that may compute products of e4m3 (AttentionOptions::compute).
bool chooses_compute(Op op);
/// Returns whether the operation has query heads.
bool has_heads(Op op);
/// Returns "decode, prefill, ...".
std::string op_names();
/// Returns the names of all cache formats, separated by commas.
std::string cache_names();
/// Does the same of the formats of the indexer's keys.
std::string indexer_names();

/// Parses a list of integers and ranges, separated by commas: "16,128", "1k:8k:*2" (doubling), "1:9:+2" or "1:9:2",
/// "1:4" (steps of one). Ends are inclusive.
std::vector<int64_t> parse_int_list(std::string_view option, std::string_view text, int64_t min,
                                    int64_t max = INT64_MAX);

/// Returns the items of a list separated by commas; empty items are errors.
std::vector<std::string> split_list(std::string_view option, std::string_view text);

Op parse_op(std::string_view option, std::string_view text);
CacheFormat parse_cache(std::string_view option, std::string_view text);
IndexerFormat parse_indexer(std::string_view option, std::string_view text);
Compute parse_compute(std::string_view option, std::string_view text);
/// Parses a floating-point element type: bf16, f16 or f32, and e4m3 where queries may be quantized.
DType parse_float_dtype(std::string_view option, std::string_view text, bool allow_e4m3 = false);
/// Parses "cpu", "cuda:1" ("cuda" is "cuda:0") or "emulated:sm90", as ContextOptions and kit::on_device take it; with
/// `any_gpu` also "sm90", a GPU that need not be there.
std::string parse_device(std::string_view option, std::string_view text, bool any_gpu = false);

/// Throws unless the name is "auto", empty, a row of some operation's table or a family of rows ("cpu").
void check_backend_name(std::string_view option, const std::string& name);

}  // namespace mla::cli
