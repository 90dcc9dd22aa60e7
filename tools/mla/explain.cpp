// SPDX-License-Identifier: Apache-2.0
// `mla explain` says which backend a problem gets, and why not the others.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>

#include "kit/device.h"
#include "mla/backend.h"
#include "mla/command.h"
#include "mla/devices.h"
#include "mla/estimate.h"
#include "mla/model.h"
#include "mla/output.h"
#include "mla/values.h"

namespace mla::cli {
namespace {

struct ExplainOptions {
  std::string op = "decode", model, cache, q_dtype, heads, head_dims, q_len, compute, device, backend;
  bool estimate = false;
  std::string batch, keys;
  Output output;
};

void set_head_dims(const std::string& text, Problem& problem) {
  const size_t slash = text.find('/');
  if (slash == std::string::npos) throw UsageError("--head-dims: expected d_qk/d_v such as 576/512, got '{}'", text);
  problem.d_qk = parse_int("--head-dims", text.substr(0, slash), 1, 65536);
  problem.d_v = parse_int("--head-dims", text.substr(slash + 1), 1, 65536);
}

bool is_indexer(Op op) { return op == Op::kAppendIndexer || op == Op::kIndexerLogits || op == Op::kIndexerTopK; }

// Types and sizes that an operation usually has.
void set_defaults(const ModelConfig* model, Problem& problem) {
  const Op op = problem.op;
  const KvLayout layout = kv_layout(problem.cache);
  problem.q_dtype = value_dtype(layout.nope.element);
  if (op == Op::kMergeStates || op == Op::kTopK) problem.q_dtype = DType::kF32;
  if (op == Op::kIndexerLogits || op == Op::kIndexerTopK) problem.q_dtype = DType::kE4M3;
  if (layout.is_packed()) {
    problem.d_qk = layout.nope_dim + layout.rope_dim;
    problem.d_v = layout.value_has_rope ? problem.d_qk : layout.nope_dim;
  }
  if (op == Op::kPrefill) {
    problem.d_qk = 192;
    problem.d_v = 128;
  }
  if (model != nullptr) {
    problem.num_heads = model->num_attention_heads;
    problem.d_qk = op == Op::kPrefill ? model->prefill_d_qk() : model->d_qk();
    problem.d_v = op == Op::kPrefill ? model->v_head_dim : model->d_v();
  }
  if (is_indexer(op)) {
    problem.num_heads = 64;
    problem.d_qk = problem.d_v = kIndexerLayout.head_dim;
  }
}

Problem problem_of(const ExplainOptions& options, const std::string& device) {
  Problem problem;
  problem.op = parse_op("--op", options.op);
  if (!options.cache.empty() && !has_cache(problem.op))
    throw UsageError("--cache: {} works on no cache of a format; its element type is --q-dtype", name(problem.op));
  if (!options.q_len.empty() && problem.op != Op::kDecode)
    throw UsageError("--q-len: {} is judged alike for any number of queries", name(problem.op));
  if (!options.compute.empty() && !chooses_compute(problem.op))
    throw UsageError("--compute: {} leaves no choice of its arithmetic", name(problem.op));
  std::optional<ModelConfig> model;
  if (!options.model.empty()) model = parse_model("--model", options.model);
  if (model && model->value_is_row && has_cache(problem.op) && problem.op != Op::kPrefillSparse)
    problem.cache = CacheFormat::kFP8DsV4;
  if (!options.cache.empty()) problem.cache = parse_cache("--cache", options.cache);
  set_defaults(model ? &*model : nullptr, problem);
  if (!options.q_dtype.empty()) problem.q_dtype = parse_float_dtype("--q-dtype", options.q_dtype, true);
  if (!options.heads.empty()) problem.num_heads = parse_int("--heads", options.heads, 1, 65536);
  if (!options.head_dims.empty()) set_head_dims(options.head_dims, problem);
  if (!options.q_len.empty()) problem.q_len = parse_int("--q-len", options.q_len, 1, 65536);
  if (!options.compute.empty()) problem.compute = parse_compute("--compute", options.compute);
  problem = kit::on_device(problem, device);
  // Of a GPU that need not be there, the answer should not depend on this build.
  problem.full_build = problem.gpu_arch != 0 && !problem.emulated;
  return problem;
}

// The architecture of a GPU whose code is worth telling: an emulated one's name says it.
int32_t gpu_arch_of(const Problem& problem, const std::string& device) {
  return problem.device.type == DeviceType::kCuda && !problem.emulated ? kit::arch_of(device) : 0;
}

// What somebody who asked about a full build should know of this one.
std::string build_note(int32_t arch) {
  const GpuCode full = gpu_code(arch, true), here = gpu_code(arch);
  if (full == here) return {};
  if (here.arch == 0) return fmt::format("note: this build has no code for sm{}\n", arch);
  return fmt::format("note: in this build sm{} runs code of {}; -DMLA_CUDA_ARCHS={} builds its own\n", arch,
                     code_text(here), full.arch);
}

// The arithmetic, where it is not the usual one.
std::string compute_of(const Problem& problem) {
  return problem.compute != Compute::kDefault ? fmt::format(", compute {}", name(problem.compute)) : "";
}

// Only what the operation has.
std::string describe(const Problem& problem) {
  const std::string_view type = name(problem.q_dtype);
  switch (problem.op) {
    case Op::kDecode:
    case Op::kDecodeSparse:
      return fmt::format("cache {}, queries {}{}, {} heads, head dims {}/{}{}", name(problem.cache), type,
                         problem.q_len > 1 ? fmt::format(", {} per request", problem.q_len) : "", problem.num_heads,
                         problem.d_qk, problem.d_v, compute_of(problem));
    case Op::kPrefill:
      return fmt::format("q, k and v {}, {} heads, head dims {}/{}{}", type, problem.num_heads, problem.d_qk,
                         problem.d_v, compute_of(problem));
    case Op::kPrefillSparse:
      return fmt::format("keys {}, queries {}, {} heads, head dims {}/{}", name(problem.cache), type, problem.num_heads,
                         problem.d_qk, problem.d_v);
    case Op::kMergeStates: return fmt::format("states {}, {} heads, d_v {}", type, problem.num_heads, problem.d_v);
    case Op::kAppend:
    case Op::kGather:
      return fmt::format("cache {}, rows {}, head dims {}/{}", name(problem.cache), type, problem.d_qk, problem.d_v);
    case Op::kAppendRope:
      return fmt::format("cache {}, rows {}, {} heads, head dims {}/{}", name(problem.cache), type, problem.num_heads,
                         problem.d_qk, problem.d_v);
    case Op::kCopyPages:
      return fmt::format("to cache {}, head dims {}/{}", name(problem.cache), problem.d_qk, problem.d_v);
    case Op::kBlockTableToCsr: return "any page size";
    case Op::kPhysicalSlots: return "any page size, any number of indices";
    case Op::kAppendIndexer: return fmt::format("rows {}", type);
    case Op::kIndexerLogits:
    case Op::kIndexerTopK: return fmt::format("queries {}, {} heads", type, problem.num_heads);
    case Op::kTopK: return "any number of f32 logits";
  }
  return {};
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
  const Explanation explanation = explain(problem, options.backend);

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
                    {"query_bits", row.numerics.query_bits}});
  }
  const bool found = !explanation.selected.empty();
  const int32_t arch = gpu_arch_of(problem, device);
  const GpuCode code = gpu_code(arch, problem.full_build);
  Json document = {{"selected", found ? Json(explanation.selected) : Json(nullptr)},
                   {"error", found ? Json(nullptr) : Json(explanation.error)},
                   {"op", name(problem.op)},
                   {"device", device},
                   {"code", code_json(code)},
                   {"heads", problem.num_heads},
                   {"q_len", problem.q_len},
                   {"compute", name(problem.compute)},
                   {"rows", rows}};
  options.output.print("{}: {}, device {}{}\n\n", name(problem.op), describe(problem), device,
                       arch == 0 ? "" : fmt::format(" (code: {})", code_text(code)));
  table.print(options.output.text());
  if (found) options.output.print("\nselected: {}\n", explanation.selected);
  const bool only_reference = std::none_of(explanation.rows.begin(), explanation.rows.end(),
                                           [](const auto& row) { return row.usable && row.name != "reference"; });
  if (problem.full_build) options.output.print("{}", build_note(arch));
  if (found && only_reference)
    options.output.print("note: only the float64 reference can run this: expect it to be slow\n");
  if (work && found) {
    work->problem = problem;
    work->backend = explanation.selected;
    tell_estimates(*work, arch, options.output, document["estimate"]);
  }
  options.output.write_json(document);
  if (!found) throw UsageError("{}", explanation.error);
  return 0;
}

}  // namespace

Action add_explain(CLI::App& app) {
  auto options = std::make_shared<ExplainOptions>();
  CLI::App* command = app.add_subcommand("explain", "Every backend's verdict on a problem, and the one it gets");
  command->add_option("--op", options->op, "An operation: " + op_names())->capture_default_str();
  command->add_option("--model", options->model, "Preset, config.json or its folder: heads and head dims");
  command->add_option("--cache", options->cache, cache_names() + "; of operations on a cache (default bf16)");
  command->add_option("--q-dtype", options->q_dtype,
                      "Queries; q, k and v of prefill; rows; states: bf16, f16, f32, e4m3");
  command->add_option("--heads", options->heads, "Query heads");
  command->add_option("--head-dims", options->head_dims, "d_qk/d_v, such as 576/512");
  command->add_option("--q-len", options->q_len, "decode: query tokens of a request, rounded up (default 1)");
  command->add_option("--compute", options->compute,
                      "decode, decode_sparse, prefill: default, or fp8 for products of e4m3");
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
      "Examples:\n  mla explain --op decode --model deepseek-v3 --cache bf16\n"
      "  mla explain --op decode_sparse --model deepseek-v4-flash\n"
      "  mla explain --op prefill --q-dtype f16 --backend cpu_avx2\n"
      "  mla explain --op decode_sparse --cache fp8_ds_mla --device sm120\n"
      "  mla explain --heads 16 --q-len 2 --device sm90\n"
      "  mla explain --heads 16 --device sm120 --estimate --batch 32 --keys 4k\n"
      "\nOf an architecture, such as sm103, the answer is that of a build with code for every GPU, and says what this "
      "build lacks.\n"
      "\nExit status: 0 a backend was found, 2 none can run the problem, or not the forced one.");
  return [options] { return explain_problem(*options); };
}

}  // namespace mla::cli
