// SPDX-License-Identifier: Apache-2.0
// Computes the steps of DeepSeek V2 to V3.2 and their relatives: up-projected prefill, absorbed decode, dense or
// sparse, on one or more ranks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "mla/bench/memory.h"
#include "mla/replay/checker.h"
#include "mla/replay/engine.h"
#include "mla/replay/generator.h"
#include "mla/replay/projector.h"
#include "mla/replay/team.h"

namespace mla::cli::replay {

class LatentEngine : public Engine {
 public:
  LatentEngine(const EngineOptions& options, const Context& context, const Context& reference,
               const std::atomic<bool>& stop);

  static int64_t memory_needed(const EngineOptions& options);

  Status run(const Step& step, std::span<const Sequence> sequences) override;
  bool was_cut_short() const override { return cut_short_; }
  Recorder& recorder() override { return recorder_; }
  const CheckLog& checks() const override { return checker_.log(); }

 private:
  struct TokenJob {
    uint64_t seed;
    int32_t position;
    QueryRow query;
    int64_t indexer_row;  // -1: no indexer query
  };
  bool sparse() const { return options_.layer.topk > 0; }
  int64_t first_decode_row() const {
    int64_t row = 0;
    for (const TokenRange& piece : prefill_) row += piece.count;
    return row;
  }
  /// Returns decode's queries as attention gets them, [decode_rows, H, d_qk].
  const bench::Buffer& decode_queries() const { return has_prologue(options_.layer.model) ? decode_q_ : absorbed_; }
  int64_t index_heads() const { return indexer_heads(options_.layer.model); }
  void generate(const Step& step, std::span<const Sequence> sequences);
  TokenRange add_tokens(const Sequence& sequence, int32_t index, int32_t start, int32_t count, int32_t accepted);
  SeedOf seed_of(const Sequence& sequence, const TokenRange& piece, int64_t first_job) const;
  void place_decode_queries(int64_t first_job);
  void generate_token(const TokenJob& job, int64_t index);
  Status append();
  Status run_prefill();
  Status run_decode();
  Status check(const Step& step, std::span<const Sequence> sequences);
  Status check_prefill(const Step& step, std::span<const Sequence> sequences);
  Status check_decode(const Step& step, std::span<const Sequence> sequences);

  EngineOptions options_;
  Recorder recorder_;
  Operations operations_, reference_;
  Team team_;
  Generator generator_;
  Projector projector_;
  Layer layer_;
  Checker checker_;
  Seats seats_;
  bool cut_short_ = false;
  int64_t prefill_steps_ = 0, decode_steps_ = 0;

  bench::Buffer latents_;                                    // [chunk + decode_rows, d_qk]
  bench::Buffer q_, o_, lse_;                                // prefill: [chunk, H, ...]
  bench::Buffer q_nope_, q_pe_, absorbed_, o_latent_, out_;  // decode: [decode_rows, H, ...]
  bench::Buffer decode_q_;                                   // decode, with a prologue: [decode_rows, H, d_qk]
  bench::Buffer indexer_q_, indexer_weights_;                // decode: [decode_rows, indexer's heads, ...]
  // These are of the current step, in the order of the latents: prefill's tokens, then decode's.
  std::vector<TokenJob> jobs_;
  std::vector<int64_t> slots_, positions_;
  std::vector<TokenRange> prefill_, decode_;
  TensorView selected_;  // sparse decode: [T, topk]
};

}  // namespace mla::cli::replay
