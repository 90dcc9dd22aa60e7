// SPDX-License-Identifier: Apache-2.0
// How far a result is from the reference, and how far it may be.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kit/specs.h"
#include "mla/types.h"

namespace mla::kit {

/// Distance of one result from the reference.
struct Error {
  double max_abs = 0;          ///< largest |o - reference|
  double max_rel = 0;          ///< largest |o - reference| / scale of its row (its largest |reference|)
  double cosine_distance = 0;  ///< 1 - cos of the whole tensors
  double max_lse = 0;          ///< largest |lse - reference|
  double max_logits = 0;       ///< the same of max_logits (prefill_sparse)
  bool special_equal = true;   ///< inf and NaN stand at the same places
  int64_t worst_row = -1;      ///< token * num_heads + head of max_rel (or of the first misplaced inf or NaN)
};

/// Largest legal values of Error's fields.
struct Tolerance {
  double max_rel = 0;
  double cosine_distance = 0;
  double max_lse = 0;
  double max_logits = 0;
};

/// `o`, `reference`: [rows, d_v]; `lse`, `reference_lse`: [rows] or both empty. `row_scale` [rows] replaces the
/// largest |reference| of each row if it is not empty.
Error compare(std::span<const double> o, std::span<const double> reference, int64_t d_v, std::span<const double> lse,
              std::span<const double> reference_lse, std::span<const double> row_scale = {});

/// Empty if `error` is within `tolerance`, else which field is not, with both numbers.
std::string judge(const Error& error, const Tolerance& tolerance);

/// E4m3 outputs: `codes` [rows, d_v] against o / o_scale of the reference, where o may be off by `max_rel` of its row's
/// largest |reference|. Empty if every code is one that such an o rounds to.
std::string judge_codes(std::span<const uint8_t> codes, std::span<const double> reference, int64_t d_v, double o_scale,
                        double max_rel);

/// How a backend multiplies.
enum class Precision : uint8_t {
  kF32,      ///< products and weights in f32
  kBF16Dot,  ///< bf16 x bf16 products summed in f32, so the softmax weights P are rounded to bf16
  kBF16Mma,  ///< the same on tensor cores, which cut sums off; f32 queries are two bf16 parts
  kF16Mma,   ///< the same in f16
};

/// By the row's name; bf16 dot products of the CPU serve bf16 operands only, tensor cores multiply in the cache's type,
/// bf16 if it is quantized.
Precision precision_of(std::string_view backend, const DecodeSpec& spec);
Precision precision_of(std::string_view backend, const DecodeSparseSpec& spec);
Precision precision_of(std::string_view backend, const PrefillSpec& spec);
Precision precision_of(std::string_view backend, const PrefillSparseSpec& spec);

/// The error model is derived in compare.cpp.
Tolerance tolerance_of(const DecodeSpec& spec, Precision precision);
Tolerance tolerance_of(const DecodeSparseSpec& spec, Precision precision);
Tolerance tolerance_of(const PrefillSpec& spec, Precision precision);
Tolerance tolerance_of(const PrefillSparseSpec& spec, Precision precision);
Tolerance tolerance_of(const MergeSpec& spec);
/// Of logits, as a share of IndexerLogitsCase::row_scales.
double tolerance_of(const IndexerLogitsSpec& spec);

/// Errors of smaller rows than this are measured by it: f16 rounds them to its subnormals, and f32 may flush the factor
/// of a sink so large that it leaves less.
double least_row_scale(DType o_dtype);

}  // namespace mla::kit
