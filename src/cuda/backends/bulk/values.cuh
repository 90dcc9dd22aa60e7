// SPDX-License-Identifier: Apache-2.0
// The value warps compute O += P V, each for its own channels of all query rows.
#pragma once

#include "cuda/backends/bulk/outputs.cuh"

namespace mla::MLA_CUDA_NAMESPACE::bulk {

template <class Config>
class ValueRole : OutputRole<Config> {
  using Block = AbsorbedBlock<Config>;
  using Output = OutputRole<Config>;
  using Block::unit, Output::kValueThreads, Output::output_channel, Output::outputs_, Output::value_warp;

 public:
  using Block::next_unit;

  MLA_DEVICE explicit ValueRole(const cuda::AbsorbedArgs& args) : Output(args) {}

  MLA_DEVICE void compute() {
    Output::clear_outputs();
    MLA_NO_UNROLL
    for (; next_ < unit().steps.end; ++next_) step(next_);
    ptx::mbarrier_wait(Block::stats_full(), Block::stats_parity(Block::unit_number()));
    Output::template store_outputs<2>();
    Block::leave_unit();
  }

 private:
  MLA_DEVICE void step(uint32_t n) {
    ptx::mbarrier_wait(Block::kv_full(n), Block::kv_parity(n));  // makes what bulk copies wrote visible
    ptx::mbarrier_wait(Block::p_full(n), Block::p_parity(n));
    Output::rescale(n, 1.0F);
    if (Block::poison(n).any()) silence_poison(n);
    add_values(n);
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::kv_empty(n));
  }

  MLA_DEVICE void add_values(uint32_t n) {
    const auto chunk = static_cast<uint32_t>((ptx::lane() >> 4) * kChunkBytes);
    const ptx::SharedAddress p_rows = Block::p(n) + static_cast<uint32_t>((ptx::lane() & 15) * Config::kPPitch) + chunk;
    const ptx::SharedAddress value_rows =
        Block::stage(n) + static_cast<uint32_t>((ptx::lane() & 15) * Config::kKeyPitch + output_channel() * 2) + chunk;
    MLA_UNROLL
    for (int step = 0; step < Config::kKeys / 16; ++step) {
      uint32_t b[Config::kOutputTilesN / 2][4];
      MLA_UNROLL
      for (int j = 0; j < Config::kOutputTilesN / 2; ++j)
        ptx::ldmatrix_x4_trans(b[j], value_rows + static_cast<uint32_t>(step * 16 * Config::kKeyPitch + j * 32));
      MLA_UNROLL
      for (int m = 0; m < Config::kOutputTilesM; ++m) {
        uint32_t a[4];
        ptx::ldmatrix_x4(a, p_rows + static_cast<uint32_t>(m * 16 * Config::kPPitch + step * Config::kKStepBytes));
        MLA_UNROLL
        for (int j = 0; j < Config::kOutputTilesN / 2; ++j) {
          mma<Config::kType>(outputs_[m][2 * j], a, b[j][0], b[j][1]);
          mma<Config::kType>(outputs_[m][2 * j + 1], a, b[j][2], b[j][3]);
        }
      }
    }
  }

  /// Clears this warp's channels of keys that are marked as poison (poison.cuh).
  MLA_DEVICE void silence_poison(uint32_t n) const {
    Block::poison(n).for_each_marked([&](int key) {
      silence_values<Config::kType>(Config::kOutputDims, [&](int c) {
        return Block::stage(n) + static_cast<uint32_t>(key * Config::kKeyPitch + (output_channel() + c) * 2);
      });
    });
    ptx::fence_async_proxy();
    // Behind this barrier every value warp has seen the marks, and every lane of this warp sees the zeros.
    ptx::sync_threads(Block::kValuesBarrier, kValueThreads);
    if (value_warp() == 0) Block::poison(n).reset(ptx::lane(), kWarpSize);
  }

  uint32_t next_ = 0;  // number of the next step
};

}  // namespace mla::MLA_CUDA_NAMESPACE::bulk
