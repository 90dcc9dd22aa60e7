// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/checker.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <unordered_map>

#include "mla/numeric.h"

namespace mla::cli::replay {
namespace {

// Up-projecting a long context again for every head would cost more than the step that is checked.
constexpr int32_t kCheckedHeads = 4;
constexpr int32_t kReferenceHeads = 1;
constexpr int32_t kTokensOfRow = 4;  // rows of latents are many, so a check reads a share of them
// Logits may differ by this share of the largest: their sums are in another order.
constexpr float kLogitSlack = 1e-4F;

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

std::string judge_selection(std::span<const float> logits, std::span<const int32_t> positions, int32_t topk,
                            const std::optional<KeyBlocks>& within) {
  std::vector<bool> offered(logits.size(), !within);
  if (within)
    for (int32_t block : within->blocks)
      for (int64_t key = int64_t{block} * within->block_size;
           block >= 0 && key < std::min((int64_t{block} + 1) * within->block_size, std::ssize(logits)); ++key)
        offered[static_cast<size_t>(key)] = true;
  std::vector<float> sorted;
  float largest = 0.0F;
  for (size_t key = 0; key < logits.size(); ++key) {
    largest = std::max(largest, std::abs(logits[key]));
    if (offered[key]) sorted.push_back(logits[key]);
  }
  const size_t expected = std::min(sorted.size(), static_cast<size_t>(topk));
  if (positions.size() != expected)
    return fmt::format("expected {} selected keys of {}, got {}", expected, sorted.size(), positions.size());
  if (expected == 0) return {};
  std::nth_element(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(expected - 1), sorted.end(),
                   std::greater<>());
  const float last = sorted[expected - 1], slack = kLogitSlack * largest;
  std::set<int32_t> seen;
  for (int32_t position : positions) {
    if (position < 0 || position >= std::ssize(logits)) return "a selected key is none of the request's";
    if (!offered[static_cast<size_t>(position)])
      return fmt::format("key {} was selected, which is in none of the candidate blocks", position);
    if (!seen.insert(position).second) return fmt::format("key {} was selected twice", position);
    const float logit = logits[static_cast<size_t>(position)];
    if (!(logit >= last - slack))
      return fmt::format("key {} was selected, whose logit {:.6g} is below the last of the largest {}, {:.6g}",
                         position, logit, expected, last);
  }
  return {};
}

std::string judge_blocks(std::span<const float> logits, const KeyBlocks& chosen, int32_t count) {
  std::vector<float> largest;  // of each block
  float all = 0.0F;
  for (size_t key = 0; key < logits.size(); ++key) {
    if (key % static_cast<size_t>(chosen.block_size) == 0) largest.push_back(logits[key]);
    largest.back() = std::max(largest.back(), logits[key]);
    all = std::max(all, std::abs(logits[key]));
  }
  const auto given = static_cast<size_t>(std::ranges::find(chosen.blocks, -1) - chosen.blocks.begin());
  const size_t expected = std::min(largest.size(), static_cast<size_t>(count));
  if (given != expected)
    return fmt::format("expected {} candidate blocks of {}, got {}", expected, largest.size(), given);
  if (expected == 0) return {};
  const auto newest = static_cast<int32_t>(std::ssize(largest) - 1);
  largest.back() = std::numeric_limits<float>::infinity();
  std::vector<float> sorted = largest;
  std::ranges::nth_element(sorted, sorted.begin() + static_cast<std::ptrdiff_t>(expected - 1), std::greater<>());
  const float last = sorted[expected - 1];
  std::set<int32_t> seen;
  for (int32_t block : chosen.blocks.first(given)) {
    if (block < 0 || block > newest) return "a candidate block is none of the request's";
    if (!seen.insert(block).second) return fmt::format("block {} is a candidate twice", block);
    if (const float logit = largest[static_cast<size_t>(block)]; !(logit >= last - kLogitSlack * all))
      return fmt::format("block {} is a candidate, whose largest logit {:.6g} is below that of the last, {:.6g}", block,
                         logit, last);
  }
  if (!seen.contains(newest)) return "the block of the newest key is no candidate";
  return {};
}

Checker::Checker(Layer& layer, const Generator& generator, Operations& operations, Operations& reference,
                 Projector& projector)
    : layer_(layer),
      operations_(operations),
      reference_(reference),
      projector_(projector),
      oracle_(layer.options().model, generator, layer.options().dtype) {
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
Status Checker::compare_with_reference(const Sample& sample, const TensorView& q_nope, const void* o) {
  const LayerOptions& options = layer_.options();
  const int64_t heads = options.model.num_attention_heads, rank = options.model.kv_lora_rank;
  const int64_t head = log_.num_checks % heads;
  std::vector<float> expected(static_cast<size_t>(rank));
  TensorView pe = q_pe(sample);
  if (pe.given()) pe = slice(pe, 1, head, kReferenceHeads);
  const TensorView one = slice(q_nope, 1, head, kReferenceHeads);
  const TensorView out = contiguous(expected.data(), DType::kF32, {1, kReferenceHeads, rank});
  Status status =
      sample.slots != nullptr
          ? layer_.decode_slots(reference_, one, pe, contiguous(sample.slots, DType::kI32, {1, layer_.list_width()}),
                                out, Phase::kCheck, nullptr)
          : layer_.decode(reference_, one, pe, std::span(&sample.token, 1), out, nullptr);
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
  return compare_with_reference(sample, latent_row(absorbed_.data()), o_.data());
}

Status Checker::check_decode(const Sample& sample, const Decoded& decoded) {
  ++log_.num_checks;
  const ModelConfig& model = layer_.options().model;
  const int32_t visible = sample.token.start + 1;
  if (turns(model)) check_query(sample, decoded);
  if (sample.seed_of)
    if (Status status = check_cached(sample); !status.ok()) return status;
  if (sample.slots != nullptr)
    if (Status status = check_selection(sample); !status.ok()) return status;
  if (sample.slots == nullptr || visible <= layer_.options().topk)
    if (Status status = compare_with_prefill(sample); !status.ok() || layer_.was_cut_short()) return status;
  const TensorView q =
      contiguous(decoded.q, layer_.options().dtype, {1, model.num_attention_heads, int64_t{model.d_qk()}});
  return compare_with_reference(sample, slice(q, 2, 0, model.kv_lora_rank), decoded.o);
}

// The latent part goes to attention as it is, the other one turned.
void Checker::check_query(const Sample& sample, const Decoded& decoded) {
  const LayerOptions& options = layer_.options();
  const int64_t heads = options.model.num_attention_heads, rank = options.model.kv_lora_rank;
  const int64_t d_qk = options.model.d_qk();
  const std::vector<float> absorbed = to_f32(decoded.absorbed, options.dtype, heads * rank);
  const std::vector<float> q = to_f32(decoded.q, options.dtype, heads * d_qk);
  std::vector<float> latent, turned;
  for (auto head = q.begin(); head != q.end(); head += d_qk) {
    latent.insert(latent.end(), head, head + rank);
    turned.insert(turned.end(), head + rank, head + d_qk);
  }
  check_queries(sample.what, latent, std::vector<double>(absorbed.begin(), absorbed.end()), heads, log_);
  check_queries(sample.what, turned, oracle_.query(sample.seed, sample.token.start), heads, log_);
}

// Returns the keys that the chosen tokens belong to. Where keys stand for several tokens, all tokens of a key must be
// there, and those of the group that is not complete; if not, `wrong` says so.
std::vector<int32_t> Checker::chosen_keys(const Sample& sample, std::string& wrong) const {
  const LayerOptions& options = layer_.options();
  const std::span slots(sample.slots, static_cast<size_t>(layer_.list_width()));
  const std::vector<int32_t> positions = positions_of(slots, sample.token.pages, options.page_size);
  const int32_t pooled = index_pooled(options.model), visible = sample.token.start + 1;
  if (pooled == 1) return positions;
  std::map<int32_t, int32_t> tokens_of;  // by key
  for (int32_t position : positions) {
    if (position < 0 || position >= visible) wrong = "a selected token is none that the query sees";
    ++tokens_of[position / pooled];
  }
  if (const int32_t rest = visible % pooled; rest > 0) {
    if (tokens_of[visible / pooled] != rest)
      wrong = fmt::format("expected the {} tokens of the incomplete group, got {}", rest, tokens_of[visible / pooled]);
    tokens_of.erase(visible / pooled);
  }
  std::vector<int32_t> keys;
  for (const auto& [key, tokens] : tokens_of) {
    if (tokens != pooled) wrong = fmt::format("expected all {} tokens of key {}, got {}", pooled, key, tokens);
    keys.push_back(key);
  }
  return keys;
}

Status Checker::check_selection(const Sample& sample) {
  const auto logits = layer_.indexer_logits(reference_, sample.indexer, sample.token);
  if (!logits.ok()) return logits.status();
  std::string wrong;
  const std::vector<int32_t> keys = chosen_keys(sample, wrong);
  if (wrong.empty())
    wrong = judge_selection(*logits, keys, layer_.options().topk / index_pooled(layer_.options().model));
  if (!wrong.empty()) log_.fail(fmt::format("{}: {}", sample.what, wrong));
  return {};
}

Status Checker::check_cached(const Sample& sample) {
  const LayerOptions& options = layer_.options();
  const int32_t visible = sample.token.start + 1;
  const std::vector<int32_t> tokens = rows_to_check(visible, kTokensOfRow, static_cast<uint64_t>(log_.num_checks));
  RowFormat format(options.model, options.cache, reference_);
  Status status = check_rows(
      sample.what + ", row", tokens, layer_.rows(reference_, sample.token.pages, tokens), format,
      [&](int32_t row) { return oracle_.latent(sample.seed_of, row); }, log_);
  if (!status.ok() || sample.slots == nullptr) return status;
  const Compressor* compressor = layer_.key_compressor();
  const int32_t ratio = compressor != nullptr ? compressor->shape().ratio : 1;
  const std::vector<int32_t> keys =
      rows_to_check(visible / ratio, ratio * kTokensOfRow, static_cast<uint64_t>(log_.num_checks));
  RowFormat of_keys(reference_);
  return check_rows(
      sample.what + ", key", keys, layer_.keys(reference_, sample.token.pages, keys), of_keys,
      [&](int32_t key) {
        return compressor != nullptr ? oracle_.row(compressor->shape(), sample.seed_of, key)
                                     : oracle_.key_of(oracle_.projected(sample.seed_of, key));
      },
      log_);
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
