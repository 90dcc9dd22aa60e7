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
  bool special_equal = true;   ///< inf and NaN stand at the same places
  int64_t worst_row = -1;      ///< token * num_heads + head of max_rel (or of the first misplaced inf or NaN)
};

/// Largest legal values of Error's fields.
struct Tolerance {
  double max_rel = 0;
  double cosine_distance = 0;
  double max_lse = 0;
};

/// `o`, `reference`: [rows, d_v]; `lse`, `reference_lse`: [rows] or both empty. `row_scale` [rows] replaces the
/// largest |reference| of each row if it is not empty.
Error compare(std::span<const double> o, std::span<const double> reference, int64_t d_v, std::span<const double> lse,
              std::span<const double> reference_lse, std::span<const double> row_scale = {});

/// Empty if `error` is within `tolerance`, else which field is not, with both numbers.
std::string judge(const Error& error, const Tolerance& tolerance);

/// How a backend multiplies.
enum class Precision : uint8_t {
  kF32,      ///< products and weights in f32
  kBF16Dot,  ///< bf16 x bf16 products summed in f32, so the softmax weights P are rounded to bf16
};

/// By the row's name; bf16 dot products serve bf16 operands only.
Precision precision_of(std::string_view backend, const DecodeSpec& spec);
Precision precision_of(std::string_view backend, const PrefillSpec& spec);

/// The error model is derived in compare.cpp.
Tolerance tolerance_of(const DecodeSpec& spec, Precision precision);
Tolerance tolerance_of(const PrefillSpec& spec, Precision precision);
Tolerance tolerance_of(const MergeSpec& spec);

}  // namespace mla::kit
