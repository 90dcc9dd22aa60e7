// SPDX-License-Identifier: Apache-2.0
// merge_states computes lse = log(sum_n exp(lse_n)) and o = sum_n exp(lse_n - lse) o_n in f32. It is bound by memory.
//   grid    warps stride over rows (token, head): one per warp and step; a block is 8 warps that share nothing
//   memory  each lane sums 8 channels at a time over all states, several states' loads in flight; no shared memory
// States whose factor is 0 are not read: their o may be anything.
#pragma once

#include <limits>
#include <numbers>

#include "cuda/border/launch.h"
#include "cuda/tile/cache_rows.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

struct MergeStatesKernel {
  using Params = core::MergeStatesArgs;
  static constexpr const char* kName = "merge_states";
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 2;

  static MLA_DEVICE void run(const Params& args) {
    ptx::wait_for_previous_grid();  // for the kernel that writes partial states
    constexpr int kWarps = kThreads / kWarpSize;
    const int64_t step = int64_t{kWarps} * ptx::grid_size_x(), rows = args.num_tokens * args.num_heads;
    for (int64_t row = int64_t{kWarps} * ptx::block_index_x() + ptx::warp(); row < rows; row += step)
      merge(args, static_cast<uint32_t>(row) / static_cast<uint32_t>(args.num_heads),
            static_cast<uint32_t>(row) % static_cast<uint32_t>(args.num_heads));
  }

 private:
  static constexpr int kBatch = 4;  // states whose loads are in flight together

  /// Holds the states of one row: those of the arguments, and with in_place the state in o and lse as the last one.
  struct States {
    int32_t count;
    int32_t num_partial;       // states before the one in o and lse
    const float* partial_lse;  // elements `lse_stride` apart
    int64_t lse_stride;
    const std::byte* partial_o;  // states `o_stride` bytes apart
    int64_t o_stride;
    DType partial_dtype;
    const float* own_lse;
    const std::byte* own_o;
    DType own_dtype;

    MLA_DEVICE float lse(int32_t n) const { return n < num_partial ? partial_lse[n * lse_stride] : *own_lse; }
    MLA_DEVICE Channels o(int32_t n) const {
      if (n < num_partial) return {.data = partial_o + n * o_stride, .dtype = partial_dtype};
      return {.data = own_o, .dtype = own_dtype};
    }
  };

  /// Gives the factor of a state, exp(lse - max), where max is the largest lse of the row's states.
  struct Factors {
    float max, to_log2, sum;

    MLA_DEVICE float operator()(float lse) const { return ptx::exp2_approx((lse - max) * to_log2); }
  };

  static MLA_DEVICE States states_of(const Params& args, int64_t token, int64_t head) {
    const auto bytes = static_cast<int64_t>(size_of(args.partial_dtype));
    const int64_t lse = token * args.lse_stride_token + head * args.lse_stride_head;
    const int64_t o = token * args.o_stride_token + head * args.o_stride_head;
    return {
        .count = args.num_states + (args.in_place ? 1 : 0),
        .num_partial = args.num_states,
        .partial_lse = args.partial_lse + token * args.partial_lse_stride_token + head * args.partial_lse_stride_head,
        .lse_stride = args.partial_lse_stride_state,
        .partial_o = static_cast<const std::byte*>(args.partial_o) +
                     (token * args.partial_o_stride_token + head * args.partial_o_stride_head) * bytes,
        .o_stride = args.partial_o_stride_state * bytes,
        .partial_dtype = args.partial_dtype,
        .own_lse = args.in_place ? args.lse + lse : nullptr,
        .own_o = static_cast<const std::byte*>(args.o) + o * static_cast<int64_t>(size_of(args.o_dtype)),
        .own_dtype = args.o_dtype};
  }

  /// Finds the largest lse and the sum of all factors. Each lane takes every 32nd state.
  static MLA_DEVICE Factors factors_of(const States& states, LseBase base) {
    Factors factors = {.max = -std::numeric_limits<float>::infinity(),
                       .to_log2 = base == LseBase::kTwo ? 1.0F : std::numbers::log2e_v<float>,
                       .sum = 0};
    for (int32_t n = ptx::lane(); n < states.count; n += kWarpSize) {
      const float lse = states.lse(n);
      factors.max = lse > factors.max ? lse : factors.max;
    }
    factors.max = max_of_lanes(factors.max, kWarpSize);
    if (!is_finite(factors.max)) factors.max = 0;  // all factors are 0, or one is infinite
    for (int32_t n = ptx::lane(); n < states.count; n += kWarpSize) factors.sum += factors(states.lse(n));
    for (int mask = kWarpSize / 2; mask > 0; mask /= 2) factors.sum += ptx::shuffle_xor(factors.sum, mask);
    return factors;
  }

  /// Adds channels c ... c + 7 of all states, times their factors, to `sums`.
  static MLA_DEVICE void sum_vectors(const States& states, const Factors& factors, int32_t c, float (&sums)[kVector]) {
    for (int32_t first = 0; first < states.count; first += kBatch) {
      Bits8 bits[kBatch];
      float factor[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) factor[b] = first + b < states.count ? factors(states.lse(first + b)) : 0.0F;
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
        if (factor[b] != 0) bits[b] = states.o(first + b).fetch(c).bits;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (factor[b] == 0) continue;
        float values[kVector];
        decode8(bits[b], first + b < states.num_partial ? states.partial_dtype : states.own_dtype, values);
#pragma unroll
        for (int i = 0; i < kVector; ++i) sums[i] += factor[b] * values[i];
      }
    }
  }

  static MLA_DEVICE float sum_channel(const States& states, const Factors& factors, int32_t c) {
    float sum = 0;
    for (int32_t n = 0; n < states.count; ++n) {
      const float factor = factors(states.lse(n));
      if (factor != 0) sum += factor * states.o(n)(c);
    }
    return sum;
  }

  static MLA_DEVICE void merge(const Params& args, int64_t token, int64_t head) {
    const States states = states_of(args, token, head);
    const Factors factors = factors_of(states, args.lse_form.base);
    const float normalize = factors.sum != 0 ? 1.0F / factors.sum : 0.0F;
    const auto bytes = static_cast<int32_t>(size_of(args.o_dtype));
    std::byte* out =
        static_cast<std::byte*>(args.o) + (token * args.o_stride_token + head * args.o_stride_head) * bytes;
    const int32_t whole = args.d_v / kVector * kVector;
    for (int32_t c = ptx::lane() * kVector; c < whole; c += kWarpChannels) {
      float sums[kVector] = {};
      sum_vectors(states, factors, c, sums);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sums[i] *= normalize;
      store_bits8(out + int64_t{c} * bytes, bytes, encode8(sums, args.o_dtype));
    }
    for (int32_t c = whole + ptx::lane(); c < args.d_v; c += kWarpSize)
      store_element(out, args.o_dtype, c, sum_channel(states, factors, c) * normalize);
    if (args.lse == nullptr) return;
    ptx::sync_warp();  // with in_place, all lanes have read the row's own lse before it is overwritten
    if (ptx::lane() == 0)
      args.lse[token * args.lse_stride_token + head * args.lse_stride_head] =
          factors.sum != 0 ? factors.max + ptx::log2_approx(factors.sum) / factors.to_log2
                           : args.lse_form.without_keys();
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE
