// SPDX-License-Identifier: Apache-2.0
// The value warps: they add weighted rows to the outputs, each its own channels of all query rows.
#pragma once

#include "cuda/portable/specialized_block.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

template <class Config>
class ValueRole : SpecializedBlock<Config> {
  using Block = SpecializedBlock<Config>;
  using Block::args_, Block::memory_, Block::shared_, Block::unit;

 public:
  using Block::next_unit;

  MLA_DEVICE explicit ValueRole(const cuda::AbsorbedArgs& args) : Block(args) {}

  MLA_DEVICE void compute() {
    MLA_UNROLL
    for (int m = 0; m < Config::kOutputTilesM; ++m) MLA_UNROLL
    for (int j = 0; j < Config::kOutputTilesN; ++j) MLA_UNROLL
    for (int i = 0; i < 4; ++i) outputs_[m][j][i] = 0.0F;
    MLA_NO_UNROLL
    for (; next_ < unit().step_end; ++next_) step(next_);
    ptx::mbarrier_wait(Block::weighed(), Block::weighed_parity(Block::unit_number()));
    store_outputs();
    Block::leave_unit();
  }

 private:
  static constexpr int kValueThreads = Config::kValueWarps * kWarpSize;

  MLA_DEVICE static int value_warp() { return ptx::warp() - Config::kFirstValueWarp; }
  MLA_DEVICE static int output_channel() { return value_warp() * Config::kOutputDims; }

  MLA_DEVICE void step(uint32_t n) {
    ptx::mbarrier_wait(Block::full(n), Block::stage_parity(n));  // for the sight of what copies wrote
    ptx::mbarrier_wait(Block::ready(n), Block::ready_parity(n));
    rescale(n);
    if (Block::poison(n)[Config::kKeys] != 0) silence_poison(n);
    add_values(n);
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::free(n));
  }

  MLA_DEVICE void rescale(uint32_t n) {
    float factor[Config::kOutputTilesM][2];
    bool any = false;
    MLA_UNROLL
    for (int m = 0; m < Config::kOutputTilesM; ++m) MLA_UNROLL
    for (int half = 0; half < 2; ++half) {
      factor[m][half] = Block::factors(n)[m * 16 + half * 8 + (ptx::lane() >> 2)];
      any |= factor[m][half] != 1.0F;
    }
    if (!ptx::any(any)) return;
    MLA_UNROLL
    for (int m = 0; m < Config::kOutputTilesM; ++m) MLA_UNROLL
    for (int j = 0; j < Config::kOutputTilesN; ++j) MLA_UNROLL
    for (int i = 0; i < 4; ++i) outputs_[m][j][i] *= factor[m][i >> 1];
  }

  MLA_DEVICE void add_values(uint32_t n) {
    const auto chunk = static_cast<uint32_t>((ptx::lane() >> 4) * kChunkBytes);
    const ptx::SharedAddress weight_rows =
        Block::weights(n) + static_cast<uint32_t>((ptx::lane() & 15) * Config::kWeightPitch) + chunk;
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
        ptx::ldmatrix_x4(a, weight_rows + static_cast<uint32_t>(m * 16 * Config::kWeightPitch + step * 32));
        MLA_UNROLL
        for (int j = 0; j < Config::kOutputTilesN / 2; ++j) {
          mma<Config::kType>(outputs_[m][2 * j], a, b[j][0], b[j][1]);
          mma<Config::kType>(outputs_[m][2 * j + 1], a, b[j][2], b[j][3]);
        }
      }
    }
  }

  /// Rare: keys that some queries see and others do not hold infinities or NaN, which a weight of 0 does not silence.
  /// They become zeros. Who sees such a key has an infinite score or NaN, and so NaN in its outputs all the same. A
  /// warp clears its own channels only.
  MLA_DEVICE void silence_poison(uint32_t n) const {
    MLA_NO_UNROLL
    for (int key = 0; key < Config::kKeys; ++key) {
      if (Block::poison(n)[key] == 0) continue;
      for (int c = ptx::lane(); c < Config::kOutputDims; c += kWarpSize) {
        const ptx::SharedAddress at =
            Block::stage(n) + static_cast<uint32_t>(key * Config::kKeyPitch + (output_channel() + c) * 2);
        if (!both_finite<Config::kType>(ptx::load_shared<uint16_t>(at))) ptx::store_shared(at, uint16_t{0});
      }
    }
    ptx::fence_async_proxy();
    ptx::sync_threads(Block::kValuesBarrier,
                      kValueThreads);  // every value warp has seen the marks; this one's lanes the zeros
    if (value_warp() == 0)
      for (int i = ptx::lane(); i <= Config::kKeys; i += kWarpSize) Block::poison(n)[i] = 0;
  }

  /// Straight from the registers: four lanes have eight neighbouring channels of a row.
  MLA_DEVICE void store_outputs() const {
    const int64_t slot = unit().slot;
    if (slot >= 0)
      for_lane_rows([&](int m, int half, int r) { store_partial(m, half, r, slot); });
    else if (args_.o_dtype == DType::kBF16)
      store_rows<uint16_t, uint32_t>([](float low, float high) { return ptx::pack_bf16x2(low, high); });
    else if (args_.o_dtype == DType::kF16)
      store_rows<uint16_t, uint32_t>([](float low, float high) { return ptx::pack_f16x2(low, high); });
    else if (args_.o_dtype == DType::kF32)
      store_rows<uint32_t, uint64_t>(two_floats);
    else
      store_rows<uint8_t, uint16_t>(
          [](float low, float high) { return static_cast<uint16_t>(ptx::pack_e4m3x2(low, high)); });
  }

  /// Of the block's rows.
  MLA_DEVICE static int lane_row(int m, int half) { return m * 16 + half * 8 + (ptx::lane() >> 2); }
  MLA_DEVICE static int lane_channel() { return output_channel() + (ptx::lane() & 3) * 2; }
  template <class F>
  MLA_DEVICE static void for_lane_rows(const F& f) {
    MLA_UNROLL
    for (int m = 0; m < Config::kOutputTilesM; ++m) MLA_UNROLL
    for (int half = 0; half < 2; ++half) f(m, half, lane_row(m, half));
  }

  /// As it is. What stands in rows that the request does not have is never read.
  MLA_DEVICE void store_partial(int m, int half, int r, int64_t slot) const {
    float* const to = args_.list.partial_o + (slot * Config::kRows + r) * args_.d_v + lane_channel();
    MLA_UNROLL
    for (int j = 0; j < Config::kOutputTilesN; ++j) {
      const uint64_t bits = two_floats(outputs_[m][j][2 * half], outputs_[m][j][2 * half + 1]);
      ptx::store_streaming(reinterpret_cast<uint64_t*>(to + j * 8), bits);
    }
  }

  MLA_DEVICE static uint64_t two_floats(float low, float high) {
    return uint64_t{std::bit_cast<uint32_t>(high)} << 32 | std::bit_cast<uint32_t>(low);
  }

  /// `pack` makes of two neighbours the bits of a Pair of Elements.
  template <class Element, class Pair, class F>
  MLA_DEVICE void store_rows(const F& pack) const {
    const bool pairs = is_aligned(args_.o, sizeof(Pair)) && ((args_.o_stride_token | args_.o_stride_head) & 1) == 0;
    for_lane_rows([&](int m, int half, int r) {
      const QueryRow row = unit().rows.row(r);
      if (row.token < 0) return;
      const float factor = Block::output_factors()[r];
      Element* const to = static_cast<Element*>(args_.o) + int64_t{row.token} * args_.o_stride_token +
                          row.head * args_.o_stride_head + lane_channel();
      MLA_UNROLL
      for (int j = 0; j < Config::kOutputTilesN; ++j) {
        const Pair bits = pack(outputs_[m][j][2 * half] * factor, outputs_[m][j][2 * half + 1] * factor);
        if (pairs) {
          *reinterpret_cast<Pair*>(to + j * 8) = bits;
        } else {
          to[j * 8] = static_cast<Element>(bits);
          to[j * 8 + 1] = static_cast<Element>(bits >> (8 * sizeof(Element)));
        }
      }
    });
  }

  uint32_t next_ = 0;  // number of the next step
  float outputs_[Config::kOutputTilesM][Config::kOutputTilesN][4];
};

}  // namespace mla::MLA_CUDA_NAMESPACE
