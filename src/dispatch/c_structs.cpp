// SPDX-License-Identifier: Apache-2.0
#include "dispatch/c_structs.h"

#include <algorithm>
#include <cstdint>

#include "core/format.h"

namespace mla::dispatch {
namespace {

/// Sets row-major strides. A stride that does not fit 64 bits becomes one that validation refuses.
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

std::string FieldPath::text() const {
  std::string before = outer != nullptr ? outer->text() : std::string();
  if (!before.empty() && !name.empty()) before += '.';
  return before.append(name);
}

void StructReader::fail(const FieldPath& at, std::string text) {
  if (status_.ok())
    status_ =
        Status::naming_fields(StatusCode::kInvalidArgument, core::format("{}: `{}`: {}", name(op_), at.text(), text));
}

void StructReader::zero(const FieldPath& at, int32_t value) {
  if (value != 0) fail(at, core::format("expected 0, got {}", value));
}

void StructReader::note(const FieldPath& path, const FieldPath& in_c) {
  if (names_ == nullptr) return;
  std::string field = path.text();
  std::string name = in_c.text();
  if (field != name) names_->emplace_back(std::move(field), std::move(name));
}

void StructReader::convert(const FieldPath& at, const mla_tensor* tensor, TensorView& field) {
  if (tensor == nullptr) return;
  TensorView view{.data = tensor->data,
                  .dtype = dtype_of(tensor->dtype),
                  .device = {static_cast<DeviceType>(tensor->device.device_type), tensor->device.device_id},
                  .ndim = tensor->ndim};
  if (!view.given())
    return fail(at, core::format("expected an element type of mla_dtype_code, got code {}, {} bits, {} lanes",
                                 tensor->dtype.code, tensor->dtype.bits, tensor->dtype.lanes));
  if (tensor->ndim > 0 && tensor->shape == nullptr)
    return fail(at, core::format("expected a shape of {} extents, got a null pointer", tensor->ndim));
  const int32_t ndim = std::clamp(tensor->ndim, 0, kMaxDims);  // validation refuses any other number
  std::copy_n(tensor->shape, ndim, view.shape.begin());
  if (tensor->strides != nullptr)
    std::copy_n(tensor->strides, ndim, view.stride.begin());
  else
    set_row_major(view, ndim);
  if (view.data != nullptr) view.data = static_cast<char*>(view.data) + tensor->byte_offset;
  field = view;
}

void StructReader::convert(const FieldPath& at, int32_t value, bool& field) {
  if (value != 0 && value != 1) fail(at, core::format("expected 0 or 1, got {}", value));
  field = value == 1;
}

void StructReader::convert(const FieldPath& at, int32_t value, LseBase& field) {
  if (value != MLA_LSE_BASE_E && value != MLA_LSE_BASE_2)
    fail(at, core::format("expected MLA_LSE_BASE_E or MLA_LSE_BASE_2, got {}", value));
  field = value == MLA_LSE_BASE_2 ? LseBase::kTwo : LseBase::kE;
}

void StructReader::convert(const FieldPath& at, int32_t value, Compute& field) {
  if (value < MLA_COMPUTE_DEFAULT || value > MLA_COMPUTE_EXACT)
    fail(at, core::format("expected MLA_COMPUTE_DEFAULT, MLA_COMPUTE_FP8 or MLA_COMPUTE_EXACT, got {}", value));
  field = static_cast<Compute>(value);
}

namespace {

void zero_is_one(int32_t& field) {
  if (field == 0) field = 1;
}

}  // namespace

void StructReader::settle(AttentionOptions& options, const Given<mla_attention_options>& given) {
  bool has_window = false;
  convert({&given.at, "has_window"}, given.fields.has_window, has_window);
  const FieldPath at = {&given.at, "window_left"};
  if (!has_window) {
    zero(at, given.fields.window_left);
    options.window_left = -1;
  } else if (options.window_left < 0) {
    fail(at, core::format("expected at least 0, got {}", options.window_left));
  }
}

void StructReader::settle(ContextParallel& share, const Given<mla_context_parallel>&) {
  zero_is_one(share.world);
  zero_is_one(share.interleave);
}

void StructReader::settle(PhysicalSlotsParams& params, const Given<mla_physical_slots_params>&) {
  zero_is_one(params.ratio);
}

void StructReader::settle(IndexerLogitsParams& params, const Given<mla_indexer_logits_params>&) {
  zero_is_one(params.ratio);
  zero_is_one(params.block_size);
}

void StructReader::settle(TopKParams& params, const Given<mla_top_k_params>&) { zero_is_one(params.block_size); }

void StructReader::settle(IndexerTopKParams& params, const Given<mla_indexer_top_k_params>&) {
  zero_is_one(params.indexer.ratio);
  zero_is_one(params.indexer.block_size);
}

void StructReader::settle(KvCache& cache, const Given<mla_cache_scales>& given) {
  bool any_scales = false;
  convert({&given.at, "any_scales"}, given.fields.any_scales, any_scales);
  cache.power_of_two_scales = !any_scales;
}

void StructReader::settle(AppendIndexerParams& params, const Given<mla_append_indexer_params>& given) {
  bool any_scales = false;
  convert({&given.at, "any_scales"}, given.fields.any_scales, any_scales);
  params.power_of_two_scales = !any_scales;
  note({nullptr, "power_of_two_scales"}, {&given.at, "any_scales"});
}

void StructReader::settle(CompressParams& params, const Given<mla_compress_params>& given) {
  bool any_scales = false;
  convert({&given.at, "any_scales"}, given.fields.any_scales, any_scales);
  params.power_of_two_scales = !any_scales;
  note({nullptr, "power_of_two_scales"}, {&given.at, "any_scales"});
}

template <class C>
void StructReader::settle_scales(OutputFinish& finish, const Given<C>& given) {
  bool any_scales = false;
  convert({&given.at, "any_scales"}, given.fields.any_scales, any_scales);
  finish.power_of_two_scales = !any_scales;
  note({nullptr, "finish.power_of_two_scales"}, {&given.at, "any_scales"});
}

void StructReader::settle(FinishOutputParams& params, const Given<mla_finish_output_params>& given) {
  settle_scales(params.finish, given);
}

void StructReader::settle(DecodeSparseParams& params, const Given<mla_decode_sparse_params>& given) {
  params.pool.topk_length_per = enumeration<LengthPer>(given.fields.topk_length_per);
  params.extra_pool.topk_length_per = enumeration<LengthPer>(given.fields.extra_topk_length_per);
  settle_scales(params.finish, given);
}

}  // namespace mla::dispatch
