// SPDX-License-Identifier: Apache-2.0
// Tests the kit on devices: every tensor is visited, all memory of a case is known, stray writes are seen, and tensor
// cores have tolerances of their own.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "kit/kit.h"

namespace mla {
namespace {

using kit::Buffer;

template <class Params>
class TensorsOfParams : public testing::Test {};
using AllParams = testing::Types<DecodeParams, DecodeSparseParams, PrefillParams, PrefillSparseParams,
                                 MergeStatesParams, AppendParams, AppendRopeParams, GatherParams, CopyPagesParams,
                                 BlockTableToCsrParams, PhysicalSlotsParams, AppendIndexerParams, IndexerLogitsParams,
                                 TopKParams, IndexerTopKParams, CompressParams, FinishOutputParams>;
TYPED_TEST_SUITE(TensorsOfParams, AllParams);

TYPED_TEST(TensorsOfParams, AreVisitedOnceEach) {
  TypeParam params;
  std::set<TensorView*> seen;
  size_t visits = 0;
  kit::for_each_tensor(params, [&](TensorView& view) {
    seen.insert(&view);
    ++visits;
  });
  EXPECT_EQ(seen.size(), visits);
  // What is left of the struct, beside its other fields, is too small for a tensor that was forgotten.
  size_t others = 0;
  for_each_leaf(params, [&](const std::string&, auto& field) {
    if constexpr (!std::is_same_v<std::remove_reference_t<decltype(field)>, TensorView>) others += sizeof field;
  });
  EXPECT_LT(sizeof params - visits * sizeof(TensorView) - others, sizeof(TensorView));
}

template <class Case, class Spec>
void expect_all_memory_known(const Spec& spec) {
  const Case problem(spec);
  const std::vector<const Buffer*> buffers = kit::buffers_of(problem);
  const auto holds = [&](const Buffer* buffer, const void* data) {
    const auto whole = buffer->with_guards();
    return data >= whole.data() && data < whole.data() + whole.size();
  };
  auto params = problem.params();
  kit::for_each_tensor(params, [&](TensorView& view) {
    if (!view.given() || view.data == nullptr) return;
    EXPECT_EQ(std::count_if(buffers.begin(), buffers.end(), [&](const Buffer* b) { return holds(b, view.data); }), 1)
        << kit::describe(spec);
  });
  for (const Buffer* output : kit::outputs_of(problem))
    EXPECT_TRUE(output->data() == nullptr || std::find(buffers.begin(), buffers.end(), output) != buffers.end());
}

TEST(BuffersOf, HoldEveryTensor) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    for (CacheFormat format : kAllCacheFormats) {
      expect_all_memory_known<kit::DecodeCase>(kit::random_decode_spec(seed, format));
      expect_all_memory_known<kit::DecodeSparseCase>(kit::random_decode_sparse_spec(seed, format));
      expect_all_memory_known<kit::AppendCase>(kit::random_append_spec(seed, format));
      expect_all_memory_known<kit::GatherCase>(kit::random_gather_spec(seed, format));
      expect_all_memory_known<kit::CopyPagesCase>(kit::random_copy_pages_spec(seed, format));
    }
    for (CacheFormat format : kAllCacheFormats)
      expect_all_memory_known<kit::AppendRopeCase>(kit::random_append_rope_spec(seed, format));
    for (DType dtype : {DType::kBF16, DType::kE4M3})
      expect_all_memory_known<kit::PrefillCase>(kit::random_prefill_spec(seed, dtype));
    expect_all_memory_known<kit::PrefillSparseCase>(kit::random_prefill_sparse_spec(seed, DType::kBF16));
    expect_all_memory_known<kit::MergeCase>(kit::random_merge_spec(seed, DType::kF32));
    expect_all_memory_known<kit::BlockTableToCsrCase>(kit::random_block_table_to_csr_spec(seed));
    expect_all_memory_known<kit::PhysicalSlotsCase>(kit::random_physical_slots_spec(seed));
    expect_all_memory_known<kit::AppendIndexerCase>(kit::random_append_indexer_spec(seed));
    expect_all_memory_known<kit::IndexerLogitsCase>(kit::random_indexer_logits_spec(seed));
    expect_all_memory_known<kit::TopKCase>(kit::random_top_k_spec(seed));
    expect_all_memory_known<kit::IndexerTopKCase>(kit::random_indexer_top_k_spec(seed));
    expect_all_memory_known<kit::FinishOutputCase>(kit::random_finish_output_spec(seed, DType::kBF16));
    expect_all_memory_known<kit::CompressCase>(kit::random_compress_spec(seed, CacheFormat::kFP8DsV4));
  }
}

TEST(Fingerprint, SeesAByteInAnInputOrItsGuards) {
  const Buffer input(100), output(50);
  input.fill(1);
  output.fill(2);
  const kit::Fingerprint print({&input, &output}, {&output});
  EXPECT_TRUE(print.holds());
  output.data()[3] = std::byte{9};
  EXPECT_TRUE(print.holds());
  for (const std::ptrdiff_t at : {std::ptrdiff_t{0}, std::ptrdiff_t{99}, std::ptrdiff_t{-1}, std::ptrdiff_t{100}}) {
    const std::byte before = input.data()[at];
    input.data()[at] = std::byte{0x77};
    EXPECT_FALSE(print.holds()) << at;
    input.data()[at] = before;
  }
  EXPECT_TRUE(print.holds());
}

TEST(DeviceImage, OfTheHostMovesNothing) {
  const Buffer buffer(64);
  for (const char* device : {"", "cpu", "emulated:sm90"}) {
    const Result<kit::DeviceImage> image = kit::DeviceImage::create(device, {&buffer});
    ASSERT_TRUE(image.ok());
    EXPECT_FALSE(image->moves());
    EXPECT_EQ(image->there(buffer).data(), buffer.data());
    TopKParams params;
    params.logits = contiguous(buffer.data(), DType::kF32, {1, 16});
    EXPECT_EQ(image->there(params).logits.data, buffer.data());
    EXPECT_TRUE(image->fetch().ok());
  }
}

TEST(DeviceImage, OfARealGpuCopiesThereAndBack) {
  const std::vector<GpuInfo>& gpus = machine_info().gpus;
  if (std::none_of(gpus.begin(), gpus.end(), [](const GpuInfo& gpu) { return gpu.index == 0; }))
    GTEST_SKIP() << machine_info().cuda;
  const Buffer buffer(1000, 3);
  buffer.fill(7);
  const Result<kit::DeviceImage> image = kit::DeviceImage::create("cuda:0", {&buffer});
  ASSERT_TRUE(image.ok()) << image.status().message();
  EXPECT_NE(image->there(buffer).data(), buffer.data());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(image->there(buffer).data()) % 64, 3U);
  buffer.fill(8);
  ASSERT_TRUE(image->fetch().ok());
  EXPECT_EQ(buffer.data()[999], std::byte{7});
  EXPECT_TRUE(buffer.guards_intact());
}

TEST(OnDevice, SaysWhereAProblemIs) {
  const Problem problem;
  EXPECT_EQ(kit::on_device(problem, ""), problem);
  EXPECT_EQ(kit::on_device(problem, "cpu"), problem);
  const Problem emulated = kit::on_device(problem, "emulated:sm120");
  EXPECT_TRUE(emulated.emulated);
  EXPECT_EQ(emulated.gpu_arch, 120);
  const Problem gpu = kit::on_device(problem, "cuda:2");
  EXPECT_EQ(gpu.device, (Device{DeviceType::kCuda, 2}));
  EXPECT_FALSE(gpu.emulated);
  EXPECT_EQ(kit::on_device(problem, "sm86").gpu_arch, 86);
}

/// Returns what tensor cores multiply and how many bits of a query, such as "bf16 mma 16"; "f32 24" without them.
std::string mma_text(const std::string& backend, const Problem& problem) {
  const Numerics numerics = kit::numerics_of(backend, problem);
  const bool mma = numerics.products_per_cut == 16 && numerics.summed == Arithmetic::kF32;
  return std::string(name(numerics.multiplied)) + (mma ? " mma " : " ") + std::to_string(numerics.query_bits);
}

TEST(Numerics, OfTensorCoresFollowTheCache) {
  for (const char* backend : {"cuda_portable", "cuda_bulk", "cuda_sm90"}) {
    SCOPED_TRACE(backend);
    kit::DecodeSpec spec;
    EXPECT_EQ(mma_text(backend, kit::problem_of(spec)), "bf16 mma 24");
    spec.cache.format = CacheFormat::kFP8DsMla;
    EXPECT_EQ(mma_text(backend, kit::problem_of(spec)), "bf16 mma 24");
    spec.cache.format = CacheFormat::kF16;
    EXPECT_EQ(mma_text(backend, kit::problem_of(spec)), "f16 mma 24");
    kit::DecodeSparseSpec sparse;
    sparse.pool.cache.format = CacheFormat::kF16;
    EXPECT_EQ(mma_text(backend, kit::problem_of(sparse)), "f16 mma 24");
    sparse.extra_pool = kit::SparsePoolSpec{};
    EXPECT_EQ(mma_text(backend, kit::problem_of(sparse)), "bf16 mma 24");
    if (backend == std::string_view("cuda_bulk")) continue;  // it has neither prefill nor indexer
    kit::PrefillSpec prefill;
    prefill.dtype = DType::kF16;
    EXPECT_EQ(mma_text(backend, kit::problem_of(prefill)), "f16 mma 24");
    kit::IndexerLogitsSpec indexer;
    indexer.q_dtype = DType::kE4M3;
    const bool multiplies_e4m3 = backend == std::string_view("cuda_sm90");
    EXPECT_EQ(mma_text(backend, kit::problem_of(indexer)), multiplies_e4m3 ? "e4m3 24" : "f16 mma 24");
    indexer.compute = Compute::kExact;
    EXPECT_EQ(mma_text(backend, kit::problem_of(indexer)), "f16 mma 24");
  }
}

TEST(Numerics, OfCudaPortableKnowWhereThereAreNoTensorCores) {
  kit::DecodeSpec spec;
  spec.q_dtype = DType::kF32;
  EXPECT_EQ(mma_text("cuda_portable", kit::problem_of(spec)), "bf16 mma 16");
  spec.cache.format = CacheFormat::kF16;
  EXPECT_EQ(mma_text("cuda_portable", kit::problem_of(spec)), "f16 mma 22");
  kit::PrefillSpec prefill;
  prefill.dtype = DType::kF32;
  EXPECT_EQ(mma_text("cuda_portable", kit::problem_of(prefill)), "f32 24");
  prefill.dtype = DType::kBF16;
  EXPECT_EQ(mma_text("cuda_portable", kit::problem_of(prefill)), "bf16 mma 24");
  prefill.d_v = 64;
  EXPECT_EQ(mma_text("cuda_portable", kit::problem_of(prefill)), "f32 24");
  EXPECT_EQ(mma_text("cuda_portable", kit::problem_of(kit::AppendSpec{})), "f32 24");
}

TEST(ProblemOf, CountsTheQueriesOfARequest) {
  kit::DecodeSpec spec;
  spec.q_len = {1};
  EXPECT_EQ(kit::problem_of(spec).q_len, 1);
  spec.q_len = {2, 0, 1, 1};
  spec.kv_len = {9, 9, 9, 9};
  EXPECT_EQ(kit::problem_of(spec).q_len, 1);
  spec.q_len = {2, 0, 2, 1};
  EXPECT_EQ(kit::problem_of(spec).q_len, 2);
  spec.batch_invariant = true;
  EXPECT_EQ(kit::problem_of(spec).q_len, 1);
  spec = {};
  spec.kv_len = {};
  EXPECT_EQ(kit::problem_of(spec).q_len, 1);
  EXPECT_EQ(kit::problem_of(kit::DecodeSparseSpec{}).q_len, 1);
}

TEST(Tolerance, OfTensorCoresIsWhatTheyRound) {
  kit::DecodeSpec spec;
  spec.o_dtype = DType::kF32;
  const Numerics f16_mma = {.multiplied = Arithmetic::kF16, .products_per_cut = 16};
  const Numerics bf16_mma = {.multiplied = Arithmetic::kBF16, .products_per_cut = 16};
  const Numerics e4m3_mma = {.multiplied = Arithmetic::kE4M3, .products_per_cut = 32};
  const kit::Tolerance f32 = kit::tolerance_of(spec, Numerics{});
  const kit::Tolerance f16 = kit::tolerance_of(spec, f16_mma);
  const kit::Tolerance bf16 = kit::tolerance_of(spec, bf16_mma);
  EXPECT_LT(f32.max_rel, f16.max_rel);
  EXPECT_LT(f16.max_rel, 0x1p-10);
  EXPECT_LT(bf16.max_rel, 0x1p-7);
  EXPECT_GT(bf16.max_rel, 0x1p-8);
  EXPECT_LT(bf16.max_lse, 3 * f32.max_lse) << "scores are sums in f32 all the same";
  EXPECT_GT(kit::tolerance_of(spec, e4m3_mma).max_rel, 8 * bf16.max_rel);
  Numerics two_parts = bf16_mma;
  two_parts.query_bits = 16;
  EXPECT_GT(kit::tolerance_of(spec, two_parts).max_lse, bf16.max_lse);
  EXPECT_LT(kit::tolerance_of(spec, two_parts).max_lse, 0x1p-12);
}

}  // namespace
}  // namespace mla
