// SPDX-License-Identifier: Apache-2.0
// This file computes mma.sync with block scales by the PTX ISA ("Block Scaling for mma.sync"): which lanes and which of
// their bytes scale which rows and columns, and the products, which are exact, in sums of f32.
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

#include "emulator/block.h"
#include "emulator/elements.h"
#include "emulator/mma_tiles.h"

namespace mla::emulator {
namespace {

struct ScaledLane {
  MmaLane operands;
  BlockScales scales_a, scales_b;
};

/// A UE8M0 scale is 2^(code - 127), and NaN where all bits are set.
struct Ue8m0 {
  static constexpr uint32_t kMost = 0xFF;
  static double to_double(uint32_t code) {
    if (code == kMost) return std::numeric_limits<double>::quiet_NaN();
    return std::bit_cast<double>(uint64_t{code + 1023 - 127} << 52);
  }
};

/// A UE4M3 scale is an e4m3 of seven bits, without a sign.
struct Ue4m3 {
  static constexpr uint32_t kMost = 0x7F;
  static double to_double(uint32_t code) { return E4M3::to_float(code); }
};

/// Describes a form of the instruction. A row of A, and a column of B, has kScales scales along the depth.
template <class ElementA, class ElementB, class ScaleType, int kScalesOfRow>
struct Form {
  using A = ElementA;
  using B = ElementB;
  using Scale = ScaleType;
  static constexpr int kScales = kScalesOfRow;
  using Tiles = MmaTiles<A::kPerRegister>;
  static_assert(A::kPerRegister == B::kPerRegister);
};
using Mxf8 = Form<E4M3, E4M3, Ue8m0, 1>;
using Mxf8f4 = Form<E4M3, E2M1InByte, Ue8m0, 1>;
using Mxf4 = Form<E2M1, E2M1, Ue8m0, 2>;
using Nvf4 = Form<E2M1, E2M1, Ue4m3, 4>;

/// Holds a row of 8 products with their scales: two scales of 2^127 are more than f32 has.
using WideRow [[gnu::vector_size(64)]] = double;

/// Holds the scales of both operands, each by its place along the depth.
template <int kScales>
struct ScaleTiles {
  double a[16][kScales];
  WideRow b[kScales];
};

template <class Form>
[[gnu::always_inline]] inline void multiply_scaled(typename Form::Tiles& tiles,
                                                   const ScaleTiles<Form::kScales>& scales) {
  constexpr int kDepth = Form::Tiles::kDepth;
  constexpr int kBlock = kDepth / Form::kScales;
  Row b[kDepth];
  for (int k = 0; k < kDepth; ++k)
    for (int j = 0; j < 8; ++j) b[k][j] = Form::B::to_float(tiles.b[k][j]);
  for (int i = 0; i < 16; ++i) {
    Row sum;
    std::memcpy(&sum, tiles.c[i], sizeof sum);
    for (int k = 0; k < kDepth; ++k) {
      const Row product = Form::A::to_float(tiles.a[i][k]) * b[k];
      const WideRow scale = scales.a[i][k / kBlock] * scales.b[k / kBlock];
      sum += __builtin_convertvector(__builtin_convertvector(product, WideRow) * scale, Row);
    }
    std::memcpy(tiles.c[i], &sum, sizeof sum);
  }
}

template <class Form>
void multiply_scaled_anywhere(typename Form::Tiles& tiles, const ScaleTiles<Form::kScales>& scales) {
  multiply_scaled<Form>(tiles, scales);
}

template <class Form>
MLA_AVX2 void multiply_scaled_avx2(typename Form::Tiles& tiles, const ScaleTiles<Form::kScales>& scales) {
  multiply_scaled<Form>(tiles, scales);
}

/// Faults unless all lanes name the same bytes and threads, and such as a form with so many scales has: a byte where
/// there is one, the lower or the upper pair of bytes, or all four; a pair of a quad's threads for A and one of them
/// for B.
void check_selectors(Block& block, void* const* lanes, int scales) {
  const auto& first = *static_cast<const ScaledLane*>(lanes[0]);
  const Site site = block.current().site;
  const auto check = [&](const BlockScales& of, int most_threads) {
    if (of.byte_id < 0 || of.byte_id > 4 - scales || of.byte_id % scales != 0 || of.thread_id < 0 ||
        of.thread_id >= most_threads)
      block.fail("mma with {} scales of a row, of which byte-id {} and thread-id {} select none",
                 {scales, of.byte_id, of.thread_id}, site);
  };
  check(first.scales_a, 2);
  check(first.scales_b, 4);
  for (int l = 1; l < kWarpSize; ++l) {
    const auto& lane = *static_cast<const ScaledLane*>(lanes[l]);
    for (const auto& [one, other] : {std::array{&first.scales_a, &lane.scales_a}, {&first.scales_b, &lane.scales_b}})
      if (one->byte_id != other->byte_id || one->thread_id != other->thread_id)
        block.fail("the lanes of a warp came to mma with byte-id {} and {}, thread-id {} and {}",
                   {one->byte_id, other->byte_id, one->thread_id, other->thread_id}, site);
  }
}

template <class Form>
bool complete_scaled_mma(Block& block, void* const* lanes) {
  ++block.counters_of_block().mma;
  check_selectors(block, lanes, Form::kScales);
  const auto lane = [lanes](int l) -> const ScaledLane& { return *static_cast<const ScaledLane*>(lanes[l]); };
  // A lane's scale for a place along the depth is in the byte that many behind the selected one.
  const auto scale = [&](const BlockScales& of, int place) {
    const uint32_t code = of.data >> 8 * static_cast<uint32_t>(of.byte_id + place) & 0xFFU;
    if (code > Form::Scale::kMost)
      block.fail("mma with a scale of {}: expected at most {}", {code, Form::Scale::kMost}, block.current().site);
    return Form::Scale::to_double(code);
  };
  ScaleTiles<Form::kScales> scales;
  for (int place = 0; place < Form::kScales; ++place) {
    for (int i = 0; i < 16; ++i) {
      const int thread = 2 * lane(0).scales_a.thread_id + i / 8;
      scales.a[i][place] = scale(lane(4 * (i % 8) + thread).scales_a, place);
    }
    for (int j = 0; j < 8; ++j) scales.b[place][j] = scale(lane(4 * j + lane(0).scales_b.thread_id).scales_b, place);
  }
  if constexpr (std::is_same_v<typename Form::B, E2M1InByte>) {
    for (int l = 0; l < kWarpSize; ++l)
      for (const uint32_t word : lane(l).operands.b)
        if ((word & E2M1InByte::kPadding) != 0)
          block.fail("mma on e2m1 in bytes: expected zeros beside its four bits, got the register {}", {word},
                     block.current().site);
  }
  const auto operands = [&](int l) -> const MmaLane& { return lane(l).operands; };
  typename Form::Tiles tiles;
  tiles.gather(operands);
  kHasAvx2 ? multiply_scaled_avx2<Form>(tiles, scales) : multiply_scaled_anywhere<Form>(tiles, scales);
  tiles.scatter(operands);
  return true;
}

CollectiveFunction function_of(ScaledMma form) {
  switch (form) {
    case ScaledMma::kMxf8: return complete_scaled_mma<Mxf8>;
    case ScaledMma::kMxf8f4: return complete_scaled_mma<Mxf8f4>;
    case ScaledMma::kMxf4: return complete_scaled_mma<Mxf4>;
    case ScaledMma::kNvf4: break;
  }
  return complete_scaled_mma<Nvf4>;
}

}  // namespace

void scaled_mma(float* c, const uint32_t* a, uint32_t b0, uint32_t b1, const BlockScales& scales_a,
                const BlockScales& scales_b, ScaledMma form, Site site) {
  ScaledLane lane{{c, a, {b0, b1}}, scales_a, scales_b};
  running_block().collective(Wait::kMma, function_of(form), &lane, site);
}

}  // namespace mla::emulator
