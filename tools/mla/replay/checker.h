// SPDX-License-Identifier: Apache-2.0
// Are the results right? Sampled tokens are computed again another way and compared.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mla/replay/layer.h"
#include "mla/replay/projector.h"

namespace mla::cli::replay {

/// Largest relative error that is accepted: the l2 norm of the difference of one head's output over the norm of the
/// output. A rounding to bf16 is a relative error u of at most 2^-8. The two ways differ in about six of them: keys
/// against absorbed queries (whose scores have a standard deviation near 1), values against latent outputs, and each
/// side's probabilities. They are independent, so 4u leaves a wide margin (near 1.2u is usual), while an output made of
/// the wrong tokens is off by about 1.
inline constexpr double kTolerance = 0x1p-6;

/// ||a - b|| / ||b|| over `count` values; infinity if a value is not finite.
double relative_error(const float* a, const float* b, int64_t count);

class Checker {
 public:
  /// `reference` is a context that forces the reference backend.
  Checker(Layer& layer, const Context& context, const Context& reference, Projector& projector);

  /// One token's queries, q_nope [H, qk_nope_head_dim] and q_pe [H, qk_rope_head_dim] with the given distance of heads,
  /// and its attention output after W_UV, [H, v_head_dim] f32.
  struct Sample {
    std::string what;  ///< "line 12, token 345", for messages
    TokenRange token;
    const void* q_nope = nullptr;
    int64_t q_nope_stride_head = 0;
    const void* q_pe = nullptr;
    int64_t q_pe_stride_head = 0;
    const float* out = nullptr;
  };

  /// Compares a token that prefill computed with absorbed decode, and that with the reference.
  Status check_prefill(const Sample& sample);
  /// Compares a token that decode computed with up-projected prefill, and with the reference. `absorbed` and `o`, both
  /// [H, kv_lora_rank], are what decode got and gave.
  Status check_decode(const Sample& sample, const void* absorbed, const void* o);

  int64_t num_checks() const { return num_checks_; }
  double worst_prefill_decode() const { return worst_prefill_decode_; }
  double worst_reference() const { return worst_reference_; }
  /// One sentence for each comparison beyond the tolerance; at most ten are kept.
  const std::vector<std::string>& failures() const { return failures_; }
  bool failed() const { return !failures_.empty(); }

 private:
  Status compare_with_reference(const Sample& sample, const void* absorbed, const void* o);
  void note(double error, double& worst, const std::string& what, const char* against);
  TensorView latent_row(const void* row) const;
  TensorView q_pe(const Sample& sample) const;

  Layer& layer_;
  const Context& context_;
  const Context& reference_;
  Projector& projector_;
  bench::Buffer q_nope_, absorbed_, o_, out_, q_, lse_;
  int64_t num_checks_ = 0;
  double worst_prefill_decode_ = 0.0, worst_reference_ = 0.0;
  std::vector<std::string> failures_;
};

}  // namespace mla::cli::replay
