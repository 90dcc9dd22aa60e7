// SPDX-License-Identifier: Apache-2.0
// Index tools and the indexer. Each reads its fields in the order of the function of the same name in
// python/libmla/ops.py and returns the outputs that the caller did not bring.
#include <tvm/ffi/reflection/registry.h>

#include "arguments.h"
#include "outputs.h"
#include "plan.h"

namespace mla::python {
namespace {

constexpr FieldName kNamesOfIndexer[] = {{"cache.kv", "cache"}, {"cache.page_size", "page_size"}};
// The first three where the latent cache has a page table of its own.
constexpr FieldName kNamesOfTopK[] = {{"block_table", "latent_block_table"},    {"kv_indptr", "latent_kv_indptr"},
                                      {"kv_indices", "latent_kv_indices"},      {"indexer.cache.kv", "cache"},
                                      {"indexer.cache.page_size", "page_size"}, {"indexer.", ""},
                                      {"page_size", "latent_page_size"},        {"topk", "k"}};
constexpr std::span kNamesOfSharedTopK = std::span(kNamesOfTopK).subspan(3);

PageTable read_pages(Arguments& args) {
  PageTable pages;
  pages.kv_len = args.integers("kv_len");
  pages.block_table = args.integers("block_table");
  pages.kv_indptr = args.integers("kv_indptr");
  pages.kv_indices = args.integers("kv_indices");
  return pages;
}

IndexerCache read_indexer_cache(Arguments& args) {
  IndexerCache cache;
  cache.kv = args.tensor("cache", Bytes::kRaw);
  cache.page_size = args.count("page_size");
  return cache;
}

void block_table_to_csr(ffi::PackedArgs packed, ffi::Any* result) {
  Arguments args("block_table_to_csr", packed);
  const Call call = Call::read(args);
  Outputs outputs(args, call.outputs());
  BlockTableToCsrParams params;
  params.block_table = args.integers("block_table");
  params.kv_len = args.integers("kv_len");
  params.page_size = args.count("page_size");
  const TensorView& table = params.block_table;
  params.kv_indptr = outputs.tensor("kv_indptr", DType::kI32, {table.shape[0] + 1}, table.device);
  params.kv_indices = outputs.tensor("kv_indices", DType::kI32, {table.shape[0] * table.shape[1]}, table.device);
  args.end();
  call.carry_out_unplanned(params, table.device);
  *result = outputs.take();
}

void physical_slots(ffi::PackedArgs packed, ffi::Any* result) {
  Arguments args("physical_slots", packed);
  const Call call = Call::read(args);
  Outputs outputs(args, call.outputs());
  PhysicalSlotsParams params;
  params.indices = args.integers("indices");
  params.topk_length = args.integers("topk_length");
  params.qo_indptr = args.integers("qo_indptr");
  params.pages = read_pages(args);
  params.page_size = args.count("page_size");
  params.context_parallel = args.context_parallel();
  params.compact = args.boolean("compact");
  const TensorView& rows = params.indices;
  params.slots = outputs.tensor("slots", DType::kI32, {rows.shape[0], rows.shape[1]}, rows.device);
  const bool wanted = args.boolean("return_valid_count");
  params.valid_count = outputs.optional("valid_count", wanted, DType::kI32, {rows.shape[0]}, rows.device);
  args.end();
  call.carry_out_unplanned(params, rows.device);
  *result = outputs.take();
}

void append_indexer(ffi::PackedArgs packed, ffi::Any*) {
  Arguments args("append_indexer", packed);
  args.call_fields(kNamesOfIndexer);
  const Call call = Call::read(args);
  AppendIndexerParams params;
  params.k = args.tensor("k");
  params.slot_mapping = args.integers("slot_mapping", DType::kI64);
  params.cache = read_indexer_cache(args);
  params.power_of_two_scales = args.boolean("power_of_two_scales");
  args.end();
  call.carry_out_unplanned(params, params.k.device);
}

/// q to causal; the logits follow where the caller's arguments have them.
IndexerLogitsParams read_indexer(Arguments& args) {
  IndexerLogitsParams params;
  params.q = args.tensor("q", Bytes::kE4M3);
  params.weights = args.tensor("weights");
  params.cache = read_indexer_cache(args);
  params.pages = read_pages(args);
  params.qo_indptr = args.integers("qo_indptr");
  params.causal = args.boolean("causal");
  return params;
}

/// Keys that the page table has room for: as many as a query can have logits.
int64_t most_keys(const IndexerLogitsParams& params) {
  const TensorView& pages = params.pages.block_table.given() ? params.pages.block_table : params.pages.kv_indices;
  return pages.ndim > 0 ? pages.shape[static_cast<size_t>(pages.ndim - 1)] * params.cache.page_size : 0;
}

void read_logits(Arguments& args, Outputs& outputs, IndexerLogitsParams& params) {
  const std::optional<int32_t> given = args.optional_count("max_kv_len", 0);
  const int64_t width = given ? *given : most_keys(params);
  params.logits = outputs.tensor("logits", DType::kF32, {params.q.shape[0], width}, params.q.device);
}

void indexer_logits(ffi::PackedArgs packed, ffi::Any* result) {
  Arguments args("indexer_logits", packed);
  args.call_fields(kNamesOfIndexer);
  const Call call = Call::read(args);
  Outputs outputs(args, call.outputs());
  IndexerLogitsParams params = read_indexer(args);
  read_logits(args, outputs, params);
  args.end();
  call.carry_out_unplanned(params, params.q.device);
  *result = outputs.take();
}

void top_k(ffi::PackedArgs packed, ffi::Any* result) {
  Arguments args("top_k", packed);
  const Call call = Call::read(args);
  Outputs outputs(args, call.outputs());
  TopKParams params;
  params.logits = args.tensor("logits");
  const int32_t k = args.count("k");
  params.lengths = args.integers("lengths");
  params.indices = outputs.tensor("indices", DType::kI32, {params.logits.shape[0], k}, params.logits.device);
  args.end();
  call.carry_out_unplanned(params, params.logits.device);
  *result = outputs.take();
}

/// Those of the latent cache, where they are not those of the indexer's cache too.
void read_latent_pages(Arguments& args, PageTable& pages) {
  const TensorView block_table = args.integers("latent_block_table");
  const TensorView kv_indptr = args.integers("latent_kv_indptr");
  const TensorView kv_indices = args.integers("latent_kv_indices");
  if (!block_table.given() && !kv_indptr.given() && !kv_indices.given()) return;
  args.call_fields(kNamesOfTopK);
  pages.block_table = block_table;
  pages.kv_indptr = kv_indptr;
  pages.kv_indices = kv_indices;
}

void indexer_top_k(ffi::PackedArgs packed, ffi::Any* result) {
  Arguments args("indexer_top_k", packed);
  args.call_fields(kNamesOfSharedTopK);
  const Call call = Call::read(args);
  IndexerTopKParams params;
  params.indexer = read_indexer(args);
  Outputs scratch(args, call.outputs());
  read_logits(args, scratch, params.indexer);
  Outputs outputs(args, call.outputs());
  const int32_t k = args.count("k");
  params.pages = params.indexer.pages;
  read_latent_pages(args, params.pages);
  params.page_size = args.optional_count("latent_page_size").value_or(params.indexer.cache.page_size);
  const TensorView& q = params.indexer.q;
  params.slots = outputs.tensor("slots", DType::kI32, {q.shape[0], k}, q.device);
  const bool wanted = args.boolean("return_valid_count");
  params.valid_count = outputs.optional("valid_count", wanted, DType::kI32, {q.shape[0]}, q.device);
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
}

}  // namespace
}  // namespace mla::python
