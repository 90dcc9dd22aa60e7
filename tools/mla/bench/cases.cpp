// SPDX-License-Identifier: Apache-2.0
#include "mla/bench/cases.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <numeric>

#include "mla/backend.h"
#include "mla/model.h"
#include "mla/problems.h"
#include "mla/shipped.h"
#include "mla/text.h"
#include "mla/values.h"

namespace mla::bench {
namespace {

using cli::UsageError;

constexpr int64_t kLongest = int64_t{1} << 30;
constexpr size_t kMaxCases = 10000;

// One value of every key.
using Choice = std::map<std::string_view, Setting, std::less<>>;

const Setting* find(const Choice& choice, std::string_view key) {
  const auto it = choice.find(key);
  return it == choice.end() ? nullptr : &it->second;
}

int64_t int_of(const Choice& choice, std::string_view key, int64_t fallback, int64_t min, int64_t max) {
  const Setting* setting = find(choice, key);
  return setting == nullptr ? fallback : cli::parse_int(setting->where, setting->text, min, max);
}

bool bool_of(const Choice& choice, std::string_view key, bool fallback) {
  const Setting* setting = find(choice, key);
  if (setting == nullptr) return fallback;
  if (setting->text == "true") return true;
  if (setting->text == "false") return false;
  throw UsageError("{}: expected true or false, got '{}'", setting->where, setting->text);
}

void set_head_dims(const Choice& choice, const ModelConfig* model, Case& result) {
  const bool prefill = result.op == Op::kPrefill;
  const KvLayout layout = kv_layout(result.cache);
  result.d_qk = prefill ? 192 : layout.is_packed() ? layout.nope_dim + layout.rope_dim : 576;
  result.d_v = prefill ? 128 : 512;
  if (model != nullptr) {
    result.d_qk = prefill ? model->prefill_d_qk() : model->d_qk();
    result.d_v = prefill ? model->v_head_dim : model->d_v();
  }
  const Setting* dims = find(choice, "head_dims");
  for (const std::string_view key : {"d_qk", "d_v"})
    if (const Setting* one = find(choice, key); one != nullptr && dims != nullptr)
      throw UsageError("{}: {} was given too", one->where, dims->where);
  result.d_qk = int_of(choice, "d_qk", result.d_qk, 1, 65536);
  result.d_v = int_of(choice, "d_v", result.d_v, 1, 65536);
  if (dims == nullptr) return;
  const size_t slash = dims->text.find('/');
  if (slash == std::string::npos)
    throw UsageError("{}: expected d_qk/d_v such as 576/512, got '{}'", dims->where, dims->text);
  result.d_qk = cli::parse_int(dims->where, dims->text.substr(0, slash), 1, 65536);
  result.d_v = cli::parse_int(dims->where, dims->text.substr(slash + 1), 1, 65536);
}

bool is_indexer(Op op) { return op == Op::kIndexerLogits || op == Op::kIndexerTopK; }
bool takes_topk(Op op) {
  return op == Op::kDecodeSparse || op == Op::kPrefillSparse || op == Op::kPhysicalSlots || op == Op::kTopK ||
         op == Op::kIndexerTopK;
}

bool can_finish(Op op) { return op == Op::kFinishOutput || op == Op::kDecodeSparse; }

// Operations that each key means something to; a case file's defaults may hold keys that others ignore.
struct KeyUse {
  std::string_view key;
  bool (*used)(Op op);
};
constexpr KeyUse kKeyUses[] = {
    {"states", [](Op op) { return op == Op::kMergeStates; }},
    {"topk", takes_topk},
    {"extra_topk", [](Op op) { return op == Op::kDecodeSparse; }},
    {"extra_page_size", [](Op op) { return op == Op::kDecodeSparse; }},
    {"extra_cache", [](Op op) { return op == Op::kDecodeSparse; }},
    {"pool_tokens", [](Op op) { return op == Op::kDecodeSparse; }},
    {"to_cache", [](Op op) { return op == Op::kCopyPages; }},
    {"to_page_size", [](Op op) { return op == Op::kCopyPages; }},
    {"scales", [](Op op) { return cli::has_cache(op) || op == Op::kAppendIndexer || op == Op::kFinishOutput; }},
    {"sink", cli::is_attention},
    {"soft_cap", cli::is_attention},
    {"compute", [](Op op) { return cli::chooses_compute(op); }},
    {"window", [](Op op) { return op == Op::kDecode || op == Op::kPrefill; }},
    {"alibi", [](Op op) { return op == Op::kDecode || op == Op::kPrefill; }},
    {"tree", [](Op op) { return op == Op::kDecode; }},
    {"dcp", [](Op op) { return op == Op::kDecode; }},
    {"prefix", [](Op op) { return op == Op::kDecode; }},
    {"shared_prefix", [](Op op) { return op == Op::kDecode; }},
    {"ratio", [](Op op) { return op == Op::kCompress || op == Op::kPhysicalSlots || is_indexer(op); }},
    {"list_tokens", [](Op op) { return op == Op::kPhysicalSlots || op == Op::kIndexerTopK; }},
    {"blocks", is_indexer},
    {"block_size", [](Op op) { return op == Op::kTopK || is_indexer(op); }},
    {"overlap", [](Op op) { return op == Op::kCompress; }},
    {"compress_to", [](Op op) { return op == Op::kCompress; }},
    {"append", [](Op op) { return op == Op::kCompress; }},
    {"norm", [](Op op) { return op == Op::kAppendRope; }},
    {"finish", [](Op op) { return op == Op::kDecodeSparse; }},
    {"out_dtype", can_finish},
    {"gate", can_finish},
    {"logits_dtype", [](Op op) { return op == Op::kTopK || is_indexer(op); }},
    {"indexer_format", [](Op op) { return cli::is_indexer(op) || op == Op::kCompress; }},
};

// Keys that would change nothing are mistakes.
void check_uses(const Choice& choice, Op op) {
  for (const KeyUse& use : kKeyUses)
    if (const Setting* setting = find(choice, use.key); setting != nullptr && !use.used(op))
      throw UsageError("{}: has no meaning for {}", setting->where, name(op));
  if (op == Op::kDecodeSparse)
    for (std::string_view key : {"kv_len", "trace", "causal"})
      if (const Setting* setting = find(choice, key); setting != nullptr)
        throw UsageError("{}: has no meaning for decode_sparse, whose keys are topk of pool_tokens", setting->where);
}

template <class T>
T one_of(const Choice& choice, std::string_view key, T fallback,
         std::initializer_list<std::pair<std::string_view, T>> values) {
  const Setting* setting = find(choice, key);
  if (setting == nullptr) return fallback;
  std::string names;
  for (const auto& [text, value] : values) {
    if (setting->text == text) return value;
    names += (names.empty() ? "" : ", ") + std::string(text);
  }
  throw UsageError("{}: expected one of {}, got '{}'", setting->where, names, setting->text);
}

// Keys, pools and scales.
void set_sparse(const Choice& choice, const ModelConfig* model, Case& result) {
  if (!takes_topk(result.op)) return;
  const int64_t usual = model != nullptr && model->index_topk > 0 ? model->index_topk : 2048;
  result.topk = int_of(choice, "topk", usual, 1, 1 << 20);
  result.extra_topk = int_of(choice, "extra_topk", 0, 0, 1 << 20);
  result.extra_page_size = int_of(choice, "extra_page_size", 64, 1, 1 << 20);
}

// Groups of tokens that share a key or a row, and blocks of keys.
void set_groups(const Choice& choice, Case& result) {
  if (result.op != Op::kCompress) result.ratio = int_of(choice, "ratio", 1, 1, 1 << 16);
  result.list_tokens = bool_of(choice, "list_tokens", false);
  result.blocks = int_of(choice, "blocks", 0, 0, 1 << 20);
  result.block_size = int_of(choice, "block_size", result.blocks > 0 ? 8 : 1, 1, 1 << 16);
  const Setting* size = find(choice, "block_size");
  if (size != nullptr && is_indexer(result.op) && result.blocks == 0)
    throw UsageError("{}: has no meaning without listed blocks (blocks)", size->where);
}

// Compressors: V4's, unless it is said.
void set_compressor(const Choice& choice, Case& result) {
  using To = kit::CompressSpec::To;
  if (result.op != Op::kCompress) return;
  result.ratio = int_of(choice, "ratio", 4, 1, 1 << 16);
  result.overlap = bool_of(choice, "overlap", result.ratio == 4);
  result.compress_to = one_of<To>(choice, "compress_to", To::kCache,
                                  {{"cache", To::kCache}, {"indexer", To::kIndexer}, {"latents", To::kLatents}});
  if (const Setting* append = find(choice, "append"); append != nullptr && append->text != "none")
    result.append = cli::parse_cache(append->where, append->text);
  if (result.ratio == 1 && result.overlap)
    throw UsageError("{}: a ratio of 1 has no overlap", find(choice, "overlap")->where);
  if (find(choice, "head_dims") != nullptr) return;
  if (result.compress_to == To::kIndexer)
    result.d_qk = result.d_v = kIndexerLayout.head_dim;
  else if (!kv_layout(result.cache).is_packed())
    result.d_qk = result.d_v = 512;
}

// The type of the logits, and the format of the indexer's keys, which says what scales these can have.
void set_keys(const Choice& choice, Case& result) {
  if (const Setting* logits = find(choice, "logits_dtype"))
    result.logits_dtype = cli::parse_float_dtype(logits->where, logits->text, false);
  const Setting* format = find(choice, "indexer_format");
  if (format == nullptr) return;
  result.indexer_format = cli::parse_indexer(format->where, format->text);
  if (result.op == Op::kCompress && result.compress_to != kit::CompressSpec::To::kIndexer)
    throw UsageError("{}: has no meaning without latents that go to the indexer's cache (compress_to)", format->where);
  if (result.scales != Scales::kPowersOfTwo &&
      indexer_layout(result.indexer_format).codec.scale_type == ScaleType::kUE8M0)
    throw UsageError("{}: scales of {} keys are powers of two", find(choice, "scales")->where,
                     name(result.indexer_format));
}

void set_options(const Choice& choice, Case& result) {
  const auto cache_of = [&](std::string_view key) {
    const Setting* setting = find(choice, key);
    return setting != nullptr ? cli::parse_cache(setting->where, setting->text) : result.cache;
  };
  result.to_cache = cache_of("to_cache");
  result.extra_cache = cache_of("extra_cache");
  result.to_page_size = int_of(choice, "to_page_size", result.page_size, 1, 1 << 20);
  result.scales =
      one_of<Scales>(choice, "scales", Scales::kPowersOfTwo,
                     {{"pow2", Scales::kPowersOfTwo}, {"f32", Scales::kF32}, {"per-slot", Scales::kPerSlot}});
  if (result.scales == Scales::kPerSlot && kv_layout(result.cache).nope.scale_place != ScalePlace::kTensor)
    throw UsageError("{}: per-slot scales are those of a cache of fp8, got {}", find(choice, "scales")->where,
                     name(result.cache));
  using Gate = kit::FinishSpec::Gate;
  result.norm = bool_of(choice, "norm", false);
  result.finishes = result.op == Op::kFinishOutput || bool_of(choice, "finish", false);
  for (std::string_view key : {"out_dtype", "gate"})
    if (const Setting* setting = find(choice, key); setting != nullptr && !result.finishes)
      throw UsageError("{}: has no meaning without finish", setting->where);
  if (const Setting* out = find(choice, "out_dtype"))
    result.out_dtype = cli::parse_float_dtype(out->where, out->text, true);
  result.gate = one_of<Gate>(choice, "gate", Gate::kNone,
                             {{"none", Gate::kNone}, {"head", Gate::kHead}, {"channel", Gate::kChannel}});
  result.sink = bool_of(choice, "sink", false);
  result.alibi = bool_of(choice, "alibi", false);
  result.window = int_of(choice, "window", -1, -1, kLongest);
  if (const Setting* cap = find(choice, "soft_cap"))
    result.soft_cap = cli::parse_positive(cap->where, "a cap", cap->text);
  if (const Setting* compute = find(choice, "compute"))
    result.compute = cli::parse_compute(compute->where, compute->text);
  result.tree =
      one_of<kit::Tree>(choice, "tree", kit::Tree::kNone,
                        {{"none", kit::Tree::kNone}, {"mask", kit::Tree::kMask}, {"parents", kit::Tree::kParents}});
  result.dcp = int_of(choice, "dcp", 1, 1, 1024);
}

void set_uniform_lengths(const Choice& choice, Case& result) {
  const int64_t batch = int_of(choice, "batch", 1, 1, 65536);
  const bool sparse = result.op == Op::kDecodeSparse;
  const int64_t kv_len =
      sparse ? int_of(choice, "pool_tokens", 65536, 1, kLongest) : int_of(choice, "kv_len", 4096, 0, kLongest);
  const int64_t default_q_len = result.op == Op::kPrefill         ? std::max<int64_t>(kv_len, 1)
                                : result.op == Op::kPrefillSparse ? 128
                                                                  : 1;
  const int64_t q_len = int_of(choice, "q_len", default_q_len, 1, kLongest);
  result.lengths = "uniform";
  result.requests.assign(static_cast<size_t>(batch), Request{.q_len = q_len, .kv_len = kv_len});
}

// Ragged lengths of a trace, and equal ones of the same total to compare with.
std::vector<Case> trace_cases(const Choice& choice, const Setting& trace, const Case& prototype) {
  for (std::string_view key : {"kv_len", "batch_spec"})
    if (const Setting* other = find(choice, key); other != nullptr)
      throw UsageError("{}: the lengths come from a trace already ({})", other->where, trace.where);
  const int64_t count = int_of(choice, "batch", 64, 1, 65536);
  const int64_t clip = int_of(choice, "clip", 16384, 1, kLongest);
  const int64_t q_len = int_of(choice, "q_len", 1, 1, kLongest);
  const std::vector<int64_t> kv_len = read_trace_lengths(trace.where, shipped(trace.text), count, clip);
  const auto q_len_for = [&](int64_t kv) {
    return prototype.op == Op::kPrefill && find(choice, "q_len") == nullptr ? kv : q_len;
  };
  const int64_t total = std::accumulate(kv_len.begin(), kv_len.end(), int64_t{0});
  Case equal = prototype, ragged = prototype;
  equal.lengths = "equal";
  ragged.lengths = "trace";
  for (int64_t i = 0; i < count; ++i) {
    const int64_t share = total / count + (i < total % count ? 1 : 0);
    equal.requests.push_back({.q_len = q_len_for(share), .kv_len = share});
    const int64_t own = kv_len[static_cast<size_t>(i)];
    ragged.requests.push_back({.q_len = q_len_for(own), .kv_len = own});
  }
  return {std::move(equal), std::move(ragged)};
}

std::vector<Case> make_cases(const Choice& choice, std::string_view label) {
  Case result;
  result.label = label;
  if (const Setting* op = find(choice, "op")) result.op = cli::parse_op(op->where, op->text);
  std::optional<ModelConfig> model;
  if (const Setting* setting = find(choice, "model")) {
    model = cli::parse_model(setting->where, setting->text);
    result.heads = model->num_attention_heads;
    result.sm_scale = model->sm_scale();
  }
  check_uses(choice, result.op);
  // What works on no cache ignores the format: it may stand there for other operations of the same list or file.
  if (const Setting* cache = find(choice, "cache")) {
    const CacheFormat format = cli::parse_cache(cache->where, cache->text);
    if (cli::has_cache(result.op)) result.cache = format;
  } else if (model && cli::has_cache(result.op) && result.op != Op::kPrefillSparse) {
    result.cache = model->caches.front().cache;
  }
  set_head_dims(choice, model ? &*model : nullptr, result);
  // Queries are of the cache's type where that is a type of queries; partial states are f32, the indexer's queries
  // e4m3.
  result.q_dtype = value_dtype(kv_layout(result.cache).nope.element);
  if (result.op == Op::kMergeStates) result.q_dtype = DType::kF32;
  if (is_indexer(result.op)) {
    result.q_dtype = DType::kE4M3;
    if (!model) result.heads = 64;
    if (model && model->index_n_heads > 0) result.heads = model->index_n_heads;
  }
  const bool quantized = cli::chooses_compute(result.op);
  if (const Setting* q = find(choice, "q_dtype")) result.q_dtype = cli::parse_float_dtype(q->where, q->text, quantized);
  result.heads = int_of(choice, "heads", result.heads, 1, 65536);
  result.page_size = int_of(choice, "page_size", 64, 1, 1 << 20);
  result.states = int_of(choice, "states", 2, 1, 65536);
  set_sparse(choice, model ? &*model : nullptr, result);
  set_groups(choice, result);
  set_compressor(choice, result);
  set_options(choice, result);
  set_keys(choice, result);
  result.causal = bool_of(choice, "causal", true);
  result.batch_invariant = bool_of(choice, "batch_invariant", false);
  result.prefix = int_of(choice, "prefix", 0, 0, 1 << 30);
  result.shared_prefix = bool_of(choice, "shared_prefix", false);
  result.threads = static_cast<int32_t>(int_of(choice, "threads", 0, 0, 4096));
  if (result.threads == 0) result.threads = machine_info().threads;
  if (const Setting* backend = find(choice, "backend")) {
    cli::check_backend_name(backend->where, backend->text);
    if (backend->text != "auto") result.backend = backend->text;
  }
  if (const Setting* device = find(choice, "device")) result.device = cli::parse_device(device->where, device->text);
  if (const Setting* trace = find(choice, "trace")) return trace_cases(choice, *trace, result);
  if (const Setting* clip = find(choice, "clip"))
    throw UsageError("{}: only lengths of a trace are clipped, and none was given", clip->where);
  if (const Setting* spec = find(choice, "batch_spec")) {
    for (std::string_view key : {"batch", "q_len", "kv_len"})
      if (const Setting* other = find(choice, key); other != nullptr)
        throw UsageError("{}: a batch specification was given too ({})", other->where, spec->where);
    result.lengths = spec->text;
    result.requests = parse_batch_spec(spec->where, spec->text);
  } else {
    set_uniform_lengths(choice, result);
  }
  return {std::move(result)};
}

bool is_int_list(std::string_view key) {
  constexpr std::string_view kIntKeys[] = {"heads",       "batch",  "q_len",           "kv_len",       "page_size",
                                           "states",      "topk",   "extra_topk",      "clip",         "threads",
                                           "pool_tokens", "dcp",    "extra_page_size", "to_page_size", "prefix",
                                           "ratio",       "blocks", "block_size",      "d_qk",         "d_v"};
  return std::find(std::begin(kIntKeys), std::end(kIntKeys), key) != std::end(kIntKeys);
}

std::vector<std::string> values_of(std::string_view key, const Setting& setting) {
  if (!is_int_list(key)) return cli::split_list(setting.where, setting.text);
  std::vector<std::string> values;
  for (int64_t value : cli::parse_int_list(setting.where, setting.text, 0)) values.push_back(std::to_string(value));
  return values;
}

// A command line that asks for cache formats where no operation has a cache is a mistake.
void check_cache_flag(const Settings& settings) {
  const auto cache = settings.find("cache"), op = settings.find("op");
  if (cache == settings.end() || op == settings.end() || !cache->second.where.starts_with("--")) return;
  const std::vector<std::string> ops = values_of("op", op->second);
  if (std::none_of(ops.begin(), ops.end(),
                   [&](const std::string& one) { return cli::has_cache(cli::parse_op(op->second.where, one)); }))
    throw UsageError("{}: {} works on no cache; its element type is --q-dtype", cache->second.where, ops.front());
}

}  // namespace

int64_t Case::total_queries() const {
  return std::accumulate(requests.begin(), requests.end(), int64_t{0},
                         [](int64_t sum, const Request& request) { return sum + request.q_len; });
}

int64_t Case::total_kv() const {
  return std::accumulate(requests.begin(), requests.end(), int64_t{0},
                         [](int64_t sum, const Request& request) { return sum + request.kv_len; });
}

bool Case::ragged() const {
  return std::any_of(requests.begin(), requests.end(), [&](const Request& r) { return r != requests.front(); });
}

const std::vector<SettingKey>& setting_keys() {
  static const std::string formats = "Cache formats: " + cli::cache_names();
  static const std::string indexer_formats = "Formats of the indexer's keys: " + cli::indexer_names() + " (fp8)";
  static const std::vector<SettingKey> keys = {
      {"op", "An operation: decode, decode_sparse, append, ... (libmla info --markdown lists them)"},
      {"model", "Preset, config.json or its folder: heads, head dims, topk"},
      {"head_dims", "d_qk/d_v, such as 576/512 (decode) or 192/128 (prefill)"},
      {"d_qk", "Channels of a query and of a key, alone"},
      {"d_v", "Channels of an output, alone"},
      {"cache", formats},
      {"scales", "fp8: pow2 and f32 one scale, per-slot four per token; fp8_ds_mla, fp8_nope: pow2 or f32"},
      {"q_dtype",
       "Type of queries or of q, k and v (prefill), both also e4m3, of rows (cache tools) or of partial states"},
      {"heads", "Query heads", "num_heads"},
      {"batch", "Requests"},
      {"q_len", "Query or new tokens of each request (prefill: all of kv-len)"},
      {"kv_len", "Tokens of each request (prefill_sparse: keys; top_k: logits)"},
      {"batch_spec", "Batches such as 8q1s4k or 2q2k_32q1s1k"},
      {"trace", "Take kv lengths from a trace, and compare with equal lengths of the same total"},
      {"clip", "Longest length taken from the trace (16k)"},
      {"page_size", "Tokens of a cache page"},
      {"topk", "Indices of each query, or logits to select (2048, or the model's)"},
      {"pool_tokens", "Tokens of the pool that the indices point into (decode_sparse; 64k)"},
      {"extra_topk", "Indices of each query into a second pool (decode_sparse)"},
      {"extra_page_size", "Tokens of a page of the second pool"},
      {"extra_cache", "Format of the second pool (that of the first)"},
      {"to_cache", "Format that pages are copied into (copy_pages)"},
      {"to_page_size", "Tokens of a page that is copied into"},
      {"sink", "Attention sinks: true, false", "attn_sink"},
      {"window", "Tokens before its own that a query sees; -1 all", "window_left"},
      {"soft_cap", "Cap of the logits", "logits_soft_cap"},
      {"alibi", "ALiBi slopes: true, false", "alibi_slopes"},
      {"compute",
       "decode, decode_sparse, prefill: default, or fp8 for products of e4m3; indexer_logits, indexer_top_k: default, "
       "or exact for sums of f32"},
      {"tree", "Draft tree of the last q-len tokens: none, mask, parents"},
      {"dcp", "Ranks that share the tokens; measured is the first one's part"},
      {"states", "Partial states (only merge_states)"},
      {"causal", "true, false"},
      {"batch_invariant", "true, false"},
      {"prefix", "Tokens, in whole pages, that all requests begin with (decode)"},
      {"shared_prefix", "Read those once: true, false"},
      {"ratio", "Tokens of a group: compress (4), the indexer's keys, physical_slots' indices (1)"},
      {"list_tokens", "Whether physical_slots and indexer_top_k list all tokens of a group: true, false"},
      {"blocks", "Blocks of keys listed for each query (indexer_logits, indexer_top_k; 0: none)"},
      {"block_size", "Keys of a listed block (8); top_k: logits of a block that is chosen (1)"},
      {"overlap", "Whether compress pools the group before too: true, false (as V4's ratio of 4)"},
      {"compress_to", "Where its latents go: cache, indexer, latents"},
      {"append", "Format of a window that it appends keys of the same tokens to, normalized; none"},
      {"norm", "Whether append_rope normalizes queries and keys: true, false"},
      {"finish", "true: decode_sparse finishes its outputs, as finish_output does"},
      {"out_dtype", "Type of finished outputs: e4m3, bf16, f16, f32"},
      {"gate", "Gates of finished outputs: none, one for each head, or for each channel"},
      {"indexer_format", indexer_formats},
      {"logits_dtype", "Type of the indexer's logits, and of those of top_k: f32, bf16, f16 (f32)"},
      {"threads", "Threads of the kernels and the ceilings; 0 = all that the process may use", "num_threads"},
      {"backend", "Rows or families to force; auto"},
      {"device", "Where to compute: cpu, cuda:N, emulated:sm90 (else MLA_EMULATE, else cpu)"},
  };
  return keys;
}

std::string_view key_named(std::string_view name) {
  for (const SettingKey& entry : setting_keys())
    if (name == entry.key || (name == entry.python && !name.empty())) return entry.key;
  return {};
}

size_t count_values(std::string_view key, const Setting& setting) { return values_of(key, setting).size(); }

std::vector<CaseGroup> expand(const Settings& settings, const Target& target, std::string_view label) {
  check_cache_flag(settings);
  std::string_view compare;
  if (const auto it = settings.find("compare"); it != settings.end()) {
    compare = it->second.text;
    if (settings.find(compare) == settings.end())
      throw UsageError("{}: expected a key that is given too, got '{}'", it->second.where, compare);
  }
  // An odometer over the keys; the compared key turns fastest, so that its values lie side by side.
  struct Wheel {
    std::string_view key;
    const Setting* setting;
    std::vector<std::string> values;
    size_t position = 0;
  };
  std::vector<Wheel> wheels;
  size_t total = 1;
  for (const SettingKey& entry : setting_keys()) {
    const auto it = settings.find(entry.key);
    if (it == settings.end()) continue;
    wheels.push_back({.key = entry.key, .setting = &it->second, .values = values_of(entry.key, it->second)});
    total *= wheels.back().values.size();
    if (total > kMaxCases) throw UsageError("{}: more than {} cases", it->second.where, kMaxCases);
  }
  std::stable_partition(wheels.begin(), wheels.end(), [&](const Wheel& wheel) { return wheel.key != compare; });

  std::vector<CaseGroup> groups;
  for (size_t n = 0; n < total; ++n) {
    Choice choice;
    for (const Wheel& wheel : wheels)
      choice[wheel.key] = {.text = wheel.values[wheel.position], .where = wheel.setting->where};
    const bool joins = !compare.empty() && wheels.back().position > 0;
    if (!joins) groups.push_back({.target = target, .cases = {}});
    for (Case& one : make_cases(choice, label)) groups.back().cases.push_back(std::move(one));
    for (size_t i = wheels.size(); i-- > 0;) {
      if (++wheels[i].position < wheels[i].values.size()) break;
      wheels[i].position = 0;
    }
  }
  return groups;
}

std::vector<int64_t> read_trace_lengths(std::string_view where, const std::string& path, int64_t count, int64_t clip) {
  std::ifstream file(path);
  if (!file) throw UsageError("{}: cannot open '{}': {}", where, path, std::strerror(errno));
  std::vector<int64_t> lengths;
  int64_t number = 0;
  for (std::string line; static_cast<int64_t>(lengths.size()) < count && std::getline(file, line);) {
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const auto object = nlohmann::json::parse(line, nullptr, false);
    if (object.is_discarded() || !object.is_object())
      throw UsageError("{}: {}:{}: expected a JSON object", where, path, number);
    const auto field = object.find("input_length");
    if (field == object.end() || !field->is_number_integer() || field->get<int64_t>() < 1)
      throw UsageError("{}: {}:{}: input_length: expected an integer of at least 1", where, path, number);
    lengths.push_back(std::min(field->get<int64_t>(), clip));
  }
  if (static_cast<int64_t>(lengths.size()) < count)
    throw UsageError("{}: {}: expected at least {} requests, got {}", where, path, count, lengths.size());
  return lengths;
}

}  // namespace mla::bench
