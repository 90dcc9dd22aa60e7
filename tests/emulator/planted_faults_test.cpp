// SPDX-License-Identifier: Apache-2.0
// Runs kernels with one planted fault each: every seed must report it or give a wrong result, and none may find
// anything in the kernel without it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "emulator/faulty_kernels.h"
#include "emulator/harness.h"

namespace mla::MLA_CUDA_NAMESPACE {
namespace {

using testing::HasSubstr;

struct Problem {
  std::vector<float> in;
  std::vector<int32_t> table;
  std::vector<float> expected;
  int32_t n = 0;
};

using ProblemMaker = Problem (*)();

/// Returns small whole numbers, for which sums and bf16 are exact.
std::vector<float> numbers(size_t count) {
  std::vector<float> values(count);
  uint32_t state = 12345;
  for (float& value : values) {
    state = state * 1664525 + 1013904223;
    value = static_cast<float>(static_cast<int>(state >> 24) - 128);
  }
  return values;
}

Problem reverse_problem() {
  Problem problem{.in = numbers(512), .table = {}, .expected = std::vector<float>(512)};
  for (size_t i = 0; i < 512; ++i) problem.expected[i] = problem.in[(127 - i / 4) * 4 + i % 4];
  return problem;
}

Problem multiply_problem() {
  Problem problem{.in = numbers(256 + 128), .table = {}, .expected = std::vector<float>(128)};
  for (size_t i = 0; i < 16; ++i)
    for (size_t j = 0; j < 8; ++j)
      for (size_t k = 0; k < 16; ++k)
        problem.expected[i * 8 + j] += problem.in[i * 16 + k] * problem.in[256 + k * 8 + j];
  return problem;
}

Problem paged_problem() {
  constexpr int kKeys = 38;  // the last page holds two
  Problem problem{.in = std::vector<float>(20 * 4, std::numeric_limits<float>::quiet_NaN()),
                  .table = {3, 17, 0, 8, 12, 5, 19, 1, 9, 14},
                  .expected = {0},
                  .n = kKeys};
  const std::vector<float> values = numbers(kKeys);
  for (size_t key = 0; key < kKeys; ++key) {
    problem.in[static_cast<size_t>(problem.table[key / 4]) * 4 + key % 4] = values[key];
    problem.expected[0] += values[key];
  }
  return problem;
}

Problem pipeline_problem() {
  constexpr size_t kTiles = 9;
  Problem problem{.in = numbers(kTiles * 128), .table = {}, .expected = std::vector<float>(128), .n = kTiles};
  for (size_t tile = 0; tile < kTiles; ++tile)
    for (size_t i = 0; i < 128; ++i) problem.expected[i] += problem.in[tile * 128 + (i ^ 32U)];
  return problem;
}

Problem exchange_problem() {
  constexpr size_t kTiles = 9;
  Problem problem{.in = numbers(kTiles * 256), .table = {}, .expected = std::vector<float>(256), .n = kTiles};
  for (size_t tile = 0; tile < kTiles; ++tile)
    for (size_t i = 0; i < 256; ++i) problem.expected[i] += problem.in[tile * 256 + (i ^ 128U ^ 32U)];
  return problem;
}

Problem shuffle_problem() {
  Problem problem{.in = numbers(32), .table = {}, .expected = std::vector<float>(32), .n = 16};
  for (size_t i = 0; i < 32; ++i) problem.expected[i] = problem.in[i < 16 ? i ^ 1U : i];
  return problem;
}

Problem handover_problem() {
  Problem problem{.in = numbers(32), .table = {}, .expected = std::vector<float>(32)};
  for (size_t i = 0; i < 32; ++i) problem.expected[i] = problem.in[31 - i];
  return problem;
}

Problem warpgroup_problem() {
  Problem problem{.in = numbers((64 + 256) * 16), .table = {}, .expected = std::vector<float>(64 * 256)};
  for (size_t i = 0; i < 64; ++i)
    for (size_t j = 0; j < 256; ++j)
      for (size_t k = 0; k < 16; ++k)
        problem.expected[i * 256 + j] += problem.in[i * 16 + k] * problem.in[(64 + j) * 16 + k];
  return problem;
}

/// Returns whether the emulator reported a fault or the result is wrong; `how` says which.
template <class Kernel>
bool goes_wrong(const Problem& problem, uint64_t seed, std::string& how) {
  std::vector<float> out(problem.expected.size(), -1e30F);
  const FaultParams params{problem.in.data(), problem.table.data(), out.data(), problem.n};
  emulator::Shape shape{.shared_bytes = Kernel::kSharedBytes};
  if constexpr (requires { Kernel::kCluster; }) shape.grid_x = shape.cluster = Kernel::kCluster;
  const Status status = emulator::run_kernel<Kernel>(params, shape, seed);
  how = status.ok() ? out == problem.expected ? "right" : "a wrong result" : status.message();
  return !status.ok() || out != problem.expected;
}

struct Case {
  const char* name;
  ProblemMaker problem;
  bool (*right)(const Problem&, uint64_t, std::string&);
  bool (*faulty)(const Problem&, uint64_t, std::string&);
};

template <class Right, class Faulty>
Case make_case(const char* name, ProblemMaker problem) {
  return {name, problem, goes_wrong<Right>, goes_wrong<Faulty>};
}

template <CopyFault kFault>
Case copy_case(const char* name) {
  return make_case<ReverseKernel<CopyFault::kNone>, ReverseKernel<kFault>>(name, reverse_problem);
}
template <FragmentFault kFault>
Case fragment_case(const char* name) {
  return make_case<MultiplyKernel<FragmentFault::kNone>, MultiplyKernel<kFault>>(name, multiply_problem);
}
template <PhaseFault kFault>
Case phase_case(const char* name) {
  return make_case<BulkPipelineKernel<PhaseFault::kNone>, BulkPipelineKernel<kFault>>(name, pipeline_problem);
}
template <NamedFault kFault>
Case named_case(const char* name) {
  return make_case<HandoverKernel<NamedFault::kNone>, HandoverKernel<kFault>>(name, handover_problem);
}

template <WgmmaFault kFault>
Case warpgroup_case(const char* name) {
  return make_case<WarpgroupKernel<WgmmaFault::kNone>, WarpgroupKernel<kFault>>(name, warpgroup_problem);
}

template <OperandFault kFault>
Case operand_case(const char* name) {
  return make_case<RegisterOperandKernel<OperandFault::kNone>, RegisterOperandKernel<kFault>>(name, warpgroup_problem);
}
template <ArrivalFault kFault>
Case arrival_case(const char* name) {
  return make_case<ArrivalPipelineKernel<ArrivalFault::kNone>, ArrivalPipelineKernel<kFault>>(name, pipeline_problem);
}

template <ClusterFault kFault>
Case cluster_case(const char* name) {
  return make_case<ExchangeKernel<ClusterFault::kNone>, ExchangeKernel<kFault>>(name, exchange_problem);
}

template <ClusterLoadFault kFault>
Case cluster_load_case(const char* name) {
  return make_case<ClusterLoadKernel<ClusterLoadFault::kNone>, ClusterLoadKernel<kFault>>(name, exchange_problem);
}

class PlantedFault : public testing::TestWithParam<Case> {};

TEST_P(PlantedFault, IsFoundUnderEverySeed) {
  const Case& c = GetParam();
  const Problem problem = c.problem();
  std::string how;
  for (uint64_t seed = 0; seed < emulator::kSeeds; ++seed) {
    EXPECT_FALSE(c.right(problem, seed, how)) << "without the fault, seed " << seed << ": " << how;
    EXPECT_TRUE(c.faulty(problem, seed, how)) << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Emulator, PlantedFault,
    testing::Values(
        copy_case<CopyFault::kMissingWait>("MissingWait"),
        copy_case<CopyFault::kWaitOneGroupTooFew>("WaitOneGroupTooFew"),
        copy_case<CopyFault::kMissingBarrier>("MissingBarrier"),
        fragment_case<FragmentFault::kSwappedRows>("FragmentSwappedRows"),
        fragment_case<FragmentFault::kUnshiftedColumn>("FragmentUnshiftedColumn"),
        fragment_case<FragmentFault::kWrongHalf>("FragmentWrongHalf"),
        fragment_case<FragmentFault::kSumsWithoutValue>("FragmentSumsWithoutValue"),
        make_case<PagedSumKernel<false>, PagedSumKernel<true>>("OffByOnePageRead", paged_problem),
        make_case<PipelineKernel<false>, PipelineKernel<true>>("UnsynchronizedStageReuse", pipeline_problem),
        phase_case<PhaseFault::kFullParityStays>("FullParityStays"),
        phase_case<PhaseFault::kEmptyParityInverted>("EmptyParityInverted"),
        phase_case<PhaseFault::kTooFewBytes>("TooFewBytesExpected"),
        phase_case<PhaseFault::kMissingFence>("MissingFence"), phase_case<PhaseFault::kArriveTwice>("ArriveTwice"),
        make_case<ShuffleKernel<false>, ShuffleKernel<true>>("DivergentShuffle", shuffle_problem),
        named_case<NamedFault::kWrongCount>("NamedBarrierWrongCount"),
        named_case<NamedFault::kWrongBarrier>("NamedBarrierWrongNumber"),
        named_case<NamedFault::kCountsDiffer>("NamedBarrierCountsDiffer"),
        named_case<NamedFault::kOppositeOrder>("DeadlockOppositeOrder"),
        warpgroup_case<WgmmaFault::kMissingWait>("WgmmaMissingWait"),
        warpgroup_case<WgmmaFault::kWaitOneGroupTooFew>("WgmmaWaitOneGroupTooFew"),
        warpgroup_case<WgmmaFault::kMissingCommit>("WgmmaMissingCommit"),
        warpgroup_case<WgmmaFault::kMissingFence>("WgmmaMissingFence"),
        warpgroup_case<WgmmaFault::kSwappedStrides>("WgmmaSwappedStrides"),
        operand_case<OperandFault::kMissingProxyFence>("WgmmaMissingProxyFence"),
        operand_case<OperandFault::kProxyFenceTooEarly>("WgmmaProxyFenceTooEarly"),
        operand_case<OperandFault::kWrongSwizzle>("WgmmaWrongSwizzle"),
        operand_case<OperandFault::kTransposed>("WgmmaTransposed"),
        operand_case<OperandFault::kDescriptorPerWarp>("WgmmaDescriptorPerWarp"),
        operand_case<OperandFault::kRowAsBegin>("WgmmaRowAsBegin"),
        operand_case<OperandFault::kChangedA>("WgmmaChangedA"), operand_case<OperandFault::kChangedB>("WgmmaChangedB"),
        operand_case<OperandFault::kWrittenSums>("WgmmaWrittenSums"),
        operand_case<OperandFault::kSumsOfBefore>("WgmmaSumsOfBefore"),
        arrival_case<ArrivalFault::kOrdinaryArrival>("OrdinaryArrivalAfterCopies"),
        arrival_case<ArrivalFault::kArrivalBeforeCopy>("ArrivalBeforeCopies"),
        arrival_case<ArrivalFault::kMissingWait>("MissingWaitForArrivals"),
        cluster_case<ClusterFault::kMissingProxyFence>("ClusterMissingProxyFence"),
        cluster_case<ClusterFault::kMissingSync>("ClusterMissingSync"),
        cluster_case<ClusterFault::kTooFewBytes>("ClusterTooFewBytesExpected"),
        cluster_case<ClusterFault::kSourceChanged>("ClusterSourceChanged"),
        cluster_case<ClusterFault::kMissingRoom>("ClusterMissingRoom"),
        cluster_case<ClusterFault::kMissingLastSync>("ClusterMissingLastSync"),
        cluster_load_case<ClusterLoadFault::kMissingSync>("ClusterLoadMissingSync"),
        cluster_load_case<ClusterLoadFault::kRelaxedSync>("ClusterLoadRelaxedSync"),
        cluster_load_case<ClusterLoadFault::kMissingLastSync>("ClusterLoadMissingLastSync")),
    [](const auto& test) { return std::string(test.param.name); });

template <class Kernel>
std::string told(const Problem& problem) {
  std::string how;
  EXPECT_TRUE(goes_wrong<Kernel>(problem, 1, how));
  return how;
}

TEST(PlantedFaults, OfWgmmaAreTold) {
  const Problem problem = warpgroup_problem();
  EXPECT_THAT(told<RegisterOperandKernel<OperandFault::kMissingProxyFence>>(problem),
              HasSubstr("wgmma reads at offset 0 of shared memory what thread"));
  EXPECT_THAT(told<RegisterOperandKernel<OperandFault::kDescriptorPerWarp>>(problem),
              HasSubstr("the warps of a warpgroup have different operands"));
  EXPECT_THAT(told<RegisterOperandKernel<OperandFault::kRowAsBegin>>(problem),
              HasSubstr("an operand with a swizzle of 128 bytes begins at 1152: expected a multiple of 1024"));
  EXPECT_THAT(told<RegisterOperandKernel<OperandFault::kChangedA>>(problem),
              HasSubstr("the registers of A changed before the wait"));
  EXPECT_THAT(told<RegisterOperandKernel<OperandFault::kChangedB>>(problem),
              HasSubstr("an operand of wgmma at offset 16 of shared memory was overwritten before the wait"));
  EXPECT_THAT(told<RegisterOperandKernel<OperandFault::kWrittenSums>>(problem),
              HasSubstr("the accumulators of wgmma were written before the wait"));
}

}  // namespace
}  // namespace mla::MLA_CUDA_NAMESPACE
