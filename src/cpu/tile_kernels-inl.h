// SPDX-License-Identifier: Apache-2.0
// This is the one source of all tile kernels. One translation unit per instruction set, compiled with that set's flags,
// includes it after defining MLA_CPU_ISA (a namespace), MLA_CPU_BF16_PAIRS (0 or 1) and MLA_CPU_TILES (0 for vectors;
// see tile_unit-inl.h). Everything has internal linkage, so that the linker never picks a function compiled for a newer
// processor in place of one for an older.
//
// The register tiles (docs/kernels/cpu.md) are kScoreVectors x kKeyTile in `scores` and kRowTile x kValueVectors in
// `accumulate`. With AMX both are two by two of its tiles.
#include <hwy/cache_control.h>

#include <array>
#include <cstring>

#include "cpu/dequantize-inl.h"
#include "cpu/e4m3-inl.h"
#include "cpu/tile_kernels.h"
#include "cpu/vectors-inl.h"
#if MLA_CPU_TILES
#include "cpu/tile_unit-inl.h"
#endif

namespace mla::cpu::MLA_CPU_ISA {
namespace {

// AVX-512 has 32 vector registers, the other instruction sets 16.
constexpr bool kManyRegisters = kLanes == 16;
constexpr int32_t kScoreVectors = kRowVectors;
constexpr int32_t kScoreKeys = kManyRegisters ? kKeyTile : kKeyTile / 2;  // keys of a register tile
constexpr int32_t kValueVectors = 2;
constexpr int32_t kRowTile = HWY_MIN(kManyRegisters ? 8 : 4, kLanes);  // all rows of a tile lie in one group

void convert(const void* src, DType src_dtype, void* dst, DType dst_dtype, int64_t d) {
  int64_t i = 0;
  for (; i + kLanes <= d; i += kLanes)
    store_from_f32(load_as_f32(advance(src, src_dtype, i), src_dtype), advance(dst, dst_dtype, i), dst_dtype);
  if (i == d) return;
  alignas(64) unsigned char from[kLanes * sizeof(float)] = {};
  alignas(64) unsigned char to[kLanes * sizeof(float)];
  std::memcpy(from, advance(src, src_dtype, i), static_cast<size_t>(d - i) * size_of(src_dtype));
  store_from_f32(load_as_f32(from, src_dtype), to, dst_dtype);
  std::memcpy(advance(dst, dst_dtype, i), to, static_cast<size_t>(d - i) * size_of(dst_dtype));
}

// ---- queries ----

template <bool kPadded>
HWY_INLINE void pack_query_rows(const void* const* rows, [[maybe_unused]] DType dtype, int32_t d, uint32_t* q) {
  for (int32_t t = 0; t < d / kPack; t += kLanes) {
    WordVec words[kLanes];
    MLA_UNROLL for (int32_t lane = 0; lane < kLanes; ++lane) {
      if (kPadded && rows[lane] == nullptr) {
        words[lane] = hn::Zero(kWords);
        continue;
      }
#if MLA_CPU_BF16_PAIRS
      words[lane] = hn::LoadU(kWords, static_cast<const uint32_t*>(rows[lane]) + t);
#else
      words[lane] = hn::BitCast(kWords, load_as_f32(advance(rows[lane], dtype, t), dtype));
#endif
    }
    transpose(words);
    for (int32_t i = 0; i < kLanes; ++i) hn::StoreU(words[i], kWords, q + static_cast<int64_t>(t + i) * kLanes);
  }
}

void pack_queries(const void* const* rows, DType dtype, int32_t d, uint32_t* q) {
  if (rows[kLanes - 1] == nullptr) return pack_query_rows<true>(rows, dtype, d, q);
  pack_query_rows<false>(rows, dtype, d, q);
}

// ---- scores ----

constexpr int32_t round_up(int32_t a, int32_t b) { return (a + b - 1) / b * b; }

/// Prefetches the lines that belong to one key tile, a few at each call.
class TilePrefetcher {
 public:
  TilePrefetcher(const Prefetch& prefetch, int32_t key, int32_t chunks)
      : prefetch_(prefetch),
        key_(key),
        total_(prefetch.lines[0] + prefetch.lines[1]),
        per_call_((total_ + chunks - 1) / chunks) {}

  HWY_INLINE void step() {
    // Rows are prefetched into L2, since a tile's rows and queries already fill L1. L2 instead of L1 gained 4 points of
    // the peak at 32k keys (AMD EPYC, Zen 4, 2026-11-20).
    constexpr int kIntoL2 = 2;
    for (int32_t end = HWY_MIN(line_ + per_call_, total_); line_ < end; ++line_) {
      const int32_t list = line_ < prefetch_.lines[0] ? 0 : 1;
      const int64_t byte = int64_t{64} * (list == 0 ? line_ : line_ - prefetch_.lines[0]);
      const void* const* rows = prefetch_.rows[list] + key_;
      MLA_UNROLL for (int32_t j = 0; j < kKeyTile; ++j)
          __builtin_prefetch(static_cast<const char*>(rows[j]) + byte, 0, kIntoL2);
    }
  }

 private:
  const Prefetch& prefetch_;
  int32_t key_, total_, per_call_, line_ = 0;
};

#if !MLA_CPU_TILES
template <int32_t kRows>
HWY_INLINE void score_tile(const uint32_t* q, int64_t q_group_stride, const Segment* segments, int32_t num_segments,
                           TilePrefetcher prefetcher, int32_t key, float* s, int64_t s_group_stride) {
  FloatVec sum[kRows][kScoreKeys];
  MLA_UNROLL for (int32_t r = 0; r < kRows; ++r) MLA_UNROLL for (int32_t j = 0; j < kScoreKeys; ++j) sum[r][j] =
      hn::Zero(kFloats);

  for (int32_t i = 0; i < num_segments; ++i) {
    const void* const* rows = segments[i].rows + key;
    const int64_t steps = segments[i].steps;
    const uint32_t* end[kScoreKeys];  // indices count from -steps up to 0, so that all keys share one index register
    MLA_UNROLL for (int32_t j = 0; j < kScoreKeys; ++j) end[j] = static_cast<const uint32_t*>(rows[j]) + steps;
    for (int64_t chunk = -steps; chunk < 0; chunk += kStepChunk) {
      prefetcher.step();
      for (int64_t t = chunk; t < chunk + kStepChunk; ++t) {
        Operand queries[kRows];
        MLA_UNROLL for (int32_t r = 0; r < kRows; ++r) queries[r] = load_operand(q + r * q_group_stride);
        q += kLanes;
        MLA_UNROLL for (int32_t j = 0; j < kScoreKeys; ++j) {
          const Operand k = broadcast(end[j] + t);
          MLA_UNROLL for (int32_t r = 0; r < kRows; ++r) sum[r][j] = multiply_add(queries[r], k, sum[r][j]);
        }
      }
    }
  }
  MLA_UNROLL for (int32_t r = 0; r < kRows; ++r) MLA_UNROLL for (int32_t j = 0; j < kScoreKeys; ++j)
      hn::StoreU(sum[r][j], kFloats, s + r * s_group_stride + static_cast<int64_t>(key + j) * kLanes);
}

void scores(const uint32_t* q, int64_t q_group_stride, int32_t num_groups, const Segment* segments,
            int32_t num_segments, const Prefetch& prefetch, int32_t key_begin, int32_t key_end, float* s,
            int64_t s_group_stride, const Background& /*background*/) {
  const Prefetch nothing;
  int32_t chunks = 0;
  for (int32_t i = 0; i < num_segments; ++i) chunks += segments[i].steps / kStepChunk;
  for (int32_t key = key_begin; key < round_up(key_end, kKeyTile); key += kScoreKeys) {
    for (int32_t g = 0; g < num_groups;) {
      const bool prefetching = g == 0 && key % kKeyTile == 0 && key < prefetch.num_rows;
      const TilePrefetcher prefetcher(prefetching ? prefetch : nothing, key, chunks);
      const uint32_t* queries = q + g * q_group_stride;
      float* out = s + g * s_group_stride;
      if (num_groups - g >= kScoreVectors) {
        score_tile<kScoreVectors>(queries, q_group_stride, segments, num_segments, prefetcher, key, out,
                                  s_group_stride);
        g += kScoreVectors;
      } else {
        score_tile<1>(queries, q_group_stride, segments, num_segments, prefetcher, key, out, s_group_stride);
        g += 1;
      }
    }
  }
}
#endif

// ---- softmax ----

/// Returns tanh(x) with an absolute error below 2^-21.
HWY_INLINE FloatVec tanh(FloatVec x) {
  const FloatVec e = exp2_nonpositive(hn::Abs(x) * hn::Set(kFloats, -2.88539008F));  // -2 log2(e)
  const FloatVec one = hn::Set(kFloats, 1.0F);
  return hn::CopySign((one - e) / (one + e), x);
}

void shape_scores(float* s, int32_t num_keys, float scale, float cap, const float* slope, const int32_t* query_position,
                  const int32_t* key_position) {
  const bool capped = cap != 0.0F;
  const FloatVec before = hn::Set(kFloats, capped ? scale / cap : scale);
  const FloatVec after = hn::Set(kFloats, cap);
  const FloatVec slopes = slope != nullptr ? hn::LoadU(kFloats, slope) : hn::Zero(kFloats);
  const auto positions = hn::LoadU(kInts, query_position);
  for (int32_t key = 0; key < num_keys; ++key, s += kLanes) {
    FloatVec x = hn::LoadU(kFloats, s) * before;
    if (capped) x = tanh(x) * after;
    if (slope != nullptr)
      x = hn::MulAdd(slopes, hn::ConvertTo(kFloats, hn::Set(kInts, key_position[key]) - positions), x);
    hn::StoreU(x, kFloats, s);
  }
}

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

#if !MLA_CPU_TILES
template <bool kMasked>
HWY_INLINE void softmax_block(const SoftmaxBlock& block) {
  const FloatVec lowest = hn::Set(kFloats, -HUGE_VALF);
  const FloatVec scale = hn::Set(kFloats, block.scale_log2);
  const auto limit = kMasked ? hn::LoadU(kInts, block.limit) : hn::Zero(kInts);
  FloatVec top[kPack];
  MLA_UNROLL for (int32_t i = 0; i < kPack; ++i) top[i] = lowest;
  for (int32_t key = 0; key < block.num_keys; key += kPack)
    MLA_UNROLL for (int32_t i = 0; i < kPack; ++i) top[i] =
        hn::Max(top[i], load_score<kMasked>(block.s, key + i, limit));

  const FloatVec old_max = hn::LoadU(kFloats, block.max);
  const FloatVec new_max = hn::Max(old_max, hn::Max(top[0], top[kPack - 1]) * scale);
  // Because -inf - -inf would be NaN.
  const FloatVec base = hn::IfThenElse(hn::Eq(new_max, lowest), hn::Zero(kFloats), new_max);
  const FloatVec rescale = exp2_nonpositive(old_max - base);
  hn::StoreU(new_max, kFloats, block.max);
  hn::StoreU(new_max, kFloats, block.base);
  hn::StoreU(rescale, kFloats, block.alpha);

  FloatVec sum[kPack];
  MLA_UNROLL for (int32_t i = 0; i < kPack; ++i) sum[i] = hn::Zero(kFloats);
  for (int32_t key = 0; key < block.num_keys; key += kPack) {
    FloatVec e[kPack];
    MLA_UNROLL for (int32_t i = 0; i < kPack; ++i) {
      e[i] = exp2_nonpositive(hn::MulSub(load_score<kMasked>(block.s, key + i, limit), scale, base));
      sum[i] = sum[i] + e[i];
    }
    hn::StoreU(step_of(e), kWords, block.p + static_cast<int64_t>(key / kPack) * kLanes);
  }
  const FloatVec total = kPack == 2 ? sum[0] + sum[kPack - 1] : sum[0];
  hn::StoreU(hn::MulAdd(hn::LoadU(kFloats, block.sum), rescale, total), kFloats, block.sum);
}

void softmax(const SoftmaxBlock& block) {
  if (block.limit != nullptr) {
    softmax_block<true>(block);
  } else {
    softmax_block<false>(block);
  }
}
#endif

// ---- values ----

#if MLA_CPU_BF16_PAIRS
#if MLA_CPU_TILES
constexpr int32_t kKeysPadded = kTileKeys;  // a slab has whole tiles of keys; those that are missing are zeros
/// Interleaving within 128 bits takes one instruction for 16 steps, and permutes a slab's channels.
constexpr std::array<uint8_t, kSlab> kSlabPositions = [] {
  std::array<uint8_t, kSlab> positions = {};
  for (uint8_t c = 0; c < kSlab; ++c) positions[c] = static_cast<uint8_t>(c % 8 / 4 * 16 + c / 8 * 4 + c % 4);
  return positions;
}();
#else
constexpr int32_t kKeysPadded = 2;
#endif

/// Packs a slab in small steps: each call of `step` interleaves 32 channels of two keys.
class SlabPacker {
 public:
  SlabPacker(const SlabSource& source, uint32_t* v)
      : source_(source),
        v_(v),
        pairs_(round_up(source.num_keys, kKeysPadded) / 2),
        remaining_(pairs_ * (source.width / 32) * source.num_slabs) {}

  int32_t remaining() const { return remaining_; }

  HWY_INLINE void step() {
    const int32_t key = 2 * pair_;
    const bool paired = key + 1 < source_.num_keys;  // the last of an odd number of keys is paired with zeros
    const auto* even =
        static_cast<const uint16_t*>(source_.rows[HWY_MIN(key, source_.num_keys - 1)]) + source_.channel + half_;
    const auto* odd =
        static_cast<const uint16_t*>(source_.rows[paired ? key + 1 : source_.num_keys - 1]) + source_.channel + half_;
    uint32_t* out = v_ + static_cast<int64_t>(pair_) * kSlab + half_;
#if HWY_ARCH_X86
    const __m512i a = _mm512_maskz_loadu_epi16(kKeysPadded == 2 || key < source_.num_keys ? ~0U : 0U, even);
    const __m512i b = _mm512_maskz_loadu_epi16(paired ? ~0U : 0U, odd);
#if MLA_CPU_TILES
    _mm512_storeu_si512(out, _mm512_unpacklo_epi16(a, b));
    _mm512_storeu_si512(out + 16, _mm512_unpackhi_epi16(a, b));
#else
    alignas(64) static constexpr uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(kLow);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    _mm512_storeu_si512(out, _mm512_permutex2var_epi16(a, low, b));
    _mm512_storeu_si512(out + 16, _mm512_permutex2var_epi16(a, high, b));
#endif
#else
    const hn::Repartition<uint16_t, Words> halves;
    MLA_UNROLL for (int32_t i = 0; i < 32; i += 2 * kLanes) {
      const auto a = hn::LoadU(halves, even + i);
      const auto b = paired ? hn::LoadU(halves, odd + i) : hn::Zero(halves);
      hn::StoreU(hn::ZipLower(kWords, a, b), kWords, out + i);
      hn::StoreU(hn::ZipUpper(kWords, a, b), kWords, out + i + kLanes);
    }
#endif
    --remaining_;
    half_ += 32;
    if (half_ < source_.width) return;
    half_ = 0;
    if (++pair_ < pairs_) return;
    pair_ = 0;
    source_.channel += kSlab;
    v_ += source_.slab_stride;
  }

 private:
  SlabSource source_;
  uint32_t* v_;
  int32_t pairs_, remaining_;
  int32_t pair_ = 0, half_ = 0;
};

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

// ---- output ----

#if !MLA_CPU_TILES
/// Calls `between` after each step along the keys, to do a little other work there.
template <class Between>
HWY_INLINE void accumulate_tile(const uint32_t* p, const uint32_t* v, int32_t key_steps, const float* alpha, bool first,
                                float* o, const Between& between) {
  FloatVec sum[kRowTile][kValueVectors];
  bool rescaled = false;  // seldom true after the first few blocks, when the maximum stays
  MLA_UNROLL for (int32_t r = 0; r < kRowTile; ++r) rescaled |= alpha[r] != 1.0F;
  MLA_UNROLL for (int32_t r = 0; r < kRowTile; ++r) MLA_UNROLL for (int32_t c = 0; c < kValueVectors; ++c) sum[r][c] =
      first ? hn::Zero(kFloats) : hn::LoadU(kFloats, o + r * kSlab + c * kLanes);
  if (rescaled && !first) {
    MLA_UNROLL for (int32_t r = 0; r < kRowTile; ++r) {
      const FloatVec scale = hn::Set(kFloats, alpha[r]);
      MLA_UNROLL for (int32_t c = 0; c < kValueVectors; ++c) sum[r][c] = scale * sum[r][c];
    }
  }
  for (int32_t t = 0; t < key_steps; ++t, p += kLanes, v += kSlab) {
    Operand values[kValueVectors];
    MLA_UNROLL for (int32_t c = 0; c < kValueVectors; ++c) values[c] = load_operand(v + c * kLanes);
    MLA_UNROLL for (int32_t r = 0; r < kRowTile; ++r) {
      const Operand probability = broadcast(p + r);
      MLA_UNROLL for (int32_t c = 0; c < kValueVectors; ++c) sum[r][c] =
          multiply_add(probability, values[c], sum[r][c]);
    }
    between();
  }
  MLA_UNROLL for (int32_t r = 0; r < kRowTile; ++r) MLA_UNROLL for (int32_t c = 0; c < kValueVectors; ++c)
      hn::StoreU(sum[r][c], kFloats, o + r * kSlab + c * kLanes);
}

#endif

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

#if MLA_CPU_TILES
}  // namespace
}  // namespace mla::cpu::MLA_CPU_ISA
#include "cpu/tile_products-inl.h"
namespace mla::cpu::MLA_CPU_ISA {
namespace {
#else
void accumulate(const ValueProducts& products, const Background& background) {
  const uint32_t *const p = products.p, *const v = products.v;
  const int64_t p_group_stride = products.p_group_stride;
  const int32_t *const key_steps = products.key_steps, num_rows = products.num_rows;
  const float* const alpha = products.alpha;
  const bool first = products.first;
  float* const o = products.o;
#if MLA_CPU_BF16_PAIRS
  RowCopier copier(background.copies);
  SlabPacker packer(background.v != nullptr ? background.slab : SlabSource{}, background.v);
  const auto finish = [](auto& work) {
    while (work.remaining() > 0) work.step();
  };
#else
  static_cast<void>(background);
#endif
  for (int32_t c = 0; c < kSlab; c += kValueVectors * kLanes)
    for (int32_t row = 0; row < num_rows; row += kRowTile) {
      const int32_t group = row / kLanes;
      const int32_t steps = key_steps[group];
      if (steps == 0 && !first) continue;
      const uint32_t* p_row = p + group * p_group_stride + row % kLanes;
      float* o_row = o + static_cast<int64_t>(row) * kSlab + c;
#if MLA_CPU_BF16_PAIRS
      const auto beside = [&](auto& work) {
        if (work.remaining() < steps) {
          finish(work);
          return false;
        }
        accumulate_tile(p_row, v + c, steps, alpha + row, first, o_row, [&] { work.step(); });
        return true;
      };
      if (beside(copier) || beside(packer)) continue;
#endif
      accumulate_tile(p_row, v + c, steps, alpha + row, first, o_row, [] {});
    }
#if MLA_CPU_BF16_PAIRS
  finish(copier);
  finish(packer);
#endif
}
#endif

/// Returns whether no element of a row of `bytes` bytes has all exponent bits set, so that all are finite.
template <class Tag>
HWY_INLINE bool exponents_below(Tag words, hn::TFromD<Tag> exponent, const void* row, int64_t bytes) {
  const auto field = hn::Set(words, exponent);
  auto top = hn::Zero(words);
  const auto* from = static_cast<const hn::TFromD<Tag>*>(row);
  const auto count = bytes / static_cast<int64_t>(sizeof exponent);
  for (int64_t i = 0; i < count; i += static_cast<int64_t>(hn::Lanes(words)))
    top = hn::Max(top, hn::And(hn::LoadU(words, from + i), field));
  return hn::AllTrue(words, hn::Lt(top, field));
}

bool finite(const void* row, DType dtype, int32_t d) {
  const hn::CappedTag<uint16_t, 2 * kMaxLanes> halves;
  switch (dtype) {
    case DType::kBF16: return exponents_below(halves, uint16_t{0x7F80}, row, int64_t{d} * 2);
    case DType::kF16: return exponents_below(halves, uint16_t{0x7C00}, row, int64_t{d} * 2);
    default: return exponents_below(kWords, 0x7F800000U, row, int64_t{d} * 4);
  }
}

void decode_row(const QuantizedRow& row, uint16_t* to) { dequantize_row(row, to); }

/// Does what store_from_f32 does, also for e4m3.
HWY_INLINE void store_output(FloatVec x, void* to, DType dtype) {
  if (dtype != DType::kE4M3) return store_from_f32(x, to, dtype);
  store_low_bytes(f32_to_e4m3(x), static_cast<uint8_t*>(to));
}

#if MLA_CPU_TILES
/// Puts the channels of a slab, which lie as kSlabPositions says, in order.
HWY_INLINE void order_slab(FloatVec* values) {
  alignas(64) static constexpr int64_t kLow[8] = {0, 1, 8, 9, 2, 3, 10, 11};
  const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi64(low, _mm512_set1_epi64(4));
  const __m512d a = _mm512_castps_pd(values[0].raw), b = _mm512_castps_pd(values[1].raw);
  values[0].raw = _mm512_castpd_ps(_mm512_permutex2var_pd(a, low, b));
  values[1].raw = _mm512_castpd_ps(_mm512_permutex2var_pd(a, high, b));
}
#endif

template <DType kDtype>
HWY_INLINE void store_row_as(const float* o, int64_t o_slab_stride, int32_t d_v, float factor, void* dst) {
  const FloatVec scale = hn::Set(kFloats, factor);
  for (int32_t slab = 0; slab < d_v / kSlab; ++slab, o += o_slab_stride) {
    FloatVec values[kSlab / kLanes];
    MLA_UNROLL for (int32_t i = 0; i < kSlab / kLanes; ++i) values[i] = hn::LoadU(kFloats, o + i * kLanes);
#if MLA_CPU_TILES
    order_slab(values);
#endif
    MLA_UNROLL for (int32_t i = 0; i < kSlab / kLanes; ++i)
        store_output(values[i] * scale, advance(dst, kDtype, slab * kSlab + i * kLanes), kDtype);
  }
}

void store_row(const float* o, int64_t o_slab_stride, int32_t d_v, float factor, void* dst, DType dtype) {
  switch (dtype) {
    case DType::kBF16: return store_row_as<DType::kBF16>(o, o_slab_stride, d_v, factor, dst);
    case DType::kF16: return store_row_as<DType::kF16>(o, o_slab_stride, d_v, factor, dst);
    case DType::kE4M3: return store_row_as<DType::kE4M3>(o, o_slab_stride, d_v, factor, dst);
    default: return store_row_as<DType::kF32>(o, o_slab_stride, d_v, factor, dst);
  }
}

void weighted_sum(const void* src, int64_t src_stride, DType src_dtype, int32_t n, const float* weight,
                  int64_t weight_stride, int32_t d, const float* init, void* dst, DType dst_dtype) {
  for (int32_t i = 0; i < d; i += kLanes) {
    FloatVec sum = init != nullptr ? hn::LoadU(kFloats, init + i) : hn::Zero(kFloats);
    for (int32_t state = 0; state < n; ++state) {
      const float w = weight[state * weight_stride];
      if (w == 0.0F) continue;  // a state that saw no key may hold anything, NaN included
      const void* row = advance(src, src_dtype, state * src_stride + i);
      sum = hn::MulAdd(hn::Set(kFloats, w), load_as_f32(row, src_dtype), sum);
    }
    store_output(sum, advance(dst, dst_dtype, i), dst_dtype);
  }
}

void stream(const void* src, void* dst, int64_t bytes) {
  constexpr int64_t kVectorBytes = kLanes * sizeof(uint32_t);
  const auto* from = static_cast<const char*>(src);
  auto* to = static_cast<char*>(dst);
  int64_t i = 0;
  if (reinterpret_cast<uintptr_t>(to) % kVectorBytes == 0)
    for (; i + kVectorBytes <= bytes; i += kVectorBytes) {
      const WordVec words = hn::LoadU(kWords, reinterpret_cast<const uint32_t*>(from + i));
      hn::Stream(words, kWords, reinterpret_cast<uint32_t*>(to + i));
    }
  std::memcpy(to + i, from + i, static_cast<size_t>(bytes - i));
}

void finish_streams() { hwy::FlushStream(); }

void prefetch_for_write(const void* begin, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(begin) + i, 1, 3);
}

constexpr TileKernels kTable = {
    .lanes = kLanes,
    .pack = kPack,
#if MLA_CPU_TILES
    .panel_groups = kPanelGroups,
    .tile_keys = kTileRows,
    .key_block = 256,
    .slab_positions = kSlabPositions.data(),
    .begin = configure_tiles,
    .end = release_tiles,
#else
    .panel_groups = kRowVectors,
    .tile_keys = 1,
    .key_block = 96,
    .slab_positions = nullptr,
    .begin = nullptr,
    .end = nullptr,
#endif
    .pack_queries = pack_queries,
    .scores = scores,
    .shape_scores = shape_scores,
    .softmax = softmax,
    .pack_slab = pack_slab,
    .copy_rows = copy_rows,
    .accumulate = accumulate,
    .decode_row = decode_row,
    .finite = finite,
    .store_row = store_row,
    .weighted_sum = weighted_sum,
    .stream = stream,
    .finish_streams = finish_streams,
    .prefetch_for_write = prefetch_for_write,
    .convert = convert,
};

}  // namespace
}  // namespace mla::cpu::MLA_CPU_ISA
