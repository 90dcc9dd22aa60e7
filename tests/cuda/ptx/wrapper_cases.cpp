// SPDX-License-Identifier: Apache-2.0
#include "cuda/ptx/wrapper_cases.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "cuda/ptx/wrapper_kernels.h"
#include "mla/numeric.h"

namespace mla::cuda {
namespace {

using Words = std::vector<uint32_t>;

class Random {
 public:
  uint32_t operator()() {
    state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<uint32_t>(state_ >> 33) ^ static_cast<uint32_t>(state_ >> 12);
  }

 private:
  uint64_t state_ = 88172645463325252ULL;
};

uint32_t bits(float value) { return std::bit_cast<uint32_t>(value); }
float number(uint32_t word) { return std::bit_cast<float>(word); }

// ---- Inputs ------------------------------------------------------------------------------------------------------

void fill_bits(Words& in) {
  Random random;
  for (uint32_t& word : in) word = random();
}

/// Fills in floats of all magnitudes, floats of moderate ones, and those that conversions are known for.
void fill_floats(Words& in) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kSpecial[] = {0.0F,     -0.0F,    1.0F,     -1.0F,     kInf,      -kInf,      kNan,       448.0F,
                                464.0F,   465.0F,   -480.0F,  0x1p-9F,   0x1p-10F,  0x3p-11F,   65504.0F,   65520.0F,
                                65519.0F, 0x1p-24F, 0x1p-25F, 0x3p-26F,  0x1p-126F, 0x1p-149F,  0x1p127F,   -126.0F,
                                128.0F,   -149.5F,  3.0e38F,  0x1.01p0F, 0x1.03p0F, 0x1.002p0F, 0x1.006p0F, 1e-30F};
  Random random;
  for (uint32_t& word : in) {
    const uint32_t kind = random() % 8;
    word = random();
    if (kind == 0) word = bits(kSpecial[word % std::size(kSpecial)]);
    if (kind >= 4) word = bits((static_cast<float>(word >> 8) * 0x1p-23F - 1.0F) * (kind == 4 ? 500.0F : 4.0F));
  }
}

/// Fills in all patterns of 16 bits as low halves, with random high halves.
void fill_pairs(Words& in) {
  Random random;
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint32_t>(i & 0xFFFFU) | random() << 16;
}

/// Fills in operands that are small multiples of a power of two, so that every sum is exact in every order.
template <uint32_t (*kPack)(Random&)>
void fill_fragments(Words& in) {
  Random random;
  for (size_t i = 0; i < in.size(); ++i)
    in[i] = i % 10 < 6 ? kPack(random) : bits(static_cast<float>(static_cast<int>(random() % 257) - 128) / 16);
}
float eighth(Random& random) { return static_cast<float>(static_cast<int>(random() % 31) - 15) / 8; }
uint32_t random_bf16(Random& random) {
  const uint32_t low = f32_to_bf16(eighth(random));
  return low | static_cast<uint32_t>(f32_to_bf16(eighth(random))) << 16;
}
uint32_t random_f16(Random& random) {
  const uint32_t low = f32_to_f16(eighth(random));
  return low | static_cast<uint32_t>(f32_to_f16(eighth(random))) << 16;
}
uint32_t random_e4m3(Random& random) {
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i)
    word = word << 8 | f32_to_e4m3(static_cast<float>(static_cast<int>(random() % 15) - 7) / 4);
  return word;
}

// ---- Outputs -----------------------------------------------------------------------------------------------------

void expect_special_registers(const Words&, Words& out) {
  for (uint32_t block = 0; block < 12; ++block)
    for (uint32_t thread = 0; thread < 64; ++thread) {
      const std::array<uint32_t, 9> values = {thread,        thread % 32, thread / 32, block % 3,  block / 3 % 2,
                                              block / 3 / 2, uint32_t{3}, uint32_t{2}, uint32_t{2}};
      std::copy(values.begin(), values.end(), out.begin() + (block * 64 + thread) * 9);
    }
}

template <class T>
void reverse_units(const Words& in, uint32_t* out) {
  constexpr size_t kBytes = sizeof(T);
  const auto* const from = reinterpret_cast<const unsigned char*>(in.data());
  auto* const to = reinterpret_cast<unsigned char*>(out);
  for (size_t i = 0; i < 32; ++i) std::copy_n(from + (31 - i) * kBytes, kBytes, to + i * kBytes);
}
using Bytes16 = std::array<uint64_t, 2>;

void expect_shared_access(const Words& in, Words& out) {
  reverse_units<uint8_t>(in, &out[0]);
  reverse_units<uint16_t>(in, &out[128]);
  reverse_units<uint32_t>(in, &out[256]);
  reverse_units<uint64_t>(in, &out[384]);
  reverse_units<Bytes16>(in, &out[512]);
  reverse_units<uint32_t>(in, &out[640]);
}

void expect_conditional_loads(const Words& in, Words& out) {
  for (size_t i = 0; i < 32 * 4; ++i) out[i] = (in[i / 4 * 4] & 1U) != 0 ? in[i] : 0;
  for (size_t i = 0; i < 32; ++i) {
    out[128 + i] = out[i * 4];
    out[160 + i] = in[i * 4];
  }
}
void expect_global_access(const Words& in, Words& out) {
  for (size_t twice = 0; twice < 2; ++twice) {
    reverse_units<uint8_t>(in, &out[twice * 128]);
    reverse_units<uint16_t>(in, &out[twice * 128 + 256]);
    reverse_units<uint32_t>(in, &out[twice * 128 + 512]);
    reverse_units<uint64_t>(in, &out[twice * 128 + 768]);
    reverse_units<Bytes16>(in, &out[twice * 128 + 1024]);
  }
}

void expect_shuffles(const Words& in, Words& out) {
  for (uint32_t thread = 0; thread < 64; ++thread) {
    const uint32_t lane = thread % 32;
    const uint32_t* const warp = &in[thread - lane];
    uint32_t* const to = &out[thread * 12];
    const auto as_float = [](uint32_t word) { return bits(static_cast<float>(word >> 8)); };
    for (uint32_t i = 0; i < 5; ++i) to[i] = warp[lane ^ 1U << i];
    to[5] = as_float(warp[31 - lane]);
    to[6] = warp[in[64 + thread] % 32];
    to[7] = warp[lane == 0 ? 0 : lane - 1];
    to[8] = warp[lane < 13 ? lane : lane - 13];
    to[9] = warp[lane > 29 ? lane : lane + 2];
    to[10] = as_float(warp[lane == 0 ? 31 : lane]);
    to[11] = as_float(warp[7]);
  }
}

void expect_votes(const Words& in, Words& out) {
  for (size_t i = 0; i < 32; ++i) {
    const uint32_t word = i == 0 ? 0U : i == 1 ? 0xFFFFFFFFU : in[i];
    for (size_t lane = 0; lane < 32; ++lane) {
      uint32_t* const to = &out[(i * 32 + lane) * 3];
      to[0] = word;
      to[1] = word != 0 ? 1U : 0U;
      to[2] = word == 0xFFFFFFFFU ? 1U : 0U;
    }
  }
}

void expect_max_of_warp(const Words& in, Words& out) {
  for (size_t first = 0; first < 8 * 32; first += 32) {
    const auto begin = in.begin() + static_cast<std::ptrdiff_t>(first);
    for (size_t lane = 0; lane < 32; ++lane) out[first + lane] = *std::max_element(begin, begin + 32);
  }
}

void expect_election(const Words&, Words& out) {
  for (size_t warp = 0; warp < 4; ++warp) out[warp] = 1;
}

void expect_registers(const Words& in, Words& out) {
  for (size_t thread = 0; thread < 256; ++thread) {
    out[thread] = in[thread] + 1;
    out[256 + thread] = in[thread] + 2;
  }
}

void expect_atomics(const Words& in, Words& out) {
  float sum = 0;
  for (size_t i = 0; i < 256; ++i) {
    out[0] += in[i];
    out[1] += in[i];
    sum += static_cast<float>(in[i] % 64);
    out[3] = static_cast<uint32_t>(std::max(static_cast<int32_t>(out[3]), static_cast<int32_t>(in[i])));
    out[4] = std::max(out[4], in[i]);
    out[5] = static_cast<uint32_t>(std::min(static_cast<int32_t>(out[5]), static_cast<int32_t>(in[i])));
    out[7] |= 1U << (in[i] % 32);
    out[16 + i] = 1;
  }
  out[2] = bits(sum);
  out[8] = 256;
  out[9] = 7;
  out[10] = 1;
  for (size_t block = 0; block < 4; ++block) {
    const auto first = in.begin() + static_cast<int64_t>(block * 64);
    uint32_t* const to = &out[600 + block * 3];
    for (size_t i = 0; i < 64; ++i) to[0] += in[block * 64 + i] % 1024;
    to[1] = to[0];
    to[2] = *std::min_element(first, first + 64);
  }
}

void expect_last_block(const Words& in, Words& out) {
  out[0] = 8;
  out[1] = 36;
  for (uint32_t block = 0; block < 8; ++block) {
    out[8 + block] = block + 1;
    for (size_t lane = 0; lane < 32; ++lane) {
      out[64 + block * 32 + lane] = in[block * 32 + lane];
      out[32 + lane] += in[block * 32 + lane];
    }
  }
}

void expect_async_copies(const Words& in, Words& out) {
  for (size_t thread = 0; thread < 64; ++thread) {
    const size_t other = thread ^ 33U;
    if (other % 5 == 3) continue;
    uint32_t* const to = &out[thread * 7];
    std::copy_n(&in[other * 4], 4, to);
    std::copy_n(&in[other * 2], 2, to + 4);
    to[6] = in[other];
  }
}

void expect_ldmatrix(const Words& in, Words& out) {
  // Element (i, j) of matrix m: row i is named by lane 8 m + i.
  const auto element = [&](size_t m, size_t i, size_t j) -> uint32_t {
    const size_t row = ((8 * m + i) * 11 + 5) % 32;
    return in[row * 4 + j / 2] >> 16 * (j % 2) & 0xFFFFU;
  };
  for (size_t kind = 0; kind < 4; ++kind)
    for (size_t m = 0; m < (kind < 2 ? 4U : 2U); ++m)
      for (size_t lane = 0; lane < 32; ++lane) {
        const size_t g = lane / 4;
        const size_t t = lane % 4 * 2;
        out[(kind * 4 + m) * 32 + lane] = kind % 2 == 0 ? element(m, g, t) | element(m, g, t + 1) << 16
                                                        : element(m, t, g) | element(m, t + 1, g) << 16;
      }
}

void expect_stmatrix(const Words& in, Words& out) {
  // Row i of matrix m goes where lane 8 m + i says; lane 4 i + t has elements 2 t and 2 t + 1 of it.
  for (size_t m = 0; m < 4; ++m)
    for (size_t i = 0; i < 8; ++i)
      for (size_t t = 0; t < 4; ++t) out[((8 * m + i) * 11 + 5) % 32 * 4 + t] = in[32 * m + 4 * i + t];
}

/// Computes the product by where the PTX ISA puts each element. kPer is the number of elements per register.
template <size_t kPer, float (*kValue)(uint32_t)>
void expect_mma(const Words& in, Words& out) {
  constexpr size_t kHalf = 4 * kPer;  // of the depth
  constexpr uint32_t kWidth = 32 / kPer;
  const auto value = [&](size_t lane, size_t part, size_t k) {
    return kValue(in[lane * 10 + part] >> kWidth * (k % kPer) & ((1U << kWidth) - 1));
  };
  for (size_t i = 0; i < 16; ++i)
    for (size_t j = 0; j < 8; ++j) {
      const size_t place = i % 8 * 4 + j / 2;
      const size_t part = i / 8 * 2 + j % 2;
      float sum = number(in[place * 10 + 6 + part]);
      for (size_t k = 0; k < 2 * kHalf; ++k) {
        const size_t column = k % kHalf / kPer;
        sum += value(i % 8 * 4 + column, i / 8 + k / kHalf * 2, k) * value(j * 4 + column, 4 + k / kHalf, k);
      }
      out[place * 4 + part] = bits(sum);
    }
}
float bf16_value(uint32_t code) { return bf16_to_f32(static_cast<uint16_t>(code)); }
float f16_value(uint32_t code) { return f16_to_f32(static_cast<uint16_t>(code)); }
float e4m3_value(uint32_t code) { return e4m3_to_f32(static_cast<uint8_t>(code)); }

template <uint32_t (*kFunction)(uint32_t, uint32_t)>
void expect_each(const Words& in, Words& out) {
  for (size_t i = 0; i < in.size(); ++i) out[i] = kFunction(in[i], in[(i + 1) % in.size()]);
}

template <class Narrow>
uint32_t pair(Narrow low, Narrow high) {
  return low | static_cast<uint32_t>(high) << 8 * sizeof(Narrow);
}
uint32_t pack_bf16x2(uint32_t a, uint32_t b) { return pair(f32_to_bf16(number(a)), f32_to_bf16(number(b))); }
uint32_t pack_f16x2(uint32_t a, uint32_t b) { return pair(f32_to_f16(number(a)), f32_to_f16(number(b))); }
uint32_t pack_e4m3x2(uint32_t a, uint32_t b) { return pair(f32_to_e4m3(number(a)), f32_to_e4m3(number(b))); }
uint32_t pack_e4m3x4(uint32_t a, uint32_t b) {
  return pack_e4m3x2(a, b) | pack_e4m3x2(b ^ 0x80000000U, a ^ 0x00400000U) << 16;
}
uint32_t unpack_low_bf16(uint32_t a, uint32_t) { return bits(bf16_value(a & 0xFFFFU)); }
uint32_t unpack_high_bf16(uint32_t a, uint32_t) { return bits(bf16_value(a >> 16)); }
uint32_t unpack_low_f16(uint32_t a, uint32_t) { return bits(f16_value(a & 0xFFFFU)); }
uint32_t unpack_high_f16(uint32_t a, uint32_t) { return bits(f16_value(a >> 16)); }
/// Applies a function of two numbers to the halves.
template <class F>
uint32_t of_bf16_pairs(uint32_t a, uint32_t b, const F& f) {
  return pair(f32_to_bf16(f(bf16_value(a & 0xFFFFU), bf16_value(b & 0xFFFFU))),
              f32_to_bf16(f(bf16_value(a >> 16), bf16_value(b >> 16))));
}
uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  return of_bf16_pairs(a, b, [](float x, float y) { return x * y; });
}
uint32_t add_bf16x2(uint32_t a, uint32_t b) {
  return of_bf16_pairs(a, b, [](float x, float y) { return x + y; });
}
/// Of a number and a NaN of either kind the number is wanted; std::fmin gives that for a quiet one only.
float quiet(float x) { return std::isnan(x) ? std::numeric_limits<float>::quiet_NaN() : x; }
uint32_t min_bf16x2(uint32_t a, uint32_t b) {
  return of_bf16_pairs(a, b, [](float x, float y) { return std::fmin(quiet(x), quiet(y)); });
}
uint32_t max_bf16x2(uint32_t a, uint32_t b) {
  return of_bf16_pairs(a, b, [](float x, float y) { return std::fmax(quiet(x), quiet(y)); });
}
uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  return pair(f32_to_f16(f16_value(a & 0xFFFFU) * f16_value(b & 0xFFFFU)),
              f32_to_f16(f16_value(a >> 16) * f16_value(b >> 16)));
}
uint32_t e4m3x2_to_f16x2(uint32_t a, uint32_t) {
  return pair(f32_to_f16(e4m3_value(a & 0xFFU)), f32_to_f16(e4m3_value(a >> 8 & 0xFFU)));
}
uint32_t e4m3x4_low(uint32_t a, uint32_t b) { return e4m3x2_to_f16x2(a, b); }
uint32_t e4m3x4_high(uint32_t a, uint32_t b) { return e4m3x2_to_f16x2(a >> 16, b); }

uint32_t twice_lower_half(uint32_t a, uint32_t) { return (a & 0xFFFFU) * 0x10001U; }
uint32_t twice_upper_half(uint32_t a, uint32_t) { return (a >> 16) * 0x10001U; }
uint32_t choose_bits(uint32_t a, uint32_t b) {
  uint32_t result = 0;
  for (int bit = 0; bit < 32; ++bit) result |= (((a ^ b >> 7) >> bit & 1U) != 0 ? a : b) & 1U << bit;
  return result;
}
uint32_t permute_bytes(uint32_t a, uint32_t b) {
  uint32_t result = 0;
  for (uint32_t byte = 0; byte < 4; ++byte) result |= (a >> (b >> 4 * byte & 3U) * 8 & 0xFFU) << 8 * byte;
  return result;
}
uint32_t permute_two_words(uint32_t a, uint32_t b) {
  uint32_t result = 0;
  for (uint32_t byte = 0; byte < 4; ++byte) {
    const uint32_t which = (a ^ b) >> 4 * byte & 7U;
    result |= ((which < 4 ? a : b) >> which % 4 * 8 & 0xFFU) << 8 * byte;
  }
  return result;
}
uint32_t max_number(uint32_t a, uint32_t b) {
  if (std::isnan(number(a)) || std::isnan(number(b))) return bits(number(std::isnan(number(a)) ? b : a) + 0.0F);
  return bits(std::max(number(a), number(b)) + 0.0F);
}
uint32_t max_or_nan(uint32_t a, uint32_t b) {
  return bits(std::isnan(number(a)) ? number(a) : std::isnan(number(b)) ? number(b) : number(max_number(a, b)));
}

double flushed(double x) { return std::abs(x) < 0x1p-126 ? std::copysign(0.0, x) : x; }
uint32_t exp2_approx(uint32_t a, uint32_t) { return bits(static_cast<float>(flushed(std::exp2(flushed(number(a)))))); }
uint32_t log2_approx(uint32_t a, uint32_t) { return bits(static_cast<float>(std::log2(flushed(number(a))))); }
uint32_t reciprocal_approx(uint32_t a, uint32_t) { return bits(static_cast<float>(flushed(1.0 / flushed(number(a))))); }
uint32_t mul_rn(uint32_t a, uint32_t b) { return bits(static_cast<float>(double{number(a)} * double{number(b)})); }
uint32_t add_rn(uint32_t a, uint32_t b) { return bits(number(a) + number(b)); }
uint32_t fma_rn(uint32_t a, uint32_t b) { return bits(std::fma(number(a), number(b), number(a ^ b))); }

void expect_named_barriers(const Words& in, Words& out) {
  for (size_t round = 0; round < 3 * 128; round += 128)
    for (size_t lane = 0; lane < 32; ++lane) {
      out[round + lane] = in[round + 63 - lane];
      out[round + 32 + lane] = in[round + 31 - lane];
      out[round + 64 + lane] = in[round + 96 + (lane + 1) % 32];
    }
}

void expect_barrier_votes(const Words& in, Words& out) {
  for (size_t round = 0; round < 16 * 128; round += 128) {
    const auto any = [&](size_t begin, size_t end) {
      return std::any_of(in.begin() + static_cast<ptrdiff_t>(round + begin),
                         in.begin() + static_cast<ptrdiff_t>(round + end),
                         [](uint32_t word) { return word % 64 == 0; });
    };
    std::fill_n(out.begin() + static_cast<ptrdiff_t>(round), 96, any(0, 96) ? 1 : 0);
    std::fill_n(out.begin() + static_cast<ptrdiff_t>(round + 96), 32, any(96, 128) ? 1 : 0);
  }
}

void expect_dependent_grid(const Words& in, Words& out) {
  for (size_t i = 0; i < 512; ++i) {
    uint32_t value = in[i];
    for (int round = 0; round < 2000; ++round) value = value * 1664525U + 1013904223U;
    out[i] = value;
    out[512 + 511 - i] = value;
  }
}

void expect_bulk_copies(const Words& in, Words& out) {
  for (size_t tile = 0; tile < 6; ++tile)
    for (size_t thread = 0; thread < 128; ++thread) out[thread] += in[tile * 128 + (thread ^ 32U)];
}

void expect_copies_with_barriers(const Words& in, Words& out) {
  for (size_t thread = 0; thread < 64; ++thread) {
    out[thread * 4] = in[2048 + 2 * 64 + thread] + in[2048 + 5 * 64 + thread];
    const size_t other = thread ^ 33U;
    for (size_t tile = 0; tile < 6 && other % 32 != 7; ++tile)
      for (size_t i = 0; i < 4; ++i) out[(64 + thread) * 4 + i] += in[tile * 256 + other * 4 + i];
  }
}

void expect_tensor_copies(const Words& in, Words& out) {
  constexpr size_t kChannelWords = 52, kRowWords = 80, kHeadWords = 21 * kRowWords + 4, kRows = 21, kHeads = 3;
  struct Box {
    size_t word, row, head;
  };
  constexpr Box kBoxes[] = {{32, 3, 1}, {0, 16, 2}};
  for (size_t box = 0; box < 2; ++box)
    for (size_t i = 0; i < 16; ++i)
      for (size_t word = 0; word < 32; ++word) {
        const Box& from = kBoxes[box];
        const size_t head = from.head + i / 8, row = from.row + i % 8, swizzled = (word / 4 ^ i % 8) * 4 + word % 4;
        if (head < kHeads && row < kRows && from.word + word < kChannelWords)
          out[box * 512 + i * 32 + swizzled] = in[head * kHeadWords + row * kRowWords + from.word + word];
      }
}

void expect_clusters(const Words& in, Words& out) {
  for (size_t block = 0; block < 4; ++block)
    for (size_t thread = 0; thread < 128; ++thread) {
      uint32_t& sum = out[block * 128 + thread];
      sum = block % 2;
      for (size_t tile = 0; tile < 6; ++tile)
        for (size_t i = 0, others = 0; i < 4; ++i) {
          others ^= in[((tile * 4 + (block ^ 1U)) * 128 + (thread ^ 32U)) * 4 + i];
          if (i == 3) sum += static_cast<uint32_t>(others);
        }
    }
}

template <uint32_t (*kPack)(Random&)>
void fill_with(Words& in) {
  Random random;
  for (uint32_t& word : in) word = kPack(random);
}

/// Expects the outputs of three layouts: for each first a b^T + number of the register % 8, then a b^T.
template <size_t kN, float (*kValue)(uint32_t)>
void expect_wgmma(const Words& in, Words& out) {
  const auto element = [&](size_t first, size_t row, size_t k) {
    return kValue(in[first + row * 32 + k / 2] >> 16 * (k % 2) & 0xFFFFU);
  };
  for (size_t i = 0; i < 64; ++i)
    for (size_t j = 0; j < kN; ++j) {
      // The register: columns 2t, 2t+1 of a row and of the row 8 below, then 8 columns further.
      const size_t number_of_register = j / 8 * 4 + i % 16 / 8 * 2 + j % 2;
      float sum = 0;
      for (size_t k = 0; k < 64; ++k) sum += element(0, i, k) * element(2048, j, k);
      for (size_t layout = 0; layout < 3; ++layout) {
        uint32_t* const to = &out[layout * 2 * 64 * kN + i * kN + j];
        to[0] = bits(sum + static_cast<float>(number_of_register % 8));
        to[64 * kN] = bits(sum);
      }
    }
}

template <size_t kN, uint32_t (*kPack)(Random&), float (*kValue)(uint32_t)>
constexpr WrapperCase wgmma_case(const char* name) {
  return {name, Compare::kBits, fill_with<kPack>, expect_wgmma<kN, kValue>};
}

/// Returns d + a b of 32 products as an H100 and H200 sum them (docs/notebook/2026-11-29-e4m3-sums.md): all terms are
/// cut off 13 bits behind the point of the largest exponent, and their sum to 14 bits.
double sum_of_e4m3(double d, const uint32_t (&a)[32], const uint32_t (&b)[32]) {
  const auto exponent = [](uint32_t code) { return std::max(static_cast<int>(code >> 3 & 15), 1) - 7; };
  double terms[33] = {d};
  int largest = d == 0 ? -1000 : std::ilogb(d);
  for (size_t k = 0; k < 32; ++k) {
    terms[k + 1] = double{e4m3_value(a[k])} * e4m3_value(b[k]);
    if (terms[k + 1] != 0) largest = std::max(largest, exponent(a[k]) + exponent(b[k]));
  }
  double sum = 0;
  for (const double term : terms) sum += std::ldexp(std::trunc(std::ldexp(term, 13 - largest)), largest - 13);
  if (sum == 0) return 0;
  const int kept = 13 - std::ilogb(sum);
  return std::ldexp(std::trunc(std::ldexp(sum, kept)), -kept);
}

uint32_t any_e4m3(Random& random) {
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t code = static_cast<uint32_t>(random()) & 0xFFU;
    if ((code & 0x7FU) == 0x7FU) code ^= 1U;                       // no NaN
    word = word << 8 | (random() % 4 == 0 ? code & 0x87U : code);  // more subnormals
  }
  return word;
}

template <size_t kN>
void expect_wgmma_e4m3(const Words& in, Words& out) {
  const auto load = [&](uint32_t(&codes)[32], size_t first, size_t row, size_t step) {
    for (size_t k = 0; k < 32; ++k) codes[k] = in[first + row * 32 + step * 8 + k / 4] >> 8 * (k % 4) & 0xFFU;
  };
  for (size_t i = 0; i < 64; ++i)
    for (size_t j = 0; j < kN; ++j) {
      const size_t number_of_register = j / 8 * 4 + i % 16 / 8 * 2 + j % 2;
      double added = static_cast<double>(number_of_register % 8), sum = 0;
      for (size_t step = 0; step < 4; ++step) {
        uint32_t a[32], b[32];
        load(a, 0, i, step);
        load(b, 2048, j, step);
        added = sum_of_e4m3(added, a, b);
        sum = sum_of_e4m3(sum, a, b);
      }
      for (size_t layout = 0; layout < 3; ++layout) {
        uint32_t* const to = &out[layout * 2 * 64 * kN + i * kN + j];
        to[0] = bits(static_cast<float>(added));
        to[64 * kN] = bits(static_cast<float>(sum));
      }
    }
}

#define X(n, type, Type)                                                                      \
  wgmma_case<n, random_##type, type##_value>("wgmma_" #type "_" #n "_shared"),                \
      wgmma_case<n, random_##type, type##_value>("wgmma_" #type "_" #n "_shared_transposed"), \
      wgmma_case<n, random_##type, type##_value>("wgmma_" #type "_" #n "_registers"),         \
      wgmma_case<n, random_##type, type##_value>("wgmma_" #type "_" #n "_registers_transposed")
constexpr WrapperCase kCases[] = {
    {"special_registers", Compare::kBits, fill_bits, expect_special_registers},
    {"shared_access", Compare::kBits, fill_bits, expect_shared_access},
    {"shuffles", Compare::kBits, fill_bits, expect_shuffles},
    {"votes", Compare::kBits, fill_bits, expect_votes},
    {"max_of_warp", Compare::kBits, fill_bits, expect_max_of_warp},
    {"global_access", Compare::kBits, fill_bits, expect_global_access},
    {"conditional_loads", Compare::kBits, fill_bits, expect_conditional_loads},
    {"atomics", Compare::kBits, fill_bits, expect_atomics},
    {"last_block", Compare::kBits, fill_bits, expect_last_block},
    {"async_copies", Compare::kBits, fill_bits, expect_async_copies},
    {"ldmatrix", Compare::kBits, fill_bits, expect_ldmatrix},
    {"mma_bf16", Compare::kBits, fill_fragments<random_bf16>, expect_mma<2, bf16_value>},
    {"mma_f16", Compare::kBits, fill_fragments<random_f16>, expect_mma<2, f16_value>},
    {"mma_e4m3", Compare::kBits, fill_fragments<random_e4m3>, expect_mma<4, e4m3_value>},
    {"pack_bf16x2", Compare::kBf16, fill_floats, expect_each<pack_bf16x2>},
    {"pack_f16x2", Compare::kF16, fill_floats, expect_each<pack_f16x2>},
    {"pack_e4m3x2", Compare::kE4M3, fill_floats, expect_each<pack_e4m3x2>},
    {"pack_e4m3x4", Compare::kE4M3, fill_floats, expect_each<pack_e4m3x4>},
    {"unpack_low_bf16", Compare::kF32, fill_pairs, expect_each<unpack_low_bf16>},
    {"unpack_high_bf16", Compare::kF32, fill_pairs, expect_each<unpack_high_bf16>},
    {"unpack_low_f16", Compare::kF32, fill_pairs, expect_each<unpack_low_f16>},
    {"unpack_high_f16", Compare::kF32, fill_pairs, expect_each<unpack_high_f16>},
    {"mul_bf16x2", Compare::kBf16, fill_bits, expect_each<mul_bf16x2>},
    {"add_bf16x2", Compare::kBf16, fill_bits, expect_each<add_bf16x2>},
    {"min_bf16x2", Compare::kBf16, fill_bits, expect_each<min_bf16x2>},
    {"max_bf16x2", Compare::kBf16, fill_bits, expect_each<max_bf16x2>},
    {"mul_f16x2", Compare::kF16, fill_bits, expect_each<mul_f16x2>},
    {"e4m3x2_to_f16x2", Compare::kF16, fill_pairs, expect_each<e4m3x2_to_f16x2>},
    {"e4m3x4_low", Compare::kF16, fill_pairs, expect_each<e4m3x4_low>},
    {"e4m3x4_high", Compare::kF16, fill_pairs, expect_each<e4m3x4_high>},
    {"twice_lower_half", Compare::kBits, fill_bits, expect_each<twice_lower_half>},
    {"twice_upper_half", Compare::kBits, fill_bits, expect_each<twice_upper_half>},
    {"choose_bits", Compare::kBits, fill_bits, expect_each<choose_bits>},
    {"permute_bytes", Compare::kBits, fill_bits, expect_each<permute_bytes>},
    {"permute_two_words", Compare::kBits, fill_bits, expect_each<permute_two_words>},
    {"max_number", Compare::kF32, fill_floats, expect_each<max_number>},
    {"max_or_nan", Compare::kF32, fill_floats, expect_each<max_or_nan>},
    {"exp2_approx", Compare::kF32Relative, fill_floats, expect_each<exp2_approx>},
    {"log2_approx", Compare::kF32Logarithm, fill_floats, expect_each<log2_approx>},
    {"reciprocal_approx", Compare::kF32Relative, fill_floats, expect_each<reciprocal_approx>},
    {"mul_rn", Compare::kF32, fill_floats, expect_each<mul_rn>},
    {"add_rn", Compare::kF32, fill_floats, expect_each<add_rn>},
    {"fma_rn", Compare::kF32, fill_floats, expect_each<fma_rn>},
    {"named_barriers", Compare::kBits, fill_bits, expect_named_barriers},
    {"barrier_votes", Compare::kBits, fill_bits, expect_barrier_votes},
    {"dependent_grid", Compare::kBits, fill_bits, expect_dependent_grid},
    {"bulk_copies", Compare::kBits, fill_bits, expect_bulk_copies},
    {"copies_with_barriers", Compare::kBits, fill_bits, expect_copies_with_barriers},
    {"tensor_copies", Compare::kBits, fill_bits, expect_tensor_copies},
    {"clusters", Compare::kBits, fill_bits, expect_clusters},
    {"election", Compare::kBits, fill_bits, expect_election},
    {"stmatrix", Compare::kBits, fill_bits, expect_stmatrix},
    {"registers", Compare::kBits, fill_bits, expect_registers},
    MLA_FOR_EVERY_WGMMA(X),
    {"wgmma_e4m3_32_shared", Compare::kBits, fill_with<any_e4m3>, expect_wgmma_e4m3<32>},
    {"wgmma_e4m3_64_shared", Compare::kBits, fill_with<any_e4m3>, expect_wgmma_e4m3<64>},
    {"wgmma_e4m3_128_shared", Compare::kBits, fill_with<any_e4m3>, expect_wgmma_e4m3<128>},
    {"wgmma_e4m3_32_registers", Compare::kBits, fill_with<any_e4m3>, expect_wgmma_e4m3<32>},
    {"wgmma_e4m3_64_registers", Compare::kBits, fill_with<any_e4m3>, expect_wgmma_e4m3<64>},
    {"wgmma_e4m3_128_registers", Compare::kBits, fill_with<any_e4m3>, expect_wgmma_e4m3<128>},
};
#undef X

}  // namespace

std::span<const WrapperCase> wrapper_cases() { return kCases; }

}  // namespace mla::cuda
