// SPDX-License-Identifier: Apache-2.0
// `mla run`: one operation on random data, checked against the reference and timed.
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
  bench::SettingFlags flags;
  bench::MeasureOptions measure;
  Output output;
};

std::string describe(const bench::Case& one) {
  return fmt::format(
      "{}: {} request{}, {} query token{}, {} keys in all, {} heads, head dims {}/{}, cache {}, queries {}",
      name(one.op), one.requests.size(), one.requests.size() == 1 ? "" : "s", one.total_queries(),
      one.total_queries() == 1 ? "" : "s", one.total_kv(), one.heads, one.d_qk, one.d_v, name(one.cache),
      name(one.q_dtype));
}

int run_one(const Options& options) {
  options.output.check_target();
  const std::vector<bench::CaseGroup> groups = bench::expand(options.flags.settings());
  if (groups.size() != 1 || groups.front().cases.size() != 1)
    throw UsageError("run: expected one value for each option; `mla bench` takes lists");
  bench::Meters meters;
  const bench::Measurement m =
      bench::measure(groups.front(), meters, options.measure, [](const std::string&) {}).front();

  const Output& out = options.output;
  out.print("{}\n", describe(m.description));
  out.print("backend  {}, {} thread{}\n", m.backend, m.description.threads, m.description.threads == 1 ? "" : "s");
  if (!m.plan.empty()) out.print("plan     {}\n", m.plan);
  out.print("error    {:.3e}{}\n", m.error.value_or(0.0),
            m.error_text.empty() ? " (within tolerance)" : "  TOO LARGE: " + m.error_text);
  out.print("time     {} (p10 {}, p90 {}, {} runs)\n", human_seconds(m.median_s), human_seconds(m.p10_s),
            human_seconds(m.p90_s), m.runs);
  if (m.gflops > 0.0) out.print("compute  {:.1f} GFLOP/s\n", m.gflops);
  out.print("memory   {:.1f} GB/s\n", m.gbps);
  out.print("share    {} of the {} ceiling ({:.1f} {})\n", human_percent(m.ceiling_share), m.ceiling_kind, m.ceiling,
            m.gflops > 0.0 ? "GFLOP/s" : "GB/s");
  Json document = {{"version", version()}, {"machine", bench::machine_json()}};
  document.update(bench::result_json(m));
  out.write_json(document);
  return m.error_text.empty() ? 0 : 1;
}

}  // namespace

Action add_run(CLI::App& app) {
  auto options = std::make_shared<Options>();
  options->measure.refcheck = true;
  options->measure.min_time = 0.2;
  CLI::App* command = app.add_subcommand("run", "One operation on random data, checked against the reference");
  options->flags.add_options(*command);
  command->add_option("--min-time", options->measure.min_time, "Seconds of runs")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_option("--seed", options->measure.seed, "Seed of the random data")->capture_default_str();
  options->output.add_option(*command);
  command->footer(
      "Large problems are compared with the reference on a sample of requests, queries and heads.\n\n"
      "Examples:\n  mla run --op decode --model deepseek-v3 --kv-len 4k --batch 4\n"
      "  mla run --op prefill --heads 16 --kv-len 1k --backend cpu_avx2\n"
      "  mla run --op decode --batch-spec 8q1s4k_2q4s1k\n"
      "\nExit status: 0 success, 1 the result is wrong, 2 unusable input.");
  return [options] { return run_one(*options); };
}

}  // namespace mla::cli
