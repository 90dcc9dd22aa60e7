// SPDX-License-Identifier: Apache-2.0
// The value role is two warpgroups: each computes O += P V for all query rows and half of the channels.
#pragma once

#include "cuda/attention/absorbed_results.cuh"
#include "cuda/backends/sm90/absorbed_block.cuh"

namespace mla::MLA_CUDA_NAMESPACE::sm90 {

template <class Config>
class ValueRole : AbsorbedBlock<Config> {
  using Block = AbsorbedBlock<Config>;
  using Block::args_, Block::unit;

 public:
  using Block::next_unit;

  MLA_DEVICE explicit ValueRole(const cuda::AbsorbedArgs& args) : Block(args) {}

  MLA_DEVICE void compute() {
    MLA_UNROLL
    for (auto& product : outputs_) MLA_UNROLL
    for (float& output : product) output = 0.0F;
    MLA_NO_UNROLL
    for (const uint32_t end = unit().steps.end; next_ < end; ++next_) step(next_);
    ptx::mbarrier_wait(Block::stats_full(), Block::stats_parity(Block::unit_number()));
    MLA_UNROLL
    for (int i = 0; i < 2; ++i) {
      hold();  // addresses of the second row are not computed before the first row is stored: registers are short
      const int r = lane_row() + i * kLaneRowStep;
      ResultRow<Config, Config::kOutputTiles>(args_, unit(), r, output_channel() + (ptx::lane() & 3) * 2)
          .store(Block::output_factors()[r], [&](int tile, float& low, float& high) {
            low = outputs_[tile / kProductTiles][tile % kProductTiles * 4 + i * 2];
            high = outputs_[tile / kProductTiles][tile % kProductTiles * 4 + i * 2 + 1];
          });
    }
    Block::leave_unit();
  }

 private:
  // A product has 128 channels: 256 at once would need more registers than the launch gives, whatever setmaxnreg adds
  // (nvcc 13.0, error C7602).
  static constexpr int kProductDims = 128, kProducts = Config::kOutputDims / kProductDims;
  static constexpr int kProductTiles = kProductDims / 8;  // of 8 columns
  static constexpr int kLaneRowStep = 8;                  // from the first to the second row of a lane

  MLA_DEVICE static int value_warp() { return ptx::warp() - Config::kFirstValueWarp; }
  MLA_DEVICE static int group() { return value_warp() / Config::kGroupWarps; }
  MLA_DEVICE static int output_channel() { return group() * Config::kOutputDims; }
  /// Returns the lane's first row in the block.
  MLA_DEVICE static int lane_row() {
    return value_warp() % Config::kGroupWarps * Block::kWarpRows + (ptx::lane() >> 2);
  }

  MLA_DEVICE void step(uint32_t n) {
    ptx::mbarrier_wait(Block::p_full(n, 0), Block::parity(n));
    rescale(n);
    if (Block::poison(n).any()) [[unlikely]]
      silence_poison(n);
    hold();
    ptx::wgmma_fence();
    MLA_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (half == 1) ptx::mbarrier_wait(Block::p_full(n, 1), Block::parity(n));
      ptx::fence_async_proxy();
      add_values(n, half);
      ptx::wgmma_commit();
    }
    ptx::wgmma_wait<1>();
    release(n, 0);
    ptx::wgmma_wait<0>();
    hold();
    release(n, 1);
  }

  /// Keeps the compiler from moving uses of the accumulators across this point.
  MLA_DEVICE void hold() {
    MLA_UNROLL
    for (auto& product : outputs_) ptx::wgmma_hold(product);
  }

  MLA_DEVICE void release(uint32_t n, int half) const {
    if (ptx::elect()) ptx::mbarrier_arrive(Block::kv_empty(n, half));
  }

  MLA_DEVICE void rescale(uint32_t n) {
    const float* factors = Block::factors(n) + lane_row();
    const float factor[2] = {factors[0], factors[kLaneRowStep]};
    if (!ptx::any(factor[0] != 1.0F || factor[1] != 1.0F)) return;
    MLA_UNROLL
    for (auto& product : outputs_) MLA_UNROLL
    for (int i = 0; i < kProductDims / 2; ++i) product[i] *= factor[i >> 1 & 1];
  }

  MLA_DEVICE void add_values(uint32_t n, int half) {
    constexpr int kEightPRowsBytes = 8 * Config::kPRowBytes;  // an atom of the 64-byte swizzle
    const uint64_t p = ptx::matrix_descriptor(Block::p(n, half), 0, kEightPRowsBytes, ptx::Swizzle::k64);
    const ptx::SharedAddress keys =
        Block::stage(n) + Block::row_offset(half * Config::kHalfKeys, output_channel() / Config::kPieceDims);
    const uint64_t values =
        ptx::matrix_descriptor(keys, Config::kAtomBytes, Config::kEightRowsBytes, ptx::Swizzle::k128);
    MLA_UNROLL
    for (int step = 0; step < Config::kHalfKeys / 16; ++step) MLA_UNROLL
    for (int product = 0; product < kProducts; ++product)
      wgmma<Config::kType, kProductDims, true>(
          outputs_[product], Block::advance(p, step * 32),
          Block::advance(values, product * (kProductDims / Config::kPieceDims) * Config::kAtomBytes +
                                     step * 2 * Config::kEightRowsBytes),
          true);
  }

  /// Clears values of marked keys that are not finite. Rows on their way to the other block, whose queries may see what
  /// those of this block do not, must not change before they are there.
  MLA_DEVICE void silence_poison(uint32_t n) const {
    constexpr int kWarpDims = Config::kLatentDims / Config::kValueWarps;
    if constexpr (Config::kCluster > 1)
      if (Block::shares_keys(args_)) ptx::mbarrier_wait(Block::received_by_other(n), Block::parity(n));
    Block::poison(n).for_each_marked([&](int key) {
      silence_values<Config::kType>(kWarpDims, [&](int c) {
        const int channel = value_warp() * kWarpDims + c;
        return Block::stage(n) + Block::chunk_offset(key, channel / kVector) +
               static_cast<uint32_t>(channel % kVector * 2);
      });
    });
    ptx::fence_async_proxy();
    // Every value warp has read the marks, and all have cleared their channels.
    ptx::sync_threads(Config::kValueBarrier, Config::kValueWarps * kWarpSize);
    if (value_warp() == 0) Block::poison(n).reset(ptx::lane(), kWarpSize);
  }

  uint32_t next_ = 0;  // number of the next step
  float outputs_[kProducts][kProductDims / 2];
};

}  // namespace mla::MLA_CUDA_NAMESPACE::sm90
