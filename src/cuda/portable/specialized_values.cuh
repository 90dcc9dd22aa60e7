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
    load_queries();
    MLA_UNROLL
    for (int m = 0; m < Config::kOutputTilesM; ++m) MLA_UNROLL
    for (int j = 0; j < Config::kOutputTilesN; ++j) MLA_UNROLL
    for (int i = 0; i < 4; ++i) outputs_[m][j][i] = 0.0F;
    MLA_NO_UNROLL
    for (; first_ < unit().step_end; ++first_) step(first_);
    ptx::sync_block();  // pairs with end_segment(): the rows' last factors are there, stages are read no more
    store_outputs();
    ptx::fence_async_proxy();  // the next segment's rows land where outputs were staged
    ptx::sync_block();         // pairs with end_segment(): all shared memory is the next segment's
  }

 private:
  static constexpr int kValueThreads = Config::kValueWarps * kWarpSize;

  MLA_DEVICE static int value_warp() { return ptx::warp() - Config::kFirstValueWarp; }
  MLA_DEVICE static int value_thread() { return ptx::thread_index() - Config::kFirstValueWarp * kWarpSize; }
  MLA_DEVICE static int output_channel() { return value_warp() * Config::kOutputDims; }

  static constexpr int kQueryChunks = (Config::kLatentDims + Config::kTailDims) / kVector;

  /// Queries to shared memory: those that registers will hold to a stage that no key needs yet.
  MLA_DEVICE void load_queries() const {
    constexpr int kTurns = Config::kRows * kQueryChunks / kValueThreads, kInFlight = kTurns % 6 == 0 ? 6 : 5;
    static_assert(Config::kRows * kQueryChunks % kValueThreads == 0 && kTurns % kInFlight == 0);
    const bool whole_chunks = args_.q_dtype == Config::kType &&
                              are_chunked(args_.q_nope, args_.q_nope_stride_token, args_.q_nope_stride_head) &&
                              are_chunked(args_.q_pe, args_.q_pe_stride_token, args_.q_pe_stride_head);
    MLA_NO_UNROLL
    for (int turn = 0; turn < kTurns; turn += whole_chunks ? kInFlight : 1) {
      const int first = turn * kValueThreads + value_thread();
      if (!whole_chunks) [[unlikely]] {
        const Bits8 bits = query_channels<Config::kType>(args_, unit().rows.row(first / kQueryChunks),
                                                         first % kQueryChunks * kVector, 0);
        store_query(first, {bits.w[0], bits.w[1], bits.w[2], bits.w[3]});
        continue;
      }
      ptx::Vec4 chunks[kInFlight];
      MLA_UNROLL
      for (int i = 0; i < kInFlight; ++i) chunks[i] = load_chunk(first + i * kValueThreads);
      MLA_UNROLL
      for (int i = 0; i < kInFlight; ++i) store_query(first + i * kValueThreads, chunks[i]);
    }
    ptx::fence_async_proxy();  // rows of keys will land where queries were staged
    Block::meet_for_queries();
  }

  MLA_DEVICE static bool are_chunked(const void* from, int64_t stride_token, int64_t stride_head) {
    return ((reinterpret_cast<uint64_t>(from) | static_cast<uint64_t>(stride_token * 2) |
             static_cast<uint64_t>(stride_head * 2)) &
            (kChunkBytes - 1)) == 0;
  }

  /// Chunk `i` of the unit's queries, of the multiplied type.
  MLA_DEVICE ptx::Vec4 load_chunk(int i) const {
    const QueryRow row = unit().rows.row(i / kQueryChunks);
    const int channel = i % kQueryChunks * kVector, d_ckv = args_.pools[0].cache.d_ckv;
    if (row.token < 0 || channel >= args_.d_qk) return {};
    const int64_t at =
        channel < d_ckv
            ? int64_t{row.token} * args_.q_nope_stride_token + row.head * args_.q_nope_stride_head + channel
            : int64_t{row.token} * args_.q_pe_stride_token + row.head * args_.q_pe_stride_head + channel - d_ckv;
    const auto* from = static_cast<const std::byte*>(channel < d_ckv ? args_.q_nope : args_.q_pe);
    return ptx::load_once(as<ptx::Vec4>(from + at * 2));
  }

  MLA_DEVICE void store_query(int i, const ptx::Vec4& bits) const {
    const int chunk = i % kQueryChunks, r = i / kQueryChunks, in_row = chunk % 2 * kChunkBytes;
    const bool tail = chunk >= Config::kLatentDims / kVector;
    const int step = tail ? (chunk - Config::kLatentDims / kVector) / 2 : chunk / 2;
    const int half = step / (tail ? Config::kTailSteps : Config::kLatentSteps);
    const int of_half = tail ? Config::kLatentSteps + step % Config::kTailSteps : step % Config::kLatentSteps;
    const ptx::SharedAddress to =
        of_half < Config::kHeldSteps
            ? Block::stage(first_ + Config::kStages - 1) +
                  static_cast<uint32_t>(r * Config::kHeldPitch + (half * Config::kHeldSteps + of_half) * 32)
            : shared_ + static_cast<uint32_t>(Config::kQueryOffset + r * Config::kQueryPitch +
                                              half * Config::kQueryHalfBytes + (of_half - Config::kHeldSteps) * 32);
    ptx::store_shared(to + static_cast<uint32_t>(in_row), bits);
  }

  MLA_DEVICE void step(int n) {
    ptx::mbarrier_wait(Block::ready(n), Block::ready_parity(n));
    ptx::mbarrier_wait(Block::full(n), Block::stage_parity(n));  // over already: for the sight of what copies wrote
    rescale(n);
    if (Block::poison(n)[Config::kKeys] != 0) silence_poison(n);
    add_values(n);
    ptx::sync_warp();
    if (ptx::lane() == 0) ptx::mbarrier_arrive(Block::free(n));
  }

  MLA_DEVICE void rescale(int n) {
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

  MLA_DEVICE void add_values(int n) {
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
  MLA_DEVICE void silence_poison(int n) const {
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

  /// The warp's channels by way of its part of the stages, so that whole rows of it are stored.
  MLA_DEVICE void store_outputs() const {
    static_assert(Config::kValueWarps * Config::kRows * kOutputPitch <= Config::kStages * Config::kStageBytes);
    const ptx::SharedAddress part =
        shared_ + static_cast<uint32_t>(Config::kStageOffset + value_warp() * Config::kRows * kOutputPitch);
    const ptx::SharedAddress lane_part =
        part + static_cast<uint32_t>((ptx::lane() >> 2) * kOutputPitch + (ptx::lane() & 3) * 8);
    MLA_UNROLL
    for (int m = 0; m < Config::kOutputTilesM; ++m) MLA_UNROLL
    for (int j = 0; j < Config::kOutputTilesN; ++j) MLA_UNROLL
    for (int i = 0; i < 4; ++i)
      ptx::store_shared(lane_part + static_cast<uint32_t>((m * 16 + i / 2 * 8) * kOutputPitch + j * 32 + i % 2 * 4),
                        outputs_[m][j][i]);
    ptx::sync_warp();
    const int64_t slot = unit().slot;
    if (slot >= 0)
      store_partial(part, args_.list.partial_o + slot * Config::kRows * args_.d_v + output_channel());
    else
      store_rows(part);
  }

  static constexpr int kOutputPitch = (Config::kOutputDims + 4) * 4;  // the 16 bytes more spread rows over the banks

  /// As it is. What stands in rows that the request does not have is never read.
  MLA_DEVICE void store_partial(ptx::SharedAddress part, float* to) const {
    constexpr int kRowChunks = Config::kOutputDims / 4, kTurns = Config::kRows * kRowChunks / kWarpSize, kInFlight = 8;
    static_assert(kTurns % kInFlight == 0);
    MLA_NO_UNROLL
    for (int turn = 0; turn < kTurns; turn += kInFlight) {
      ptx::Vec4 chunks[kInFlight];
      MLA_UNROLL
      for (int i = 0; i < kInFlight; ++i) {
        const int at = (turn + i) * kWarpSize + ptx::lane();
        chunks[i] = ptx::load_shared<ptx::Vec4>(
            part + static_cast<uint32_t>(at / kRowChunks * kOutputPitch + at % kRowChunks * kChunkBytes));
      }
      MLA_UNROLL
      for (int i = 0; i < kInFlight; ++i) {
        const int at = (turn + i) * kWarpSize + ptx::lane();
        ptx::store_streaming(
            reinterpret_cast<ptx::Vec4*>(to + int64_t{at / kRowChunks} * args_.d_v + at % kRowChunks * 4), chunks[i]);
      }
    }
  }

  MLA_DEVICE void store_rows(ptx::SharedAddress part) const {
    constexpr int kVectors = Config::kOutputDims / kVector;
    MLA_NO_UNROLL
    for (int i = ptx::lane(); i < Config::kRows * kVectors; i += kWarpSize) {
      const int r = i / kVectors, channel = i % kVectors * kVector;
      const QueryRow row = unit().rows.row(r);
      if (row.token < 0) continue;
      const float factor = Block::factors(first_)[r];
      float values[kVector];
      MLA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const auto four =
            ptx::load_shared<ptx::Vec4>(part + static_cast<uint32_t>(r * kOutputPitch + (channel + half * 4) * 4));
        MLA_UNROLL
        for (int k = 0; k < 4; ++k) values[half * 4 + k] = std::bit_cast<float>(four.x[k]) * factor;
      }
      store_output(args_, row, output_channel() + channel, values);
    }
  }

  int first_ = 0;  // number of the next step
  float outputs_[Config::kOutputTilesM][Config::kOutputTilesN][4];
};

}  // namespace mla::MLA_CUDA_NAMESPACE
