// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/checker.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <set>
#include <unordered_map>

#include "mla/numeric.h"

namespace mla::cli::replay {
namespace {

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

std::vector<int32_t> positions_of(std::span<const int32_t> slots, std::span<const int32_t> pages, int32_t page_size) {
  std::unordered_map<int32_t, int32_t> index_of;
  for (size_t i = 0; i < pages.size(); ++i) index_of.emplace(pages[i], static_cast<int32_t>(i));
  std::vector<int32_t> positions;
  for (int32_t slot : slots) {
    if (slot < 0) break;
    const auto at = index_of.find(slot / page_size);
    positions.push_back(at == index_of.end() ? -1 : at->second * page_size + slot % page_size);
  }
  return positions;
}

std::string judge_selection(std::span<const float> logits, std::span<const int32_t> positions, int32_t topk) {
  const size_t expected = std::min(logits.size(), static_cast<size_t>(topk));
  if (positions.size() != expected)
    return fmt::format("expected {} selected keys of {}, got {}", expected, logits.size(), positions.size());
  if (expected == 0) return {};
  std::vector<float> sorted(logits.begin(), logits.end());
  std::nth_element(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(expected - 1), sorted.end(),
                   std::greater<>());
  const float last = sorted[expected - 1];
  float largest = 0.0F;
  for (float logit : logits) largest = std::max(largest, std::abs(logit));
  const float slack = 1e-4F * largest;
  std::set<int32_t> seen;
  for (int32_t position : positions) {
    if (position < 0 || position >= std::ssize(logits)) return "a selected key is none of the request's";
    if (!seen.insert(position).second) return fmt::format("key {} was selected twice", position);
    const float logit = logits[static_cast<size_t>(position)];
    if (!(logit >= last - slack))
      return fmt::format("key {} was selected, whose logit {:.6g} is below the last of the largest {}, {:.6g}",
                         position, logit, expected, last);
  }
  return {};
}

Checker::Checker(Layer& layer, Operations& operations, Operations& reference, Projector& projector)
    : layer_(layer), operations_(operations), reference_(reference), projector_(projector) {
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

// The oracle is slow, so one head must do; which one changes from check to check.
Status Checker::compare_with_reference(const Sample& sample, const void* absorbed, const void* o) {
  const LayerOptions& options = layer_.options();
  const int64_t heads = options.model.num_attention_heads, rank = options.model.kv_lora_rank;
  const int64_t head = log_.num_checks % heads;
  std::vector<float> expected(static_cast<size_t>(rank));
  TensorView pe = q_pe(sample);
  if (pe.given()) pe = slice(pe, 1, head, kReferenceHeads);
  const TensorView q_nope = slice(latent_row(absorbed), 1, head, kReferenceHeads);
  const TensorView out = contiguous(expected.data(), DType::kF32, {1, kReferenceHeads, rank});
  Status status = sample.slots != nullptr
                      ? layer_.decode_slots(reference_, q_nope, pe,
                                            contiguous(sample.slots, DType::kI32, {1, options.topk}), out, nullptr)
                      : layer_.decode(reference_, q_nope, pe, std::span(&sample.token, 1), out, nullptr);
  if (!status.ok()) return status;
  const auto got = to_f32(static_cast<const std::byte*>(o) + head * rank * static_cast<int64_t>(size_of(options.dtype)),
                          options.dtype, rank);
  log_.note(relative_error(got.data(), expected.data(), rank), log_.worst_reference,
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
  Status status = layer_.decode(operations_, latent_row(absorbed_.data()), q_pe(sample), std::span(&sample.token, 1),
                                latent_row(o_.data()), nullptr);
  if (!status.ok()) return status;
  projector_.output(o_.data(), 1, out_.as<float>());
  ++log_.num_checks;
  for (int64_t h = 0; h < heads; ++h)
    log_.note(relative_error(sample.out + h * v_dim, out_.as<float>() + h * v_dim, v_dim), log_.worst_other_way,
              fmt::format("{}, head {}, prefill", sample.what, h), "absorbed decode");
  return compare_with_reference(sample, absorbed_.data(), o_.data());
}

Status Checker::check_decode(const Sample& sample, const void* absorbed, const void* o) {
  ++log_.num_checks;
  const int32_t visible = sample.token.start + 1;
  if (sample.slots != nullptr)
    if (Status status = check_selection(sample); !status.ok()) return status;
  if (sample.slots == nullptr || visible <= layer_.options().topk)
    if (Status status = compare_with_prefill(sample); !status.ok() || layer_.was_cut_short()) return status;
  return compare_with_reference(sample, absorbed, o);
}

Status Checker::check_selection(const Sample& sample) {
  const LayerOptions& options = layer_.options();
  const auto logits = layer_.indexer_logits(reference_, sample.indexer, sample.token);
  if (!logits.ok()) return logits.status();
  const std::span slots(sample.slots, static_cast<size_t>(options.topk));
  const std::string wrong =
      judge_selection(*logits, positions_of(slots, sample.token.pages, options.page_size), options.topk);
  if (!wrong.empty()) log_.fail(fmt::format("{}: {}", sample.what, wrong));
  return {};
}

Status Checker::compare_with_prefill(const Sample& sample) {
  const LayerOptions& options = layer_.options();
  const ModelConfig& model = options.model;
  const int64_t all = model.num_attention_heads, nope = model.qk_nope_head_dim, rope = model.qk_rope_head_dim;
  const int64_t d_qk = model.prefill_d_qk(), v_dim = model.v_head_dim;
  const auto bytes = static_cast<int64_t>(size_of(options.dtype));
  const Heads heads{.begin = static_cast<int32_t>(log_.num_checks % (all - std::min<int64_t>(all, kCheckedHeads) + 1)),
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
    log_.note(relative_error(sample.out + (heads.begin + i) * v_dim, out_.as<float>() + i * v_dim, v_dim),
              log_.worst_other_way, fmt::format("{}, head {}, decode", sample.what, heads.begin + i),
              "up-projected prefill");
  return {};
}

}  // namespace mla::cli::replay
