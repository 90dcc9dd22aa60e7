// SPDX-License-Identifier: Apache-2.0
#include "dispatch/c_tensors.h"

#include <algorithm>
#include <cstdint>

#include "core/format.h"

namespace mla::dispatch {
namespace {

/// Row-major strides; an extent too large for 64-bit offsets keeps a stride that validation refuses.
void set_row_major(TensorView& view, int32_t ndim) {
  int64_t stride = 1;
  for (int32_t d = ndim - 1; d >= 0; --d) {
    view.stride[static_cast<size_t>(d)] = stride;
    if (__builtin_mul_overflow(stride, view.shape[static_cast<size_t>(d)], &stride)) stride = INT64_MAX;
  }
}

// Scales stand beside their cache in C.
constexpr FieldName kOfOneCache[] = {{"cache.ckv_scale", "scales.ckv_scale"},
                                     {"cache.kpe_scale", "scales.kpe_scale"},
                                     {"cache.any_scales", "scales.any_scales"},
                                     {"cache.reserved", "scales.reserved"}};
constexpr FieldName kOfPools[] = {{"pool.cache.ckv_scale", "pool.scales.ckv_scale"},
                                  {"pool.cache.kpe_scale", "pool.scales.kpe_scale"},
                                  {"pool.cache.any_scales", "pool.scales.any_scales"},
                                  {"pool.cache.reserved", "pool.scales.reserved"},
                                  {"extra_pool.cache.ckv_scale", "extra_pool.scales.ckv_scale"},
                                  {"extra_pool.cache.kpe_scale", "extra_pool.scales.kpe_scale"},
                                  {"extra_pool.cache.any_scales", "extra_pool.scales.any_scales"},
                                  {"extra_pool.cache.reserved", "extra_pool.scales.reserved"}};
constexpr FieldName kOfCopies[] = {
    {"from.ckv_scale", "from_scales.ckv_scale"},   {"from.kpe_scale", "from_scales.kpe_scale"},
    {"from.any_scales", "from_scales.any_scales"}, {"from.reserved", "from_scales.reserved"},
    {"to.ckv_scale", "to_scales.ckv_scale"},       {"to.kpe_scale", "to_scales.kpe_scale"},
    {"to.any_scales", "to_scales.any_scales"},     {"to.reserved", "to_scales.reserved"}};
// Two page tables, whose fields have the same names.
constexpr FieldName kOfIndexerTopK[] = {{"indexer.kv_indptr", "indexer_pages.kv_indptr"},
                                        {"indexer.kv_indices", "indexer_pages.kv_indices"},
                                        {"indexer.block_table", "indexer_pages.block_table"},
                                        {"indexer.kv_len", "indexer_pages.kv_len"},
                                        {"indexer.", ""},
                                        {"kv_indptr", "pages.kv_indptr"},
                                        {"kv_indices", "pages.kv_indices"},
                                        {"block_table", "pages.block_table"},
                                        {"kv_len", "pages.kv_len"}};

}  // namespace

std::span<const FieldName> names_in_c(Op op) {
  switch (op) {
    case Op::kDecode:
    case Op::kAppend:
    case Op::kAppendRope:
    case Op::kGather: return kOfOneCache;
    case Op::kDecodeSparse: return kOfPools;
    case Op::kCopyPages: return kOfCopies;
    case Op::kIndexerTopK: return kOfIndexerTopK;
    default: return {};
  }
}

DType dtype_of(mla_dtype dtype) {
  if (dtype.lanes != 1) return DType::kNone;
  switch (dtype.code * 256 + dtype.bits) {
    case MLA_DTYPE_INT * 256 + 32: return DType::kI32;
    case MLA_DTYPE_INT * 256 + 64: return DType::kI64;
    case MLA_DTYPE_UINT * 256 + 8: return DType::kU8;
    case MLA_DTYPE_FLOAT * 256 + 16: return DType::kF16;
    case MLA_DTYPE_FLOAT * 256 + 32: return DType::kF32;
    case MLA_DTYPE_BFLOAT * 256 + 16: return DType::kBF16;
    case MLA_DTYPE_E4M3FN * 256 + 8: return DType::kE4M3;
    default: return DType::kNone;
  }
}

void TensorReader::fail(const char* part, const char* field, std::string text) {
  if (status_.ok())
    status_ = Status::naming_fields(
        StatusCode::kInvalidArgument,
        core::format("{}: `{}{}{}`: {}", name(op_), part, part[0] != '\0' ? "." : "", field, text));
}

TensorView TensorReader::read(const char* part, const char* field, const mla_tensor* tensor) {
  if (tensor == nullptr) return {};
  TensorView view{.data = tensor->data,
                  .dtype = dtype_of(tensor->dtype),
                  .device = {static_cast<DeviceType>(tensor->device.device_type), tensor->device.device_id},
                  .ndim = tensor->ndim};
  if (!view.given()) {
    fail(part, field,
         core::format("expected an element type of mla_dtype_code, got code {}, {} bits, {} lanes", tensor->dtype.code,
                      tensor->dtype.bits, tensor->dtype.lanes));
    return {};
  }
  if (tensor->ndim > 0 && tensor->shape == nullptr) {
    fail(part, field, core::format("expected a shape of {} extents, got a null pointer", tensor->ndim));
    return {};
  }
  const int32_t ndim = std::clamp(tensor->ndim, 0, kMaxDims);  // validation refuses any other number
  std::copy_n(tensor->shape, ndim, view.shape.begin());
  if (tensor->strides != nullptr)
    std::copy_n(tensor->strides, ndim, view.stride.begin());
  else
    set_row_major(view, ndim);
  if (view.data != nullptr) view.data = static_cast<char*>(view.data) + tensor->byte_offset;
  return view;
}

KvCache TensorReader::read(const char* part, const mla_kv_cache& cache, const mla_cache_scales& scales) {
  zero(part, "reserved", scales.reserved);
  return {.format = enumeration<CacheFormat>(cache.format),
          .kv = read(part, "kv", cache.kv),
          .ckv = read(part, "ckv", cache.ckv),
          .kpe = read(part, "kpe", cache.kpe),
          .ckv_scale = read(part, "ckv_scale", scales.ckv_scale),
          .kpe_scale = read(part, "kpe_scale", scales.kpe_scale),
          .page_size = cache.page_size,
          .power_of_two_scales = !flag(part, "any_scales", scales.any_scales)};
}

PageTable TensorReader::read(const char* part, const mla_page_table& pages) {
  return {.kv_indptr = read(part, "kv_indptr", pages.kv_indptr),
          .kv_indices = read(part, "kv_indices", pages.kv_indices),
          .block_table = read(part, "block_table", pages.block_table),
          .kv_len = read(part, "kv_len", pages.kv_len)};
}

IndexerCache TensorReader::read(const char* part, const mla_indexer_cache& cache) {
  zero(part, "reserved", cache.reserved);
  return {.kv = read(part, "kv", cache.kv), .page_size = cache.page_size};
}

AttentionOptions TensorReader::read(const mla_attention_options& options) {
  zero("options", "reserved", options.reserved);
  const bool window = flag("options", "has_window", options.has_window);
  if (!window) zero("options", "window_left", options.window_left);
  if (window && options.window_left < 0)
    fail("options", "window_left", core::format("expected at least 0, got {}", options.window_left));
  return {.attn_sink = read("options", "attn_sink", options.attn_sink),
          .window_left = window ? options.window_left : -1,
          .logits_soft_cap = options.logits_soft_cap,
          .alibi_slopes = read("options", "alibi_slopes", options.alibi_slopes)};
}

ContextParallel TensorReader::read(const mla_context_parallel& share) {
  zero("context_parallel", "reserved", share.reserved);
  return {.rank = share.rank,
          .world = share.world == 0 ? 1 : share.world,
          .interleave = share.interleave == 0 ? 1 : share.interleave};
}

SparsePool TensorReader::read(const char* part, const mla_sparse_pool& pool, int32_t topk_length_per) {
  const std::string cache = core::format("{}.cache", part);
  return {.cache = read(cache.c_str(), pool.cache, pool.scales),
          .indices = read(part, "indices", pool.indices),
          .topk_length = read(part, "topk_length", pool.topk_length),
          .topk_length_per = enumeration<LengthPer>(topk_length_per)};
}

bool TensorReader::flag(const char* part, const char* field, int32_t value) {
  if (value != 0 && value != 1) fail(part, field, core::format("expected 0 or 1, got {}", value));
  return value == 1;
}

LseBase TensorReader::lse_base(int32_t value) {
  if (value == MLA_LSE_BASE_2) return LseBase::kTwo;
  if (value != MLA_LSE_BASE_E)
    fail("", "lse_base", core::format("expected MLA_LSE_BASE_E or MLA_LSE_BASE_2, got {}", value));
  return LseBase::kE;
}

void TensorReader::zero(const char* part, const char* field, int32_t value) {
  if (value != 0) fail(part, field, core::format("expected 0, got {}", value));
}

DecodeParams read(const mla_decode_params& params, TensorReader& reader) {
  return {.q = reader.read("q", params.q),
          .q_nope = reader.read("q_nope", params.q_nope),
          .q_pe = reader.read("q_pe", params.q_pe),
          .q_scale = reader.read("q_scale", params.q_scale),
          .cache = reader.read("cache", params.cache, params.scales),
          .pages = reader.read("", params.pages),
          .qo_indptr = reader.read("qo_indptr", params.qo_indptr),
          .causal = reader.flag("causal", params.causal),
          .tree_mask = reader.read("tree_mask", params.tree_mask),
          .tree_parents = reader.read("tree_parents", params.tree_parents),
          .options = reader.read(params.options),
          .context_parallel = reader.read(params.context_parallel),
          .sm_scale = params.sm_scale,
          .lse_base = reader.lse_base(params.lse_base),
          .batch_invariant = reader.flag("batch_invariant", params.batch_invariant),
          .o = reader.read("o", params.o),
          .o_scale = reader.read("o_scale", params.o_scale),
          .lse = reader.read("lse", params.lse)};
}

PrefillParams read(const mla_prefill_params& params, TensorReader& reader) {
  return {.q = reader.read("q", params.q),
          .k = reader.read("k", params.k),
          .v = reader.read("v", params.v),
          .qo_indptr = reader.read("qo_indptr", params.qo_indptr),
          .kv_indptr = reader.read("kv_indptr", params.kv_indptr),
          .causal = reader.flag("causal", params.causal),
          .options = reader.read(params.options),
          .sm_scale = params.sm_scale,
          .lse_base = reader.lse_base(params.lse_base),
          .batch_invariant = reader.flag("batch_invariant", params.batch_invariant),
          .o = reader.read("o", params.o),
          .lse = reader.read("lse", params.lse)};
}

MergeStatesParams read(const mla_merge_states_params& params, TensorReader& reader) {
  return {.partial_o = reader.read("partial_o", params.partial_o),
          .partial_lse = reader.read("partial_lse", params.partial_lse),
          .lse_base = reader.lse_base(params.lse_base),
          .in_place = reader.flag("in_place", params.in_place),
          .o = reader.read("o", params.o),
          .lse = reader.read("lse", params.lse)};
}

AppendParams read(const mla_append_params& params, TensorReader& reader) {
  return {.kv = reader.read("kv", params.kv),
          .ckv = reader.read("ckv", params.ckv),
          .kpe = reader.read("kpe", params.kpe),
          .slot_mapping = reader.read("slot_mapping", params.slot_mapping),
          .cache = reader.read("cache", params.cache, params.scales)};
}

GatherParams read(const mla_gather_params& params, TensorReader& reader) {
  return {.cache = reader.read("cache", params.cache, params.scales),
          .pages = reader.read("", params.pages),
          .token_start = reader.read("token_start", params.token_start),
          .out_indptr = reader.read("out_indptr", params.out_indptr),
          .out_kv = reader.read("out_kv", params.out_kv),
          .out_ckv = reader.read("out_ckv", params.out_ckv),
          .out_kpe = reader.read("out_kpe", params.out_kpe)};
}

DecodeSparseParams read(const mla_decode_sparse_params& params, TensorReader& reader) {
  reader.zero("", "reserved", params.reserved);
  return {.q = reader.read("q", params.q),
          .q_nope = reader.read("q_nope", params.q_nope),
          .q_pe = reader.read("q_pe", params.q_pe),
          .q_scale = reader.read("q_scale", params.q_scale),
          .pool = reader.read("pool", params.pool, params.topk_length_per),
          .extra_pool = reader.read("extra_pool", params.extra_pool, params.extra_topk_length_per),
          .qo_indptr = reader.read("qo_indptr", params.qo_indptr),
          .options = reader.read(params.options),
          .sm_scale = params.sm_scale,
          .lse_base = reader.lse_base(params.lse_base),
          .batch_invariant = reader.flag("batch_invariant", params.batch_invariant),
          .o = reader.read("o", params.o),
          .o_scale = reader.read("o_scale", params.o_scale),
          .lse = reader.read("lse", params.lse)};
}

PrefillSparseParams read(const mla_prefill_sparse_params& params, TensorReader& reader) {
  reader.zero("", "reserved", params.reserved);
  return {.q = reader.read("q", params.q),
          .kv = reader.read("kv", params.kv),
          .indices = reader.read("indices", params.indices),
          .topk_length = reader.read("topk_length", params.topk_length),
          .options = reader.read(params.options),
          .sm_scale = params.sm_scale,
          .lse_base = reader.lse_base(params.lse_base),
          .batch_invariant = reader.flag("batch_invariant", params.batch_invariant),
          .o = reader.read("o", params.o),
          .max_logits = reader.read("max_logits", params.max_logits),
          .lse = reader.read("lse", params.lse)};
}

AppendRopeParams read(const mla_append_rope_params& params, TensorReader& reader) {
  reader.zero("", "reserved", params.reserved);
  return {.q_nope = reader.read("q_nope", params.q_nope),
          .q_pe = reader.read("q_pe", params.q_pe),
          .q_out = reader.read("q_out", params.q_out),
          .q_scale = reader.read("q_scale", params.q_scale),
          .ckv = reader.read("ckv", params.ckv),
          .kpe = reader.read("kpe", params.kpe),
          .cos_sin = reader.read("cos_sin", params.cos_sin),
          .positions = reader.read("positions", params.positions),
          .interleaved = reader.flag("interleaved", params.interleaved),
          .slot_mapping = reader.read("slot_mapping", params.slot_mapping),
          .cache = reader.read("cache", params.cache, params.scales)};
}

CopyPagesParams read(const mla_copy_pages_params& params, TensorReader& reader) {
  return {.from = reader.read("from", params.from, params.from_scales),
          .from_pages = reader.read("from_pages", params.from_pages),
          .to = reader.read("to", params.to, params.to_scales),
          .to_pages = reader.read("to_pages", params.to_pages)};
}

BlockTableToCsrParams read(const mla_block_table_to_csr_params& params, TensorReader& reader) {
  reader.zero("", "reserved", params.reserved);
  return {.block_table = reader.read("block_table", params.block_table),
          .kv_len = reader.read("kv_len", params.kv_len),
          .page_size = params.page_size,
          .kv_indptr = reader.read("kv_indptr", params.kv_indptr),
          .kv_indices = reader.read("kv_indices", params.kv_indices)};
}

PhysicalSlotsParams read(const mla_physical_slots_params& params, TensorReader& reader) {
  return {.indices = reader.read("indices", params.indices),
          .topk_length = reader.read("topk_length", params.topk_length),
          .qo_indptr = reader.read("qo_indptr", params.qo_indptr),
          .pages = reader.read("", params.pages),
          .page_size = params.page_size,
          .context_parallel = reader.read(params.context_parallel),
          .compact = reader.flag("compact", params.compact),
          .slots = reader.read("slots", params.slots),
          .valid_count = reader.read("valid_count", params.valid_count)};
}

AppendIndexerParams read(const mla_append_indexer_params& params, TensorReader& reader) {
  reader.zero("", "reserved", params.reserved);
  return {.k = reader.read("k", params.k),
          .slot_mapping = reader.read("slot_mapping", params.slot_mapping),
          .power_of_two_scales = !reader.flag("any_scales", params.any_scales),
          .cache = reader.read("cache", params.cache)};
}

IndexerLogitsParams read(const mla_indexer_logits_params& params, TensorReader& reader) {
  reader.zero("", "reserved", params.reserved);
  return {.q = reader.read("q", params.q),
          .weights = reader.read("weights", params.weights),
          .cache = reader.read("cache", params.cache),
          .pages = reader.read("", params.pages),
          .qo_indptr = reader.read("qo_indptr", params.qo_indptr),
          .causal = reader.flag("causal", params.causal),
          .logits = reader.read("logits", params.logits)};
}

TopKParams read(const mla_top_k_params& params, TensorReader& reader) {
  return {.logits = reader.read("logits", params.logits),
          .lengths = reader.read("lengths", params.lengths),
          .indices = reader.read("indices", params.indices)};
}

IndexerTopKParams read(const mla_indexer_top_k_params& params, TensorReader& reader) {
  return {.indexer = {.q = reader.read("indexer", "q", params.q),
                      .weights = reader.read("indexer", "weights", params.weights),
                      .cache = reader.read("indexer.cache", params.cache),
                      .pages = reader.read("indexer", params.indexer_pages),
                      .qo_indptr = reader.read("indexer", "qo_indptr", params.qo_indptr),
                      .causal = reader.flag("indexer", "causal", params.causal),
                      .logits = reader.read("indexer", "logits", params.logits)},
          .pages = reader.read("", params.pages),
          .page_size = params.page_size,
          .slots = reader.read("slots", params.slots),
          .valid_count = reader.read("valid_count", params.valid_count)};
}

}  // namespace mla::dispatch
