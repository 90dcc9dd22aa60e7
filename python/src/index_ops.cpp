// SPDX-License-Identifier: Apache-2.0
// Offers the index tools and the indexer to Python: says what Python calls their fields, and makes the outputs that the
// caller did not give.
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>

#include "operation.h"
#include "outputs.h"
#include "plan.h"

namespace mla::python {
namespace {

constexpr FieldName kNamesOfIndexer[] = {
    {"cache.kv", "cache"}, {"cache.page_size", "page_size"}, {"cache.format", "format"}};
// The first three apply where the latent cache has a page table of its own.
constexpr FieldName kNamesOfTopK[] = {{"block_table", "latent_block_table"},
                                      {"kv_indptr", "latent_kv_indptr"},
                                      {"kv_indices", "latent_kv_indices"},
                                      {"indexer.cache.kv", "cache"},
                                      {"indexer.cache.page_size", "page_size"},
                                      {"indexer.cache.format", "format"},
                                      {"indexer.", ""},
                                      {"page_size", "latent_page_size"},
                                      {"topk", "k"}};
constexpr std::span kNamesOfSharedTopK = std::span(kNamesOfTopK).subspan(3);

const Operation kBlockTableToCsr = Operation::of<BlockTableToCsrParams>({.name = "block_table_to_csr"});
const Operation kPhysicalSlots =
    Operation::of<PhysicalSlotsParams>({.name = "physical_slots", .more = {"return_valid_count"}});
const Operation kAppendIndexer =
    Operation::of<AppendIndexerParams>({.name = "append_indexer", .names = kNamesOfIndexer});
const Operation kIndexerLogits = Operation::of<IndexerLogitsParams>(
    {.name = "indexer_logits", .names = kNamesOfIndexer, .e4m3 = {"q"}, .more = {"max_kv_len", "logits_dtype"}});
const Operation kTopK = Operation::of<TopKParams>({.name = "top_k", .more = {"k"}});
// The latent cache's pages are those of the indexer's, unless arguments of their own say otherwise.
const Operation kIndexerTopK = Operation::of<IndexerTopKParams>(
    {.name = "indexer_top_k",
     .names = kNamesOfSharedTopK,
     .e4m3 = {"indexer.q"},
     .left_out = {"kv_indptr", "kv_indices", "block_table", "kv_len", "page_size", "topk"},
     .more = {"max_kv_len", "logits_dtype", "k", "latent_block_table", "latent_kv_indptr", "latent_kv_indices",
              "latent_page_size", "return_valid_count"}});

void block_table_to_csr(ffi::PackedArgs packed, ffi::Any* result) {
  OperationArguments args(kBlockTableToCsr, packed);
  const Call call = Call::read(args);
  auto params = args.fields<BlockTableToCsrParams>();
  Outputs outputs(args, call.outputs());
  const TensorView& table = params.block_table;
  outputs.make(params.kv_indptr, "kv_indptr", DType::kI32, {table.shape[0] + 1}, table.device);
  outputs.make(params.kv_indices, "kv_indices", DType::kI32, {table.shape[0] * table.shape[1]}, table.device);
  args.end();
  call.carry_out_unplanned(params, table.device);
  *result = outputs.take();
}

void physical_slots(ffi::PackedArgs packed, ffi::Any* result) {
  OperationArguments args(kPhysicalSlots, packed);
  const Call call = Call::read(args);
  auto params = args.fields<PhysicalSlotsParams>();
  Outputs outputs(args, call.outputs());
  const TensorView& rows = params.indices;
  const int64_t ratio = params.list_tokens ? std::max(params.ratio, 1) : 1;
  outputs.make(params.slots, "slots", DType::kI32, {rows.shape[0], rows.shape[1] * ratio + ratio - 1}, rows.device);
  if (args.boolean("return_valid_count"))
    outputs.make(params.valid_count, "valid_count", DType::kI32, {rows.shape[0]}, rows.device);
  args.end();
  call.carry_out_unplanned(params, rows.device);
  *result = outputs.take();
}

void append_indexer(ffi::PackedArgs packed, ffi::Any*) {
  OperationArguments args(kAppendIndexer, packed);
  const Call call = Call::read(args);
  const auto params = args.fields<AppendIndexerParams>();
  args.end();
  call.carry_out_unplanned(params, params.k.device);
}

/// Returns how many keys are listed, or the page table has room for: a query has at most as many logits.
int64_t most_keys(const IndexerLogitsParams& params) {
  if (params.blocks.given()) return params.blocks.ndim == 2 ? params.blocks.shape[1] * params.block_size : 0;
  const TensorView& pages = params.pages.block_table.given() ? params.pages.block_table : params.pages.kv_indices;
  return pages.ndim > 0 ? pages.shape[static_cast<size_t>(pages.ndim - 1)] * params.cache.page_size : 0;
}

void make_logits(OperationArguments& args, Outputs& outputs, IndexerLogitsParams& params) {
  const std::optional<int32_t> given = args.optional_count("max_kv_len", 0);
  const int64_t width = given ? *given : most_keys(params);
  DType dtype = args.dtype("logits_dtype");
  if (dtype == DType::kNone) dtype = DType::kF32;
  outputs.make(params.logits, "logits", dtype, {params.q.shape[0], width}, params.q.device);
}

void indexer_logits(ffi::PackedArgs packed, ffi::Any* result) {
  OperationArguments args(kIndexerLogits, packed);
  const Call call = Call::read(args);
  auto params = args.fields<IndexerLogitsParams>();
  Outputs outputs(args, call.outputs());
  make_logits(args, outputs, params);
  args.end();
  call.carry_out_unplanned(params, params.q.device);
  *result = outputs.take();
}

void top_k(ffi::PackedArgs packed, ffi::Any* result) {
  OperationArguments args(kTopK, packed);
  const Call call = Call::read(args);
  auto params = args.fields<TopKParams>();
  Outputs outputs(args, call.outputs());
  const int32_t k = args.count("k");
  outputs.make(params.indices, "indices", DType::kI32, {params.logits.shape[0], k}, params.logits.device);
  args.end();
  call.carry_out_unplanned(params, params.logits.device);
  *result = outputs.take();
}

/// Reads the pages of the latent cache; if none are given, they are those of the indexer's cache too.
void read_latent_pages(OperationArguments& args, IndexerTopKParams& params) {
  params.pages = params.indexer.pages;
  const TensorView block_table = args.integers("latent_block_table");
  const TensorView kv_indptr = args.integers("latent_kv_indptr");
  const TensorView kv_indices = args.integers("latent_kv_indices");
  params.page_size = args.optional_count("latent_page_size").value_or(params.indexer.cache.page_size);
  if (!block_table.given() && !kv_indptr.given() && !kv_indices.given()) return;
  args.call_fields(kNamesOfTopK);
  params.pages.block_table = block_table;
  params.pages.kv_indptr = kv_indptr;
  params.pages.kv_indices = kv_indices;
}

void indexer_top_k(ffi::PackedArgs packed, ffi::Any* result) {
  OperationArguments args(kIndexerTopK, packed);
  const Call call = Call::read(args);
  auto params = args.fields<IndexerTopKParams>();
  Outputs scratch(args, call.outputs());
  make_logits(args, scratch, params.indexer);
  Outputs outputs(args, call.outputs());
  const int32_t k = args.count("k");
  read_latent_pages(args, params);
  const TensorView& q = params.indexer.q;
  const int64_t ratio = params.list_tokens ? std::max(params.indexer.ratio, 1) : 1;
  params.topk = k;
  outputs.make(params.slots, "slots", DType::kI32, {q.shape[0], k * ratio + ratio - 1}, q.device);
  if (args.boolean("return_valid_count"))
    outputs.make(params.valid_count, "valid_count", DType::kI32, {q.shape[0]}, q.device);
  args.end();
  call.carry_out_unplanned(params, q.device);
  *result = outputs.take();
}

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef()
      .def_packed("libmla.block_table_to_csr", block_table_to_csr)
      .def_packed("libmla.physical_slots", physical_slots)
      .def_packed("libmla.append_indexer", append_indexer)
      .def_packed("libmla.indexer_logits", indexer_logits)
      .def_packed("libmla.top_k", top_k)
      .def_packed("libmla.indexer_top_k", indexer_top_k);
  for (const Operation* operation :
       {&kBlockTableToCsr, &kPhysicalSlots, &kAppendIndexer, &kIndexerLogits, &kTopK, &kIndexerTopK})
    define(*operation);
}

}  // namespace
}  // namespace mla::python
