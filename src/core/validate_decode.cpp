// SPDX-License-Identifier: Apache-2.0
// Validates the parameters of decode.
#include <algorithm>
#include <cstdint>
#include <string_view>
#include <utility>

#include "core/batch_checks.h"
#include "core/validate.h"

namespace mla::core {
namespace {

int64_t longest(const QueryRanges& queries, int32_t batch_size) {
  int32_t most = 0;
  for (int32_t b = 0; b < batch_size; ++b) most = std::max(most, queries.len(b));
  return most;
}

/// Checks that the parent of every draft comes before it.
bool check_parents(Checks& check, const DecodeArgs& args) {
  for (int32_t b = 0; b < args.batch_size; ++b) {
    const int64_t begin = args.queries.begin(b);
    for (int32_t i = 0; i < args.queries.len(b); ++i)
      if (const int32_t parent = args.tree_parents[begin + i]; parent < -1 || parent >= i)
        return check.fail("tree_parents", "expected -1 to {} for draft {} of request {}, got {}", i - 1, i, b, parent);
  }
  return true;
}

bool check_tree(Checks& check, const DecodeParams& params, DecodeArgs& args) {
  const bool mask = params.tree_mask.given();
  const std::string_view field = mask ? "tree_mask" : "tree_parents";
  if (!mask && !params.tree_parents.given()) return check.ok();
  if (!check.require(!mask || !params.tree_parents.given(), field,
                     "expected either `tree_mask` or `tree_parents`, got both") ||
      !check.require(params.causal, field, "expected none, since `causal` is not set, got a tensor"))
    return false;
  int64_t num_tokens = args.num_tokens;
  if (!mask) {
    args.tree_parents = static_cast<const int32_t*>(params.tree_parents.data);
    return check.tensor(field, params.tree_parents, kI32Only, {{"T", &num_tokens}}) &&
           (!check.reads_data() || check_parents(check, args));
  }
  int64_t width = kUnbound;
  args.tree_mask = static_cast<const uint8_t*>(params.tree_mask.data);
  args.tree_mask_stride_token = params.tree_mask.stride[0];
  if (!check.tensor(field, params.tree_mask, kU8Only, {{"T", &num_tokens}, {"q_len_max", &width}})) return false;
  if (!check.on_cpu()) return true;
  const int64_t needed = longest(args.queries, args.batch_size);
  return check.require(width >= needed, field, "expected rows of at least {} (the most queries of a request), got {}",
                       needed, width);
}

/// Checks what goes with `shared_prefix`: keys that all queries of a group see, at positions that do not matter, and
/// partial results that merge_states takes.
bool check_shared_prefix(Checks& check, const DecodeParams& params, const DecodeArgs& args) {
  if (!params.shared_prefix) return check.ok();
  const std::pair<bool, std::string_view> against[] = {
      {args.batch_invariant, "batch_invariant"},
      {args.options.attn_sink != nullptr, "attn_sink"},
      {args.options.window_left >= 0, "window_left"},
      {args.options.alibi_slopes != nullptr, "alibi_slopes"},
      {args.options.compute != Compute::kDefault, "compute"},
      {args.context_parallel.world > 1, "context_parallel"},
      {args.o_dtype == DType::kE4M3, "o of e4m3"},
  };
  for (const auto& [given, what] : against)
    if (given) return check.fail("shared_prefix", "expected false with {}, got true", what);
  const TensorView& table = params.pages.block_table;
  if (!table.given()) return true;
  const int64_t entries = args.batch_size * table.stride[0];
  return check.require(table.stride[0] >= table.shape[1] || args.batch_size <= 1, "block_table",
                       "expected rows at least {} apart with shared_prefix, got {}", table.shape[1], table.stride[0]) &&
         check.require(entries <= INT32_MAX, "block_table", "expected at most {} entries with shared_prefix, got {}",
                       INT32_MAX, entries);
}

}  // namespace

Status validate(const DecodeParams& params, Scope scope, DecodeArgs& args, Device& device, Memory memory,
                std::span<const std::byte> workspace) {
  Checks check(Op::kDecode, scope, memory);
  check.workspace(workspace);
  RowWidths widths;
  BatchShape batch;
  CacheShape shape;
  int64_t batch_size = kUnbound;
  const RowForms q{.whole_name = "q",
                   .ckv_name = "q_nope",
                   .kpe_name = "q_pe",
                   .whole = params.q,
                   .ckv = params.q_nope,
                   .kpe = params.q_pe};
  args = {};
  const Dim d_v = value_dim(params.cache.format, widths);
  const bool shapes =
      widths.begin(check, "cache", params.cache.format) &&
      check_rows(check, q, kFloatsAndE4M3, {{"T", &batch.num_tokens}, {"H", &batch.num_heads}}, Role::kInput, widths) &&
      check_batch_and_rows(check, batch) && check_scale_of(check, "q_scale", params.q_scale, "q", q.first().dtype) &&
      check.tensor("o", params.o, output_types(q.first().dtype, true),
                   {{"T", &batch.num_tokens}, {"H", &batch.num_heads}, d_v}, Role::kOutput) &&
      widths.settle(check, "o") && check_scale_of(check, "o_scale", params.o_scale, "o", params.o.dtype) &&
      check_statistics(check, "lse", params.lse, batch) &&
      check_cache(check, "cache", params.cache, Role::kInput, widths, shape) && widths.finish(check) &&
      finish_cache(check, "cache", params.cache, Role::kInput, widths, shape, args.cache) &&
      check.sm_scale(params.sm_scale) && check.lse_base(params.lse_base) &&
      check_options(check, params.options, batch.num_heads, true, args.options) &&
      check_compute(check, params.options, args.cache, nullptr, args.options) &&
      check_context_parallel(check, params.context_parallel);
  if (!shapes ||
      !check_page_table(check, params.pages, shape.page_size, {.share = params.context_parallel}, batch_size,
                        args.pages) ||
      !check_queries(check, params.qo_indptr, batch_size, batch.num_tokens, args.queries))
    return check.take();

  const RowPointers at = point_to_rows(q, widths);
  const TensorView lse = if_given(params.lse);
  args.batch_size = static_cast<int32_t>(batch_size);
  args.num_tokens = batch.num_tokens;
  args.num_heads = static_cast<int32_t>(batch.num_heads);
  args.d_qk = static_cast<int32_t>(widths.total);
  args.d_v = static_cast<int32_t>(*d_v.extent);
  args.q_dtype = q.first().dtype;
  args.q_scale = static_cast<const float*>(if_given(params.q_scale).data);
  args.q_nope = at.ckv;
  args.q_nope_stride_token = at.ckv_stride[0];
  args.q_nope_stride_head = at.ckv_stride[1];
  args.q_pe = at.kpe;
  args.q_pe_stride_token = at.kpe_stride[0];
  args.q_pe_stride_head = at.kpe_stride[1];
  args.causal = params.causal;
  args.context_parallel = params.context_parallel;
  args.batch_invariant = params.batch_invariant;
  args.sm_scale = params.sm_scale;
  args.lse_form = {.base = params.lse_base, .inf_without_keys = params.lse_inf_without_keys};
  args.o_dtype = params.o.dtype;
  args.o_scale = static_cast<const float*>(if_given(params.o_scale).data);
  args.o = params.o.data;
  args.o_stride_token = params.o.stride[0];
  args.o_stride_head = params.o.stride[1];
  args.lse = static_cast<float*>(lse.data);
  args.lse_stride_token = lse.stride[0];
  args.lse_stride_head = lse.stride[1];
  args.shared_prefix = params.shared_prefix;
  if (!check_shared_prefix(check, params, args) || !check_tree(check, params, args)) return check.take();
  if (check.reads_data()) check_used_pages(check, args.pages, {.share = args.context_parallel}, shape.num_pages);
  return check.finish(device);
}

}  // namespace mla::core
