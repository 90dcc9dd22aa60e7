// SPDX-License-Identifier: Apache-2.0
// `libmla bench` measures ceilings and kernels in one process.
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mla/backend.h"
#include "mla/bench/load.h"
#include "mla/bench/measure.h"
#include "mla/bench/report.h"
#include "mla/bench_options.h"
#include "mla/command.h"
#include "mla/devices.h"
#include "mla/interrupt.h"
#include "mla/output.h"
#include "mla/processors.h"
#include "mla/shipped.h"
#include "mla/values.h"

namespace mla::cli {
namespace {

struct BenchOptions {
  std::string file, compare, csv, processors;
  bench::SettingFlags flags;
  bench::MeasureFlags measure_flags{"0.3"};
  bench::MeasureOptions measure;
  std::string max_runs = "100000";
  bool strict = false, list = false;
  Output output;
};

std::vector<bench::CaseGroup> groups_of(const BenchOptions& options) {
  const std::vector<int32_t> processors = use_processors("--processors", options.processors);
  bench::Settings settings = options.flags.settings();
  if (!options.compare.empty()) {
    std::string key = options.compare;
    for (char& c : key) c = c == '-' ? '_' : c;
    const std::string_view known = bench::key_named(key);
    settings["compare"] = {.text = known.empty() ? key : std::string(known), .where = "--compare"};
  }
  std::vector<bench::CaseGroup> groups =
      options.file.empty() ? bench::expand(settings) : bench::load_case_file(shipped(options.file), settings);
  for (bench::CaseGroup& group : groups)
    for (bench::Case& one : group.cases) one.affinity = affinity_of("--processors", processors, one.threads);
  return groups;
}

// What is wrong or was missed, for people; the exit status.
int summarize(const std::vector<bench::Measurement>& results, const BenchOptions& options) {
  int64_t met = 0, missed = 0, wrong = 0;
  for (const bench::Measurement& m : results) {
    if (m.met) ++(*m.met ? met : missed);
    if (m.error_text.empty()) continue;
    ++wrong;
    print_to(stderr, "WRONG {} on {}: {}\n", name(m.description.op), m.backend, m.error_text);
  }
  if (met + missed > 0)
    options.output.print("\n{}: {} met, {} missed\n", met + missed == 1 ? "target" : "targets", met, missed);
  return wrong > 0 || (options.strict && missed > 0) ? 1 : 0;
}

// Ctrl-C in the middle of a case.
struct Interrupted {};

// Until all are measured or the user has had enough; what is done of a group that was cut short is lost.
std::vector<bench::Measurement> measure_all(const std::vector<bench::CaseGroup>& groups, bench::Meters& meters,
                                            const bench::MeasureOptions& measure) {
  size_t total = 0;
  for (const bench::CaseGroup& group : groups) total += group.cases.size();
  std::vector<bench::Measurement> results;
  Progress progress("bench");
  try {
    for (const bench::CaseGroup& group : groups) {
      const bench::Case& first = group.cases.front();
      const auto note = [&](const std::string& what) {
        if (stop_requested) throw Interrupted();
        progress.update(static_cast<int64_t>(results.size()), static_cast<int64_t>(total),
                        fmt::format("{} {}", first.label.empty() ? name(first.op) : first.label, what));
      };
      for (bench::Measurement& m : bench::measure(group, meters, measure, note)) {
        progress.clear();
        results.push_back(std::move(m));
        print_to(stderr, "[{}/{}] {}\n", results.size(), total, bench::summary_line(results.back()));
      }
    }
  } catch (const Interrupted&) {
    progress.clear();
    print_to(stderr, "INTERRUPTED: {} of {} measured\n", results.size(), counted(static_cast<int64_t>(total), "case"));
  }
  return results;
}

// That of the first case on the CPU, or null.
bench::CeilingMeter* cpu_meter(const std::vector<bench::CaseGroup>& groups, bench::Meters& meters) {
  for (const bench::CaseGroup& group : groups)
    for (const bench::Case& one : group.cases)
      if (device_of("--device", one.device) == "cpu") return &meters.of(one.threads);
  return nullptr;
}

Json load_json(const std::optional<bench::Load>& load) {
  if (!load) return nullptr;
  return {{"others_share", load->others}, {"steal_share", load->steal}, {"busy", load->busy()}};
}

int run_bench(BenchOptions& options) {
  const InterruptGuard guard;
  options.measure_flags.apply(options.measure);
  options.measure.max_runs = parse_int("--max-runs", options.max_runs, 1);
  const std::vector<bench::CaseGroup> groups = groups_of(options);
  const Output& out = options.output;
  out.check_target();
  if (options.list) {
    out.write_json({{"version", version()}, {"cases", bench::cases_json(groups)}});
    bench::print_cases(groups, out.text());
    return 0;
  }
  if (!options.csv.empty()) check_writable("--csv", options.csv);

  const bench::LoadMeter load_meter;
  bench::Meters meters;
  bench::CeilingMeter* const main_meter = cpu_meter(groups, meters);
  const std::vector<bench::Measurement> results = measure_all(groups, meters, options.measure);
  const std::optional<bench::Load> load = load_meter.load();
  const bool interrupted = stop_requested;

  if (!options.csv.empty()) bench::write_csv(results, options.csv);
  Json rows = Json::array();
  for (const bench::Measurement& m : results) rows.push_back(bench::result_json(m));
  out.write_json(
      {{"version", version()},
       {"machine", bench::machine_json()},
       {"settings",
        {{"min_time_s", options.measure.min_time}, {"cold", options.measure.cold}, {"seed", options.measure.seed}}},
       {"interrupted", interrupted},
       {"load", load_json(load)},
       {"ceilings", bench::ceilings_json(main_meter, meters)},
       {"results", rows}});
  bench::print_ceilings(main_meter, meters, out.text());
  out.print("\n");
  bench::print_table(results, out.text());
  if (load && load->busy()) out.print("{}\n", bench::busy_text(*load));
  const int status = summarize(results, options);
  return interrupted ? kExitInterrupted : status;
}

}  // namespace

Action add_bench(CLI::App& app) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command = app.add_subcommand("bench", "Measure kernels and the machine's ceilings in the same process");
  command->add_option("cases", options->file, "YAML file of cases; flags win over what it says");
  options->flags.add_options(*command);
  command->add_option("--compare", options->compare, "Measure the values of this option in turns, against the first");
  options->measure_flags.add_options(*command);
  command->add_option("--processors", options->processors, kProcessorsHelp)->option_text("LIST");
  command->add_option("--max-runs", options->max_runs, "Runs of each case at most")->capture_default_str();
  command->add_flag("--cold", options->measure.cold, "Flush the caches before every run (default: same buffers, warm)");
  command->add_flag("--refcheck", options->measure.refcheck, "Compare with the reference (large cases: a sample)");
  command->add_option("--csv", options->csv, "Write comma-separated values to FILE")->option_text("FILE");
  command->add_flag("--strict", options->strict, "Exit with 1 if a target of the case file is missed");
  command->add_flag("--list", options->list, "Print the cases, measure nothing");
  options->output.add_option(*command);
  command->footer(
      "Lists and ranges: --num-heads 16,128  --kv-len 1k:8k:*2  --batch 1:9:+4; k is 1024.\n"
      "Shares are of the ceiling that bounds the kernel: the bf16 peak (bf16 or quantized operands on a row with a\n"
      "bf16 dot product), the f32 peak (all other attention), a copy of the bytes read and written (cache tools), "
      "DRAM\n"
      "or L3 reads (merge_states, index tools). The ratio of top_k is that of std::nth_element's time to its own.\n"
      "On a GPU: graphs of runs between events, in turns over enough copies of the case's memory to pass the L2 "
      "cache;\n"
      "shares are of what takes the GPU longer, moving the bytes (its read or copy bandwidth) or the arithmetic (its\n"
      "mma.sync peak). In the emulator: one run, whose time says nothing about the GPU.\n\n"
      "Examples:\n  libmla bench --op decode --num-heads 16,128 --kv-len 4096,32768 --cache bf16,f16\n"
      "  libmla bench --batch-spec 8q1s4k,2q2k_32q1s1k --model deepseek-v2-lite\n"
      "  libmla bench --trace data/mooncake_conversation_sample.jsonl --batch 64 --clip 16k --num-heads 16\n"
      "  libmla bench --op decode_sparse --cache fp8_ds_mla --batch 16 --topk 2048 --num-heads 16,128\n"
      "  libmla bench --op copy_pages --cache fp8_dsv4 --page-size 256 --to-page-size 64 --kv-len 32k\n"
      "  libmla bench --page-size 64,1 --compare page-size --refcheck\n"
      "  libmla bench bench/targets.yaml --json=targets.json\n"
      "  libmla bench --device cuda --num-heads 16,128 --batch 64 --kv-len 4k,32k\n"
      "  libmla bench bench/gpu_targets.yaml --device cuda\n"
      "\nExit status: 0 success, 1 a reference check failed (or, with --strict, a target), 2 unusable input,\n"
      "130 interrupted (the table and the files hold the cases that were done).");
  return [options] { return run_bench(*options); };
}

}  // namespace mla::cli
