// SPDX-License-Identifier: Apache-2.0
// Tests that `run` allocates nothing, on any thread. This program replaces malloc and its kin by counting ones.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <iterator>

#include "backend_test.h"

// Sanitizers bring their own malloc, and only glibc names the one behind it.
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define MLA_COUNTS_ALLOCATIONS 1
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#undef MLA_COUNTS_ALLOCATIONS
#endif
#endif
#endif

namespace {
std::atomic<bool> counting{false};
std::atomic<int64_t> allocations{0};
void count() {
  if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1, std::memory_order_relaxed);
}
}  // namespace

#ifdef MLA_COUNTS_ALLOCATIONS
extern "C" {
// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming)
void* __libc_malloc(size_t size);
void* __libc_calloc(size_t count, size_t size);
void* __libc_realloc(void* memory, size_t size);
void* __libc_memalign(size_t alignment, size_t size);
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)

void* malloc(size_t size) {
  count();
  return __libc_malloc(size);
}
void* calloc(size_t elements, size_t size) {
  count();
  return __libc_calloc(elements, size);
}
void* realloc(void* memory, size_t size) {
  count();
  return __libc_realloc(memory, size);
}
void* memalign(size_t alignment, size_t size) {
  count();
  return __libc_memalign(alignment, size);
}
void* aligned_alloc(size_t alignment, size_t size) {
  count();
  return __libc_memalign(alignment, size);
}
int posix_memalign(void** memory, size_t alignment, size_t size) {
  count();
  *memory = __libc_memalign(alignment, size);
  return *memory == nullptr ? ENOMEM : 0;
}
}
#endif

namespace mla {
namespace {

/// Returns the number of allocations of all threads while f runs.
template <class F>
int64_t allocations_of(const F& f) {
  allocations = 0;
  counting = true;
  f();
  counting = false;
  return allocations;
}

template <Op op>
class NoAllocation : public BackendTest<op> {
 protected:
  void SetUp() override {
#ifndef MLA_COUNTS_ALLOCATIONS
    GTEST_SKIP() << "allocations cannot be counted in this build";
#endif
    BackendTest<op>::SetUp();
  }
};

TEST(CountingMalloc, SeesNewAndMalloc) {
#ifndef MLA_COUNTS_ALLOCATIONS
  GTEST_SKIP() << "allocations cannot be counted in this build";
#endif
  EXPECT_GE(allocations_of([] {
              std::vector<std::string> strings(3, std::string(100, 'x'));
              EXPECT_EQ(strings.size(), 3U);
            }),
            4);
}

class DecodeNoAllocation : public NoAllocation<Op::kDecode> {};
MLA_FOR_EVERY_ROW(DecodeNoAllocation, Op::kDecode);

TEST_P(DecodeNoAllocation, Run) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    const auto spec = kit::random_decode_spec(seed, kAllCacheFormats[seed % std::size(kAllCacheFormats)]);
    if (!can_run(spec)) continue;
    const kit::DecodeCase problem(spec);
    const DecodeParams params = problem.params();
    const Result<kit::PlannedRun> done = kit::plan_and_run(context(), problem);
    MLA_EXPECT_OK(done);
    bool ran = false;
    EXPECT_EQ(allocations_of([&] { ran = run(context(), done->plan, params).ok(); }), 0) << describe(problem.spec);
    EXPECT_TRUE(ran);
  }
}

TEST_P(DecodeNoAllocation, FirstRunOfALongSplitRequest) {
  kit::DecodeSpec spec;
  spec.kv_len = {20000, 3};
  const kit::DecodeCase problem(spec);
  const DecodeParams params = problem.params();
  const Result<size_t> size = workspace_size(context(), params);
  MLA_EXPECT_OK(size);
  const kit::Buffer workspace(*size);
  Result<Plan> made = plan(context(), params, workspace.bytes());
  MLA_EXPECT_OK(made);
  bool ran = false;
  EXPECT_EQ(allocations_of([&] { ran = run(context(), *made, params).ok(); }), 0);
  EXPECT_TRUE(ran);
}

class PrefillNoAllocation : public NoAllocation<Op::kPrefill> {};
MLA_FOR_EVERY_ROW(PrefillNoAllocation, Op::kPrefill);

TEST_P(PrefillNoAllocation, Run) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    const kit::PrefillCase problem(kit::random_prefill_spec(seed, seed % 2 == 0 ? DType::kBF16 : DType::kF32));
    const PrefillParams params = problem.params();
    const Result<kit::PlannedRun> done = kit::plan_and_run(context(), problem);
    MLA_EXPECT_OK(done);
    bool ran = false;
    EXPECT_EQ(allocations_of([&] { ran = run(context(), done->plan, params).ok(); }), 0) << describe(problem.spec);
    EXPECT_TRUE(ran);
  }
}

class DecodeSparseNoAllocation : public NoAllocation<Op::kDecodeSparse> {};
MLA_FOR_EVERY_ROW(DecodeSparseNoAllocation, Op::kDecodeSparse);
class PrefillSparseNoAllocation : public NoAllocation<Op::kPrefillSparse> {};
MLA_FOR_EVERY_ROW(PrefillSparseNoAllocation, Op::kPrefillSparse);

template <class Case>
void expect_no_allocation(const Context& context, const Case& problem) {
  const auto params = problem.params();
  const Result<kit::PlannedRun> done = kit::plan_and_run(context, problem);
  MLA_EXPECT_OK(done);
  bool ran = false;
  EXPECT_EQ(allocations_of([&] { ran = run(context, done->plan, params).ok(); }), 0) << describe(problem.spec);
  EXPECT_TRUE(ran);
}

TEST_P(DecodeSparseNoAllocation, Run) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    auto spec = kit::random_decode_sparse_spec(seed, kAllCacheFormats[seed % std::size(kAllCacheFormats)]);
    if (!can_run(spec)) continue;
    expect_no_allocation(context(), kit::DecodeSparseCase(spec));
    spec.finish = kit::FinishSpec{.d_rotary = 2, .gate = kit::FinishSpec::Gate::kHead, .channels_per_scale = 32};
    if (spec.o_dtype == DType::kE4M3 && spec.pool.cache.d_v % 32 != 0) continue;
    expect_no_allocation(context(), kit::DecodeSparseCase(spec));
  }
}

TEST_P(PrefillSparseNoAllocation, Run) {
  for (uint64_t seed = 1; seed <= 20; ++seed)
    expect_no_allocation(context(), kit::PrefillSparseCase(kit::random_prefill_sparse_spec(seed, DType::kBF16)));
}

/// Returns the number of allocations of a run of an operation without a plan.
template <class Case, class Spec>
int64_t direct_allocations(const Context& context, const Spec& spec) {
  const Case problem(spec);
  const auto params = problem.params();
  bool ran = false;
  const int64_t count = allocations_of([&] { ran = run(context, params).ok(); });
  EXPECT_TRUE(ran) << describe(spec);
  return count;
}

class MergeNoAllocation : public NoAllocation<Op::kMergeStates> {};
MLA_FOR_EVERY_ROW(MergeNoAllocation, Op::kMergeStates);

TEST_P(MergeNoAllocation, Run) {
  for (uint64_t seed = 1; seed <= 20; ++seed)
    EXPECT_EQ(direct_allocations<kit::MergeCase>(context(), kit::random_merge_spec(seed, DType::kF32)), 0);
}

class AppendNoAllocation : public NoAllocation<Op::kAppend> {};
MLA_FOR_EVERY_ROW(AppendNoAllocation, Op::kAppend);

TEST_P(AppendNoAllocation, Run) {
  for (uint64_t seed = 1; seed <= 20; ++seed)
    for (CacheFormat format : kAllCacheFormats)
      EXPECT_EQ(direct_allocations<kit::AppendCase>(context(), kit::random_append_spec(seed, format)), 0);
}

class GatherNoAllocation : public NoAllocation<Op::kGather> {};
MLA_FOR_EVERY_ROW(GatherNoAllocation, Op::kGather);

TEST_P(GatherNoAllocation, Run) {
  for (uint64_t seed = 1; seed <= 20; ++seed)
    for (CacheFormat format : kAllCacheFormats)
      EXPECT_EQ(direct_allocations<kit::GatherCase>(context(), kit::random_gather_spec(seed, format)), 0);
}

#define MLA_DIRECT_NO_ALLOCATION(Name, op, make_spec)                                  \
  class Name##NoAllocation : public NoAllocation<op> {};                               \
  MLA_FOR_EVERY_ROW(Name##NoAllocation, op);                                           \
  TEST_P(Name##NoAllocation, Run) {                                                    \
    for (uint64_t seed = 1; seed <= 20; ++seed) {                                      \
      const CacheFormat format = kAllCacheFormats[seed % std::size(kAllCacheFormats)]; \
      static_cast<void>(format);                                                       \
      EXPECT_EQ(direct_allocations<kit::Name##Case>(context(), make_spec), 0);         \
    }                                                                                  \
  }                                                                                    \
  static_assert(true)

MLA_DIRECT_NO_ALLOCATION(AppendRope, Op::kAppendRope, kit::random_append_rope_spec(seed, format));
MLA_DIRECT_NO_ALLOCATION(CopyPages, Op::kCopyPages, kit::random_copy_pages_spec(seed, format));
MLA_DIRECT_NO_ALLOCATION(BlockTableToCsr, Op::kBlockTableToCsr, kit::random_block_table_to_csr_spec(seed));
MLA_DIRECT_NO_ALLOCATION(PhysicalSlots, Op::kPhysicalSlots, kit::random_physical_slots_spec(seed));
MLA_DIRECT_NO_ALLOCATION(AppendIndexer, Op::kAppendIndexer, kit::random_append_indexer_spec(seed));
MLA_DIRECT_NO_ALLOCATION(IndexerLogits, Op::kIndexerLogits, kit::random_indexer_logits_spec(seed));
MLA_DIRECT_NO_ALLOCATION(TopK, Op::kTopK, kit::random_top_k_spec(seed));
MLA_DIRECT_NO_ALLOCATION(IndexerTopK, Op::kIndexerTopK, kit::random_indexer_top_k_spec(seed));
MLA_DIRECT_NO_ALLOCATION(Compress, Op::kCompress, kit::random_compress_spec(seed, format));
MLA_DIRECT_NO_ALLOCATION(FinishOutput, Op::kFinishOutput, kit::random_finish_output_spec(seed, DType::kBF16));

}  // namespace
}  // namespace mla
