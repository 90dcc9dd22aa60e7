// SPDX-License-Identifier: Apache-2.0
// Tests compress on every row of the CPU and on emulated GPUs: the compressors of the models, random problems, and that
// neither the way in which a prompt is divided nor rejected drafts change a bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "device_test.h"
#include "turns.h"

namespace mla {
namespace {

using kit::CompressSpec;
using To = CompressSpec::To;

CompressSpec compressor(int32_t ratio, bool overlap, CacheFormat format) {
  CompressSpec spec;
  spec.ratio = ratio;
  spec.overlap = overlap;
  spec.cache = kit::usual_cache(format);
  if (!spec.cache.packed()) spec.cache.d_qk = spec.cache.d_v = 512;
  spec.columns = (2 * ratio * (overlap ? 2 : 1) + spec.block_size - 1) / spec.block_size;
  spec.dtype = DType::kF32;
  return spec;
}

CompressSpec key_compressor(int32_t ratio, bool overlap, bool rotary) {
  CompressSpec spec = compressor(ratio, overlap, CacheFormat::kBF16);
  spec.to = To::kIndexer;
  spec.cache.d_qk = spec.cache.d_v = kIndexerLayout.head_dim;
  spec.rotary = rotary;
  spec.norm = rotary;  // GLM-5.3 normalizes its keys before they are pooled
  return spec;
}

/// Returns the compressors of DeepSeek V4 (C4, C128 and the indexer's), of V4.1 and of GLM-5.3, and V4's with bf16
/// rows.
std::vector<CompressSpec> compressors() {
  std::vector<CompressSpec> all = {
      compressor(4, true, CacheFormat::kFP8DsV4),
      compressor(128, false, CacheFormat::kFP8DsV4),
      compressor(4, true, CacheFormat::kBF16),
      compressor(1, false, CacheFormat::kFP4DsV41),
      compressor(2, false, CacheFormat::kFP4DsV41),
      compressor(2, false, CacheFormat::kFP8DsV41),
      compressor(4, true, CacheFormat::kNvFP4DsV4),
      compressor(4, false, CacheFormat::kFP8Nope),
      key_compressor(4, true, true),
      key_compressor(4, false, false),
  };
  for (CompressSpec& spec : all) spec.bias = spec.ratio > 2;
  return all;
}

/// Gives the batches of a server: a step of decode, drafts, pieces of prompts, and requests that only pad.
void for_batches(CompressSpec spec, const std::function<void(const CompressSpec&)>& f) {
  const int32_t r = spec.ratio;
  spec.q_len = {1};
  spec.kv_len = {4 * r, 4 * r - 1, 4 * r + 1, 1, r};
  f(spec);
  spec.q_len = {5, 0, 3, 2, 5};
  spec.kv_len = {4 * r + 2, 0, 2 * r, 1, 5};
  f(spec);
  spec.q_len = {3 * r + 1, 2 * r, 1};
  spec.kv_len = {5 * r, 2 * r, 300};
  f(spec);
}

class CompressTest : public BackendTest<Op::kCompress> {};
MLA_FOR_EVERY_ROW(CompressTest, Op::kCompress);

TEST_P(CompressTest, CompressorsOfTheModels) {
  for (const CompressSpec& spec : compressors())
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      CompressSpec typed = spec;
      typed.dtype = dtype;
      for_batches(typed, [&](const CompressSpec& batch) { expect_ok(batch); });
    }
}

TEST_P(CompressTest, RandomProblems) {
  for (uint64_t seed = 26000; seed < 26030; ++seed)
    for (CacheFormat format : kAllCacheFormats)
      if (has_turn(format, seed)) expect_ok(kit::random_compress_spec(seed, format));
}

class CompressOnDevice : public DeviceTest<Op::kCompress> {};
MLA_FOR_EVERY_DEVICE(CompressOnDevice, Op::kCompress);

TEST_P(CompressOnDevice, CompressorsOfTheModels) {
  for (const CompressSpec& spec : compressors())
    for_batches(spec, [&](const CompressSpec& batch) { expect_ok(batch); });
}

/// Returns what is appended beside the latents of a batch: keys as V4 and V4.1 have them, which the kernel of the
/// latents' rows takes, and others, with and without queries.
std::vector<kit::AppendRopeSpec> appends_beside(const CompressSpec& compress) {
  using Norm = kit::AppendRopeSpec::Norm;
  std::vector<kit::AppendRopeSpec> all;
  for (CacheFormat format : {CacheFormat::kFP8DsV4, CacheFormat::kFP8DsV41, CacheFormat::kFP8DsMla,
                             CacheFormat::kNvFP4DsV4, CacheFormat::kBF16})
    for (int32_t heads : {0, 3}) {
      kit::AppendRopeSpec spec;
      spec.cache = kit::usual_cache(format);
      spec.num_tokens = compress.q_len.size() == 1 ? compress.batch_size() * compress.q_len[0]
                                                   : std::accumulate(compress.q_len.begin(), compress.q_len.end(), 0);
      spec.num_pages = spec.num_tokens / spec.cache.page_size + 2;
      spec.num_heads = heads;
      spec.q_norm = heads > 0;
      spec.norm = kv_layout(format).value_has_rope ? Norm::kRow : heads > 0 ? Norm::kNone : Norm::kLatent;
      spec.max_positions = 500;
      all.push_back(spec);
    }
  all.front().dtype = DType::kF32;  // and those that the kernel leaves to append_rope's own
  all[2].row_extra = 3;
  all[2].interleaved = false;
  return all;
}

/// Runs a case's parameters in two calls.
void run_apart(const Context& context, CompressParams params) {
  const AppendRopeParams append = std::exchange(params.append, {});
  if (append.ckv.given()) MLA_EXPECT_OK(run(context, append));
  MLA_EXPECT_OK(run(context, params));
}

/// Checks that one call leaves the bits of two. `change` makes of the case what no spec says.
void expect_bits_of_two_calls(const Context& context, const CompressSpec& spec,
                              const std::function<void(const kit::CompressCase&)>& change = nullptr) {
  const kit::CompressCase problem(spec);
  if (change) change(problem);
  std::vector<std::vector<std::byte>> apart;
  run_apart(context, problem.params());
  for (const kit::Buffer* buffer : problem.outputs()) apart.push_back(bits_of(*buffer));
  problem.reset_outputs();
  MLA_EXPECT_OK(run(context, problem.params()));
  for (size_t i = 0; i < apart.size(); ++i)
    EXPECT_TRUE(bits_of(*problem.outputs()[i]) == apart[i]) << "output " << i << " of " << describe(spec);
}

/// Calls f(spec) for compressors of the models and batches, each with some of what is appended beside.
void for_appends(const std::function<void(const CompressSpec&)>& f) {
  size_t turn = 0;
  for (const CompressSpec& compressor : compressors())
    for_batches(compressor, [&](CompressSpec batch) {
      const std::vector<kit::AppendRopeSpec> all = appends_beside(batch);
      batch.append = all[turn * 3 % all.size()];
      batch.seed = ++turn;
      f(batch);
    });
}

TEST_P(CompressTest, AppendsBesideTheLatents) {
  for_appends([&](const CompressSpec& spec) {
    expect_ok(spec);
    expect_bits_of_two_calls(context(), spec);
  });
}

TEST_P(CompressOnDevice, AppendsBesideTheLatents) {
  for_appends([&](const CompressSpec& spec) {
    expect_ok(spec);
    expect_bits_of_two_calls(context(), spec);
  });
}

TEST_P(CompressOnDevice, PaddingAndWildSlots) {
  for (CacheFormat format : {CacheFormat::kFP8DsV4, CacheFormat::kFP8DsV41}) {
    CompressSpec spec = compressor(4, true, format);
    spec.q_len = {7, 6};
    spec.kv_len = {12, 9};
    spec.append = kit::AppendRopeSpec();
    spec.append->cache = kit::usual_cache(format);
    spec.append->num_heads = 0;
    spec.append->num_tokens = 13;
    spec.append->norm = kit::AppendRopeSpec::Norm::kRow;
    expect_bits_of_two_calls(context(), spec, [&](const kit::CompressCase& problem) {
      problem.qo_indptr.as<int32_t>()[2] = 11;  // two rows belong to no request, as in a captured batch
      auto* const slots = problem.append->slot_mapping.as<int64_t>();
      slots[0] = INT64_MIN;
      slots[3] = INT64_MAX;
      slots[4] = problem.params().append.cache.page_size * int64_t{spec.append->num_pages};
      slots[12] = -1;
    });
  }
}

/// Holds the tokens of one request, and what its calls have made of them.
class Sequence {
 public:
  Sequence(const CompressSpec& spec, int32_t num_tokens) : spec_(spec), given_(whole(spec, num_tokens)) {
    const auto rows = static_cast<size_t>(num_tokens) * static_cast<size_t>(spec.cache.d_qk);
    latents_.assign(rows * size_of(spec.latent_dtype), std::byte{0});
  }

  /// Appends tokens `from` ... `to` - 1, of which those from `good` on are drafts that will be rejected: their values
  /// are others'.
  void append(const Context& context, int32_t from, int32_t to, int32_t good) {
    CompressParams p = given_.params();
    const int64_t n = to - from;
    std::vector<std::byte> kv = rows_of(p.kv, from, to, good), score = rows_of(p.score, from, to, good);
    int32_t kv_len = to;
    p.kv.data = kv.data();
    p.score.data = p.score.given() ? score.data() : nullptr;
    p.kv.shape[0] = n;
    p.score.shape[0] = n;
    p.qo_indptr = {};
    p.kv_len = contiguous(&kv_len, DType::kI32, {1});
    p.latent.shape[0] = p.slot_mapping.shape[0] = n;
    p.latent.data = latents_.data() + static_cast<size_t>(from * p.latent.stride[0]) * size_of(p.latent.dtype);
    p.slot_mapping.data = static_cast<int64_t*>(p.slot_mapping.data) + from;
    MLA_EXPECT_OK(run(context, p));
  }

  /// Returns the latents of groups of the first `tokens` tokens, and their rows.
  std::vector<std::byte> made(int32_t tokens) const {
    std::vector<std::byte> all;
    const size_t row = static_cast<size_t>(spec_.cache.d_qk) * size_of(spec_.latent_dtype);
    for (int32_t last = spec_.ratio - 1; last < tokens; last += spec_.ratio)
      all.insert(all.end(), latents_.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(last) * row),
                 latents_.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(last + 1) * row));
    for (const kit::Buffer* buffer : given_.memory.written())
      all.insert(all.end(), buffer->bytes().begin(), buffer->bytes().end());
    return all;
  }

 private:
  static CompressSpec whole(CompressSpec spec, int32_t num_tokens) {
    spec.q_len = spec.kv_len = {num_tokens};
    spec.skip_share = 0;
    return spec;
  }

  static std::vector<std::byte> rows_of(const TensorView& view, int32_t from, int32_t to, int32_t good) {
    std::vector<std::byte> rows;
    if (!view.given()) return rows;
    const size_t row = static_cast<size_t>(view.stride[0]) * size_of(view.dtype);
    for (int32_t token = from; token < to; ++token) {
      const auto* const data = static_cast<const std::byte*>(view.data) + static_cast<size_t>(token) * row;
      rows.insert(rows.end(), data, data + row);
      if (token >= good)
        for (size_t i = rows.size() - row + size_of(view.dtype) - 1; i < rows.size(); i += size_of(view.dtype))
          rows[i] ^= std::byte{0x80};  // the other sign
    }
    return rows;
  }

  CompressSpec spec_;
  kit::CompressCase given_;
  std::vector<std::byte> latents_;
};

/// Checks that calls of any lengths, each followed by drafts that are rejected, make what one call makes.
void expect_same_bits(const Context& context, const CompressSpec& spec, int32_t num_tokens) {
  Sequence once(spec, num_tokens);
  once.append(context, 0, num_tokens, num_tokens);
  const std::vector<std::byte> expected = once.made(num_tokens);
  kit::Random random(spec.seed);
  const int32_t span = spec.ratio * (spec.overlap ? 2 : 1);
  const auto most_drafts = static_cast<int32_t>(int64_t{spec.num_columns()} * spec.block_size - span + 1);
  for (int round = 0; round < 6; ++round) {
    Sequence parts(spec, num_tokens);
    for (int32_t at = 0; at < num_tokens;) {
      const int32_t longest = std::min(num_tokens - at, round % 2 == 0 ? 3 : span + 3);
      const auto n = static_cast<int32_t>(round == 0 ? 1 : random.integer(1, longest));
      const auto drafts = static_cast<int32_t>(
          round < 2 ? 0 : random.integer(0, std::min(num_tokens - at - n, std::max(most_drafts, 0))));
      parts.append(context, at, at + n + drafts, at + n);
      at += n;
    }
    EXPECT_EQ(parts.made(num_tokens), expected) << describe(spec) << ", round " << round;
  }
}

TEST_P(CompressTest, CallsAndRejectedDraftsChangeNoBit) {
  for (CompressSpec spec : compressors()) {
    if (spec.ratio == 1) continue;
    expect_same_bits(context(), spec, 3 * spec.ratio + 1);
    spec.columns = 0;  // a state of pages
    expect_same_bits(context(), spec, 3 * spec.ratio + 1);
  }
}

TEST(CompressOnGpu, CallsAndRejectedDraftsChangeNoBit) {
  Result<Context> context =
      Context::create({.num_threads = 2, .affinity = {}, .backend = "cuda_portable", .device = "emulated:sm90"});
  MLA_EXPECT_OK(context);
  for (const CompressSpec& spec : compressors())
    if (spec.ratio > 1) expect_same_bits(*context, spec, 3 * spec.ratio + 1);
}

}  // namespace
}  // namespace mla
