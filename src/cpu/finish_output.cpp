// SPDX-License-Identifier: Apache-2.0
// finish_output turns the rotary channels of attention's output back, multiplies by a gate, and quantizes, row by row.
// It is bound by memory.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/cache_rows.h"
#include "cpu/finisher.h"
#include "cpu/operations.h"
#include "cpu/rotation.h"
#include "cpu/share.h"
#include "mla/numeric.h"

namespace mla::cpu {

void Finisher::finish(int64_t token, int32_t head) {
  if (finish_.d_rotary > 0) turn_back(finish_.cos_sin + finish_.positions[token] * finish_.cos_sin_stride_position);
  if (finish_.gate != nullptr) apply_gate(token, head);
  store(token, head);
}

void Finisher::turn_back(const float* cos_sin) {
  const Rotation rotation = {
      .channels = finish_.d_rotary, .cos_sin = cos_sin, .interleaved = finish_.interleaved, .inverse = true};
  float* const pe = row_ + d_v_ - finish_.d_rotary;
  for_angles(rotation, [&](const Angles& angles) {
    rotate(set_, pe, DType::kF32, rotation, angles,
           [&](const float* turned, int32_t c, int32_t n) { std::copy_n(turned, n, pe + c); });
  });
}

void Finisher::apply_gate(int64_t token, int32_t head) {
  const int64_t first = token * finish_.gate_stride_token + head * finish_.gate_stride_head;
  const int32_t n = finish_.gate_channels;
  set_.floats->convert(at(finish_.gate, first, finish_.gate_dtype), finish_.gate_dtype, gate_, DType::kF32, n);
  if (n == 1) std::fill_n(gate_ + 1, d_v_ - 1, gate_[0]);
  set_.rows->apply_gate(row_, gate_, d_v_);
}

void Finisher::store(int64_t token, int32_t head) {
  void* const out = at(finish_.out, finish_.out_row(token, head), finish_.out_dtype);
  if (finish_.out_dtype != DType::kE4M3) return set_.floats->convert(row_, DType::kF32, out, finish_.out_dtype, d_v_);
  const int32_t num_scales = d_v_ / finish_.channels_per_scale;
  set_.rows->quantize_groups(row_, DType::kF32, num_scales, finish_.channels_per_scale, finish_.power_of_two_scales,
                             0.0F, scales_, static_cast<uint8_t*>(out));
  for (int32_t s = 0; s < num_scales; ++s) {
    std::byte* const to = finish_.scale_at(token, head, s);
    if (finish_.scale_dtype == DType::kF32)
      std::memcpy(to, &scales_[s], sizeof scales_[s]);
    else
      *to = static_cast<std::byte>(f32_to_ue8m0(scales_[s]));
  }
}

void run_finish_output(const KernelSet& set, const core::FinishOutputArgs& args, core::ThreadPool& pool) {
  const int64_t bytes = args.num_tokens * args.num_heads * args.d_v *
                        static_cast<int64_t>(size_of(args.o_dtype) + size_of(args.out_dtype));
  share(pool, args.num_tokens * args.num_heads, bytes, [&](int64_t begin, int64_t end) {
    Finisher finisher(set, args, args.d_v);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t token = row / args.num_heads;
      const auto head = static_cast<int32_t>(row % args.num_heads);
      set.floats->convert(at(args.o, token * args.o_stride_token + head * args.o_stride_head, args.o_dtype),
                          args.o_dtype, finisher.row(), DType::kF32, args.d_v);
      finisher.finish(token, head);
    }
  });
}

}  // namespace mla::cpu
