// SPDX-License-Identifier: Apache-2.0
// Tests mla_tensor against the DLPack header itself: callers cast DLTensor* to it.
#include <dlpack/dlpack.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <iterator>
#include <type_traits>

#include "mla/c_api.h"
#include "mla/mla.h"

namespace {

template <class Ours, class Theirs>
// NOLINTNEXTLINE(misc-redundant-expression): the types differ where it is used
constexpr bool same_size_and_alignment = sizeof(Ours) == sizeof(Theirs) && alignof(Ours) == alignof(Theirs);

TEST(Layout, TensorIsDlpacks) {
  EXPECT_TRUE((same_size_and_alignment<mla_tensor, DLTensor>));
  EXPECT_TRUE((same_size_and_alignment<mla_device, DLDevice>));
  EXPECT_TRUE((same_size_and_alignment<mla_dtype, DLDataType>));
  EXPECT_EQ(offsetof(mla_tensor, data), offsetof(DLTensor, data));
  EXPECT_EQ(offsetof(mla_tensor, device), offsetof(DLTensor, device));
  EXPECT_EQ(offsetof(mla_tensor, ndim), offsetof(DLTensor, ndim));
  EXPECT_EQ(offsetof(mla_tensor, dtype), offsetof(DLTensor, dtype));
  EXPECT_EQ(offsetof(mla_tensor, shape), offsetof(DLTensor, shape));
  EXPECT_EQ(offsetof(mla_tensor, strides), offsetof(DLTensor, strides));
  EXPECT_EQ(offsetof(mla_tensor, byte_offset), offsetof(DLTensor, byte_offset));
  EXPECT_EQ(offsetof(mla_device, device_type), offsetof(DLDevice, device_type));
  EXPECT_EQ(offsetof(mla_device, device_id), offsetof(DLDevice, device_id));
  EXPECT_EQ(offsetof(mla_dtype, bits), offsetof(DLDataType, bits));
  EXPECT_EQ(offsetof(mla_dtype, lanes), offsetof(DLDataType, lanes));
}

TEST(Layout, CodesAreDlpacks) {
  EXPECT_EQ(static_cast<int>(MLA_DTYPE_INT), static_cast<int>(kDLInt));
  EXPECT_EQ(static_cast<int>(MLA_DTYPE_UINT), static_cast<int>(kDLUInt));
  EXPECT_EQ(static_cast<int>(MLA_DTYPE_FLOAT), static_cast<int>(kDLFloat));
  EXPECT_EQ(static_cast<int>(MLA_DTYPE_BFLOAT), static_cast<int>(kDLBfloat));
  EXPECT_EQ(static_cast<int>(MLA_DEVICE_CPU), static_cast<int>(kDLCPU));
  EXPECT_EQ(static_cast<int>(MLA_DEVICE_CUDA), static_cast<int>(kDLCUDA));
}

TEST(Layout, EnumerationsAreThoseOfTheCppApi) {
  EXPECT_EQ(static_cast<int>(MLA_INVALID_ARGUMENT), static_cast<int>(mla::StatusCode::kInvalidArgument));
  EXPECT_EQ(static_cast<int>(MLA_UNSUPPORTED), static_cast<int>(mla::StatusCode::kUnsupported));
  EXPECT_EQ(static_cast<int>(MLA_WORKSPACE_TOO_SMALL), static_cast<int>(mla::StatusCode::kWorkspaceTooSmall));
  EXPECT_EQ(static_cast<int>(MLA_INTERNAL), static_cast<int>(mla::StatusCode::kInternal));
  EXPECT_EQ(static_cast<int>(MLA_DECODE), static_cast<int>(mla::Op::kDecode));
  EXPECT_EQ(static_cast<int>(MLA_PREFILL), static_cast<int>(mla::Op::kPrefill));
  EXPECT_EQ(static_cast<int>(MLA_MERGE_STATES), static_cast<int>(mla::Op::kMergeStates));
  EXPECT_EQ(static_cast<int>(MLA_APPEND), static_cast<int>(mla::Op::kAppend));
  EXPECT_EQ(static_cast<int>(MLA_GATHER), static_cast<int>(mla::Op::kGather));
  EXPECT_EQ(static_cast<int>(MLA_DECODE_SPARSE), static_cast<int>(mla::Op::kDecodeSparse));
  EXPECT_EQ(static_cast<int>(MLA_PREFILL_SPARSE), static_cast<int>(mla::Op::kPrefillSparse));
  EXPECT_EQ(static_cast<int>(MLA_APPEND_ROPE), static_cast<int>(mla::Op::kAppendRope));
  EXPECT_EQ(static_cast<int>(MLA_COPY_PAGES), static_cast<int>(mla::Op::kCopyPages));
  EXPECT_EQ(static_cast<int>(MLA_BLOCK_TABLE_TO_CSR), static_cast<int>(mla::Op::kBlockTableToCsr));
  EXPECT_EQ(static_cast<int>(MLA_PHYSICAL_SLOTS), static_cast<int>(mla::Op::kPhysicalSlots));
  EXPECT_EQ(static_cast<int>(MLA_APPEND_INDEXER), static_cast<int>(mla::Op::kAppendIndexer));
  EXPECT_EQ(static_cast<int>(MLA_INDEXER_LOGITS), static_cast<int>(mla::Op::kIndexerLogits));
  EXPECT_EQ(static_cast<int>(MLA_TOP_K), static_cast<int>(mla::Op::kTopK));
  EXPECT_EQ(static_cast<int>(MLA_INDEXER_TOP_K), static_cast<int>(mla::Op::kIndexerTopK));
  EXPECT_EQ(static_cast<int>(MLA_COMPRESS), static_cast<int>(mla::Op::kCompress));
  EXPECT_EQ(static_cast<int>(MLA_FINISH_OUTPUT), static_cast<int>(mla::Op::kFinishOutput));
  EXPECT_EQ(std::size(mla::kAllOps), static_cast<size_t>(MLA_FINISH_OUTPUT) + 1);
  EXPECT_EQ(static_cast<int>(MLA_CACHE_F16), static_cast<int>(mla::CacheFormat::kF16));
  EXPECT_EQ(static_cast<int>(MLA_CACHE_FP8), static_cast<int>(mla::CacheFormat::kFP8));
  EXPECT_EQ(static_cast<int>(MLA_CACHE_FP8_DS_MLA), static_cast<int>(mla::CacheFormat::kFP8DsMla));
  EXPECT_EQ(static_cast<int>(MLA_CACHE_FP8_DSV4), static_cast<int>(mla::CacheFormat::kFP8DsV4));
  EXPECT_EQ(static_cast<int>(MLA_CACHE_FP8_DSV41), static_cast<int>(mla::CacheFormat::kFP8DsV41));
  EXPECT_EQ(static_cast<int>(MLA_CACHE_FP4_DSV41), static_cast<int>(mla::CacheFormat::kFP4DsV41));
  EXPECT_EQ(static_cast<int>(MLA_CACHE_FP8_NOPE), static_cast<int>(mla::CacheFormat::kFP8Nope));
  EXPECT_EQ(static_cast<int>(MLA_CACHE_NVFP4_DS_MLA), static_cast<int>(mla::CacheFormat::kNvFP4DsMla));
  EXPECT_EQ(static_cast<int>(MLA_CACHE_NVFP4_DS_MLA_416), static_cast<int>(mla::CacheFormat::kNvFP4DsMla416));
  EXPECT_EQ(static_cast<int>(MLA_CACHE_NVFP4_DS_MLA_368), static_cast<int>(mla::CacheFormat::kNvFP4DsMla368));
  EXPECT_EQ(static_cast<int>(MLA_CACHE_NVFP4_DSV4), static_cast<int>(mla::CacheFormat::kNvFP4DsV4));
  EXPECT_EQ(static_cast<int>(MLA_CACHE_MXFP4_DSV4), static_cast<int>(mla::CacheFormat::kMxFP4DsV4));
  EXPECT_EQ(std::size(mla::kAllCacheFormats), static_cast<size_t>(MLA_CACHE_MXFP4_DSV4) + 1);
  EXPECT_EQ(static_cast<int>(MLA_ARITHMETIC_F64), static_cast<int>(mla::Arithmetic::kF64));
  EXPECT_EQ(static_cast<int>(MLA_ARITHMETIC_F32), static_cast<int>(mla::Arithmetic::kF32));
  EXPECT_EQ(static_cast<int>(MLA_ARITHMETIC_F16), static_cast<int>(mla::Arithmetic::kF16));
  EXPECT_EQ(static_cast<int>(MLA_ARITHMETIC_BF16), static_cast<int>(mla::Arithmetic::kBF16));
  EXPECT_EQ(static_cast<int>(MLA_ARITHMETIC_E4M3), static_cast<int>(mla::Arithmetic::kE4M3));
  EXPECT_EQ(static_cast<int>(MLA_LSE_BASE_2), static_cast<int>(mla::LseBase::kTwo));
  EXPECT_EQ(static_cast<int>(MLA_COMPUTE_DEFAULT), static_cast<int>(mla::Compute::kDefault));
  EXPECT_EQ(static_cast<int>(MLA_COMPUTE_FP8), static_cast<int>(mla::Compute::kFP8));
  EXPECT_EQ(static_cast<int>(MLA_COMPUTE_EXACT), static_cast<int>(mla::Compute::kExact));
  EXPECT_EQ(static_cast<int>(MLA_LENGTH_BY_SHAPE), static_cast<int>(mla::LengthPer::kByShape));
  EXPECT_EQ(static_cast<int>(MLA_LENGTH_PER_TOKEN), static_cast<int>(mla::LengthPer::kToken));
  EXPECT_EQ(static_cast<int>(MLA_LENGTH_PER_REQUEST), static_cast<int>(mla::LengthPer::kRequest));
}

TEST(Layout, OlderCallersFindTheirFieldsWhereTheyWere) {
  // As the first release had them; fields since are appended.
  EXPECT_EQ(sizeof(mla_kv_cache), 32U);
  EXPECT_EQ(offsetof(mla_kv_cache, kv), 8U);
  EXPECT_EQ(offsetof(mla_decode_params, cache), 32U);
  EXPECT_EQ(offsetof(mla_decode_params, pages), 64U);
  EXPECT_EQ(offsetof(mla_decode_params, qo_indptr), 96U);
  EXPECT_EQ(offsetof(mla_decode_params, lse), 128U);
  EXPECT_EQ(offsetof(mla_decode_params, q_scale), 136U);
  EXPECT_EQ(offsetof(mla_prefill_params, options), 80U);
  EXPECT_EQ(offsetof(mla_append_params, scales), 72U);
  EXPECT_EQ(offsetof(mla_gather_params, scales), 112U);
  // As the second had them.
  EXPECT_EQ(offsetof(mla_decode_params, stream), 240U);
  EXPECT_EQ(offsetof(mla_decode_params, shared_prefix), 248U);
  EXPECT_EQ(offsetof(mla_merge_states_params, stream), 48U);
  EXPECT_EQ(offsetof(mla_context_options, device), 32U);
  EXPECT_EQ(offsetof(mla_problem, gpu_arch), 56U);
  // As the third had them.
  EXPECT_EQ(offsetof(mla_problem, q_len), 64U);
  EXPECT_EQ(offsetof(mla_decode_sparse_params, topk_length_per), offsetof(mla_decode_sparse_params, stream) + 8);
  // As the fourth had them.
  EXPECT_EQ(offsetof(mla_problem, compute), 72U);
  EXPECT_EQ(offsetof(mla_problem, listed_keys), 80U);
  EXPECT_EQ(offsetof(mla_attention_options, compute), 28U);
  EXPECT_EQ(sizeof(mla_attention_options), 32U);
  EXPECT_EQ(offsetof(mla_prefill_params, stream), 112U);
  // As the fifth had them.
  EXPECT_EQ(offsetof(mla_prefill_params, q_scale), 120U);
  // As the sixth had them.
  EXPECT_EQ(offsetof(mla_decode_sparse_params, max_logits), offsetof(mla_decode_sparse_params, stream) + 16);
  // What becomes of outputs follows, of which those before know nothing.
  EXPECT_EQ(offsetof(mla_decode_sparse_params, cos_sin), offsetof(mla_decode_sparse_params, max_logits) + 8);
  EXPECT_EQ(offsetof(mla_decode_sparse_params, any_scales), offsetof(mla_decode_sparse_params, scale) + 12);
  EXPECT_EQ(sizeof(mla_decode_sparse_params), offsetof(mla_decode_sparse_params, any_scales) + 4);
  // Formats of the indexer's keys stand where the first and the fourth had a reserved number.
  EXPECT_EQ(sizeof(mla_indexer_cache), 16U);
  EXPECT_EQ(offsetof(mla_indexer_cache, format), 12U);
  EXPECT_EQ(offsetof(mla_problem, indexer_format), 76U);
  // So does the listing of tokens in the first one's parameters of indexer_top_k; ranks and topk follow.
  EXPECT_EQ(offsetof(mla_indexer_top_k_params, list_tokens), offsetof(mla_indexer_top_k_params, compute) + 4);
  EXPECT_EQ(offsetof(mla_indexer_top_k_params, context_parallel), offsetof(mla_indexer_top_k_params, compute) + 8);
  EXPECT_EQ(sizeof(mla_indexer_top_k_params), offsetof(mla_indexer_top_k_params, context_parallel) + 24);
  // Types of logits follow, of which those before know nothing.
  EXPECT_EQ(offsetof(mla_problem, logits_dtype), 88U);
  EXPECT_EQ(offsetof(mla_problem, full_build), 92U);
  EXPECT_EQ(offsetof(mla_problem, num_requests), 96U);
  EXPECT_EQ(sizeof(mla_problem), 104U);
  // What lse is without keys stands where those before had a reserved number.
  EXPECT_EQ(offsetof(mla_decode_params, lse_inf_without_keys), 252U);
  EXPECT_EQ(sizeof(mla_decode_params), 256U);
  EXPECT_EQ(offsetof(mla_decode_sparse_params, o), offsetof(mla_decode_sparse_params, lse_inf_without_keys) + 4);
  EXPECT_EQ(offsetof(mla_prefill_sparse_params, o), offsetof(mla_prefill_sparse_params, lse_inf_without_keys) + 4);
}

TEST(Layout, NoCompressParamsHaveGaps) {
  // Pointers, then numbers in pairs: no byte between them would be left to chance.
  EXPECT_EQ(offsetof(mla_compress_params, ratio), 12 * sizeof(void*));
  EXPECT_EQ(offsetof(mla_compress_params, cache), 12 * sizeof(void*) + 6 * sizeof(int32_t));
  EXPECT_EQ(offsetof(mla_compress_params, append), offsetof(mla_compress_params, stream) + sizeof(void*));
  EXPECT_EQ(sizeof(mla_compress_params), 14 * sizeof(void*) + 6 * sizeof(int32_t) + sizeof(mla_kv_cache) +
                                             sizeof(mla_cache_scales) + sizeof(mla_indexer_cache));
}

TEST(Layout, VerdictsKeepTheirFirstForm) {
  EXPECT_EQ(sizeof(mla_verdict), 48U);
  EXPECT_EQ(offsetof(mla_verdict, multiplied), 20U);
  EXPECT_EQ(offsetof(mla_verdict, sum_bits), 36U);
  EXPECT_EQ(offsetof(mla_verdict, p_run), 40U);
}

TEST(Layout, StructsAreFitForC) {
  EXPECT_TRUE(std::is_standard_layout_v<mla_decode_params>);
  EXPECT_TRUE(std::is_trivially_copyable_v<mla_gather_params>);
  EXPECT_TRUE(std::is_trivially_copyable_v<mla_compress_params>);
  EXPECT_EQ(offsetof(mla_decode_params, struct_size), 0U);
  EXPECT_EQ(offsetof(mla_problem, struct_size), 0U);
  EXPECT_EQ(offsetof(mla_compress_params, struct_size), 0U);
}

}  // namespace
