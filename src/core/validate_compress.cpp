// SPDX-License-Identifier: Apache-2.0
// Validates the parameters of compress.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "core/batch_checks.h"
#include "core/list_checks.h"
#include "core/validate.h"
#include "mla/fields.h"

namespace mla::core {
namespace {

constexpr int64_t kMaxRatio = 1 << 16;

/// Holds the extents that the tensors of compress share.
struct Extents {
  int64_t num_tokens = kUnbound;  // T
  int64_t width = kUnbound;       // W
  int64_t d_latent = kUnbound;    // D
  int64_t batch_size = kUnbound;  // B
};

/// Checks what comes in: new tokens and the lengths of their requests.
bool check_tokens(Checks& check, const CompressParams& params, Extents& at, CompressArgs& args) {
  int64_t ratio = params.ratio;
  if (!check.at_least("ratio", ratio, 1) || !check.at_most("ratio", ratio, kMaxRatio) ||
      !check.require(ratio > 1 || !params.overlap, "overlap", "expected false, since `ratio` is 1, got true") ||
      !check.tensor("kv", params.kv, kFloats, {{"T", &at.num_tokens}, {"W", &at.width}}) ||
      !check.fits_int32("num_tokens", at.num_tokens) || !check.at_least("W", at.width, 1) ||
      !check.at_most("W", at.width, INT32_MAX / 2))
    return false;
  if (params.overlap && at.width % 2 != 0)
    return check.fail("kv", "expected an even number of channels, since `overlap` is set, got {}", at.width);
  at.d_latent = params.overlap ? at.width / 2 : at.width;
  if (ratio == 1) {
    if (!check.absent("score", params.score, "`ratio` is 1") ||
        !check.absent("position_bias", params.position_bias, "`ratio` is 1"))
      return false;
  } else {
    if (!check.tensor("score", params.score, set_of({params.kv.dtype}), {{"T", &at.num_tokens}, {"W", &at.width}}) ||
        (params.position_bias.given() &&
         !check.tensor("position_bias", params.position_bias, kF32Only, {{"ratio", &ratio}, {"W", &at.width}})))
      return false;
  }
  return check.lengths("kv_len", params.kv_len, {"B", &at.batch_size}) &&
         check.fits_int32("batch_size", at.batch_size) &&
         check_queries(check, params.qo_indptr, at.batch_size, at.num_tokens, args.queries);
}

/// Checks what is kept between calls.
bool check_state(Checks& check, const CompressParams& params, const Extents& at, CompressArgs& args) {
  if (params.ratio == 1)
    return check.absent("state", params.state, "`ratio` is 1") &&
           check.absent("state_table", params.state_table, "`ratio` is 1");
  int64_t num_blocks = kUnbound, block_size = kUnbound, columns = kUnbound, batch_size = at.batch_size;
  int64_t kept = 2 * at.width;
  if (!check.tensor("state", params.state, kF32Only,
                    {{"num_blocks", &num_blocks}, {"block_size", &block_size}, {"2 W", &kept}}, Role::kOutput) ||
      !check.at_least("block_size", block_size, 1) || !check.at_most("block_size", block_size, kMaxKvLen) ||
      !check.tensor("state_table", params.state_table, kI32Only, {{"B", &batch_size}, {"C", &columns}}) ||
      !check.fits_int32("C", columns))
    return false;
  const int64_t needed = int64_t{params.ratio} * (params.overlap ? 2 : 1) - 1;
  if (columns * block_size < needed)
    return check.fail("state_table", "expected room for at least {} tokens of a request, got {} blocks of {}", needed,
                      columns, block_size);
  args.state = static_cast<float*>(params.state.data);
  args.state_stride_block = params.state.stride[0];
  args.state_stride_row = params.state.stride[1];
  args.num_blocks = num_blocks;
  args.block_size = static_cast<int32_t>(block_size);
  args.state_table = static_cast<const int32_t*>(params.state_table.data);
  args.state_table_stride_request = params.state_table.stride[0];
  args.num_columns = static_cast<int32_t>(columns);
  return true;
}

/// Checks that the angles are those of the channels that the target turns.
bool check_angles(Checks& check, const CompressParams& params, const Extents& at, CompressArgs& args) {
  int64_t max_positions = kUnbound, rotary = kUnbound;
  if (!params.cos_sin.given()) return true;
  if (!check.tensor("cos_sin", params.cos_sin, kF32Only,
                    {{"max_positions", &max_positions}, {"rotary channels", &rotary}}) ||
      !check.require(rotary >= 2 && rotary % 2 == 0 && rotary <= at.d_latent, "cos_sin",
                     "expected an even number of rotary channels from 2 to {}, got {}", at.d_latent, rotary))
    return false;
  args.cos_sin = static_cast<const float*>(params.cos_sin.data);
  args.cos_sin_stride_position = params.cos_sin.stride[0];
  args.max_positions = max_positions;
  args.d_rotary = static_cast<int32_t>(rotary);
  args.interleaved = params.interleaved;
  return true;
}

bool check_target_cache(Checks& check, const CompressParams& params, const Extents& at, CompressArgs& args) {
  RowWidths widths = {.total = at.d_latent};
  CacheShape shape;
  if (args.d_rotary > 0 && !kv_layout(params.cache.format).is_packed()) widths.kpe = args.d_rotary;
  if (!check_cache(check, "cache", params.cache, Role::kOutput, widths, shape)) return false;
  if (widths.ckv == kUnbound && widths.kpe != kUnbound) widths.ckv = widths.total - widths.kpe;
  if (!widths.settle(check, "cache") || !widths.finish(check) ||
      !finish_cache(check, "cache", params.cache, Role::kOutput, widths, shape, args.cache))
    return false;
  args.to = CompressArgs::To::kCache;
  return args.d_rotary == 0 || check.require(args.d_rotary == args.cache.d_rotary(), "cos_sin",
                                             "expected {} rotary channels, those of {}, got {}", args.cache.d_rotary(),
                                             name(args.cache.format), args.d_rotary);
}

/// Checks where the latents go.
bool check_targets(Checks& check, const CompressParams& params, Extents& at, CompressArgs& args) {
  if (!check.tensor("latent", params.latent, kFloats, {{"T", &at.num_tokens}, {"D", &at.d_latent}}, Role::kOutput))
    return false;
  const bool cache = params.cache.kv.given() || params.cache.ckv.given() || params.cache.kpe.given();
  if (!params.slot_mapping.given()) {
    if (cache || params.indexer.kv.given())
      return check.fail("slot_mapping", "expected a tensor, since `{}` is given, got none",
                        cache ? "cache" : "indexer");
    return check.absent("cos_sin", params.cos_sin, "neither `cache` nor `indexer` is given");
  }
  if (cache == params.indexer.kv.given())
    return check.fail("slot_mapping", "expected either `cache` or `indexer` beside it, got {}",
                      cache ? "both" : "none");
  if (!check.tensor("slot_mapping", params.slot_mapping, kI64Only, {{"T", &at.num_tokens}}) ||
      !check_angles(check, params, at, args))
    return false;
  args.slot_mapping = static_cast<const int64_t*>(params.slot_mapping.data);
  if (cache) return check_target_cache(check, params, at, args);
  args.to = CompressArgs::To::kIndexer;
  args.power_of_two_scales = params.power_of_two_scales;
  return check.require(at.d_latent == kIndexerLayout.head_dim, "indexer", "expected latents of {} channels, got {}",
                       kIndexerLayout.head_dim, at.d_latent) &&
         check_indexer_cache(check, "indexer", params.indexer, Role::kOutput, args.indexer) &&
         check_indexer_scales(check, args.indexer, params.power_of_two_scales);
}

/// Checks the lists: lengths, the blocks that are used, the slots and positions of the groups that end.
bool check_lists(Checks& check, const CompressArgs& args) {
  const int64_t num_slots =
      args.to == CompressArgs::To::kCache ? args.cache.num_slots() : args.indexer.num_pages * args.indexer.page_size;
  for (int32_t b = 0; b < args.batch_size; ++b) {
    const int64_t kv_len = args.kv_len[b], first = args.first_position(b);
    if (kv_len < 0 || kv_len > kMaxKvLen)
      return check.fail("kv_len", "expected 0 to {}, got {} for request {}", kMaxKvLen, kv_len, b);
    if (args.queries.len(b) == 0) continue;
    if (args.state != nullptr) {
      const int32_t* const row = args.state_table + b * args.state_table_stride_request;
      // The first group with new tokens begins there, or with overlap the one before it.
      const int64_t begin = std::max<int64_t>(first, 0) / args.ratio * args.ratio - (args.span() - args.ratio);
      const int64_t oldest = std::max<int64_t>(begin, 0) / args.block_size;
      const int64_t columns =
          std::min<int64_t>((kv_len + args.block_size - 1) / args.block_size - oldest, args.num_columns);
      for (int64_t i = 0; i < columns; ++i)
        if (const int32_t block = row[(oldest + i) % args.num_columns]; block >= args.num_blocks)
          return check.fail("state_table", "expected block numbers below {}, got {} for request {}", args.num_blocks,
                            block, b);
    }
    if (args.to == CompressArgs::To::kLatents) continue;
    for (int64_t i = std::max<int64_t>(-first, 0); i < args.queries.len(b); ++i) {
      const int64_t token = args.queries.begin(b) + i;
      if ((first + i + 1) % args.ratio != 0 || args.slot_mapping[token] < 0) continue;
      if (args.slot_mapping[token] >= num_slots)
        return check.fail("slot_mapping", "expected slots below {}, got {} for token {}", num_slots,
                          args.slot_mapping[token], token);
      if (const int64_t begin = first + i + 1 - args.ratio; args.d_rotary > 0 && begin >= args.max_positions)
        return check.fail("cos_sin", "expected a row for position {}, got {} rows, for request {}", begin,
                          args.max_positions, b);
    }
  }
  return true;
}

/// Returns whether any tensor is given.
template <HasFields Params>
bool is_given(const Params& params) {
  bool given = false;
  for_each_field(params, [&](std::string_view, const auto& field) {
    using Field = std::remove_cvref_t<decltype(field)>;
    if constexpr (std::is_same_v<Field, TensorView>)
      given = given || field.given();
    else if constexpr (HasFields<Field>)
      given = given || is_given(field);
  });
  return given;
}

/// Checks what is appended beside the latents.
bool check_append(Checks& check, const AppendRopeParams& params, int64_t num_tokens, AppendRopeArgs& args) {
  if (!is_given(params)) return true;
  const Checks::Within within(check, "append");
  return check_append_rope(check, params, num_tokens, args);
}

}  // namespace

Status validate(const CompressParams& params, CompressArgs& args, Device& device, Memory memory) {
  Checks check(Op::kCompress, Scope::kAll, memory);
  Extents at;
  args = {};
  if (!check_tokens(check, params, at, args) || !check_state(check, params, at, args) ||
      (params.norm_weight.given() &&
       !check.tensor("norm_weight", params.norm_weight, kFloats, {{"D", &at.d_latent}})) ||
      !check.require(std::isfinite(params.norm_eps) && params.norm_eps >= 0, "norm_eps",
                     "expected a finite number of at least 0, got {}", params.norm_eps) ||
      !check_targets(check, params, at, args) || !check_append(check, params.append, at.num_tokens, args.append))
    return check.take();
  args.batch_size = static_cast<int32_t>(at.batch_size);
  args.num_tokens = at.num_tokens;
  args.d_latent = static_cast<int32_t>(at.d_latent);
  args.ratio = params.ratio;
  args.overlap = params.overlap;
  args.dtype = params.kv.dtype;
  args.kv = params.kv.data;
  args.kv_stride_token = params.kv.stride[0];
  args.score = if_given(params.score).data;
  args.score_stride_token = if_given(params.score).stride[0];
  args.position_bias = static_cast<const float*>(if_given(params.position_bias).data);
  args.position_bias_stride_position = if_given(params.position_bias).stride[0];
  args.kv_len = static_cast<const int32_t*>(params.kv_len.data);
  args.norm_weight = if_given(params.norm_weight).data;
  args.norm_weight_dtype = params.norm_weight.given() ? params.norm_weight.dtype : DType::kF32;
  args.norm_eps = params.norm_eps;
  args.latent = params.latent.data;
  args.latent_dtype = params.latent.dtype;
  args.latent_stride_token = params.latent.stride[0];
  if (check.on_cpu()) check_lists(check, args);
  return check.finish(device);
}

}  // namespace mla::core
