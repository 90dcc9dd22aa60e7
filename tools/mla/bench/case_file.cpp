// SPDX-License-Identifier: Apache-2.0
// Reads YAML case files: `defaults`, and `cases`, a list of maps from keys to values, lists or ranges.
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "mla/bench/cases.h"
#include "mla/suggest.h"
#include "mla/text.h"
#include "mla/values.h"

namespace mla::bench {
namespace {

using cli::UsageError;

std::string at(const std::string& path, const YAML::Mark& mark) {
  return mark.is_null() ? path : fmt::format("{}:{}", path, mark.line + 1);
}

// That of a name in a file; empty if there is none.
std::string key_of(std::string_view name) { return std::string(name == "compare" ? name : key_named(name)); }

std::string scalar(const YAML::Node& node, const std::string& where) {
  if (!node.IsScalar()) throw UsageError("{}: expected a value or a list of values", where);
  return node.Scalar();
}

// A list becomes the text that the flag of the same name takes.
std::string value_text(const YAML::Node& node, const std::string& where) {
  if (!node.IsSequence()) return scalar(node, where);
  std::string text;
  for (const YAML::Node& item : node) text += (text.empty() ? "" : ",") + scalar(item, where);
  return text;
}

double positive_number(const YAML::Node& node, const std::string& where) {
  double value = 0.0;
  if (!node.IsScalar() || !YAML::convert<double>::decode(node, value) || !(value > 0.0))
    throw UsageError("{}: expected a number above 0", where);
  return value;
}

Target read_target(const YAML::Node& node, const std::string& path) {
  Target target;
  if (!node.IsMap()) throw UsageError("{}: target: expected a map with share, ratio or max_us", at(path, node.Mark()));
  for (const auto& item : node) {
    const YAML::Node& key = item.first;
    const YAML::Node& value = item.second;
    const std::string name = scalar(key, at(path, key.Mark()));
    const std::string where = fmt::format("{}: target: {}", at(path, key.Mark()), name);
    if (name == "share")
      target.min_share = positive_number(value, where);
    else if (name == "ratio")
      target.min_ratio = positive_number(value, where);
    else if (name == "max_us")
      target.max_us = positive_number(value, where);
    else
      throw UsageError("{}: unknown key; expected share, ratio or max_us", where);
  }
  return target;
}

struct Entry {
  Settings settings;
  Target target;
  std::string label;
};

Entry read_entry(const YAML::Node& node, const std::string& path) {
  if (!node.IsMap()) throw UsageError("{}: expected a map of settings", at(path, node.Mark()));
  Entry entry;
  for (const auto& item : node) {
    const YAML::Node& key = item.first;
    const YAML::Node& value = item.second;
    const std::string name = scalar(key, at(path, key.Mark()));
    const std::string where = fmt::format("{}: {}", at(path, key.Mark()), name);
    if (name == "label") {
      entry.label = scalar(value, where);
    } else if (name == "target") {
      entry.target = read_target(value, path);
    } else if (const std::string key_name = key_of(name); !key_name.empty()) {
      const std::string text = value_text(value, where);
      if (const auto other = entry.settings.find(key_name); other != entry.settings.end())
        throw UsageError("{}: was given before ({})", where, other->second.where);
      // What is compared is a key, by whichever of its names.
      const bool renames = key_name == "compare" && !key_named(text).empty();
      entry.settings[key_name] = Setting{.text = renames ? std::string(key_named(text)) : text, .where = where};
    } else {
      std::vector<std::string> known = {"label", "target", "compare"};
      for (const SettingKey& one : setting_keys()) known.emplace_back(one.key);
      throw UsageError("{}: unknown key{}", where, cli::did_you_mean(name, known));
    }
  }
  // Relative paths count from the case file, so that it can be run from any folder.
  for (const char* key : {"trace", "model"}) {
    const auto it = entry.settings.find(key);
    if (it == entry.settings.end() || (key == std::string_view("model") && !it->second.text.ends_with(".json")))
      continue;
    it->second.text = (std::filesystem::path(path).parent_path() / it->second.text).string();
  }
  return entry;
}

std::vector<CaseGroup> read_cases(const YAML::Node& root, const std::string& path, const Settings& flags) {
  if (!root.IsMap()) throw UsageError("{}: expected a map with the key cases", path);
  Settings defaults;
  for (const auto& item : root) {
    const std::string where = at(path, item.first.Mark());
    const std::string name = scalar(item.first, where);
    if (name == "defaults")
      defaults = read_entry(item.second, path).settings;
    else if (name != "cases")
      throw UsageError("{}: {}: unknown key; expected defaults or cases", where, name);
  }
  const YAML::Node cases = root["cases"];
  if (!cases.IsDefined() || !cases.IsSequence() || cases.size() == 0)
    throw UsageError("{}: cases: expected a list of cases", path);
  std::vector<CaseGroup> groups;
  for (const YAML::Node& node : cases) {
    Entry entry = read_entry(node, path);
    entry.settings.insert(defaults.begin(), defaults.end());
    for (const auto& flag : flags) entry.settings[flag.first] = flag.second;
    for (CaseGroup& group : expand(entry.settings, entry.target, entry.label)) {
      if (entry.target.min_ratio && group.cases.size() < 2 && group.cases.front().op != Op::kTopK)
        throw UsageError("{}: target: ratio: nothing to compare with; give `compare` or `trace`",
                         at(path, node.Mark()));
      groups.push_back(std::move(group));
    }
  }
  return groups;
}

}  // namespace

std::vector<CaseGroup> load_case_file(const std::string& path, const Settings& flags) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) throw UsageError("{}: expected a file, got a directory", path);
  std::ifstream file(path);
  if (!file) throw UsageError("cannot open the case file '{}': {}", path, std::strerror(errno));
  std::stringstream text;
  text << file.rdbuf();
  try {
    return read_cases(YAML::Load(text.str()), path, flags);
  } catch (const YAML::Exception& exception) {
    throw UsageError("{}: {}", at(path, exception.mark), exception.msg);
  }
}

}  // namespace mla::bench
