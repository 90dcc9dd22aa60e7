// SPDX-License-Identifier: Apache-2.0
#include "kit/sweep.h"

#include <algorithm>
#include <map>
#include <set>
#include <variant>

namespace mla::kit {
namespace {

constexpr size_t kFailuresKept = 100;
constexpr int64_t kCases = 120;  // of every operation and format
constexpr int64_t kQuickCases = 12;

using AnySpec =
    std::variant<DecodeSpec, DecodeSparseSpec, PrefillSpec, PrefillSparseSpec, MergeSpec, AppendSpec, AppendRopeSpec,
                 GatherSpec, CopyPagesSpec, BlockTableToCsrSpec, PhysicalSlotsSpec, AppendIndexerSpec,
                 IndexerLogitsSpec, TopKSpec, IndexerTopKSpec, CompressSpec, FinishOutputSpec>;

struct Job {
  AnySpec spec;
  std::string backend;
};

/// Holds what an operation's cases vary besides their seed: a cache format, that of the indexer's keys, a data type, or
/// nothing.
using Variety = std::variant<std::monostate, CacheFormat, IndexerFormat, DType>;

template <class Spec>
Spec with_keys(Spec spec, IndexerFormat format) {
  if constexpr (requires { spec.indexer.format; }) {
    spec.indexer.format = format;
  } else {
    spec.format = format;
  }
  if constexpr (requires { spec.power_of_two_scales; })
    spec.power_of_two_scales |= indexer_layout(format).codec.scale_type == ScaleType::kUE8M0;
  return spec;
}

AnySpec random_spec(Op op, Variety variety, uint64_t seed) {
  const CacheFormat* const format = std::get_if<CacheFormat>(&variety);
  const CacheFormat cache = format != nullptr ? *format : CacheFormat::kBF16;
  const IndexerFormat* const of_keys = std::get_if<IndexerFormat>(&variety);
  const IndexerFormat keys = of_keys != nullptr ? *of_keys : IndexerFormat::kFP8;
  const DType* const type = std::get_if<DType>(&variety);
  const DType dtype = type != nullptr ? *type : DType::kBF16;
  switch (op) {
    case Op::kDecode: return random_decode_spec(seed, cache);
    case Op::kDecodeSparse: return random_decode_sparse_spec(seed, cache);
    case Op::kPrefill: return random_prefill_spec(seed, dtype);
    case Op::kPrefillSparse: return random_prefill_sparse_spec(seed, dtype);
    case Op::kMergeStates: return random_merge_spec(seed, dtype);
    case Op::kAppend: return random_append_spec(seed, cache);
    case Op::kAppendRope: return random_append_rope_spec(seed, cache);
    case Op::kGather: return random_gather_spec(seed, cache);
    case Op::kCopyPages: return random_copy_pages_spec(seed, cache);
    case Op::kBlockTableToCsr: return random_block_table_to_csr_spec(seed);
    case Op::kPhysicalSlots: return random_physical_slots_spec(seed);
    case Op::kAppendIndexer: return with_keys(random_append_indexer_spec(seed), keys);
    case Op::kIndexerLogits: return with_keys(random_indexer_logits_spec(seed), keys);
    case Op::kTopK: return random_top_k_spec(seed);
    case Op::kIndexerTopK: return with_keys(random_indexer_top_k_spec(seed), keys);
    case Op::kCompress: return random_compress_spec(seed, cache);
    case Op::kFinishOutput: return random_finish_output_spec(seed, dtype);
  }
  return DecodeSpec{};
}

std::vector<Variety> dtypes_of(Op op, const std::optional<CacheFormat>& cache) {
  if (cache.has_value()) {
    const DType element = kv_layout(*cache).nope.element;
    return is_quantized(element) ? std::vector<Variety>{} : std::vector<Variety>{element};
  }
  if (op == Op::kPrefillSparse) return {DType::kBF16, DType::kF16};
  if (op == Op::kPrefill) return {DType::kBF16, DType::kF16, DType::kF32, DType::kE4M3};
  return {DType::kBF16, DType::kF16, DType::kF32};
}

std::vector<Variety> varieties_of(Op op, const SweepOptions& options) {
  const std::optional<CacheFormat>& cache = options.cache;
  const bool of_indexer = op == Op::kAppendIndexer || op == Op::kIndexerLogits || op == Op::kIndexerTopK;
  if (of_indexer ? cache.has_value() : options.indexer_format.has_value()) return {};
  switch (op) {
    case Op::kPrefill:
    case Op::kPrefillSparse:
    case Op::kMergeStates:
    case Op::kFinishOutput: return dtypes_of(op, cache);
    case Op::kBlockTableToCsr:
    case Op::kPhysicalSlots:
    case Op::kTopK: return cache.has_value() ? std::vector<Variety>{} : std::vector<Variety>{std::monostate{}};
    case Op::kAppendIndexer:
    case Op::kIndexerLogits:
    case Op::kIndexerTopK:
      if (options.indexer_format.has_value()) return {*options.indexer_format};
      return {std::begin(kAllIndexerFormats), std::end(kAllIndexerFormats)};
    default: break;
  }
  const std::span<const CacheFormat> formats(kAllCacheFormats);
  if (!cache.has_value()) return {formats.begin(), formats.end()};
  return std::ranges::count(formats, *cache) == 0 ? std::vector<Variety>{} : std::vector<Variety>{*cache};
}

/// A row's own name means that row alone, even where it begins another's ("cpu_avx512", "cpu_avx512_bf16").
bool matches(const std::string& row, const std::string& filter, const std::vector<std::string>& rows) {
  if (filter.empty() || filter == "auto" || row == filter) return true;
  return std::find(rows.begin(), rows.end(), filter) == rows.end() && row.starts_with(filter + "_");
}

/// Rows of the other kind of device are skipped without a word, unless they were asked for.
bool is_for(const std::string& row, const Problem& problem) {
  return is_gpu_backend(row) == (problem.device.type == DeviceType::kCuda);
}

std::string all_names() {
  std::set<std::string> names;
  for (Op op : kAllOps)
    for (const std::string& row : backend_names(op)) names.insert(row);
  std::string text;
  for (const std::string& row : names) text.append(text.empty() ? "" : ", ").append(row);
  return text;
}

int64_t cases_of(const SweepOptions& options) {
  if (options.cases != 0) return options.cases;
  return options.quick ? kQuickCases : kCases;
}

Status options_status(const SweepOptions& options) {
  if (options.cache.has_value() && options.indexer_format.has_value())
    return {StatusCode::kInvalidArgument, "check: indexer_format: expected none beside a cache format, got " +
                                              std::string(name(*options.indexer_format))};
  if (options.op.has_value() && varieties_of(*options.op, options).empty()) {
    const auto [field, format] = options.cache.has_value() ? std::pair("cache", name(*options.cache))
                                                           : std::pair("indexer_format", name(*options.indexer_format));
    return {StatusCode::kInvalidArgument, std::string("check: ") + field + ": expected a format that " +
                                              std::string(name(*options.op)) + " takes, got " + std::string(format)};
  }
  for (Op op : kAllOps) {
    const std::vector<std::string> rows = backend_names(op);
    for (const std::string& row : rows)
      if (matches(row, options.backend, rows)) return {};
  }
  return {StatusCode::kInvalidArgument,
          "check: backend: expected a row or family of " + all_names() + ", got " + options.backend};
}

}  // namespace

void count_skipped(const BackendVerdict& row, std::vector<Skipped>& skipped) {
  const auto found = std::find_if(skipped.begin(), skipped.end(), [&](const Skipped& known) {
    return known.backend == row.name && known.reason == row.reason;
  });
  if (found != skipped.end())
    ++found->cases;
  else
    skipped.push_back({.backend = row.name, .reason = row.reason, .cases = 1});
}

std::vector<std::string> usable_backends(const Problem& problem) {
  std::vector<std::string> names;
  for (const BackendVerdict& row : explain(problem, "auto").rows)
    if (row.usable) names.push_back(row.name);
  return names;
}

Result<SweepResult> sweep(const SweepOptions& options, const SweepProgress& progress) {
  if (Status status = options_status(options); !status.ok()) return status;

  SweepResult result;
  std::vector<Job> jobs;
  for (Op op : kAllOps) {
    if (options.op.has_value() && *options.op != op) continue;
    const std::vector<std::string> rows = backend_names(op);
    for (const Variety& variety : varieties_of(op, options)) {
      for (int64_t i = 0; i < cases_of(options); ++i) {
        const AnySpec spec = random_spec(op, variety, options.seed + static_cast<uint64_t>(i));
        const Problem problem =
            on_device(std::visit([](const auto& s) { return problem_of(s); }, spec), options.device);
        for (const BackendVerdict& row : explain(problem, "auto").rows) {
          if (!matches(row.name, options.backend, rows)) continue;
          if (row.usable)
            jobs.push_back({.spec = spec, .backend = row.name});
          else if (!options.backend.empty() || is_for(row.name, problem))
            count_skipped(row, result.skipped);
        }
      }
    }
  }
  if (jobs.empty())
    return Status(StatusCode::kUnsupported,
                  "check: backend: expected a row that this machine can run, got " +
                      (result.skipped.empty() ? options.backend
                                              : result.skipped.back().backend + ": " + result.skipped.back().reason));

  std::map<std::string, Context> contexts;
  for (const Job& job : jobs) {
    auto found = contexts.find(job.backend);
    if (found == contexts.end()) {
      Result<Context> made = Context::create(
          {.num_threads = options.num_threads, .affinity = {}, .backend = job.backend, .device = options.device});
      if (!made.ok()) return made.status();
      found = contexts.emplace(job.backend, std::move(made).value()).first;
    }
    const Outcome outcome = std::visit([&](const auto& spec) { return check(found->second, spec); }, job.spec);
    ++result.cases;
    if (!outcome.ok) {
      ++result.failed;
      if (result.failures.size() < kFailuresKept) result.failures.push_back(outcome);
    }
    if (progress && !progress(result.cases, static_cast<int64_t>(jobs.size()), outcome)) break;
  }
  return result;
}

}  // namespace mla::kit
