// SPDX-License-Identifier: Apache-2.0
// Holds attention problems small enough to be solved by hand.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "mla/numeric.h"
#include "reference/reference.h"

namespace mla::reference {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kLn3 = 1.0986123F;
inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

inline std::vector<uint16_t> bf16(const std::vector<float>& values) {
  std::vector<uint16_t> bits;
  for (float value : values) bits.push_back(f32_to_bf16(value));
  return bits;
}

/// Computes what one query of one head gets, by the textbook: one element at a time, without subtracting a maximum.
struct Expected {
  std::vector<long double> weights;  // exp(score) of the keys that it sees, in order
  double lse = 0, max = -std::numeric_limits<double>::infinity();

  explicit Expected(const std::vector<double>& scores) {
    long double sum = 0;
    for (double score : scores) {
      weights.push_back(std::exp(static_cast<long double>(score)));
      sum += weights.back();
      max = std::fmax(max, score);
    }
    lse = static_cast<double>(std::log(sum));
  }
  /// Returns the output; `value(n)` is that of the n-th key that the query sees, and `sink` is one more key without a
  /// value.
  double o(const std::function<double(size_t)>& value, double sink = -std::numeric_limits<double>::infinity()) const {
    long double sum = std::exp(static_cast<long double>(sink)), weighted = 0;
    for (size_t n = 0; n < weights.size(); ++n) {
      sum += weights[n];
      weighted += weights[n] * static_cast<long double>(value(n));
    }
    return weights.empty() ? 0 : static_cast<double>(weighted / sum);
  }
};

/// Runs `compute` (decode, prefill) in a workspace of the size it asks for.
template <class Args>
void run_in_workspace(const Args& args, void (*compute)(const Args&, std::span<std::byte>)) {
  std::vector<double> workspace(workspace_size(args) / sizeof(double));
  compute(args, std::as_writable_bytes(std::span(workspace)));
}

/// Sets f32 outputs o [T, H, d_v] and lse [T, H] without gaps.
template <class Args>
void set_outputs(Args& args, std::vector<float>& o, std::vector<float>& lse) {
  args.o_dtype = DType::kF32;
  args.o = o.data();
  args.o_stride_token = args.num_heads * args.d_v;
  args.o_stride_head = args.d_v;
  args.lse = lse.data();
  args.lse_stride_token = args.num_heads;
  args.lse_stride_head = 1;
}

/// Returns the arguments of one request's f32 queries [T, H, d_ckv + d_kpe] with the strides given, and a cache [pages,
/// page_size, d_ckv + d_kpe].
inline core::DecodeArgs decode_args(const float* q, int64_t q_stride_token, int64_t q_stride_head, CacheFormat format,
                                    std::vector<uint16_t>& kv, int32_t page_size, int32_t d_ckv, int32_t d_kpe) {
  const int32_t d_qk = d_ckv + d_kpe;
  core::DecodeArgs args;
  args.batch_size = 1;
  args.d_qk = d_qk;
  args.d_v = d_ckv;
  args.q_dtype = DType::kF32;
  args.q_nope = q;
  args.q_pe = d_kpe > 0 ? q + d_ckv : nullptr;
  args.q_nope_stride_token = args.q_pe_stride_token = q_stride_token;
  args.q_nope_stride_head = args.q_pe_stride_head = q_stride_head;
  args.cache = {.format = format,
                .num_pages = static_cast<int64_t>(kv.size()) / (page_size * d_qk),
                .page_size = page_size,
                .d_ckv = d_ckv,
                .d_kpe = d_kpe,
                .ckv = {.base = reinterpret_cast<std::byte*>(kv.data()),
                        .stride_page = int64_t{2} * page_size * d_qk,
                        .stride_token = int64_t{2} * d_qk},
                .kpe = {.base = reinterpret_cast<std::byte*>(kv.data() + d_ckv),
                        .stride_page = int64_t{2} * page_size * d_qk,
                        .stride_token = int64_t{2} * d_qk}};
  core::set_codecs(kv_layout(format), args.cache);
  args.pages.page_size = page_size;
  args.pages.batch_size = 1;
  return args;
}

/// Holds one request of one head with f32 queries and outputs, and a bf16 cache [pages, page_size, d_ckv + d_kpe].
struct SmallDecode {
  int32_t d_ckv = 1, d_kpe = 0, page_size = 2, q_len = 1, kv_len = 2;
  std::vector<float> q;
  std::vector<float> cache;
  std::vector<int32_t> table = {0};
  bool causal = true;
  float sm_scale = 1.0F;
  LseBase lse_base = LseBase::kE;

  std::vector<float> o = {}, lse = {};

  /// Runs decode; `change` may set whatever is no member.
  void run(const std::function<void(core::DecodeArgs&)>& change = nullptr) {
    std::vector<uint16_t> kv = bf16(cache);
    const int32_t d_qk = d_ckv + d_kpe;
    o.assign(static_cast<size_t>(q_len * d_ckv), kNan);
    lse.assign(static_cast<size_t>(q_len), kNan);
    core::DecodeArgs args = decode_args(q.data(), d_qk, d_qk, CacheFormat::kBF16, kv, page_size, d_ckv, d_kpe);
    args.num_tokens = q_len;
    args.num_heads = 1;
    args.pages.table = table.data();
    args.pages.table_stride_request = static_cast<int64_t>(table.size());
    args.pages.kv_len = &kv_len;
    args.queries.uniform_len = q_len;
    args.causal = causal;
    args.sm_scale = sm_scale;
    args.lse_form.base = lse_base;
    set_outputs(args, o, lse);
    if (change) change(args);
    run_in_workspace(args, decode);
  }
};

/// Holds f32 [T, H, width] with a gap behind every head.
struct Rows {
  int64_t heads, width, gap;
  std::vector<float> values;

  Rows(int64_t heads_in, int64_t width_in, std::vector<float> values_in)
      : heads(heads_in), width(width_in), gap(0), values(std::move(values_in)) {}
  Rows(int64_t tokens, int64_t heads_in, int64_t width_in, int64_t gap_in, std::mt19937& random)
      : heads(heads_in), width(width_in), gap(gap_in) {
    std::normal_distribution<float> normal;
    values.resize(static_cast<size_t>(tokens * heads * (width + gap)));
    for (float& value : values) value = normal(random);
  }
  int64_t stride_head() const { return width + gap; }
  int64_t stride_token() const { return heads * stride_head(); }
  double at(int64_t token, int64_t head, int64_t c) const {
    return static_cast<double>(values[static_cast<size_t>(token * stride_token() + head * stride_head() + c)]);
  }
};

inline core::PrefillArgs prefill_args(const Rows& q, const Rows& k, const Rows& v,
                                      const std::vector<int32_t>& qo_indptr, const std::vector<int32_t>& kv_indptr) {
  core::PrefillArgs args;
  args.batch_size = static_cast<int32_t>(qo_indptr.size()) - 1;
  args.num_tokens = qo_indptr.back();
  args.num_keys = kv_indptr.back();
  args.num_heads = static_cast<int32_t>(q.heads);
  args.d_qk = static_cast<int32_t>(q.width);
  args.d_v = static_cast<int32_t>(v.width);
  args.dtype = DType::kF32;
  args.q = q.values.data();
  args.q_stride_token = q.stride_token();
  args.q_stride_head = q.stride_head();
  args.k = k.values.data();
  args.k_stride_token = k.stride_token();
  args.k_stride_head = k.stride_head();
  args.v = v.values.data();
  args.v_stride_token = v.stride_token();
  args.v_stride_head = v.stride_head();
  args.qo_indptr = qo_indptr.data();
  args.kv_indptr = kv_indptr.data();
  return args;
}

}  // namespace mla::reference
