// SPDX-License-Identifier: Apache-2.0
// Writes a Chrome trace of the replay (chrome://tracing, ui.perfetto.dev): steps, their phases, and the life of each
// request.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <string>

#include "mla/replay/recorder.h"
#include "mla/replay/scheduler.h"

namespace mla::cli::replay {

/// Writes the trace as the replay goes on. Times are those of the serving clock.
class Timeline {
 public:
  /// Throws UsageError if the file cannot be written.
  explicit Timeline(const std::string& path);
  ~Timeline();
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  void add_step(int64_t index, const Step& step, double start_ms, double end_ms,
                std::span<const Recorder::Event> phases);
  /// Writes the requests and the end of the document. Throws UsageError if anything could not be written.
  void finish(std::span<const Sequence> sequences, double now_ms);

 private:
  void event(const char* what, int64_t thread, double start_ms, double end_ms, const std::string& arguments = {});
  void thread_name(int64_t thread, const std::string& what);

  std::string path_;
  std::FILE* file_ = nullptr;
  bool first_ = true;
};

}  // namespace mla::cli::replay
