// SPDX-License-Identifier: Apache-2.0
// Tests compressed rows and keys: they do not depend on how a request is served, they are what float64 computes from
// all of its tokens, and the comparison with that notices what is wrong.
#include "mla/replay/pooled_layer.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "mla/replay/row_oracle.h"
#include "trace.h"

namespace mla::cli::replay {
namespace {

constexpr int32_t kTokens = 700, kPage = 128;

Context context_of(const char* backend) {
  ContextOptions options;
  options.num_threads = 1;
  options.backend = backend;
  return std::move(Context::create(options)).value();
}

LayerOptions options_of(const char* model, CacheFormat pool_cache) {
  LayerOptions options;
  options.model = *load_model(model);
  options.cache = options.model.caches.front().cache;
  options.pool_cache = pool_cache;
  options.page_size = kPage;
  options.num_pages = 20;
  options.chunk = kTokens;
  options.max_batch = 2;
  options.drafts = 3;
  options.max_positions = kTokens + 8;
  return options;
}

uint64_t seed_of_token(int32_t position) { return 77 * static_cast<uint64_t>(position) + 5; }

/// Serves requests of the same tokens.
class Served {
 public:
  Served(const LayerOptions& options, const char* backend)
      : context_(context_of(backend)),
        reference_context_(context_of("reference")),
        operations_(context_),
        reference_(reference_context_),
        generator_(options.model, 1, options.dtype),
        layer_(options, generator_, operations_) {}

  /// Computes tokens, those from `good` on of which are others' (drafts that will be rejected), in a layer of each
  /// kind. They stand behind `before` others of their step.
  void compress(const TokenRange& range, int32_t good, int64_t before = 0) {
    const int64_t width = layer_.options().model.d_qk();
    std::vector<uint16_t> rows(static_cast<size_t>(range.count * width));
    std::vector<int64_t> slots, positions;
    for (int32_t i = 0; i < range.count; ++i) {
      const int32_t position = range.start + i;
      const uint64_t seed = position < good ? seed_of_token(position) : ~seed_of_token(position);
      for (Compressor* compressor : layer_.compressors()) compressor->generate(generator_, seed, position, before + i);
      generator_.projected_latent(seed, position, rows.data() + i * width);
      slots.push_back(range.pages[static_cast<size_t>(position / kPage)] * kPage + position % kPage);
      positions.push_back(position);
    }
    for (size_t kind = kWindow + 1; kind < layer_.kinds().size(); ++kind) {
      const Status status = layer_.append(kind, {.latents = rows.data(), .slots = slots, .positions = positions}, {},
                                          {.ranges = std::span(&range, 1), .first = before}, kPrefillAppend, nullptr);
      ASSERT_TRUE(status.ok()) << status.message();
    }
  }
  /// Returns what the check of some window rows says.
  CheckLog compare_window(std::span<const int32_t> pages) {
    CheckLog log;
    const LayerOptions& options = layer_.options();
    const RowOracle oracle(options.model, generator_, options.dtype);
    RowFormat format(options.model, options.cache, reference_);
    const std::vector<int32_t> some = {0, 1, 511, kTokens - 2, kTokens - 1};
    EXPECT_TRUE(check_rows(
                    "row", some, layer_.rows(reference_, kWindow, pages, some), format,
                    [&](int32_t row) { return oracle.latent(seed_of_token, row); }, log)
                    .ok());
    return log;
  }
  /// Appends all tokens in one call, as if they were `shift` positions further, and returns what the check of the
  /// newest window rows and of the newest token's queries says.
  CheckLog append(std::span<const int32_t> pages, int32_t shift) {
    const LayerOptions& options = layer_.options();
    const ModelConfig& model = options.model;
    const int64_t width = model.d_qk(), heads = model.num_attention_heads, values = heads * width;
    std::vector<uint16_t> rows(static_cast<size_t>(kTokens * width)), q(static_cast<size_t>(kTokens * values)),
        turned(q.size());
    std::vector<int64_t> slots, positions;
    for (int32_t t = 0; t < kTokens; ++t) {
      generator_.projected_latent(seed_of_token(t), t, rows.data() + t * width);
      generator_.projected_query(seed_of_token(t), {.q_nope = q.data() + t * values,
                                                    .q_nope_stride_head = width,
                                                    .q_pe = q.data() + t * values + model.kv_lora_rank,
                                                    .q_pe_stride_head = width});
      slots.push_back(pages[static_cast<size_t>(t / kPage)] * kPage + t % kPage);
      positions.push_back(t + shift);
    }
    const TensorView all = contiguous(q.data(), DType::kBF16, {kTokens, heads, width});
    const Status status = layer_.append(kWindow, {.latents = rows.data(), .slots = slots, .positions = positions},
                                        {.q_nope = slice(all, 2, 0, model.kv_lora_rank),
                                         .q_pe = slice(all, 2, model.kv_lora_rank, model.qk_rope_head_dim),
                                         .out = contiguous(turned.data(), DType::kBF16, {kTokens, heads, width})},
                                        {}, kPrefillAppend, nullptr);
    EXPECT_TRUE(status.ok()) << status.message();
    CheckLog log = compare_window(pages);
    const RowOracle oracle(model, generator_, options.dtype);
    std::vector<float> got;
    for (auto value = turned.end() - values; value != turned.end(); ++value) got.push_back(bf16_to_f32(*value));
    check_queries("newest token", got, oracle.query(seed_of_token(kTokens - 1), kTokens - 1), heads, log);
    return log;
  }
  /// Returns all rows and keys of a request.
  std::vector<float> everything(std::span<const int32_t> pages) {
    std::vector<float> all;
    for (size_t kind = 1; kind < layer_.kinds().size(); ++kind) {
      if (layer_.kinds()[kind].pool != kind) continue;
      const auto rows = rows_to_check(kTokens / layer_.kinds()[kind].ratio, 1, 0);
      const auto values = layer_.rows(reference_, kind, pages, rows);
      all.insert(all.end(), values->begin(), values->end());
      if (!layer_.kinds()[kind].chooses()) continue;
      const auto keys = layer_.keys(reference_, kind, pages, rows);
      all.insert(all.end(), keys->begin(), keys->end());
    }
    return all;
  }
  CheckLog compare_with_oracle(std::span<const int32_t> pages) {
    CheckLog log;
    const LayerOptions& options = layer_.options();
    const RowOracle oracle(options.model, generator_, options.dtype);
    for (size_t kind = 1; kind < layer_.kinds().size(); ++kind) {
      const PooledKind& pool = layer_.kinds()[kind];
      if (pool.pool != kind) continue;
      const CompressorShape shape = pool_compressor(options.model, pool.ratio);
      const auto rows = rows_to_check(kTokens / pool.ratio, 1, 0);
      RowFormat format(options.model, options.pool_cache, reference_);
      EXPECT_TRUE(check_rows(
                      pool.name + " row", rows, layer_.rows(reference_, kind, pages, rows), format,
                      [&](int32_t row) { return oracle.row(shape, seed_of_token, row); }, log)
                      .ok());
      if (!pool.chooses()) continue;
      const auto of_keys = key_compressor(options.model, pool.ratio);
      RowFormat keys(reference_);
      EXPECT_TRUE(check_rows(
                      pool.name + " key", rows, layer_.keys(reference_, kind, pages, rows), keys,
                      [&](int32_t row) {
                        return of_keys ? oracle.row(*of_keys, seed_of_token, row)
                                       : oracle.key_of(oracle.pooled(shape, seed_of_token, row));
                      },
                      log)
                      .ok());
    }
    return log;
  }

 private:
  Context context_, reference_context_;
  Operations operations_, reference_;
  Generator generator_;
  PooledLayer layer_;
};

const std::vector<int32_t> kPages = {4, 2, 9, 0, 7, 3}, kSharer = {4, 2, 9, 0, 15, 11};

struct Case {
  const char* model;
  CacheFormat pool_cache;
};
constexpr Case kCases[] = {{"deepseek-v4-flash", CacheFormat::kFP8DsV4},
                           {"deepseek-v4-flash", CacheFormat::kBF16},
                           {"deepseek-v4.1-flash", CacheFormat::kFP4DsV41}};

TEST(PooledLayer, RowsDoNotDependOnHowARequestIsServed) {
  for (const Case& one : kCases)
    for (uint64_t seed = 0; seed < 3; ++seed) {
      MLA_TRACE(fmt::format("{} {} seed {}", one.model, name(one.pool_cache), seed));
      const LayerOptions options = options_of(one.model, one.pool_cache);
      Served whole(options, ""), divided(options, "");
      whole.compress({.pages = kPages, .start = 0, .count = kTokens}, kTokens);
      std::mt19937_64 random(seed);
      const auto serve = [&](const std::vector<int32_t>& pages, int32_t start, int32_t seat) {
        while (start < kTokens) {
          const bool answer = start > 520;
          const int32_t longest = std::min(kTokens - start, answer ? 4 : 200);
          const auto count = static_cast<int32_t>(1 + random() % static_cast<uint64_t>(longest));
          const auto good = answer ? static_cast<int32_t>(1 + random() % static_cast<uint64_t>(count)) : count;
          divided.compress({.pages = pages, .start = start, .count = count, .seat = seat}, start + good);
          start += good;
        }
      };
      serve(kPages, 0, 0);
      serve(kSharer, 512, 1);  // behind the first one's prefix
      const std::vector<float> expected = whole.everything(kPages);
      EXPECT_GT(expected.size(), 1000U);
      EXPECT_EQ(divided.everything(kPages), expected);
      EXPECT_EQ(divided.everything(kSharer), expected);
    }
}

TEST(PooledLayer, RowsAreWhatTheActivationsComeTo) {
  for (const Case& one : kCases)
    for (const char* backend : {"", "reference"}) {
      MLA_TRACE(fmt::format("{} {} {}", one.model, name(one.pool_cache), backend));
      Served served(options_of(one.model, one.pool_cache), backend);
      served.compress({.pages = kPages, .start = 0, .count = 333}, 333);
      served.compress({.pages = kPages, .start = 333, .count = kTokens - 333}, kTokens, 333);
      for (const CheckLog& log : {served.compare_with_oracle(kPages), served.compare_window(kPages)}) {
        EXPECT_FALSE(log.failed()) << log.failures[0];
        EXPECT_GT(log.num_rows, 0);
      }
    }
}

TEST(PooledLayer, TheComparisonNoticesWhatIsWrong) {
  for (const Case& one : kCases) {
    MLA_TRACE(fmt::format("{} {}", one.model, name(one.pool_cache)));
    // The state of another seat: the group that was begun is pooled from what lies there, which is nothing.
    Served seat(options_of(one.model, one.pool_cache), "");
    seat.compress({.pages = kPages, .start = 0, .count = 333}, 333);
    seat.compress({.pages = kPages, .start = 333, .count = kTokens - 333, .seat = 1}, kTokens);
    EXPECT_TRUE(seat.compare_with_oracle(kPages).failed());
    // A token that was rejected and not computed again.
    Served draft(options_of(one.model, one.pool_cache), "");
    draft.compress({.pages = kPages, .start = 0, .count = 334}, 333);
    draft.compress({.pages = kPages, .start = 334, .count = kTokens - 334}, kTokens);
    const CheckLog log = draft.compare_with_oracle(kPages);
    ASSERT_TRUE(log.failed());
    EXPECT_NE(log.failures[0].find("expected at most 0.0078 from what its activations come to"), std::string::npos)
        << log.failures[0];
    EXPECT_GT(log.worst_row, 1.0);
  }
}

TEST(PooledLayer, RowsAndQueriesAreNormalizedAndTurned) {
  for (const Case& one : kCases)
    for (const char* backend : {"", "reference"}) {
      MLA_TRACE(fmt::format("{} {} {}", one.model, name(one.pool_cache), backend));
      Served served(options_of(one.model, one.pool_cache), backend);
      const CheckLog right = served.append(kPages, 0);
      EXPECT_FALSE(right.failed()) << right.failures[0];
      EXPECT_EQ(right.num_queries, 64);
      EXPECT_EQ(right.num_rows, 5);
      const CheckLog wrong = served.append(kPages, 1);
      EXPECT_GT(wrong.worst_query, 1.0);
      EXPECT_GT(wrong.worst_row, 1.0);
    }
}

TEST(PooledLayer, KindsOfTheModels) {
  const auto names = [](const char* model) {
    std::vector<std::string> all;
    for (const PooledKind& kind : pooled_kinds(*load_model(model))) all.push_back(kind.name);
    return all;
  };
  EXPECT_EQ(names("deepseek-v4-flash"), (std::vector<std::string>{"window", "c4", "c128"}));
  EXPECT_EQ(names("deepseek-v4.1-flash"), (std::vector<std::string>{"window", "c2", "c1", "c1 within"}));
  const std::vector<PooledKind> kinds = pooled_kinds(*load_model("deepseek-v4.1-flash"));
  EXPECT_EQ(kinds[1].candidates, CandidateBlocks::kNone);
  EXPECT_EQ(kinds[2].candidates, CandidateBlocks::kPicks);
  EXPECT_EQ(kinds[3].candidates, CandidateBlocks::kWithin);
  EXPECT_EQ(kinds[3].pool, 2U);
}

TEST(RowsToCheck, AreAllOrTheNewestTheFirstAndOthers) {
  EXPECT_EQ(rows_to_check(3, 8, 1), (std::vector<int32_t>{0, 1, 2}));
  EXPECT_TRUE(rows_to_check(0, 8, 1).empty());
  const std::vector<int32_t> some = rows_to_check(100000, 128, 1);
  EXPECT_EQ(some.size(), 16U);
  EXPECT_EQ(some.front(), 0);
  EXPECT_EQ(some.back(), 99999);
  EXPECT_NE(some, rows_to_check(100000, 128, 2));
}

}  // namespace
}  // namespace mla::cli::replay
