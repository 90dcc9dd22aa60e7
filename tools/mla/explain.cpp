// SPDX-License-Identifier: Apache-2.0
// `libmla explain` says which backend a problem gets, and why not the others.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "mla/backend.h"
#include "mla/command.h"
#include "mla/devices.h"
#include "mla/estimate.h"
#include "mla/explain_model.h"
#include "mla/model.h"
#include "mla/output.h"
#include "mla/problems.h"
#include "mla/renamed_option.h"
#include "mla/values.h"

namespace mla::cli {
namespace {

struct ExplainOptions {
  std::string op, model, tp, cache, q_dtype, head_dims, d_qk, d_v, q_len, listed_keys, num_requests, compute,
      indexer_format, logits_dtype, device, backend;
  RenamedOption heads;
  bool estimate = false;
  std::string batch, keys;
  Output output;
};

void set_head_dims(const ExplainOptions& options, Problem& problem) {
  const std::string& text = options.head_dims;
  for (const auto& [option, one, channels] :
       {std::tuple("--d-qk", &options.d_qk, &problem.d_qk), std::tuple("--d-v", &options.d_v, &problem.d_v)}) {
    if (one->empty()) continue;
    if (!text.empty()) throw UsageError("{}: --head-dims was given too", option);
    *channels = parse_int(option, *one, 1, 65536);
  }
  if (text.empty()) return;
  const size_t slash = text.find('/');
  if (slash == std::string::npos) throw UsageError("--head-dims: expected d_qk/d_v such as 576/512, got '{}'", text);
  problem.d_qk = parse_int("--head-dims", text.substr(0, slash), 1, 65536);
  problem.d_v = parse_int("--head-dims", text.substr(slash + 1), 1, 65536);
}

Problem problem_of(const ExplainOptions& options, const std::string& device) {
  const Op op = options.op.empty() ? Op::kDecode : parse_op("--op", options.op);
  if (!options.cache.empty() && !has_cache(op))
    throw UsageError("--cache: {} works on no cache of a format; its element type is --q-dtype", name(op));
  if (!options.q_len.empty() && op != Op::kDecode)
    throw UsageError("--q-len: {} is judged alike for any number of queries", name(op));
  if (!options.listed_keys.empty() && op != Op::kDecodeSparse && op != Op::kPrefillSparse)
    throw UsageError("--listed-keys: {} has no lists of keys", name(op));
  if (!options.num_requests.empty() && op != Op::kDecode)
    throw UsageError("--num-requests: {} is judged alike for any number of requests", name(op));
  if (!options.compute.empty() && !chooses_compute(op))
    throw UsageError("--compute: {} leaves no choice of its arithmetic", name(op));
  if (!options.indexer_format.empty() && !is_indexer(op))
    throw UsageError("--indexer-format: {} works on no keys of the indexer", name(op));
  if (!options.logits_dtype.empty() && op != Op::kIndexerLogits && op != Op::kIndexerTopK && op != Op::kTopK)
    throw UsageError("--logits-dtype: {} has no logits", name(op));
  std::optional<ModelConfig> model;
  if (!options.model.empty()) model = parse_model("--model", options.model);
  CacheFormat cache = CacheFormat::kBF16;
  if (model && has_cache(op) && op != Op::kPrefillSparse) cache = model->caches.front().cache;
  if (!options.cache.empty()) cache = parse_cache("--cache", options.cache);
  Problem problem = usual_problem(op, cache);
  if (model) set_shape(*model, 1, problem);
  if (model && model->index_n_heads > 0 && is_indexer(op)) problem.num_heads = model->index_n_heads;
  if (!options.q_dtype.empty()) problem.q_dtype = parse_float_dtype("--q-dtype", options.q_dtype, true);
  if (!options.heads.text().empty())
    problem.num_heads = parse_int(options.heads.where(), options.heads.text(), 1, 65536);
  set_head_dims(options, problem);
  if (!options.q_len.empty()) problem.q_len = parse_int("--q-len", options.q_len, 1, 65536);
  if (!options.listed_keys.empty())
    problem.listed_keys = parse_int("--listed-keys", options.listed_keys, 1, int64_t{1} << 40);
  if (!options.num_requests.empty())
    problem.num_requests = parse_int("--num-requests", options.num_requests, 1, int64_t{1} << 40);
  if (!options.compute.empty()) problem.compute = parse_compute("--compute", options.compute);
  if (!options.indexer_format.empty())
    problem.indexer_format = parse_indexer("--indexer-format", options.indexer_format);
  if (!options.logits_dtype.empty())
    problem.logits_dtype = parse_float_dtype("--logits-dtype", options.logits_dtype, false);
  return asked_on(problem, device);
}

// An architecture, and not a device that could be measured.
bool is_architecture(const std::string& device) { return device.starts_with("sm"); }

// The work whose time is asked for; its backend is that of the problem.
std::optional<EstimatedWork> estimated_work(const ExplainOptions& options, const std::string& device) {
  if (!options.estimate) {
    if (!options.batch.empty()) throw UsageError("--batch: times are told with --estimate only");
    if (!options.keys.empty()) throw UsageError("--keys: times are told with --estimate only");
    return std::nullopt;
  }
  if (!is_architecture(device))
    throw UsageError("--estimate: expected --device with an architecture such as sm120, got {}", device);
  EstimatedWork work;
  if (!options.batch.empty()) work.batch = parse_int("--batch", options.batch, 1, 1 << 20);
  if (!options.keys.empty()) work.keys = parse_int("--keys", options.keys, 1, 1 << 24);
  return work;
}

std::string error_text(const std::string& backend) {
  const double error = largest_error(backend);
  if (error == 0) return fmt::format("no time of {} was ever measured, so that nobody knows its error", backend);
  return fmt::format("the model's error is up to {:.0f} % of what {} took on an H100 or H200", 100 * error, backend);
}

// Lines for every GPU of the architecture; the same goes into `document`.
void tell_estimates(const EstimatedWork& work, int32_t arch, const Output& out, Json& document) {
  document = {{"batch", work.batch}, {"keys", work.keys}, {"error", Json(nullptr)}, {"unknown", Json(nullptr)}};
  Json& gpus = document["gpus"] = Json::array();
  if (const double error = largest_error(work.backend); error > 0) document["error"] = error;
  for (const GpuKind& gpu : gpu_kinds()) {
    if (gpu.arch != arch) continue;
    const Estimate found = estimate(work, gpu);
    if (!found.unknown.empty()) {
      document["unknown"] = found.unknown;
      out.print("\nno estimate: {}\n", found.unknown);
      return;
    }
    if (gpus.empty()) {
      out.print("\nestimate, not measured, for {} of {} each\n{} (docs/estimate.md)\n", counted(work.batch, "request"),
                counted(work.keys, "key"), error_text(work.backend));
      const std::string executed =
          found.instructions > 0 ? fmt::format("{:.0f} instructions of its warps, {:.0f} of them multiplies, and ",
                                               found.instructions, found.multiplies)
                                 : std::string();
      out.print("a key takes {}{:.0f} bytes of memory, for a block of {} query rows\n", executed, found.bytes,
                found.block_rows);
    }
    const double share = found.ceiling_us / found.us;
    out.print("{}: estimate {}, bound by {}; {} of its ceiling\n", gpu.name, human_seconds(found.us / 1e6),
              name(found.bound), human_percent(share));
    gpus.push_back({{"gpu", gpu.name},
                    {"estimate_us", found.us},
                    {"bound", name(found.bound)},
                    {"ceiling_us", found.ceiling_us},
                    {"ceiling_share", share},
                    {"block_rows", found.block_rows},
                    {"instructions_per_key", found.instructions},
                    {"multiplies_per_key", found.multiplies},
                    {"bytes_per_key", found.bytes}});
  }
  if (!gpus.empty()) return;
  document["unknown"] = fmt::format("the model knows no GPU of sm{}", arch);
  out.print("\nno estimate: {}\n", document["unknown"].get<std::string>());
}

int explain_problem(const ExplainOptions& options) {
  options.output.check_target();
  const std::string device = device_of("--device", options.device, true);
  std::optional<EstimatedWork> work = estimated_work(options, device);
  const Problem problem = problem_of(options, device);
  check_backend_name("--backend", options.backend);
  const Explanation explanation = mla::explain(problem, options.backend);

  Table table({"backend", "usable", "reason"}, 3);
  Json rows = Json::array();
  for (const BackendVerdict& row : explanation.rows) {
    table.add_row({(row.name == explanation.selected ? "> " : "  ") + row.name, row.usable ? "yes" : "no", row.reason});
    rows.push_back({{"backend", row.name},
                    {"usable", row.usable},
                    {"reason", row.reason},
                    {"multiplied", name(row.numerics.multiplied)},
                    {"summed", name(row.numerics.summed)},
                    {"products_per_cut", row.numerics.products_per_cut},
                    {"query_bits", row.numerics.query_bits},
                    {"sum_bits", row.numerics.sum_bits},
                    {"p_run", row.numerics.p_run}});
  }
  const bool found = !explanation.selected.empty();
  Json document = {{"selected", found ? Json(explanation.selected) : Json(nullptr)},
                   {"error", found ? Json(nullptr) : Json(explanation.error)},
                   {"op", name(problem.op)},
                   {"device", device},
                   {"code", code_json(explanation.code.value_or(GpuCode()))},
                   {"note", explanation.note.empty() ? Json(nullptr) : Json(explanation.note)},
                   {"heads", problem.num_heads},
                   {"q_len", problem.q_len},
                   {"listed_keys", problem.listed_keys},
                   {"num_requests", problem.num_requests},
                   {"compute", name(problem.compute)},
                   {"indexer_format", name(problem.indexer_format)},
                   {"logits_dtype", name(problem.logits_dtype)},
                   {"rows", rows}};
  options.output.print("{}: {}, device {}{}\n\n", name(problem.op), describe(problem), device, told_code(explanation));
  table.print(options.output.text());
  if (found) options.output.print("\nselected: {}\n", explanation.selected);
  const bool only_reference = std::none_of(explanation.rows.begin(), explanation.rows.end(),
                                           [](const auto& row) { return row.usable && row.name != "reference"; });
  if (!explanation.note.empty()) options.output.print("note: {}\n", explanation.note);
  if (found && only_reference)
    options.output.print("note: only the float64 reference can run this: expect it to be slow\n");
  if (work && found) {
    work->problem = problem;
    work->backend = explanation.selected;
    tell_estimates(*work, problem.gpu_arch, options.output, document["estimate"]);
  }
  options.output.write_json(document);
  if (!found) throw UsageError("{}", short_error(explanation));
  return 0;
}

// A model without an operation is asked about as a whole: what describes one problem has no place there.
int explain(const ExplainOptions& options) {
  if (!options.op.empty() || options.model.empty()) {
    if (!options.tp.empty())
      throw UsageError("--tp: divides the heads of a whole model; expected --model without --op");
    return explain_problem(options);
  }
  for (const auto& [option, text] :
       {std::pair("--q-dtype", &options.q_dtype), std::pair(options.heads.where().c_str(), &options.heads.text()),
        std::pair("--head-dims", &options.head_dims), std::pair("--d-qk", &options.d_qk),
        std::pair("--d-v", &options.d_v), std::pair("--q-len", &options.q_len),
        std::pair("--listed-keys", &options.listed_keys), std::pair("--num-requests", &options.num_requests),
        std::pair("--compute", &options.compute), std::pair("--indexer-format", &options.indexer_format),
        std::pair("--logits-dtype", &options.logits_dtype), std::pair("--batch", &options.batch),
        std::pair("--keys", &options.keys)})
    if (!text->empty()) throw UsageError("{}: describes one operation of the model; expected --op too", option);
  if (options.estimate) throw UsageError("--estimate: times are those of one operation; expected --op too");
  return explain_model({.model = options.model,
                        .cache = options.cache,
                        .tp = options.tp,
                        .device = options.device,
                        .backend = options.backend},
                       options.output);
}

}  // namespace

Action add_explain(CLI::App& app) {
  auto options = std::make_shared<ExplainOptions>();
  CLI::App* command = app.add_subcommand(
      "explain", "Every backend's verdict on a problem, and the one it gets; or what runs each operation of a model");
  command->add_option("--op", options->op, "An operation (default decode; of a model all): " + op_names());
  command->add_option("--model", options->model,
                      "Preset, config.json or its folder: with --op heads and head dims, alone all its layers");
  command->add_option("--tp", options->tp, "With --model alone: GPUs that the heads are divided over (default 1)");
  command->add_option("--cache", options->cache,
                      cache_names() + "; of operations on a cache (default bf16, or the model's)");
  command->add_option("--q-dtype", options->q_dtype,
                      "Queries; q, k and v of prefill; rows; states: bf16, f16, f32, e4m3");
  options->heads.add(*command, "--num-heads", "--heads", "Query heads");
  command->add_option("--head-dims", options->head_dims, "d_qk/d_v, such as 576/512");
  command->add_option("--d-qk", options->d_qk, "Channels of a query and of a key, alone");
  command->add_option("--d-v", options->d_v, "Channels of an output, alone");
  command->add_option("--q-len", options->q_len, "decode: query tokens of a request, rounded up (default 1)");
  command->add_option(
      "--listed-keys", options->listed_keys,
      "decode_sparse, prefill_sparse: query tokens times the entries of a token's lists (default many)");
  command->add_option("--num-requests", options->num_requests, "decode: requests (default many)");
  command->add_option(
      "--compute", options->compute,
      "decode, decode_sparse, prefill: default, or fp8 for products of e4m3; indexer_logits, indexer_top_k: default, "
      "or exact for sums of f32");
  command->add_option("--indexer-format", options->indexer_format,
                      "append_indexer, indexer_logits, indexer_top_k: " + indexer_names() + " (default fp8)");
  command->add_option("--logits-dtype", options->logits_dtype,
                      "indexer_logits, indexer_top_k, top_k: type of the logits, f32, bf16, f16 (default f32)");
  command->add_option(
      "--device", options->device,
      "cpu, cuda:N, emulated:sm90, or sm120: a GPU that need not be there (else MLA_EMULATE, else cpu)");
  command->add_option("--backend", options->backend, "Row or family to force (else MLA_BACKEND, else the best)");
  command->add_flag("--estimate", options->estimate,
                    "With --device sm120 or another architecture: estimated times on its GPUs, of absorbed attention");
  command->add_option("--batch", options->batch,
                      "With --estimate: requests; of sparse attention, queries (default 64)");
  command->add_option("--keys", options->keys, "With --estimate: keys that each query attends to (default 8k)");
  options->output.add_option(*command);
  command->footer(
      "Examples:\n  libmla explain --op decode --model deepseek-v3 --cache bf16\n"
      "  libmla explain --op decode_sparse --model deepseek-v4-flash\n"
      "  libmla explain --model deepseek-v4.1-flash --device sm89\n"
      "  libmla explain --model kimi-k3 --tp 16 --cache fp8\n"
      "  libmla explain --op prefill --q-dtype f16 --backend cpu_avx2\n"
      "  libmla explain --op decode_sparse --cache fp8_ds_mla --device sm120\n"
      "  libmla explain --num-heads 16 --q-len 2 --device sm90\n"
      "  libmla explain --op indexer_logits --indexer-format mxfp4 --device sm90\n"
      "  libmla explain --num-heads 16 --device sm120 --estimate --batch 32 --keys 4k\n"
      "\nOf an architecture, such as sm103, the answer is that of a build with code for every GPU, and says what this "
      "build lacks.\n"
      "\nExit status: 0 a backend was found, of a model for each of its operations; 2 none can run the problem, or not "
      "the forced one, or the library lacks an operation of the model.");
  return [options] { return explain(*options); };
}

}  // namespace mla::cli
