// SPDX-License-Identifier: Apache-2.0
// Tests outputs that share memory with another tensor of the call, and tensors that only look so.
// tests/ops/overlap_test.cpp has every pair of every operation.
#include <cstring>
#include <deque>

#include "core/overlap.h"
#include "core/validate.h"
#include "index_problems.h"
#include "sparse_problems.h"
#include "writer_problems.h"

namespace mla::test {
namespace {

struct Room {
  std::vector<std::byte> bytes, before;
};

std::deque<Room> rooms;  // of the test that runs

class ValidateOverlap : public ::testing::Test {
 protected:
  void TearDown() override {
    for (const Room& room : rooms) EXPECT_EQ(room.bytes, room.before) << "a refused call has written";
    rooms.clear();
  }
};

/// Makes the view begin `bytes` behind where `other` begins. `other` moves to memory with room for both: what a view
/// reaches behind the end of a small list would else depend on the heap.
void put_on(TensorView& view, TensorView& other, int64_t bytes = 0) {
  constexpr size_t kRoom = 1 << 16;
  std::byte* const room = rooms.emplace_back(Room{.bytes = std::vector<std::byte>(kRoom), .before = {}}).bytes.data();
  const core::ByteRange range = core::byte_range(other);
  auto* const data = static_cast<std::byte*>(other.data);
  const int64_t before = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) - range.begin);
  ASSERT_LE(range.end - range.begin, kRoom / 2);
  std::memcpy(room, data - before, range.end - range.begin);
  rooms.back().before = rooms.back().bytes;
  other.data = room + before;
  view.data = room + before + bytes;
}

/// Returns a case in which the call is refused with this message, in `run` alone: plans may be made before there is any
/// data.
template <class Problem>
BadCase<Problem> refused(const char* name, std::function<void(Problem&)> breaks, const char* message) {
  return {.name = name, .breaks = std::move(breaks), .message = message, .seen_by_plan = false};
}

TEST_F(ValidateOverlap, Decode) {
  expect_refused<Decode>(
      {refused<Decode>(
           "the queries", [](Decode& p) { put_on(p.params.o, p.params.q); },
           "decode: o: expected memory apart from that of q, got ranges with 96 bytes in common"),
       refused<Decode>(
           "the last byte of the queries", [](Decode& p) { put_on(p.params.o, p.params.q, 142); },
           "decode: o: expected memory apart from that of q, got ranges with 2 bytes in common"),
       refused<Decode>(
           "one part of the queries",
           [](Decode& p) {
             p.use_two_tensors();
             p.params.q_nope = of(p.q, {3, kHeads, kCkv});
             p.params.q_pe = of(p.cache.data, {3, kHeads, kKpe});
             put_on(p.params.lse, p.params.q_pe, 4);
           },
           "decode: lse: expected memory apart from that of q_pe, got ranges with 24 bytes in common"),
       refused<Decode>(
           "a page of the cache", [](Decode& p) { put_on(p.params.o, p.params.cache.kv, 600); },
           "decode: o: expected memory apart from that of cache.kv, got ranges with 96 bytes in common"),
       refused<Decode>(
           "the other output", [](Decode& p) { put_on(p.params.lse, p.params.o, 92); },
           "decode: o: expected memory apart from that of lse, got ranges with 4 bytes in common"),
       refused<Decode>(
           "entries of the page table that nobody reads",
           [](Decode& p) { put_on(p.params.lse, p.params.pages.block_table, 8); },
           "decode: lse: expected memory apart from that of block_table, got ranges with 16 bytes in common"),
       refused<Decode>(
           "kv_len", [](Decode& p) { put_on(p.params.lse, p.params.pages.kv_len, 4); },
           "decode: lse: expected memory apart from that of kv_len, got ranges with 4 bytes in common")});
}

TEST_F(ValidateOverlap, PartsAreNamed) {
  expect_refused<DecodeSparse>(
      {refused<DecodeSparse>(
           "the second pool's cache",
           [](DecodeSparse& p) {
             p.use_extra_pool();
             put_on(p.params.lse, p.params.extra_pool.cache.kv);
           },
           "decode_sparse: lse: expected memory apart from that of extra_pool.cache.kv, got ranges with 32 bytes in "
           "common"),
       refused<DecodeSparse>(
           "statistics", [](DecodeSparse& p) { p.params.max_logits = p.params.lse; },
           "decode_sparse: lse: expected memory apart from that of max_logits, got ranges with 32 bytes in common"),
       refused<DecodeSparse>(
           "the sink", [](DecodeSparse& p) { put_on(p.params.lse, p.params.options.attn_sink); },
           "decode_sparse: lse: expected memory apart from that of options.attn_sink, got ranges with 8 bytes in "
           "common"),
       refused<DecodeSparse>(
           "lengths", [](DecodeSparse& p) { put_on(p.params.lse, p.params.pool.topk_length, 12); },
           "decode_sparse: lse: expected memory apart from that of pool.topk_length, got ranges with 4 bytes in "
           "common")});
  expect_refused_directly<IndexerTopK>(
      {{"scratch that is the slots", [](IndexerTopK& p) { put_on(p.params.indexer.logits, p.params.slots); },
        "indexer_top_k: indexer.logits: expected memory apart from that of slots, got ranges with 48 bytes in common"},
       {"the indexer's table", [](IndexerTopK& p) { put_on(p.params.valid_count, p.params.indexer.pages.block_table); },
        "indexer_top_k: valid_count: expected memory apart from that of indexer.block_table, got ranges with 12 bytes "
        "in "
        "common"}});
}

TEST_F(ValidateOverlap, OtherOperations) {
  expect_refused<Prefill>({refused<Prefill>(
      "values", [](Prefill& p) { put_on(p.params.o, p.params.v); },
      "prefill: o: expected memory apart from that of v, got ranges with 48 bytes in common")});
  expect_refused<PrefillSparse>({refused<PrefillSparse>(
      "rows", [](PrefillSparse& p) { put_on(p.params.max_logits, p.params.kv, 56); },
      "prefill_sparse: max_logits: expected memory apart from that of kv, got ranges with 4 bytes in common")});
  expect_refused_directly<MergeStates>(
      {{"a state", [](MergeStates& p) { put_on(p.params.o, p.params.partial_o, 48); },
        "merge_states: o: expected memory apart from that of partial_o, got ranges with 48 bytes in common"},
       {"a state, in place",
        [](MergeStates& p) {
          p.params.in_place = true;
          put_on(p.params.lse, p.params.partial_lse);
        },
        "merge_states: lse: expected memory apart from that of partial_lse, got ranges with 24 bytes in common"}});
  expect_refused_directly<Append>(
      {{"rows", [](Append& p) { put_on(p.params.kv, p.params.cache.kv, 700); },
        "append: cache.kv: expected memory apart from that of kv, got ranges with 68 bytes in common"},
       {"slots", [](Append& p) { put_on(p.params.cache.kv, p.params.slot_mapping, 16); },
        "append: cache.kv: expected memory apart from that of slot_mapping, got ranges with 8 bytes in common"},
       {"the cache's other part",
        [](Append& p) {
          p.params.cache = p.cache.parts();
          put_on(p.params.cache.kpe, p.params.cache.ckv, 510);
        },
        "append: cache.ckv: expected memory apart from that of cache.kpe, got ranges with 2 bytes in common"}});
  expect_refused_directly<AppendRope>(
      {{"the queries", [](AppendRope& p) { put_on(p.params.q_out, p.params.q_nope); },
        "append_rope: q_out: expected memory apart from that of q_nope, got ranges with 96 "
        "bytes in common"}});
  expect_refused_directly<Gather>(
      {{"the cache", [](Gather& p) { put_on(p.params.out_kv, p.params.cache.kv, 666); },
        "gather: out_kv: expected memory apart from that of cache.kv, got ranges with 102 bytes "
        "in common"}});
  expect_refused_directly<CopyPages>(
      {{"a list", [](CopyPages& p) { put_on(p.params.to.kv, p.params.from_pages); },
        "copy_pages: to.kv: expected memory apart from that of from_pages, got ranges with 8 bytes in common"}});
  expect_refused_directly<BlockTableToCsr>(
      {{"the table", [](BlockTableToCsr& p) { put_on(p.params.kv_indices, p.params.block_table); },
        "block_table_to_csr: kv_indices: expected memory apart from that of block_table, got ranges with 20 bytes in "
        "common"}});
  expect_refused_directly<PhysicalSlots>(
      {{"other rows of the indices", [](PhysicalSlots& p) { put_on(p.params.slots, p.params.indices, 8); },
        "physical_slots: slots: expected memory apart from that of indices, got ranges with 16 bytes in common"},
       {"the indices by other rows",
        [](PhysicalSlots& p) {
          put_on(p.params.slots, p.params.indices);
          set_stride(p.params.slots, 0, 3);
        },
        "physical_slots: slots: expected memory apart from that of indices, got ranges with 24 bytes in common"}});
  expect_refused_directly<AppendIndexer>(
      {{"keys", [](AppendIndexer& p) { put_on(p.params.k, p.params.cache.kv, 4222); },
        "append_indexer: cache.kv: expected memory apart from that of k, got ranges with 2 bytes in common"}});
  expect_refused_directly<TopK>(
      {{"the logits", [](TopK& p) { put_on(p.params.indices, p.params.logits); },
        "top_k: indices: expected memory apart from that of logits, got ranges with 24 bytes in "
        "common"}});
}

TEST_F(ValidateOverlap, Compress) {
  expect_refused_directly<Compress>(
      {{"the tokens", [](Compress& p) { put_on(p.params.latent, p.params.kv, 24); },
        "compress: latent: expected memory apart from that of kv, got ranges with 96 bytes in common"},
       {"scores", [](Compress& p) { put_on(p.params.latent, p.params.score, 118); },
        "compress: latent: expected memory apart from that of score, got ranges with 2 bytes in common"},
       {"the bias", [](Compress& p) { put_on(p.params.state, p.params.position_bias, 92); },
        "compress: state: expected memory apart from that of position_bias, got ranges with 4 bytes in common"},
       {"its own table", [](Compress& p) { put_on(p.params.state, p.params.state_table, 20); },
        "compress: state: expected memory apart from that of state_table, got ranges with 4 bytes in common"},
       {"the lengths", [](Compress& p) { put_on(p.params.state, p.params.kv_len); },
        "compress: state: expected memory apart from that of kv_len, got ranges with 8 bytes in common"},
       {"the state", [](Compress& p) { put_on(p.params.latent, p.params.state, 1148); },
        "compress: state: expected memory apart from that of latent, got ranges with 4 bytes in common"},
       {"the norm", [](Compress& p) { put_on(p.params.latent, p.params.norm_weight); },
        "compress: latent: expected memory apart from that of norm_weight, got ranges with 24 bytes in common"},
       {"slots", [](Compress& p) { put_on(p.params.cache.kv, p.params.slot_mapping, 32); },
        "compress: cache.kv: expected memory apart from that of slot_mapping, got ranges with 8 bytes in common"},
       {"angles", [](Compress& p) { put_on(p.params.cache.kv, p.params.cos_sin, 96); },
        "compress: cache.kv: expected memory apart from that of cos_sin, got ranges with 16 bytes in common"},
       {"the cache", [](Compress& p) { put_on(p.params.latent, p.params.cache.kv, 760); },
        "compress: latent: expected memory apart from that of cache.kv, got ranges with 8 bytes in common"},
       {"the indexer's cache",
        [](Compress& p) {
          p.use_indexer();
          put_on(p.params.latent, p.params.indexer.kv, 4220);
        },
        "compress: latent: expected memory apart from that of indexer.kv, got ranges with 4 bytes in common"}});
}

TEST_F(ValidateOverlap, SlotsMayBeTheIndices) {
  PhysicalSlots p;
  p.params.slots = p.params.indices;
  core::PhysicalSlotsArgs args;
  Device device;
  EXPECT_EQ(core::validate(p.params, args, device).message(), "");
  // Of one row, whatever its stride is.
  p.qo_indptr = {0, 0, 1};
  for (TensorView* view : {&p.params.indices, &p.params.slots, &p.params.topk_length, &p.params.valid_count})
    set_extent(*view, 0, 1);
  set_stride(p.params.slots, 0, 77);
  EXPECT_EQ(core::validate(p.params, args, device).message(), "");
}

TEST_F(ValidateOverlap, Workspace) {
  const Context context = reference_context();
  Decode p;
  const std::span<std::byte> workspace = p.workspace;
  const auto whole = p.workspace;
  p.params.pages.kv_len.data = p.workspace.data() + 4096;
  std::copy(p.kv_len.begin(), p.kv_len.end(), static_cast<int32_t*>(p.params.pages.kv_len.data));
  const auto before = p.workspace;
  EXPECT_EQ(plan(context, p.params, workspace).status().message(),
            "decode: workspace: expected memory apart from that of kv_len, got ranges with 8 bytes in common");
  EXPECT_EQ(p.workspace, before);
  p.workspace = whole;
  p.params.pages.kv_len = of(p.kv_len);
  p.params.o.data = p.workspace.data() + 512;  // the plan does not look at it
  const Result<Plan> made = plan(context, p.params, workspace);
  ASSERT_TRUE(made.ok()) << made.status().message();
  const auto planned = p.workspace;
  EXPECT_EQ(run(context, *made, p.params).message(),
            "decode: workspace: expected memory apart from that of o, got ranges with 96 bytes in common");
  p.params.o = of(p.o, {3, kHeads, kCkv});
  p.params.q.data = p.workspace.data() + kWorkspaceBytes - 2;
  EXPECT_EQ(run(context, *made, p.params).message(),
            "decode: workspace: expected memory apart from that of q, got ranges with 2 bytes in common");
  EXPECT_EQ(p.workspace, planned);
  EXPECT_TRUE(p.untouched());
}

TEST_F(ValidateOverlap, FooterPagesEndBehindTheirTokens) {
  // Pages that reach over those of the next layer, as a slice of the layers' buffer does: this one's bytes end before.
  AppendIndexer p;
  p.params.cache = {.kv = of(p.keys, {4, 2 * 4 * 132}, DType::kU8), .page_size = 4};
  p.slots[2] = 15;
  p.params.k.data = p.keys.data() + 4 * 132 / 2;
  p.params.k.stride[0] = 128;
  core::AppendIndexerArgs args;
  Device device;
  EXPECT_EQ(core::validate(p.params, args, device).message(),
            "append_indexer: cache.kv: expected memory apart from that of k, got ranges with 768 bytes in common");
  p.params.k.stride[0] = 4 * 132;
  EXPECT_EQ(core::validate(p.params, args, device).message(), "");
}

}  // namespace
}  // namespace mla::test
