// SPDX-License-Identifier: Apache-2.0
// Declares options that have the names of Python's arguments, and keep an older name that help does not show.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <utility>

#include "mla/text.h"

namespace mla::cli {

/// Holds the text of an option that goes by two names.
class RenamedOption {
 public:
  explicit RenamedOption(std::string text = {}) : text_(std::move(text)) {}

  /// Adds "--num-heads" and, out of sight, "--heads" to a command. The object must outlive the parsing and the action.
  CLI::Option* add(CLI::App& command, const std::string& name, const std::string& old_name, const std::string& help) {
    name_ = name;
    old_name_ = old_name;
    old_ = command.add_option(old_name, text_)->group("");
    return new_ = command.add_option(name, text_, help);
  }

  /// Throws UsageError if both names were given.
  const std::string& text() const {
    if (is_given(old_) && is_given(new_)) throw UsageError("{}: {} was given too", old_name_, name_);
    return text_;
  }
  /// Returns the name that the caller wrote, for messages.
  const std::string& where() const { return is_given(old_) ? old_name_ : name_; }

 private:
  static bool is_given(const CLI::Option* option) { return option != nullptr && option->count() > 0; }

  std::string text_, name_, old_name_;
  CLI::Option *old_ = nullptr, *new_ = nullptr;
};

}  // namespace mla::cli
