// SPDX-License-Identifier: Apache-2.0
// Reads an operation's parameters from Python: field by field (mla/fields.h), in one order, which libmla.arguments
// tells Python. Fields are read by their types; what a type does not say, an operation's definition does.
#pragma once

#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "arguments.h"
#include "mla/fields.h"

namespace mla::python {

/// Describes one of the values that Python passes.
struct Argument {
  std::string path;               ///< path of its field, as messages of the library have it: "pool.cache.kv"
  std::string name;               ///< name for Python's callers: "cache.kv", "q[0]"; empty: Python has no such argument
  Bytes bytes = Bytes::kAsGiven;  ///< how a tensor's one-byte elements are to be read
  DType integers = DType::kNone;  ///< type of the elements of a tensor of integers
};

class Operation {
 public:
  struct Definition {
    const char* name;
    std::span<const FieldName> names = {};        ///< fields that have another name in Python
    std::vector<std::string_view> e4m3 = {};      ///< tensors of e4m3 elements, which may come as u8
    std::vector<std::string_view> left_out = {};  ///< fields without an argument
    std::vector<std::string_view> more = {};      ///< arguments without a field, which follow the others
  };

  template <class Params>
  static Operation of(Definition definition) {
    Operation operation(std::move(definition));
    operation.list(Params{}, "");
    return operation;
  }

  const char* name() const { return definition_.name; }
  std::span<const FieldName> names() const { return definition_.names; }
  std::span<const Argument> fields() const { return fields_; }
  std::span<const std::string_view> more() const { return definition_.more; }
  /// Returns the names of all arguments, in the order in which Python passes them.
  std::vector<std::string> arguments() const;

 private:
  explicit Operation(Definition definition) : definition_(std::move(definition)) {}

  template <class Params>
  void list(const Params& params, const std::string& path) {
    for_each_field(params, [&](std::string_view field_name, const auto& field) {
      using Type = std::remove_cvref_t<decltype(field)>;
      if constexpr (std::is_same_v<Type, PageTable>)  // whose fields messages name as if they stood here
        list(field, path);
      else if constexpr (HasFields<Type> && !std::is_same_v<Type, ContextParallel>)
        list(field, path + std::string(field_name) + '.');
      else
        add(path, field_name, std::is_same_v<Params, IndexerCache> ? Bytes::kRaw : Bytes::kAsGiven);
    });
  }
  void add(const std::string& path, std::string_view field, Bytes bytes);

  Definition definition_;
  std::vector<Argument> fields_;
};

/// Makes an operation known to libmla.arguments; it must live as long as the library.
void define(const Operation& operation);

/// Reads the arguments of one call of an operation.
class OperationArguments : public Arguments {
 public:
  OperationArguments(const Operation& operation, ffi::PackedArgs packed);

  /// Reads the parameters and returns them. Fields without an argument have their defaults.
  template <class Params>
  Params fields() {
    Params params;
    read(params);
    return params;
  }

 private:
  template <class Params>
  void read(Params& params) {
    for_each_field(params, [&](std::string_view, auto& field) {
      using Type = std::remove_reference_t<decltype(field)>;
      if constexpr (HasFields<Type> && !std::is_same_v<Type, ContextParallel>)
        read(field);
      else if (const Argument& argument = *field_++; !argument.name.empty())
        convert_given(argument, field);
    });
  }
  /// Reads a cache. An empty format means that of the elements; None, that there is no cache.
  void read(KvCache& cache);

  template <class Type>
  void convert_given(const Argument& argument, Type& field) {
    convert(argument, field);
  }
  void convert_given(const Argument& argument, TensorView& field) {
    if (next_is_none())
      ++read_;
    else
      convert(argument, field);
  }
  void convert(const Argument& argument, TensorView& field);
  void convert(const Argument& argument, int32_t& field);
  void convert(const Argument& argument, bool& field) { field = boolean(argument.name); }
  void convert(const Argument& argument, float& field) { field = number(argument.name); }
  void convert(const Argument& argument, LseBase& field);
  void convert(const Argument& argument, Compute& field);
  void convert(const Argument& argument, IndexerFormat& field);
  /// Reads None, "token" or "request".
  void convert(const Argument& argument, LengthPer& field);
  /// Reads None, or (rank, world, interleave).
  void convert(const Argument& argument, ContextParallel& field);

  std::span<const Argument>::iterator field_;
};

}  // namespace mla::python
