// SPDX-License-Identifier: Apache-2.0
// Computes the steps of DeepSeek V4 and V4.1: every token attends through decode_sparse, in one layer of each kind. The
// layers share their rows.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "mla/bench/memory.h"
#include "mla/replay/engine.h"
#include "mla/replay/generator.h"
#include "mla/replay/pooled_layer.h"
#include "mla/replay/row_oracle.h"
#include "mla/replay/team.h"

namespace mla::cli::replay {

class PooledEngine : public Engine {
 public:
  PooledEngine(const EngineOptions& options, const Context& context, const Context& reference,
               const std::atomic<bool>& stop);

  static int64_t memory_needed(const EngineOptions& options);

  Status run(const Step& step, std::span<const Sequence> sequences) override;
  bool was_cut_short() const override { return cut_short_; }
  Recorder& recorder() override { return recorder_; }
  const CheckLog& checks() const override { return log_; }

 private:
  struct Token {
    uint64_t seed;
    const Request* request;
    size_t range;  // of ranges_
    TokenPlace place;
  };
  /// Names a token to check, and the kind of layer to check it in.
  struct Sample {
    int64_t token;
    size_t kind;
  };
  void add_tokens(const Sequence& sequence, int32_t index, int32_t start, int32_t count, int32_t accepted);
  void plan_step(const Step& step, std::span<const Sequence> sequences);
  std::vector<TokenRange> ranges_of(int64_t first, int64_t count) const;
  std::span<const int64_t> positions_of_slice(int64_t first, int64_t count) const {
    return std::span(positions_).subspan(static_cast<size_t>(first), static_cast<size_t>(count));
  }
  SeedOf seed_of(int64_t token) const;
  int64_t indexer_row(size_t kind, int64_t row) const;
  IndexerQueries indexer_queries(size_t kind, int64_t row) const;
  void generate_latents();
  void generate_queries(int64_t first, int64_t count);
  Status append_slice(size_t kind, int64_t first, std::span<const TokenRange> ranges, int64_t count,
                      const AppendPhases& phases);
  std::optional<Sample> pick(int64_t first, int64_t count, int64_t& steps);
  Status attend(int64_t first, int64_t count, Phase phase, int64_t& steps);
  Status attend_slice(int64_t first, int64_t count, Phase phase, const std::optional<Sample>& sample);
  Status check(const Sample& sample, int64_t first);
  Status check_selection(const Sample& sample, int64_t row, const std::string& what, std::vector<int32_t>& positions);
  Status judge_choice(const Sample& sample, int64_t row, std::span<const int32_t> positions, std::string& wrong);
  Status check_rows_of(size_t pool, const Sample& sample, const std::string& what);
  Status check_cached(const Sample& sample, const std::string& what);
  void check_query(const Sample& sample, int64_t row, const std::string& what);
  void check_output(const Sample& sample, int64_t row, std::span<const float> o, const std::string& what);

  EngineOptions options_;
  Operations operations_, reference_;
  const std::atomic<bool>& stop_;
  Recorder recorder_;
  Team team_;
  Generator generator_;
  PooledLayer layer_;
  RowOracle oracle_;
  Seats seats_;
  CheckLog log_;
  bool cut_short_ = false;
  int64_t prefill_steps_ = 0, decode_steps_ = 0;

  bench::Buffer latents_;                      // [chunk + decode_rows, d_qk]
  bench::Buffer projected_q_, q_, o_;          // [slice, H, d]; the first only with a prologue
  bench::Buffer indexer_q_, indexer_weights_;  // [kinds, slice, indexer's heads, ...]
  std::vector<Token> tokens_;                  // prefill's, then decode's
  std::vector<int64_t> slots_, positions_;
  std::vector<TokenRange> ranges_;
  int64_t num_prefill_ = 0;
};

}  // namespace mla::cli::replay
