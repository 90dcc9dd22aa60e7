// SPDX-License-Identifier: Apache-2.0
// Defines the elementary checks of validation. Each error names the field, what was expected and what was given. After
// the first failure all further checks do nothing. No check that passes allocates.
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

/// Stands for an extent that is not known yet: the first tensor that has the dimension binds it, and all later ones
/// must repeat it.
inline constexpr int64_t kUnbound = -1;

/// Limits the keys of a request, and the tokens of a page. Backends count both in int32 and round them up to whole
/// steps.
inline constexpr int64_t kMaxKvLen = int64_t{1} << 30;

/// Limits the tensors of an operation, its workspace included.
inline constexpr size_t kMaxTensors = 32;

/// Names a dimension ("" for a fixed one) and points to its extent. The check binds `*extent` if it is kUnbound.
struct Dim {
  const char* name;
  int64_t* extent;
};

/// Says what a tensor is to the operation. A kSharedInput is an input with which outputs may share memory, as the
/// operation defines.
enum class Role : uint8_t { kInput, kSharedInput, kOutput };

/// Holds a set of element types, one bit each.
using DTypes = uint32_t;
constexpr DTypes set_of(std::initializer_list<DType> dtypes) {
  DTypes set = 0;
  for (DType dtype : dtypes) set |= 1U << (static_cast<unsigned>(dtype) & 31U);  // callers may pass any value
  return set;
}
inline constexpr DTypes kFloats = set_of({DType::kBF16, DType::kF16, DType::kF32});
inline constexpr DTypes kFloatsAndE4M3 = kFloats | set_of({DType::kE4M3});
inline constexpr DTypes kF32Only = set_of({DType::kF32});
inline constexpr DTypes kI32Only = set_of({DType::kI32});
inline constexpr DTypes kI64Only = set_of({DType::kI64});
inline constexpr DTypes kU8Only = set_of({DType::kU8});

/// Holds the path of a field: the parts of the parameters that contain it, outermost first.
class FieldPath {
 public:
  void enter(std::string_view part) { parts_[static_cast<size_t>(depth_++)] = part; }
  void leave() { --depth_; }
  /// Returns the field with its path, as "pool.cache.kv".
  std::string text(std::string_view field) const;
  /// Returns the text with every field that it names replaced by its whole path. A name is relative to the path
  /// ("`kv`") or absolute ("`/pool.cache.kv`").
  std::string resolve(std::string_view text) const;

 private:
  std::array<std::string_view, 3> parts_;  // parameters are nested no deeper
  int depth_ = 0;
};

/// Says how much is checked: `plan` looks at shapes and lengths only, so that it may be called before the data exists;
/// `run` looks at everything.
enum class Scope : uint8_t { kShapesAndLengths, kAll };

/// Says which memory the tensors are in: that of their devices, or, whatever device they name, that of an emulated GPU.
/// The contents of a GPU's memory are not looked at, emulated or not.
enum class Memory : uint8_t { kOfTensors, kEmulated };

class Checks {
 public:
  Checks(Op op, Scope scope, Memory memory = Memory::kOfTensors) : op_(op), scope_(scope), memory_(memory) {}

  /// For the lifetime of this object, checked fields belong to a part of the parameters.
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
  /// Is the last check, after all tensors have been checked: no output may share memory with another tensor. Sets
  /// `device` to the tensors' device.
  Status finish(Device& device);
  /// Returns whether all tensors so far are in memory that this code can read.
  bool on_cpu() const { return memory_ == Memory::kOfTensors && (!device_known_ || device_.type == DeviceType::kCpu); }
  Device device() const { return memory_ == Memory::kEmulated ? Device{DeviceType::kCuda, 0} : device_; }
  bool full() const { return scope_ == Scope::kAll; }
  /// Returns whether the contents of tensors that `plan` does not read may be read now.
  bool reads_data() const { return ok() && full() && on_cpu(); }

  /// Records "<op>: <field>: <text>", and returns false, so that checks can return it. Backticks enclose the fields
  /// that the text names, so that bindings can replace them by their callers' names.
  template <class... A>
  bool fail(std::string_view field, fmt::format_string<A...> text, A&&... a) {
    return record(field, text, fmt::make_format_args(a...));
  }
  template <class... A>
  bool require(bool condition, std::string_view field, fmt::format_string<A...> text, A&&... a) {
    return ok() && (condition || fail(field, text, std::forward<A>(a)...));
  }

  /// Checks a tensor that must be given: its element type, dimensions, device, layout, and its pointer where data is
  /// needed.
  bool tensor(std::string_view field, const TensorView& view, DTypes dtypes, std::initializer_list<Dim> dims,
              Role role = Role::kInput);
  /// Does what `tensor` does, for the rank-1 lists whose contents `plan` reads too.
  bool lengths(std::string_view field, const TensorView& view, Dim dim);
  /// Does what `tensor` does, for tensors whose innermost stride may be anything (lse).
  bool strided(std::string_view field, const TensorView& view, DTypes dtypes, std::initializer_list<Dim> dims,
               Role role = Role::kInput);

  /// Registers the memory that a plan owns and that its operation writes.
  void workspace(std::span<const std::byte> bytes);

  bool at_least(std::string_view field, int64_t value, int64_t least);
  bool at_most(std::string_view field, int64_t value, int64_t most);
  /// Checks that `value` fits the int32 of the backends' arguments.
  bool fits_int32(std::string_view field, int64_t value);
  /// Checks a tensor [1] of f32 whose value must be finite and above 0.
  bool scale(std::string_view field, const TensorView& view);
  /// Checks that a tensor is not given: "expected none, since <why>, got a tensor".
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

  /// Holds a tensor that was checked, as `apart` needs it to compare its memory with other tensors.
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

/// Returns an optional tensor; an empty view if it was not given, whatever its other fields hold.
inline TensorView if_given(const TensorView& view) { return view.given() ? view : TensorView{}; }

/// Returns the shape as "[2, 16, 576]".
std::string shape_text(const TensorView& view);

}  // namespace mla::core
