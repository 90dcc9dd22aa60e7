// SPDX-License-Identifier: Apache-2.0
// `libmla quant-report` shows bytes per token and accuracy of every cache format, side by side.
#include <memory>
#include <string>

#include "mla/backend.h"
#include "mla/command.h"
#include "mla/output.h"
#include "mla/quant_report/quant_error.h"
#include "mla/renamed_option.h"
#include "mla/values.h"

namespace mla::cli {
namespace {

struct Options {
  RenamedOption heads{"16"};
  std::string kv_len = "4k", queries = "4", seed = "1", backend;
  Output output;
};

QuantOptions parse(const Options& options) {
  QuantOptions parsed;
  parsed.heads = static_cast<int32_t>(parse_int(options.heads.where(), options.heads.text(), 1, 1024));
  parsed.kv_len = static_cast<int32_t>(parse_int("--kv-len", options.kv_len, 1, 1 << 20));
  parsed.queries = static_cast<int32_t>(parse_int("--queries", options.queries, 1, 1024));
  if (parsed.queries > parsed.kv_len)
    throw UsageError("--queries: expected at most --kv-len = {}, got {}", parsed.kv_len, parsed.queries);
  parsed.seed = static_cast<uint64_t>(parse_int("--seed", options.seed, 0));
  check_backend_name("--backend", options.backend);
  if (options.backend != "auto") parsed.backend = options.backend;
  return parsed;
}

std::string error_text(double error) { return error == 0.0 ? "0" : fmt::format("{:.1e}", error); }

int report(const Options& options) {
  options.output.check_target();
  const QuantOptions parsed = parse(options);
  const std::vector<QuantError> errors = quant_errors(parsed);

  Table table({"cache", "scales", "head dims", "bytes/token", "of bf16", "output error", "worst", "lse error", "worst"},
              3);
  Json formats = Json::array();
  for (const QuantError& e : errors) {
    table.add_row({e.cache, e.scales, fmt::format("{}/{}", e.d_qk, e.d_v), std::to_string(e.bytes_per_token),
                   human_percent(static_cast<double>(e.bytes_per_token) / static_cast<double>(e.bf16_bytes_per_token)),
                   error_text(e.output_rms), error_text(e.output_worst), error_text(e.lse_rms),
                   error_text(e.lse_worst)});
    formats.push_back({{"cache", e.cache},
                       {"scales", e.scales},
                       {"backend", e.backend},
                       {"d_qk", e.d_qk},
                       {"d_v", e.d_v},
                       {"bytes_per_token", e.bytes_per_token},
                       {"output_error_rms", e.output_rms},
                       {"output_error_worst", e.output_worst},
                       {"lse_error_rms", e.lse_rms},
                       {"lse_error_worst", e.lse_worst}});
  }
  options.output.write_json({{"version", version()},
                             {"heads", parsed.heads},
                             {"requests", parsed.requests},
                             {"kv_len", parsed.kv_len},
                             {"queries", parsed.queries},
                             {"seed", parsed.seed},
                             {"formats", formats}});
  options.output.print("{} of {}, {}, {} each; against the same attention over a bf16 cache\n\n",
                       counted(parsed.requests, "request"), counted(parsed.kv_len, "token"),
                       counted(parsed.heads, "head"),
                       parsed.queries == 1 ? "1 query" : fmt::format("{} queries", parsed.queries));
  table.print(options.output.text());
  options.output.print(
      "\nOutput errors are ||o - o_bf16|| / ||o_bf16|| of one query's head, lse errors |lse - lse_bf16|: root mean\n"
      "square over queries and heads, and the worst of them. The activations are those of `libmla replay`: rows of "
      "root\n"
      "mean square 1, one channel in 64 five times as large, and an attention sink at token 0. fp8 has the scale that\n"
      "calibration on these rows would give.\n");
  return 0;
}

}  // namespace

Action add_quant_report(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("quant-report", "Bytes per token and error of every cache format");
  options->heads.add(*command, "--num-heads", "--heads", "Query heads")->capture_default_str();
  command->add_option("--kv-len", options->kv_len, "Tokens in the cache")->capture_default_str();
  command->add_option("--queries", options->queries, "Query tokens, the last ones of the request")
      ->capture_default_str();
  command->add_option("--seed", options->seed, "Seed of the activations")->capture_default_str();
  command->add_option("--backend", options->backend, "Row or family to force (else MLA_BACKEND, else the best)");
  options->output.add_option(*command);
  command->footer(
      "Examples:\n  libmla quant-report\n  libmla quant-report --num-heads 128 --kv-len 16k --json=formats.json\n"
      "\nExit status: 0 success, 2 unusable input.");
  return [options] { return report(*options); };
}

}  // namespace mla::cli
