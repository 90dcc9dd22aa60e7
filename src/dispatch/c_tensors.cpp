// SPDX-License-Identifier: Apache-2.0
#include "dispatch/c_tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

namespace mla::dispatch {
namespace {

CacheFormat cache_format(int32_t value) {
  return value >= 0 && value < 256 ? static_cast<CacheFormat>(value) : CacheFormat{255};
}

/// Row-major strides; an extent too large for 64-bit offsets keeps a stride that validation refuses.
void set_row_major(TensorView& view, int32_t ndim) {
  int64_t stride = 1;
  for (int32_t d = ndim - 1; d >= 0; --d) {
    view.stride[static_cast<size_t>(d)] = stride;
    if (__builtin_mul_overflow(stride, view.shape[static_cast<size_t>(d)], &stride)) stride = INT64_MAX;
  }
}

}  // namespace

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

void TensorReader::fail(const char* field, std::string text) {
  if (status_.ok()) status_ = {StatusCode::kInvalidArgument, fmt::format("{}: {}: {}", name(op_), field, text)};
}

TensorView TensorReader::read(const char* field, const mla_tensor* tensor) {
  if (tensor == nullptr) return {};
  TensorView view{.data = tensor->data,
                  .dtype = dtype_of(tensor->dtype),
                  .device = {static_cast<DeviceType>(tensor->device.device_type), tensor->device.device_id},
                  .ndim = tensor->ndim};
  if (!view.given()) {
    fail(field, fmt::format("expected an element type of mla_dtype_code, got code {}, {} bits, {} lanes",
                            tensor->dtype.code, tensor->dtype.bits, tensor->dtype.lanes));
    return {};
  }
  if (tensor->ndim > 0 && tensor->shape == nullptr) {
    fail(field, fmt::format("expected a shape of {} extents, got a null pointer", tensor->ndim));
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

KvCache TensorReader::read(const mla_kv_cache& cache) {
  if (cache.reserved != 0) fail("cache.reserved", fmt::format("expected 0, got {}", cache.reserved));
  return {.format = cache_format(cache.format),
          .kv = read("cache.kv", cache.kv),
          .ckv = read("cache.ckv", cache.ckv),
          .kpe = read("cache.kpe", cache.kpe)};
}

PageTable TensorReader::read(const mla_page_table& pages) {
  return {.kv_indptr = read("kv_indptr", pages.kv_indptr),
          .kv_indices = read("kv_indices", pages.kv_indices),
          .block_table = read("block_table", pages.block_table),
          .kv_len = read("kv_len", pages.kv_len)};
}

bool TensorReader::flag(const char* field, int32_t value) {
  if (value != 0 && value != 1) fail(field, fmt::format("expected 0 or 1, got {}", value));
  return value == 1;
}

DecodeParams read(const mla_decode_params& params, TensorReader& reader) {
  return {.q = reader.read("q", params.q),
          .q_nope = reader.read("q_nope", params.q_nope),
          .q_pe = reader.read("q_pe", params.q_pe),
          .cache = reader.read(params.cache),
          .pages = reader.read(params.pages),
          .qo_indptr = reader.read("qo_indptr", params.qo_indptr),
          .causal = reader.flag("causal", params.causal),
          .sm_scale = params.sm_scale,
          .lse_base = reader.lse_base(params.lse_base),
          .batch_invariant = reader.flag("batch_invariant", params.batch_invariant),
          .o = reader.read("o", params.o),
          .lse = reader.read("lse", params.lse)};
}

PrefillParams read(const mla_prefill_params& params, TensorReader& reader) {
  return {.q = reader.read("q", params.q),
          .k = reader.read("k", params.k),
          .v = reader.read("v", params.v),
          .qo_indptr = reader.read("qo_indptr", params.qo_indptr),
          .kv_indptr = reader.read("kv_indptr", params.kv_indptr),
          .causal = reader.flag("causal", params.causal),
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
          .cache = reader.read(params.cache)};
}

GatherParams read(const mla_gather_params& params, TensorReader& reader) {
  return {.cache = reader.read(params.cache),
          .pages = reader.read(params.pages),
          .token_start = reader.read("token_start", params.token_start),
          .out_indptr = reader.read("out_indptr", params.out_indptr),
          .out_kv = reader.read("out_kv", params.out_kv),
          .out_ckv = reader.read("out_ckv", params.out_ckv),
          .out_kpe = reader.read("out_kpe", params.out_kpe)};
}

}  // namespace mla::dispatch
