// SPDX-License-Identifier: Apache-2.0
// Declares the options that describe cases and how to measure them, shared by `libmla run` and `libmla bench`.
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>

#include "mla/bench/cases.h"
#include "mla/bench/measure.h"
#include "mla/renamed_option.h"
#include "mla/values.h"

namespace mla::bench {

/// Adds one option "--kv-len" for every key "kv_len", and holds the values given. Keys that have another name in Python
/// go by both, and help shows that one.
class SettingFlags {
 public:
  void add_options(CLI::App& command, std::initializer_list<std::string_view> without = {}) {
    for (const SettingKey& entry : setting_keys()) {
      if (std::find(without.begin(), without.end(), entry.key) != without.end()) continue;
      const std::string help(entry.help);
      if (!entry.python.empty())
        renamed_[entry.key].add(command, flag_of(entry.python), flag_of(entry.key), help)->option_text(" ");
      else
        command.add_option(flag_of(entry.key), values_[entry.key], help)->option_text(" ");
    }
  }

  /// Returns the options that were given.
  Settings settings() const {
    Settings given;
    for (const auto& [key, text] : values_)
      if (!text.empty()) given[std::string(key)] = Setting{.text = text, .where = flag_of(key)};
    for (const auto& [key, option] : renamed_)
      if (!option.text().empty()) given[std::string(key)] = Setting{.text = option.text(), .where = option.where()};
    return given;
  }

 private:
  static std::string flag_of(std::string_view key) {
    std::string flag = "--" + std::string(key);
    for (char& c : flag) c = c == '_' ? '-' : c;
    return flag;
  }

  std::map<std::string_view, std::string> values_;
  std::map<std::string_view, cli::RenamedOption> renamed_;
};

/// Adds --min-time and --seed, and holds their values.
class MeasureFlags {
 public:
  explicit MeasureFlags(std::string min_time) : min_time_(std::move(min_time)) {}

  void add_options(CLI::App& command) {
    command.add_option("--min-time", min_time_, "Seconds of runs for each case")->capture_default_str();
    command.add_option("--seed", seed_, "Seed of the random data")->capture_default_str();
  }
  void apply(MeasureOptions& options) const {
    options.min_time = cli::parse_positive("--min-time", "seconds", min_time_);
    options.seed = static_cast<uint64_t>(cli::parse_int("--seed", seed_, 0));
  }

 private:
  std::string min_time_, seed_ = "1";
};

}  // namespace mla::bench
