// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

namespace mla::cli::replay {
namespace {

using nlohmann::json;

// Arrivals beyond this lose the millisecond once something is added to the double that holds them.
constexpr double kMaxArrivalMs = 1e14;

Status bad(std::string message) { return {StatusCode::kInvalidArgument, std::move(message)}; }

// Returns what a value is, short enough for an error message.
std::string shown(const json& value) {
  constexpr size_t kMaxShown = 40;
  if (value.is_array()) return fmt::format("an array of {}", value.size());
  if (value.is_object()) return "an object";
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > kMaxShown) text = text.substr(0, kMaxShown) + "...";
  return text;
}

std::optional<int64_t> as_int64(const json& value) {
  if (value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    if (number > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
    return static_cast<int64_t>(number);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  return std::nullopt;
}

Result<int32_t> length_field(const json& object, const char* field, int32_t minimum) {
  const auto found = object.find(field);
  const auto wanted = fmt::format("{}: expected an integer from {} to {}", field, minimum, kMaxLength);
  if (found == object.end()) return bad(wanted + ", got no such field");
  const auto number = as_int64(*found);
  if (!number || *number < minimum || *number > kMaxLength) return bad(wanted + ", got " + shown(*found));
  return static_cast<int32_t>(*number);
}

Result<double> arrival_field(const json& object) {
  constexpr const char* kWanted = "timestamp: expected milliseconds from 0 to 1e14";
  const auto found = object.find("timestamp");
  if (found == object.end()) return bad(fmt::format("{}, got no such field", kWanted));
  const double value = found->is_number() ? found->get<double>() : -1.0;
  if (!(value >= 0.0 && value <= kMaxArrivalMs)) return bad(fmt::format("{}, got {}", kWanted, shown(*found)));
  return value;
}

Result<std::vector<int64_t>> hash_field(const json& object, int32_t input_length) {
  const int64_t blocks = (int64_t{input_length} + kBlockTokens - 1) / kBlockTokens;
  const auto wanted = fmt::format("hash_ids: expected an array of {} ids, one per {} tokens of input_length {}", blocks,
                                  kBlockTokens, input_length);
  const auto found = object.find("hash_ids");
  if (found == object.end()) return bad(wanted + ", got no such field");
  if (!found->is_array() || static_cast<int64_t>(found->size()) != blocks)
    return bad(wanted + ", got " + shown(*found));
  std::vector<int64_t> ids;
  ids.reserve(found->size());
  for (const json& value : *found) {
    const auto number = as_int64(value);
    if (!number || *number < 0)
      return bad(fmt::format("hash_ids[{}]: expected a non-negative 64-bit integer, got {}", ids.size(), shown(value)));
    ids.push_back(*number);
  }
  return ids;
}

bool is_blank(std::string_view text) { return text.find_first_not_of(" \t\r") == std::string_view::npos; }

}  // namespace

Result<Request> parse_trace_line(std::string_view text, int64_t line) {
  if (text.size() > kMaxLineBytes)
    return bad(fmt::format("expected a line of at most {} bytes, got {}", kMaxLineBytes, text.size()));
  const json object = json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (object.is_discarded()) return bad("expected a JSON object, got text that is not JSON");
  if (!object.is_object()) return bad("expected a JSON object, got " + shown(object));
  const auto arrival = arrival_field(object);
  if (!arrival.ok()) return arrival.status();
  const auto input = length_field(object, "input_length", 1);
  if (!input.ok()) return input.status();
  const auto output = length_field(object, "output_length", 0);
  if (!output.ok()) return output.status();
  auto ids = hash_field(object, *input);
  if (!ids.ok()) return ids.status();
  Request request;
  request.line = line;
  request.arrival_ms = *arrival;
  request.input_length = *input;
  request.output_length = *output;
  request.hash_ids = std::move(*ids);
  return request;
}

Result<std::vector<Request>> read_trace(const std::string& path, int64_t max_requests) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error))
    return bad(fmt::format("{}: expected a trace file, got a directory", path));
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) return bad(fmt::format("{}: cannot open: {}", path, std::strerror(errno != 0 ? errno : EIO)));

  std::vector<Request> requests;
  int64_t first_blank = 0;
  // A bounded buffer, so that a file without line ends is an error and not a full memory.
  const auto buffer = std::make_unique<char[]>(kMaxLineBytes + 2);
  for (int64_t line = 1; max_requests == 0 || std::ssize(requests) < max_requests; ++line) {
    file.getline(buffer.get(), kMaxLineBytes + 2);
    const auto count = static_cast<size_t>(file.gcount());
    if (file.bad()) return bad(fmt::format("{}:{}: cannot read", path, line));
    if (count == 0) break;
    if (file.fail())
      return bad(fmt::format("{}:{}: expected a line of at most {} bytes, got more", path, line, kMaxLineBytes));
    const std::string_view text(buffer.get(), file.eof() ? count : count - 1);
    if (is_blank(text)) {
      if (first_blank == 0) first_blank = line;
      continue;
    }
    if (first_blank != 0) return bad(fmt::format("{}:{}: expected a JSON object, got a blank line", path, first_blank));
    auto request = parse_trace_line(text, line);
    if (!request.ok()) return bad(fmt::format("{}:{}: {}", path, line, request.status().message()));
    requests.push_back(std::move(*request));
  }
  if (requests.empty()) return bad(fmt::format("{}: expected at least one request, got an empty file", path));
  std::stable_sort(requests.begin(), requests.end(),
                   [](const Request& a, const Request& b) { return a.arrival_ms < b.arrival_ms; });
  return requests;
}

}  // namespace mla::cli::replay
