// SPDX-License-Identifier: Apache-2.0
// This header defines the library's error type: a code and one sentence that names the field, what was expected and
// what was given.
#pragma once

#include <cassert>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace mla {

enum class StatusCode : int {
  kOk = 0,
  kInvalidArgument = 1,    ///< a field is wrong; the message names it
  kUnsupported = 2,        ///< no backend (or not the forced one) can run the problem; the message says why
  kWorkspaceTooSmall = 3,  ///< the message says how many bytes are needed
  kInternal = 4,           ///< out of memory or out of threads, or a bug in the library
};

/// Holds the name that the callers of a binding have for a field. `field` is its path in the parameters of mla/params.h
/// ("o"); or it ends in a dot and stands for the beginning of all paths below it ("options."), which `name` ("") then
/// replaces.
struct FieldName {
  std::string_view field;
  std::string_view name;
};

/// Holds success, or says what was wrong. Messages read "<operation>: <field>: expected <this>, got <that>".
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  /// Makes a status whose message names fields: those that `text` encloses in backticks. The message omits the
  /// backticks.
  static Status naming_fields(StatusCode code, std::string text);
  /// Returns the same status with every field in the message replaced by the name of the first entry of `names` that
  /// fits.
  Status renamed(std::span<const FieldName> names) const;

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
  std::string marked_;  // the message with its backticks; empty if it names no field
};

/// Holds a value, or the status that says why there is none. Taking the value when ok() is false is undefined; builds
/// with assertions end the program there.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) {}

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() & { return checked(value_); }
  const T& value() const& { return checked(value_); }
  T&& value() && { return std::move(checked(value_)); }
  T* operator->() { return &checked(value_); }
  const T* operator->() const { return &checked(value_); }
  T& operator*() & { return checked(value_); }
  const T& operator*() const& { return checked(value_); }

 private:
  template <class Optional>
  static auto& checked(Optional& value) {
    assert(value.has_value());
    return *value;
  }

  std::optional<T> value_;
  Status status_;
};

}  // namespace mla
