// SPDX-License-Identifier: Apache-2.0
#include "core/checks.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>

#include "core/format.h"
#include "core/marks.h"

namespace mla::core {
namespace {

constexpr DType kAllDTypes[] = {DType::kBF16, DType::kF16, DType::kF32, DType::kE4M3,
                                DType::kU8,   DType::kI32, DType::kI64};

std::string dtypes_text(DTypes dtypes) {
  std::string text;
  DTypes left = dtypes;
  for (DType dtype : kAllDTypes) {
    const DTypes bit = set_of({dtype});
    if ((dtypes & bit) == 0) continue;
    left &= ~bit;
    if (!text.empty()) text += left != 0 ? ", " : " or ";
    text += name(dtype);
  }
  return text;
}

std::string dtype_text(DType dtype) {
  const std::string_view known = name(dtype);
  return known == "unknown" ? core::format("unknown element type {}", static_cast<unsigned>(dtype))
                            : std::string(known);
}

std::string device_text(Device device) {
  const std::string_view known = name(device.type);
  if (known == "unknown") return core::format("unknown device type {}", static_cast<int32_t>(device.type));
  return core::format("{}:{}", known, device.index);
}

std::string dims_text(std::initializer_list<Dim> dims) {
  std::string text = "[";
  for (const Dim& dim : dims) {
    if (text.size() > 1) text += ", ";
    text += dim.name;
    if (*dim.extent != kUnbound) text += core::format("{}{}", dim.name[0] != '\0' ? " = " : "", *dim.extent);
  }
  return text + "]";
}

int64_t extent(const TensorView& view, int32_t dim) { return view.shape[static_cast<size_t>(dim)]; }
int64_t stride(const TensorView& view, int32_t dim) { return view.stride[static_cast<size_t>(dim)]; }

bool is_empty(const TensorView& view) {
  for (int32_t d = 0; d < view.ndim; ++d)
    if (extent(view, d) == 0) return true;
  return false;
}

/// Returns whether the byte offset of every element, and the number of elements, fit int64.
bool addressable(const TensorView& view) {
  int64_t span = 1;
  int64_t count = 1;
  for (int32_t d = 0; d < view.ndim; ++d) {
    int64_t reach = 0;
    if (stride(view, d) == INT64_MIN) return false;
    const int64_t step = stride(view, d) < 0 ? -stride(view, d) : stride(view, d);
    if (__builtin_mul_overflow(extent(view, d) - 1, step, &reach) || __builtin_add_overflow(span, reach, &span) ||
        __builtin_mul_overflow(count, extent(view, d), &count))
      return false;
  }
  int64_t bytes = 0;
  return !__builtin_mul_overflow(span, static_cast<int64_t>(size_of(view.dtype)), &bytes) &&
         !__builtin_mul_overflow(count, static_cast<int64_t>(size_of(view.dtype)), &bytes);
}

/// Returns the first dimension whose stride may let two elements share memory, or -1. The test is sufficient, not
/// necessary: from the smallest stride up, each stride must exceed the extent of everything below it.
int32_t overlapping_dim(const TensorView& view) {
  std::array<int32_t, kMaxDims> order{};
  int32_t count = 0;
  for (int32_t d = 0; d < view.ndim; ++d) {
    if (extent(view, d) <= 1) continue;
    int32_t at = count++;
    for (; at > 0 && std::abs(stride(view, order[static_cast<size_t>(at - 1)])) >= std::abs(stride(view, d)); --at)
      order[static_cast<size_t>(at)] = order[static_cast<size_t>(at - 1)];
    order[static_cast<size_t>(at)] = d;
  }
  int64_t covered = 1;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t d = order[static_cast<size_t>(i)];
    const int64_t step = std::abs(stride(view, d));
    if (step < covered) return d;
    covered += (extent(view, d) - 1) * step;
  }
  return -1;
}

}  // namespace

std::string shape_text(const TensorView& view) {
  std::string text = "[";
  for (int32_t d = 0; d < view.ndim; ++d) {
    if (d > 0) text += ", ";
    text += core::format("{}", extent(view, d));
  }
  return text + "]";
}

std::string FieldPath::text(std::string_view field) const {
  std::string text;
  for (int i = 0; i < depth_; ++i) text += core::format("{}.", parts_[static_cast<size_t>(i)]);
  return text += field;
}

std::string FieldPath::resolve(std::string_view text) const {
  return replace_marked(text, [&](std::string_view field) {
    if (field.starts_with('/')) return core::format("`{}`", field.substr(1));
    return core::format("`{}`", this->text(field));
  });
}

bool Checks::record(std::string_view field, fmt::string_view text, fmt::format_args args) {
  if (ok())
    status_ = Status::naming_fields(
        StatusCode::kInvalidArgument,
        core::format("{}: `{}`: {}", name(op_), path_.text(field), path_.resolve(core::format_args(text, args))));
  return false;
}

bool Checks::tensor(std::string_view field, const TensorView& view, DTypes dtypes, std::initializer_list<Dim> dims,
                    Role role) {
  return ok() && element_type(field, view, dtypes) && extents(field, view, dims) && place(field, view) &&
         layout(field, view, role, false) && pointer(field, view, role, full());
}

bool Checks::lengths(std::string_view field, const TensorView& view, Dim dim) {
  return ok() && element_type(field, view, kI32Only) && extents(field, view, {dim}) && place(field, view) &&
         layout(field, view, Role::kInput, false) && pointer(field, view, Role::kInput, true);
}

bool Checks::strided(std::string_view field, const TensorView& view, DTypes dtypes, std::initializer_list<Dim> dims,
                     Role role) {
  return ok() && element_type(field, view, dtypes) && extents(field, view, dims) && place(field, view) &&
         layout(field, view, role, true) && pointer(field, view, role, full());
}

bool Checks::element_type(std::string_view field, const TensorView& view, DTypes dtypes) {
  if (!view.given()) return fail(field, "expected a tensor, got none");
  const auto code = static_cast<unsigned>(view.dtype);
  if (code < 32U && (dtypes >> code & 1U) != 0) return true;
  return fail(field, "expected {}, got {}", dtypes_text(dtypes), dtype_text(view.dtype));
}

bool Checks::extents(std::string_view field, const TensorView& view, std::initializer_list<Dim> dims) {
  if (view.ndim < 0 || view.ndim > kMaxDims)
    return fail(field, "expected shape {}, got {} dimensions", dims_text(dims), view.ndim);
  bool match = view.ndim == static_cast<int32_t>(dims.size());
  int32_t d = 0;
  for (const Dim& dim : dims) {
    if (!match) break;
    const int64_t given = extent(view, d++);
    match = given >= 0 && (*dim.extent == kUnbound || *dim.extent == given);
  }
  if (!match) return fail(field, "expected shape {}, got {}", dims_text(dims), shape_text(view));
  d = 0;
  for (const Dim& dim : dims) *dim.extent = extent(view, d++);
  return true;
}

bool Checks::place(std::string_view field, const TensorView& view) {
  const bool known = view.device.type == DeviceType::kCpu || view.device.type == DeviceType::kCuda;
  if (memory_ == Memory::kEmulated)
    return require(known, field, "expected on cpu or cuda, got {}", device_text(view.device));
  if (!device_known_) {
    device_known_ = true;
    device_ = view.device;
    device_path_ = path_;
    device_field_ = field;
  }
  if (view.device == device_) return true;
  return fail(field, "expected on {}, where `/{}` is, got {}", device_text(device_), device_path_.text(device_field_),
              device_text(view.device));
}

bool Checks::layout(std::string_view field, const TensorView& view, Role role, bool any_inner_stride) {
  if (is_empty(view)) return true;
  const int32_t inner = view.ndim - 1;
  if (!any_inner_stride && inner >= 0 && extent(view, inner) > 1 && stride(view, inner) != 1)
    return fail(field, "expected stride 1 in the innermost dimension, got {}", stride(view, inner));
  if (!addressable(view)) return fail(field, "expected offsets that fit 64 bits, got shape {}", shape_text(view));
  if (role != Role::kOutput) return true;
  const int32_t overlap = overlapping_dim(view);
  if (overlap < 0) return true;
  return fail(field, "expected an output whose elements do not overlap, got shape {} with stride {} in dimension {}",
              shape_text(view), stride(view, overlap), overlap);
}

bool Checks::pointer(std::string_view field, const TensorView& view, Role role, bool data_needed) {
  if (data_needed && !is_empty(view)) {
    if (view.data == nullptr) return fail(field, "expected data, got a null pointer");
    keep(field, view, role);
  }
  const size_t alignment = size_of(view.dtype);
  if (reinterpret_cast<uintptr_t>(view.data) % alignment == 0) return true;
  return fail(field, "expected an address that is a multiple of {} bytes, got one that is {} bytes past", alignment,
              reinterpret_cast<uintptr_t>(view.data) % alignment);
}

void Checks::keep(std::string_view field, const TensorView& view, Role role) {
  if (role == Role::kSharedInput) return;
  seen_.at(num_seen_++) = {.path = path_, .field = field, .view = view, .range = byte_range(view), .role = role};
}

void Checks::workspace(std::span<const std::byte> bytes) {
  if (bytes.data() != nullptr && !bytes.empty())
    keep("workspace", contiguous(bytes.data(), DType::kU8, {static_cast<int64_t>(bytes.size())}), Role::kOutput);
}

bool Checks::apart() {
  for (size_t i = 0; i < num_seen_; ++i) {
    const Seen& output = seen_[i];
    if (output.role != Role::kOutput) continue;
    for (size_t j = 0; j < num_seen_; ++j) {
      const Seen& other = seen_[j];
      if (j <= i && other.role == Role::kOutput) continue;  // the tensor itself, or a pair that was compared before
      const uint64_t common = common_bytes(output.range, other.range);
      if (common == 0 || !overlap(output.view, other.view)) continue;
      return fail(output.path.text(output.field),
                  "expected memory apart from that of `{}`, got ranges with {} bytes in common",
                  other.path.text(other.field), common);
    }
  }
  return true;
}

Status Checks::finish(Device& device) {
  if (ok()) apart();
  device = this->device();
  return take();
}

bool Checks::at_least(std::string_view field, int64_t value, int64_t least) {
  return require(value >= least, field, "expected at least {}, got {}", least, value);
}

bool Checks::at_most(std::string_view field, int64_t value, int64_t most) {
  return require(value <= most, field, "expected at most {}, got {}", most, value);
}

bool Checks::fits_int32(std::string_view field, int64_t value) { return at_most(field, value, INT32_MAX); }

bool Checks::scale(std::string_view field, const TensorView& view) {
  int64_t one = 1;
  if (!tensor(field, view, kF32Only, {{"", &one}})) return false;
  if (!reads_data()) return true;
  const float value = *static_cast<const float*>(view.data);
  return require(std::isfinite(value) && value > 0.0F, field, "expected a finite number above 0, got {}", value);
}

bool Checks::absent(std::string_view field, const TensorView& view, std::string_view why) {
  return require(!view.given(), field, "expected none, since {}, got a tensor", why);
}

bool Checks::sm_scale(float value) {
  // Backends compute in base 2, and scale by this product.
  return require(std::isfinite(value) && value > 0.0F, "sm_scale", "expected a finite number above 0, got {}", value) &&
         require(std::isfinite(value * std::numbers::log2e_v<float>), "sm_scale",
                 "expected a number whose product with log2(e) is finite in f32, got {}", value);
}

bool Checks::lse_base(LseBase base) {
  return require(base == LseBase::kE || base == LseBase::kTwo, "lse_base", "expected kE or kTwo, got {}",
                 static_cast<unsigned>(base));
}

}  // namespace mla::core
