// SPDX-License-Identifier: Apache-2.0
// This base of the math role brings queries to shared memory: e4m3 with one scale for each row, and bf16 where rotary
// channels are (AttentionOptions::compute).
#pragma once

#include "cuda/attention/warpgroup_scores.cuh"
#include "cuda/backends/sm90_fp8/block.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8 {

class QueryRows : protected WarpgroupScores<AbsorbedConfig, AbsorbedBlock> {
 public:
  using Config = AbsorbedConfig;
  using WarpgroupScores<AbsorbedConfig, AbsorbedBlock>::WarpgroupScores;

 protected:
  MLA_DEVICE static void sync_math() { ptx::sync_threads(Config::kMathBarrier, Config::kMathWarps * kWarpSize); }
  MLA_DEVICE bool has_rope() const { return args_.pools[0].kpe_bytes > 0; }
  MLA_DEVICE bool has_quantized_rope() const { return args_.pools[0].quantized_kpe; }

  /// Loads the queries of the unit. A warp has a row at a time.
  MLA_DEVICE void load_queries() const {
    sync_math();  // no warp needs the queries or factors of the unit before any more
    MLA_NO_UNROLL
    for (int r = math_warp(); r < Config::kRows; r += kRowsTogether * Config::kMathWarps) {
      Bits8 bits[kRowsTogether][kLaneChunks];
      MLA_UNROLL
      for (int i = 0; i < kRowsTogether; ++i) load_row(r + i * Config::kMathWarps, bits[i]);
      MLA_UNROLL
      for (int i = 0; i < kRowsTogether; ++i) store_row(r + i * Config::kMathWarps, bits[i]);
    }
    ptx::fence_async_proxy();
    sync_math();
  }

 private:
  static constexpr int kRowsTogether = 4;  // whose loads are in flight
  static constexpr int kLatentChunks = Config::kLatentDims / kVector / kWarpSize, kLaneChunks = kLatentChunks + 1;
  static_assert(Config::kRows % (kRowsTogether * Config::kMathWarps) == 0);

  /// Returns the first channel of a chunk of the lane; the last one is of rotary channels, which few lanes have.
  MLA_DEVICE static int channel_of(int chunk) {
    return chunk < kLatentChunks ? (chunk * kWarpSize + ptx::lane<Config::kReadsIndexAnew>()) * kVector
                                 : Config::kLatentDims + ptx::lane<Config::kReadsIndexAnew>() * kVector;
  }

  MLA_DEVICE void load_row(int r, Bits8 (&bits)[kLaneChunks]) const {
    const QueryRow row = unit().rows.row(args_, r);
    MLA_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) bits[i] = query_bits(args_, row, channel_of(i));
  }

  MLA_DEVICE void store_row(int r, const Bits8 (&bits)[kLaneChunks]) const {
    const bool as_they_are = args_.q_dtype == DType::kE4M3;
    float largest = 0.0F;
    MLA_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      if (i == kLatentChunks && !has_quantized_rope()) continue;
      float values[kVector];
      decode8(bits[i], args_.q_dtype, values);
      MLA_UNROLL
      for (const float value : values) largest = std::fmax(largest, is_finite(value) ? magnitude(value) : 0.0F);
    }
    largest = std::bit_cast<float>(ptx::max_of_warp(std::bit_cast<uint32_t>(largest)));
    float scale = largest / kE4M3Max;
    if (scale == 0.0F || as_they_are) scale = 1.0F;
    if (ptx::lane<Config::kReadsIndexAnew>() == 0) row_values()[r] = scale;
    const ScaleDivisor divide(scale);
    MLA_UNROLL
    for (int i = 0; i < kLaneChunks; ++i) {
      const int channel = channel_of(i);
      if (channel >= Config::kLatentDims + Config::kRopeDims) continue;
      float values[kVector];
      decode8(bits[i], args_.q_dtype, values);
      const ptx::SharedAddress piece =
          queries() + static_cast<uint32_t>(channel / Config::kPieceRowBytes * Config::kPieceBytes);
      const int of_piece = channel % Config::kPieceRowBytes;
      if (i < kLatentChunks || has_quantized_rope()) {
        const Bits8 e4m3 = as_they_are ? bits[i] : quantize8(values, divide);
        ptx::store_shared(
            piece + chunk_offset(r, of_piece / kChunkBytes) + static_cast<uint32_t>(of_piece % kChunkBytes),
            uint64_t{e4m3.w[1]} << 32 | e4m3.w[0]);
      } else {
        const Bits8 rounded = encode8(values, DType::kBF16);
        ptx::store_shared(piece + chunk_offset(r, of_piece / kVector),
                          ptx::Vec4{rounded.w[0], rounded.w[1], rounded.w[2], rounded.w[3]});
      }
    }
  }
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90_fp8
