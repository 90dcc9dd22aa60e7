// SPDX-License-Identifier: Apache-2.0
#include "mla/model.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>

#include "core/format.h"

namespace mla {
namespace {

using Json = nlohmann::json;

/// Returns the shape that DeepSeek V2, V3 and Kimi share; they differ in heads, layers, topk and rotary base.
ModelConfig deepseek_shape(const char* name, int32_t num_attention_heads, int32_t num_hidden_layers, int32_t index_topk,
                           double rope_theta) {
  return {.name = name,
          .num_attention_heads = num_attention_heads,
          .num_hidden_layers = num_hidden_layers,
          .kv_lora_rank = 512,
          .qk_nope_head_dim = 128,
          .qk_rope_head_dim = 64,
          .v_head_dim = 128,
          .index_topk = index_topk,
          .rope_theta = rope_theta};
}

Status invalid(std::string_view source, std::string_view what) {
  return {StatusCode::kInvalidArgument, core::format("{}: {}", source, what)};
}

/// Returns the text of a JSON value, shortened to fit an error message.
std::string excerpt(const Json& value) {
  // dump() recurses, and the file may nest values arbitrarily deeply.
  if (value.is_structured()) return value.type_name();
  constexpr size_t kLongest = 40;
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return text;
}

/// Reads an integer of at least `least`. `fallback`, if there is one, replaces a missing or null field.
std::optional<Status> read_int(const Json& object, std::string_view source, const char* field, int32_t least,
                               std::optional<int32_t> fallback, int32_t& value) {
  const auto at = object.find(field);
  if (at == object.end() || at->is_null()) {
    if (!fallback) return invalid(source, core::format("{}: expected an integer, got none", field));
    value = *fallback;
    return std::nullopt;
  }
  constexpr int32_t kMost = 1 << 20;  // far above any model, far below what could overflow a product of two
  const bool integer = at->is_number_integer();
  const bool in_range =
      integer &&
      (at->is_number_unsigned() ? at->get<uint64_t>() <= static_cast<uint64_t>(kMost) && at->get<int64_t>() >= least
                                : at->get<int64_t>() >= least && at->get<int64_t>() <= kMost);
  if (!in_range)
    return invalid(source,
                   core::format("{}: expected an integer from {} to {}, got {}", field, least, kMost, excerpt(*at)));
  value = at->get<int32_t>();
  return std::nullopt;
}

/// Reads rope_theta, which is at the top or, in newer files, inside rope_parameters.
std::optional<Status> read_rope_theta(const Json& object, std::string_view source, double& value) {
  auto at = object.find("rope_theta");
  const auto nested = object.find("rope_parameters");
  if ((at == object.end() || at->is_null()) && nested != object.end() && nested->is_object()) {
    at = nested->find("rope_theta");
    if (at == nested->end()) return std::nullopt;
  } else if (at == object.end()) {
    return std::nullopt;
  }
  if (at->is_null()) return std::nullopt;
  if (!at->is_number() || !std::isfinite(at->get<double>()) || at->get<double>() <= 0.0)
    return invalid(source, core::format("rope_theta: expected a number above 0, got {}", excerpt(*at)));
  value = at->get<double>();
  return std::nullopt;
}

/// Reads the text of a file, or returns the operating system's reason why it cannot be read.
std::optional<std::string> read_file(const std::string& path, std::string& text) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (file.is_open()) text.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  if (file.is_open() && !file.bad()) return std::nullopt;
  return std::system_category().message(errno != 0 ? errno : EIO);
}

bool equal_but_for_case(std::string_view a, std::string_view b) {
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](char x, char y) { return lower(x) == lower(y); });
}

Result<ModelConfig> read_config(const Json& root, std::string_view source) {
  if (!root.is_object()) return invalid(source, core::format("expected a JSON object, got {}", root.type_name()));
  const Json* object = &root;
  const auto text = root.find("text_config");  // multimodal models keep the language model there
  if (!root.contains("kv_lora_rank") && text != root.end() && text->is_object()) object = &*text;
  const auto rank = object->find("kv_lora_rank");
  if (rank == object->end() || rank->is_null()) return invalid(source, "not an MLA model (no kv_lora_rank)");

  ModelConfig config;
  const auto type = object->find("model_type");
  config.name = type != object->end() && type->is_string() ? type->get<std::string>() : std::string(source);
  struct Field {
    const char* name;
    int32_t* value;
    int32_t least;
    std::optional<int32_t> fallback;
  };
  const Field fields[] = {{"kv_lora_rank", &config.kv_lora_rank, 1, std::nullopt},
                          {"num_attention_heads", &config.num_attention_heads, 1, std::nullopt},
                          {"num_hidden_layers", &config.num_hidden_layers, 1, std::nullopt},
                          {"qk_nope_head_dim", &config.qk_nope_head_dim, 1, std::nullopt},
                          {"qk_rope_head_dim", &config.qk_rope_head_dim, 0, std::nullopt},
                          {"v_head_dim", &config.v_head_dim, 1, std::nullopt},
                          {"index_topk", &config.index_topk, 1, 0}};
  for (const Field& field : fields)
    if (auto error = read_int(*object, source, field.name, field.least, field.fallback, *field.value))
      return *std::move(error);
  if (auto error = read_rope_theta(*object, source, config.rope_theta)) return *std::move(error);
  return config;
}

}  // namespace

float ModelConfig::sm_scale() const { return 1.0F / std::sqrt(static_cast<float>(prefill_d_qk())); }

std::span<const ModelConfig> model_presets() {
  // The values are those of the config.json with which each model was published.
  static const std::array presets = {
      deepseek_shape("deepseek-v2-lite", 16, 27, 0, 10000.0),
      deepseek_shape("deepseek-v2", 128, 60, 0, 10000.0),
      deepseek_shape("deepseek-v3", 128, 61, 0, 10000.0),
      deepseek_shape("deepseek-r1", 128, 61, 0, 10000.0),
      deepseek_shape("deepseek-v3.2", 128, 61, 2048, 10000.0),
      deepseek_shape("kimi-k2", 64, 61, 0, 50000.0),
      deepseek_shape("kimi-k2.5", 64, 61, 0, 50000.0),
      ModelConfig{.name = "glm-5",
                  .num_attention_heads = 64,
                  .num_hidden_layers = 78,
                  .kv_lora_rank = 512,
                  .qk_nope_head_dim = 192,
                  .qk_rope_head_dim = 64,
                  .v_head_dim = 256,
                  .index_topk = 2048,
                  .rope_theta = 1000000.0},
      ModelConfig{.name = "deepseek-v4-flash",
                  .num_attention_heads = 64,
                  .num_hidden_layers = 43,
                  .kv_lora_rank = 448,
                  .qk_nope_head_dim = 448,
                  .qk_rope_head_dim = 64,
                  .v_head_dim = 512,
                  .index_topk = 512,
                  .sliding_window = 128,
                  .value_is_row = true},
  };
  return presets;
}

Result<ModelConfig> load_model(std::string_view name_or_path) try {
  std::string known;
  for (const ModelConfig& preset : model_presets()) {
    if (equal_but_for_case(preset.name, name_or_path)) return preset;
    known += (known.empty() ? "" : ", ") + preset.name;
  }
  const std::filesystem::path path(name_or_path);
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored))
    return Status(StatusCode::kInvalidArgument, core::format("model: {} is a directory; did you mean {}?", name_or_path,
                                                             (path / "config.json").string()));
  std::string text;
  if (const auto reason = read_file(path.string(), text))
    return Status(StatusCode::kInvalidArgument,
                  core::format("model: expected a preset ({}) or the path of a config.json, got \"{}\" ({})", known,
                               name_or_path, *reason));
  return parse_model_config(text, name_or_path);
} catch (const std::exception&) {
  return Status(StatusCode::kInternal, "out of memory");
}

Result<ModelConfig> parse_model_config(std::string_view json, std::string_view source) try {
  try {
    return read_config(Json::parse(json), source);
  } catch (const Json::parse_error& error) {
    return invalid(source, core::format("not JSON (at byte {})", error.byte));
  } catch (const Json::exception&) {  // a number that no double can hold
    return invalid(source, "not JSON (a number is out of range)");
  }
} catch (const std::exception&) {
  return Status(StatusCode::kInternal, "out of memory");
}

}  // namespace mla
