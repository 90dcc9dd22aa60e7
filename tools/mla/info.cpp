// SPDX-License-Identifier: Apache-2.0
// `libmla info` shows the machine, the backends, and the support matrix.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kit/device.h"
#include "mla/backend.h"
#include "mla/build.h"
#include "mla/command.h"
#include "mla/devices.h"
#include "mla/estimate.h"
#include "mla/output.h"
#include "mla/problems.h"
#include "mla/values.h"

namespace mla::cli {
namespace {

struct InfoOptions {
  bool markdown = false, estimates = false;
  Output output;
};

std::string yes_no(bool value) { return value ? "yes" : "no"; }

// "13.0" of 13000.
std::string cuda_version(int32_t version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

std::string arch_names(const std::vector<int32_t>& archs) {
  if (archs.empty()) return "none";
  std::string text;
  for (int32_t arch : archs) text += fmt::format("{}sm{}", text.empty() ? "" : " ", arch);
  return text;
}

Json arch_list(const std::vector<int32_t>& archs) {
  Json list = Json::array();
  for (int32_t arch : archs) list.push_back(fmt::format("sm{}", arch));
  return list;
}

// GPUs that have code of their own or of their family in some build.
struct KnownGpus {
  int32_t arch;
  std::string_view names;
};
constexpr KnownGpus kKnownGpus[] = {
    {80, "A100"},  {86, "RTX A6000, RTX 30"}, {89, "RTX 4090, L40S"},        {90, "H100, H200"}, {100, "B200"},
    {103, "B300"}, {110, "Jetson Thor"},      {120, "RTX PRO 6000, RTX 50"}, {121, "DGX Spark"}};

// What is known of an architecture's kernels and of the times that they take.
std::string evidence_text(int32_t arch) {
  const std::string_view evidence = evidence_of(arch);
  if (evidence == "measured") return "measured on hardware";
  return evidence == "estimated" ? "emulated only, times estimated" : std::string(evidence);
}

void print_known_gpus(const Output& out) {
  Table table({"GPUs", "architecture", "code in this build", "its kernels"}, 4);
  for (const KnownGpus& gpus : kKnownGpus)
    table.add_row({std::string(gpus.names), fmt::format("sm{}", gpus.arch), code_text(gpu_code(gpus.arch)),
                   evidence_text(gpus.arch)});
  table.print(out.text());
}

Json evidence_json() {
  Json times = Json::object();
  for (const KnownGpus& gpus : kKnownGpus) times[fmt::format("sm{}", gpus.arch)] = evidence_of(gpus.arch);
  return times;
}

Json kindred_json() {
  Json codes = Json::object();
  for (int32_t arch : named_gpu_archs()) codes[fmt::format("sm{}", arch)] = code_json(gpu_code(arch));
  return codes;
}

Json rows_json(const Explanation& explanation) {
  Json rows = Json::array();
  for (const BackendVerdict& row : explanation.rows)
    rows.push_back({{"name", row.name}, {"usable", row.usable}, {"reason", row.reason}});
  return rows;
}

void print_rows(const Explanation& explanation, const Output& out) {
  Table table({"backend", "usable", "reason"}, 3);
  for (const BackendVerdict& row : explanation.rows)
    table.add_row({(row.name == explanation.selected ? "> " : "  ") + row.name, yes_no(row.usable), row.reason});
  table.print(out.text());
}

// What the rows say of the typical decode on a GPU of this machine; nothing of one that cannot be used.
std::optional<Explanation> explain_on(const GpuInfo& gpu) {
  if (gpu.index < 0) return std::nullopt;
  return explain(kit::on_device(Problem{}, fmt::format("cuda:{}", gpu.index)), "auto");
}

void print_machine(const Output& out) {
  const MachineInfo& machine = machine_info();
  const Build& built = build();
  out.print("libmla {}\ncommit   {}\nbuild    {}, {}; {}\n", version(),
            built.commit.empty() ? "unknown, as the sources were no git checkout" : built.commit, built.compiler,
            built.type, built.options);
  out.print("cpu      {}\nthreads  {}\n", machine.cpu, machine.threads);
  if (machine.gpus.empty()) out.print("gpus     none\n");
  for (const GpuInfo& gpu : machine.gpus) {
    const GpuCode code = gpu_code(gpu.arch);
    const bool own = gpu.arch == 0 || code.arch == gpu.arch;
    out.print("gpu      {}{}\n", gpu_text(gpu), own ? "" : fmt::format(", code: {}", code_text(code)));
  }
  if (!machine.cuda.empty()) out.print("cuda     {}\n", machine.cuda);
  if (const std::string driver = nvidia_driver(); !driver.empty()) out.print("driver   NVIDIA {}\n", driver);
  if (machine.cuda_driver != 0)
    out.print("cuda     driver {}, library built with {}\n", cuda_version(machine.cuda_driver),
              machine.cuda_runtime == 0 ? "none" : cuda_version(machine.cuda_runtime));
  out.print("gpu code {}\nemulates {}\n\n", arch_names(machine.gpu_archs), arch_names(machine.emulated_archs));
  print_known_gpus(out);
  out.print("\n");
  Table isa({"instruction set", "cpu has", "OS allows", "built", "GFLOP/s a thread", "detail"}, 6);
  for (const IsaLevel& level : machine.isa)
    isa.add_row({level.name, yes_no(level.cpu_has), yes_no(level.os_allows), yes_no(level.built),
                 level.gflops > 0 ? fmt::format("{:.0f}", level.gflops) : "", level.detail});
  isa.print(out.text());
}

int print_info(const InfoOptions& options) {
  const Output& out = options.output;
  out.check_target();
  const MachineInfo& machine = machine_info();
  // The default problem is the typical decode: DeepSeek-V3 with a bf16 cache.
  const std::string device = device_of("MLA_EMULATE", "");
  const Problem problem = kit::on_device({}, device);
  const Explanation explanation = explain(problem);
  Json isa = Json::array();
  for (const IsaLevel& level : machine.isa)
    isa.push_back({{"name", level.name},
                   {"cpu_has", level.cpu_has},
                   {"os_allows", level.os_allows},
                   {"built", level.built},
                   {"gflops", level.gflops > 0 ? Json(level.gflops) : Json(nullptr)},
                   {"detail", level.detail}});
  Json devices = devices_json(machine);
  for (size_t i = 0; i < machine.gpus.size(); ++i)
    if (const auto verdicts = explain_on(machine.gpus[i])) devices[i + 1]["backends"] = rows_json(*verdicts);
  const Build& built = build();
  const std::string driver = nvidia_driver();
  out.write_json({{"version", version()},
                  {"commit", built.commit.empty() ? Json(nullptr) : Json(built.commit)},
                  {"build", {{"compiler", built.compiler}, {"type", built.type}, {"options", built.options}}},
                  {"driver", driver.empty() ? Json(nullptr) : Json(driver)},
                  {"cpu", machine.cpu},
                  {"threads", machine.threads},
                  {"isa", isa},
                  {"devices", devices},
                  {"backends", rows_json(explanation)},
                  {"cuda",
                   {{"driver", machine.cuda_driver == 0 ? Json(nullptr) : Json(cuda_version(machine.cuda_driver))},
                    {"error", machine.cuda.empty() ? Json(nullptr) : Json(machine.cuda)},
                    {"archs", arch_list(machine.gpu_archs)},
                    {"codes", kindred_json()},
                    {"emulated_archs", arch_list(machine.emulated_archs)},
                    {"times", evidence_json()}}},
                  {"error", explanation.selected.empty() ? Json(explanation.error) : Json(nullptr)}});
  print_machine(out);
  out.print("\nbackends, for decode of {} heads, {}/{}, bf16 cache, on {}:\n\n", problem.num_heads, problem.d_qk,
            problem.d_v, device);
  print_rows(explanation, out);
  for (const GpuInfo& gpu : machine.gpus)
    if (const auto verdicts = explain_on(gpu)) {
      out.print("\nthe same on cuda:{}, {}:\n\n", gpu.index, gpu.name);
      print_rows(*verdicts, out);
    }
  // MLA_BACKEND forces what is not there or cannot run.
  if (explanation.selected.empty()) throw UsageError("{}", short_error(explanation));
  return 0;
}

using HeadDims = std::pair<int64_t, int64_t>;
constexpr HeadDims kLatentDims[] = {{576, 512}, {512, 512}, {320, 256}, {1088, 1024}};
constexpr HeadDims kPrefillDims[] = {{192, 128}, {128, 128}, {256, 128}, {256, 256}};
constexpr HeadDims kMergeDims[] = {{512, 512}, {128, 128}};
constexpr HeadDims kIndexerDims[] = {{kIndexerLayout.head_dim, kIndexerLayout.head_dim}};
constexpr HeadDims kAnyDims[] = {{512, 512}};  // index tools have none

std::vector<HeadDims> head_dims_of(Op op, CacheFormat cache) {
  const auto list = [](std::span<const HeadDims> dims) { return std::vector<HeadDims>(dims.begin(), dims.end()); };
  if (has_cache(op)) {
    const KvLayout layout = kv_layout(cache);
    if (layout.nope_dim == 0) return list(kLatentDims);
    const int64_t d_qk = layout.nope_dim + layout.rope_dim;
    return {{d_qk, layout.value_has_rope ? d_qk : layout.nope_dim}};
  }
  switch (op) {
    case Op::kPrefill: return list(kPrefillDims);
    case Op::kMergeStates:
    case Op::kFinishOutput: return list(kMergeDims);
    case Op::kAppendIndexer:
    case Op::kIndexerLogits:
    case Op::kIndexerTopK: return list(kIndexerDims);
    default: return list(kAnyDims);
  }
}

// A format that stands in the table of an operation: of a cache, or of the indexer's keys.
struct Format {
  CacheFormat cache = CacheFormat::kBF16;
  IndexerFormat keys = IndexerFormat::kFP8;
  std::string_view name = {};
};

// One format without a name for operations that have none.
std::vector<Format> formats_of(Op op) {
  std::vector<Format> formats;
  if (is_indexer(op)) {
    for (const IndexerFormat keys : kAllIndexerFormats) formats.push_back({.keys = keys, .name = mla::name(keys)});
    return formats;
  }
  if (!has_cache(op)) return {Format{}};
  const std::span<const CacheFormat> all = kAllCacheFormats;
  for (const CacheFormat cache : op == Op::kPrefillSparse ? all.first(2) : all)
    formats.push_back({.cache = cache, .name = mla::name(cache)});
  return formats;
}

// Types of what goes in beside the cache; none where there is nothing to choose.
std::span<const DType> types_of(Op op) {
  static constexpr DType kTypes[] = {DType::kE4M3, DType::kBF16, DType::kF16, DType::kF32};
  const std::span<const DType> all = kTypes;
  switch (op) {
    case Op::kDecode:
    case Op::kDecodeSparse:
    case Op::kPrefill:
    case Op::kIndexerLogits:
    case Op::kIndexerTopK: return all.first(4);
    case Op::kCopyPages:
    case Op::kBlockTableToCsr:
    case Op::kPhysicalSlots: return all.subspan(1, 1);  // a formality: there is nothing beside
    case Op::kTopK: return all.subspan(3, 1);
    default: return all.subspan(1, 3);
  }
}

bool has_only_d_v(Op op) { return op == Op::kMergeStates || op == Op::kFinishOutput; }

bool has_head_dims(Op op) { return has_cache(op) || op == Op::kPrefill || has_only_d_v(op); }

std::string text_of(Op op, HeadDims dims) {
  if (!has_head_dims(op)) return {};
  return has_only_d_v(op) ? std::to_string(dims.second) : fmt::format("{}/{}", dims.first, dims.second);
}

// Whether a row takes the problem with few heads or with many: what it leaves to others stands beside the table.
bool takes(Problem problem, const std::string& row_name) {
  for (int64_t heads : {128, 8}) {
    problem.num_heads = heads;
    for (const BackendVerdict& row : explain(problem, "auto").rows)
      if (row.name == row_name && row.usable) return true;
  }
  return false;
}

// The types that a row takes on a device, "yes" where there is one, "-" for none; what it takes with another arithmetic
// than the default, if it takes nothing with that one.
std::string cell_of(Problem problem, const std::string& row_name) {
  const std::span<const DType> types = types_of(problem.op);
  for (const Compute compute : {Compute::kDefault, Compute::kFP8}) {
    if (compute != Compute::kDefault && !chooses_compute(problem.op)) break;
    problem.compute = compute;
    std::string cell;
    for (DType dtype : types) {
      problem.q_dtype = dtype;
      if (takes(problem, row_name))
        cell += (cell.empty() ? "" : " ") + (types.size() == 1 ? "yes" : std::string(name(dtype)));
    }
    if (!cell.empty()) return compute == Compute::kDefault ? cell : fmt::format("{}, compute {}", cell, name(compute));
  }
  return "-";
}

// Rows that run on GPUs are judged for every architecture; those that they judge alike share a text. Where some run
// there, the others go without saying.
std::string gpu_cell_of(const Problem& problem, const std::string& row_name) {
  std::vector<std::pair<std::string, std::string>> cells;  // text, architectures
  for (int32_t arch : machine_info().emulated_archs) {
    const std::string text = cell_of(kit::on_device(problem, fmt::format("emulated:sm{}", arch)), row_name);
    const auto same = std::find_if(cells.begin(), cells.end(), [&](const auto& cell) { return cell.first == text; });
    if (same == cells.end())
      cells.emplace_back(text, fmt::format("sm{}", arch));
    else
      same->second += fmt::format(" sm{}", arch);
  }
  if (cells.size() == 1) return cells.front().first;
  std::erase_if(cells, [](const auto& cell) { return cell.first == "-"; });
  std::string all;
  for (const auto& [text, archs] : cells) all += fmt::format("{}{}: {}", all.empty() ? "" : "; ", archs, text);
  return all.empty() ? "-" : all;
}

std::vector<std::string> cells_of(const Problem& problem, const std::vector<std::string>& row_names) {
  std::vector<std::string> cells;
  for (const std::string& row : row_names)
    cells.push_back(kit::is_gpu_backend(row) ? gpu_cell_of(problem, row) : cell_of(problem, row));
  return cells;
}

// Lines of one operation and format; head dims that all rows judge alike share a line.
struct MatrixLine {
  std::string head_dims;
  std::vector<std::string> cells;
};

std::vector<MatrixLine> lines_of(Op op, const Format& format, const std::vector<std::string>& row_names) {
  std::vector<MatrixLine> lines;
  for (const HeadDims& dims : head_dims_of(op, format.cache)) {
    Problem problem = {.op = op, .cache = format.cache, .d_qk = dims.first, .d_v = dims.second};
    problem.indexer_format = format.keys;
    std::vector<std::string> cells = cells_of(problem, row_names);
    if (!lines.empty() && lines.back().cells == cells)
      lines.back().head_dims += ", " + text_of(op, dims);
    else
      lines.push_back({.head_dims = text_of(op, dims), .cells = std::move(cells)});
  }
  return lines;
}

// Why a row runs nothing here: its verdict on a problem that every row knows.
std::string reason_of(Op op, const std::string& row_name) {
  const HeadDims dims = head_dims_of(op, CacheFormat::kBF16).front();
  const Problem problem{.op = op, .q_dtype = types_of(op).front(), .d_qk = dims.first, .d_v = dims.second};
  for (const BackendVerdict& row : explain(problem).rows)
    if (row.name == row_name) return row.reason;
  return {};
}

// Rows in their order, each with the first of its operations and whether it runs any here.
struct Row {
  std::string name;
  Op op;
  bool runs;
};

void note_row(std::vector<Row>& rows, const std::string& name, Op op, bool runs) {
  const auto same = std::find_if(rows.begin(), rows.end(), [&](const Row& row) { return row.name == name; });
  if (same == rows.end())
    rows.push_back({.name = name, .op = op, .runs = runs});
  else
    same->runs = same->runs || runs;
}

void print_operation(Op op, std::vector<Row>& rows, std::FILE* file) {
  std::vector<std::string> row_names = backend_names(op);
  // They take what their processor's row takes, and only tests run them.
  std::erase_if(row_names, [](const std::string& name) { return name.ends_with("_emulated"); });
  const std::vector<Format> formats = formats_of(op);
  const bool named = !formats.front().name.empty(), dims = has_head_dims(op);
  std::vector<std::string> header;
  if (named) header.push_back(op == Op::kPrefillSparse || is_indexer(op) ? "keys" : "cache");
  if (dims) header.push_back("head dims");
  for (const std::string& row : row_names) header.push_back("`" + row + "`");
  Table table(header, header.size());
  std::vector<std::string> missing;
  std::vector<bool> used(row_names.size(), false);
  for (const Format& format : formats) {
    for (const MatrixLine& line : lines_of(op, format, row_names)) {
      bool any = false;
      for (size_t i = 0; i < row_names.size(); ++i) {
        const bool runs = line.cells[i] != "-";
        used[i] = used[i] || runs;
        any = any || runs;
      }
      std::vector<std::string> cells;
      if (named) cells.push_back(fmt::format("`{}`", format.name));
      if (dims) cells.push_back(line.head_dims);
      cells.insert(cells.end(), line.cells.begin(), line.cells.end());
      if (any)
        table.add_row(std::move(cells));
      else
        missing.push_back((named ? fmt::format("`{}` ", format.name) : "") + line.head_dims);
    }
  }
  print_to(file, "**{}**\n\n", name(op));
  table.print_markdown(file);
  print_to(file, "\n");
  for (size_t i = 0; i < row_names.size(); ++i) note_row(rows, row_names[i], op, used[i]);
  if (!missing.empty()) print_to(file, "No backend: {}.\n\n", fmt::join(missing, ", "));
}

// ", except that cuda_sm90 leaves ... to rows behind it"
std::string exceptions() {
  std::string text;
  for (const BackendInfo& backend : backends())
    if (!backend.leaves.empty())
      text += fmt::format("{}{} leaves {} to rows behind it", text.empty() ? ", except that " : ", and ", backend.name,
                          backend.leaves);
  return text;
}

int print_matrix(const Output& out) {
  out.print(
      "Judged by `explain` on: {}. Cells name the types of queries (prefill: of q, k and v; cache tools: of rows; "
      "merge_states: of states), or say yes where there is no choice, and name the compute of attention that a row "
      "needs; any page size; any number of heads{}. "
      "copy_pages takes any format and writes the one that is named. Rows of GPUs are judged for all "
      "architectures that this build emulates, and an architecture is named where it differs from the others.\n\n",
      machine_info().cpu, exceptions());
  std::vector<Row> rows;
  for (Op op : kAllOps) print_operation(op, rows, out.text());
  for (const Row& row : rows)
    if (!row.runs) print_to(out.text(), "`{}` is idle on this machine: {}.\n\n", row.name, reason_of(row.op, row.name));
  return 0;
}

}  // namespace

Action add_info(CLI::App& app) {
  auto options = std::make_shared<InfoOptions>();
  CLI::App* command = app.add_subcommand("info", "Version, processor, instruction sets, GPUs and backends");
  CLI::Option* markdown = command->add_flag("--markdown", options->markdown, "Print the support matrix as tables");
  CLI::Option* estimates =
      command->add_flag("--estimates", options->estimates, "Print the estimates of docs/estimate.md as tables");
  options->output.add_option(*command);
  markdown->excludes("--json");
  estimates->excludes("--json")->excludes(markdown);
  command->footer(
      "Examples:\n  libmla info\n  libmla info --json\n  libmla info --markdown\n  libmla info --estimates\n"
      "\nExit status: 0 success, 2 MLA_BACKEND forces a backend that cannot run (or unusable input).");
  return [options] {
    if (options->estimates) {
      print_estimate_tables(options->output.text());
      return 0;
    }
    return options->markdown ? print_matrix(options->output) : print_info(*options);
  };
}

}  // namespace mla::cli
