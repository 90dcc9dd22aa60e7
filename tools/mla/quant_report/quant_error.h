// SPDX-License-Identifier: Apache-2.0
// Measures the error that a cache format causes by itself: it compares attention over the quantized cache with
// attention over the bf16 rows that were written into it, all arithmetic being in f32 or better.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mla::cli {

struct QuantOptions {
  int32_t heads = 16;
  int32_t kv_len = 4096;
  int32_t queries = 4;   ///< the last tokens of the request; at most kv_len
  int32_t requests = 8;  ///< each with an attention sink of its own, whose rounding all of its queries see
  uint64_t seed = 1;
  std::string backend;  ///< row or family, empty = the best
};

/// Holds the errors of one format. Output errors of a query's head are ||o - o_bf16|| / ||o_bf16||; errors of lse are
/// |lse - lse_bf16|.
struct QuantError {
  std::string cache;    ///< name of the format
  std::string scales;   ///< which scales it has: "one", "4 per token, f32", ...
  std::string backend;  ///< the row that computed
  int64_t d_qk = 0, d_v = 0;
  int64_t bytes_per_token = 0;
  int64_t bf16_bytes_per_token = 0;
  double output_rms = 0, output_worst = 0;
  double lse_rms = 0, lse_worst = 0;
};

/// Returns the errors of every format, on rows of the shape that it is for: 512 + 64 channels, or in formats of V4 and
/// V4.1, and in fp8_nope, those of V4, 512 channels that are all of the value. Outer scales are those of calibration.
/// Throws UsageError with the library's message.
std::vector<QuantError> quant_errors(const QuantOptions& options);

}  // namespace mla::cli
