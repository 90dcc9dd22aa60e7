// SPDX-License-Identifier: Apache-2.0
// finish_output turns the rotary channels of attention's output back, multiplies by a gate, and quantizes, in one pass.
// It is bound by memory.
//   grid    warps stride over rows, one for each token and head; a block is 8 warps that share nothing
//   memory  each lane moves 16 bytes per access, two of them at a time; no shared memory
#pragma once

#include <numbers>

#include "cuda/border/launch.h"
#include "cuda/tile/rotated_rows.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// This is a source, in the sense of cache_rows.cuh, of the channels of a finished row, before they are rounded.
struct OutputRow {
  Channels plain;
  Rotated<Channels> rotated;
  int32_t num_plain;
  Channels gate = {};     // without data there is none
  bool one_gate = false;  // for all channels
  float share = 1.0F;     // what that gate lets through

  static constexpr int kBatch = 2;
  struct Fetched {
    Rotated<Channels>::Fetched own;  // of plain channels, `own` of it
    Bits8 gate;
    bool is_plain;
  };

  /// Returns 1 / (1 + e^-gate) as e^gate / (e^gate + 1), with that of the two powers that is below 1.
  static MLA_DEVICE float share_of(float gate) {
    const float power = ptx::exp2_approx(-std::numbers::log2e_v<float> * std::abs(gate));
    return (gate < 0 ? power : 1.0F) / (1.0F + power);
  }

  MLA_DEVICE float operator()(int32_t c) const {
    const float value = c < num_plain ? plain(c) : rotated(c - num_plain);
    if (gate.data == nullptr) return value;
    return value * (one_gate ? share : share_of(gate(c)));
  }
  /// Eight neighbours must be of one kind.
  MLA_DEVICE int32_t vector_channels(int32_t n) const {
    return num_plain % kVector == 0 && rotated.vector_channels(rotated.dim) == rotated.dim ? n / kVector * kVector : 0;
  }
  MLA_DEVICE Fetched fetch(int32_t c) const {
    Fetched fetched = {};
    fetched.is_plain = c < num_plain;
    if (fetched.is_plain)
      fetched.own.own = plain.fetch(c);
    else
      fetched.own = rotated.fetch(c - num_plain);
    if (gate.data != nullptr && !one_gate) fetched.gate = gate.fetch(c).bits;
    return fetched;
  }
  MLA_DEVICE void decode(const Fetched& fetched, float (&values)[kVector]) const {
    if (fetched.is_plain)
      plain.decode(fetched.own.own, values);
    else
      rotated.decode(fetched.own, values);
    if (gate.data == nullptr) return;
    float gates[kVector];
    if (!one_gate) decode8(fetched.gate, gate.dtype, gates);
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] *= one_gate ? share : share_of(gates[i]);
  }
};

MLA_DEVICE void store_output_scale(const core::Finish& finish, std::byte* at, float scale) {
  if (finish.scale_dtype == DType::kF32)
    *as<float>(at) = scale;
  else
    *at = static_cast<std::byte>(f32_to_ue8m0(scale));
}

struct FinishOutputKernel {
  using Params = core::FinishOutputArgs;
  static constexpr const char* kName = "finish_output";
  static constexpr int kThreads = 256;
  static constexpr int kMinBlocks = 1;  // with less registers it spills

  static MLA_DEVICE void run(const Params& args) {
    ptx::allow_next_grid();
    constexpr int kWarps = kThreads / kWarpSize;
    const int64_t step = int64_t{kWarps} * ptx::grid_size_x(), rows = args.num_tokens * args.num_heads;
    ptx::wait_for_previous_grid();  // which computes `o`
    for (int64_t row = int64_t{kWarps} * ptx::block_index_x() + ptx::warp(); row < rows; row += step) {
      const auto token = static_cast<int64_t>(static_cast<uint32_t>(row) / static_cast<uint32_t>(args.num_heads));
      write_row(args, token, static_cast<int32_t>(row - token * args.num_heads));
    }
  }

 private:
  static MLA_DEVICE Channels channels(const void* base, DType dtype, int64_t first) {
    return {.data = static_cast<const std::byte*>(base) + first * static_cast<int64_t>(size_of(dtype)), .dtype = dtype};
  }

  static MLA_DEVICE void write_row(const Params& args, int64_t token, int32_t head) {
    const int64_t first = token * args.o_stride_token + head * args.o_stride_head;
    const int32_t num_plain = args.d_v - args.d_rotary;
    OutputRow row = {
        .plain = channels(args.o, args.o_dtype, first),
        .rotated = {.pe = channels(args.o, args.o_dtype, first + num_plain),
                    .dim = args.d_rotary,
                    .cos_sin = args.d_rotary > 0 ? args.cos_sin + args.positions[token] * args.cos_sin_stride_position
                                                 : nullptr,
                    .interleaved = args.interleaved,
                    .inverse = true},
        .num_plain = num_plain};
    if (args.gate != nullptr) {
      row.one_gate = args.gate_channels == 1;
      row.gate = channels(args.gate, args.gate_dtype, token * args.gate_stride_token + head * args.gate_stride_head);
      if (row.one_gate) row.share = OutputRow::share_of(row.gate(0));
    }
    std::byte* const out =
        static_cast<std::byte*>(args.out) + args.out_row(token, head) * static_cast<int64_t>(size_of(args.out_dtype));
    if (args.out_dtype == DType::kE4M3)
      write_quantized(args, token, head, row, out);
    else
      write_channels(row, args.d_v, Encoder(args.out_dtype), out);
  }

  static MLA_DEVICE void write_quantized(const Params& args, int64_t token, int32_t head, const OutputRow& row,
                                         std::byte* out) {
    const int32_t n = args.d_v, group = args.channels_per_scale;
    const bool vectors = row.vector_channels(n) == n;
    for (int32_t base = 0; base < n; base += OutputRow::kBatch * kWarpChannels) {
      const int32_t first = base + ptx::lane() * kVector;
      OutputRow::Fetched fetched[OutputRow::kBatch];
#pragma unroll
      for (int b = 0; b < OutputRow::kBatch; ++b)
        if (vectors && first + b * kWarpChannels < n) fetched[b] = row.fetch(first + b * kWarpChannels);
#pragma unroll
      for (int b = 0; b < OutputRow::kBatch; ++b) {
        if (base + b * kWarpChannels >= n) continue;  // the same in all lanes
        const int32_t c = first + b * kWarpChannels;
        float values[kVector] = {};
        if (vectors && c < n) row.decode(fetched[b], values);
        if (!vectors)
          for (int i = 0; i < kVector && c < n; ++i) values[i] = row(c + i);  // groups are of whole eights
        bool all_finite;
        const float amax = max_of_lanes(largest_magnitude(values, all_finite), group / kVector);
        if (c >= n) continue;
        const float scale = args.power_of_two_scales ? e4m3_power_of_two_scale(amax) : e4m3_scale(amax);
        if (c % group == 0) store_output_scale(args, args.scale_at(token, head, c / group), scale);
        const Bits8 codes = args.power_of_two_scales && all_finite ? quantize8_by_power_of_two(values, scale)
                                                                   : quantize8(values, ScaleDivisor(scale));
        store_bits8(out + c, 1, codes);
      }
    }
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE
