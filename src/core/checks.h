// SPDX-License-Identifier: Apache-2.0
// The vocabulary of validation: each check names the field, what was expected and what was given. The first failure
// sticks, checks after it do nothing, and no check that passes allocates.
#pragma once

#include <fmt/core.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "core/overlap.h"
#include "mla/status.h"
#include "mla/types.h"

namespace mla::core {

/// An extent that the first tensor to have it decides and all later ones must repeat.
inline constexpr int64_t kUnbound = -1;

/// Keys of a request, and tokens of a page: backends count both in int32 and round them up to whole blocks.
inline constexpr int64_t kMaxKvLen = int64_t{1} << 30;

/// No operation has more tensors, the workspace among them.
inline constexpr size_t kMaxTensors = 24;

/// A named dimension ("" for a fixed one). `*extent` is bound by the check if it is kUnbound.
struct Dim {
  const char* name;
  int64_t* extent;
};

/// kSharedInput: an input that outputs may share memory with, as the operation defines.
enum class Role : uint8_t { kInput, kSharedInput, kOutput };

/// Element types as a set.
using DTypes = uint32_t;
constexpr DTypes set_of(std::initializer_list<DType> dtypes) {
  DTypes set = 0;
  for (DType dtype : dtypes) set |= 1U << (static_cast<unsigned>(dtype) & 31U);  // callers' values may be anything
  return set;
}
inline constexpr DTypes kFloats = set_of({DType::kBF16, DType::kF16, DType::kF32});
inline constexpr DTypes kFloatsAndE4M3 = kFloats | set_of({DType::kE4M3});
inline constexpr DTypes kF32Only = set_of({DType::kF32});
inline constexpr DTypes kI32Only = set_of({DType::kI32});
inline constexpr DTypes kI64Only = set_of({DType::kI64});
inline constexpr DTypes kU8Only = set_of({DType::kU8});

/// Where a field stands: the parts of the parameters around it, outermost first.
class FieldPath {
 public:
  void enter(std::string_view part) { parts_[static_cast<size_t>(depth_++)] = part; }
  void leave() { --depth_; }
  /// "pool.cache.kv"
  std::string text(std::string_view field) const;
  /// A text with the fields that it names, which stand where the path leads ("`kv`") or not ("`/pool.cache.kv`"), by
  /// their whole paths.
  std::string resolve(std::string_view text) const;

 private:
  std::array<std::string_view, 3> parts_;  // as deep as parameters are nested
  int depth_ = 0;
};

/// What a caller wants to know: `plan` looks at shapes and lengths only, so that it may be called before the data
/// exists; `run` looks at everything.
enum class Scope : uint8_t { kShapesAndLengths, kAll };

/// Whose memory the tensors are in: their devices', or, whatever they say, that of an emulated GPU. What a GPU's memory
/// holds is not looked at, emulated or not.
enum class Memory : uint8_t { kOfTensors, kEmulated };

class Checks {
 public:
  Checks(Op op, Scope scope, Memory memory = Memory::kOfTensors) : op_(op), scope_(scope), memory_(memory) {}

  /// While it lives, fields belong to a part of the parameters.
  class Within {
   public:
    Within(Checks& check, std::string_view part) : check_(check) { check_.path_.enter(part); }
    ~Within() { check_.path_.leave(); }
    Within(const Within&) = delete;
    Within& operator=(const Within&) = delete;

   private:
    Checks& check_;
  };

  bool ok() const { return status_.ok(); }
  Status take() { return std::move(status_); }
  /// The last check, once all tensors have been seen: no output shares memory with another tensor. Then `device` is
  /// where they are.
  Status finish(Device& device);
  /// Whether all tensors so far live where this code can read them.
  bool on_cpu() const { return memory_ == Memory::kOfTensors && (!device_known_ || device_.type == DeviceType::kCpu); }
  Device device() const { return memory_ == Memory::kEmulated ? Device{DeviceType::kCuda, 0} : device_; }
  bool full() const { return scope_ == Scope::kAll; }
  /// Whether the contents of tensors that `plan` does not read may be read.
  bool reads_data() const { return ok() && full() && on_cpu(); }

  /// Records "<op>: <field>: <text>". Always false, to be returned. Backticks enclose the fields that the text names,
  /// so that bindings can put the names of their callers there.
  template <class... A>
  bool fail(std::string_view field, fmt::format_string<A...> text, A&&... a) {
    return record(field, text, fmt::make_format_args(a...));
  }
  template <class... A>
  bool require(bool condition, std::string_view field, fmt::format_string<A...> text, A&&... a) {
    return ok() && (condition || fail(field, text, std::forward<A>(a)...));
  }

  /// A tensor that must be given: element type, dimensions, device, layout, and its pointer where data is needed.
  /// `lengths` marks the tensors whose contents `plan` reads.
  bool tensor(std::string_view field, const TensorView& view, DTypes dtypes, std::initializer_list<Dim> dims,
              Role role = Role::kInput);
  /// As `tensor`, for the rank-1 lists whose contents are read even by `plan`.
  bool lengths(std::string_view field, const TensorView& view, Dim dim);
  /// As `tensor`, for tensors whose innermost stride may be anything (lse).
  bool strided(std::string_view field, const TensorView& view, DTypes dtypes, std::initializer_list<Dim> dims,
               Role role = Role::kInput);

  /// The memory that a plan owns and that its operation writes.
  void workspace(std::span<const std::byte> bytes);

  bool at_least(std::string_view field, int64_t value, int64_t least);
  bool at_most(std::string_view field, int64_t value, int64_t most);
  /// `value` fits the int32 of the backends' arguments.
  bool fits_int32(std::string_view field, int64_t value);
  /// A tensor [1] of f32 whose value is finite and above 0.
  bool scale(std::string_view field, const TensorView& view);
  /// A tensor that must not be given: "expected none, since <why>, got a tensor".
  bool absent(std::string_view field, const TensorView& view, std::string_view why);
  bool sm_scale(float value);
  bool lse_base(LseBase base);

 private:
  bool record(std::string_view field, fmt::string_view text, fmt::format_args args);
  bool element_type(std::string_view field, const TensorView& view, DTypes dtypes);
  bool extents(std::string_view field, const TensorView& view, std::initializer_list<Dim> dims);
  bool place(std::string_view field, const TensorView& view);
  bool layout(std::string_view field, const TensorView& view, Role role, bool any_inner_stride);
  bool pointer(std::string_view field, const TensorView& view, Role role, bool data_needed);
  void keep(std::string_view field, const TensorView& view, Role role);
  bool apart();

  /// A tensor whose contents matter, as `apart` needs it.
  struct Seen {
    FieldPath path;
    std::string_view field;
    TensorView view;
    ByteRange range;
    Role role = Role::kInput;
  };

  Op op_;
  Scope scope_;
  Memory memory_;
  Status status_;
  FieldPath path_;
  bool device_known_ = false;
  Device device_;
  FieldPath device_path_;
  std::string_view device_field_;
  std::array<Seen, kMaxTensors> seen_;
  size_t num_seen_ = 0;
};

/// An optional tensor, or one without data and strides if it was not given (whatever its other fields hold).
inline TensorView if_given(const TensorView& view) { return view.given() ? view : TensorView{}; }

/// "[2, 16, 576]"
std::string shape_text(const TensorView& view);

}  // namespace mla::core
