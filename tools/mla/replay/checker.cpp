// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/checker.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "mla/numeric.h"

namespace mla::cli::replay {
namespace {

constexpr size_t kMaxFailures = 10;
// Up-projecting a long context again for every head would cost more than the step that is checked.
constexpr int32_t kCheckedHeads = 4;
constexpr int32_t kReferenceHeads = 1;

std::vector<float> to_f32(const void* values, DType dtype, int64_t count) {
  std::vector<float> out(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i)
    out[static_cast<size_t>(i)] = dtype == DType::kF32 ? static_cast<const float*>(values)[i]
                                                       : bf16_to_f32(static_cast<const uint16_t*>(values)[i]);
  return out;
}

}  // namespace

double relative_error(const float* a, const float* b, int64_t count) {
  double difference = 0.0, norm = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    const double x = a[i], y = b[i];
    difference += (x - y) * (x - y);
    norm += y * y;
  }
  if (!std::isfinite(difference) || !std::isfinite(norm)) return std::numeric_limits<double>::infinity();
  if (difference == 0.0) return 0.0;
  return std::sqrt(difference / norm);
}

Checker::Checker(Layer& layer, const Context& context, const Context& reference, Projector& projector)
    : layer_(layer), context_(context), reference_(reference), projector_(projector) {
  const ModelConfig& model = layer.options().model;
  const int64_t rows = Projector::padded_rows(1), heads = model.num_attention_heads;
  const auto buffer = [](int64_t values) { return bench::Buffer(static_cast<size_t>(values) * sizeof(float), false); };
  q_nope_ = buffer(rows * heads * model.qk_nope_head_dim);
  absorbed_ = buffer(rows * heads * model.kv_lora_rank);
  o_ = buffer(rows * heads * model.kv_lora_rank);
  out_ = buffer(rows * heads * model.v_head_dim);
  q_ = buffer(heads * model.prefill_d_qk());
  lse_ = buffer(heads);
}

TensorView Checker::latent_row(const void* row) const {
  const ModelConfig& model = layer_.options().model;
  return contiguous(row, layer_.options().dtype, {1, model.num_attention_heads, model.kv_lora_rank});
}

TensorView Checker::q_pe(const Sample& sample) const {
  const ModelConfig& model = layer_.options().model;
  if (model.qk_rope_head_dim == 0) return {};
  TensorView view =
      contiguous(sample.q_pe, layer_.options().dtype, {1, model.num_attention_heads, model.qk_rope_head_dim});
  view.stride[1] = sample.q_pe_stride_head;
  view.stride[0] = view.stride[1] * view.shape[1];
  return view;
}

void Checker::note(double error, double& worst, const std::string& what, const char* against) {
  worst = std::max(worst, error);
  if (error <= kTolerance || failures_.size() >= kMaxFailures) return;
  failures_.push_back(
      fmt::format("{}: expected an error of at most {:.4f} against {}, got {:.4g}", what, kTolerance, against, error));
}

// The oracle is slow, so one head must do; which one changes from check to check.
Status Checker::compare_with_reference(const Sample& sample, const void* absorbed, const void* o) {
  const LayerOptions& options = layer_.options();
  const int64_t heads = options.model.num_attention_heads, rank = options.model.kv_lora_rank;
  const int64_t head = num_checks_ % heads;
  std::vector<float> expected(static_cast<size_t>(rank));
  TensorView pe = q_pe(sample);
  if (pe.given()) pe = slice(pe, 1, head, kReferenceHeads);
  Status status =
      layer_.decode(reference_, slice(latent_row(absorbed), 1, head, kReferenceHeads), pe, std::span(&sample.token, 1),
                    contiguous(expected.data(), DType::kF32, {1, kReferenceHeads, rank}), nullptr);
  if (!status.ok()) return status;
  const auto got = to_f32(static_cast<const std::byte*>(o) + head * rank * static_cast<int64_t>(size_of(options.dtype)),
                          options.dtype, rank);
  note(relative_error(got.data(), expected.data(), rank), worst_reference_,
       fmt::format("{}, head {}", sample.what, head), "the reference");
  return {};
}

Status Checker::check_prefill(const Sample& sample) {
  const LayerOptions& options = layer_.options();
  const int64_t heads = options.model.num_attention_heads, nope = options.model.qk_nope_head_dim;
  const int64_t v_dim = options.model.v_head_dim;
  const auto bytes = static_cast<int64_t>(size_of(options.dtype));
  for (int64_t h = 0; h < heads; ++h)
    std::memcpy(q_nope_.data() + h * nope * bytes,
                static_cast<const std::byte*>(sample.q_nope) + h * sample.q_nope_stride_head * bytes,
                static_cast<size_t>(nope * bytes));
  projector_.absorb(q_nope_.data(), 1, absorbed_.data());
  Status status = layer_.decode(context_, latent_row(absorbed_.data()), q_pe(sample), std::span(&sample.token, 1),
                                latent_row(o_.data()), nullptr);
  if (!status.ok()) return status;
  projector_.output(o_.data(), 1, out_.as<float>());
  ++num_checks_;
  for (int64_t h = 0; h < heads; ++h)
    note(relative_error(sample.out + h * v_dim, out_.as<float>() + h * v_dim, v_dim), worst_prefill_decode_,
         fmt::format("{}, head {}, prefill", sample.what, h), "absorbed decode");
  return compare_with_reference(sample, absorbed_.data(), o_.data());
}

Status Checker::check_decode(const Sample& sample, const void* absorbed, const void* o) {
  const LayerOptions& options = layer_.options();
  const ModelConfig& model = options.model;
  const int64_t all = model.num_attention_heads, nope = model.qk_nope_head_dim, rope = model.qk_rope_head_dim;
  const int64_t d_qk = model.prefill_d_qk(), v_dim = model.v_head_dim;
  const auto bytes = static_cast<int64_t>(size_of(options.dtype));
  ++num_checks_;
  const Heads heads{.begin = static_cast<int32_t>(num_checks_ % (all - std::min<int64_t>(all, kCheckedHeads) + 1)),
                    .count = static_cast<int32_t>(std::min<int64_t>(all, kCheckedHeads))};
  for (int64_t i = 0; i < heads.count; ++i) {
    const int64_t h = heads.begin + i;
    std::memcpy(q_.data() + i * d_qk * bytes,
                static_cast<const std::byte*>(sample.q_nope) + h * sample.q_nope_stride_head * bytes,
                static_cast<size_t>(nope * bytes));
    if (rope > 0)
      std::memcpy(q_.data() + (i * d_qk + nope) * bytes,
                  static_cast<const std::byte*>(sample.q_pe) + h * sample.q_pe_stride_head * bytes,
                  static_cast<size_t>(rope * bytes));
  }
  Status status =
      layer_.prefill(contiguous(q_.data(), options.dtype, {1, heads.count, d_qk}), std::span(&sample.token, 1), heads,
                     contiguous(out_.data(), DType::kF32, {1, heads.count, v_dim}),
                     contiguous(lse_.data(), DType::kF32, {1, heads.count}), nullptr);
  if (!status.ok() || layer_.was_cut_short()) return status;
  for (int64_t i = 0; i < heads.count; ++i)
    note(relative_error(sample.out + (heads.begin + i) * v_dim, out_.as<float>() + i * v_dim, v_dim),
         worst_prefill_decode_, fmt::format("{}, head {}, decode", sample.what, heads.begin + i),
         "up-projected prefill");
  return compare_with_reference(sample, absorbed, o);
}

}  // namespace mla::cli::replay
