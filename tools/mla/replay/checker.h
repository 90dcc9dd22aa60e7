// SPDX-License-Identifier: Apache-2.0
// Checks whether results are right: computes sampled tokens again another way and compares them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "mla/replay/check_log.h"
#include "mla/replay/layer.h"
#include "mla/replay/projector.h"
#include "mla/replay/row_oracle.h"

namespace mla::cli::replay {

class Checker {
 public:
  /// `operations` are the layer's; the context of `reference` forces the reference backend.
  Checker(Layer& layer, const Generator& generator, Operations& operations, Operations& reference,
          Projector& projector);

  /// Holds one token's queries, q_nope [H, qk_nope_head_dim] and q_pe [H, qk_rope_head_dim], whose heads are
  /// `*_stride_head` elements apart, and its attention output after W_UV, out [H, v_head_dim] f32.
  struct Sample {
    std::string what;  ///< "line 12, token 345", for messages
    TokenRange token;
    const void* q_nope = nullptr;
    int64_t q_nope_stride_head = 0;
    const void* q_pe = nullptr;
    int64_t q_pe_stride_head = 0;
    const float* out = nullptr;
    IndexerQueries indexer = {};     ///< sparse decode: the token's queries of the indexer
    const int32_t* slots = nullptr;  ///< sparse decode: the slots that the token got, [list_width()]
    uint64_t seed = 0;               ///< of the token
    SeedOf seed_of = {};             ///< of the request's tokens; cached rows are compared with their activations then
  };
  /// Holds what decode got and gave: the queries in the latent space, [H, kv_lora_rank], as attention got them, [H,
  /// d_qk], and the outputs, [H, kv_lora_rank].
  struct Decoded {
    const void* absorbed = nullptr;
    const void* q = nullptr;
    const void* o = nullptr;
  };

  /// Compares a token that prefill computed with absorbed decode, and that with the reference.
  Status check_prefill(const Sample& sample);
  /// Compares a token that decode computed with up-projected prefill, and with the reference. Sparse decode is compared
  /// with prefill only where it saw every key; which keys it got is judged by the reference's indexer.
  Status check_decode(const Sample& sample, const Decoded& decoded);

  const CheckLog& log() const { return log_; }

 private:
  Status compare_with_reference(const Sample& sample, const TensorView& q_nope, const void* o);
  void check_query(const Sample& sample, const Decoded& decoded);
  Status compare_with_prefill(const Sample& sample);
  std::vector<int32_t> chosen_keys(const Sample& sample, std::string& wrong) const;
  Status check_selection(const Sample& sample);
  Status check_cached(const Sample& sample);
  TensorView latent_row(const void* row) const;
  TensorView q_pe(const Sample& sample) const;

  Layer& layer_;
  Operations& operations_;
  Operations& reference_;
  Projector& projector_;
  RowOracle oracle_;
  bench::Buffer q_nope_, absorbed_, o_, out_, q_, lse_;
  CheckLog log_;
};

/// Names blocks of neighbouring keys.
struct KeyBlocks {
  std::span<const int32_t> blocks;  ///< with -1 behind the last
  int32_t block_size = 1;
};

/// Judges a selection of the `topk` largest of `logits` (of every visible key, by position): `positions` hold those
/// that were chosen, from the keys of some blocks if there are any. Returns what is wrong with it, or an empty text.
/// Since a logit may have been computed in another order, the chosen keys may differ near the last place.
std::string judge_selection(std::span<const float> logits, std::span<const int32_t> positions, int32_t topk,
                            const std::optional<KeyBlocks>& within = std::nullopt);

/// Judges a choice of `count` blocks: those with the largest logits, and the one of the newest key.
std::string judge_blocks(std::span<const float> logits, const KeyBlocks& chosen, int32_t count);

/// Returns the positions of one request's slots, up to the first slot of -1; a slot that the request does not own has
/// position -1.
std::vector<int32_t> positions_of(std::span<const int32_t> slots, std::span<const int32_t> pages, int32_t page_size);

}  // namespace mla::cli::replay
