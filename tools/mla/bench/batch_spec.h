// SPDX-License-Identifier: Apache-2.0
// Parses vLLM's grammar for batches: segments joined by '_', each [count]q<q_len>[k][s<kv_len>[k]]; k is 1024, a
// missing count is 1, a missing kv_len is q_len. "kv" is read like "s". "2q2k_8q1s4k": two prompts of 2048 tokens and
// eight requests that decode one token over 4096. Source: vLLM, benchmarks/attention_benchmarks/README.md.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace mla::bench {

/// Describes one request of a batch: its `q_len` query tokens are the last of `kv_len` tokens.
struct Request {
  int64_t q_len = 1;
  int64_t kv_len = 0;
  friend bool operator==(const Request&, const Request&) = default;
};

/// Returns the requests of a batch. Throws UsageError, which names the option by `where`.
std::vector<Request> parse_batch_spec(std::string_view where, std::string_view text);

}  // namespace mla::bench
