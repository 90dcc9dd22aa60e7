// SPDX-License-Identifier: Apache-2.0
// Tests that one captured plan and run serves every batch up to its capacity: lengths, pages and queries change in
// place between replays, and nothing else.
#include <cmath>
#include <limits>
#include <numeric>
#include <tuple>

#include "cuda/runtime/devices.h"
#include "trace.h"

namespace mla::test {
namespace {

constexpr int32_t kRequests = 4, kTokens = 4, kLatent = 512, kRope = 64, kPageSize = 16, kMaxPages = 20, kNumPages = 64;
constexpr int64_t kWidth = kLatent + kRope;
constexpr float kUnwritten = -77.0F;

/// Describes a batch of at most kRequests requests with kTokens queries in all; rows behind the last query are padding.
struct Batch {
  const char* name;
  std::vector<int32_t> q_len, kv_len;
};

const Batch kBatches[] = {{"first", {1, 1, 1, 1}, {5, 200, 64, 17}},
                          {"shrunk to one request", {1, 0, 0, 0}, {3, 0, 0, 0}},
                          {"grown to the capacity", {1, 1, 1, 1}, {320, 320, 320, 320}},
                          {"empty", {0, 0, 0, 0}, {0, 0, 0, 0}},
                          {"all queries in one", {0, 4, 0, 0}, {9, 257, 0, 1}},
                          {"a request without keys", {1, 1, 1, 0}, {0, 33, 0, 64}},
                          {"two of two", {2, 0, 2, 0}, {100, 0, 2, 0}},
                          {"first", {1, 1, 1, 1}, {5, 200, 64, 17}}};

/// Holds the host's side of the problem; `to_device` sends what a batch changes.
struct Problem {
  int32_t heads;
  std::vector<uint16_t> q = random(int64_t{kTokens} * heads * kWidth, 1),
                        cache = random(int64_t{kNumPages} * kPageSize * kWidth, 2);
  std::vector<int32_t> qo_indptr = std::vector<int32_t>(kRequests + 1), kv_len = std::vector<int32_t>(kRequests),
                       table = std::vector<int32_t>(size_t{kRequests} * kMaxPages, -1);
  std::vector<float> o, lse;

  explicit Problem(int32_t num_heads)
      : heads(num_heads),
        o(static_cast<size_t>(kTokens * heads * kLatent)),
        lse(static_cast<size_t>(kTokens * heads)) {}

  static std::vector<uint16_t> random(int64_t count, uint64_t key) {
    std::vector<uint16_t> values(static_cast<size_t>(count));
    kit::fill_normal(values.data(), DType::kBF16, 0, count, key);
    return values;
  }

  void set(const Batch& batch, uint64_t seed) {
    std::partial_sum(batch.q_len.begin(), batch.q_len.end(), qo_indptr.begin() + 1);
    kv_len = batch.kv_len;
    kit::Random random(seed);
    for (int32_t b = 0; b < kRequests; ++b)
      for (int32_t page = 0; page < kMaxPages; ++page)  // behind kv_len: nothing that may be read
        table[static_cast<size_t>(b * kMaxPages + page)] = page * kPageSize < kv_len[static_cast<size_t>(b)]
                                                               ? static_cast<int32_t>(random.integer(0, kNumPages - 1))
                                                               : std::numeric_limits<int32_t>::max();
    std::fill(o.begin(), o.end(), kUnwritten);
    std::fill(lse.begin(), lse.end(), kUnwritten);
  }

  DecodeParams params(int64_t tokens) {
    return {.q = contiguous(q.data(), DType::kBF16, {tokens, heads, kWidth}),
            .cache = {.kv = contiguous(cache.data(), DType::kBF16, {kNumPages, kPageSize, kWidth})},
            .pages = {.block_table = contiguous(table.data(), DType::kI32, {kRequests, kMaxPages}),
                      .kv_len = contiguous(kv_len.data(), DType::kI32, {kRequests})},
            .qo_indptr = contiguous(qo_indptr.data(), DType::kI32, {kRequests + 1}),
            .sm_scale = 0.07F,
            .o = contiguous(o.data(), DType::kF32, {tokens, heads, kLatent}),
            .lse = contiguous(lse.data(), DType::kF32, {tokens, heads})};
  }
};

/// Holds copies of the problem's vectors in a GPU's memory.
class Mirror {
 public:
  Mirror(const Gpu& gpu, Problem& problem) : gpu_(gpu) {
    add(problem.q);
    add(problem.cache);
    add(problem.qo_indptr);
    add(problem.kv_len);
    add(problem.table);
    add(problem.o);
    add(problem.lse);
  }
  ~Mirror() {
    for (const Copy& copy : copies_) EXPECT_EQ(gpu_.free(copy.there).message(), "");
  }
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  void send() const {
    for (const Copy& copy : copies_) EXPECT_EQ(gpu_.copy(copy.there, copy.here, copy.bytes).message(), "");
  }
  void fetch() const {
    for (const Copy& copy : copies_) EXPECT_EQ(gpu_.copy(copy.here, copy.there, copy.bytes).message(), "");
  }
  DecodeParams there(DecodeParams params) const {
    kit::for_each_tensor(params, [this](TensorView& view) {
      for (const Copy& copy : copies_)
        if (view.data == copy.here) {
          view.data = copy.there;
          view.device = gpu_.device();
          return;
        }
    });
    return params;
  }

 private:
  struct Copy {
    void* here;
    void* there;
    size_t bytes;
  };
  template <class T>
  void add(std::vector<T>& values) {
    const size_t bytes = values.size() * sizeof(T);
    copies_.push_back({values.data(), gpu_.allocate(bytes).value(), bytes});
  }

  const Gpu& gpu_;
  std::vector<Copy> copies_;
};

/// Returns what the reference says of the same batch without its padding; rows behind it stay unwritten.
Problem expected_of(const Batch& batch, int32_t heads, uint64_t seed) {
  Problem problem(heads);
  problem.set(batch, seed);
  const Context context = Context::create({.num_threads = 1, .backend = "reference", .device = "cpu"}).value();
  const DecodeParams params = problem.params(problem.qo_indptr.back());
  std::vector<std::byte> workspace(workspace_size(context, params).value());
  const Plan planned = plan(context, params, workspace).value();
  EXPECT_EQ(run(context, planned, params).message(), "");
  return problem;
}

void expect_near(const std::vector<float>& given, const std::vector<float>& expected, float tolerance,
                 const char* what) {
  ASSERT_EQ(given.size(), expected.size());
  for (size_t i = 0; i < given.size(); ++i) {
    if (given[i] == expected[i]) continue;  // infinities too
    ASSERT_LE(std::abs(given[i] - expected[i]), tolerance) << what << " at " << i;
  }
}

/// Runs tests on the device and with the number of heads that its parameter names.
class DecodeGraph : public testing::TestWithParam<std::tuple<std::string, int32_t>> {};

TEST_P(DecodeGraph, ServesEveryBatchUpToItsCapacity) {
  const auto& [device, heads] = GetParam();
  const Gpu gpu = Gpu::open(device).value();
  const Context context = context_on(device);
  Problem problem(heads);
  problem.set(kBatches[2], 0);
  const Mirror mirror(gpu, problem);
  mirror.send();
  const DecodeParams params = mirror.there(problem.params(kTokens));
  const Result<size_t> size = workspace_size(context, params);
  ASSERT_EQ(size.status().message(), "");
  const size_t bytes = *size;
  auto* const workspace = static_cast<std::byte*>(gpu.allocate(bytes).value());
  const Stream stream = gpu.create_stream().value();
  ASSERT_EQ(gpu.begin_capture(stream).message(), "");
  const Result<Plan> planned = plan(context, params, {workspace, bytes}, stream);
  ASSERT_EQ(planned.status().message(), "");
  ASSERT_EQ(run(context, *planned, params, stream).message(), "");
  const Graph graph = gpu.end_capture(stream).value();

  std::vector<std::vector<float>> first;
  for (const Batch& batch : kBatches) {
    MLA_TRACE(batch.name);
    const uint64_t seed = static_cast<uint64_t>(batch.kv_len[1]);
    problem.set(batch, seed);
    mirror.send();
    ASSERT_EQ(gpu.launch(graph, stream).message(), "");
    ASSERT_EQ(gpu.synchronize(stream).message(), "");
    mirror.fetch();
    const Problem expected = expected_of(batch, heads, seed);
    expect_near(problem.o, expected.o, 0.02F, "o");
    expect_near(problem.lse, expected.lse, 1e-3F, "lse");
    if (batch.name == std::string("first")) first.push_back(problem.o);
  }
  ASSERT_EQ(first.size(), 2U);
  EXPECT_EQ(first[0], first[1]) << "the same batch gives the same bits, whatever ran between";
  EXPECT_EQ(gpu.destroy(graph).message(), "");
  EXPECT_EQ(gpu.destroy(stream).message(), "");
  EXPECT_EQ(gpu.free(workspace).message(), "");
}

// 16 query rows of a request and more: on SM90, two backends.
INSTANTIATE_TEST_SUITE_P(Devices, DecodeGraph, testing::Combine(testing::ValuesIn(devices()), testing::Values(16, 24)),
                         [](const auto& test) {
                           std::string name = std::get<0>(test.param);
                           std::replace(name.begin(), name.end(), ':', '_');
                           return name + "_" + std::to_string(std::get<1>(test.param));
                         });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(DecodeGraph);

}  // namespace
}  // namespace mla::test
