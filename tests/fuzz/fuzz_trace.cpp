// SPDX-License-Identifier: Apache-2.0
// The trace parser takes any bytes: it returns a request within its limits or one message, and never throws.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "mla/replay/trace.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace mla::cli::replay;
  const auto request = parse_trace_line(std::string_view(reinterpret_cast<const char*>(data), size), 7);
  if (!request.ok()) {
    if (request.status().message().empty()) std::abort();
    return 0;
  }
  const int64_t blocks = (int64_t{request->input_length} + kBlockTokens - 1) / kBlockTokens;
  const bool sound = request->line == 7 && request->input_length >= 1 && request->input_length <= kMaxLength &&
                     request->output_length >= 0 && request->output_length <= kMaxLength &&
                     request->arrival_ms >= 0.0 && static_cast<int64_t>(request->hash_ids.size()) == blocks;
  if (!sound) std::abort();
  return 0;
}
