// SPDX-License-Identifier: Apache-2.0
#include "cuda/ptx/scaled_mma_cases.h"

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace mla::cuda {
namespace {

using Words = std::vector<uint32_t>;
using Generator = std::mt19937;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr size_t kLanes = 32;
constexpr size_t kWordsOfLane = 12;  // a, b, c, the scales of A, the scales of B

// ---- The types, by their definitions -----------------------------------------------------------------------------

double ue8m0(uint32_t code) { return code == 255 ? kNan : std::ldexp(1.0, static_cast<int>(code) - 127); }
double ue4m3(uint32_t code) {
  const auto exponent = static_cast<int>(code >> 3);
  const double mantissa = code & 7U;
  if (code == 0x7F) return kNan;
  return exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
}
double e4m3(uint32_t code) { return (code < 128 ? 1 : -1) * ue4m3(code & 127U); }
double e2m1(uint32_t code) {
  constexpr double kMagnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return (code < 8 ? 1 : -1) * kMagnitudes[code & 7U];
}
double e2m1_in_byte(uint32_t code) { return e2m1(code >> 2 & 15U); }

/// Describes a form: elements of a register, scales of a row, and what codes stand for.
struct Mxf8 {
  static constexpr size_t kPer = 4, kScales = 1;
  static constexpr auto kA = e4m3, kB = e4m3, kScale = ue8m0;
};
struct Mxf8f4 {
  static constexpr size_t kPer = 4, kScales = 1;
  static constexpr auto kA = e4m3, kB = e2m1_in_byte, kScale = ue8m0;
};
struct Mxf4 {
  static constexpr size_t kPer = 8, kScales = 2;
  static constexpr auto kA = e2m1, kB = e2m1, kScale = ue8m0;
};
struct Nvf4 {
  static constexpr size_t kPer = 8, kScales = 4;
  static constexpr auto kA = e2m1, kB = e2m1, kScale = ue4m3;
};

// ---- Outputs -----------------------------------------------------------------------------------------------------

/// Computes the products by where the PTX ISA puts each element and each scale. Inputs are such that every sum is exact
/// in f32, in every order.
template <class Form>
void expect_products(const Words& in, Words& out) {
  constexpr size_t kPer = Form::kPer, kScales = Form::kScales, kDepth = 8 * kPer;
  const auto word = [&](size_t lane, size_t i) { return in[lane * kWordsOfLane + i]; };
  double a[16][kDepth], b[kDepth][8], c[16][8];
  for (size_t lane = 0; lane < kLanes; ++lane) {
    const size_t group = lane / 4, thread = lane % 4;
    const auto code = [&](size_t first, size_t i) {
      return word(lane, first + i / kPer) >> 32 / kPer * (i % kPer) & ((1U << 32 / kPer) - 1);
    };
    for (size_t i = 0; i < 4 * kPer; ++i) {
      const size_t row = i < kPer || (2 * kPer <= i && i < 3 * kPer) ? group : group + 8;
      const size_t column = thread * kPer + i % kPer + (i < 2 * kPer ? 0 : kDepth / 2);
      a[row][column] = Form::kA(code(0, i));
    }
    for (size_t i = 0; i < 2 * kPer; ++i) {
      const size_t row = thread * kPer + i % kPer + (i < kPer ? 0 : kDepth / 2);
      b[row][group] = Form::kB(code(4, i));
    }
    for (size_t i = 0; i < 4; ++i)
      c[i < 2 ? group : group + 8][thread * 2 + i % 2] = std::bit_cast<float>(word(lane, 6 + i));
  }
  uint32_t* to = out.data();
  for (size_t byte_a = 0; byte_a < 4; byte_a += kScales)
    for (size_t thread_a = 0; thread_a < 2; ++thread_a)
      for (size_t byte_b = 0; byte_b < 4; byte_b += kScales)
        for (size_t thread_b = 0; thread_b < 4; ++thread_b, to += kLanes * 4) {
          double scale_a[16][kScales], scale_b[kScales][8];
          for (size_t lane = 0; lane < kLanes; ++lane)
            for (size_t i = 0; i < kScales; ++i) {
              // Of a quad, the lower two threads or the upper two have the scales of its two rows; one has its
              // column's.
              if (lane % 4 / 2 == thread_a)
                scale_a[lane / 4 + lane % 2 * 8][i] = Form::kScale(word(lane, 10) >> 8 * (byte_a + i) & 255U);
              if (lane % 4 == thread_b) scale_b[i][lane / 4] = Form::kScale(word(lane, 11) >> 8 * (byte_b + i) & 255U);
            }
          for (size_t i = 0; i < 16; ++i)
            for (size_t j = 0; j < 8; ++j) {
              double sum = c[i][j];
              for (size_t k = 0; k < kDepth; ++k) {
                const size_t block = k * kScales / kDepth;
                sum += a[i][k] * scale_a[i][block] * b[k][j] * scale_b[block][j];
              }
              to[(i % 8 * 4 + j / 2) * 4 + i / 8 * 2 + j % 2] = std::bit_cast<uint32_t>(static_cast<float>(sum));
            }
        }
}

// ---- Inputs ------------------------------------------------------------------------------------------------------

/// Returns a register of elements whose sign bits may be set as `signs` says. Of e4m3 they are multiples of 1/4
/// below 2.
template <class Form>
uint32_t random_elements(Generator& random, bool of_b, bool signs) {
  if (Form::kPer == 8) return static_cast<uint32_t>(random()) & (signs ? 0xFFFFFFFFU : 0x77777777U);
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) {
    constexpr uint32_t kQuarters[] = {0x00, 0x28, 0x30, 0x34, 0x38, 0x3A, 0x3C, 0x3E};
    const auto bits = static_cast<uint32_t>(random());
    const bool in_byte = of_b && static_cast<double (*)(uint32_t)>(Form::kB) == e2m1_in_byte;
    const uint32_t sign = signs ? bits >> 8 & 1U : 0;
    word = word << 8 | (in_byte ? (sign << 3 | (bits & 7U)) << 2 : sign << 7 | kQuarters[bits & 7U]);
  }
  return word;
}

template <class Form>
void fill_elements(Words& in, Generator& random, bool signs) {
  for (size_t lane = 0; lane < kLanes; ++lane)
    for (size_t i = 0; i < 10; ++i) {
      uint32_t& word = in[lane * kWordsOfLane + i];
      if (i < 6)
        word = random_elements<Form>(random, i >= 4, signs);
      else
        word = std::bit_cast<uint32_t>(signs ? static_cast<float>(static_cast<int>(random() % 257) - 128) / 16 : 0.0F);
    }
}

/// Fills in elements, and in every byte of every lane a scale of its own.
template <class Form>
void fill_scales(Words& in) {
  Generator random(1);  // NOLINT(cert-msc51-cpp): the same inputs each time
  fill_elements<Form>(in, random, true);
  for (size_t lane = 0; lane < kLanes; ++lane)
    for (size_t i = 10; i < kWordsOfLane; ++i) {
      uint32_t word = 0;
      for (int byte = 0; byte < 4; ++byte) {
        const auto bits = static_cast<uint32_t>(random());
        // UE8M0 of 1/4 to 4; UE4M3 of 1 to 3.75.
        word = word << 8 | (Form::kScale(1) == ue8m0(1) ? 125 + bits % 5 : 0x38 + bits % 16);
      }
      in[lane * kWordsOfLane + i] = word;
    }
}

/// Fills in elements of one sign, and scales whose products are infinite in f32, NaN, subnormal or nothing, or whose
/// extremes cancel. A lane's four scales are the same, so that its sums stay exact.
template <class Form>
void fill_extreme_scales(Words& in) {
  constexpr uint32_t kUe8m0[] = {0, 109, 127, 145, 254, 255};
  constexpr uint32_t kUe4m3[] = {0, 1, 7, 0x38, 0x7E, 0x7F};
  Generator random(2);  // NOLINT(cert-msc51-cpp): the same inputs each time
  fill_elements<Form>(in, random, false);
  for (size_t lane = 0; lane < kLanes; ++lane)
    for (size_t i = 10; i < kWordsOfLane; ++i) {
      const uint32_t which = static_cast<uint32_t>(random()) % 6;
      in[lane * kWordsOfLane + i] = 0x01010101U * (Form::kScale(1) == ue8m0(1) ? kUe8m0[which] : kUe4m3[which]);
    }
}

template <class Form>
constexpr WrapperCase products_case(const char* name) {
  return {name, Compare::kF32, fill_scales<Form>, expect_products<Form>};
}
template <class Form>
constexpr WrapperCase extremes_case(const char* name) {
  return {name, Compare::kF32, fill_extreme_scales<Form>, expect_products<Form>};
}

constexpr WrapperCase kScaledMmaCases[] = {
    products_case<Mxf8>("mma_mxf8"),     extremes_case<Mxf8>("mma_mxf8_extremes"),
    products_case<Mxf8f4>("mma_mxf8f4"), extremes_case<Mxf8f4>("mma_mxf8f4_extremes"),
    products_case<Mxf4>("mma_mxf4"),     extremes_case<Mxf4>("mma_mxf4_extremes"),
    products_case<Nvf4>("mma_nvf4"),     extremes_case<Nvf4>("mma_nvf4_extremes"),
};

}  // namespace

std::span<const WrapperCase> scaled_mma_cases() { return kScaledMmaCases; }

}  // namespace mla::cuda
