// SPDX-License-Identifier: Apache-2.0
// Tests that what compress writes into caches is what append, append_rope and append_indexer write of its latents.
#include <algorithm>
#include <cmath>
#include <vector>

#include "compress_problems.h"
#include "test_cache.h"
#include "trace.h"

namespace mla::reference {
namespace {

/// Returns cosines, then sines, of `channels` rotary channels at so many positions.
std::vector<float> angles(int64_t positions, int32_t channels) {
  std::vector<float> table;
  for (int64_t p = 0; p < positions; ++p)
    for (int32_t i = 0; i < channels; ++i) {
      const double angle = static_cast<double>(p) * std::pow(10000.0, -2.0 * (i % (channels / 2)) / channels);
      table.push_back(static_cast<float>(i < channels / 2 ? std::cos(angle) : std::sin(angle)));
    }
  return table;
}

/// Holds a call of two requests whose latents are as wide as a row of a cache; `rows` are the tokens that end groups.
struct AppendProblem {
  static constexpr int64_t kTokens[] = {13, 6};

  Layer layer;
  std::vector<Sequence> sequences;
  States states;
  Call call;
  std::vector<uint8_t> latent;
  std::vector<float> cos_sin;
  std::vector<int64_t> slots, rows, row_slots, positions;

  AppendProblem(const Form& form, DType latent_dtype, int32_t d_rotary, bool interleaved, Random& random)
      : layer(form, random),
        sequences({Sequence(form, kTokens[0], random), Sequence(form, kTokens[1], random)}),
        states(form, 2, std::max(form.rows(), 1), 1),
        call(layer, states, {{&sequences[0], 0, kTokens[0], {0}}, {&sequences[1], 0, kTokens[1], {1}}}),
        latent(static_cast<size_t>(19 * form.d_latent) * size_of(latent_dtype)),
        cos_sin(d_rotary > 0 ? angles(14, d_rotary) : std::vector<float>()),
        slots(19, INT64_MAX) {
    for (int64_t b = 0, token = 0; b < 2; ++b)
      for (int64_t p = 0; p < kTokens[b]; ++p, ++token) {
        if ((p + 1) % form.ratio != 0) continue;  // nobody looks at the slot
        const auto n = static_cast<int64_t>(rows.size());
        slots[static_cast<size_t>(token)] = n % 4 == 3 ? -1 : n * 7 % 20;
        rows.push_back(token);
        row_slots.push_back(slots[static_cast<size_t>(token)]);
        positions.push_back(p + 1 - form.ratio);
      }
    call.args.latent = latent.data();
    call.args.latent_dtype = latent_dtype;
    call.args.slot_mapping = slots.data();
    call.args.cos_sin = d_rotary > 0 ? cos_sin.data() : nullptr;
    call.args.cos_sin_stride_position = d_rotary;
    call.args.max_positions = 14;
    call.args.d_rotary = d_rotary;
    call.args.interleaved = interleaved;
  }

  /// Returns the latents of the groups, one after another.
  std::vector<uint8_t> dense() const {
    const auto bytes =
        static_cast<int64_t>(layer.form.d_latent) * static_cast<int64_t>(size_of(call.args.latent_dtype));
    std::vector<uint8_t> all;
    for (int64_t row : rows) all.insert(all.end(), latent.begin() + row * bytes, latent.begin() + (row + 1) * bytes);
    return all;
  }
};

/// Returns the cache to which the other writers append the latents, as they stand in `latent`.
TestCache appended(const Variant& variant, const AppendProblem& problem) {
  const std::vector<uint8_t> dense = problem.dense();
  const core::CompressArgs& from = problem.call.args;
  TestCache cache(variant, 5, 4);
  if (from.d_rotary == 0) {
    core::AppendArgs args;
    args.num_tokens = static_cast<int64_t>(problem.rows.size());
    args.dtype = from.latent_dtype;
    args.ckv = dense.data();
    args.kpe = dense.data() + static_cast<size_t>(variant.d_ckv) * size_of(from.latent_dtype);
    args.ckv_stride_token = args.kpe_stride_token = from.d_latent;
    args.slot_mapping = problem.row_slots.data();
    args.cache = cache.view();
    append(args);
    return cache;
  }
  core::AppendRopeArgs args;
  args.num_tokens = static_cast<int64_t>(problem.rows.size());
  args.dtype = from.latent_dtype;
  args.ckv = dense.data();
  args.kpe = dense.data() + static_cast<size_t>(from.d_latent - from.d_rotary) * size_of(from.latent_dtype);
  args.ckv_stride_token = args.kpe_stride_token = from.d_latent;
  args.cos_sin = problem.cos_sin.data();
  args.cos_sin_stride_position = from.d_rotary;
  args.positions = problem.positions.data();
  args.interleaved = from.interleaved;
  args.slot_mapping = problem.row_slots.data();
  args.cache = cache.view();
  append_rope(args);
  return cache;
}

TEST(ReferenceCompress, RowsAreThoseThatTheOtherWritersAppend) {
  uint32_t seed = 0;
  for (const Variant& variant : all_variants())
    for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32})
      for (int32_t ratio : {1, 2, 4})
        for (bool rotates : {false, true}) {
          const int32_t rotary = rotates ? variant.d_kpe + variant.rotary_in_ckv : 0;
          if (rotates && rotary == 0) continue;
          MLA_TRACE(testing::Message() << variant << ' ' << name(dtype) << ", ratio " << ratio << ", rotary channels "
                                       << rotary << ", seed " << seed);
          Random random(seed++);
          const Form form = {.ratio = ratio,
                             .overlap = ratio == 4,
                             .bias = ratio > 1,
                             .d_latent = variant.d_ckv + variant.d_kpe,
                             .dtype = DType::kBF16};
          AppendProblem problem(form, dtype, rotary, seed % 3 != 0, random);
          TestCache cache(variant, 5, 4);
          problem.call.args.to = core::CompressArgs::To::kCache;
          problem.call.args.cache = cache.view();
          compress(problem.call.args);
          const TestCache expected = appended(variant, problem);
          EXPECT_EQ(cache.bytes, expected.bytes);
          EXPECT_EQ(cache.scales, expected.scales);
        }
}

/// Turns the last channels of a row, rounds them to bf16 as writers do before they choose a scale, and gives the whole
/// row in f32.
std::vector<float> turned(const std::vector<float>& row, const float* cos_sin, int32_t rotary, bool interleaved) {
  std::vector<float> out = row;
  const size_t plain = row.size() - static_cast<size_t>(rotary), half = static_cast<size_t>(rotary) / 2;
  for (size_t i = 0; i < half; ++i) {
    const size_t a = plain + (interleaved ? 2 * i : i), b = plain + (interleaved ? 2 * i + 1 : i + half);
    const float cos = cos_sin[i], sin = cos_sin[half + i];
    const volatile float ac = row[a] * cos, bs = row[b] * sin, as = row[a] * sin, bc = row[b] * cos;
    out[a] = bf16_to_f32(f32_to_bf16(ac - bs));
    out[b] = bf16_to_f32(f32_to_bf16(as + bc));
  }
  return out;
}

TEST(ReferenceCompress, KeysAreThoseThatAppendIndexerAppends) {
  uint32_t seed = 0;
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32})
    for (int32_t ratio : {1, 2, 4})
      for (int32_t rotary : {0, 64, 128})
        for (bool power_of_two : {true, false}) {
          MLA_TRACE(testing::Message() << name(dtype) << ", ratio " << ratio << ", rotary channels " << rotary
                                       << ", seed " << seed);
          Random random(seed++);
          const Form form = {.ratio = ratio, .overlap = ratio == 4, .bias = ratio > 1, .d_latent = 128};
          AppendProblem problem(form, dtype, rotary, seed % 3 != 0, random);
          std::vector<uint8_t> keys(5 * (4 * 132 + 3), 0xA5), expected = keys;  // a gap makes scales unaligned
          const auto pages = [](std::vector<uint8_t>& bytes) {
            return core::IndexerPages{.base = reinterpret_cast<std::byte*>(bytes.data()),
                                      .stride_page = 4 * 132 + 3,
                                      .num_pages = 5,
                                      .page_size = 4};
          };
          problem.call.args.to = core::CompressArgs::To::kIndexer;
          problem.call.args.indexer = pages(keys);
          problem.call.args.power_of_two_scales = power_of_two;
          compress(problem.call.args);

          Tensor latents(dtype, 19, 128);
          std::copy(problem.latent.begin(), problem.latent.end(), latents.bytes.begin());
          std::vector<float> rows;
          for (size_t i = 0; i < problem.rows.size(); ++i) {
            std::vector<float> row;
            for (int64_t c = 0; c < 128; ++c) row.push_back(static_cast<float>(latents.at(problem.rows[i], c)));
            if (rotary > 0)
              row = turned(row, &problem.cos_sin[static_cast<size_t>(problem.positions[i] * rotary)], rotary,
                           problem.call.args.interleaved);
            rows.insert(rows.end(), row.begin(), row.end());
          }
          core::AppendIndexerArgs args;
          args.num_tokens = static_cast<int64_t>(problem.rows.size());
          args.dtype = DType::kF32;
          args.k = rows.data();
          args.k_stride_token = 128;
          args.slot_mapping = problem.row_slots.data();
          args.power_of_two_scales = power_of_two;
          args.cache = pages(expected);
          append_indexer(args);
          EXPECT_EQ(keys, expected);
        }
}

}  // namespace
}  // namespace mla::reference
