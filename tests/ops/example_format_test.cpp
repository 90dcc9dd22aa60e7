// SPDX-License-Identifier: Apache-2.0
// Tests a cache format that the library does not name, known by its codecs alone (docs/design.md, "How to add"): latent
// channels of e2m1, two a byte, with an e4m3 scale for every 32 of them and one more f32 scale for the tensor. Every
// row of every table computes with it as the reference does.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "cuda/runtime/code.h"
#include "cuda/runtime/emulated_queue.h"
#include "dispatch/tables.h"
#include "mla/numeric.h"

namespace mla::dispatch {
namespace {

constexpr KvLayout kFp4 = {.name = "fp4_example",
                           .nope = {.element = DType::kE2M1,
                                    .scale_type = ScaleType::kE4M3,
                                    .scale_place = ScalePlace::kRow,
                                    .channels_per_scale = 32,
                                    .outer_scale = true},
                           .rope = {.element = DType::kBF16},
                           .nope_dim = 512,
                           .rope_dim = 64,
                           .row_bytes = 400,
                           .rope_offset = 272,
                           .scale_offset = 256,
                           .scale_bytes_per_token = 16};
constexpr int32_t kPageSize = 16, kPages = 12, kSlots = kPages * kPageSize, kWidth = 576, kLatents = 512;
constexpr float kOuter = 0.013F;

/// Holds a pool of rows, and what it is multiplied by.
class Pool {
 public:
  explicit Pool(const KvLayout& layout) : layout_(layout), bytes_(size_t{kSlots} * row_bytes(), std::byte{0x5A}) {}
  Pool(const Pool& other) : layout_(other.layout_), bytes_(other.bytes_) {}
  Pool& operator=(const Pool&) = delete;

  core::Cache cache() {
    core::Cache cache = {.num_pages = kPages, .page_size = kPageSize, .d_ckv = kLatents, .d_kpe = kWidth - kLatents};
    core::set_codecs(layout_, cache);
    const int64_t row = row_bytes(), page = kPageSize * row;
    if (layout_.is_packed()) {
      core::set_planes(layout_, bytes_.data(), page, row, cache);
    } else {
      cache.ckv = {bytes_.data(), page, row};
      cache.kpe = {bytes_.data() + cache.ckv_bytes(), page, row};
    }
    if (layout_.nope.outer_scale) cache.outer_scale = &outer_;
    return cache;
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  int64_t row_bytes() const { return layout_.is_packed() ? layout_.row_bytes : bytes_of(layout_.nope.element, kWidth); }

  KvLayout layout_;
  std::vector<std::byte> bytes_;
  float outer_ = kOuter;
};

/// Says where rows of tables compute: on the CPU, or on an emulated GPU of one of two architectures.
struct Machine {
  core::ThreadPool& pool;
  std::unique_ptr<cuda::Queue> queue = {};
  cuda::Code code = {};

  core::Executor executor() const { return {.pool = pool, .queue = queue.get(), .code = &code}; }
  /// Returns a problem to ask rows about, of a quantized format that they know.
  Problem problem(Op op, DType dtype) const {
    Problem problem = {.op = op, .q_dtype = dtype, .cache = CacheFormat::kFP8DsMla, .num_heads = 20};
    if (code.arch == 0) return problem;
    problem.device.type = DeviceType::kCuda;
    problem.gpu_arch = code.arch;
    problem.emulated = true;
    return problem;
  }
};

std::vector<Machine> machines(core::ThreadPool& pool) {
  std::vector<Machine> all;
  all.push_back({.pool = pool});
  for (const int32_t arch : cuda::emulated_archs()) {
    if (arch != 80 && arch != 90) continue;
    const cuda::DeviceRuntime* const device = cuda::emulated_device(arch).value();
    all.push_back({.pool = pool,
                   .queue = std::make_unique<cuda::EmulatedQueue>(*device, pool, Stream{}),
                   .code = cuda::emulated_code(arch)});
  }
  return all;
}

constexpr std::string_view kReference = "reference";

/// Calls f(row, executor) for every row that computes problems like this one, the reference's last.
template <class Row, class F>
void for_each_row(Op op, DType dtype, const F& f) {
  core::ThreadPool pool(2, {});
  int called = 0;
  for (const Machine& machine : machines(pool))
    for (const Row& row : table<Row>()) {
      if (row.name == kReference || !row.verdict(machine.problem(op, dtype)).usable) continue;
      SCOPED_TRACE(testing::Message() << row.name << " of sm" << machine.code.arch);
      f(row, machine.executor());
      ++called;
      if (testing::Test::HasFatalFailure()) return;
    }
  EXPECT_GE(called, 2);  // the CPU has at least its portable level beside AVX2 or NEON, or an emulator
}

template <class Row>
const Row& reference_row() {
  for (const Row& row : table<Row>())
    if (row.name == kReference) return row;
  throw std::logic_error("no reference");
}

template <class Args>
void run(const core::DirectImplementation<Args>& row, const core::Executor& executor, const Args& args) {
  const Status status = row.run(args, executor);
  ASSERT_TRUE(status.ok()) << status.message();
}

template <class Args>
void run(const core::PlannedImplementation<Args>& row, const core::Executor& executor, const Args& args) {
  std::vector<std::byte> memory(row.workspace_size(args, executor) + core::kWorkspaceAlignment);
  void* start = memory.data();
  size_t space = memory.size();
  std::align(core::kWorkspaceAlignment, space - core::kWorkspaceAlignment, start, space);
  const std::span<std::byte> workspace(static_cast<std::byte*>(start), space);
  core::PlanSummary summary;
  Status status = row.plan(args, executor, workspace, summary);
  ASSERT_TRUE(status.ok()) << status.message();
  status = row.run(args, executor, workspace);
  ASSERT_TRUE(status.ok()) << status.message();
}

struct ExampleFormat : testing::Test {
  ExampleFormat() {
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = f32_to_bf16(normal(random) * (i % 97 == 0 ? 30.0F : 1.0F));
    rows[5] = f32_to_bf16(INFINITY);  // no say in a scale
    rows[kWidth + 40] = f32_to_bf16(-NAN);
    for (size_t c = 0; c < 32; ++c) rows[2 * kWidth + c] = 0;  // a group of zeros
    for (uint16_t& value : q) value = f32_to_bf16(normal(random));
    for (int32_t i = 0; i < kSlots; ++i) slots.push_back((i * 5 + 3) % kSlots);  // 5 and kSlots have no common factor
    for (int32_t page = 0; page < kPages; ++page) pages.push_back(kPages - 1 - page);
  }

  core::AppendArgs append_to(const core::Cache& cache) {
    return {.num_tokens = kSlots,
            .ckv = rows.data(),
            .ckv_stride_token = kWidth,
            .kpe = rows.data() + kLatents,
            .kpe_stride_token = kWidth,
            .slot_mapping = slots.data(),
            .cache = cache};
  }
  Pool filled(const KvLayout& layout) {
    Pool pool(layout);
    core::ThreadPool threads(1, {});
    run(reference_row<AppendRow>(), {.pool = threads}, append_to(pool.cache()));
    return pool;
  }
  /// Bounds the channels of pools for attention, none of which is NaN: a row of probabilities rounded to bf16 is then
  /// off by at most kLargest * 2^-8.
  static constexpr float kLargest = 4.0F;
  Pool moderate(const KvLayout& layout) {
    for (uint16_t& value : rows) {
      const float clamped = std::clamp(bf16_to_f32(value), -kLargest, kLargest);
      value = f32_to_bf16(std::isnan(clamped) ? 1.0F : clamped);
    }
    return filled(layout);
  }

  template <class Args>
  Args attention(int32_t heads, float* o) {
    Args args;
    args.num_tokens = kTokens;
    args.num_heads = heads;
    args.d_qk = kWidth;
    args.d_v = kLatents;
    args.q_nope = q.data();
    args.q_pe = q.data() + kLatents;
    args.q_nope_stride_token = args.q_pe_stride_token = int64_t{heads} * kWidth;
    args.q_nope_stride_head = args.q_pe_stride_head = kWidth;
    args.sm_scale = 0.05F;
    args.o_dtype = DType::kF32;
    args.o = o;
    args.o_stride_token = int64_t{heads} * kLatents;
    args.o_stride_head = kLatents;
    return args;
  }

  /// Compares every row's output with the reference's; `make(o)` gives the arguments.
  template <class Row, class Make>
  void expect_reference(Op op, int32_t heads, const Make& make) {
    std::vector<float> expected(static_cast<size_t>(kTokens * heads * kLatents)), got(expected.size());
    core::ThreadPool threads(1, {});
    run(reference_row<Row>(), {.pool = threads}, make(expected.data()));
    for_each_row<Row>(op, DType::kBF16, [&](const Row& row, const core::Executor& executor) {
      std::fill(got.begin(), got.end(), NAN);
      run(row, executor, make(got.data()));
      for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], kLargest * 0x1p-8F + 1e-3F) << i;
    });
  }

  static constexpr int32_t kTokens = 3;
  std::mt19937 random{7};
  std::vector<uint16_t> rows = std::vector<uint16_t>(size_t{kSlots} * kWidth);
  std::vector<uint16_t> q = std::vector<uint16_t>(size_t{kTokens} * 20 * kWidth);
  std::vector<int64_t> slots;
  std::vector<int32_t> pages;
};

/// Compares rows byte by byte with the definition of the format.
TEST_F(ExampleFormat, RowsAreAsDefined) {
  Pool pool = filled(kFp4);
  const core::Cache cache = pool.cache();
  constexpr float kValues[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  for (size_t token = 0; token < kSlots; ++token) {
    const auto slot = static_cast<int64_t>(slots[token]);
    const std::byte* const row = cache.ckv.row(slot / kPageSize, slot % kPageSize);
    for (size_t group = 0; group < kLatents / 32; ++group) {
      const uint16_t* const from = &rows[token * kWidth + group * 32];
      float amax = 0;
      for (size_t c = 0; c < 32; ++c)
        if (std::isfinite(bf16_to_f32(from[c]))) amax = std::max(amax, std::abs(bf16_to_f32(from[c])));
      const uint8_t code = f32_to_e4m3(std::clamp(amax / kOuter / 6.0F, 0x1p-9F, 448.0F));
      ASSERT_EQ(static_cast<uint8_t>(row[256 + group]), code) << token << ' ' << group;
      const float scale = e4m3_to_f32(code) * kOuter;
      for (size_t c = 0; c < 32; ++c) {
        const float value = bf16_to_f32(from[c]);
        if (!std::isfinite(value)) continue;
        const size_t channel = group * 32 + c;
        const auto stored = static_cast<uint8_t>(row[channel / 2]) >> (channel % 2 * 4) & 0xF;  // even: the low half
        const float kept = kValues[stored & 7];
        for (const float other : kValues)  // none is nearer
          ASSERT_LE(std::abs(std::abs(value) / scale - kept), std::abs(std::abs(value) / scale - other)) << channel;
        if (kept != 0) {
          ASSERT_EQ(stored >> 3, std::signbit(value)) << channel;
        }
      }
    }
    ASSERT_EQ(std::memcmp(row + 272, &rows[token * kWidth + kLatents], 128), 0);
  }
}

TEST_F(ExampleFormat, IsAppended) {
  const Pool expected = filled(kFp4);
  for_each_row<AppendRow>(Op::kAppend, DType::kBF16, [&](const AppendRow& row, const core::Executor& executor) {
    Pool pool(kFp4);
    run(row, executor, append_to(pool.cache()));
    ASSERT_EQ(pool.bytes(), expected.bytes());
  });
}

TEST_F(ExampleFormat, IsGathered) {
  Pool pool = filled(kFp4);
  const std::vector<int32_t> indptr = {0, kSlots - 21}, start = {13}, kv_len = {kSlots};
  std::vector<float> expected(size_t{kSlots} * kWidth, -1), got(expected.size());
  core::GatherArgs args = {.batch_size = 1, .num_rows = indptr[1], .cache = pool.cache()};
  args.pages = {.page_size = kPageSize, .batch_size = 1, .table = pages.data(), .table_stride_request = kPages};
  args.pages.kv_len = kv_len.data();
  args.token_start = start.data();
  args.out_indptr = indptr.data();
  args.out_dtype = DType::kF32;
  args.out_ckv_stride_token = args.out_kpe_stride_token = kWidth;
  const auto into = [&](std::vector<float>& out) {
    args.out_ckv = out.data();
    args.out_kpe = out.data() + kLatents;
    return args;
  };
  core::ThreadPool threads(1, {});
  run(reference_row<GatherRow>(), {.pool = threads}, into(expected));
  for_each_row<GatherRow>(Op::kGather, DType::kF32, [&](const GatherRow& row, const core::Executor& executor) {
    std::fill(got.begin(), got.end(), -1.0F);
    run(row, executor, into(got));
    ASSERT_EQ(std::memcmp(got.data(), expected.data(), got.size() * sizeof(float)), 0);
  });
}

TEST_F(ExampleFormat, PagesAreCopiedFromAndToOthers) {
  const KvLayout bf16 = kv_layout(CacheFormat::kBF16), e4m3 = kv_layout(CacheFormat::kFP8DsMla);
  for (const auto& formats : {std::pair(kFp4, kFp4), std::pair(kFp4, bf16), std::pair(bf16, kFp4),
                              std::pair(e4m3, kFp4), std::pair(kFp4, e4m3)}) {
    const KvLayout &from = formats.first, &to = formats.second;  // lambdas of clang 14 see no structured bindings
    SCOPED_TRACE(testing::Message() << from.name << " to " << to.name);
    Pool source = filled(from), expected(to);
    std::vector<int32_t> targets(pages.rbegin(), pages.rend());
    std::swap(targets[2], targets[5]);
    core::CopyPagesArgs args = {.num_from = kPages, .num_to = kPages};
    args.from = source.cache();
    args.from_pages = pages.data();
    args.to_pages = targets.data();
    // The library tells formats that mean the same bits by their names, of which this one has none.
    args.from.format = from.name == to.name ? CacheFormat::kFP8DsV4 : CacheFormat::kFP8;
    const auto into = [&](Pool& pool) {
      args.to = pool.cache();
      args.to.format = CacheFormat::kFP8DsV4;
      return args;
    };
    core::ThreadPool threads(1, {});
    run(reference_row<CopyPagesRow>(), {.pool = threads}, into(expected));
    for_each_row<CopyPagesRow>(Op::kCopyPages, DType::kBF16,
                               [&](const CopyPagesRow& row, const core::Executor& executor) {
                                 Pool pool(to);
                                 run(row, executor, into(pool));
                                 ASSERT_EQ(pool.bytes(), expected.bytes());
                               });
  }
}

TEST_F(ExampleFormat, IsAttendedDensely) {
  Pool pool = moderate(kFp4);
  const std::vector<int32_t> kv_len = {kSlots - 5};
  for (const int32_t heads : {5, 20})
    expect_reference<DecodeRow>(Op::kDecode, heads, [&](float* o) {
      auto args = attention<core::DecodeArgs>(heads, o);
      args.batch_size = 1;
      args.cache = pool.cache();
      args.queries.uniform_len = kTokens;
      args.pages = {.page_size = kPageSize,
                    .batch_size = 1,
                    .table = pages.data(),
                    .table_stride_request = kPages,
                    .table_entries = kPages,
                    .kv_len = kv_len.data()};
      return args;
    });
}

TEST_F(ExampleFormat, IsAttendedSparselyBesideAnother) {
  constexpr int32_t kTopk = 70;
  Pool pool = moderate(kFp4), other = moderate(kv_layout(CacheFormat::kFP8DsMla));
  std::vector<int32_t> indices(kTokens * kTopk);
  for (size_t i = 0; i < indices.size(); ++i) indices[i] = static_cast<int32_t>(i * 101 % (kSlots + 40));
  for (const int32_t num_pools : {1, 2})
    for (const int32_t heads : {5, 20}) {
      SCOPED_TRACE(testing::Message() << num_pools << " pools, " << heads << " heads");
      expect_reference<DecodeSparseRow>(Op::kDecodeSparse, heads, [&](float* o) {
        auto args = attention<core::DecodeSparseArgs>(heads, o);
        args.num_pools = num_pools;
        for (int32_t i = 0; i < num_pools; ++i)
          args.pools[i] = {.cache = i == 0 ? pool.cache() : other.cache(),
                           .indices = indices.data(),
                           .indices_stride_token = kTopk,
                           .topk = kTopk - 30 * i};
        return args;
      });
    }
}

}  // namespace
}  // namespace mla::dispatch
