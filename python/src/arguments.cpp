// SPDX-License-Identifier: Apache-2.0
#include "arguments.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/string.h>

#include <limits>
#include <utility>
#include <vector>

namespace mla::python {
namespace {

// Of each type, the first is the library's name and the others are what frameworks say.
constexpr std::pair<std::string_view, DType> kDTypeNames[] = {
    {"f32", DType::kF32},   {"float32", DType::kF32},   {"f16", DType::kF16},   {"float16", DType::kF16},
    {"bf16", DType::kBF16}, {"bfloat16", DType::kBF16}, {"e4m3", DType::kE4M3}, {"float8_e4m3fn", DType::kE4M3},
    {"u8", DType::kU8},     {"uint8", DType::kU8},      {"i32", DType::kI32},   {"int32", DType::kI32},
    {"i64", DType::kI64},   {"int64", DType::kI64}};

std::string device_name(DLDevice device) {
  return "DLPack device " + std::to_string(device.device_type) + ":" + std::to_string(device.device_id);
}

/// Returns the library's device for a DLPack device, nothing for one that it does not know. Page-locked memory is the
/// processor's, managed memory the GPU's.
std::optional<Device> device_of(DLDevice device) {
  switch (device.device_type) {
    case kDLCPU:
    case kDLCUDAHost: return Device{DeviceType::kCpu, 0};
    case kDLCUDA:
    case kDLCUDAManaged: return Device{DeviceType::kCuda, device.device_id};
    default: return std::nullopt;
  }
}

void set_strides(const DLTensor& tensor, TensorView& view) {
  int64_t stride = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    const auto at = static_cast<size_t>(i);
    view.stride[at] = tensor.strides != nullptr ? tensor.strides[i] : stride;
    stride *= view.shape[at];
  }
}

}  // namespace

void raise(const char* exception, std::string message) { throw ffi::Error(exception, std::move(message), ""); }

void check(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk: return;
    case StatusCode::kInvalidArgument:
    case StatusCode::kWorkspaceTooSmall: raise("ValueError", status.message());
    case StatusCode::kUnsupported: raise("libmla.UnsupportedError", status.message());
    case StatusCode::kInternal: break;
  }
  raise("RuntimeError", status.message());
}

DType dtype_of(DLDataType type, Bytes bytes) {
  if (type.lanes != 1) return DType::kNone;
  if (type.bits == 8) {
    const bool e4m3 = type.code == kDLFloat8_e4m3fn;
    if (!e4m3 && type.code != kDLUInt && type.code != kDLBool && type.code != kDLInt) return DType::kNone;
    if (bytes == Bytes::kRaw) return DType::kU8;
    if (e4m3 || (bytes == Bytes::kE4M3 && type.code == kDLUInt)) return DType::kE4M3;
    return type.code == kDLInt ? DType::kNone : DType::kU8;
  }
  switch (type.code) {
    case kDLFloat: return type.bits == 32 ? DType::kF32 : type.bits == 16 ? DType::kF16 : DType::kNone;
    case kDLBfloat: return type.bits == 16 ? DType::kBF16 : DType::kNone;
    case kDLInt: return type.bits == 32 ? DType::kI32 : type.bits == 64 ? DType::kI64 : DType::kNone;
    default: return DType::kNone;
  }
}

std::string type_name(DLDataType type) {
  if (type.code == kDLComplex) return "complex" + std::to_string(type.bits);
  return ffi::DLDataTypeToString(type);
}

DLDataType dlpack_type(DType dtype) {
  switch (dtype) {
    case DType::kF32: return {kDLFloat, 32, 1};
    case DType::kF16: return {kDLFloat, 16, 1};
    case DType::kBF16: return {kDLBfloat, 16, 1};
    case DType::kE4M3: return {kDLFloat8_e4m3fn, 8, 1};
    case DType::kI32: return {kDLInt, 32, 1};
    case DType::kI64: return {kDLInt, 64, 1};
    case DType::kU8:
    case DType::kE2M1:  // in the bytes of packed rows only
    case DType::kNone: break;
  }
  return {kDLUInt, 8, 1};
}

DLDevice dlpack_device(Device device) { return {static_cast<DLDeviceType>(device.type), device.index}; }

namespace {

template <class Formats>
std::string listed(const Formats& formats) {
  std::string names;
  size_t left = std::size(formats);
  for (const auto format : formats) {
    names.append(name(format)).append(left == 2 ? " or " : left > 2 ? ", " : "");
    --left;
  }
  return names;
}

}  // namespace

std::string format_names() { return listed(kAllCacheFormats); }
std::string indexer_format_names() { return listed(kAllIndexerFormats); }

std::optional<DType> parse_dtype(std::string_view text) {
  for (const auto& [name, dtype] : kDTypeNames)
    if (name == text) return dtype;
  return std::nullopt;
}

void Arguments::check_next(const Field& field) const {
  const bool other = read_ >= first_more_ && more_[static_cast<size_t>(read_ - first_more_)] != field.name;
  if (read_ >= args_.size() || other) wrong_version();
}

void Arguments::end() const {
  if (read_ != args_.size()) wrong_version();
}

void Arguments::wrong_version() const {
  raise("RuntimeError", std::string(operation_) + ": libmla's Python and its library are of different versions");
}

Status Arguments::for_callers(const Status& status) const {
  const auto table = callers_names_.try_cast<ffi::Array<ffi::String>>();
  if (!table) return status;
  const std::vector<std::string> texts(table->begin(), table->end());
  std::vector<FieldName> names;
  for (size_t i = 0; i + 1 < texts.size(); i += 2) names.push_back({texts[i], texts[i + 1]});
  return status.renamed(names);
}

void Arguments::check(const Status& status) const {
  if (status.ok()) return;
  std::vector<std::pair<std::string, std::string>> of_caches;
  for (const BareCache& cache : std::span(caches_).first(num_caches_)) {
    const std::string path(cache.path);
    const std::string name(cache.name);
    of_caches.emplace_back(path + ".kv", name);
    of_caches.emplace_back(path + ".ckv", name + "[0]");
    of_caches.emplace_back(path + ".kpe", name + "[1]");
  }
  std::vector<FieldName> names;
  for (const auto& [field, name] : of_caches) names.push_back({field, name});
  names.insert(names.end(), names_.begin(), names_.end());
  python::check(for_callers(status.renamed(names)));
}

void Arguments::fail(const char* exception, Field field, std::string_view expected, std::string_view got) const {
  const Status name = Status::naming_fields(StatusCode::kInvalidArgument, '`' + field.text() + '`');
  std::string message = operation_;
  message.append(": ").append(for_callers(name).message()).append(": expected ").append(expected);
  raise(exception, std::move(message.append(", got ").append(got)));
}

void Arguments::wrong_type(Field field, std::string_view expected, ffi::AnyView value) const {
  if (const auto text = value.try_cast<ffi::String>())
    fail("TypeError", field, expected, '"' + std::string(*text) + '"');
  const bool list = value.try_cast<ffi::Array<ffi::Any>>().has_value();
  fail("TypeError", field, expected, list ? "a list or tuple" : std::string(value.GetTypeKey()));
}

TensorView Arguments::view_of(Field field, ffi::AnyView value, Bytes bytes, DType expected) const {
  const auto of_type = [&](const char* any) {
    return expected == DType::kNone ? std::string(any) : " of " + std::string(name(expected));
  };
  const auto found = value.try_cast<DLTensor*>();
  if (!found) wrong_type(field, "a tensor" + of_type(""), value);
  const DLTensor& tensor = **found;
  TensorView view;
  view.dtype = dtype_of(tensor.dtype, bytes);
  if (view.dtype == DType::kNone)
    fail("TypeError", field, "elements" + of_type(" of f32, f16, bf16, e4m3, uint8, int32 or int64"),
         type_name(tensor.dtype));
  const auto device = device_of(tensor.device);
  if (!device) fail("ValueError", field, "a tensor on the CPU or a CUDA device", device_name(tensor.device));
  if (tensor.ndim > kMaxDims)
    fail("ValueError", field, "at most " + std::to_string(kMaxDims) + " dimensions", std::to_string(tensor.ndim));
  view.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  view.device = *device;
  view.ndim = tensor.ndim;
  for (int i = 0; i < view.ndim; ++i) view.shape[static_cast<size_t>(i)] = tensor.shape[i];
  set_strides(tensor, view);
  return view;
}

TensorView Arguments::tensor(Field field, Bytes bytes) {
  const ffi::AnyView value = next(field);
  if (is_none(value)) return {};
  return view_of(field, value, bytes);
}

TensorView Arguments::integers(Field field, DType type) {
  const ffi::AnyView value = next(field);
  if (is_none(value)) return {};
  return view_of(field, value, Bytes::kAsGiven, type);
}

bool Arguments::boolean(Field field) {
  const ffi::AnyView value = next(field);
  if (const auto found = value.try_cast<bool>()) return *found;
  wrong_type(field, "a bool", value);
}

int32_t Arguments::integer(Field field) {
  const ffi::AnyView value = next(field);
  const auto found = value.try_cast<int64_t>();
  if (!found) wrong_type(field, "an int", value);
  using Limits = std::numeric_limits<int32_t>;
  if (*found < Limits::min() || *found > Limits::max())
    fail("ValueError", field, "an int of 32 bits", std::to_string(*found));
  return static_cast<int32_t>(*found);
}

std::optional<int32_t> Arguments::optional_count(Field field, int32_t least) {
  if (next_is_none()) {
    next(field);
    return std::nullopt;
  }
  const int32_t value = integer(field);
  if (value < least) fail("ValueError", field, "at least " + std::to_string(least), std::to_string(value));
  return value;
}

int32_t Arguments::count(Field field, int32_t least) {
  const std::optional<int32_t> value = optional_count(field, least);
  if (!value) fail("TypeError", field, "an int", "None");
  return *value;
}

float Arguments::number(Field field) {
  const ffi::AnyView value = next(field);
  if (const auto found = value.try_cast<double>()) return static_cast<float>(*found);
  wrong_type(field, "a number", value);
}

std::string Arguments::text(Field field) {
  const ffi::AnyView value = next(field);
  if (const auto found = value.try_cast<ffi::String>()) return *found;
  wrong_type(field, "a str", value);
}

DType Arguments::dtype(Field field) {
  const ffi::AnyView value = next(field);
  if (is_none(value)) return DType::kNone;
  if (const auto text = value.try_cast<ffi::String>()) {
    if (const auto dtype = parse_dtype(std::string_view(text->data(), text->size()))) return *dtype;
  } else if (const auto type = value.try_cast<DLDataType>()) {
    if (const DType dtype = dtype_of(*type); dtype != DType::kNone) return dtype;
  }
  wrong_type(field, "an element type such as \"bf16\" or that of a framework", value);
}

Compute Arguments::compute(Field field) {
  const std::string name = text(field);
  if (const auto found = parse_compute(name)) return *found;
  fail("ValueError", field, "\"default\", \"fp8\" or \"exact\"", '"' + name + '"');
}

}  // namespace mla::python
