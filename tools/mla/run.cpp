// SPDX-License-Identifier: Apache-2.0
// `libmla run` runs one operation on random data, checks it against the reference and times it.
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

struct RunOptions {
  bench::SettingFlags flags;
  bench::MeasureFlags measure{"0.2"};
  Output output;
};

// Of the operations that leave a choice, where it is not the usual one.
std::string compute_of(const bench::Case& one) {
  return one.compute != Compute::kDefault ? fmt::format(", compute {}", name(one.compute)) : "";
}

// Returns what keys, rows or indices stand for, and which keys are listed.
std::string groups_of(const bench::Case& one) {
  std::string text;
  if (one.ratio > 1) text += fmt::format(" in groups of {}{}", one.ratio, one.list_tokens ? ", all of them" : "");
  if (one.blocks > 0) text += fmt::format(", {} of {}", counted(one.blocks, "listed block"), one.block_size);
  return text;
}

std::string keys_of(const bench::Case& one) {
  return one.indexer_format != IndexerFormat::kFP8 ? fmt::format(", keys {}", name(one.indexer_format)) : "";
}

std::string logits_of(const bench::Case& one) {
  return one.logits_dtype != DType::kF32 ? fmt::format(", logits {}", name(one.logits_dtype)) : "";
}

// Only what the operation has.
std::string describe(const bench::Case& one) {
  const std::string requests = counted(static_cast<int64_t>(one.requests.size()), "request");
  const std::string queries = counted(one.total_queries(), "query token");
  const std::string_view type = name(one.q_dtype);
  switch (one.op) {
    case Op::kDecode:
      return fmt::format("{}, {}, {} in all, {}, head dims {}/{}, cache {}, queries {}{}", requests, queries,
                         counted(one.total_kv(), "key"), counted(one.heads, "head"), one.d_qk, one.d_v, name(one.cache),
                         type, compute_of(one));
    case Op::kPrefill:
      return fmt::format("{}, {}, {} in all, {}, head dims {}/{}, q, k and v {}{}", requests, queries,
                         counted(one.total_kv(), "key"), counted(one.heads, "head"), one.d_qk, one.d_v, type,
                         compute_of(one));
    case Op::kMergeStates:
      return fmt::format("{} of {}, {}, d_v {}, states {}", counted(one.states, "state"), queries,
                         counted(one.heads, "head"), one.d_v, type);
    case Op::kFinishOutput:
      return fmt::format("{}, {}, d_v {}, {} to {}{}", queries, counted(one.heads, "head"), one.d_v, type,
                         name(one.out_dtype), one.gate == kit::FinishSpec::Gate::kNone ? "" : ", gated");
    case Op::kDecodeSparse:
      return fmt::format(
          "{}, {} keys of a pool of {}{}, {}, head dims {}/{}, cache {}, queries {}{}", queries, one.topk,
          one.requests.front().kv_len,
          one.extra_topk > 0 ? fmt::format(" and {} of a second one of {}", one.extra_topk, name(one.extra_cache)) : "",
          counted(one.heads, "head"), one.d_qk, one.d_v, name(one.cache), type, compute_of(one));
    case Op::kPrefillSparse:
      return fmt::format("{}, {} of {}, {}, head dims {}/{}, keys {}, queries {}", queries, one.topk,
                         counted(one.total_kv(), "key"), counted(one.heads, "head"), one.d_qk, one.d_v, name(one.cache),
                         type);
    case Op::kAppendRope:
      return fmt::format("{}, {}, head dims {}/{}, cache {}, rows {}{}", counted(one.total_kv(), "token"),
                         counted(one.heads, "query head"), one.d_qk, one.d_v, name(one.cache), type,
                         one.norm ? ", normalized" : "");
    case Op::kCopyPages:
      return fmt::format("{}, head dims {}/{}, {} in pages of {} to {} in pages of {}",
                         counted(one.total_kv(), "token"), one.d_qk, one.d_v, name(one.cache), one.page_size,
                         name(one.to_cache), one.to_page_size);
    case Op::kBlockTableToCsr:
      return fmt::format("{}, {} in all, pages of {}", requests, counted(one.total_kv(), "token"), one.page_size);
    case Op::kPhysicalSlots:
      return fmt::format("{}, {} indices each{}, pages of {}", queries, one.topk, groups_of(one), one.page_size);
    case Op::kAppendIndexer: return fmt::format("{}, rows {}{}", counted(one.total_kv(), "token"), type, keys_of(one));
    case Op::kIndexerLogits:
      return fmt::format("{}, {}, {} in all{}, {}, queries {}{}{}", requests, queries, counted(one.total_kv(), "token"),
                         groups_of(one), counted(one.heads, "head"), type, keys_of(one), logits_of(one));
    case Op::kTopK:
      return fmt::format("{}, {} of {} {} logits{}", queries, one.topk, one.requests.front().kv_len,
                         name(one.logits_dtype),
                         one.block_size > 1 ? fmt::format(" in blocks of {}", one.block_size) : "");
    case Op::kIndexerTopK:
      return fmt::format("{}, {}, {} of {} in all{}, {}, queries {}{}{}", requests, queries, one.topk,
                         counted(one.total_kv(), "token"), groups_of(one), counted(one.heads, "head"), type,
                         keys_of(one), logits_of(one));
    case Op::kCompress:
      return fmt::format(
          "{}, {}, groups of {}{}, {} channels, {}, tokens {}{}", requests, counted(one.total_queries(), "new token"),
          one.ratio, one.overlap ? " with overlap" : "", one.d_qk,
          one.compress_to == kit::CompressSpec::To::kCache     ? fmt::format("cache {}", name(one.cache))
          : one.compress_to == kit::CompressSpec::To::kIndexer ? fmt::format("to the indexer's cache{}", keys_of(one))
                                                               : "latents only",
          type, one.append ? fmt::format(", keys to {}", name(*one.append)) : "");
    case Op::kAppend:
    case Op::kGather:
      return fmt::format("{}, {} in all, head dims {}/{}, cache {}, rows {}", requests,
                         counted(one.total_kv(), "token"), one.d_qk, one.d_v, name(one.cache), type);
  }
  return {};
}

int run_one(const RunOptions& options) {
  options.output.check_target();
  bench::MeasureOptions measure;
  measure.refcheck = true;
  options.measure.apply(measure);
  const bench::Settings settings = options.flags.settings();
  for (const auto& [key, setting] : settings)
    if (bench::count_values(key, setting) != 1)
      throw UsageError("{}: expected one value, got '{}'; `libmla bench` takes lists", setting.where, setting.text);
  const std::vector<bench::CaseGroup> groups = bench::expand(settings);
  bench::Meters meters;
  const bench::Measurement m = bench::measure(groups.front(), meters, measure, [](const std::string&) {}).front();

  const Output& out = options.output;
  Json document = {{"version", version()}, {"machine", bench::machine_json()}};
  document.update(bench::result_json(m));
  out.write_json(document);
  out.print("{}: {}\n", name(m.description.op), describe(m.description));
  const std::string& device = m.description.device;
  const bool on_gpu = device.starts_with("cuda"), emulated = device.starts_with("emulated");
  out.print("backend  {}, {}\n", m.backend, on_gpu ? device : counted(m.description.threads, "thread"));
  if (emulated) out.print("device   {}: its kernels in the emulator; times say nothing about the GPU\n", device);
  if (!m.plan.empty()) out.print("plan     {}\n", m.plan);
  out.print("error    {:.3e}{}\n", m.error.value_or(0.0),
            m.error_text.empty() ? " (within tolerance)" : "  TOO LARGE: " + m.error_text);
  if (m.method_error) out.print("method   {:.3e} from the unrounded products\n", *m.method_error);
  out.print("time     {} (p10 {}, p90 {}, {})\n", human_seconds(m.median_s), human_seconds(m.p10_s),
            human_seconds(m.p90_s), counted(m.runs, "run"));
  if (m.gflops > 0.0) out.print("compute  {:.1f} GFLOP/s\n", m.gflops);
  out.print("memory   {:.1f} GB/s\n", m.gbps);
  if (m.ceiling_share)
    out.print("share    {} of the {} ceiling ({:.1f} {}){}\n", human_percent(*m.ceiling_share), m.ceiling_kind,
              m.ceiling, m.gflops > 0.0 ? "GFLOP/s" : "GB/s",
              m.noisy() ? fmt::format("; {}", bench::kNoisyRemark) : "");
  else
    out.print("share    -\n");
  if (m.plan_s) out.print("plan     {}, on the device\n", human_seconds(*m.plan_s));
  if (m.ratio) out.print("speed    {:.2f} times std::nth_element on the same rows and threads\n", *m.ratio);
  return m.error_text.empty() ? 0 : 1;
}

}  // namespace

Action add_run(CLI::App& app) {
  auto options = std::make_shared<RunOptions>();
  CLI::App* command = app.add_subcommand("run", "One operation on random data, checked against the reference");
  options->flags.add_options(*command, {"trace", "clip"});
  options->measure.add_options(*command);
  options->output.add_option(*command);
  command->footer(
      "Large problems are compared with the reference on a sample of requests, queries and heads.\n\n"
      "Examples:\n  libmla run --op decode --model deepseek-v3 --kv-len 4k --batch 4\n"
      "  libmla run --op prefill --num-heads 16 --kv-len 1k --backend cpu_avx2\n"
      "  libmla run --op decode --batch-spec 8q1s4k_2q4s1k\n"
      "  libmla run --op decode_sparse --cache fp8_dsv4 --num-heads 64 --topk 128 --page-size 256 --extra-topk 512 "
      "--sink "
      "true\n"
      "  libmla run --kv-len 300 --num-heads 16 --device emulated:sm120\n  libmla run --batch 64 --kv-len 4k --device "
      "cuda\n"
      "\nExit status: 0 success, 1 the result is wrong, 2 unusable input.");
  return [options] { return run_one(*options); };
}

}  // namespace mla::cli
