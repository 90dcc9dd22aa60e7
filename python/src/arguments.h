// SPDX-License-Identifier: Apache-2.0
// What a call from Python carries: the values of one packed call, read one after the other in the order in which
// python/libmla passes them. Each read names its field, for errors. Values are turned into the library's types and not
// judged: that is the library's part.
#pragma once

#include <tvm/ffi/function.h>

#include <cstdint>
#include <optional>
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

/// How one-byte elements are to be read: frameworks without e4m3 keep such numbers as u8, and those that have it may
/// keep packed rows in it.
enum class Bytes : uint8_t { kAsGiven, kE4M3, kRaw };

/// The library's name of a DLPack element type, kNone for one it does not know.
DType dtype_of(DLDataType type, Bytes bytes = Bytes::kAsGiven);
DLDataType dlpack_type(DType dtype);
DLDevice dlpack_device(Device device);
/// "f32", "float32", "e4m3", "float8_e4m3fn"; nothing for other texts.
std::optional<DType> parse_dtype(std::string_view text);

inline bool is_none(ffi::AnyView value) { return value.type_index() == ffi::TypeIndex::kTVMFFINone; }

/// A field's name in errors, or that of a part of it.
struct Field {
  Field(const char* whole) : name(whole) {}  // NOLINT(google-explicit-constructor): most fields have no parts
  Field(const char* whole, const char* of_it) : name(whole), part(of_it) {}
  std::string text() const { return part == nullptr ? std::string(name) : std::string(name) + '.' + part; }

  const char* name;
  const char* part = nullptr;
};

class Arguments {
 public:
  Arguments(const char* operation, ffi::PackedArgs args) : operation_(operation), args_(args) {}

  /// A tensor, or an empty view for None.
  TensorView tensor(Field field, Bytes bytes = Bytes::kAsGiven);
  bool boolean(Field field);
  int32_t integer(Field field);
  /// An integer of at least `least`, or nothing for None.
  std::optional<int32_t> optional_count(Field field, int32_t least = 1);
  int32_t count(Field field, int32_t least = 1);
  float number(Field field);
  std::string text(Field field);
  LseBase lse_base();
  /// None, "token" or "request".
  LengthPer length_per(Field field);
  /// kNone for None.
  DType dtype(Field field);
  /// An object of one of the border's own classes, or null for None.
  template <class T>
  const T* object(Field field, std::string_view expected) {
    const ffi::AnyView value = next();
    if (is_none(value)) return nullptr;
    if (const auto found = value.as<T>()) return found;
    wrong_type(field, expected, value);
  }
  ffi::AnyView any() { return next(); }
  bool next_is_none() const { return read_ < args_.size() && is_none(args_[read_]); }
  /// The fields of a cache, in the order of libmla.KvCache. An empty format means that of the elements; None, that
  /// there is no cache.
  KvCache cache(const char* field);
  /// None, or (rank, world, interleave).
  ContextParallel context_parallel();

  const char* operation() const { return operation_; }
  /// Raises "<operation>: <field>: expected <expected>, got <got>".
  [[noreturn]] void fail(const char* exception, Field field, std::string_view expected, std::string_view got) const;
  /// The caller and the reader must agree on the fields.
  void end() const;

 private:
  ffi::AnyView next();
  [[noreturn]] void wrong_type(Field field, std::string_view expected, ffi::AnyView value) const;
  TensorView view_of(Field field, ffi::AnyView value, Bytes bytes) const;

  const char* operation_;
  ffi::PackedArgs args_;
  int read_ = 0;
};

}  // namespace mla::python
