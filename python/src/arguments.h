// SPDX-License-Identifier: Apache-2.0
// Reads what a call from Python carries: the values of one packed call, one after the other. operation.h says in which
// order those of an operation come. Each read names its field, for errors. Values are turned into the library's types
// and not judged: that is the library's part.
#pragma once

#include <tvm/ffi/function.h>

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "mla/mla.h"

namespace mla::python {

namespace ffi = tvm::ffi;

/// Raises the Python exception of that name, or RuntimeError if there is none.
[[noreturn]] void raise(const char* exception, std::string message);
/// Raises what a status says, unless all is well.
void check(const Status& status);
template <class T>
T value_of(Result<T> result) {
  check(result.status());
  return std::move(*result);
}

/// Says how one-byte elements are to be read: frameworks without e4m3 keep such numbers as u8, and those that have it
/// may keep packed rows in it.
enum class Bytes : uint8_t { kAsGiven, kE4M3, kRaw };

/// Returns the library's type for a DLPack element type, kNone for one that it does not know.
DType dtype_of(DLDataType type, Bytes bytes = Bytes::kAsGiven);
std::string type_name(DLDataType type);
DLDataType dlpack_type(DType dtype);
DLDevice dlpack_device(Device device);
/// Returns the type that a text such as "f32", "float32", "e4m3" or "float8_e4m3fn" names; nothing for other texts.
std::optional<DType> parse_dtype(std::string_view text);
/// Returns "bf16, f16, ... or " and the last cache format, for errors.
std::string format_names();
/// Does the same of the formats of the indexer's keys.
std::string indexer_format_names();

inline bool is_none(ffi::AnyView value) { return value.type_index() == ffi::TypeIndex::kTVMFFINone; }

/// Holds an argument's name for errors, or that of a part of it: {"cache", ".kv"}, {"q", "[0]"}.
struct Field {
  // NOLINTBEGIN(google-explicit-constructor): most fields have no parts
  Field(const char* whole) : name(whole) {}
  Field(std::string_view whole) : name(whole) {}
  Field(const std::string& whole) : name(whole) {}
  // NOLINTEND(google-explicit-constructor)
  Field(std::string_view whole, std::string_view of_it) : name(whole), part(of_it) {}
  std::string text() const { return std::string(name).append(part); }

  std::string_view name;
  std::string_view part = {};
};

class Arguments {
 public:
  Arguments(const char* operation, ffi::PackedArgs args) : operation_(operation), args_(args) {}

  /// Reads a tensor; returns an empty view for None.
  TensorView tensor(Field field, Bytes bytes = Bytes::kAsGiven);
  /// Reads a tensor of integers as tensor() does. Nothing is converted: lists are refused here, and tensors of another
  /// type by the library.
  TensorView integers(Field field, DType type = DType::kI32);
  bool boolean(Field field);
  int32_t integer(Field field);
  /// Reads an integer of at least `least`; returns nothing for None.
  std::optional<int32_t> optional_count(Field field, int32_t least = 1);
  int32_t count(Field field, int32_t least = 1);
  float number(Field field);
  std::string text(Field field);
  /// Reads an element type; returns kNone for None.
  DType dtype(Field field);
  /// Reads "default" or "fp8".
  Compute compute(Field field);
  /// Reads an object of class T, one of those that these sources define; returns null for None.
  template <class T>
  const T* object(Field field, std::string_view expected) {
    const ffi::AnyView value = next(field);
    if (is_none(value)) return nullptr;
    if (const auto found = value.as<T>()) return found;
    wrong_type(field, expected, value);
  }
  ffi::AnyView any(Field field) { return next(field); }
  /// Returns the tensor that an argument is. `expected` is the type of its elements, for errors; kNone: any.
  TensorView view_of(Field field, ffi::AnyView value, Bytes bytes, DType expected = DType::kNone) const;
  bool next_is_none() const { return read_ < args_.size() && is_none(args_[read_]); }
  /// Passes over the next argument if it is None, and returns whether it is.
  bool skip_none() {
    const bool none = next_is_none();
    if (none) ++read_;
    return none;
  }

  const char* operation() const { return operation_; }
  /// Takes the fields of the parameters whose arguments have other names. `names` must be of static storage.
  void call_fields(std::span<const FieldName> names) { names_ = names; }
  /// Takes a table of the names that the caller's own callers know the arguments by: field, name, field, name, ...; or
  /// None.
  void call_arguments(ffi::AnyView names) { callers_names_ = names; }
  /// Raises what a status says, unless all is well.
  void check(const Status& status) const;
  template <class T>
  T value_of(Result<T> result) const {
    check(result.status());
    return std::move(*result);
  }
  /// Raises "<operation>: <field>: expected <expected>, got <got>".
  [[noreturn]] void fail(const char* exception, Field field, std::string_view expected, std::string_view got) const;
  /// Raises RuntimeError unless every value was read: the caller and the reader must agree on the fields.
  void end() const;

 protected:
  /// Describes a cache that was given as tensors: what it is called, and where it stands in the parameters.
  struct BareCache {
    std::string_view name;
    std::string_view path;
  };

  ffi::AnyView next(const Field& field) {
    if (read_ >= first_more_ || read_ >= args_.size()) check_next(field);
    return args_[read_++];
  }
  void name_bare_cache(BareCache cache) { caches_.at(num_caches_++) = cache; }
  [[noreturn]] void wrong_type(Field field, std::string_view expected, ffi::AnyView value) const;

  const char* operation_;
  ffi::PackedArgs args_;
  int read_ = 0;
  // These arguments, the last ones, must be read by their names.
  std::span<const std::string_view> more_;
  int first_more_ = std::numeric_limits<int>::max();

 private:
  /// Raises RuntimeError unless there is one more argument, of this name if it has one.
  void check_next(const Field& field) const;
  [[noreturn]] void wrong_version() const;
  /// Returns the status as the caller's callers are to read it.
  Status for_callers(const Status& status) const;

  std::span<const FieldName> names_;
  ffi::AnyView callers_names_;
  std::array<BareCache, 2> caches_ = {};
  size_t num_caches_ = 0;
};

}  // namespace mla::python
