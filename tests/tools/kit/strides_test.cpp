// SPDX-License-Identifier: Apache-2.0
// Random problems give every tensor strides of its own: a kernel that ignores one of them, or takes another tensor's,
// computes something else than the reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "kit/kit.h"

namespace mla {
namespace {

/// Remembers what was seen of an operation's tensors of several dimensions.
class SeenStrides {
 public:
  template <class Params>
  void add(Params params) {
    std::map<std::string, TensorView> views;
    for_each_leaf(params, [&](const std::string& path, auto& field) {
      if constexpr (std::is_same_v<std::remove_reference_t<decltype(field)>, TensorView>)
        if (field.given() && field.ndim > 1) views.emplace(path + " of " + std::to_string(field.ndim) + "D", field);
    });
    for (const auto& [path, view] : views) {
      int64_t dense = 1;
      for (int d = view.ndim - 1; d >= 0; --d) {
        const auto at = static_cast<size_t>(d);
        bool& apart = apart_[{path, d}];
        apart = apart || (view.shape[at] > 1 && view.stride[at] != dense);
        dense = view.stride[at] * view.shape[at];
      }
      for (const auto& [other_path, other] : views)
        if (path < other_path && view.ndim == other.ndim) {
          bool& differ = differ_[{path, other_path}];
          differ = differ || view.stride != other.stride;
        }
    }
  }

  void expect_all(std::string_view op) const {
    for (const auto& [which, apart] : apart_) {
      const auto& [path, d] = which;
      const bool innermost = apart_.count({path, d + 1}) == 0;
      const bool may_lie_apart = !innermost || path.find("lse") == 0 || path.find("partial_lse") == 0 ||
                                 path.find("max_logits") == 0 ||
                                 path.find("finish.scale of") == 0;  // as mla/params.h says
      EXPECT_EQ(apart, may_lie_apart) << op << ": " << path << ", dimension " << d;
    }
    for (const auto& [pair, differ] : differ_)
      EXPECT_TRUE(differ) << op << ": " << pair.first << " and " << pair.second;
  }

 private:
  std::map<std::pair<std::string, int>, bool> apart_;
  std::map<std::pair<std::string, std::string>, bool> differ_;
};

constexpr uint64_t kSeeds = 60;

template <class Case, class Draw>
void expect_strides(const Draw& draw) {
  SeenStrides seen;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) seen.add(Case(draw(seed)).params());
  seen.expect_all(name(kit::problem_of(draw(1)).op));
}

template <class Case, class Draw>
void expect_strides_of_formats(const Draw& draw, std::span<const CacheFormat> formats = kAllCacheFormats) {
  SeenStrides seen;
  for (CacheFormat format : formats)
    for (uint64_t seed = 1; seed <= kSeeds; ++seed) seen.add(Case(draw(seed, format)).params());
  seen.expect_all(name(kit::problem_of(draw(1, CacheFormat::kBF16)).op));
}

TEST(Strides, OfAttention) {
  expect_strides_of_formats<kit::DecodeCase>(kit::random_decode_spec);
  expect_strides_of_formats<kit::DecodeSparseCase>(kit::random_decode_sparse_spec);
  expect_strides<kit::PrefillCase>([](uint64_t seed) { return kit::random_prefill_spec(seed, DType::kBF16); });
  expect_strides<kit::PrefillSparseCase>(
      [](uint64_t seed) { return kit::random_prefill_sparse_spec(seed, DType::kBF16); });
  expect_strides<kit::MergeCase>([](uint64_t seed) { return kit::random_merge_spec(seed, DType::kF32); });
}

TEST(Strides, OfWriters) {
  expect_strides_of_formats<kit::AppendCase>(kit::random_append_spec);
  expect_strides_of_formats<kit::AppendRopeCase>(kit::random_append_rope_spec);
  expect_strides_of_formats<kit::GatherCase>(kit::random_gather_spec);
  expect_strides_of_formats<kit::CopyPagesCase>(kit::random_copy_pages_spec);
  expect_strides_of_formats<kit::CompressCase>(kit::random_compress_spec);
  expect_strides<kit::FinishOutputCase>(
      [](uint64_t seed) { return kit::random_finish_output_spec(seed, DType::kBF16); });
}

TEST(Strides, OfIndexTools) {
  expect_strides<kit::BlockTableToCsrCase>(kit::random_block_table_to_csr_spec);
  expect_strides<kit::PhysicalSlotsCase>(kit::random_physical_slots_spec);
  expect_strides<kit::AppendIndexerCase>(kit::random_append_indexer_spec);
  expect_strides<kit::IndexerLogitsCase>(kit::random_indexer_logits_spec);
  expect_strides<kit::TopKCase>(kit::random_top_k_spec);
  expect_strides<kit::IndexerTopKCase>(kit::random_indexer_top_k_spec);
}

}  // namespace
}  // namespace mla
