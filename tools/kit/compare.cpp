// SPDX-License-Identifier: Apache-2.0
// Derives tolerances from this error model. u is the unit roundoff: 2^-24 for f32, 2^-11 for f16, 2^-8 for bf16. All
// errors of o are relative to the largest |o| of their row, because one row's elements are sums over the same weights.
//
// 1. Rounding the output: u(o) of the element itself, so at most u(o) of the row's largest.
// 2. A score is a sum of d_qk products in f32, then scaled. A blocked sum is off by a few u(f32) of the sum of
//    magnitudes; for random data that sum is about sqrt(d_qk) * score_std after scaling. Scaling, subtraction of the
//    maximum and exp round numbers of the size of the largest score, about 5 score_std, a few times. A score that is
//    off by e changes its weight, and so lse, by e relatively. exp itself may be a polynomial, good to 2^-21.
// 3. Sums over n keys in f32, in any order: the errors of the additions are independent, so about sqrt(n) u(f32).
//    Repetitions of one key are the exception: equal additions err alike, by a quarter of u(f32) each.
// 4. A row that multiplies bf16 rounds the weights P to it: each is off by at most u(bf16), independently, so o is off
//    by about u(bf16) / sqrt(6) * rms(row) and, over a row of hundreds of channels, by about 0.6 u(bf16) of
//    its largest element. With only two or three keys the errors do not average: then at most u(bf16) * sum p |v|,
//    which is 1.5 u(bf16) of the largest element where opposite values cancel. lse is summed from unrounded weights.
//    The same holds for f16 with its u; there weights below 2^-14 of the largest are subnormal, off by up to 2^-25 of
//    it each; and for e4m3, whose subnormals begin at 2^-6 and are 2^-9 apart.
// 5. A soft cap's tanh is good to a few u(f32) of its bound, so a score to that of the cap. ALiBi adds a bias that is
//    rounded with the score: at most that of the keys near the query or, where a rank's or a window's keys all lie
//    elsewhere, of the nearest one.
// 6. A sink multiplies a row by a function of its lse, so lse's error becomes o's.
// 7. Tensor cores add 16 products at a time to an f32 sum and cut it off, always towards zero: by u(f32) of the partial
//    sum on average, and these errors do not cancel. A score takes d_qk / 16 such steps and is 5 score_std at most, o
//    takes n / 16. Of sums of e4m3 products Hopper keeps 14 bits, 32 products at a time.
// 8. Of f32 queries they multiply query_bits bits (two parts of bf16: 16; of f16: 22), so what is left of a query is at
//    most 2^-16 (2^-22) of it, about a third of that in the mean square, of either sign. Five standard deviations of a
//    score made of that are 2 * 2^-16 (2 * 2^-22) score_std. Queries of 16 bits fit the two parts.
// 9. With compute = fp8 the reference rounds queries and P to e4m3 as the row does. What is left of that are the few P
//    that an error of a score moves over a tie, by up to 2^-3 of such a P: half a row's weight in one of them makes
//    2^-4 of an output, and all of them together as little as P of bf16, which rotary channels of values have. Where
//    tensor cores keep 14 bits of a sum, scores are off by so much that any P may be moved.
// What a row multiplies, cuts off and leaves of a query it says itself (mla/backend.h, Numerics). Quantized keys are
// exact in bf16, and so are e4m3 queries: they are multiplied as bf16 operands.
#include "kit/compare.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "mla/numeric.h"

namespace mla::kit {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::kBF16: return 0x1p-8;
    case DType::kF16: return 0x1p-11;
    case DType::kE4M3: return 0;  // judge_codes knows
    default: return 0x1p-24;
  }
}

bool same_special(double a, double b) {
  if (std::isfinite(a) && std::isfinite(b)) return true;
  return (std::isnan(a) && std::isnan(b)) || a == b;
}

/// Holds the errors of rounding to a type: `unit` is relative, `subnormal` absolute, for numbers of [0, 1] that are too
/// small for the former.
struct Rounding {
  double unit, subnormal;
};

Rounding rounding_of(Arithmetic arithmetic) {
  switch (arithmetic) {
    case Arithmetic::kBF16: return {0x1p-8, 0};
    case Arithmetic::kF16: return {0x1p-11, 0x1p-25};
    case Arithmetic::kE4M3: return {0x1p-4, 0x1p-10};
    default: return {0, 0};  // no less than the sums' type
  }
}

struct AttentionShape {
  double d_qk, max_kv_len;
  double bias = 0;         // largest that matters
  double repetitions = 0;  // of one key
};

Tolerance attention_tolerance(const AttentionSpec& spec, const AttentionShape& shape, const Numerics& numerics) {
  const double u = unit_roundoff(DType::kF32), score_std = static_cast<double>(spec.score_std);
  const double u_of_cut = std::max(u, std::exp2(-numerics.sum_bits));
  const double cuts = numerics.products_per_cut > 0 ? u_of_cut / numerics.products_per_cut : 0;         // of a product
  const double options = u * (4 * static_cast<double>(spec.options.logits_soft_cap) + 4 * shape.bias);  // 5
  const double cut_scores = cuts * shape.d_qk * 5 * score_std;                                          // 7
  const double parts = numerics.query_bits < 24 ? 2 * std::exp2(-numerics.query_bits) * score_std : 0;  // 8
  const double score =
      u * (4 * std::sqrt(shape.d_qk) * score_std + 4 * 5 * score_std) + 0x1p-21 + options + cut_scores + parts;  // 2
  const double sums = u * (4 + 2 * std::sqrt(shape.max_kv_len) + shape.repetitions / 4);                         // 3
  const bool rounded_alike = spec.options.compute == Compute::kFP8;                                              // 9
  const Rounding rounding = rounding_of(rounded_alike ? Arithmetic::kBF16 : numerics.multiplied);
  const double moved = !rounded_alike ? 0 : numerics.sum_bits < 24 ? 0x1p-3 : 0x1p-4;
  const double rounded_weights = 1.5 * rounding.unit + rounding.subnormal * shape.max_kv_len;  // 4
  const double weights = rounded_weights + cuts * shape.max_kv_len;                            // 7
  const double output = unit_roundoff(spec.o_dtype);                                           // 1
  const double lse_magnitude = 5 * score_std + std::log(std::max(shape.max_kv_len, 1.0)) + shape.bias;
  const double lse = score + sums + 2 * u * lse_magnitude;
  const double sink = spec.options.attn_sink ? lse : 0;  // 6
  const double rest = score + sums + sink;
  return {.max_rel = output + weights + rest + moved,
          .cosine_distance = output * output + weights * weights + rest * rest + 1e-13,
          .max_lse = spec.lse_base == LseBase::kTwo ? lse / std::log(2.0) : lse,
          .max_logits = score + 2 * u * 5 * score_std};
}

double longest(const std::vector<int32_t>& lengths) {
  return lengths.empty() ? 0 : static_cast<double>(*std::max_element(lengths.begin(), lengths.end()));
}

void compare_row(Error& error, std::span<const double> row, std::span<const double> reference, double scale,
                 int64_t index) {
  for (size_t c = 0; c < row.size(); ++c) {
    if (!same_special(row[c], reference[c])) {
      if (error.special_equal) error.worst_row = index;
      error.special_equal = false;
    }
    if (!std::isfinite(row[c]) || !std::isfinite(reference[c])) continue;
    const double distance = std::abs(row[c] - reference[c]);
    error.max_abs = std::max(error.max_abs, distance);
    const double relative = distance == 0 ? 0 : scale == 0 ? kInfinity : distance / scale;
    if (relative > error.max_rel) {
      error.max_rel = relative;
      if (error.special_equal) error.worst_row = index;
    }
  }
}

}  // namespace

Error compare(std::span<const double> o, std::span<const double> reference, int64_t d_v, std::span<const double> lse,
              std::span<const double> reference_lse, std::span<const double> row_scale) {
  Error error;
  const auto width = static_cast<size_t>(d_v);
  const size_t rows = width == 0 ? 0 : reference.size() / width;
  if (o.size() != reference.size() || lse.size() != reference_lse.size()) {
    error.special_equal = false;
    error.max_rel = kInfinity;
    return error;
  }
  double dot = 0, square_o = 0, square_reference = 0;
  for (size_t r = 0; r < rows; ++r) {
    const auto row = o.subspan(r * width, width), expected = reference.subspan(r * width, width);
    double scale = row_scale.empty() ? 0 : row_scale[r];
    for (size_t c = 0; c < width; ++c) {
      if (row_scale.empty() && std::isfinite(expected[c])) scale = std::max(scale, std::abs(expected[c]));
      if (!std::isfinite(row[c]) || !std::isfinite(expected[c])) continue;
      dot += row[c] * expected[c];
      square_o += row[c] * row[c];
      square_reference += expected[c] * expected[c];
    }
    compare_row(error, row, expected, scale, static_cast<int64_t>(r));
  }
  if (square_o != square_reference || dot != square_o)
    error.cosine_distance = square_o == 0 || square_reference == 0
                                ? 1
                                : std::max(0.0, 1 - dot / std::sqrt(square_o) / std::sqrt(square_reference));
  for (size_t r = 0; r < lse.size(); ++r) {
    if (!same_special(lse[r], reference_lse[r])) {
      if (error.special_equal) error.worst_row = static_cast<int64_t>(r);
      error.special_equal = false;
    } else if (std::isfinite(lse[r])) {
      error.max_lse = std::max(error.max_lse, std::abs(lse[r] - reference_lse[r]));
    }
  }
  return error;
}

namespace {

/// Maps codes to numbers in the order of their values, both zeros to 0.
int code_order(uint8_t code) {
  const int magnitude = code & 0x7F;
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

}  // namespace

std::string judge_codes(std::span<const uint8_t> codes, std::span<const double> reference, int64_t d_v, double o_scale,
                        double max_rel) {
  const auto width = static_cast<size_t>(d_v);
  for (size_t row = 0; row < codes.size(); row += width) {
    double largest = 0;
    for (size_t c = row; c < row + width; ++c)
      if (std::isfinite(reference[c])) largest = std::max(largest, std::abs(reference[c]));
    for (size_t c = row; c < row + width; ++c) {
      const double off = max_rel * largest + 2 * unit_roundoff(DType::kF32) * std::abs(reference[c]);
      const uint8_t low = f32_to_e4m3(static_cast<float>((reference[c] - off) / o_scale));
      const uint8_t high = f32_to_e4m3(static_cast<float>((reference[c] + off) / o_scale));
      const bool good = std::isnan(reference[c])
                            ? (codes[c] & 0x7F) == 0x7F
                            : code_order(codes[c]) >= code_order(low) && code_order(codes[c]) <= code_order(high);
      if (good) continue;
      std::ostringstream out;
      out << "o has code " << int{codes[c]} << " at channel " << c - row << " of row " << row / width << ", expected "
          << int{low} << " to " << int{high};
      return out.str();
    }
  }
  return {};
}

std::string judge(const Error& error, const Tolerance& tolerance) {
  std::ostringstream out;
  if (!error.special_equal)
    out << "inf or NaN stand elsewhere than in the reference, first in row " << error.worst_row;
  else if (!(error.max_rel <= tolerance.max_rel))
    out << "o is off by " << error.max_rel << " of its row's largest element in row " << error.worst_row
        << ", expected at most " << tolerance.max_rel;
  else if (!(error.cosine_distance <= tolerance.cosine_distance))
    out << "cosine distance " << error.cosine_distance << ", expected at most " << tolerance.cosine_distance;
  else if (!(error.max_lse <= tolerance.max_lse))
    out << "lse is off by " << error.max_lse << ", expected at most " << tolerance.max_lse;
  else if (!(error.max_logits <= tolerance.max_logits))
    out << "max_logits is off by " << error.max_logits << ", expected at most " << tolerance.max_logits;
  return out.str();
}

double least_row_scale(DType o_dtype) { return o_dtype == DType::kF16 ? 0x1p-14 : 0x1p-100; }

namespace {

/// Returns a bound of the ALiBi bias of the keys that count, with slopes of at most 1: these keys lie among the drafts
/// and the nearest keys of a rank.
double bias_of(const OptionsSpec& options, const std::vector<int32_t>& q_len, const ContextParallel& share) {
  if (!options.alibi_slopes) return 0;
  return longest(q_len) + static_cast<double>(share.world) * share.interleave + 20;
}

}  // namespace

Numerics numerics_of(std::string_view backend, const Problem& problem) {
  for (const BackendVerdict& row : explain(problem, "auto").rows)
    if (row.name == backend) return row.numerics;
  return {};
}

Tolerance tolerance_of(const DecodeSpec& spec, const Numerics& numerics) {
  return attention_tolerance(spec,
                             {.d_qk = static_cast<double>(spec.cache.d_qk),
                              .max_kv_len = longest(spec.kv_len),
                              .bias = bias_of(spec.options, spec.q_len, spec.context_parallel)},
                             numerics);
}

Tolerance tolerance_of(const DecodeSparseSpec& spec, const Numerics& numerics) {
  AttentionShape shape = {.d_qk = static_cast<double>(spec.pool.cache.d_qk),
                          .max_kv_len = static_cast<double>(spec.pool.topk),
                          .repetitions = spec.pool.duplicate_share * spec.pool.topk};
  if (spec.extra_pool.has_value()) {
    shape.max_kv_len += spec.extra_pool->topk;
    shape.repetitions += spec.extra_pool->duplicate_share * spec.extra_pool->topk;
  }
  return attention_tolerance(spec, shape, numerics);
}

Tolerance tolerance_of(const PrefillSpec& spec, const Numerics& numerics) {
  return attention_tolerance(spec,
                             {.d_qk = static_cast<double>(spec.d_qk),
                              .max_kv_len = longest(spec.kv_len),
                              .bias = bias_of(spec.options, spec.q_len, {})},
                             numerics);
}

Tolerance tolerance_of(const PrefillSparseSpec& spec, const Numerics& numerics) {
  return attention_tolerance(spec,
                             {.d_qk = static_cast<double>(spec.d_qk),
                              .max_kv_len = static_cast<double>(spec.topk),
                              .repetitions = spec.duplicate_share * spec.topk},
                             numerics);
}

double tolerance_of(const IndexerLogitsSpec& spec, const Numerics& numerics) {
  // Hopper keeps 14 bits of a sum of e4m3 products and drops the others, so that the largest logits, whose products
  // mostly have one sign, come out too small. Seen were 2^-15.2 where channels are normal, and 2^-13.5 with codes of
  // all sizes (H200, 2026-11-28).
  if (numerics.multiplied == Arithmetic::kE4M3) return 0x1p-13;
  // A dot product in f32 is off by a few u of |q| |k|, the sum over heads by about sqrt(H) u.
  return unit_roundoff(DType::kF32) * (8 + 2 * std::sqrt(static_cast<double>(spec.num_heads)));
}

Tolerance tolerance_of(const MergeSpec& spec) {
  // Rounding the output, and f32 sums of num_states weights whose exponents are of the size of lse.
  const double u = unit_roundoff(DType::kF32);
  const double magnitude = 5.0 * static_cast<double>(spec.lse_std) + std::log(spec.num_states + 1.0);
  const double weights = u * (2.0 * spec.num_states + 4 * magnitude) + 0x1p-21;
  const double output = unit_roundoff(spec.o_dtype);
  return {.max_rel = output + weights,
          .cosine_distance = output * output + weights * weights + 1e-13,
          .max_lse = 2 * weights};
}

}  // namespace mla::kit
