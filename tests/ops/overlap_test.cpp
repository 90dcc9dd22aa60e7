// SPDX-License-Identifier: Apache-2.0
// Puts outputs over the memory of another tensor: every pair of every operation is refused before anything is written,
// on the host and on a GPU. What interleaves without touching is computed as ever.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "backend_test.h"
#include "kit/case_buffers.h"
#include "kit/tensors.h"

namespace mla {
namespace {

/// Returns contexts on the host, and on an emulated GPU where this build has one.
std::vector<Context> places() {
  std::vector<Context> contexts;
  for (const char* device : {"cpu", "emulated:sm90"}) {
    Result<Context> made = Context::create({.num_threads = 2, .affinity = {}, .backend = {}, .device = device});
    if (made.ok()) contexts.push_back(std::move(*made));
  }
  EXPECT_FALSE(contexts.empty());
  return contexts;
}

template <class Params>
std::vector<TensorView*> given_tensors(Params& params) {
  std::vector<TensorView*> views;
  kit::for_each_tensor(params, [&](TensorView& view) {
    if (view.given()) views.push_back(&view);
  });
  return views;
}

bool inside(const TensorView& view, const std::vector<const kit::Buffer*>& buffers) {
  return std::any_of(buffers.begin(), buffers.end(), [&](const kit::Buffer* buffer) {
    return view.data >= buffer->data() && view.data < buffer->data() + buffer->size();
  });
}

/// Returns where the last element of a tensor begins, rounded down to a multiple of `size` bytes, the size of an
/// element of the tensor that is put there.
void* last_element(const TensorView& view, size_t size) {
  auto at = reinterpret_cast<uintptr_t>(view.data);
  for (size_t d = 0; d < static_cast<size_t>(view.ndim); ++d)
    at += static_cast<uintptr_t>((view.shape[d] - 1) * view.stride[d]) * size_of(view.dtype);
  return reinterpret_cast<void*>(at / size * size);
}

/// Puts every output of the case's parameters onto every other tensor and runs them. `shared` are the inputs that
/// outputs may share memory with. Returns the number of pairs.
template <class Case>
int expect_pairs_refused(const Context& context, const Case& problem,
                         const std::function<std::vector<TensorView*>(decltype(problem.params())&)>& shared = {}) {
  using Params = decltype(problem.params());
  const std::vector<const kit::Buffer*> buffers = kit::buffers_of(problem), outputs = kit::outputs_of(problem);
  const std::string op(name(kit::problem_of(problem.spec).op));
  kit::Buffer workspace;
  Result<Plan> made = Status(StatusCode::kInternal, "no plan");
  Params valid = problem.params();
  if constexpr (requires { plan(context, valid, workspace.bytes()); }) {
    const Result<size_t> size = workspace_size(context, valid);
    MLA_EXPECT_OK(size);
    workspace = kit::Buffer(*size);
    made = plan(context, valid, workspace.bytes());
    MLA_EXPECT_OK(made);
  }
  problem.reset_outputs();
  std::vector<std::vector<std::byte>> before;
  for (const kit::Buffer* buffer : buffers) before.push_back(bits_of(*buffer));
  int pairs = 0;
  for (size_t output = 0; output < given_tensors(valid).size(); ++output)
    for (size_t other = 0; other < given_tensors(valid).size(); ++other)
      for (bool at_end : {false, true}) {
        Params params = problem.params();
        TensorView& moved = *given_tensors(params)[output];
        TensorView* const target = given_tensors(params)[other];
        if (output == other || !inside(moved, outputs)) continue;
        if (const auto excepted = shared ? shared(params) : std::vector<TensorView*>();
            std::count(excepted.begin(), excepted.end(), target) != 0)
          continue;
        // Pages of bytes begin at an even address.
        moved.data = at_end ? last_element(*target, std::max<size_t>(size_of(moved.dtype), 2)) : target->data;
        Status status;
        if constexpr (requires { run(context, *made, params); })
          status = run(context, *made, params);
        else
          status = run(context, params);
        EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << op << ": " << output << " on " << other;
        EXPECT_TRUE(status.message().starts_with(op + ": ")) << status.message();
        EXPECT_NE(status.message().find(": expected memory apart from that of "), std::string::npos)
            << output << " on " << other << ": " << status.message();
        for (size_t i = 0; i < buffers.size(); ++i)
          EXPECT_TRUE(bits_of(*buffers[i]) == before[i]) << op << ": " << output << " on " << other;
        ++pairs;
      }
  return pairs;
}

kit::CacheSpec small_cache(CacheFormat format) {
  kit::CacheSpec cache = kit::usual_cache(format);
  cache.page_size = 4;
  return cache;
}

/// Returns a cache of fp8 in two tensors, with every scale that there is.
kit::CacheSpec scaled_cache() {
  kit::CacheSpec cache = small_cache(CacheFormat::kFP8);
  cache.two_tensors = cache.token_scales = true;
  return cache;
}

template <class Spec>
void give_all(Spec& spec) {
  spec.num_heads = 2;
  spec.q_dtype = spec.o_dtype = DType::kE4M3;
  spec.split_q = true;
  spec.options.attn_sink = true;
}

TEST(Overlap, Decode) {
  kit::DecodeSpec spec;
  give_all(spec);
  spec.options.alibi_slopes = true;
  spec.q_len = {2, 1};
  spec.kv_len = {9, 3};
  spec.cache = scaled_cache();
  for (bool block_table : {false, true}) {
    spec.cache.block_table = block_table;
    spec.tree = block_table ? kit::Tree::kMask : kit::Tree::kParents;
    for (const Context& context : places())
      EXPECT_EQ(expect_pairs_refused(context, kit::DecodeCase(spec)), 2 * 2 * (block_table ? 15 : 16));
  }
}

TEST(Overlap, DecodeSparse) {
  kit::DecodeSparseSpec spec;
  give_all(spec);
  spec.q_len = {2, 1};
  spec.pool = {.cache = scaled_cache(), .num_tokens = 9, .topk = 5, .topk_length = kit::LengthForm::kPerRequest};
  spec.extra_pool = spec.pool;
  for (const Context& context : places())
    EXPECT_EQ(expect_pairs_refused(context, kit::DecodeSparseCase(spec)), 2 * 2 * 19);
}

TEST(Overlap, DecodeSparseThatFinishesOutputs) {
  kit::DecodeSparseSpec spec;
  give_all(spec);
  spec.q_len = {2, 1};
  spec.pool = {.cache = scaled_cache(), .num_tokens = 9, .topk = 5};
  spec.finish = kit::FinishSpec{.max_positions = 20, .gate = kit::FinishSpec::Gate::kChannel};
  for (const Context& context : places())
    EXPECT_EQ(expect_pairs_refused(context, kit::DecodeSparseCase(spec)), 2 * 3 * 14);
}

TEST(Overlap, Prefill) {
  kit::PrefillSpec spec;
  spec.num_heads = 2;
  spec.options = {.attn_sink = true, .alibi_slopes = true};
  spec.q_len = {2, 1};
  spec.kv_len = {3, 1};
  for (const Context& context : places()) EXPECT_EQ(expect_pairs_refused(context, kit::PrefillCase(spec)), 2 * 2 * 8);
}

TEST(Overlap, PrefillSparse) {
  kit::PrefillSparseSpec spec;
  spec.num_heads = 2;
  spec.options.attn_sink = true;
  spec.num_tokens = 3;
  spec.num_keys = 9;
  spec.topk = 5;
  spec.topk_length = true;
  for (const Context& context : places())
    EXPECT_EQ(expect_pairs_refused(context, kit::PrefillSparseCase(spec)), 2 * 3 * 7);
}

TEST(Overlap, MergeStates) {
  kit::MergeSpec spec;
  spec.num_heads = 2;
  for (const Context& context : places())
    for (bool in_place : {false, true}) {
      spec.in_place = in_place;
      EXPECT_EQ(expect_pairs_refused(context, kit::MergeCase(spec)), 2 * 2 * 3);
    }
}

kit::AppendRopeSpec rope_of_all_tensors() {
  kit::AppendRopeSpec rope;
  rope.num_tokens = 5;
  rope.max_positions = 20;
  rope.cache = scaled_cache();
  rope.q_out_dtype = DType::kE4M3;
  rope.q_norm = rope.q_norm_weight = true;
  rope.norm = kit::AppendRopeSpec::Norm::kRow;
  return rope;
}

TEST(Overlap, Writers) {
  kit::AppendSpec append;
  append.num_tokens = 5;
  append.cache = scaled_cache();
  append.split_rows = true;
  const kit::AppendRopeSpec rope = rope_of_all_tensors();
  kit::AppendIndexerSpec indexer;
  indexer.num_tokens = 5;
  indexer.page_size = 4;
  for (const Context& context : places()) {
    EXPECT_EQ(expect_pairs_refused(context, kit::AppendCase(append)), 2 * 3 * 6);
    EXPECT_EQ(expect_pairs_refused(context, kit::AppendRopeCase(rope)), 2 * 4 * 14);
    EXPECT_EQ(expect_pairs_refused(context, kit::AppendIndexerCase(indexer)), 2 * 2);
    for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kFP8DsMla, CacheFormat::kFP8DsV4}) {
      kit::AppendSpec packed = append;
      packed.cache = small_cache(format);
      EXPECT_EQ(expect_pairs_refused(context, kit::AppendCase(packed)), 2 * 3);
    }
  }
}

TEST(Overlap, Compressors) {
  kit::CompressSpec spec;
  spec.q_len = {3, 1};
  spec.kv_len = {9, 4};
  spec.cache = small_cache(CacheFormat::kFP8DsV4);
  for (const Context& context : places()) EXPECT_EQ(expect_pairs_refused(context, kit::CompressCase(spec)), 2 * 3 * 11);
  spec.append = rope_of_all_tensors();
  spec.append->num_tokens = 4;
  for (const Context& context : places()) EXPECT_EQ(expect_pairs_refused(context, kit::CompressCase(spec)), 2 * 7 * 26);
}

TEST(Overlap, FinishedOutputs) {
  kit::FinishOutputSpec spec;
  spec.num_tokens = 3;
  spec.max_positions = 20;
  spec.out_dtype = DType::kE4M3;
  spec.gate = kit::FinishSpec::Gate::kChannel;
  for (const Context& context : places())
    EXPECT_EQ(expect_pairs_refused(context, kit::FinishOutputCase(spec)), 2 * 2 * 5);
}

TEST(Overlap, Readers) {
  kit::GatherSpec gather;
  gather.kv_len = {9, 3};
  gather.token_start = {1, 0};
  gather.count = {3, 3};
  gather.cache = scaled_cache();
  gather.split_out = true;
  kit::CopyPagesSpec copy;
  copy.num_tokens = 8;
  copy.from = small_cache(CacheFormat::kBF16);
  copy.to = scaled_cache();
  const auto pages_of = [](CopyPagesParams& p) {
    return std::vector<TensorView*>{&p.from.kv, &p.from.ckv, &p.from.kpe};
  };
  for (const Context& context : places()) {
    EXPECT_EQ(expect_pairs_refused(context, kit::GatherCase(gather)), 2 * 2 * 10);
    EXPECT_EQ(expect_pairs_refused(context, kit::CopyPagesCase(copy), pages_of), 2 * 3 * 5);
  }
}

TEST(Overlap, IndexTools) {
  kit::BlockTableToCsrSpec csr;
  csr.kv_len = {9, 3};
  kit::PhysicalSlotsSpec slots;
  slots.kv_len = {9, 3};
  slots.topk = 5;
  slots.topk_length = true;
  kit::IndexerLogitsSpec logits;
  logits.kv_len = {9, 3};
  logits.num_heads = 2;
  kit::TopKSpec top;
  top.num_logits = 9;
  top.k = 3;
  top.lengths = true;
  kit::IndexerTopKSpec both;
  both.indexer = logits;
  both.topk = 3;
  const auto in_place = [](PhysicalSlotsParams& p) { return std::vector<TensorView*>{&p.indices}; };
  for (const Context& context : places()) {
    EXPECT_EQ(expect_pairs_refused(context, kit::BlockTableToCsrCase(csr)), 2 * 2 * 3);
    EXPECT_EQ(expect_pairs_refused(context, kit::PhysicalSlotsCase(slots), in_place), 2 * 2 * 6);
    EXPECT_EQ(expect_pairs_refused(context, kit::IndexerLogitsCase(logits)), 2 * 7);
    EXPECT_EQ(expect_pairs_refused(context, kit::TopKCase(top)), 2 * 2);
    EXPECT_EQ(expect_pairs_refused(context, kit::IndexerTopKCase(both)), 2 * 3 * 12);
  }
}

TEST(Overlap, QueriesOutputsAndStatisticsOfOneTensor) {
  constexpr int64_t kRow = 576 + 512 + 2;  // queries, outputs, and an f32 in two places
  for (const Context& context : places()) {
    kit::DecodeSpec spec;
    spec.q_len = {3, 1};
    spec.kv_len = {90, 30};
    spec.num_heads = 4;
    const kit::DecodeCase problem(spec);
    MLA_EXPECT_OK(kit::plan_and_run(context, problem));
    const DecodeParams apart = problem.params();
    std::vector<uint16_t> memory(static_cast<size_t>(problem.num_tokens) * 4 * kRow);
    for (int64_t row = 0; row < problem.num_tokens * 4; ++row)
      std::memcpy(&memory[static_cast<size_t>(row * kRow)], problem.q.as<uint16_t>() + row * 576, 576 * 2);
    DecodeParams slices = apart;
    slices.q.data = memory.data();
    slices.o.data = memory.data() + 576;
    slices.lse.data = memory.data() + 576 + 512;
    for (TensorView* view : {&slices.q, &slices.o}) view->stride = {4 * kRow, kRow, 1};
    slices.lse.stride = {4 * kRow / 2, kRow / 2};
    MLA_EXPECT_OK(planned_run(context, slices));
    EXPECT_EQ(kit::to_dense(slices.o), kit::to_dense(apart.o));
    for (int64_t row = 0; row < problem.num_tokens * 4; ++row)
      EXPECT_EQ(static_cast<const float*>(slices.lse.data)[row * kRow / 2], problem.lse.as<float>()[row]);
    EXPECT_EQ(kit::to_dense(slices.q), kit::to_dense(apart.q));
  }
}

/// Holds three layers' pages of four rows of 12 channels, in turns, in one buffer. The rows hold their numbers.
struct Layers {
  static constexpr int64_t kPages = 6, kPageSize = 4, kRow = 12, kPage = kPageSize * kRow, kLayers = 3;
  std::vector<uint16_t> memory = std::vector<uint16_t>(kPages * kLayers * kPage);

  Layers() {
    for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<uint16_t>(i / kRow);
  }
  /// Returns where a page of a layer begins.
  uint16_t* page(int64_t layer, int64_t page) { return memory.data() + (page * kLayers + layer) * kPage; }
  KvCache cache(int64_t layer) {
    TensorView kv = contiguous(page(layer, 0), DType::kBF16, {kPages, kPageSize, kRow});
    kv.stride[0] = kLayers * kPage;
    return {.kv = kv};
  }
  TensorView rows(int64_t layer, int64_t number) { return contiguous(page(layer, number), DType::kBF16, {4, kRow}); }
};

TEST(Overlap, RowsBetweenThePagesOfALayer) {
  for (const Context& context : places()) {
    Layers layers;
    const std::vector<uint16_t> source(layers.page(2, 3), layers.page(2, 4));
    int64_t slots[] = {20, 1, 2, 23};
    AppendParams append;
    append.kv = layers.rows(2, 3);
    append.slot_mapping = contiguous(slots, DType::kI64, {4});
    append.cache = layers.cache(0);
    Layers expected = layers;
    for (int i = 0; i < 4; ++i)
      std::copy_n(expected.page(2, 3) + i * Layers::kRow, Layers::kRow,
                  expected.page(0, slots[i] / 4) + slots[i] % 4 * Layers::kRow);
    MLA_EXPECT_OK(run(context, append));
    EXPECT_EQ(layers.memory, expected.memory);

    int32_t kv_len[] = {4}, table[] = {5}, indptr[] = {0, 4};
    GatherParams gather;
    gather.cache = layers.cache(0);
    gather.pages.block_table = contiguous(table, DType::kI32, {1, 1});
    gather.pages.kv_len = contiguous(kv_len, DType::kI32, {1});
    gather.out_indptr = contiguous(indptr, DType::kI32, {2});
    gather.out_kv = layers.rows(1, 2);
    std::copy_n(expected.page(0, 5), Layers::kPage, expected.page(1, 2));
    MLA_EXPECT_OK(run(context, gather));
    EXPECT_EQ(layers.memory, expected.memory);
    gather.out_kv.data = layers.page(1, 2) + Layers::kPage + 1;  // through the next layer into the page behind
    EXPECT_FALSE(run(context, gather).ok());
    EXPECT_EQ(layers.memory, expected.memory);
  }
}

TEST(Overlap, PagesWithinOneCache) {
  for (const Context& context : places()) {
    Layers layers, expected;
    int32_t from[] = {5, 0}, to[] = {1, 4};
    CopyPagesParams copy;
    copy.from = copy.to = layers.cache(1);
    copy.from_pages = contiguous(from, DType::kI32, {2});
    copy.to_pages = contiguous(to, DType::kI32, {2});
    for (int i = 0; i < 2; ++i) std::copy_n(expected.page(1, from[i]), Layers::kPage, expected.page(1, to[i]));
    MLA_EXPECT_OK(run(context, copy));
    EXPECT_EQ(layers.memory, expected.memory);
  }
}

}  // namespace
}  // namespace mla
