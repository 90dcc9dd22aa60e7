// SPDX-License-Identifier: Apache-2.0
// `libmla check` runs random problems over every operation, format and backend, and compares them with the reference.
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "kit/sweep.h"
#include "mla/command.h"
#include "mla/devices.h"
#include "mla/interrupt.h"
#include "mla/output.h"
#include "mla/renamed_option.h"
#include "mla/values.h"

namespace mla::cli {
namespace {

constexpr int64_t kMaxPrinted = 20;

struct CheckOptions {
  std::string op, backend, cache, indexer_format, device, seed = "1", cases = "0";
  RenamedOption threads;
  bool quick = false;
  Output output;
};

kit::SweepOptions sweep_options(const CheckOptions& options) {
  kit::SweepOptions sweep;
  if (!options.op.empty()) sweep.op = parse_op("--op", options.op);
  check_backend_name("--backend", options.backend);
  if (options.backend != "auto") sweep.backend = options.backend;
  if (!options.cache.empty()) sweep.cache = parse_cache("--cache", options.cache);
  if (!options.indexer_format.empty()) sweep.indexer_format = parse_indexer("--indexer-format", options.indexer_format);
  sweep.device = usable_device("--device", options.device);
  sweep.quick = options.quick;
  sweep.cases = parse_int("--cases", options.cases, 0, 1 << 24);
  sweep.seed = static_cast<uint64_t>(parse_int("--seed", options.seed, 0));
  if (!options.threads.text().empty())
    sweep.num_threads = static_cast<int32_t>(parse_int(options.threads.where(), options.threads.text(), 0, 4096));
  return sweep;
}

int check(const CheckOptions& options) {
  const InterruptGuard guard;
  const kit::SweepOptions sweep = sweep_options(options);
  const Output& out = options.output;
  out.check_target();
  Progress progress("checking");
  const auto start = std::chrono::steady_clock::now();
  int64_t failed = 0, asked_for = 0;
  struct Tally {
    int64_t cases = 0, failed = 0;
  };
  std::map<std::pair<std::string, std::string>, Tally> tallies;
  const Result<kit::SweepResult> result = kit::sweep(sweep, [&](int64_t done, int64_t total, const kit::Outcome& last) {
    Tally& tally = tallies[{last.op, last.backend}];
    ++tally.cases;
    asked_for = total;
    if (!last.ok) {
      ++tally.failed;
      progress.clear();
      if (++failed <= kMaxPrinted) print_to(stderr, "FAILED {}\n", last.line());
      if (failed == kMaxPrinted + 1) print_to(stderr, "... more failures; --json lists the first hundred\n");
    }
    progress.update(done, total, fmt::format("{} failed  {} on {}", failed, last.op, last.backend));
    return !stop_requested;
  });
  progress.clear();
  if (!result.ok()) throw UsageError("{}", result.status().message());
  const bool interrupted = result->cases < asked_for;
  if (interrupted) print_to(stderr, "INTERRUPTED: {} of {} checked\n", result->cases, counted(asked_for, "case"));

  Json failures = Json::array();
  for (const kit::Outcome& outcome : result->failures)
    failures.push_back({{"op", outcome.op},
                        {"backend", outcome.backend},
                        {"spec", outcome.spec},
                        {"failure", outcome.failure},
                        {"error", outcome.error.max_rel},
                        {"tolerance", outcome.tolerance.max_rel}});
  Table table({"op", "backend", "cases", "failed"}, 2);
  Json backends = Json::array();
  for (const auto& [key, tally] : tallies) {
    const auto& [op, backend] = key;
    table.add_row({op, backend, std::to_string(tally.cases), std::to_string(tally.failed)});
    backends.push_back({{"op", op}, {"backend", backend}, {"cases", tally.cases}, {"failed", tally.failed}});
  }
  Table skipped_table({"backend", "reason", "cases"}, 2);
  Json skipped = Json::array();
  for (const kit::Skipped& entry : result->skipped) {
    skipped_table.add_row({entry.backend, entry.reason, std::to_string(entry.cases)});
    skipped.push_back({{"backend", entry.backend}, {"reason", entry.reason}, {"count", entry.cases}});
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  out.write_json({{"cases", result->cases},
                  {"total_cases", asked_for},
                  {"interrupted", interrupted},
                  {"failed", result->failed},
                  {"failures", failures},
                  {"backends", backends},
                  {"skipped", skipped},
                  {"seconds", seconds},
                  {"seed", sweep.seed},
                  {"device", sweep.device}});
  table.print(out.text());
  out.print("\n{}, {} failed, in {}; seed {}\n", counted(result->cases, "case"), result->failed, human_seconds(seconds),
            sweep.seed);
  if (!skipped.empty()) {
    out.print("\nskipped:\n\n");
    skipped_table.print(out.text());
  }
  if (result->failed > 0) return 1;
  return interrupted ? kExitInterrupted : 0;
}

}  // namespace

Action add_check(CLI::App& app) {
  auto options = std::make_shared<CheckOptions>();
  CLI::App* command = app.add_subcommand("check", "Correctness sweep against the float64 reference");
  command->add_option("--op", options->op, "One operation: " + op_names());
  command->add_option("--backend", options->backend,
                      "One row or family; else every usable row, whatever MLA_BACKEND says");
  command->add_option("--device", options->device, "cpu, cuda:N or emulated:sm90 (else MLA_EMULATE, else cpu)");
  command->add_option("--cache", options->cache, "One format; for prefill and merge_states the data type bf16 or f16");
  command->add_option("--indexer-format", options->indexer_format,
                      "One format of the indexer's keys, and operations on these alone: " + indexer_names());
  command->add_flag("--quick", options->quick, "A tenth of the cases");
  command->add_option("--cases", options->cases, "Cases of every operation and format; 0 = 120, 12 with --quick")
      ->capture_default_str();
  command->add_option("--seed", options->seed, "Seed of the random problems")->capture_default_str();
  options->threads.add(*command, "--num-threads", "--threads", "Threads; 0 = all that the process may use (default)");
  options->output.add_option(*command);
  command->footer(
      "Examples:\n  libmla check --quick\n  libmla check --cases 2000 --seed 7\n  libmla check --op decode --backend "
      "cpu_avx2 "
      "--cache f16 --seed 7\n"
      "  libmla check --device emulated:sm120 --quick\n  libmla check --device cuda --cases 2000\n"
      "\nOn a terminal a line shows how far it is and how long the rest may take. Ctrl-C ends the sweep with a report "
      "of "
      "what was checked.\n"
      "\nExit status: 0 all cases pass, 1 some fail, 2 unusable input, 130 interrupted, and no case failed until "
      "then.");
  return [options] { return check(*options); };
}

}  // namespace mla::cli
