// SPDX-License-Identifier: Apache-2.0
// This file has the arguments of the absorbed attention kernels, with decode, decode_sparse and prefill_sparse in one
// form. All pointers point to device memory.
#pragma once

#include "core/args.h"
#include "cuda/common/work_list.h"
#include "cuda/tile/fast_divisor.h"

namespace mla::cuda {

/// A pool holds rows of keys. Dense decode has one pool, whose rows are found by page numbers. Sparse attention has one
/// or two, whose rows are found by slot numbers.
struct KeyPool {
  core::Cache cache = {};
  FastDivisor page_size = {};  // tokens of a page
  int32_t ckv_bytes = 0;       // bytes of a row's latent channels
  int32_t kpe_bytes = 0;       // bytes of a row's rotary channels
  int32_t scale_words = 0;     // 4-byte words of a row's scales, to which they are padded
  bool ue8m0 = false;          // scales are UE8M0
  bool quantized_kpe = false;  // rotary channels are quantized
  bool row_kpe_scale = false;  // and every row has their scale
  bool common_e4m3 = false;    // Cache::has_common_e4m3()
  bool common_e2m1 = false;    // e2m1 with scales of a byte and no outer scale
  bool aligned = false;        // all rows can be copied 16 bytes at a time
  bool direct = false;         // aligned, scales at multiples of 4 bytes, and kpe_distance is that of all rows
  int64_t kpe_distance = 0;    // bytes from a row's latent channels to its rotary ones
  bool contiguous = false;     // aligned, and one copy can bring a row's latent and rotary channels
  bool scales_inside = false;  // contiguous, and that copy also brings the scales, right behind the latent channels
  int32_t landed_rope_at = 0;  // bytes from a row's first channel to its rotary channels in shared memory
  int32_t scale_shift = 31;    // quantized: channel / 8 >> scale_shift is the number of the channel's scale
  const int32_t* indices = nullptr;  // slots, [T, topk]; dense: null
  int64_t indices_stride_token = 0;
  int32_t topk = 0;
  const int32_t* topk_length = nullptr;  // [T] or [B], or null
  bool length_per_request = false;
};

struct AbsorbedArgs {
  FastDivisor num_heads = {};
  int32_t d_qk = 0, d_v = 0;
  DType q_dtype = DType::kBF16;
  const float* q_scale = nullptr;
  const void* q_nope = nullptr;
  int64_t q_nope_stride_token = 0, q_nope_stride_head = 0;
  const void* q_pe = nullptr;
  int64_t q_pe_stride_token = 0, q_pe_stride_head = 0;

  KeyPool pools[2] = {};
  uint64_t row_policy = 0;  // a ptx::CachePolicy: how long the L2 cache keeps rows
  core::Pages pages = {};   // dense only
  int32_t batch_size = 0;
  int64_t num_tokens = 0;        // query tokens of all requests; only the host looks at it
  bool batch_invariant = false;  // kernels are chosen whatever num_tokens is
  core::QueryRanges queries = {};

  bool causal = false;  // false in sparse attention
  const uint8_t* tree_mask = nullptr;
  int64_t tree_mask_stride_token = 0;
  const int32_t* tree_parents = nullptr;
  core::Options options = {};
  ContextParallel context_parallel = {};

  float sm_scale = 0.0F;
  core::LseForm lse_form = {};
  DType o_dtype = DType::kBF16;
  const float* o_scale = nullptr;
  void* o = nullptr;
  int64_t o_stride_token = 0, o_stride_head = 0;
  float* max_logits = nullptr;
  int64_t max_logits_stride_token = 0, max_logits_stride_head = 0;
  float* lse = nullptr;
  int64_t lse_stride_token = 0, lse_stride_head = 0;

  WorkList list = {};

  constexpr bool sparse() const { return pools[0].indices != nullptr; }
  constexpr int32_t num_pools() const { return pools[1].indices != nullptr ? 2 : 1; }
};

}  // namespace mla::cuda
