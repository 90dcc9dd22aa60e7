// SPDX-License-Identifier: Apache-2.0
// Tests that every operation can be captured into a graph: it neither waits, allocates on the device, nor looks at
// device memory, which is out of the host's reach meanwhile. The graph computes what the operation does.
#include "cuda/runtime/devices.h"

namespace mla::test {
namespace {

/// Makes small blocks of rows and large ones, which on SM90 are of another backend.
constexpr int32_t kHeads[] = {16, 24};

class Capture : public testing::TestWithParam<std::string> {
 protected:
  Capture() : gpu_(Gpu::open(GetParam()).value()), context_(context_on(GetParam())) {}

  template <class Spec, class Case>
  void expect_captured(const Spec& spec, const Case& problem) {
    const auto expected = expected_of(problem);  // first: it writes into the outputs
    problem.reset_outputs();
    const auto before = outputs(problem);
    size_t bytes = 0;
    constexpr bool kPlanned = requires { workspace_size(context_, problem.params()); };
    if constexpr (kPlanned) {
      const Placed shapes(gpu_, problem, 0);
      const Result<size_t> size = workspace_size(context_, shapes.there(problem.params()));
      ASSERT_EQ(size.status().message(), "");
      bytes = *size;
    }
    const Placed placed(gpu_, problem, bytes);
    const auto params = placed.there(problem.params());
    const Stream stream = gpu_.create_stream().value();
    Status status = gpu_.begin_capture(stream);
    ASSERT_EQ(status.message(), "");
    placed.close();
    Plan plan;
    if constexpr (kPlanned) {
      Result<Plan> made = mla::plan(context_, params, placed.workspace(), stream);
      status = made.status();
      if (made.ok()) {
        plan = std::move(made).value();
        status = run(context_, plan, params, stream);
      }
    } else {
      status = run(context_, params, stream);
    }
    placed.open();
    const Result<Graph> graph = gpu_.end_capture(stream);
    ASSERT_EQ(status.message(), "") << describe(spec);
    ASSERT_EQ(graph.status().message(), "");
    placed.fetch();
    EXPECT_EQ(outputs(problem), before) << "a capture computes nothing";
    for (int replay = 0; replay < 2; ++replay) {
      ASSERT_EQ(gpu_.launch(*graph, stream).message(), "");
      ASSERT_EQ(gpu_.synchronize(stream).message(), "");
    }
    placed.fetch();
    const std::string row = row_on(GetParam(), spec);
    kit::Outcome outcome;
    if constexpr (requires { kit::expected_of(problem); })
      outcome = kit::check_outputs(problem, *expected, row);
    else
      outcome = kit::check_outputs(problem, row);
    EXPECT_TRUE(outcome.ok) << outcome.line();
    EXPECT_EQ(gpu_.destroy(*graph).message(), "");
    EXPECT_EQ(gpu_.destroy(stream).message(), "");
  }

  /// Returns the expected outputs of operations that have some; the others, for which this is null, are compared byte
  /// for byte in the end.
  template <class Case>
  static std::shared_ptr<kit::Expected> expected_of(const Case& problem) {
    if constexpr (requires { kit::expected_of(problem); }) {
      Result<kit::Expected> expected = kit::expected_of(problem);
      EXPECT_EQ(expected.status().message(), "");
      return std::make_shared<kit::Expected>(std::move(expected).value());
    } else {
      return nullptr;
    }
  }

  template <class Case>
  static std::vector<std::vector<std::byte>> outputs(const Case& problem) {
    std::vector<std::vector<std::byte>> all;
    for (const kit::Buffer* output : kit::outputs_of(problem))
      all.emplace_back(output->bytes().begin(), output->bytes().end());
    return all;
  }

  Gpu gpu_;
  Context context_;
};

TEST_P(Capture, Decode) {
  for (int32_t heads : kHeads) {
    kit::DecodeSpec spec;
    spec.num_heads = heads;
    spec.q_len = {1, 2, 0, 1};
    spec.kv_len = {130, 77, 5, 0};
    expect_captured(spec, kit::DecodeCase(spec));
  }
}

TEST_P(Capture, DecodeSparse) {
  for (int32_t heads : kHeads) {
    kit::DecodeSparseSpec spec;
    spec.num_heads = heads;
    expect_captured(spec, kit::DecodeSparseCase(spec));
    spec.o_dtype = DType::kE4M3;
    spec.finish.emplace();
    expect_captured(spec, kit::DecodeSparseCase(spec));
  }
}

TEST_P(Capture, Prefill) {
  kit::PrefillSpec spec;
  spec.num_heads = 2;
  spec.q_len = {33, 20};
  spec.kv_len = {33, 90};
  expect_captured(spec, kit::PrefillCase(spec));
}

TEST_P(Capture, PrefillSparse) {
  for (int32_t heads : kHeads) {
    kit::PrefillSparseSpec spec;
    spec.num_heads = heads;
    expect_captured(spec, kit::PrefillSparseCase(spec));
  }
}

TEST_P(Capture, MergeStates) { expect_captured(kit::MergeSpec{}, kit::MergeCase(kit::MergeSpec{})); }
TEST_P(Capture, Append) { expect_captured(kit::AppendSpec{}, kit::AppendCase(kit::AppendSpec{})); }
TEST_P(Capture, AppendRope) { expect_captured(kit::AppendRopeSpec{}, kit::AppendRopeCase(kit::AppendRopeSpec{})); }
TEST_P(Capture, Gather) { expect_captured(kit::GatherSpec{}, kit::GatherCase(kit::GatherSpec{})); }
TEST_P(Capture, CopyPages) { expect_captured(kit::CopyPagesSpec{}, kit::CopyPagesCase(kit::CopyPagesSpec{})); }
TEST_P(Capture, BlockTableToCsr) {
  expect_captured(kit::BlockTableToCsrSpec{}, kit::BlockTableToCsrCase(kit::BlockTableToCsrSpec{}));
}
TEST_P(Capture, PhysicalSlots) {
  expect_captured(kit::PhysicalSlotsSpec{}, kit::PhysicalSlotsCase(kit::PhysicalSlotsSpec{}));
}
TEST_P(Capture, AppendIndexer) {
  expect_captured(kit::AppendIndexerSpec{}, kit::AppendIndexerCase(kit::AppendIndexerSpec{}));
}
TEST_P(Capture, IndexerLogits) {
  expect_captured(kit::IndexerLogitsSpec{}, kit::IndexerLogitsCase(kit::IndexerLogitsSpec{}));
}
TEST_P(Capture, TopK) { expect_captured(kit::TopKSpec{}, kit::TopKCase(kit::TopKSpec{})); }
TEST_P(Capture, Compress) {
  // The state has room for the new tokens beside those before them, so that a replay finds the same tokens.
  const kit::CompressSpec spec = {.q_len = {9}, .block_size = 16};
  expect_captured(spec, kit::CompressCase(spec));
}
TEST_P(Capture, FinishOutput) {
  kit::FinishOutputSpec spec;
  spec.out_dtype = DType::kE4M3;
  expect_captured(spec, kit::FinishOutputCase(spec));
}
TEST_P(Capture, IndexerTopK) { expect_captured(kit::IndexerTopKSpec{}, kit::IndexerTopKCase(kit::IndexerTopKSpec{})); }

INSTANTIATE_TEST_SUITE_P(Devices, Capture, testing::ValuesIn(few_devices()), test_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Capture);

}  // namespace
}  // namespace mla::test
