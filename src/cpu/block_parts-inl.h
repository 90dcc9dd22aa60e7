// SPDX-License-Identifier: Apache-2.0
// This file has what the products of vectors and those of AMX's tiles share: the reading of scores, P, the packing of
// values, copies. It is included like vectors-inl.h.
#pragma once

#include <array>
#include <cstdint>

#include "cpu/e4m3-inl.h"
#include "cpu/tile_kernels.h"
#include "cpu/vectors-inl.h"
#if MLA_CPU_TILES
#include "cpu/tile_unit-inl.h"
#endif

namespace mla::cpu::MLA_CPU_ISA {
namespace {

constexpr int32_t round_up(int32_t a, int32_t b) { return (a + b - 1) / b * b; }

// ---- scores and P ----

/// Returns the P of two neighbouring keys as one step.
HWY_INLINE WordVec step_of(const FloatVec* pair) {
#if MLA_CPU_BF16_PAIRS
  // P is finite and not negative, so that adding half a unit rounds to nearest.
  const WordVec half = hn::Set(kWords, 0x8000U);
  const WordVec low = hn::ShiftRight<16>(hn::BitCast(kWords, pair[0]) + half);
  const WordVec high = hn::And(hn::BitCast(kWords, pair[1]) + half, hn::Set(kWords, 0xFFFF0000U));
  return hn::Or(low, high);
#else
  return hn::BitCast(kWords, pair[0]);
#endif
}

template <bool kMasked>
HWY_INLINE FloatVec load_score(const float* s, int32_t key, hn::Vec<Ints> limit) {
  const FloatVec score = hn::LoadU(kFloats, s + static_cast<int64_t>(key) * kLanes);
  if constexpr (!kMasked) return score;
  const auto visible = hn::RebindMask(kFloats, hn::Lt(hn::Set(kInts, key), limit));
  return hn::IfThenElse(visible, score, hn::Set(kFloats, -HUGE_VALF));
}

#if MLA_CPU_TILES
/// Holds what a softmax subtracts from the scores of 16 rows, and the factors of their sums so far.
struct NewBase {
  FloatVec base, alpha;
};
/// Updates max, base and alpha of the block by the largest scores of its keys.
HWY_INLINE NewBase choose_base(const SoftmaxBlock& block, FloatVec top) {
  // The base of the powers of two follows the largest score only where that exceeds it by more than this, so that few
  // blocks rescale the outputs. P is then at most 2^8.
  constexpr float kBaseSlack = 8.0F;
  const FloatVec lowest = hn::Set(kFloats, -HUGE_VALF);
  const FloatVec max = hn::Max(hn::LoadU(kFloats, block.max), top * hn::Set(kFloats, block.scale_log2));
  hn::StoreU(max, kFloats, block.max);
  const FloatVec old_base = hn::LoadU(kFloats, block.base);
  FloatVec base = hn::IfThenElse(hn::Gt(max, old_base + hn::Set(kFloats, kBaseSlack)), max, old_base);
  hn::StoreU(base, kFloats, block.base);
  base = hn::IfThenElse(hn::Eq(base, lowest), hn::Zero(kFloats), base);  // because -inf - -inf would be NaN
  const FloatVec alpha = exp2_nonpositive(old_base - base);
  hn::StoreU(alpha, kFloats, block.alpha);
  return {base, alpha};
}
#endif

// ---- values ----

#if MLA_CPU_TILES
/// Interleaving within 128 bits takes one instruction for 16 steps, and permutes a slab's channels.
constexpr std::array<uint8_t, kSlab> kSlabPositions = [] {
  std::array<uint8_t, kSlab> positions = {};
  for (uint8_t c = 0; c < kSlab; ++c) positions[c] = static_cast<uint8_t>(c % 8 / 4 * 16 + c / 8 * 4 + c % 4);
  return positions;
}();

/// Packs whole tiles of keys, with zeros for those that are missing, in small steps: each call of `step` interleaves 32
/// channels of eight keys. A step of v holds key i and key i + 16 of 32. All slabs of 32 keys come before the next
/// keys, so that rows are read together, as the scores beside it read them (slab by slab a block of 256 keys and 128
/// rows took 1.2 times as long).
class SlabPacker {
 public:
  SlabPacker(const SlabSource& source, uint32_t* v)
      : source_(source), v_(v), remaining_((source.num_keys + kTileKeys - 1) / kTileKeys * kParts * source.num_slabs) {}

  int32_t remaining() const { return remaining_; }

  HWY_INLINE void step() {
    const int32_t first = tile_ * kTileKeys + part_ * kPartSteps;
    const int64_t channel = source_.channel + int64_t{slab_} * kSlab;
    uint32_t* const out = v_ + slab_ * source_.slab_stride + (int64_t{tile_} * kTileWords + part_ * kPartSteps) * kSlab;
    if ((tile_ + 1) * kTileKeys <= source_.num_keys) {
      MLA_UNROLL for (int32_t i = 0; i < kPartSteps; ++i)
          interleave(row(first + i, channel), row(first + i + kTileWords, channel), out + i * kSlab);
    } else {
      for (int32_t i = 0; i < kPartSteps; ++i)
        interleave(row_or_zeros(first + i, channel), row_or_zeros(first + i + kTileWords, channel), out + i * kSlab);
    }
    --remaining_;
    if (++part_ < kParts) return;
    part_ = 0;
    if (++slab_ < source_.num_slabs) return;
    slab_ = 0;
    ++tile_;
  }

 private:
  static constexpr int32_t kPartSteps = 4, kParts = kTileWords / kPartSteps;

  HWY_INLINE __m512i row(int32_t key, int64_t channel) const {
    return _mm512_loadu_si512(static_cast<const uint16_t*>(source_.rows[key]) + channel);
  }
  HWY_INLINE __m512i row_or_zeros(int32_t key, int64_t channel) const {
    return key < source_.num_keys ? row(key, channel) : _mm512_setzero_si512();
  }
  static HWY_INLINE void interleave(__m512i low, __m512i high, uint32_t* out) {
    _mm512_storeu_si512(out, _mm512_unpacklo_epi16(low, high));
    _mm512_storeu_si512(out + 16, _mm512_unpackhi_epi16(low, high));
  }

  const SlabSource source_;
  uint32_t* const v_;
  int32_t remaining_, tile_ = 0, slab_ = 0, part_ = 0;
};
#elif MLA_CPU_BF16_PAIRS
static_assert(kSlab == 32);
/// Packs a slab in small steps: each call of `step` interleaves 32 channels of two keys.
class SlabPacker {
 public:
  SlabPacker(const SlabSource& source, uint32_t* v) : source_(source), v_(v), remaining_((source.num_keys + 1) / 2) {}

  int32_t remaining() const { return remaining_; }

  HWY_INLINE void step() {
    const bool paired = key_ + 1 < source_.num_keys;  // the last of an odd number of keys is paired with zeros
    const auto* even = static_cast<const uint16_t*>(source_.rows[key_]) + source_.channel;
    const auto* odd = static_cast<const uint16_t*>(source_.rows[paired ? key_ + 1 : key_]) + source_.channel;
#if HWY_ARCH_X86
    alignas(64) static constexpr uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(kLow);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const __m512i a = _mm512_loadu_si512(even);
    const __m512i b = _mm512_maskz_loadu_epi16(paired ? ~0U : 0U, odd);
    _mm512_storeu_si512(v_, _mm512_permutex2var_epi16(a, low, b));
    _mm512_storeu_si512(v_ + 16, _mm512_permutex2var_epi16(a, high, b));
#else
    const hn::Repartition<uint16_t, Words> halves;
    MLA_UNROLL for (int32_t i = 0; i < 32; i += 2 * kLanes) {
      const auto a = hn::LoadU(halves, even + i);
      const auto b = paired ? hn::LoadU(halves, odd + i) : hn::Zero(halves);
      hn::StoreU(hn::ZipLower(kWords, a, b), kWords, v_ + i);
      hn::StoreU(hn::ZipUpper(kWords, a, b), kWords, v_ + i + kLanes);
    }
#endif
    --remaining_;
    key_ += 2;
    v_ += kSlab;
  }

 private:
  const SlabSource source_;
  uint32_t* v_;
  int32_t remaining_, key_ = 0;
};
#endif

#if MLA_CPU_BF16_PAIRS
void pack_slab(const SlabSource& source, uint32_t* v) {
  for (SlabPacker packer(source, v); packer.remaining() > 0;) packer.step();
}
#else
/// Does what load_as_f32 does, also for e4m3.
HWY_INLINE FloatVec load_input(const void* from, DType dtype) {
  return dtype == DType::kE4M3 ? e4m3_to_f32(static_cast<const uint8_t*>(from)) : load_as_f32(from, dtype);
}

template <DType kDtype>
HWY_INLINE void convert_slab(const SlabSource& source, uint32_t* v) {
  for (int32_t key = 0; key < source.num_keys; ++key, v += kSlab) {
    const void* row = advance(source.rows[key], kDtype, source.channel);
    for (int32_t c = 0; c < source.width; c += kLanes)
      hn::StoreU(hn::BitCast(kWords, load_input(advance(row, kDtype, c), kDtype)), kWords, v + c);
  }
}

void pack_slab(const SlabSource& source, uint32_t* v) {
  switch (source.dtype) {
    case DType::kBF16: return convert_slab<DType::kBF16>(source, v);
    case DType::kF16: return convert_slab<DType::kF16>(source, v);
    case DType::kE4M3: return convert_slab<DType::kE4M3>(source, v);
    default: return convert_slab<DType::kF32>(source, v);
  }
}
#endif

// ---- copies ----

/// Copies the rows of one source after another in small steps: each call of `step` copies 64 bytes.
class RowCopier {
 public:
  explicit RowCopier(const std::array<RowCopy, 2>& copies)
      : copy_(copies[0]),
        then_(copies[1]),
        to_(static_cast<uint32_t*>(copy_.to)),
        remaining_(copy_.num_rows * copy_.lines + then_.num_rows * then_.lines) {}

  int32_t remaining() const { return remaining_; }

  HWY_INLINE void step() {
    const auto* from = static_cast<const uint32_t*>(copy_.rows[row_]) + line_ * kLineWords;
    const int32_t ahead = HWY_MIN(row_ + kRowsAhead, copy_.num_rows - 1);
    __builtin_prefetch(static_cast<const uint32_t*>(copy_.rows[ahead]) + line_ * kLineWords);
    for (int32_t i = 0; i < kLineWords; i += kLanes) hn::StoreU(hn::LoadU(kWords, from + i), kWords, to_ + i);
    to_ += kLineWords;
    --remaining_;
    if (++line_ < copy_.lines) return;
    line_ = 0;
    if (++row_ < copy_.num_rows) return;
    row_ = 0;
    copy_ = then_;
    to_ = static_cast<uint32_t*>(copy_.to);
  }

 private:
  static constexpr int32_t kLineWords = 16;
  static constexpr int32_t kRowsAhead = 8;

  RowCopy copy_;
  const RowCopy then_;
  uint32_t* to_;
  int32_t remaining_, row_ = 0, line_ = 0;
};

void copy_rows(const RowCopy& copy) {
  for (RowCopier copier({copy}); copier.remaining() > 0;) copier.step();
}

}  // namespace
}  // namespace mla::cpu::MLA_CPU_ISA
