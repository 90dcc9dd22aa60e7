// SPDX-License-Identifier: Apache-2.0
// `mla bench`: ceilings and kernels in one process.
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "mla/backend.h"
#include "mla/bench/measure.h"
#include "mla/bench/report.h"
#include "mla/bench_options.h"
#include "mla/command.h"
#include "mla/output.h"

namespace mla::cli {
namespace {

struct Options {
  std::string file, compare, csv;
  bench::SettingFlags flags;
  bench::MeasureOptions measure;
  bool strict = false, list = false;
  Output output;
};

std::vector<bench::CaseGroup> groups_of(const Options& options) {
  bench::Settings settings = options.flags.settings();
  if (!options.compare.empty()) {
    std::string key = options.compare;
    for (char& c : key) c = c == '-' ? '_' : c;
    settings["compare"] = {.text = key, .where = "--compare"};
  }
  return options.file.empty() ? bench::expand(settings) : bench::load_case_file(options.file, settings);
}

int summarize(const std::vector<bench::Measurement>& results, const Options& options) {
  int64_t met = 0, missed = 0, wrong = 0;
  for (const bench::Measurement& m : results) {
    if (m.met) ++(*m.met ? met : missed);
    if (m.error_text.empty()) continue;
    ++wrong;
    fmt::print(stderr, "WRONG {} on {}: {}\n", name(m.description.op), m.backend, m.error_text);
  }
  if (met + missed > 0) options.output.print("\ntargets: {} met, {} missed\n", met, missed);
  return wrong > 0 || (options.strict && missed > 0) ? 1 : 0;
}

int list_cases(const std::vector<bench::CaseGroup>& groups, const Output& out) {
  size_t count = 0;
  for (const bench::CaseGroup& group : groups)
    for (const bench::Case& one : group.cases) {
      out.print("{} {} cache={} heads={} batch={} kv={} page_size={} threads={} backend={} memory={}\n", one.label,
                name(one.op), name(one.cache), one.heads, one.requests.size(), one.total_kv(), one.page_size,
                one.threads, one.backend.empty() ? "auto" : one.backend,
                human_bytes(static_cast<double>(bench::memory_needed(one))));
      ++count;
    }
  out.print("{} cases\n", count);
  return 0;
}

int run_bench(const Options& options) {
  if (!(options.measure.min_time > 0.0)) throw UsageError("--min-time: expected seconds above 0");
  const std::vector<bench::CaseGroup> groups = groups_of(options);
  if (options.list) return list_cases(groups, options.output);
  options.output.check_target();
  if (!options.csv.empty()) check_writable("--csv", options.csv);
  size_t total = 0;
  for (const bench::CaseGroup& group : groups) total += group.cases.size();

  const Output& out = options.output;
  bench::Meters meters;
  bench::CeilingMeter& main_meter = meters.of(groups.front().cases.front().threads);
  std::vector<bench::Measurement> results;
  Progress progress("bench");
  for (const bench::CaseGroup& group : groups) {
    const auto note = [&](const std::string& what) {
      progress.update(static_cast<int64_t>(results.size()), static_cast<int64_t>(total),
                      fmt::format("{} {}", group.cases.front().label, what));
    };
    for (bench::Measurement& m : bench::measure(group, meters, options.measure, note)) results.push_back(std::move(m));
  }
  progress.clear();
  bench::print_ceilings(main_meter, out.text());
  out.print("\n");
  bench::print_table(results, out.text());
  const int status = summarize(results, options);
  if (!options.csv.empty()) bench::write_csv(results, options.csv);

  Json rows = Json::array();
  for (const bench::Measurement& m : results) rows.push_back(bench::result_json(m));
  out.write_json(
      {{"version", version()},
       {"machine", bench::machine_json()},
       {"settings",
        {{"min_time_s", options.measure.min_time}, {"cold", options.measure.cold}, {"seed", options.measure.seed}}},
       {"ceilings", bench::ceilings_json(main_meter)},
       {"results", rows}});
  return status;
}

}  // namespace

Action add_bench(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("bench", "Measure kernels and the machine's ceilings in the same process");
  command->add_option("cases", options->file, "YAML file of cases; flags win over what it says");
  options->flags.add_options(*command);
  command->add_option("--compare", options->compare, "Measure the values of this option in turns, against the first");
  command->add_option("--min-time", options->measure.min_time, "Seconds of runs for each case")->capture_default_str();
  command->add_option("--max-runs", options->measure.max_runs, "Runs of each case at most")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_flag("--cold", options->measure.cold, "Flush the caches before every run (default: same buffers, warm)");
  command->add_flag("--refcheck", options->measure.refcheck, "Compare with the reference (large cases: a sample)");
  command->add_option("--seed", options->measure.seed, "Seed of the random data")->capture_default_str();
  command->add_option("--csv", options->csv, "Write comma-separated values to FILE")->option_text("FILE");
  command->add_flag("--strict", options->strict, "Exit with 1 if a target of the case file is missed");
  command->add_flag("--list", options->list, "Print the cases, measure nothing");
  options->output.add_option(*command);
  command->footer(
      "Lists and ranges: --heads 16,128  --kv-len 1k:8k:*2  --batch 1:9:+4; k is 1024.\n"
      "Shares are of the ceiling that bounds the kernel: the bf16 peak (bf16 operands on a row with a bf16 dot\n"
      "product), the f32 peak (all other attention), a copy of the same bytes (append, gather), DRAM or L3 reads\n"
      "(merge_states).\n\n"
      "Examples:\n  mla bench --op decode --heads 16,128 --kv-len 4096,32768 --cache bf16,f16\n"
      "  mla bench --batch-spec 8q1s4k,2q2k_32q1s1k --model deepseek-v2-lite\n"
      "  mla bench --trace data/mooncake_conversation_sample.jsonl --batch 64 --clip 16k --heads 16\n"
      "  mla bench --page-size 64,1 --compare page-size --refcheck\n"
      "  mla bench bench/targets.yaml --json=targets.json\n"
      "\nExit status: 0 success, 1 a reference check failed (or, with --strict, a target), 2 unusable input.");
  return [options] { return run_bench(*options); };
}

}  // namespace mla::cli
