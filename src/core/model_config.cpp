// SPDX-License-Identifier: Apache-2.0
// Reads a model's config.json: the shape of its attention, and which layers attend in which way.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/format.h"
#include "mla/model.h"

namespace mla {
namespace {

using Json = nlohmann::json;

constexpr int32_t kMost = 1 << 20;  // far above any model, far below what could overflow a product of two

/// Returns the text of a JSON value, shortened to fit an error message.
std::string excerpt(const Json& value) {
  // dump() recurses, and the file may nest values arbitrarily deeply.
  if (value.is_structured()) return value.type_name();
  constexpr size_t kLongest = 40;
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return text;
}

Status invalid(std::string_view source, std::string_view what) {
  return {StatusCode::kInvalidArgument, core::format("{}: {}", source, what)};
}

bool is_integer(const Json& value, int32_t least, int32_t most) {
  if (!value.is_number_integer()) return false;
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(most)) return false;
  return value.get<int64_t>() >= least && value.get<int64_t>() <= most;
}

/// Reads fields of a JSON object. The first field that is not as expected is the error; what is read afterwards may be
/// anything of its type.
class Fields {
 public:
  Fields(const Json& object, std::string_view source) : object_(object), source_(source) {}

  const Status& status() const { return status_; }
  bool ok() const { return status_.ok(); }
  void refuse(std::string_view field, std::string_view what) {
    if (ok()) status_ = invalid(source_, core::format("{}: {}", field, what));
  }

  bool has(const char* field) const { return find(field) != nullptr; }

  /// Returns a field of text, or nothing.
  std::string text(const char* field) const {
    const Json* at = find(field);
    return at != nullptr && at->is_string() ? at->get<std::string>() : std::string();
  }

  /// Returns an integer of at least `least`. `fallback`, if there is one, replaces a missing or null field.
  int32_t integer(const char* field, int32_t least, std::optional<int32_t> fallback = std::nullopt) {
    const Json* at = find(field);
    if (at == nullptr && fallback) return *fallback;
    if (at == nullptr) {
      refuse(field, "expected an integer, got none");
    } else if (!is_integer(*at, least, kMost)) {
      refuse(field, core::format("expected an integer from {} to {}, got {}", least, kMost, excerpt(*at)));
    } else {
      return at->get<int32_t>();
    }
    return std::max(least, 1);
  }

  /// Returns a list of integers from `least` to `most`; `what` says in errors which they are.
  std::vector<int32_t> integers(const char* field, int32_t least, int32_t most, std::string_view what) {
    std::vector<int32_t> values;
    const Json* at = list(field, what);
    if (at == nullptr) return values;
    for (const Json& value : *at) {
      if (is_integer(value, least, most)) {
        values.push_back(value.get<int32_t>());
      } else {
        refuse(field, core::format("expected {} from {} to {}, got {}", what, least, most, excerpt(value)));
        break;
      }
    }
    return values;
  }

  /// Returns the choice that a list of words makes for each layer, by its number in `choices`; the list may have more
  /// entries than layers, for layers of multi-token prediction.
  std::vector<size_t> choices(const char* field, int32_t layers, std::span<const std::string_view> words) {
    std::string all;
    for (const std::string_view word : words) all += (all.empty() ? "" : ", ") + std::string(word);
    std::vector<size_t> values;
    const Json* at = list(field, "words");
    if (at == nullptr) return values;
    for (const Json& value : *at) {
      const auto word = std::find(words.begin(), words.end(), value.is_string() ? value.get<std::string>() : "");
      if (word == words.end()) {
        refuse(field, core::format("expected {}, got {} for layer {}", all, excerpt(value), values.size()));
        break;
      }
      values.push_back(static_cast<size_t>(word - words.begin()));
    }
    check_length(field, values.size(), layers);
    return values;
  }

  void check_length(const char* field, size_t entries, int32_t layers) {
    if (entries < static_cast<size_t>(layers))
      refuse(field, core::format("expected an entry for each of {} layers, got {}", layers, entries));
  }

  /// Returns the fields of an object, or nothing.
  std::optional<Fields> object(const char* field) const {
    const Json* at = find(field);
    if (at == nullptr || !at->is_object()) return std::nullopt;
    return Fields(*at, source_);
  }
  void take_error(const Fields& nested) {
    if (ok()) status_ = nested.status();
  }

  /// Returns rope_theta, which is at the top or, in newer files, inside rope_parameters.
  double rope_theta(double fallback) {
    const Json* at = find("rope_theta");
    if (at == nullptr)
      if (const Json* nested = find("rope_parameters"); nested != nullptr && nested->is_object())
        at = Fields(*nested, source_).find("rope_theta");
    if (at == nullptr) return fallback;
    if (at->is_number() && std::isfinite(at->get<double>()) && at->get<double>() > 0.0) return at->get<double>();
    refuse("rope_theta", core::format("expected a number above 0, got {}", excerpt(*at)));
    return fallback;
  }

 private:
  const Json* find(const char* field) const {
    const auto at = object_.find(field);
    return at == object_.end() || at->is_null() ? nullptr : &*at;
  }

  const Json* list(const char* field, std::string_view what) {
    const Json* at = find(field);
    if (at != nullptr && at->is_array()) return at;
    refuse(field, core::format("expected a list of {}, got {}", what, at == nullptr ? "none" : excerpt(*at)));
    return nullptr;
  }

  const Json& object_;
  std::string_view source_;
  Status status_;
};

/// Counts one more layer of a kind.
void add_layer(std::vector<LayerKind>& kinds, LayerKind kind, int32_t count = 1) {
  for (LayerKind& known : kinds) {
    kind.count = known.count;
    if (kind != known) continue;
    known.count += count;
    return;
  }
  kind.count = count;
  kinds.push_back(std::move(kind));
}

std::string name_of(const LayerKind& kind, bool pools_are_shared) {
  if (kind.draft_block > 0) return core::format("draft of {}", kind.draft_block);
  // Of layers that share, one says what it is to the others.
  const std::string_view reads = kind.index_topk > 0 && kind.index_heads == 0 ? ", reader" : "";
  if (kind.compress_ratio > 0) {
    const std::string_view role = kind.owns_pool ? ", source" : kind.index_heads > 0 ? ", indexer" : ", reader";
    return core::format("ratio {}{}", kind.compress_ratio, pools_are_shared ? role : "");
  }
  if (kind.sliding_window > 0) return "sliding window";
  return kind.index_topk > 0 ? core::format("sparse{}", reads) : "dense";
}

/// Reads the indexer of layers that choose keys by one.
void read_indexer(Fields& fields, LayerKind& kind) {
  // 64 heads of 128 are what DeepSeek V3.2 has; files of the first sparse models may leave them out.
  kind.index_heads = fields.integer("index_n_heads", 1, 64);
  kind.index_head_dim = fields.integer("index_head_dim", 1, 128);
}

LayerKind without_indexer(LayerKind kind) {
  kind.index_heads = kind.index_head_dim = 0;
  kind.candidates = CandidateBlocks::kNone;
  return kind;
}

bool contains(const std::vector<int32_t>& values, int32_t value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

/// Reads the layers of DeepSeek V4 and V4.1, which see a window and, by compress_ratios, a pool of compressed rows.
void read_compressed_layers(Fields& fields, ModelConfig& config) {
  const bool shares = fields.has("kv_source_layer_ids");  // V4.1
  LayerKind window{static_cast<const AttentionShape&>(config)};
  window.sliding_window = config.sliding_window = fields.integer("sliding_window", 1);
  window.attn_sink = true;
  config.index_topk = fields.integer("index_topk", 1);
  LayerKind pooled = window;
  pooled.index_topk = config.index_topk;
  read_indexer(fields, pooled);
  config.index_n_heads = pooled.index_heads;

  const std::vector<int32_t> ratios = fields.integers("compress_ratios", 0, kMost, "integers");
  fields.check_length("compress_ratios", ratios.size(), config.num_hidden_layers);
  std::vector<int32_t> pool_owners, choosers;
  int32_t candidate_source = kMost;
  if (shares) {
    const int32_t last = config.num_hidden_layers - 1;
    pool_owners = fields.integers("kv_source_layer_ids", 0, last, "layers");
    choosers = fields.integers("index_source_layer_ids", 0, last, "layers");
    candidate_source = fields.integer("candidate_source_layer_id", 0, kMost);
  }
  if (!fields.ok()) return;
  for (int32_t i = 0; i < config.num_hidden_layers; ++i) {
    const int32_t ratio = ratios[static_cast<size_t>(i)];
    const bool known = shares ? ratio <= 2 : ratio == 0 || ratio == 4 || ratio == 128;
    if (!known)
      return fields.refuse("compress_ratios", core::format("expected {}, got {} for layer {}",
                                                           shares ? "0, 1 or 2" : "0, 4 or 128", ratio, i));
    if (ratio == 0) {
      add_layer(config.layers, window);
      continue;
    }
    const auto has_ratio = [&](int32_t source) { return source <= i && ratios[static_cast<size_t>(source)] == ratio; };
    const std::pair<const char*, const std::vector<int32_t>&> sources[] = {{"kv_source_layer_ids", pool_owners},
                                                                           {"index_source_layer_ids", choosers}};
    for (const auto& [field, layers] : sources)
      if (shares && std::none_of(layers.begin(), layers.end(), has_ratio))
        return fields.refuse(
            field, core::format("expected a layer with compress ratio {} up to layer {}, got none", ratio, i));
    LayerKind layer = pooled;
    layer.compress_ratio = ratio;
    layer.owns_pool = !shares || contains(pool_owners, i);
    // V4 attends to all rows that stand for 128 tokens, and chooses among those of 4.
    if (!shares && ratio == 128) layer.index_topk = 0;
    if (shares && i >= candidate_source)
      layer.candidates = i == candidate_source ? CandidateBlocks::kPicks : CandidateBlocks::kWithin;
    const bool chooses = shares ? contains(choosers, i) : ratio == 4;
    add_layer(config.layers, chooses ? layer : without_indexer(layer));
  }
  // Drafts are of layers behind the others, all of which see their window alone.
  if (const int32_t block = fields.integer("dspark_block_size", 1, 0); block > 0) {
    window.draft_block = block;
    if (const int32_t drafting = fields.integer("num_nextn_predict_layers", 0, 0); drafting > 0)
      add_layer(config.layers, window, drafting);
  }
}

/// Says how a layer of a model with a latent cache attends.
enum class Attends : uint8_t { kNo, kAll, kWindow };

std::vector<Attends> read_attending(Fields& fields, const ModelConfig& config) {
  std::vector<Attends> attends(static_cast<size_t>(config.num_hidden_layers), Attends::kAll);
  constexpr std::string_view kTypes[] = {"linear_attention",          "sliding_attention", "full_attention",
                                         "deepseek_sparse_attention", "sparse_attention",  "indexed_attention"};
  if (fields.has("layer_types")) {
    const std::vector<size_t> types = fields.choices("layer_types", config.num_hidden_layers, kTypes);
    for (size_t i = 0; fields.ok() && i < attends.size(); ++i)
      attends[i] = types[i] == 0 ? Attends::kNo : types[i] == 1 ? Attends::kWindow : Attends::kAll;
  } else if (std::optional<Fields> linear = fields.object("linear_attn_config")) {
    // Kimi counts layers from 1.
    std::fill(attends.begin(), attends.end(), Attends::kNo);
    for (const int32_t layer : linear->integers("full_attn_layers", 1, config.num_hidden_layers, "layers"))
      attends[static_cast<size_t>(layer - 1)] = Attends::kAll;
    fields.take_error(*linear);
  }
  return attends;
}

/// Returns which layers of a model with index_topk have an indexer; the others read what the last one before them
/// chose.
std::vector<bool> read_choosers(Fields& fields, const ModelConfig& config) {
  std::vector<bool> choosers(static_cast<size_t>(config.num_hidden_layers));
  constexpr std::string_view kTypes[] = {"shared", "full"};
  if (fields.has("indexer_types")) {
    const std::vector<size_t> types = fields.choices("indexer_types", config.num_hidden_layers, kTypes);
    for (size_t i = 0; fields.ok() && i < choosers.size(); ++i) choosers[i] = types[i] == 1;
    return choosers;
  }
  if (fields.has("index_topk_pattern")) {
    const std::string pattern = fields.text("index_topk_pattern");
    if (pattern.empty() || pattern.find_first_not_of("FS") != std::string::npos)
      fields.refuse("index_topk_pattern", "expected text of F and S");
    fields.check_length("index_topk_pattern", pattern.size(), config.num_hidden_layers);
    for (size_t i = 0; fields.ok() && i < choosers.size(); ++i) choosers[i] = pattern[i] == 'F';
    return choosers;
  }
  const int32_t frequency = fields.integer("index_topk_freq", 1, 1);
  const int32_t offset = fields.integer("index_skip_topk_offset", 0, 2);
  for (int32_t i = 0; i < config.num_hidden_layers; ++i)
    choosers[static_cast<size_t>(i)] = std::max(i - offset + 1, 0) % frequency == 0;
  return choosers;
}

/// Reads the layers of models with a latent cache, all of which attend to all keys, to chosen ones or to a window.
void read_latent_layers(Fields& fields, ModelConfig& config) {
  LayerKind all{static_cast<const AttentionShape&>(config)};
  all.attn_sink = fields.text("model_type") == "hy_v4";  // no field of Hy4's file says so
  config.index_topk = all.index_topk = fields.integer("index_topk", 1, 0);
  if (config.index_topk > 0) {
    read_indexer(fields, all);
    config.index_n_heads = all.index_heads;
    all.index_pooled = fields.integer("index_kpool", 1, 1);
  }
  const std::vector<Attends> attends = read_attending(fields, config);
  const std::vector<bool> choosers = read_choosers(fields, config);
  LayerKind window;
  if (std::find(attends.begin(), attends.end(), Attends::kWindow) != attends.end()) {
    // dots3 gives layers with a window a shape of their own, and counts a query into its window.
    const bool own = fields.has("swa_kv_lora_rank");
    window.num_attention_heads = fields.integer(own ? "swa_num_attention_heads" : "num_attention_heads", 1);
    window.kv_lora_rank = fields.integer(own ? "swa_kv_lora_rank" : "kv_lora_rank", 1);
    window.qk_nope_head_dim = fields.integer(own ? "swa_qk_nope_head_dim" : "qk_nope_head_dim", 1);
    window.qk_rope_head_dim = fields.integer(own ? "swa_qk_rope_head_dim" : "qk_rope_head_dim", 0);
    window.v_head_dim = fields.integer(own ? "swa_v_head_dim" : "v_head_dim", 1);
    window.sliding_window =
        fields.integer(fields.has("sliding_window_size") ? "sliding_window_size" : "sliding_window", 1);
  }
  if (!fields.ok()) return;
  bool chosen = false;
  for (size_t i = 0; i < attends.size(); ++i) {
    if (attends[i] == Attends::kWindow) add_layer(config.layers, window);
    if (attends[i] != Attends::kAll) continue;
    chosen = chosen || choosers[i];
    if (config.index_topk > 0 && !chosen)
      return fields.refuse("indexer_types", core::format("expected full before shared, got shared for layer {}", i));
    add_layer(config.layers, config.index_topk > 0 && choosers[i] ? all : without_indexer(all));
  }
  if (config.layers.empty()) fields.refuse("layer_types", "expected a layer that attends, got none");
}

/// Returns whether layers read the second pool of other layers (V4.1).
bool shares_pools(const ModelConfig& config) {
  return std::any_of(config.layers.begin(), config.layers.end(),
                     [](const LayerKind& layer) { return layer.compress_ratio > 0 && !layer.owns_pool; });
}

/// Lists the formats in which engines serve such layers. What a row holds decides, not the model's name.
std::vector<CachePair> served_caches(const ModelConfig& config) {
  if (config.value_is_row) {
    if (shares_pools(config)) return {{CacheFormat::kFP8DsV41, CacheFormat::kFP4DsV41}};
    return {{CacheFormat::kFP8DsV4, CacheFormat::kFP8DsV4}};
  }
  std::vector<CachePair> all = {{CacheFormat::kBF16, CacheFormat::kBF16}};
  const CacheFormat quantized = config.index_topk == 0         ? CacheFormat::kFP8
                                : config.qk_rope_head_dim == 0 ? CacheFormat::kFP8Nope
                                                               : CacheFormat::kFP8DsMla;
  const KvLayout layout = kv_layout(quantized);
  const bool fits = std::all_of(config.layers.begin(), config.layers.end(), [&](const LayerKind& layer) {
    return !layout.is_packed() || layer.d_qk() == layout.nope_dim + layout.rope_dim;
  });
  if (fits) all.push_back({quantized, quantized});
  return all;
}

Result<ModelConfig> read_config(const Json& root, std::string_view source) {
  if (!root.is_object()) return invalid(source, core::format("expected a JSON object, got {}", root.type_name()));
  const Json* object = &root;
  const auto text = root.find("text_config");  // multimodal models keep the language model there
  if (!root.contains("kv_lora_rank") && text != root.end() && text->is_object()) object = &*text;
  Fields fields(*object, source);
  ModelConfig config;
  config.value_is_row = fields.has("compress_ratios");
  if (!config.value_is_row && !fields.has("kv_lora_rank")) return invalid(source, "not an MLA model (no kv_lora_rank)");

  config.name = fields.text("model_type");
  if (config.name.empty()) config.name = source;
  if (config.value_is_row) {
    config.v_head_dim = fields.integer("head_dim", 1);
    config.qk_rope_head_dim = fields.integer("qk_rope_head_dim", 0);
    config.kv_lora_rank = config.qk_nope_head_dim = config.v_head_dim - config.qk_rope_head_dim;
    if (config.kv_lora_rank < 1)
      fields.refuse("head_dim", core::format("expected more than qk_rope_head_dim, {}, got {}", config.qk_rope_head_dim,
                                             config.v_head_dim));
  } else {
    config.kv_lora_rank = fields.integer("kv_lora_rank", 1);
  }
  config.num_attention_heads = fields.integer("num_attention_heads", 1);
  // LongCat counts its layers in pairs.
  const bool pairs = !fields.has("num_hidden_layers") && fields.has("num_layers");
  config.num_hidden_layers = pairs ? 2 * fields.integer("num_layers", 1) : fields.integer("num_hidden_layers", 1);
  if (!config.value_is_row) {
    config.qk_nope_head_dim = fields.integer("qk_nope_head_dim", 1);
    config.qk_rope_head_dim = fields.integer("qk_rope_head_dim", 0);
    config.v_head_dim = fields.integer("v_head_dim", 1);
  }
  if (fields.ok()) (config.value_is_row ? read_compressed_layers : read_latent_layers)(fields, config);
  config.rope_theta = fields.rope_theta(config.rope_theta);
  if (!fields.ok()) return fields.status();
  config.caches = served_caches(config);
  const bool pools_are_shared = shares_pools(config);
  for (LayerKind& layer : config.layers) layer.name = name_of(layer, pools_are_shared);
  return config;
}

}  // namespace

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
