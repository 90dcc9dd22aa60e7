// SPDX-License-Identifier: Apache-2.0
// Reads the request trace: one JSON object a line, in the format of the Mooncake release (data/README.md).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "mla/status.h"

namespace mla::cli::replay {

/// One entry of `hash_ids` stands for this many prompt tokens.
inline constexpr int32_t kBlockTokens = 512;
/// The parser accepts prompts and answers of at most this many tokens.
inline constexpr int32_t kMaxLength = 1 << 24;
/// The parser accepts lines of at most this many bytes; they are enough for kMaxLength tokens.
inline constexpr size_t kMaxLineBytes = size_t{1} << 20;

struct Request {
  int64_t line = 0;               ///< line of the trace, from 1
  double arrival_ms = 0.0;        ///< since the start of the trace
  int32_t input_length = 0;       ///< prompt tokens, at least 1
  int32_t output_length = 0;      ///< answer tokens; 0 is legal
  std::vector<int64_t> hash_ids;  ///< one per block of the prompt, the last block may be partial
};

/// Reads one line. The error names the field, what was expected and what was given, not the place.
Result<Request> parse_trace_line(std::string_view text, int64_t line);

/// Reads the first `max_requests` requests of a file (all if 0) and sorts them by arrival; requests of the same time
/// keep their order. Blank lines are accepted at the end only. Errors begin with "path:line: ".
Result<std::vector<Request>> read_trace(const std::string& path, int64_t max_requests);

}  // namespace mla::cli::replay
