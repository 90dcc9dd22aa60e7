// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/timeline.h"

#include <fmt/format.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <utility>

#include "mla/output.h"

namespace mla::cli::replay {
namespace {

constexpr int64_t kStepThread = 1, kPhaseThread = 2, kFirstRequestThread = 100;

}  // namespace

Timeline::Timeline(const std::string& path) : path_(path), file_(std::fopen(path.c_str(), "w")) {
  if (file_ == nullptr) throw UsageError("--timeline: cannot open '{}': {}", path, std::strerror(errno));
  print_to(file_, "{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[");
  thread_name(kStepThread, "steps");
  thread_name(kPhaseThread, "phases");
}

Timeline::~Timeline() {
  if (file_ != nullptr) std::fclose(file_);
}

void Timeline::thread_name(int64_t thread, const std::string& what) {
  print_to(file_, R"({}{{"ph":"M","pid":1,"tid":{},"name":"thread_name","args":{{"name":"{}"}}}})",
           first_ ? "\n" : ",\n", thread, what);
  first_ = false;
}

void Timeline::event(const char* what, int64_t thread, double start_ms, double end_ms, const std::string& arguments) {
  print_to(file_, R"(,{}{{"ph":"X","pid":1,"tid":{},"name":"{}","ts":{:.3f},"dur":{:.3f},"args":{{{}}}}})", '\n',
           thread, what, start_ms * 1e3, (end_ms - start_ms) * 1e3, arguments);
}

void Timeline::add_step(int64_t index, const Step& step, double start_ms, double end_ms,
                        std::span<const Recorder::Event> phases) {
  int64_t tokens = 0;
  for (const PrefillPiece& piece : step.prefill) tokens += piece.count;
  event("step", kStepThread, start_ms, end_ms,
        fmt::format(R"("index":{},"prefill_tokens":{},"decode_requests":{})", index, tokens, step.decode.size()));
  for (const Recorder::Event& phase : phases)
    event(name(phase.phase).data(), kPhaseThread, phase.start * 1e3, (phase.start + phase.duration) * 1e3);
}

void Timeline::finish(std::span<const Sequence> sequences, double now_ms) {
  for (const Sequence& sequence : sequences) {
    if (sequence.arrival_ms > now_ms) continue;
    const int64_t thread = kFirstRequestThread + sequence.request->line;
    const auto until = [&](double time_ms) { return std::isnan(time_ms) ? now_ms : time_ms; };
    thread_name(thread, fmt::format("request of line {}", sequence.request->line));
    event("wait", thread, sequence.arrival_ms, until(sequence.admitted_ms));
    if (!std::isnan(sequence.admitted_ms))
      event("prefill", thread, sequence.admitted_ms, until(sequence.first_token_ms),
            fmt::format(R"("input_length":{},"hit_tokens":{})", sequence.request->input_length, sequence.num_hit));
    if (!std::isnan(sequence.first_token_ms))
      event("decode", thread, sequence.first_token_ms, until(sequence.finished_ms),
            fmt::format(R"("output_tokens":{})", sequence.num_output));
  }
  print_to(file_, "\n]}}\n");
  const bool failed = std::ferror(file_) != 0;
  const bool closed = std::fclose(std::exchange(file_, nullptr)) == 0;
  if (failed || !closed) throw UsageError("--timeline: cannot write '{}'", path_);
}

}  // namespace mla::cli::replay
