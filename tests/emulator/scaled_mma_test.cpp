// SPDX-License-Identifier: Apache-2.0
// Tests what the emulator says of mma with block scales that the PTX ISA leaves undefined, and of scales that no lane
// is asked for. What comes of the others is tested by tests/cuda/ptx.
#include <gmock/gmock.h>

#include <string>

#include "emulator/harness.h"

namespace mla::emulator {
namespace {

using testing::HasSubstr;

constexpr uint32_t kOnes = 0x7F7F7F7FU;

/// Multiplies zeros, with what each lane gives as scales and as B.
struct ScaledProduct {
  ScaledMma form = ScaledMma::kMxf8;
  BlockScales a = {kOnes, 0, 0}, b = {kOnes, 0, 0};
  uint32_t operand_b = 0;
  int32_t lane = -1;     // the lane that gives these; the others give ones and the same selectors; -1: all of them
  bool differs = false;  // whether the others' selectors are zeros
};

struct Multiply {
  using Params = ScaledProduct;
  static constexpr const char* kName = "kernel";
  static constexpr int kThreads = 32;
  static void run(const Params& p) {
    const bool mine = p.lane < 0 || p.lane == MLA_CUDA_NAMESPACE::ptx::lane();
    const auto others = [&](const BlockScales& scales) {
      return p.differs ? BlockScales{kOnes, 0, 0} : BlockScales{kOnes, scales.byte_id, scales.thread_id};
    };
    float c[4] = {};
    const uint32_t a[4] = {};
    scaled_mma(c, a, mine ? p.operand_b : 0, 0, mine ? p.a : others(p.a), mine ? p.b : others(p.b), p.form,
               {"scaled_mma_test.cpp", 1});
  }
};

std::string fault_of(const ScaledProduct& product) { return run_kernel<Multiply>(product, {}, 0).message(); }
bool runs(const ScaledProduct& product) { return run_kernel<Multiply>(product, {}, 0).ok(); }

TEST(ScaledMma, SelectorsThatAFormLacks) {
  for (const auto& [form, scales] :
       {std::pair{ScaledMma::kMxf8, 1}, {ScaledMma::kMxf8f4, 1}, {ScaledMma::kMxf4, 2}, {ScaledMma::kNvf4, 4}})
    for (int32_t byte = -1; byte < 6; ++byte)
      for (int32_t thread = -1; thread < 6; ++thread) {
        const bool has_byte = byte >= 0 && byte < 4 && byte % scales == 0;
        const std::string expected = "mma with " + std::to_string(scales) + " scales of a row, of which byte-id " +
                                     std::to_string(byte) + " and thread-id " + std::to_string(thread) + " select none";
        const auto expect = [&](const ScaledProduct& product, bool exists) {
          const Status status = run_kernel<Multiply>(product, {}, 0);
          EXPECT_EQ(status.ok(), exists);
          if (!exists) {
            EXPECT_THAT(status.message(), HasSubstr(expected));
          }
        };
        expect({.form = form, .a = {kOnes, byte, thread}}, has_byte && (thread == 0 || thread == 1));
        expect({.form = form, .b = {kOnes, byte, thread}}, has_byte && thread >= 0 && thread < 4);
      }
}

TEST(ScaledMma, LanesWithSelectorsOfTheirOwn) {
  ScaledProduct product = {.b = {kOnes, 2, 0}, .lane = 7, .differs = true};
  EXPECT_THAT(fault_of(product), HasSubstr("the lanes of a warp came to mma with byte-id 0 and 2, thread-id 0 and 0"));
  product = {.a = {kOnes, 0, 1}, .lane = 31, .differs = true};
  EXPECT_THAT(fault_of(product), HasSubstr("the lanes of a warp came to mma with byte-id 0 and 0, thread-id 0 and 1"));
}

// A UE4M3 is no e4m3: its uppermost bit is zero. Lanes that have no scale of the operand may hold anything.
TEST(ScaledMma, SignsOfScalesInLanesThatHaveSome) {
  constexpr uint32_t kSigned = 0x7F7FFF7FU;
  for (int32_t lane = 0; lane < 32; ++lane)
    for (int32_t thread = 0; thread < 4; ++thread) {
      const ScaledProduct of_b = {.form = ScaledMma::kNvf4, .b = {kSigned, 0, thread}, .lane = lane};
      const ScaledProduct of_a = {.form = ScaledMma::kNvf4, .a = {kSigned, 0, thread % 2}, .lane = lane};
      EXPECT_EQ(runs(of_b), lane % 4 != thread);
      EXPECT_EQ(runs(of_a), lane % 4 / 2 != thread % 2);
    }
  EXPECT_THAT(fault_of({.form = ScaledMma::kNvf4, .a = {kSigned, 0, 0}}),
              HasSubstr("mma with a scale of 255: expected at most 127"));
  EXPECT_TRUE(runs({.form = ScaledMma::kMxf4, .a = {kSigned, 0, 0}}));
}

TEST(ScaledMma, PaddingOfE2M1InBytes) {
  for (uint32_t bit = 0; bit < 32; ++bit) {
    const bool padding = bit % 8 < 2 || bit % 8 > 5;
    const ScaledProduct product = {.form = ScaledMma::kMxf8f4, .operand_b = 1U << bit, .lane = 5};
    EXPECT_EQ(runs(product), !padding) << bit;
  }
  EXPECT_THAT(fault_of({.form = ScaledMma::kMxf8f4, .operand_b = 0x40}),
              HasSubstr("mma on e2m1 in bytes: expected zeros beside its four bits, got the register 64"));
}

}  // namespace
}  // namespace mla::emulator
