// SPDX-License-Identifier: Apache-2.0
// Tests attention on GPUs where visible keys begin and end, and what may change between two runs: a NaN in a key says
// sharply which queries see it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

#include "device_test.h"
#include "fenced_memory.h"
#include "kit/paged_memory.h"

namespace mla {
namespace {

using kit::DecodeCase;
using kit::DecodeSparseCase;
using kit::DecodeSparseSpec;
using kit::DecodeSpec;

DecodeSpec edge_decode(CacheFormat format, int32_t heads) {
  DecodeSpec spec;
  spec.cache = kit::usual_cache(format);
  spec.q_dtype = spec.o_dtype = format == CacheFormat::kF16 ? DType::kF16 : DType::kBF16;
  spec.num_heads = heads;
  return spec;
}

class DecodeEdges : public DeviceTest<Op::kDecode> {
 protected:
  /// Runs the case and compares its outputs with the reference.
  void expect_case(const DecodeCase& problem) {
    const Result<kit::PlannedRun> done = kit::plan_and_run(context(), problem);
    ASSERT_TRUE(done.ok()) << done.status().message();
    expect_outputs(problem);
  }
};
MLA_FOR_EVERY_DEVICE(DecodeEdges, Op::kDecode);

/// Makes a NaN of one latent and one rotary channel of a request's key, and of the second scale of its row, if it has
/// scales; leaves keys that it does not have.
void poison_key(const DecodeCase& problem, size_t request, int64_t key) {
  if (key < 0 || key >= problem.spec.kv_len[request]) return;
  std::vector<float> values(static_cast<size_t>(problem.spec.cache.d_qk));
  kit::fill_row_values(values, static_cast<uint64_t>(key) + 1);
  values[3] = values.back() = std::numeric_limits<float>::quiet_NaN();
  const int64_t slot = problem.memory.slot_of(request, key), page_size = problem.spec.cache.page_size;
  problem.memory.write_row(slot / page_size, slot % page_size, values);
  const int32_t bytes = size_of(kv_layout(problem.spec.cache.format).nope.scale_type);
  if (std::byte* const scales = problem.memory.row(slot / page_size, slot % page_size).scales; scales != nullptr)
    std::fill_n(scales + bytes, bytes, std::byte{0xFF});
}

// Steps take 32 or 64 keys, with a fast path for those whose keys all rows see.
TEST_P(DecodeEdges, OfCausalityAndWindowsAroundSteps) {
  for (CacheFormat format :
       {CacheFormat::kBF16, CacheFormat::kFP8DsMla, CacheFormat::kFP8DsV4, CacheFormat::kNvFP4DsMla})
    for (const auto& [heads, q_len] : {std::pair(3, 5), std::pair(9, 2), std::pair(5, 33)})
      for (const auto& [window, at_window] :
           {std::pair(-1, false), std::pair(62 + q_len, false), std::pair(62 + q_len, true)}) {
        DecodeSpec spec = edge_decode(format, heads);
        spec.q_len = {q_len};
        spec.kv_len.clear();
        for (int32_t keys_of_all : {31, 32, 33, 63, 64, 65, 97, 129}) spec.kv_len.push_back(keys_of_all + q_len - 1);
        spec.options.window_left = window;
        with_fitting(spec, [&, q_len = q_len, window = window, at_window = at_window](const DecodeSpec& fitting) {
          const DecodeCase problem(fitting);
          for (size_t b = 0; b < spec.kv_len.size(); ++b) {
            // The first key that only the first query does not see; or the last one that only the last does not, 0, 32
            // or 64 of the longest requests.
            const int64_t hidden = spec.kv_len[b] - q_len + 1, left = int64_t{spec.kv_len[b]} - 1 - window - 1;
            poison_key(problem, b, at_window ? left : hidden);
          }
          expect_case(problem);
        });
      }
}

TEST_P(DecodeEdges, WithoutCausalityEveryQuerySeesTheLastKey) {
  for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kFP8DsMla})
    for (int32_t last : {1, 32, 33, 64, 65, 128}) {
      DecodeSpec spec = edge_decode(format, 9);
      spec.q_len = {3};
      spec.kv_len = {last, 70};
      spec.causal = false;
      with_fitting(spec, [&](const DecodeSpec& fitting) {
        const DecodeCase problem(fitting);
        poison_key(problem, 0, last - 1);
        expect_case(problem);
      });
    }
}

// Slopes count global positions, wherever the keys live.
TEST_P(DecodeEdges, AlibiSlopesOnEveryRank) {
  for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kF16, CacheFormat::kFP8DsMla})
    for (int32_t heads : {3, 20})
      for (const ContextParallel& share : {ContextParallel{.rank = 0, .world = 2, .interleave = 1},
                                           ContextParallel{.rank = 2, .world = 3, .interleave = 2},
                                           ContextParallel{.rank = 1, .world = 4, .interleave = 16}}) {
        DecodeSpec spec = edge_decode(format, heads);
        spec.q_len = {3};
        spec.kv_len = {131, 7, 2};
        spec.options.alibi_slopes = true;
        spec.context_parallel = share;
        expect_ok(spec);
      }
}

TEST_P(DecodeEdges, PagesOfASecondTurnAreAsFresh) {
  for (CacheFormat format : formats())
    for (bool token_scales : {false, true}) {
      if (token_scales && format != CacheFormat::kFP8) continue;
      DecodeSpec spec = edge_decode(format, 3);
      spec.kv_len = {70};
      spec.cache.page_size = 32;
      spec.cache.padded_pages = kv_layout(format).has_footer();
      spec.cache.token_scales = spec.cache.two_tensors = token_scales;
      const DecodeCase used(fit(spec)), fresh(fit(spec));
      for (const kit::Buffer* buffer : fresh.memory.written()) buffer->fill(0);
      std::vector<int64_t> slots;
      for (int64_t token = 0; token < 70; ++token) slots.push_back(used.memory.slot_of(0, token));
      const kit::Buffer slot_mapping = kit::to_buffer(slots);
      const int64_t d_qk = spec.cache.d_qk;
      const kit::Buffer rows(static_cast<size_t>(70 * d_qk) * sizeof(float));
      kit::fill_normal(rows.data(), DType::kF32, 0, 70 * d_qk, 500, 0.1F);  // smaller than what stood there
      for (const DecodeCase* problem : {&used, &fresh}) {
        const Result<kit::PlannedRun> turn = kit::plan_and_run(context(), *problem);
        ASSERT_TRUE(turn.ok()) << turn.status().message();
        for (const kit::Buffer* buffer : {&rows, &slot_mapping}) MLA_EXPECT_OK(turn->image->add(*buffer));
        AppendParams append;
        append.kv = contiguous(rows.data(), DType::kF32, {70, d_qk});
        append.slot_mapping = contiguous(slot_mapping.data(), DType::kI64, {70});
        append.cache = problem->memory.cache;
        MLA_EXPECT_OK(run(context(), turn->image->there(append)));
        MLA_EXPECT_OK(run(context(), turn->plan, turn->image->there(problem->params())));
        MLA_EXPECT_OK(turn->image->fetch());
        expect_outputs(*problem);
      }
      EXPECT_EQ(bits_of(used.o), bits_of(fresh.o)) << name(format);
      EXPECT_EQ(bits_of(used.lse), bits_of(fresh.lse)) << name(format);
    }
}

class DecodeSparseEdges : public DeviceTest<Op::kDecodeSparse> {};
MLA_FOR_EVERY_DEVICE(DecodeSparseEdges, Op::kDecodeSparse);

// What lies behind a length is garbage, and rows of NaN. Lengths are of one pool alone, whatever the other's.
TEST_P(DecodeSparseEdges, LengthsOfTheSecondPool) {
  for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kFP8DsV4})
    for (const auto& [first, second] : {std::pair(33, 130), std::pair(130, 64)})
      for (kit::LengthForm form : {kit::LengthForm::kPerToken, kit::LengthForm::kPerRequest})
        for (bool both : {false, true}) {
          DecodeSparseSpec spec;
          spec.num_heads = 5;
          spec.q_len = {1, 2, 1, 3, 1, 1};
          spec.pool.cache = kit::usual_cache(format);
          spec.pool.num_tokens = 200;
          spec.pool.topk = first;
          spec.extra_pool = spec.pool;
          spec.extra_pool->topk = second;
          spec.extra_pool->topk_length = form;
          spec.extra_pool->lengths = {0, 1, second, 34, second - 1, 63, -1, second + 1, 32};
          if (both) {
            spec.pool.topk_length = form;
            spec.pool.lengths = {first, 0, 31, 1, 0, first + 1, 32};
          }
          expect_ok(spec);
          spec.q_len = {2, 2, 2};
          spec.omit_qo_indptr = true;
          expect_ok(spec);
        }
}

/// Plans, then runs with other options: `run` must go by what it is given, as mla/plan.h says.
template <class Case, class Spec>
void run_with_other_options(const Context& context, Case& problem, const Spec& changed) {
  const Result<kit::PlannedRun> done = kit::plan_and_run(context, problem);
  ASSERT_TRUE(done.ok()) << done.status().message();
  const std::vector<std::byte> before = bits_of(problem.o);
  problem.spec = changed;
  problem.reset_outputs();
  MLA_EXPECT_OK(run(context, done->plan, done->image->there(problem.params())));
  MLA_EXPECT_OK(done->image->fetch());
  EXPECT_NE(bits_of(problem.o), before);
}

/// Returns the spec with sm_scale halved, and with a cap and another base of lse besides.
template <class Spec>
std::vector<Spec> changed_after_plan(const Spec& spec) {
  std::vector<Spec> changed(2, spec);
  for (Spec& other : changed) other.sm_scale = spec.effective_sm_scale() / 2;
  changed[1].options.logits_soft_cap = 1.0F;
  changed[1].lse_base = LseBase::kTwo;
  return changed;
}

TEST_P(DecodeEdges, OptionsChangedAfterThePlan) {
  for (CacheFormat format : kAllCacheFormats)
    for (int32_t heads : {3, 20}) {
      DecodeSpec wanted = edge_decode(format, heads);
      wanted.kv_len = {140, 30};
      with_fitting(wanted, [&](const DecodeSpec& spec) {
        for (const DecodeSpec& other : changed_after_plan(spec)) {
          DecodeCase problem(spec);
          run_with_other_options(context(), problem, other);
          expect_outputs(problem);
        }
      });
    }
}

TEST_P(DecodeSparseEdges, OptionsChangedAfterThePlan) {
  for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kFP8DsMla}) {
    DecodeSparseSpec spec;
    spec.pool.cache = kit::usual_cache(format);
    spec.pool.num_tokens = 200;
    spec = fit(spec);
    for (const DecodeSparseSpec& other : changed_after_plan(spec)) {
      DecodeSparseCase problem(spec);
      run_with_other_options(context(), problem, other);
      expect_outputs(problem);
    }
  }
}

class PrefillEdges : public DeviceTest<Op::kPrefill> {};
MLA_FOR_EVERY_DEVICE(PrefillEdges, Op::kPrefill);

TEST_P(PrefillEdges, OptionsChangedAfterThePlan) {
  for (const auto& [d_qk, d_v] : kPrefillDims) {
    kit::PrefillSpec spec;
    spec.d_qk = d_qk;
    spec.d_v = d_v;
    spec.num_heads = 2;
    spec.q_len = {20};
    spec.kv_len = {70};
    if (!can_run(spec)) continue;
    for (const kit::PrefillSpec& other : changed_after_plan(spec)) {
      kit::PrefillCase problem(spec);
      run_with_other_options(context(), problem, other);
      expect_outputs(problem);
    }
  }
}

TEST_P(PrefillEdges, OfCausalityAndWindowsAroundTiles) {
  for (const auto& [d_qk, d_v] : kPrefillDims)
    for (int32_t window : {-1, 31, 64, 65})
      for (int32_t q_len : {5, 64, 65}) {
        kit::PrefillSpec spec;
        spec.d_qk = d_qk;
        spec.d_v = d_v;
        spec.num_heads = 1;
        spec.q_len = {q_len};
        spec.kv_len = {64, 65, 128, 129, 200};
        spec.options.window_left = window;
        if (!can_run(spec)) continue;
        const kit::PrefillCase problem(spec);
        const PrefillParams params = problem.params();
        int64_t first_key = 0;
        for (size_t b = 0; b < spec.kv_len.size(); first_key += spec.kv_len[b++]) {
          const int64_t position = spec.kv_len[b] - q_len + static_cast<int64_t>(b) % q_len;
          const int64_t key = b % 2 == 0 || window < 0 ? position : position - window;
          if (key >= 0)
            kit::store_element(params.k.data, spec.dtype, (first_key + key) * params.k.stride[0],
                               std::numeric_limits<float>::quiet_NaN());
        }
        const Result<kit::PlannedRun> done = kit::plan_and_run(context(), problem);
        ASSERT_TRUE(done.ok()) << done.status().message();
        expect_outputs(problem);
      }
}

// A tile of keys that reaches behind its request's end may hold the rows of the next request.
TEST_P(PrefillEdges, RowsOfAnotherRequestMayBeInfiniteOrNaN) {
  for (const auto& [d_qk, d_v] : kPrefillDims)
    for (const float value : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      kit::PrefillSpec spec;
      spec.d_qk = d_qk;
      spec.d_v = d_v;
      spec.num_heads = 2;
      spec.q_len = {30, 4, 20};
      spec.kv_len = {70, 9, 33};
      if (!can_run(spec)) continue;
      const kit::PrefillCase problem(spec);
      const PrefillParams params = problem.params();
      for (const TensorView& rows : {params.k, params.v})
        for (int64_t token = 70; token < 79; ++token)
          for (int64_t head = 0; head < 2; ++head)
            for (int64_t channel = 0; channel < 64; channel += 9)
              kit::store_element(rows.data, spec.dtype, token * rows.stride[0] + head * rows.stride[1] + channel,
                                 value);
      const Result<kit::PlannedRun> done = kit::plan_and_run(context(), problem);
      ASSERT_TRUE(done.ok()) << done.status().message();
      expect_outputs(problem);
    }
}

class PrefillOfSharedHeads : public EmulatedTest<Op::kPrefill> {};
MLA_FOR_EVERY_DEVICE(PrefillOfSharedHeads, Op::kPrefill);

// Heads that share their keys have a stride of 0, for which SM90 has no tensor copies.
TEST_P(PrefillOfSharedHeads, HaveAStrideOfZero) {
  for (const auto& [d_qk, d_v] : kPrefillDims) {
    kit::PrefillSpec spec;
    spec.d_qk = d_qk;
    spec.d_v = d_v;
    spec.num_heads = 3;
    spec.q_len = {40};
    spec.kv_len = {150};
    if (!can_run(spec)) continue;
    const kit::PrefillCase problem(spec);
    PrefillParams params = problem.params();
    for (TensorView* rows : {&params.k, &params.v}) {
      auto* const elements = static_cast<std::byte*>(rows->data);
      const auto head = static_cast<size_t>(bytes_of(spec.dtype, rows->stride[1]));
      for (int64_t token = 0; token < 150; ++token)
        for (size_t h = 1; h < 3; ++h) {
          std::byte* const row = elements + bytes_of(spec.dtype, token * rows->stride[0]);
          std::copy_n(row, head, row + h * head);
        }
      rows->stride[1] = 0;
    }
    run_params(context(), params);
    expect_outputs(problem);
  }
}

class PrefillSparseEdges : public DeviceTest<Op::kPrefillSparse> {};
MLA_FOR_EVERY_DEVICE(PrefillSparseEdges, Op::kPrefillSparse);

TEST_P(PrefillSparseEdges, OptionsChangedAfterThePlan) {
  kit::PrefillSparseSpec spec = fit(kit::PrefillSparseSpec{});
  spec.num_tokens = 3;
  for (const kit::PrefillSparseSpec& other : changed_after_plan(spec)) {
    kit::PrefillSparseCase problem(spec);
    run_with_other_options(context(), problem, other);
    expect_outputs(problem);
  }
}

}  // namespace
}  // namespace mla
