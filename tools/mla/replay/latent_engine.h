// SPDX-License-Identifier: Apache-2.0
// Computes the steps of DeepSeek V2 to V3.2 and their relatives: up-projected prefill, absorbed decode, dense or
// sparse, on one or more ranks. Sparse attention is absorbed for prompts too, from the token on that sees more keys
// than are chosen.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
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
    size_t piece;       // of pieces_
    int64_t dense_row;  // of q_ and o_; -1: attention is absorbed
  };
  /// Holds what the step has of a request. Its tokens are jobs_ from `first_job` on.
  struct Piece {
    TokenRange range;
    const Sequence* sequence;
    int64_t first_job;
    int32_t dense;  // so many tokens attend to every key, up-projected
  };
  /// Names the phases of absorbed attention.
  struct AbsorbedPhases {
    Phase projection, prologue, attention;
    ChoicePhases choice;
  };
  static constexpr AbsorbedPhases kOfPrompts = {Phase::kPrefillProjection, Phase::kPrefillPrologue,
                                                Phase::kPrefillSparse, kPrefillChoice};
  static constexpr AbsorbedPhases kOfAnswers = {Phase::kDecodeProjection, Phase::kDecodePrologue,
                                                Phase::kDecodeAttention, kDecodeChoice};
  bool sparse() const { return options_.layer.topk > 0; }
  static int64_t absorbed_rows(const LayerOptions& options);
  int64_t index_heads() const { return indexer_heads(options_.layer.model); }
  /// Returns absorbed queries as attention gets them, [absorbed_rows, H, d_qk].
  const bench::Buffer& ready_queries() const { return turns(options_.layer.model) ? ready_q_ : absorbed_; }
  QueryRow dense_query(int64_t row) const;
  QueryRow absorbed_query(int64_t row) const;
  IndexerQueries indexer_queries(int64_t row) const;
  void plan_step(const Step& step, std::span<const Sequence> sequences);
  void add_piece(const Sequence& sequence, int32_t index, int32_t start, int32_t count, int32_t dense,
                 int32_t accepted);
  void generate_tokens();
  void generate_queries(int64_t first, int64_t count);
  NewTokens tokens(int64_t first, int64_t count) const;
  std::vector<TokenRange> ranges_of(int64_t first, int64_t count) const;
  SeedOf seed_of(const Piece& piece) const;
  Status append();
  Status attend_dense();
  Status attend_absorbed(int64_t first, int64_t count, const AbsorbedPhases& phases,
                         const std::optional<int64_t>& sample);
  Status run_prefill();
  Status run_decode();
  std::optional<int64_t> pick(std::span<const Piece> pieces, int64_t& steps) const;
  std::string describe(int64_t job) const;
  Status check_dense(int64_t job);
  Status check_absorbed(int64_t job, int64_t first);

  EngineOptions options_;
  Recorder recorder_;
  Operations operations_, reference_;
  Team team_;
  Generator generator_;
  Projector projector_;
  Layer layer_;
  Checker checker_;
  Seats seats_;
  const std::atomic<bool>& stop_;
  bool cut_short_ = false;
  int64_t prefill_steps_ = 0, decode_steps_ = 0;

  bench::Buffer latents_;                                    // [chunk + decode_rows, d_qk]
  bench::Buffer q_, o_, lse_;                                // dense prefill: [chunk, H, ...]
  bench::Buffer q_nope_, q_pe_, absorbed_, o_latent_, out_;  // absorbed attention: [absorbed_rows, H, ...]
  bench::Buffer ready_q_;                                    // the same with a prologue: [absorbed_rows, H, d_qk]
  bench::Buffer indexer_q_, indexer_weights_;                // the same: [absorbed_rows, indexer's heads, ...]
  // These are of the current step, in the order of the latents: prefill's tokens, then decode's.
  std::vector<TokenJob> jobs_;
  std::vector<int64_t> slots_, positions_;
  std::vector<Piece> pieces_;
  size_t num_prefill_pieces_ = 0;
  int64_t num_prefill_ = 0;        // tokens
  std::vector<TokenRange> dense_;  // of the tokens in q_
  TensorView selected_;            // sparse attention: [T, list_width]
};

}  // namespace mla::cli::replay
