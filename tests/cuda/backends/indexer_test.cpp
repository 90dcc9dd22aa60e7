// SPDX-License-Identifier: Apache-2.0
// Tests append_indexer, indexer_logits and indexer_top_k on an emulated GPU against the reference.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "cuda/attention/block_rows.h"
#include "cuda/backends/portable/operations.h"
#include "cuda/backends/sm90/operations.h"
#include "cuda/common/memory.h"
#include "reference/cache_rows.h"
#include "reference/reference.h"
#include "reference/scalar.h"
#include "trace.h"

namespace mla::indexer_test {
namespace {

using namespace mla::writers_test;  // NOLINT(google-build-using-namespace): random problems and their memory

constexpr int32_t kDim = kIndexerLayout.head_dim;

TEST(CudaAppendIndexer, LeavesTheBytesOfTheReference) {
  for (uint64_t seed = 0; seed < 24; ++seed) {
    MLA_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    Memory memory(random);
    const int32_t page_size = random.of({1, 7, 64}), num_pages = random.integer(1, 6);
    const IndexerFormat format = random.of({IndexerFormat::kFP8, IndexerFormat::kMXFP4});
    const int64_t stride = indexer_page_bytes(page_size, format) + random.of({0, 0, 4, 3, 13}),
                  width = kDim + random.of({0, 5});
    core::AppendIndexerArgs args = {
        .num_tokens = random.integer(0, page_size * num_pages),
        .dtype = random.of({DType::kF32, DType::kBF16, DType::kF16}),
        .k_stride_token = width,
        .power_of_two_scales = random.chance(2),
        .cache = {memory.bytes(num_pages * stride, random.of({0, 1, 4})), stride, num_pages, page_size, format}};
    args.k = memory.elements(args.dtype, args.num_tokens * width, random.integer(0, 3));
    std::vector<int64_t> slots;
    for (int64_t t = 0; t < args.num_tokens; ++t)
      slots.push_back(random.chance(8) ? -random.integer(1, 5) : num_pages * page_size - 1 - t);
    args.slot_mapping = memory.list(slots);
    TestQueue queue(seed);
    ASSERT_NO_FATAL_FAILURE(expect_same_bytes(
        memory, [&] { reference::append_indexer(args); }, [&] { return run_append_indexer(args, queue); }));
  }
}

/// Holds what a test asks for; everything else is random.
struct Shape {
  int32_t num_heads;
  DType q_dtype;
  int32_t most_keys = 400;
  IndexerFormat format = IndexerFormat::kFP8;
  Compute compute = Compute::kDefault;
  bool for_copies = false;  // pages, queries and strides that tensor copies take, and neither lists nor ranges
  int32_t binades = 30;     // between the largest and the smallest scale of a key of MXFP4
};

/// Holds ragged requests over shuffled pages, with slots that no request owns full of NaN, and tokens of no request.
class Problem {
 public:
  Problem(Random& random, Memory& memory, const Shape& shape)
      : random_(random),
        memory_(memory),
        for_copies_(shape.for_copies),
        binades_(shape.binades),
        top_scale_(random.of({140, 140, 10})) {
    args.batch_size = for_copies_ ? random.of({1, 3, 5, 40}) : random.integer(1, 4);
    args.num_heads = shape.num_heads;
    args.q_dtype = shape.q_dtype;
    args.causal = !random.chance(4);
    args.cache.page_size = for_copies_ ? random.of({64, 64, 128, 256}) : random.of({1, 3, 64, 64, 256});
    args.pages.page_size = args.cache.page_size;
    args.cache.format = shape.format;
    args.compute = shape.compute;
    lay_out_requests(shape.most_keys);
    fill_cache();
    fill_queries();
    args.num_logits = shape.most_keys + random.of({0, 0, 290});
    if (!for_copies_) choose_keys();
    args.logits_stride_token = args.num_logits + random.integer(0, 3);
    args.logits_dtype = shape.num_heads > cuda::kMostHeadsOfShortLogits
                            ? DType::kF32
                            : random.of({DType::kF32, DType::kF32, DType::kBF16, DType::kF16});
    const auto size = static_cast<int64_t>(size_of(args.logits_dtype));
    args.logits = memory.bytes(logits_size() * size, size * random.integer(0, 1));
    clear();
  }

  core::IndexerLogitsArgs args;

  int64_t logits_size() const { return args.num_tokens * args.logits_stride_token; }
  std::vector<float> logits() const {
    std::vector<float> values;
    for (int64_t i = 0; i < logits_size(); ++i) values.push_back(reference::load(args.logits, args.logits_dtype, i));
    return values;
  }
  /// Sets all logits, and what lies between rows, to 7.
  void clear() const {
    for (int64_t i = 0; i < logits_size(); ++i) reference::store(7.0F, args.logits_dtype, i, args.logits);
  }
  int32_t visible(int32_t request, int32_t token) const {
    const int32_t later = args.queries.begin(request) + args.queries.len(request) - 1 - token;
    return std::max(0, args.pages.kv_len[request] - (args.causal ? later : 0)) / args.ratio;
  }

  /// Applies the token's own bounds.
  void bound(int32_t request, int32_t token, int32_t& start, int32_t& end) const {
    const int32_t keys = args.pages.kv_len[request] / args.ratio;
    if (args.key_end != nullptr) end = std::clamp(args.key_end[token], 0, keys);
    if (args.key_begin != nullptr) start = std::clamp(args.key_begin[token], 0, end);
  }

  /// Returns how much f32 arithmetic may be off: a few roundings of the largest |q| |k| scale, summed over heads.
  std::vector<double> tolerances() const {
    std::vector<double> result(static_cast<size_t>(args.num_tokens));
    for (int32_t request = 0; request < args.batch_size; ++request) {
      double largest = 0;
      for (int32_t j = 0; j < num_keys_[static_cast<size_t>(request)]; ++j)
        largest = std::max(largest, key_size(request, j));
      for (int32_t i = 0; i < args.queries.len(request); ++i) {
        const int64_t token = args.queries.begin(request) + i;
        double sum = 0;
        for (int64_t h = 0; h < args.num_heads; ++h)
          sum += std::fabs(double{args.weights[token * args.weights_stride_token + h]}) *
                 norm(args.q, args.q_dtype, token * args.q_stride_token + h * args.q_stride_head);
        result[static_cast<size_t>(token)] = 0x1p-24 * (8 + 2 * std::sqrt(double(args.num_heads))) * sum * largest;
      }
    }
    return result;
  }

 private:
  void lay_out_requests(int32_t most_keys) {
    const int32_t width = (most_keys + args.pages.page_size - 1) / args.pages.page_size;
    args.cache.num_pages = args.batch_size * width + 1;
    std::vector<int32_t> table, kv_indptr = {0}, qo_indptr = {0}, kv_len;
    const int32_t uniform = random_.chance(3) ? random_.integer(1, 5) : 0;
    args.ratio = random_.of({1, 1, 2, 4, 128});
    for (int32_t request = 0; request < args.batch_size; ++request) {
      num_keys_.push_back(random_.chance(5) ? 0 : random_.integer(0, most_keys));
      kv_len.push_back(num_keys_.back() * args.ratio + random_.integer(0, args.ratio - 1));
      for (int32_t i = 0; i < width; ++i)  // pages of the requests take turns; behind the last in use no page is named
        table.push_back(i * args.pages.page_size < num_keys_.back() ? i * args.batch_size + request : 1 << 30);
      kv_indptr.push_back(width * (request + 1));
      qo_indptr.push_back(qo_indptr.back() + (uniform > 0 ? uniform : random_.integer(0, 5)));
    }
    args.num_tokens = qo_indptr.back();
    args.queries.uniform_len = uniform;
    if (uniform == 0) {
      args.queries.indptr = memory_.list(qo_indptr);
      args.num_tokens += random_.integer(0, 2);  // of no request: their rows stay as they are
    }
    args.pages.batch_size = args.batch_size;
    args.pages.table = memory_.list(table);
    args.pages.kv_len = memory_.list(kv_len);
    if (random_.chance(2))
      args.pages.kv_indptr = memory_.list(kv_indptr);
    else
      args.pages.table_stride_request = width;
  }

  void choose_keys() {
    if (random_.chance(3)) list_blocks();
    if (random_.chance(3)) args.key_begin = bounds();
    if (random_.chance(3)) args.key_end = bounds();
  }

  const int32_t* bounds() {
    std::vector<int32_t> values;
    for (int64_t t = 0; t < args.num_tokens; ++t) values.push_back(random_.integer(-20, 500));
    return memory_.list(values);
  }

  void list_blocks() {
    args.blocks.size = random_.of({1, 5, 8, 64});
    args.blocks.count = random_.integer(1, static_cast<int32_t>(args.num_logits) / args.blocks.size);
    args.blocks.stride_token = args.blocks.count + random_.integer(0, 2);
    std::vector<int32_t> lists;
    for (int64_t i = 0; i < args.num_tokens * args.blocks.stride_token; ++i)
      lists.push_back(random_.chance(6) ? random_.of({-1, -7, INT32_MAX, INT32_MIN})
                                        : random_.integer(0, 450 / args.blocks.size));
    args.blocks.blocks = memory_.list(lists);
  }

  void fill_cache() {
    core::IndexerPages& cache = args.cache;
    cache.stride_page = indexer_page_bytes(cache.page_size, cache.format) +
                        (for_copies_ ? random_.of({0, 16}) : random_.of({0, 0, 12, 3, 16}));
    const int64_t bytes = cache.num_pages * cache.stride_page;
    cache.base = memory_.bytes(bytes, for_copies_ ? 0 : random_.of({0, 0, 4, 1}));
    std::memset(cache.base, 0xFF, static_cast<size_t>(bytes));
    for (int32_t request = 0; request < args.batch_size; ++request)
      for (int32_t j = 0; j < num_keys_[static_cast<size_t>(request)]; ++j) {
        if (cache.format == IndexerFormat::kMXFP4) {
          for (int32_t i = 0; i < cache.layout().key_bytes; ++i)
            key_of(request, j)[i] = static_cast<std::byte>(random_.integer(0, 255));
          for (int32_t i = 0; i < cache.layout().scale_bytes; ++i) {
            const int32_t scale = random_.integer(std::max(top_scale_ - binades_, 0), top_scale_);
            scale_of(request, j)[i] = static_cast<std::byte>(random_.chance(400)  ? 255
                                                             : random_.chance(20) ? 0
                                                                                  : scale);
            if (!random_.chance(20)) continue;  // else a group of zeros, both of them, has any scale
            scale_of(request, j)[i] = static_cast<std::byte>(random_.chance(20) ? 255 : random_.integer(0, 254));
            for (int32_t c = 0; c < 16; ++c)
              key_of(request, j)[16 * i + c] = static_cast<std::byte>(random_.of({0x00, 0x08, 0x80, 0x88}));
          }
          continue;
        }
        const float scale = static_cast<float>(random_.integer(1, 1000)) * 1e-4F;
        std::memcpy(scale_of(request, j), &scale, sizeof scale);
        for (int32_t c = 0; c < kDim; ++c)  // any code but NaN
          key_of(request, j)[c] = static_cast<std::byte>(random_.integer(0, 126) | (random_.chance(2) ? 128 : 0));
        if (random_.chance(60)) key_of(request, j)[random_.integer(0, kDim - 1)] = std::byte{0xFF};
      }
  }
  std::byte* key_of(int32_t request, int32_t j) const {
    const int32_t size = args.cache.page_size;
    return args.cache.key(args.pages.of(request)[j / size], j % size);
  }
  std::byte* scale_of(int32_t request, int32_t j) const {
    const int32_t size = args.cache.page_size;
    return args.cache.scale(args.pages.of(request)[j / size], j % size);
  }
  double key_size(int32_t request, int32_t j) const {
    const int32_t page_size = args.cache.page_size;
    const reference::Channels key =
        reference::indexer_key(args.cache, args.pages.of(request)[j / page_size], j % page_size);
    double squares = 0;
    for (int32_t c = 0; c < kDim; ++c) {
      const double value = key(c);
      squares += value * value;
    }
    return std::isnan(squares) ? 0 : std::sqrt(squares);
  }
  static double norm(const void* data, DType dtype, int64_t first) {
    double squares = 0;
    for (int64_t c = 0; c < kDim; ++c) {
      const double value = reference::load(data, dtype, first + c);
      squares += value * value;
    }
    return std::sqrt(squares);
  }

  void fill_queries() {
    args.q_stride_head = kDim + (for_copies_ ? random_.of({0, 16}) : random_.of({0, 0, 8, 3}));
    args.q_stride_token = args.num_heads * args.q_stride_head + (for_copies_ ? 0 : random_.of({0, 5}));
    args.weights_stride_token = args.num_heads + random_.of({0, 3});
    const auto size = static_cast<int64_t>(size_of(args.q_dtype));
    const int64_t n = args.num_tokens * args.q_stride_token;
    std::byte* const q = memory_.bytes(n * size, for_copies_ ? 0 : size * random_.integer(0, 1));
    const auto value = [&] { return static_cast<float>(random_.integer(-9999, 9999)) * 3.1e-4F; };
    for (int64_t i = 0; i < n; ++i) reference::store(value(), args.q_dtype, i, q);
    args.q = q;
    std::vector<float> weights;
    for (int64_t i = 0; i < args.num_tokens * args.weights_stride_token; ++i) weights.push_back(value());
    args.weights = memory_.list(weights);
  }

  Random& random_;
  Memory& memory_;
  bool for_copies_;
  int32_t binades_, top_scale_;  // of keys of MXFP4
  std::vector<int32_t> num_keys_;
};

using IndexerLogits = cuda::DirectOperation<core::IndexerLogitsArgs>;

/// Says how the emulator sums products of e4m3.
enum class Sums { kF32, kHopper };

/// Errors may be `slack` times those of f32.
void expect_logits_of_reference(Problem& problem, uint64_t seed, IndexerLogits run, int32_t num_sms = 4,
                                double slack = 1.0, Sums sums = Sums::kF32) {
  TestQueue queue(seed, num_sms);
  if (sums == Sums::kF32) queue.sum_e4m3_in_f32();
  queue.make_tensor_maps();
  const Status status = run(problem.args, queue);
  ASSERT_TRUE(status.ok()) << status.message();
  const std::vector<float> actual = problem.logits();
  problem.clear();
  reference::indexer_logits(problem.args);
  const std::vector<double> tolerances = problem.tolerances();
  const std::vector<float> all_expected = problem.logits();
  const double spacing = problem.args.logits_dtype == DType::kF32   ? 0
                         : problem.args.logits_dtype == DType::kF16 ? 0x1p-10
                                                                    : 0x1p-7;
  for (size_t i = 0; i < actual.size(); ++i) {
    const float expected = all_expected[i];
    const size_t token = i / static_cast<size_t>(problem.args.logits_stride_token);
    if (std::isnan(expected))
      ASSERT_TRUE(std::isnan(actual[i])) << "logit " << i << " is " << actual[i];
    else if (std::isinf(expected) || expected == 7.0F)
      ASSERT_EQ(actual[i], expected) << "logit " << i;
    else
      ASSERT_NEAR(double{actual[i]}, double{expected},
                  slack * tolerances[token] + spacing * std::fabs(double{expected}))
          << "logit " << i;
  }
}

/// Runs long requests on one SM: blocks take many keys, one pass after another.
void expect_many_keys(IndexerLogits run) {
  for (uint64_t seed = 0; seed < 8; ++seed) {
    MLA_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    Memory memory(random);
    Problem problem(random, memory,
                    {.num_heads = 33,
                     .q_dtype = DType::kE4M3,
                     .most_keys = 5000,
                     .format = seed % 2 == 0 ? IndexerFormat::kFP8 : IndexerFormat::kMXFP4});
    ASSERT_NO_FATAL_FAILURE(expect_logits_of_reference(problem, seed, run, 1));
  }
}

TEST(CudaIndexerLogits, ManyKeys) { expect_many_keys(portable::run_indexer_logits); }

TEST(CudaIndexerLogits, CloseToTheReference) {
  for (uint64_t seed = 0; seed < 80; ++seed) {
    MLA_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    Memory memory(random);
    constexpr DType kTypes[] = {DType::kE4M3, DType::kBF16, DType::kF16, DType::kF32};
    Problem problem(random, memory,
                    {.num_heads = random.of({1, 7, 8, 16, 24, 64, 65}),
                     .q_dtype = kTypes[seed % 4],
                     .format = kAllIndexerFormats[seed / 4 % 2]});
    ASSERT_NO_FATAL_FAILURE(expect_logits_of_reference(problem, seed, portable::run_indexer_logits));
  }
}

#if MLA_CUDA_ARCH == 90
TEST(Sm90IndexerLogits, CloseToTheReference) {
  for (uint64_t seed = 0; seed < 80; ++seed) {
    MLA_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    Memory memory(random);
    constexpr std::pair<DType, IndexerFormat> kKinds[] = {{DType::kE4M3, IndexerFormat::kFP8},
                                                          {DType::kBF16, IndexerFormat::kFP8},
                                                          {DType::kF16, IndexerFormat::kFP8},
                                                          {DType::kE4M3, IndexerFormat::kMXFP4},
                                                          {DType::kBF16, IndexerFormat::kMXFP4}};
    const auto [type, format] = kKinds[seed % 5];
    Problem problem(random, memory, {.num_heads = random.of({1, 33, 64, 64, 65}), .q_dtype = type, .format = format});
    ASSERT_NO_FATAL_FAILURE(expect_logits_of_reference(problem, seed, sm90::run_indexer_logits));
  }
}

/// Random problems seldom suit tensor copies. These do: with one query a request and with more, and with more groups
/// than a warp has lanes.
TEST(Sm90IndexerLogits, ProductsOfE4m3) {
  for (uint64_t seed = 0; seed < 24; ++seed) {
    MLA_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    Memory memory(random);
    const int32_t keys = random.of({60, 400, 400, 1500});
    Problem problem(random, memory,
                    {.num_heads = random.of({1, 31, 32, 33, 64, 64}),
                     .q_dtype = DType::kE4M3,
                     .most_keys = keys,
                     .compute = Compute::kFP8,
                     .for_copies = true});
    ASSERT_NO_FATAL_FAILURE(
        expect_logits_of_reference(problem, seed, sm90::run_indexer_logits, random.of({1, 2, 4, 7})));
  }
}

/// IndexerLogitsParams::compute says how far sums of 14 bits may be off.
TEST(Sm90IndexerLogits, ProductsOfE4m3AsHopperSums) {
  for (uint64_t seed = 0; seed < 16; ++seed) {
    MLA_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    Memory memory(random);
    const int32_t heads = random.of({1, 31, 32, 33, 64, 64});
    Problem problem(
        random, memory,
        {.num_heads = heads, .q_dtype = DType::kE4M3, .most_keys = 400, .compute = Compute::kFP8, .for_copies = true});
    const double slack = 0x1p12 / (8 + 2 * std::sqrt(heads));  // 2^-12, of what Problem::tolerances() is a part
    ASSERT_NO_FATAL_FAILURE(
        expect_logits_of_reference(problem, seed, sm90::run_indexer_logits, 4, slack, Sums::kHopper));
  }
}

/// Keys of MXFP4 become e4m3 of one scale. That is exact where the scales of a key are less than 15 binades apart; what
/// is smaller is rounded, or lost.
TEST(Sm90IndexerLogits, ProductsOfE4m3WithMXFP4) {
  for (uint64_t seed = 0; seed < 36; ++seed) {
    MLA_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    Memory memory(random);
    const bool exact = seed % 2 == 0;
    Problem problem(random, memory,
                    {.num_heads = random.of({1, 31, 32, 33, 64, 64}),
                     .q_dtype = DType::kE4M3,
                     .most_keys = random.of({60, 400, 1500}),
                     .format = IndexerFormat::kMXFP4,
                     .compute = Compute::kFP8,
                     .for_copies = true,
                     .binades = exact ? 14 : 30});
    ASSERT_NO_FATAL_FAILURE(expect_logits_of_reference(problem, seed, sm90::run_indexer_logits, random.of({1, 2, 4, 7}),
                                                       exact ? 1.0 : 64.0));
  }
}

TEST(Sm90IndexerLogits, ManyKeys) { expect_many_keys(sm90::run_indexer_logits); }

TEST(Sm90IndexerLogits, AnyNumberOfHeads) {
  Random random(9);
  Memory memory(random);
  Problem problem(random, memory,
                  {.num_heads = 900, .q_dtype = DType::kE4M3, .most_keys = 70, .format = IndexerFormat::kMXFP4});
  ASSERT_NO_FATAL_FAILURE(expect_logits_of_reference(problem, 1, sm90::run_indexer_logits));
}
#endif

/// Tests more heads than fit: several launches add up.
TEST(CudaIndexerLogits, AnyNumberOfHeads) {
  for (DType type : {DType::kE4M3, DType::kF32})
    for (IndexerFormat format : kAllIndexerFormats) {
      Random random(9);
      Memory memory(random);
      Problem problem(random, memory, {.num_heads = 900, .q_dtype = type, .most_keys = 70, .format = format});
      ASSERT_NO_FATAL_FAILURE(expect_logits_of_reference(problem, 1, portable::run_indexer_logits));
    }
}

/// Selections are exact on logits of the same backend, and NaN among visible logits do not let in what is not seen.
void expect_selection(Random& random, const Problem& problem, uint64_t seed, int32_t num_sms) {
  const auto tokens = static_cast<int32_t>(problem.args.num_tokens);
  const int32_t topk = random.of({1, 20, 300, 512}), width = topk + random.of({0, 9});
  std::vector<int32_t> slots(static_cast<size_t>(tokens * width), -77), counts(static_cast<size_t>(tokens), -77);
  std::vector<int32_t> expected = slots, expected_counts = counts;
  const bool listed = problem.args.blocks.given();
  core::IndexerTopKArgs args = {.indexer = problem.args,
                                .top_k = {.num_tokens = tokens,
                                          .num_logits = problem.args.num_logits,
                                          .logits_dtype = problem.args.logits_dtype,
                                          .logits = problem.args.logits,
                                          .logits_stride_token = problem.args.logits_stride_token,
                                          .lengths = listed ? nullptr : problem.args.key_end,
                                          .starts = listed ? nullptr : problem.args.key_begin,
                                          .blocks = problem.args.blocks,
                                          .k = topk,
                                          .indices = slots.data() + (width - topk),
                                          .indices_stride_token = width},
                                .slots = {.num_tokens = tokens,
                                          .topk = topk,
                                          .num_slots = width,
                                          .indices = slots.data() + (width - topk),
                                          .indices_stride_token = width,
                                          .queries = problem.args.queries,
                                          .pages = problem.args.pages,
                                          .ratio = problem.args.ratio,
                                          .slots = slots.data(),
                                          .slots_stride_token = width,
                                          .valid_count = counts.data()}};
  TestQueue queue(seed, num_sms);
  const Status status = portable::run_indexer_top_k(args, queue);
  ASSERT_TRUE(status.ok()) << status.message();

  for (int32_t request = 0; request < problem.args.batch_size; ++request)
    for (int32_t i = 0; i < problem.args.queries.len(request); ++i) {
      const int32_t token = problem.args.queries.begin(request) + i, visible = problem.visible(request, token);
      int32_t length = visible, start = 0;
      if (listed)
        length = visible > 0 ? static_cast<int32_t>(problem.args.num_logits) : 0;
      else
        problem.bound(request, token, start, length);
      core::TopKArgs row = args.top_k;
      row.num_tokens = 1;
      row.logits = static_cast<const std::byte*>(row.logits) +
                   token * row.logits_stride_token * static_cast<int64_t>(size_of(row.logits_dtype));
      row.lengths = &length;
      row.starts = start > 0 ? &start : nullptr;
      if (row.blocks.given()) row.blocks.blocks += token * row.blocks.stride_token;
      row.indices = expected.data() + (width - topk) + int64_t{token} * width;
      reference::top_k(row);
    }
  core::PhysicalSlotsArgs translation = args.slots;
  translation.indices = expected.data() + (width - topk);
  translation.slots = expected.data();
  translation.valid_count = expected_counts.data();
  reference::physical_slots(translation);
  ASSERT_EQ(slots, expected);
  ASSERT_EQ(counts, expected_counts);
}

TEST(CudaIndexerTopK, SelectsAndTranslates) {
  for (uint64_t seed = 0; seed < 24; ++seed) {
    MLA_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    Memory memory(random);
    const Problem problem(random, memory,
                          {.num_heads = 4, .q_dtype = DType::kBF16, .format = kAllIndexerFormats[seed % 2]});
    ASSERT_NO_FATAL_FAILURE(expect_selection(random, problem, seed, 4));
  }
}

/// Blocks of a cluster share a row where there are clusters, and multiprocessors enough.
TEST(CudaIndexerTopK, SelectsInLongRows) {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    MLA_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    Memory memory(random);
    const Problem problem(random, memory, {.num_heads = 1, .q_dtype = DType::kBF16, .most_keys = 34000});
    ASSERT_NO_FATAL_FAILURE(expect_selection(random, problem, seed, 100));
  }
}

}  // namespace
}  // namespace mla::indexer_test
