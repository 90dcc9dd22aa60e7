// SPDX-License-Identifier: Apache-2.0
#include "mla/values.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "mla/backend.h"
#include "mla/text.h"

namespace mla::cli {
namespace {

constexpr size_t kMaxListLength = 10000;

[[noreturn]] void fail(std::string_view option, std::string_view expected, std::string_view got) {
  throw UsageError("{}: expected {}, got '{}'", option, expected, got);
}

// False if the text is no integer or does not fit.
bool read_int(std::string_view text, int64_t& value) {
  int64_t unit = 1;
  if (!text.empty() && (text.back() == 'k' || text.back() == 'K')) unit = 1024;
  if (!text.empty() && (text.back() == 'm' || text.back() == 'M')) unit = 1024 * 1024;
  if (unit != 1) text.remove_suffix(1);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty()) return false;
  return !__builtin_mul_overflow(value, unit, &value);
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

void append_range(std::string_view option, std::string_view item, int64_t min, int64_t max,
                  std::vector<int64_t>& values) {
  const std::vector<std::string_view> parts = split(item, ':');
  if (parts.size() > 3) fail(option, "a range first:last:step", item);
  const int64_t first = parse_int(option, parts[0], min, max);
  const int64_t last = parse_int(option, parts[1], min, max);
  std::string_view step = parts.size() == 3 ? parts[2] : "+1";
  const bool multiply = !step.empty() && step.front() == '*';
  if (!step.empty() && (step.front() == '*' || step.front() == '+')) step.remove_prefix(1);
  int64_t by = 0;
  if (!read_int(step, by) || by < (multiply ? 2 : 1)) fail(option, "a step like *2 or +16 in a range", item);
  if (last < first) fail(option, "a range that does not run backwards", item);
  if (multiply && first == 0) fail(option, "a first value above 0 in a multiplied range", item);
  for (int64_t value = first; value <= last;) {
    if (values.size() >= kMaxListLength) throw UsageError("{}: the range '{}' has too many values", option, item);
    values.push_back(value);
    if (multiply ? __builtin_mul_overflow(value, by, &value) : __builtin_add_overflow(value, by, &value)) break;
  }
}

}  // namespace

int64_t parse_int(std::string_view option, std::string_view text, int64_t min, int64_t max) {
  int64_t value = 0;
  if (!read_int(text, value)) fail(option, "an integer such as 4096 or 4k", text);
  if (value < min) throw UsageError("{}: expected at least {}, got {}", option, min, text);
  if (value > max) throw UsageError("{}: expected at most {}, got {}", option, max, text);
  return value;
}

double parse_positive(std::string_view option, std::string_view unit, std::string_view text, double max) {
  double value = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool number = error == std::errc() && end == text.data() + text.size() && !std::isnan(value);
  if (!number || !(value > 0.0)) throw UsageError("{}: expected {} above 0, got {}", option, unit, text);
  if (value > max) throw UsageError("{}: expected at most {:g} {}, got {}", option, max, unit, text);
  return value;
}

ModelConfig parse_model(std::string_view option, const std::string& text) {
  std::string path = text;
  std::error_code ignored;
  if (std::filesystem::is_directory(text, ignored)) path = (std::filesystem::path(text) / "config.json").string();
  const bool is_path = path != text || text.find('/') != std::string::npos || text.ends_with(".json");
  if (is_path && access(path.c_str(), R_OK) != 0)
    throw UsageError("{}: cannot open '{}': {}", option, path, std::strerror(errno));
  Result<ModelConfig> model = load_model(path);
  if (model.ok()) return std::move(model).value();
  std::string_view message = model.status().message();
  if (constexpr std::string_view kPrefix = "model: "; message.starts_with(kPrefix))
    message.remove_prefix(kPrefix.size());
  throw UsageError("{}: {}", option, message);
}

bool has_cache(Op op) {
  return op == Op::kDecode || op == Op::kDecodeSparse || op == Op::kPrefillSparse || op == Op::kAppend ||
         op == Op::kAppendRope || op == Op::kGather || op == Op::kCopyPages || op == Op::kCompress;
}

bool has_pages(Op op) {
  return op != Op::kPrefill && op != Op::kPrefillSparse && op != Op::kMergeStates && op != Op::kTopK &&
         op != Op::kFinishOutput;
}

bool is_attention(Op op) {
  return op == Op::kDecode || op == Op::kDecodeSparse || op == Op::kPrefill || op == Op::kPrefillSparse;
}

bool chooses_compute(Op op) {
  return (is_attention(op) && op != Op::kPrefillSparse) || op == Op::kIndexerLogits || op == Op::kIndexerTopK;
}

bool has_heads(Op op) {
  return is_attention(op) || op == Op::kMergeStates || op == Op::kAppendRope || op == Op::kIndexerLogits ||
         op == Op::kIndexerTopK || op == Op::kFinishOutput;
}

std::string cache_names() {
  std::string names;
  for (CacheFormat format : kAllCacheFormats) names += (names.empty() ? "" : ", ") + std::string(name(format));
  return names;
}

std::string indexer_names() {
  std::string names;
  for (IndexerFormat format : kAllIndexerFormats) names += (names.empty() ? "" : ", ") + std::string(name(format));
  return names;
}

std::string op_names() {
  std::string names;
  for (Op op : kAllOps) names += (names.empty() ? "" : ", ") + std::string(name(op));
  return names;
}

std::vector<std::string> split_list(std::string_view option, std::string_view text) {
  std::vector<std::string> items;
  for (std::string_view item : split(text, ',')) {
    if (item.empty()) fail(option, "a list separated by commas", text);
    items.emplace_back(item);
  }
  return items;
}

std::vector<int64_t> parse_int_list(std::string_view option, std::string_view text, int64_t min, int64_t max) {
  std::vector<int64_t> values;
  for (const std::string& item : split_list(option, text)) {
    if (item.find(':') == std::string::npos)
      values.push_back(parse_int(option, item, min, max));
    else
      append_range(option, item, min, max, values);
  }
  return values;
}

Op parse_op(std::string_view option, std::string_view text) {
  for (Op op : kAllOps)
    if (name(op) == text) return op;
  fail(option, "one of " + op_names(), text);
}

CacheFormat parse_cache(std::string_view option, std::string_view text) {
  if (const auto format = parse_cache_format(text)) return *format;
  fail(option, "one of " + cache_names(), text);
}

IndexerFormat parse_indexer(std::string_view option, std::string_view text) {
  if (const auto format = parse_indexer_format(text)) return *format;
  fail(option, "one of " + indexer_names(), text);
}

Compute parse_compute(std::string_view option, std::string_view text) {
  if (const auto compute = mla::parse_compute(text)) return *compute;
  fail(option, "one of default, fp8, exact", text);
}

DType parse_float_dtype(std::string_view option, std::string_view text, bool allow_e4m3) {
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32})
    if (name(dtype) == text) return dtype;
  if (allow_e4m3 && name(DType::kE4M3) == text) return DType::kE4M3;
  fail(option, allow_e4m3 ? "one of bf16, f16, f32, e4m3" : "one of bf16, f16, f32", text);
}

std::string parse_device(std::string_view option, std::string_view text, bool any_gpu) {
  if (text == "cpu") return "cpu";
  if (text == "cuda") return "cuda:0";
  constexpr std::string_view kCuda = "cuda:", kEmulated = "emulated:sm", kGpu = "sm";
  // Digits alone: parse_int would take a suffix.
  const auto number = [&](std::string_view prefix, size_t least, size_t most) {
    const std::string_view digits = text.substr(std::min(prefix.size(), text.size()));
    return text.starts_with(prefix) && digits.size() >= least && digits.size() <= most &&
           digits.find_first_not_of("0123456789") == std::string_view::npos;
  };
  if (number(kCuda, 1, 3)) return fmt::format("{}{}", kCuda, parse_int(option, text.substr(kCuda.size()), 0));
  if (number(kEmulated, 2, 3) || (any_gpu && number(kGpu, 2, 3))) return std::string(text);
  fail(option,
       any_gpu ? "a device such as cpu, cuda:0 or emulated:sm90, or an architecture such as sm120"
               : "a device such as cpu, cuda:0 or emulated:sm90",
       text);
}

void check_backend_name(std::string_view option, const std::string& backend) {
  if (backend.empty() || backend == "auto") return;
  std::vector<std::string> names;
  for (Op op : kAllOps)
    for (std::string& row : backend_names(op))
      if (std::find(names.begin(), names.end(), row) == names.end()) names.push_back(std::move(row));
  for (const std::string& row : names)
    if (row == backend || row.starts_with(backend + "_")) return;
  throw UsageError("{}: unknown backend '{}'; expected auto, a family such as cpu, or one of {}", option, backend,
                   fmt::join(names, ", "));
}

}  // namespace mla::cli
