// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/shapes.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string_view>

#include "core/format.h"
#include "cuda/attention/block_rows.h"

namespace mla::cuda {
namespace {

using core::Reason;

}  // namespace

bool is_absorbed(Op op) { return op == Op::kDecode || op == Op::kDecodeSparse || op == Op::kPrefillSparse; }

DType key_dtype(CacheFormat format) { return value_dtype(kv_layout(format).nope.element); }

namespace {

/// Returns whether one kernel can compute keys of both formats: it is compiled for bf16, for f16, or for quantized
/// rows.
bool share_a_kernel(CacheFormat a, CacheFormat b) {
  const DType first = kv_layout(a).nope.element, second = kv_layout(b).nope.element;
  return first == second || (is_quantized(first) && is_quantized(second));
}

}  // namespace

bool is_one_of(const Problem& problem, std::span<const Widths> all) {
  return std::any_of(all.begin(), all.end(),
                     [&](const Widths& widths) { return problem.d_qk == widths.d_qk && problem.d_v == widths.d_v; });
}

Reason widths_refusal(const Problem& problem, std::span<const Widths> all) {
  if (is_one_of(problem, all)) return {};
  std::array<char, 80> text = {};  // a verdict allocates nothing
  size_t size = 0;
  for (const Widths& widths : all) {
    const char* const comma = size == 0 ? "" : ", ";
    size += core::format_args_to(std::span(text).subspan(size), "{}{}/{}",
                                 fmt::make_format_args(comma, widths.d_qk, widths.d_v));
  }
  return Reason::format("takes d_qk/d_v of {}, not {}/{}", std::string_view(text.data(), size), problem.d_qk,
                        problem.d_v);
}

Reason operand_refusal(const Problem& problem) {
  const bool float16 = problem.q_dtype == DType::kBF16 || problem.q_dtype == DType::kF16;
  const bool takes_e4m3 = problem.op == Op::kDecode || problem.op == Op::kDecodeSparse || problem.op == Op::kPrefill ||
                          is_indexer(problem.op);
  if (!float16 && problem.q_dtype != DType::kF32 && !(takes_e4m3 && problem.q_dtype == DType::kE4M3))
    return Reason::format("takes bf16, f16{} f32{}, not {}", takes_e4m3 ? "," : " and", takes_e4m3 ? " and e4m3" : "",
                          name(problem.q_dtype));
  if (problem.extra_cache && !share_a_kernel(problem.cache, *problem.extra_cache))
    return Reason::format("takes two pools of bf16, two of f16 or two of quantized rows, not {} and {}",
                          name(problem.cache), name(*problem.extra_cache));
  return core::width_refusal(problem);
}

Reason shape_refusal(const Problem& problem, std::span<const Widths> absorbed) {
  if (core::demands_compute(problem))
    return Reason::format("multiplies 16-bit numbers, not those of compute {}", name(problem.compute));
  if (const Reason reason = operand_refusal(problem); !reason.empty()) return reason;
  if (is_absorbed(problem.op)) return widths_refusal(problem, absorbed);
  if (is_indexer(problem.op) && problem.logits_dtype != DType::kF32 && problem.num_heads > kMostHeadsOfShortLogits)
    return Reason::format("takes at most {} heads where logits are {}, not {}", kMostHeadsOfShortLogits,
                          name(problem.logits_dtype), problem.num_heads);
  return {};
}

int64_t usual_query_rows(const Problem& problem) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const int64_t q_len = problem.op == Op::kDecode ? std::max<int64_t>(problem.q_len, 1) : 1;
  return q_len > kMost / problem.num_heads ? kMost : q_len * problem.num_heads;
}

Reason query_type_refusal(const Problem& problem) {
  const DType keys = key_dtype(problem.cache);
  if (problem.q_dtype == keys || problem.q_dtype == DType::kE4M3) return {};
  return Reason::format("takes {}{} queries with {} keys, not {}", name(keys),
                        problem.op == Op::kPrefillSparse ? "" : " and e4m3", name(problem.cache),
                        name(problem.q_dtype));
}

Numerics tensor_core_numerics(const Problem& problem) {
  constexpr int32_t kProducts = 16;  // the K of mma.sync and of wgmma on 16-bit numbers
  bool f16 =
      key_dtype(problem.cache) == DType::kF16 && key_dtype(problem.extra_cache.value_or(problem.cache)) == DType::kF16;
  if (problem.op == Op::kPrefill) f16 = problem.q_dtype == DType::kF16;
  // The indexer multiplies in f16 where that is exact: its keys of e4m3 and e4m3 queries fit f16 without rounding.
  if (is_indexer(problem.op))
    f16 = (problem.q_dtype == DType::kF16 || problem.q_dtype == DType::kE4M3) &&
          indexer_layout(problem.indexer_format).codec.element == DType::kE4M3;
  Numerics numerics{.multiplied = f16 ? Arithmetic::kF16 : Arithmetic::kBF16,
                    .summed = Arithmetic::kF32,
                    .products_per_cut = kProducts};
  // An f32 query is split into two terms of 8 or 11 bits each. (The indexer splits it into three, which is exact.)
  if (is_absorbed(problem.op) && problem.q_dtype == DType::kF32) numerics.query_bits = f16 ? 22 : 16;
  return numerics;
}

}  // namespace mla::cuda
