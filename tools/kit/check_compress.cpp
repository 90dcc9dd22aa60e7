// SPDX-License-Identifier: Apache-2.0
// Checks compress: its latents within f32's errors, its state and what is appended beside byte for byte, and its rows
// against those that the reference makes of the latents that were given.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "kit/check_parts.h"
#include "mla/numeric.h"

namespace mla::kit {
namespace {

/// Holds a token that ends a group, and the position at which its group begins.
struct End {
  int64_t token, position;
};

std::vector<End> ends_of(const CompressSpec& spec) {
  std::vector<End> ends;
  int64_t token = 0;
  for (size_t b = 0; b < spec.kv_len.size(); ++b)
    for (int32_t i = 0; i < spec.q_len_of(b); ++i, ++token)
      if (const int64_t last = int64_t{spec.kv_len[b]} - spec.q_len_of(b) + i;
          last >= 0 && (last + 1) % spec.ratio == 0)
        ends.push_back({.token = token, .position = last - spec.ratio + 1});
  return ends;
}

/// Returns by how much a latent may be off: by one unit of its type, and by what f32 loses of the sums of up to 256
/// products, of the root and of the powers of two (2^-22 each), which is relative to the largest of the row.
double tolerance_of(DType dtype, double value, double largest) {
  const double rounding = dtype == DType::kBF16 ? 0x1p-7 : dtype == DType::kF16 ? 0x1p-10 : 0x1p-23;
  return rounding * std::abs(value) + 0x1p-25 + 2e-5 * largest;
}

/// Says what is wrong with the latents. `worst` becomes the largest error, relative to the largest of its row.
std::string judge_latents(const CompressCase& problem, const std::vector<double>& got, const std::vector<double>& want,
                          double& worst) {
  const auto d = static_cast<size_t>(problem.spec.cache.d_qk);
  for (const End& end : ends_of(problem.spec)) {
    const size_t first = static_cast<size_t>(end.token) * d;
    double largest = 0;
    for (size_t c = first; c < first + d; ++c) largest = std::max(largest, std::abs(want[c]));
    for (size_t c = first; c < first + d; ++c) {
      const double most = tolerance_of(problem.spec.latent_dtype, want[c], largest), error = std::abs(got[c] - want[c]);
      if (largest > 0) worst = std::max(worst, error / largest);
      if (!(error <= most))
        return "latent of token " + std::to_string(end.token) + ", channel " + std::to_string(c - first) + ", is " +
               std::to_string(got[c]) + ", expected " + std::to_string(want[c]) + " within " + std::to_string(most);
    }
  }
  return {};
}

/// Returns whether the rows of tokens that end no group still are as they were.
bool others_hold(const CompressCase& problem) {
  const TensorView view = problem.params().latent;
  const std::vector<End> ends = ends_of(problem.spec);
  const auto bytes = static_cast<size_t>(view.shape[1]) * size_of(view.dtype);
  auto next = ends.begin();
  for (int64_t token = 0; token < problem.num_tokens; ++token) {
    if (next != ends.end() && next->token == token) {
      ++next;
      continue;
    }
    const std::byte* row = problem.latent.data() + static_cast<size_t>(token * view.stride[0]) * size_of(view.dtype);
    if (std::any_of(row, row + bytes, [](std::byte byte) { return byte != std::byte{kUntouched}; })) return false;
  }
  return true;
}

/// Returns the latents, [T, 128], with the last channels rotated and rounded to bf16, as keys of the indexer.
std::vector<float> rotated_keys(const CompressCase& problem, const CompressParams& p, const std::vector<End>& ends) {
  constexpr int32_t kChannels = kIndexerLayout.head_dim;
  const std::vector<double> latents = to_dense(p.latent);
  std::vector<float> keys(latents.begin(), latents.end());
  const int32_t rotary = problem.spec.d_rotary(), half = rotary / 2;
  for (const End& end : ends) {
    const float* const angles = problem.cos_sin.as<float>() + end.position * p.cos_sin.stride[0];
    float* const pe = keys.data() + (end.token + 1) * kChannels - rotary;
    for (int32_t i = 0; i < half; ++i) {
      float& x = pe[p.interleaved ? 2 * i : i];
      float& y = pe[p.interleaved ? 2 * i + 1 : i + half];
      const auto product = [](float a, float b) {  // is exact in double, so that nothing fuses it into the sum
        return static_cast<float>(static_cast<double>(a) * static_cast<double>(b));
      };
      const float turned_x = product(x, angles[i]) - product(y, angles[half + i]);
      const float turned_y = product(x, angles[half + i]) + product(y, angles[i]);
      x = bf16_to_f32(f32_to_bf16(turned_x));
      y = bf16_to_f32(f32_to_bf16(turned_y));
    }
  }
  return keys;
}

TensorView channels_of(TensorView rows, int64_t first, int64_t n) {
  rows.data = static_cast<std::byte*>(rows.data) + static_cast<size_t>(first) * size_of(rows.dtype);
  rows.shape[1] = n;
  return rows;
}

/// Appends the latents, which stand in the case's buffer, by the operations that append a token's own row.
Status append_latents(const CompressCase& problem, const Context& context) {
  const CompressSpec& spec = problem.spec;
  const CompressParams p = problem.params();
  const std::vector<End> ends = ends_of(spec);
  std::vector<int64_t> slots(static_cast<size_t>(problem.num_tokens), -1), positions(slots.size(), 0);
  for (const End& end : ends) {
    slots[static_cast<size_t>(end.token)] = problem.slot_mapping.as<int64_t>()[end.token];
    positions[static_cast<size_t>(end.token)] = end.position;
  }
  const TensorView slot_mapping = contiguous(slots.data(), DType::kI64, {problem.num_tokens});
  if (spec.to == CompressSpec::To::kIndexer) {
    const std::vector<float> keys = rotated_keys(problem, p, ends);
    AppendIndexerParams append;
    append.k = contiguous(const_cast<float*>(keys.data()), DType::kF32, {problem.num_tokens, kIndexerLayout.head_dim});
    append.slot_mapping = slot_mapping;
    append.power_of_two_scales = p.power_of_two_scales;
    append.cache = p.indexer;
    return run(context, append);
  }
  if (spec.d_rotary() == 0) {
    AppendParams append;
    append.ckv = channels_of(p.latent, 0, spec.cache.d_ckv());
    if (spec.cache.d_kpe() > 0) append.kpe = channels_of(p.latent, spec.cache.d_ckv(), spec.cache.d_kpe());
    append.slot_mapping = slot_mapping;
    append.cache = p.cache;
    return run(context, append);
  }
  AppendRopeParams append;
  append.ckv = channels_of(p.latent, 0, spec.cache.d_plain());
  append.kpe = channels_of(p.latent, spec.cache.d_plain(), spec.cache.d_rotary());
  append.cos_sin = p.cos_sin;
  append.positions = contiguous(positions.data(), DType::kI64, {problem.num_tokens});
  append.interleaved = p.interleaved;
  append.slot_mapping = slot_mapping;
  append.cache = p.cache;
  return run(context, append);
}

std::string first_difference(const char* what, std::span<const std::byte> given, std::span<const std::byte> expected) {
  const auto [at, expected_at] = std::mismatch(given.begin(), given.end(), expected.begin());
  if (at == given.end()) return {};
  return std::string("byte ") + std::to_string(at - given.begin()) + " of " + what + " is " +
         std::to_string(std::to_integer<int>(*at)) + ", expected " + std::to_string(std::to_integer<int>(*expected_at));
}

/// Judges the given outputs. Those of the reference stand in the case's buffers.
std::string judge(const CompressCase& problem, const Bytes& given, const Context& reference, double& worst) {
  const std::vector<const Buffer*> outputs = problem.outputs();
  const std::vector<const Buffer*> beside = problem.append ? problem.append->outputs() : std::vector<const Buffer*>();
  const Bytes state(problem.state.bytes().begin(), problem.state.bytes().end()), appended = bytes_of(beside);
  const std::vector<double> want = to_dense(problem.params().latent);
  put_back(given, outputs);
  if (std::string failure = first_difference("the state", problem.state.bytes(), state); !failure.empty())
    return failure;
  if (std::string failure = first_difference("what is appended beside", bytes_of(beside), appended); !failure.empty())
    return failure;
  if (!gaps_hold(problem.latent, problem.params().latent, kUntouched) || !others_hold(problem))
    return "wrote into the gaps of latent";
  if (std::string failure = judge_latents(problem, to_dense(problem.params().latent), want, worst); !failure.empty())
    return failure;
  if (problem.spec.to == CompressSpec::To::kLatents) return {};
  const std::vector<const Buffer*> rows = problem.rows();
  const Bytes given_rows = bytes_of(rows);
  for (const Buffer* buffer : rows) buffer->fill(kUntouched);
  if (const Status status = append_latents(problem, reference); !status.ok()) return "reference: " + status.message();
  return first_difference("the rows", given_rows, bytes_of(rows));
}

}  // namespace

Outcome check_outputs(const CompressCase& problem, std::string_view backend) {
  const Result<Context> reference = reference_context();
  if (!reference.ok()) return failed(outcome_of(problem.spec, backend), "reference: " + reference.status().message());
  double worst = 0;
  Outcome outcome = check_against_reference(
      problem, backend, [&](const Bytes& given) { return judge(problem, given, *reference, worst); });
  outcome.error.max_rel = worst;
  return outcome;
}

Outcome check(const Context& context, const CompressSpec& spec) { return check_direct<CompressCase>(context, spec); }

}  // namespace mla::kit
