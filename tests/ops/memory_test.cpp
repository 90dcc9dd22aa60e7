// SPDX-License-Identifier: Apache-2.0
// Where kernels may look: pages that nobody owns and the memory behind every tensor are protected, so that a read is a
// crash; and pages lie further than 2^32 elements apart.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <vector>

#include "backend_test.h"

namespace mla {
namespace {

using kit::DecodeCase;
using kit::DecodeSpec;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

/// Memory whose last byte stands right before a page that must not be touched.
class FencedMemory {
 public:
  explicit FencedMemory(size_t size) {
    const auto unit = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    mapped_ = round_up(size, unit) + unit;
    void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return;
    start_ = static_cast<std::byte*>(memory);
    if (mprotect(start_ + mapped_ - unit, unit, PROT_NONE) != 0) return;
    data_ = start_ + mapped_ - unit - size;
  }
  ~FencedMemory() {
    if (start_ != nullptr) munmap(start_, mapped_);
  }
  FencedMemory(const FencedMemory&) = delete;
  FencedMemory& operator=(const FencedMemory&) = delete;

  std::byte* data() const { return data_; }

 private:
  std::byte* start_ = nullptr;
  std::byte* data_ = nullptr;
  size_t mapped_ = 0;
};

/// A copy of `buffer` that ends at a fence; the view's data moves with it.
void fence(TensorView& view, const kit::Buffer& buffer, std::vector<std::unique_ptr<FencedMemory>>& fences) {
  if (!view.given()) return;
  const auto& memory = fences.emplace_back(std::make_unique<FencedMemory>(buffer.size()));
  ASSERT_NE(memory->data(), nullptr);
  std::memcpy(memory->data(), buffer.data(), buffer.size());
  view.data = memory->data() + (static_cast<std::byte*>(view.data) - buffer.data());
}

/// Makes every unowned page unreadable. Cache pages are whole memory pages; the pool ends at a fence, so it is aligned.
void protect_unowned(const TensorView& kv, const kit::PagedMemory& memory) {
  const size_t bytes = static_cast<size_t>(kv.stride[0]) * size_of(kv.dtype);
  ASSERT_EQ(bytes % static_cast<size_t>(sysconf(_SC_PAGESIZE)), 0U);
  for (int32_t page : memory.unowned)
    ASSERT_EQ(mprotect(static_cast<std::byte*>(kv.data) + static_cast<size_t>(page) * bytes, bytes, PROT_NONE), 0);
}

template <class Params>
void run_params(const Context& context, const Params& params) {
  const Result<size_t> size = workspace_size(context, params);
  MLA_EXPECT_OK(size);
  FencedMemory workspace(*size);
  Result<Plan> made = plan(context, params, {workspace.data(), *size});
  MLA_EXPECT_OK(made);
  MLA_EXPECT_OK(run(context, *made, params));
}

class DecodeMemory : public BackendTest<Op::kDecode> {};
MLA_FOR_EVERY_ROW(DecodeMemory, Op::kDecode);

TEST_P(DecodeMemory, ReadsOwnedPagesAndNothingBehindAnyTensor) {
  const int32_t dims[][2] = {{576, 512}, {512, 512}, {320, 256}};
  for (const auto& [d_qk, d_v] : dims)
    for (int32_t heads : {1, 7, 16, 33})
      for (DType q_dtype : {DType::kBF16, DType::kF32})
        for (bool shuffled : {false, true}) {
          DecodeSpec spec;
          spec.cache.d_qk = d_qk;
          spec.cache.d_v = d_v;
          spec.cache.shuffled_pages = shuffled;
          spec.cache.unowned_pages = shuffled ? 5 : 0;  // in order, the last owned page stands before the fence
          spec.cache.garbage_table_tail = false;        // the table ends at its fence as well
          spec.num_heads = heads;
          spec.q_dtype = spec.o_dtype = q_dtype;
          spec.q_len = {2};
          spec.kv_len = {129, 64, 1, 320};
          const DecodeCase problem(spec);
          std::vector<std::unique_ptr<FencedMemory>> fences;
          DecodeParams params = problem.params();
          fence(params.q, problem.q, fences);
          fence(params.cache.kv, problem.memory.kv, fences);
          fence(params.pages.kv_indices, problem.memory.table, fences);
          fence(params.pages.kv_indptr, problem.memory.kv_indptr, fences);
          fence(params.pages.kv_len, problem.memory.kv_len, fences);
          fence(params.qo_indptr, problem.qo_indptr, fences);
          protect_unowned(params.cache.kv, problem.memory);
          run_params(context(), params);
          const Result<kit::Expected> expected = kit::expected_of(problem);
          MLA_EXPECT_OK(expected);
          const kit::Outcome outcome = kit::check_outputs(problem, *expected, GetParam());
          EXPECT_TRUE(outcome.ok) << outcome.line();
        }
}

/// A pool of more than 2^32 elements, of which only the pages in use take memory.
struct SparsePool {
  static constexpr int64_t kPageElements = int64_t{64} * 576;
  static constexpr int64_t kNumPages = (int64_t{1} << 32) / kPageElements + 1000;
  FencedMemory memory{static_cast<size_t>(kNumPages * kPageElements) * 2};

  TensorView view() const { return contiguous(memory.data(), DType::kBF16, {kNumPages, 64, 576}); }
  uint16_t* page(int64_t number) const { return reinterpret_cast<uint16_t*>(memory.data()) + number * kPageElements; }
};

// Beyond 2^32 elements, just beyond 2^31 elements, just beyond 2^31 bytes, and the first.
const std::vector<int32_t> kFarPages = {static_cast<int32_t>(SparsePool::kNumPages - 1),
                                        static_cast<int32_t>((int64_t{1} << 31) / SparsePool::kPageElements + 1),
                                        static_cast<int32_t>((int64_t{1} << 30) / SparsePool::kPageElements + 1), 0};

TEST_P(DecodeMemory, PageOffsetsBeyond32Bits) {
  const SparsePool pool;
  if (pool.memory.data() == nullptr) GTEST_SKIP() << "the system does not map 8 GiB without reserving them";
  DecodeSpec spec;
  spec.kv_len = {250};
  spec.cache.poison = false;
  const DecodeCase problem(spec);
  MLA_EXPECT_OK(kit::plan_and_run(context(), problem));
  const std::vector<std::byte> near = bits_of(problem.o);
  for (size_t i = 0; i < kFarPages.size(); ++i)
    std::memcpy(pool.page(kFarPages[i]),
                problem.memory.kv.as<uint16_t>() + problem.memory.pages_of[0][i] * SparsePool::kPageElements,
                SparsePool::kPageElements * 2);
  DecodeParams params = problem.params();
  params.cache.kv = pool.view();
  params.pages.kv_indices.data = const_cast<int32_t*>(kFarPages.data());
  params.pages.kv_indices.shape[0] = 4;
  const int32_t kv_indptr[] = {0, 4};
  params.pages.kv_indptr = contiguous(kv_indptr, DType::kI32, {2});
  problem.reset_outputs();
  run_params(context(), params);
  EXPECT_EQ(bits_of(problem.o), near);
}

class GatherMemory : public BackendTest<Op::kGather> {};
MLA_FOR_EVERY_ROW(GatherMemory, Op::kGather);

TEST_P(GatherMemory, ReadsOwnedPagesAndNothingBehindAnyTensor) {
  for (DType out_dtype : {DType::kBF16, DType::kF32}) {
    kit::GatherSpec spec;
    spec.cache.unowned_pages = 5;
    spec.cache.garbage_table_tail = false;
    spec.kv_len = {129, 64, 320};
    spec.token_start = {1, 0, 200};
    spec.count = {128, 64, 7};
    spec.out_dtype = out_dtype;
    const kit::GatherCase problem(spec);
    MLA_EXPECT_OK(run(context(), problem.params()));
    std::vector<std::unique_ptr<FencedMemory>> fences;
    GatherParams params = problem.params();
    fence(params.cache.kv, problem.memory.kv, fences);
    fence(params.pages.kv_indices, problem.memory.table, fences);
    fence(params.out_kv, problem.out_kv, fences);
    protect_unowned(params.cache.kv, problem.memory);
    std::memset(params.out_kv.data, kit::kUntouched, problem.out_kv.size());
    MLA_EXPECT_OK(run(context(), params));
    EXPECT_EQ(std::memcmp(params.out_kv.data, problem.out_kv.data(), problem.out_kv.size()), 0);
  }
}

class AppendMemory : public BackendTest<Op::kAppend> {};
MLA_FOR_EVERY_ROW(AppendMemory, Op::kAppend);

TEST_P(AppendMemory, AppendAndGatherBeyond32Bits) {
  const SparsePool pool;
  if (pool.memory.data() == nullptr) GTEST_SKIP() << "the system does not map 8 GiB without reserving them";
  const kit::Buffer rows(256 * 576 * 2), back(256 * 576 * 2);
  kit::fill_normal(rows.data(), DType::kBF16, 0, int64_t{256} * 576, 3);
  std::vector<int64_t> slots;
  for (int64_t token = 0; token < 256; ++token)
    slots.push_back(int64_t{kFarPages[static_cast<size_t>(token / 64)]} * 64 + token % 64);
  AppendParams append;
  append.kv = contiguous(rows.data(), DType::kBF16, {256, 576});
  append.slot_mapping = contiguous(slots.data(), DType::kI64, {256});
  append.cache.kv = pool.view();
  MLA_EXPECT_OK(run(context(), append));
  for (size_t i = 0; i < kFarPages.size(); ++i)
    EXPECT_EQ(std::memcmp(pool.page(kFarPages[i]), rows.as<uint16_t>() + i * SparsePool::kPageElements,
                          SparsePool::kPageElements * 2),
              0)
        << kFarPages[i];

  const int32_t kv_len[] = {256}, out_indptr[] = {0, 256};
  GatherParams gather;
  gather.cache.kv = pool.view();
  gather.pages.block_table = contiguous(kFarPages.data(), DType::kI32, {1, 4});
  gather.pages.kv_len = contiguous(kv_len, DType::kI32, {1});
  gather.out_indptr = contiguous(out_indptr, DType::kI32, {2});
  gather.out_kv = contiguous(back.data(), DType::kBF16, {256, 576});
  MLA_EXPECT_OK(run(context(), gather));
  EXPECT_EQ(bits_of(back), bits_of(rows));
}

class PrefillMemory : public BackendTest<Op::kPrefill> {};
MLA_FOR_EVERY_ROW(PrefillMemory, Op::kPrefill);

TEST_P(PrefillMemory, ReadsNothingBehindAnyTensor) {
  for (int32_t d_qk : {192, 128})
    for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32})
      for (int32_t heads : {1, 3}) {
        kit::PrefillSpec spec;
        spec.d_qk = d_qk;
        spec.dtype = spec.o_dtype = dtype;
        spec.num_heads = heads;
        spec.q_len = {33, 5};
        spec.kv_len = {70, 5};
        const kit::PrefillCase problem(spec);
        std::vector<std::unique_ptr<FencedMemory>> fences;
        PrefillParams params = problem.params();
        fence(params.q, problem.q, fences);
        fence(params.k, problem.k, fences);
        fence(params.v, problem.v, fences);
        fence(params.qo_indptr, problem.qo_indptr, fences);
        fence(params.kv_indptr, problem.kv_indptr, fences);
        run_params(context(), params);
        const Result<kit::Expected> expected = kit::expected_of(problem);
        MLA_EXPECT_OK(expected);
        const kit::Outcome outcome = kit::check_outputs(problem, *expected, GetParam());
        EXPECT_TRUE(outcome.ok) << outcome.line();
      }
}

}  // namespace
}  // namespace mla
