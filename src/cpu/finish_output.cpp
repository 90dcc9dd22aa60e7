// SPDX-License-Identifier: Apache-2.0
// finish_output turns the rotary channels of attention's output back, multiplies by a gate, and quantizes, row by row.
// It is bound by memory.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/cache_rows.h"
#include "cpu/operations.h"
#include "cpu/rotation.h"
#include "cpu/share.h"
#include "mla/numeric.h"

namespace mla::cpu {
namespace {

using core::FinishOutputArgs;

/// Finishes the rows of one worker.
class Finisher {
 public:
  Finisher(const KernelSet& set, const FinishOutputArgs& args) : set_(set), args_(args) {}

  void finish(int64_t token, int32_t head) {
    const int64_t first = token * args_.o_stride_token + head * args_.o_stride_head;
    set_.floats->convert(at(args_.o, first, args_.o_dtype), args_.o_dtype, row_, DType::kF32, args_.d_v);
    if (args_.d_rotary > 0) turn_back(args_.cos_sin + args_.positions[token] * args_.cos_sin_stride_position);
    if (args_.gate != nullptr) apply_gate(token, head);
    store(token, head);
  }

 private:
  void turn_back(const float* cos_sin) {
    const Rotation rotation = {
        .channels = args_.d_rotary, .cos_sin = cos_sin, .interleaved = args_.interleaved, .inverse = true};
    float* const pe = row_ + args_.d_v - args_.d_rotary;
    for_angles(rotation, [&](const Angles& angles) {
      rotate(set_, pe, DType::kF32, rotation, angles,
             [&](const float* turned, int32_t c, int32_t n) { std::copy_n(turned, n, pe + c); });
    });
  }

  void apply_gate(int64_t token, int32_t head) {
    const int64_t first = token * args_.gate_stride_token + head * args_.gate_stride_head;
    const int32_t n = args_.gate_channels;
    set_.floats->convert(at(args_.gate, first, args_.gate_dtype), args_.gate_dtype, gate_, DType::kF32, n);
    if (n == 1) std::fill_n(gate_ + 1, args_.d_v - 1, gate_[0]);
    set_.rows->apply_gate(row_, gate_, args_.d_v);
  }

  void store(int64_t token, int32_t head) {
    void* const out = at(args_.out, args_.out_row(token, head), args_.out_dtype);
    if (args_.out_dtype != DType::kE4M3)
      return set_.floats->convert(row_, DType::kF32, out, args_.out_dtype, args_.d_v);
    const int32_t num_scales = args_.d_v / args_.channels_per_scale;
    set_.rows->quantize_groups(row_, DType::kF32, num_scales, args_.channels_per_scale, args_.power_of_two_scales, 0.0F,
                               scales_, static_cast<uint8_t*>(out));
    for (int32_t s = 0; s < num_scales; ++s) {
      std::byte* const to = args_.scale_at(token, head, s);
      if (args_.scale_dtype == DType::kF32)
        std::memcpy(to, &scales_[s], sizeof scales_[s]);
      else
        *to = static_cast<std::byte>(f32_to_ue8m0(scales_[s]));
    }
  }

  const KernelSet& set_;
  const FinishOutputArgs& args_;
  alignas(64) float row_[kMaxFinished];
  alignas(64) float gate_[kMaxFinished];
  float scales_[kMaxFinished / 32];
};

}  // namespace

void run_finish_output(const KernelSet& set, const FinishOutputArgs& args, core::ThreadPool& pool) {
  const int64_t bytes = args.num_tokens * args.num_heads * args.d_v *
                        static_cast<int64_t>(size_of(args.o_dtype) + size_of(args.out_dtype));
  share(pool, args.num_tokens * args.num_heads, bytes, [&](int64_t begin, int64_t end) {
    Finisher finisher(set, args);
    for (int64_t row = begin; row < end; ++row)
      finisher.finish(row / args.num_heads, static_cast<int32_t>(row % args.num_heads));
  });
}

}  // namespace mla::cpu
