// SPDX-License-Identifier: Apache-2.0
// Says what to measure: turns lists and ranges of settings into single cases.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kit/specs.h"
#include "mla/bench/batch_spec.h"
#include "mla/kv_layout.h"
#include "mla/types.h"

namespace mla::bench {

/// Says what a case must reach to meet its target.
struct Target {
  std::optional<double> min_share;  ///< of the ceiling
  std::optional<double> max_us;     ///< median time
  std::optional<double>
      min_ratio;  ///< rate against the baseline: std::nth_element (top_k), else the group's first case
  bool given() const { return min_share || max_us || min_ratio; }
};

/// Says which scales a quantized cache has where its format leaves a choice: fp8 has one for all or four per token
/// ("per-slot"), those of fp8_ds_mla are rounded to powers of two or not.
enum class Scales : uint8_t { kPowersOfTwo, kF32, kPerSlot };

/// Describes one problem with everything that decides its speed. In decode_sparse a request's kv_len is the tokens of
/// the pool.
struct Case {
  std::string label;  ///< of the case file, or empty
  Op op = Op::kDecode;
  CacheFormat cache = CacheFormat::kBF16;
  DType q_dtype = DType::kBF16;  ///< queries; rows of the cache tools; states of merge_states
  int64_t heads = 128;
  int64_t d_qk = 576, d_v = 512;
  float sm_scale = 0.0F;  ///< 0 = 1 / sqrt(width of an up-projected key)
  int64_t page_size = 64;
  int64_t states = 2;      ///< merge_states only
  int64_t topk = 0;        ///< indices of each query (sparse attention, physical_slots), selected logits (top_k)
  int64_t extra_topk = 0;  ///< decode_sparse: indices into a second pool; 0 = none
  int64_t extra_page_size = 64;
  CacheFormat extra_cache = CacheFormat::kBF16;  ///< of that second pool
  CacheFormat to_cache = CacheFormat::kBF16;     ///< copy_pages: what is written
  int64_t to_page_size = 64;
  int64_t ratio = 1;  ///< tokens of a group: of compress, of an indexer's keys, of physical_slots' indices
  bool list_tokens = false;
  int64_t blocks = 0;      ///< the indexer: blocks of keys that are listed for each query; 0 = none
  int64_t block_size = 1;  ///< keys of these; top_k: logits of the blocks that are chosen
  bool overlap = false;
  kit::CompressSpec::To compress_to = kit::CompressSpec::To::kCache;
  std::optional<CacheFormat> append;  ///< compress: of the window that the tokens' keys go to in the same call
  bool norm = false;                  ///< append_rope: whether queries and keys are normalized
  bool finishes = false;              ///< finish_output, or decode_sparse that finishes its outputs
  DType out_dtype = DType::kE4M3;     ///< of finished outputs
  kit::FinishSpec::Gate gate = kit::FinishSpec::Gate::kNone;
  IndexerFormat indexer_format = IndexerFormat::kFP8;  ///< of the indexer's keys
  DType logits_dtype = DType::kF32;                    ///< of its logits
  Scales scales = Scales::kPowersOfTwo;
  bool sink = false, alibi = false;
  int64_t window = -1;
  double soft_cap = 0.0;
  Compute compute = Compute::kDefault;
  kit::Tree tree = kit::Tree::kNone;
  int64_t dcp = 1;  ///< ranks that share the tokens; the case is rank 0's work
  bool causal = true;
  bool batch_invariant = false;
  int64_t prefix = 0;          ///< tokens that all requests of a decode begin with
  bool shared_prefix = false;  ///< whether they are read once
  int32_t threads = 1;
  std::vector<int32_t> affinity;  ///< as ContextOptions
  std::string backend;            ///< forced row or family; empty = auto
  std::string device;             ///< "cpu", "cuda:0", "emulated:sm90"; empty = what MLA_EMULATE says, else the CPU
  std::string lengths;  ///< "uniform", or where the lengths come from: "trace", "equal", or a batch specification
  std::vector<Request> requests;

  int64_t total_queries() const;
  int64_t total_kv() const;
  bool ragged() const;
};

/// Holds cases that are measured in turns. With more than one, the first is the baseline of the others.
struct CaseGroup {
  Target target;
  std::vector<Case> cases;
};

/// Holds one setting: a value, a list or a range as text, and where it stands ("--kv-len", "targets.yaml:12: kv_len").
struct Setting {
  std::string text;
  std::string where;
};

/// Holds settings by key; the keys are those of setting_keys(), and compare.
using Settings = std::map<std::string, Setting, std::less<>>;

/// Holds a key, a line of help and, where that is another one, the name of Python's argument, which flags and case
/// files may use too. setting_keys() returns all of them in the order of the help text.
struct SettingKey {
  std::string_view key, help, python = {};
};
const std::vector<SettingKey>& setting_keys();

/// Returns the key that goes by this name, as "heads" goes by "heads" and "num_heads"; empty if there is none.
std::string_view key_named(std::string_view name);

/// Returns the number of values that a setting lists. Throws UsageError.
size_t count_values(std::string_view key, const Setting& setting);

/// Returns every combination of the listed values. `compare` names the key whose values form one group. Throws
/// UsageError.
std::vector<CaseGroup> expand(const Settings& settings, const Target& target = {}, std::string_view label = {});

/// Returns the cases of a YAML file; `flags` win over what the file says. Throws UsageError with the line.
std::vector<CaseGroup> load_case_file(const std::string& path, const Settings& flags);

/// Returns the input lengths of the first `count` requests of a trace (one JSON object a line), at most `clip` each.
std::vector<int64_t> read_trace_lengths(std::string_view where, const std::string& path, int64_t count, int64_t clip);

}  // namespace mla::bench
