// SPDX-License-Identifier: Apache-2.0
// Tests that with batch_invariant a request's bits are the same in every batch, on GPUs. Heads and batches are such
// that the kernels of a batch would not be those of one request if their choice looked at the batch.
#include <gtest/gtest.h>

#include <vector>

#include "device_test.h"
#include "slices.h"

namespace mla {
namespace {

class DecodeBitsOnDevice : public EmulatedTest<Op::kDecode> {};
MLA_FOR_EVERY_DEVICE(DecodeBitsOnDevice, Op::kDecode);

TEST_P(DecodeBitsOnDevice, BatchInvariantWhateverTheBatch) {
  for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kFP8, CacheFormat::kFP8DsMla}) {
    kit::DecodeSpec spec;
    spec.cache = kit::usual_cache(format);
    spec.cache.block_table = true;
    spec.num_heads = 64;
    spec.kv_len = {1200, 40, 70, 33, 1, 64, 65, 130, 0};
    spec.q_len = {1};
    spec.batch_invariant = true;
    spec.o_dtype = DType::kF32;
    with_fitting(spec, [&](const kit::DecodeSpec& fitting) {
      const kit::DecodeCase problem(fitting);
      MLA_EXPECT_OK(planned_run(context(), problem.params()));
      const std::vector<std::byte> o = bits_of(problem.o), lse = bits_of(problem.lse);
      problem.reset_outputs();
      for (size_t request = 0; request < fitting.kv_len.size(); ++request)
        MLA_EXPECT_OK(planned_run(context(), DecodeSlice(problem, request, 1).params));
      EXPECT_EQ(bits_of(problem.o), o) << name(fitting.cache.format);
      EXPECT_EQ(bits_of(problem.lse), lse) << name(fitting.cache.format);
    });
  }
}

class DecodeSparseBitsOnDevice : public EmulatedTest<Op::kDecodeSparse> {};
MLA_FOR_EVERY_DEVICE(DecodeSparseBitsOnDevice, Op::kDecodeSparse);

TEST_P(DecodeSparseBitsOnDevice, BatchInvariantWhateverTheBatch) {
  for (CacheFormat format : {CacheFormat::kBF16, CacheFormat::kFP8, CacheFormat::kFP8DsV4})
    for (bool finishes : {false, true}) {
      kit::DecodeSparseSpec spec;
      spec.pool.cache = kit::usual_cache(format);
      spec.pool.topk = 100;
      spec.num_heads = 64;
      spec.q_len = {1, 1, 1, 1, 1, 1, 1, 1, 1};
      spec.batch_invariant = true;
      spec.o_dtype = finishes ? DType::kE4M3 : DType::kF32;
      if (finishes) spec.finish = kit::FinishSpec{.gate = kit::FinishSpec::Gate::kHead};
      with_fitting(spec, [&](const kit::DecodeSparseSpec& fitting) {
        const kit::DecodeSparseCase problem(fitting);
        const auto bits = [&] {
          std::vector<std::vector<std::byte>> all;
          for (const kit::Buffer* output : problem.outputs()) all.push_back(bits_of(*output));
          return all;
        };
        MLA_EXPECT_OK(planned_run(context(), problem.params()));
        const auto of_batch = bits();
        problem.reset_outputs();
        for (int64_t token = 0; token < problem.num_tokens; ++token)
          MLA_EXPECT_OK(planned_run(context(), slice(problem.params(), token, 1)));
        EXPECT_EQ(bits(), of_batch) << name(fitting.pool.cache.format);
      });
    }
}

}  // namespace
}  // namespace mla
