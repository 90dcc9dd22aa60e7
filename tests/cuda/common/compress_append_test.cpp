// SPDX-License-Identifier: Apache-2.0
// Tests which kernels compress enqueues for what it appends beside its latents, and what the second of its own does
// before the first has ended: it appends the keys, and neither rows of latents nor the state.
#include <algorithm>
#include <string>
#include <vector>

#include "core/validate.h"
#include "cuda/common/memory.h"
#include "reference/reference.h"

namespace mla::writers_test {
namespace {

/// Notes the names of kernels, and runs them.
class NotingQueue final : public cuda::Queue {
 public:
  TestQueue queue;
  std::vector<std::string> names;

  const cuda::DeviceProperties& device() const override { return queue.device(); }
  Status launch(const cuda::KernelEntry& kernel, const cuda::LaunchShape& shape, const void* params) override {
    names.emplace_back(kernel.name);
    return queue.launch(kernel, shape, params);
  }
};

/// Pools pairs of seven tokens of two requests into rows of a pool, and appends their keys to a window, both as V4 has
/// them.
struct PairsAndKeys {
  static constexpr int64_t kTokens = 7, kWidth = 512, kRotary = 64, kPlain = kWidth - kRotary, kPage = 8;
  static constexpr int64_t kHeads = 2;
  Random random{7};
  Memory memory{random};
  int64_t page_bytes = mla::page_bytes(CacheFormat::kFP8DsV4, kWidth, kPage, false);
  CompressParams params;

  PairsAndKeys() {
    const auto rows = [&](DType dtype, int64_t channels) {
      return contiguous(memory.elements(dtype, kTokens * channels, 0), dtype, {kTokens, channels});
    };
    const auto list = [&](DType dtype, auto values) {
      const int64_t size = std::ssize(values);
      return contiguous(memory.list(values), dtype, {size});
    };
    const auto cache = [&] {
      return KvCache{.format = CacheFormat::kFP8DsV4,
                     .kv = contiguous(memory.bytes(page_bytes, 0), DType::kU8, {1, page_bytes}),
                     .page_size = kPage};
    };
    const TensorView angles =
        contiguous(memory.list(std::vector<float>(12 * kRotary, 0.5F)), DType::kF32, {12, kRotary});
    params.kv = rows(DType::kBF16, kWidth);
    params.score = rows(DType::kBF16, kWidth);
    params.qo_indptr = list(DType::kI32, std::vector<int32_t>{0, 4, 7});
    params.kv_len = list(DType::kI32, std::vector<int32_t>{4, 8});
    params.ratio = 2;
    params.state =
        contiguous(memory.list(std::vector<float>(2 * 2 * 2 * kWidth, 0.25F)), DType::kF32, {2, 2, 2 * kWidth});
    params.state_table = contiguous(memory.list(std::vector<int32_t>{0, 1}), DType::kI32, {2, 1});
    params.latent = rows(DType::kBF16, kWidth);
    params.slot_mapping = list(DType::kI64, std::vector<int64_t>{-1, 3, -1, 5, 6, -1, 0});
    params.cos_sin = angles;
    params.cache = cache();
    params.append.ckv = rows(DType::kBF16, kPlain);
    params.append.kpe = rows(DType::kBF16, kRotary);
    params.append.cos_sin = angles;
    params.append.positions = list(DType::kI64, std::vector<int64_t>{0, 1, 2, 3, 5, 6, 7});
    params.append.slot_mapping = list(DType::kI64, std::vector<int64_t>{0, 7, -1, 3, 4, 5, 6});
    params.append.norm_weight = contiguous(memory.list(std::vector<float>(kWidth, 1.5F)), DType::kF32, {kWidth});
    params.append.cache = cache();
  }
  void add_queries() {
    const auto heads = [&](int64_t channels) {
      return contiguous(memory.elements(DType::kBF16, kTokens * kHeads * channels, 0), DType::kBF16,
                        {kTokens, kHeads, channels});
    };
    params.append.q_nope = heads(kPlain);
    params.append.q_pe = heads(kRotary);
    params.append.q_out = heads(kWidth);
  }
  core::CompressArgs args() const {
    core::CompressArgs args;
    Device device;
    EXPECT_EQ(core::validate(params, args, device, core::Memory::kEmulated).message(), "");
    return args;
  }
  std::vector<std::byte> bytes_of(const TensorView& view) const {
    int64_t size = static_cast<int64_t>(size_of(view.dtype));
    for (int32_t d = 0; d < view.ndim; ++d) size *= view.shape[static_cast<size_t>(d)];
    const auto* const data = static_cast<const std::byte*>(view.data);
    return {data, data + size};
  }
};

std::vector<std::string> kernels_of(const PairsAndKeys& problem) {
  NotingQueue queue;
  EXPECT_EQ(run_compress(problem.args(), queue).message(), "");
  return queue.names;
}

TEST(CudaCompressAppend, KeysNeedNoKernelOfTheirOwn) {
  using Names = std::vector<std::string>;
  PairsAndKeys alone;
  alone.params.append = {};
  EXPECT_EQ(kernels_of(alone), (Names{"compress_pairs", "compress_rows"}));
  EXPECT_EQ(kernels_of(PairsAndKeys()), (Names{"compress_pairs", "compress_rows"}));
  PairsAndKeys queries;
  queries.add_queries();
  EXPECT_EQ(kernels_of(queries), (Names{"query_rows", "compress_pairs", "compress_rows"}));
  PairsAndKeys halves;
  halves.params.append.interleaved = false;
  EXPECT_EQ(kernels_of(halves), (Names{"append_rope_norm", "compress_pairs", "compress_rows"}));
  PairsAndKeys latents;  // go nowhere, so that nothing of theirs turns
  latents.params.slot_mapping = latents.params.cos_sin = {};
  latents.params.cache = {};
  EXPECT_EQ(kernels_of(latents), (Names{"append_turned_groups", "compress_pairs", "compress_keep"}));
}

TEST(CudaCompressAppend, OnlyKeysAreAppendedBeforeTheLatentsAreMade) {
  for (uint64_t seed = 0; seed < 4; ++seed) {
    const PairsAndKeys problem;
    const core::CompressArgs args = problem.args();
    const std::vector<std::byte> window = problem.bytes_of(problem.params.append.cache.kv);
    reference::append_rope(args.append);
    const std::vector<std::byte> expected = problem.bytes_of(problem.params.append.cache.kv);
    ASSERT_NE(window, expected);
    std::copy(window.begin(), window.end(), static_cast<std::byte*>(problem.params.append.cache.kv.data));
    const std::vector<std::byte> pool = problem.bytes_of(problem.params.cache.kv),
                                 state = problem.bytes_of(problem.params.state);
    TestQueue queue(seed);
    queue.let_previous_grid_run_for_ever();
    ASSERT_EQ(run_compress(args, queue).message(), "");
    EXPECT_EQ(problem.bytes_of(problem.params.append.cache.kv), expected);
    EXPECT_EQ(problem.bytes_of(problem.params.cache.kv) == pool, kHasGridDependencies);
    EXPECT_EQ(problem.bytes_of(problem.params.state) == state, kHasGridDependencies);
  }
}

}  // namespace
}  // namespace mla::writers_test
