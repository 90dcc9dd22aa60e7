// SPDX-License-Identifier: Apache-2.0
// Measures how far a result is from the reference, and says how far it may be.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kit/specs.h"
#include "mla/backend.h"
#include "mla/types.h"

namespace mla::kit {

/// Holds the distance of one result from the reference.
struct Error {
  double max_abs = 0;          ///< largest |o - reference|
  double max_rel = 0;          ///< largest |o - reference| / scale of its row (its largest |reference|)
  double cosine_distance = 0;  ///< 1 - cos of the whole tensors
  double max_lse = 0;          ///< largest |lse - reference|
  double max_logits = 0;       ///< the same of max_logits (sparse attention)
  bool special_equal = true;   ///< inf and NaN stand at the same places
  int64_t worst_row = -1;      ///< token * num_heads + head of max_rel (or of the first misplaced inf or NaN)
};

/// Holds the largest legal values of Error's fields.
struct Tolerance {
  double max_rel = 0;
  double cosine_distance = 0;
  double max_lse = 0;
  double max_logits = 0;
};

/// Compares `o` with `reference`, both [rows, d_v], and `lse` with `reference_lse`, both [rows] or both empty.
/// `row_scale` [rows] replaces the largest |reference| of each row if it is not empty.
Error compare(std::span<const double> o, std::span<const double> reference, int64_t d_v, std::span<const double> lse,
              std::span<const double> reference_lse, std::span<const double> row_scale = {});

/// Returns an empty string if `error` is within `tolerance`, else which field is not, with both numbers.
std::string judge(const Error& error, const Tolerance& tolerance);

/// Compares the `codes` [rows, d_v] of e4m3 outputs with o / o_scale of the reference, where o may be off by `max_rel`
/// of its row's largest |reference|. Returns an empty string if every code is one that such an o rounds to, else the
/// first that is not.
std::string judge_codes(std::span<const uint8_t> codes, std::span<const double> reference, int64_t d_v, double o_scale,
                        double max_rel);

/// Returns how a row computes a problem, as the row itself says, or the default Numerics, which allow least, if the
/// operation has no such row.
Numerics numerics_of(std::string_view backend, const Problem& problem);

/// Returns how far results may be from the reference. The error model is derived in compare.cpp.
Tolerance tolerance_of(const DecodeSpec& spec, const Numerics& numerics);
Tolerance tolerance_of(const DecodeSparseSpec& spec, const Numerics& numerics);
Tolerance tolerance_of(const PrefillSpec& spec, const Numerics& numerics);
Tolerance tolerance_of(const PrefillSparseSpec& spec, const Numerics& numerics);
Tolerance tolerance_of(const MergeSpec& spec);
/// Returns the tolerance of logits, as a share of IndexerLogitsCase::row_scales.
double tolerance_of(const IndexerLogitsSpec& spec, const Numerics& numerics);

/// Returns the least scale of a row; errors of smaller rows are measured by it, too: f16 rounds them to its subnormals,
/// and f32 may flush the factor of a sink so large that it leaves less.
double least_row_scale(DType o_dtype);

}  // namespace mla::kit
