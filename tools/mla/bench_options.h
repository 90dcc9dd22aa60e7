// SPDX-License-Identifier: Apache-2.0
// The options that describe cases, shared by `mla run` and `mla bench`.
#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <string>
#include <string_view>

#include "mla/bench/cases.h"

namespace mla::bench {

/// One option "--kv-len" for every key "kv_len".
class SettingFlags {
 public:
  void add_options(CLI::App& command) {
    for (const SettingKey& entry : setting_keys())
      command.add_option(flag_of(entry.key), values_[entry.key], std::string(entry.help))->option_text(" ");
  }

  /// The options that were given.
  Settings settings() const {
    Settings given;
    for (const auto& [key, text] : values_)
      if (!text.empty()) given[std::string(key)] = Setting{.text = text, .where = flag_of(key)};
    return given;
  }

 private:
  static std::string flag_of(std::string_view key) {
    std::string flag = "--" + std::string(key);
    for (char& c : flag) c = c == '_' ? '-' : c;
    return flag;
  }

  std::map<std::string_view, std::string> values_;
};

}  // namespace mla::bench
