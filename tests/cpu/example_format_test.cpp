// SPDX-License-Identifier: Apache-2.0
// A cache format that no engine has, added to every kernel by its layout and its planes alone (docs/design.md, "How to
// add"): 512 e4m3 channels with a UE8M0 scale for each 32, 64 rotary channels of bf16, the scales in the page's footer.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "cpu/isa.h"
#include "cpu/operations.h"
#include "mla/backend.h"
#include "mla/numeric.h"
#include "reference/reference.h"

namespace mla::cpu {
namespace {

constexpr KvLayout kMx32 = {.name = "mx32",
                            .element_bytes = 1,
                            .rope_element_bytes = 2,
                            .nope_dim = 512,
                            .rope_dim = 64,
                            .row_bytes = 640,
                            .rope_offset = 512,
                            .scale_kind = ScaleKind::kFooterUE8M0,
                            .scale_offset = 0,
                            .scale_bytes_per_token = 16,
                            .channels_per_scale = 32,
                            .page_alignment = 1};
constexpr int32_t kPageSize = 16, kPages = 20, kHeads = 5, kTokens = 3;
constexpr int64_t kPageBytes = kPageSize * (kMx32.row_bytes + kMx32.scale_bytes_per_token);
constexpr int32_t kWidth = kMx32.nope_dim + kMx32.rope_dim;

struct ExampleFormat : testing::Test {
  ExampleFormat() {
    std::mt19937 random(7);
    std::normal_distribution<float> normal(0.0F, 1.0F);
    for (int32_t page = 0; page < kPages; ++page)
      for (int32_t token = 0; token < kPageSize; ++token) {  // the packer
        std::byte* row = cache.ckv.row(page, token);
        for (int32_t c = 0; c < kMx32.nope_dim; ++c) row[c] = std::byte{f32_to_e4m3(100.0F * normal(random))};
        for (int32_t i = 0; i < cache.num_scales; ++i)
          cache.scales.row(page, token)[i] = static_cast<std::byte>(120 + random() % 3);  // 2^-7 ... 2^-5
        for (int32_t c = 0; c < kMx32.rope_dim; ++c) {
          const uint16_t value = f32_to_bf16(normal(random));
          std::memcpy(cache.kpe.row(page, token) + 2 * c, &value, sizeof value);
        }
      }
    for (uint16_t& value : q) value = f32_to_bf16(normal(random));
  }

  template <class Args>
  Args attention() {
    Args args;
    args.num_tokens = kTokens;
    args.num_heads = kHeads;
    args.d_qk = kWidth;
    args.d_v = kMx32.nope_dim;
    args.q_nope = q.data();
    args.q_pe = q.data() + kMx32.nope_dim;
    args.q_nope_stride_token = args.q_pe_stride_token = int64_t{kHeads} * kWidth;
    args.q_nope_stride_head = args.q_pe_stride_head = kWidth;
    args.sm_scale = 0.05F;
    args.o_dtype = DType::kF32;
    args.o_stride_token = int64_t{kHeads} * kMx32.nope_dim;
    args.o_stride_head = kMx32.nope_dim;
    return args;
  }

  /// Every table's result against the reference's.
  template <class Args>
  void expect_reference(Args args, size_t (*size)(const KernelSet&, const Args&, int32_t),
                        dispatch::PlanSummary (*plan)(const KernelSet&, const Args&, int32_t, std::span<std::byte>),
                        void (*run)(const KernelSet&, const Args&, core::ThreadPool&, std::span<std::byte>),
                        void (*oracle)(const Args&, std::span<std::byte>)) {
    std::vector<float> expected(kTokens * kHeads * 512), got(expected.size());
    std::vector<std::max_align_t> scratch(reference::workspace_size(args) / sizeof(std::max_align_t) + 1);
    args.o = expected.data();
    oracle(args, std::as_writable_bytes(std::span(scratch)));
    args.o = got.data();
    core::ThreadPool pool(2, {});
    std::vector<const TileKernels*> tables = {tile_kernels_portable()};
#if defined(__x86_64__)
    if (explain({}).selected == "cpu_avx512_bf16") tables.push_back(tile_kernels_avx512_bf16_pairs());
#endif
    for (const TileKernels* table : tables) {
      const KernelSet set{.pairs = table, .floats = table, .rows = nullptr, .float_rows = nullptr};
      std::vector<std::byte> memory(size(set, args, pool.size()) + 64);
      void* start = memory.data();
      size_t space = memory.size();
      std::align(64, space - 64, start, space);
      const std::span<std::byte> workspace(static_cast<std::byte*>(start), space);
      plan(set, args, pool.size(), workspace);
      run(set, args, pool, workspace);
      for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], 0.01) << i;
    }
  }

  std::vector<std::byte> bytes = std::vector<std::byte>(kPages * kPageBytes);
  std::vector<uint16_t> q = std::vector<uint16_t>(kTokens * kHeads * kWidth);
  core::Cache cache = {
      .layout = kMx32,
      .num_pages = kPages,
      .page_size = kPageSize,
      .d_ckv = kMx32.nope_dim,
      .d_kpe = kMx32.rope_dim,
      .ckv = {bytes.data(), kPageBytes, kMx32.row_bytes},
      .kpe = {bytes.data() + kMx32.rope_offset, kPageBytes, kMx32.row_bytes},
      .scales = {bytes.data() + kPageSize * int64_t{kMx32.row_bytes}, kPageBytes, kMx32.scale_bytes_per_token},
      .num_scales = kMx32.nope_dim / kMx32.channels_per_scale,
      .writes_scales = true};
};

TEST_F(ExampleFormat, DecodesDensely) {
  std::vector<int32_t> table(kPages), kv_len = {kPages * kPageSize - 5};
  for (int32_t i = 0; i < kPages; ++i) table[static_cast<size_t>(i)] = kPages - 1 - i;
  auto args = attention<core::DecodeArgs>();
  args.batch_size = 1;
  args.cache = cache;
  args.queries.uniform_len = kTokens;
  args.pages = {.page_size = kPageSize,
                .batch_size = 1,
                .table = table.data(),
                .table_stride_request = kPages,
                .kv_len = kv_len.data()};
  expect_reference(args, decode_workspace_size, plan_decode, run_decode, reference::decode);
}

TEST_F(ExampleFormat, DecodesSparsely) {
  constexpr int32_t kTopk = 70;
  std::vector<int32_t> indices(kTokens * kTopk);
  for (size_t i = 0; i < indices.size(); ++i) indices[i] = static_cast<int32_t>(i * 101 % (kPages * kPageSize + 40));
  auto args = attention<core::DecodeSparseArgs>();
  args.pools[0] = {.cache = cache, .indices = indices.data(), .indices_stride_token = kTopk, .topk = kTopk};
  expect_reference(args, decode_sparse_workspace_size, plan_decode_sparse, run_decode_sparse, reference::decode_sparse);
}

}  // namespace
}  // namespace mla::cpu
