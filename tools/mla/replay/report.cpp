// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/report.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <numeric>

namespace mla::cli::replay {
namespace {

double rate(double amount, double seconds) { return seconds > 0.0 ? amount / seconds : 0.0; }

Json percentiles_json(const std::optional<Percentiles>& p) {
  const double none = std::nan("");  // null in the document
  return {{"p50", p ? p->p50 : none}, {"p90", p ? p->p90 : none}, {"p99", p ? p->p99 : none}};
}

Json left_out_json(std::span<const LeftOut> requests) {
  Json list = Json::array();
  for (const LeftOut& request : requests)
    list.push_back({{"line", request.line},
                    {"input_length", request.input_length},
                    {"output_length", request.output_length},
                    {"computed_tokens", request.num_computed}});
  return list;
}

/// Returns text such as "2 of 16 requests: line 12 (87169 + 402 tokens), line 14 (2012 + 354 tokens, given up after
/// 900)"
std::string left_out_text(std::span<const LeftOut> requests, int64_t total) {
  constexpr size_t kMost = 8;
  std::string text = fmt::format("{} of {}:", requests.size(), counted(total, "request"));
  for (size_t i = 0; i < std::min(requests.size(), kMost); ++i) {
    const LeftOut& request = requests[i];
    text += fmt::format("{} line {} ({} + {} tokens", i > 0 ? "," : "", request.line, request.input_length,
                        request.output_length);
    text += request.num_computed > 0 ? fmt::format(", given up after {})", request.num_computed) : ")";
  }
  if (requests.size() > kMost) text += fmt::format(" and {} more", requests.size() - kMost);
  return text;
}

void add_percentiles(Table& table, const char* label, const std::optional<Percentiles>& p) {
  if (!p) return table.add_row({label, "-", "-", "-"});
  table.add_row({label, human_seconds(p->p50 / 1e3), human_seconds(p->p90 / 1e3), human_seconds(p->p99 / 1e3)});
}

/// Names the phases in which an operation runs; both: one call for the tokens of prompts and answers.
struct OperationPhases {
  std::string_view name;
  std::optional<Phase> prefill, decode, both;
};

/// Returns the operations in the order in which a layer has them. `prefill` and `decode` compute attention.
std::vector<OperationPhases> operation_phases(Op prefill, Op decode) {
  std::vector<OperationPhases> all = {
      {.name = "append_rope", .prefill = Phase::kPrefillPrologue, .decode = Phase::kDecodePrologue, .both = {}},
      {.name = "compress",
       .prefill = Phase::kPrefillCompress,
       .decode = Phase::kDecodeCompress,
       .both = Phase::kCompress},
      {.name = "append_indexer", .prefill = {}, .decode = {}, .both = Phase::kAppendKeys},
      {.name = "gather", .prefill = Phase::kGather, .decode = {}, .both = {}},
      {.name = "up_projection", .prefill = Phase::kUpProjection, .decode = {}, .both = {}},
      {.name = "projections", .prefill = Phase::kPrefillProjection, .decode = Phase::kDecodeProjection, .both = {}},
      {.name = "indexer_logits", .prefill = Phase::kPrefillIndexer, .decode = Phase::kDecodeIndexer, .both = {}},
      {.name = "top_k", .prefill = Phase::kPrefillTopK, .decode = Phase::kDecodeTopK, .both = {}},
      {.name = "physical_slots", .prefill = Phase::kPrefillSlots, .decode = Phase::kDecodeSlots, .both = {}},
      {.name = name(prefill), .prefill = Phase::kPrefillAttention, .decode = {}, .both = {}}};
  if (decode != prefill)
    all.push_back({.name = name(decode), .prefill = Phase::kPrefillSparse, .decode = {}, .both = {}});
  all.back().decode = Phase::kDecodeAttention;
  all.push_back(
      {.name = "finish_output", .prefill = Phase::kPrefillFinish, .decode = Phase::kDecodeFinish, .both = {}});
  all.push_back({.name = "merge_states", .prefill = Phase::kMerge, .decode = Phase::kDecodeMerge, .both = {}});
  all.push_back({.name = "plan", .prefill = {}, .decode = {}, .both = Phase::kPlan});
  return all;
}

}  // namespace

std::optional<Percentiles> percentiles(std::vector<double> samples) {
  if (samples.empty()) return std::nullopt;
  std::sort(samples.begin(), samples.end());
  const auto at = [&](double share) {
    const double place = share * static_cast<double>(samples.size() - 1);
    const auto low = static_cast<size_t>(place);
    const size_t high = std::min(low + 1, samples.size() - 1);
    return samples[low] + (place - static_cast<double>(low)) * (samples[high] - samples[low]);
  };
  return Percentiles{at(0.5), at(0.9), at(0.99)};
}

void Report::collect(const Scheduler& scheduler, const Recorder& recorder, const CheckLog& log, const Ceilings& best) {
  ceilings = best;
  std::vector<double> first, per_token;
  total_requests = std::ssize(scheduler.sequences());
  requests = scheduler.num_finished();
  evicted_blocks = scheduler.prefix_cache().num_evicted_blocks();
  for (const Sequence& sequence : scheduler.sequences()) {
    if (sequence.state == SequenceState::kWaiting) continue;
    if (sequence.state == SequenceState::kLeftOut)
      left_out.push_back({.line = sequence.request->line,
                          .input_length = sequence.request->input_length,
                          .output_length = sequence.request->output_length,
                          .num_computed = sequence.num_computed});
    const int64_t in_prompt = std::min(sequence.num_computed, sequence.request->input_length);
    input_tokens += in_prompt;
    hit_tokens += sequence.num_hit;
    prefill_tokens += in_prompt - sequence.num_hit;
    decode_tokens += sequence.num_output;
    decode_rows += std::max(sequence.num_output - 1, 0);
    draft_tokens += sequence.num_drafts;
    accepted_drafts += sequence.num_accepted;
    if (!std::isnan(sequence.first_token_ms)) first.push_back(sequence.first_token_ms - sequence.arrival_ms);
    if (sequence.state == SequenceState::kFinished && sequence.num_output > 1)
      per_token.push_back((sequence.finished_ms - sequence.first_token_ms) / (sequence.num_output - 1));
  }
  ttft_ms = percentiles(std::move(first));
  tpot_ms = percentiles(std::move(per_token));

  const auto seconds = [&](Phase phase) { return recorder.seconds(phase); };
  for (Phase phase : kAllPhases) {
    phase_seconds.emplace_back(phase, seconds(phase));
    if (is_serving(phase)) serving_seconds += seconds(phase);
  }
  collect_operations(recorder);
  const double prefill_attention = seconds(Phase::kPrefillAttention) + seconds(Phase::kPrefillSparse),
               decode_attention = seconds(Phase::kDecodeAttention);
  const double attention = prefill_attention + decode_attention;
  const auto add_up = [&](std::initializer_list<Phase> phases) {
    return std::accumulate(phases.begin(), phases.end(), 0.0,
                           [&](double sum, Phase phase) { return sum + seconds(phase); });
  };
  prefill_tokens_per_s = rate(
      static_cast<double>(prefill_tokens),
      add_up({Phase::kPrefillPrologue, Phase::kCompress, Phase::kPrefillCompress, Phase::kGather, Phase::kUpProjection,
              Phase::kPrefillIndexer, Phase::kPrefillTopK, Phase::kPrefillSlots, Phase::kPrefillAttention,
              Phase::kPrefillSparse, Phase::kPrefillProjection, Phase::kPrefillFinish, Phase::kMerge}));
  decode_tokens_per_s = rate(static_cast<double>(decode_rows),
                             add_up({Phase::kDecodePrologue, Phase::kDecodeCompress, Phase::kDecodeProjection,
                                     Phase::kDecodeIndexer, Phase::kDecodeTopK, Phase::kDecodeSlots,
                                     Phase::kDecodeAttention, Phase::kDecodeFinish, Phase::kDecodeMerge}));
  prefill_gflops = rate(recorder.prefill_flops() / 1e9, prefill_attention);
  decode_gflops = rate(recorder.decode_flops() / 1e9, decode_attention);
  projection_gflops = rate(recorder.projection_flops() / 1e9, seconds(Phase::kUpProjection));
  gflops = rate((recorder.prefill_flops() + recorder.decode_flops()) / 1e9, attention);
  // Prefill and decode may have different ceilings: the time that the ceilings would take over the time taken.
  ceiling_share = rate(rate(recorder.prefill_flops() / 1e9, best.prefill_gflops) +
                           rate(recorder.decode_flops() / 1e9, best.decode_gflops),
                       attention);

  checks = log.num_checks;
  worst_prefill_decode = log.worst_other_way;
  worst_reference = log.worst_reference;
  worst_error = std::max(worst_prefill_decode, worst_reference);
  checked_rows = log.num_rows;
  worst_row_share = log.worst_row;
  checked_queries = log.num_queries;
  worst_query_share = log.worst_query;
  checked_outputs = log.num_outputs;
  worst_output_share = log.worst_output;
  failures = log.failures;
}

void Report::collect_operations(const Recorder& recorder) {
  for (const OperationPhases& phases : operation_phases(prefill_op, decode_op)) {
    OperationTime time = {.name = std::string(phases.name)};
    const auto add = [&](std::optional<Phase> phase, double* part) {
      if (!phase) return;
      if (*phase != Phase::kPlan) time.calls += recorder.calls(*phase);
      time.seconds += recorder.seconds(*phase);
      if (part != nullptr) *part = recorder.seconds(*phase);
    };
    add(phases.prefill, &time.prefill_seconds);
    add(phases.decode, &time.decode_seconds);
    add(phases.both, nullptr);
    if (time.seconds > 0.0) operations.push_back(std::move(time));
  }
}

Json Report::to_json() const {
  Json phases = Json::object();
  for (const auto& [phase, seconds] : phase_seconds) phases[std::string(name(phase))] = seconds;
  Json by_operation = Json::array();
  for (const OperationTime& one : operations)
    by_operation.push_back({{"operation", one.name},
                            {"calls", one.calls > 0 ? Json(one.calls) : Json(nullptr)},
                            {"ms", one.seconds * 1e3},
                            {"share", rate(one.seconds, serving_seconds)}});
  const double none = std::nan("");
  const bool emulated = device.starts_with("emulated");
  const auto measured = [&](double value) { return emulated ? none : value; };
  return {
      {"requests", requests},
      {"total_requests", total_requests},
      {"interrupted", interrupted},
      {"time_budget", time_budget > 0.0 ? time_budget : none},
      {"left_out", left_out_json(left_out)},
      {"model", model},
      {"cache", cache},
      {"pool_cache", pool_cache.empty() ? Json(nullptr) : Json(pool_cache)},
      {"backends", {{"prefill", prefill_backend}, {"decode", decode_backend}}},
      {"device", device},
      {"threads", threads},
      {"sparse", sparse},
      {"mtp", drafts},
      {"dcp", ranks},
      {"shared_prefix", shared_prefix},
      {"input_tokens", input_tokens},
      {"prefill_tokens", prefill_tokens},
      {"prefix_hit_tokens", hit_tokens},
      {"prefix_hit_share", rate(static_cast<double>(hit_tokens), static_cast<double>(input_tokens))},
      {"evicted_blocks", evicted_blocks},
      {"decode_tokens", decode_tokens},
      {"draft_tokens", draft_tokens},
      {"accepted_drafts", accepted_drafts},
      {"steps", steps},
      {"checks", checks},
      {"tolerance", kTolerance},
      {"worst_error", checks > 0 ? worst_error : none},
      {"worst_error_prefill_decode", checks > 0 ? worst_prefill_decode : none},
      {"worst_error_reference", checks > 0 ? worst_reference : none},
      {"checked_rows", checked_rows},
      {"worst_row_share", checked_rows > 0 ? worst_row_share : none},
      {"checked_queries", checked_queries},
      {"worst_query_share", checked_queries > 0 ? worst_query_share : none},
      {"checked_outputs", checked_outputs},
      {"worst_output_share", checked_outputs > 0 ? worst_output_share : none},
      {"failures", failures},
      {"ttft_ms", percentiles_json(ttft_ms)},
      {"tpot_ms", percentiles_json(tpot_ms)},
      {"prefill_tokens_per_s", prefill_tokens_per_s},
      {"decode_tokens_per_s", decode_tokens_per_s},
      {"operations", by_operation},
      {"phase_seconds", phases},
      {"serving_seconds", serving_seconds},
      {"wall_seconds", wall_seconds},
      {"gflops", gflops},
      {"prefill_gflops", prefill_gflops},
      {"decode_gflops", decode_gflops},
      {"up_projection_gflops", projection_gflops},
      {"ceilings",
       {{"prefill_gflops", measured(ceilings.prefill_gflops)}, {"decode_gflops", measured(ceilings.decode_gflops)}}},
      {"ceiling_share", measured(ceiling_share)},
      {"noisy", noisy()}};
}

void Report::print(const Output& output) const {
  std::FILE* out = output.text();
  const bool emulated = device.starts_with("emulated"), on_gpu = !emulated && device != "cpu";
  if (emulated) output.print("\ndevice {}: its kernels in the emulator; times say nothing about the GPU\n", device);
  if (on_gpu)
    output.print(
        "\ndevice {}: it holds the caches and computes attention; the host makes tokens and projections, whose copies "
        "are not part of serving\n",
        device);
  output.print("\n{}{}, {}, {} cache, {}, prefill on {}, decode on {}\n\n", interrupted ? "INTERRUPTED: " : "", model,
               layers, pool_cache.empty() || pool_cache == cache ? cache : fmt::format("{} + {}", cache, pool_cache),
               counted(threads, "thread"), prefill_backend, decode_backend);
  if (!left_out.empty())
    output.print("left out, for a time budget of {} s: {}\n\n", time_budget, left_out_text(left_out, total_requests));
  Table counts({"", "value", "rate"});
  counts.add_row({"requests finished", fmt::format("{} of {}", requests, total_requests), ""});
  counts.add_row({"prompt tokens computed", fmt::format("{}", prefill_tokens),
                  fmt::format("{:.0f} tokens/s", prefill_tokens_per_s)});
  counts.add_row({"prompt tokens from the prefix cache", fmt::format("{}", hit_tokens),
                  human_percent(rate(static_cast<double>(hit_tokens), static_cast<double>(input_tokens)))});
  counts.add_row(
      {"answer tokens", fmt::format("{}", decode_tokens), fmt::format("{:.0f} tokens/s", decode_tokens_per_s)});
  if (drafts > 0)
    counts.add_row({"drafts accepted", fmt::format("{} of {}", accepted_drafts, draft_tokens),
                    human_percent(rate(static_cast<double>(accepted_drafts), static_cast<double>(draft_tokens)))});
  counts.add_row({"steps", fmt::format("{}", steps), ""});
  counts.print(out);

  output.print("\n");
  Table latency({"", "p50", "p90", "p99"});
  add_percentiles(latency, "time to first token", ttft_ms);
  add_percentiles(latency, "time per output token", tpot_ms);
  latency.print(out);

  print_times(output);
  output.print("\n");
  Table speed({"speed", "GFLOP/s", "ceiling", "share"});
  const auto add_speed = [&](const char* label, double achieved, double ceiling, double share) {
    speed.add_row({label, fmt::format("{:.1f}", achieved), ceiling > 0 ? fmt::format("{:.1f}", ceiling) : "",
                   share > 0 ? human_percent(share) : ""});
  };
  add_speed("prefill attention", prefill_gflops, ceilings.prefill_gflops,
            rate(prefill_gflops, ceilings.prefill_gflops));
  add_speed("decode attention", decode_gflops, ceilings.decode_gflops, rate(decode_gflops, ceilings.decode_gflops));
  add_speed("all attention", gflops, 0.0, ceiling_share);
  if (projection_gflops > 0.0)
    add_speed("up projection (oneDNN)", projection_gflops, on_gpu ? 0.0 : ceilings.prefill_gflops,
              on_gpu ? 0.0 : rate(projection_gflops, ceilings.prefill_gflops));
  speed.print(out);
  if (noisy()) output.print("noisy: the ceiling was disturbed\n");

  print_checks(output);
}

void Report::print_times(const Output& output) const {
  output.print("\n");
  Table times({"where the time went", "calls", "prefill ms", "decode ms", "ms", "share"});
  const auto ms = [](double seconds) { return fmt::format("{:.3f}", seconds * 1e3); };
  const auto part = [&](double seconds) { return seconds == 0.0 ? "" : ms(seconds); };
  for (const OperationTime& one : operations)
    times.add_row({one.name, one.calls > 0 ? fmt::format("{}", one.calls) : "", part(one.prefill_seconds),
                   part(one.decode_seconds), ms(one.seconds), human_percent(rate(one.seconds, serving_seconds))});
  times.add_row({"serving", "", "", "", ms(serving_seconds), ""});
  for (const auto& [phase, seconds] : phase_seconds)
    if (!is_serving(phase) && seconds > 0.0)
      times.add_row({std::string(name(phase)), "", "", "", ms(seconds), "not serving"});
  times.add_row({"wall clock", "", "", "", ms(wall_seconds), ""});
  times.print(output.text());
}

void Report::print_checks(const Output& output) const {
  if (checks == 0) return output.print("\nnothing was checked\n");
  output.print(
      "\nworst relative error of {} checked tokens: {:.2e} {}, {:.2e} against the reference (accepted: "
      "{:.2e})\n",
      checks, worst_prefill_decode, other_way, worst_reference, kTolerance);
  if (checked_queries > 0)
    output.print("{} queries of heads against float64 from the activations: the worst has {} of the error accepted\n",
                 checked_queries, human_percent(worst_query_share));
  if (checked_outputs > 0)
    output.print(
        "{} finished outputs of heads against float64 from attention's: the worst has {} of the error accepted\n",
        checked_outputs, human_percent(worst_output_share));
  if (checked_rows > 0)
    output.print(
        "{} cached rows and keys against float64 from the activations: the worst has {} of the error accepted\n",
        checked_rows, human_percent(worst_row_share));
  for (const std::string& failure : failures) output.print("FAILED: {}\n", failure);
}

}  // namespace mla::cli::replay
