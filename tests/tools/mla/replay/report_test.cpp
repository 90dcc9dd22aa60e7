// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/report.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "mla/replay/timeline.h"

namespace mla::cli::replay {
namespace {

TEST(Percentiles, InterpolateBetweenSamples) {
  EXPECT_FALSE(percentiles({}).has_value());
  const auto one = percentiles({4.0});
  EXPECT_EQ(one->p50, 4.0);
  EXPECT_EQ(one->p99, 4.0);
  const auto many = percentiles({30.0, 10.0, 20.0, 0.0, 40.0});
  EXPECT_DOUBLE_EQ(many->p50, 20.0);
  EXPECT_DOUBLE_EQ(many->p90, 36.0);
  EXPECT_DOUBLE_EQ(many->p99, 39.6);
}

TEST(Recorder, OnlyServingMovesTheClock) {
  Recorder recorder;
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(2)); };
  recorder.time(Phase::kGenerate, pause);
  recorder.time(Phase::kCheck, pause);
  EXPECT_EQ(recorder.serving_seconds(), 0.0);
  EXPECT_GE(recorder.seconds(Phase::kGenerate), 0.002);
  EXPECT_TRUE(recorder.events().empty());
  EXPECT_EQ(recorder.time(Phase::kGather, [] { return 7; }), 7);
  recorder.time(Phase::kDecodeAttention, pause);
  EXPECT_GE(recorder.serving_seconds(), 0.002);
  ASSERT_EQ(recorder.events().size(), 2U);
  EXPECT_EQ(recorder.events()[1].phase, Phase::kDecodeAttention);
  EXPECT_EQ(recorder.events()[1].start, recorder.events()[0].duration);
  recorder.skip(10.0);
  EXPECT_GE(recorder.serving_seconds(), 10.002);
  EXPECT_EQ(recorder.calls(Phase::kDecodeAttention), 1);
  EXPECT_EQ(recorder.calls(Phase::kMerge), 0);
}

TEST(Timeline, WritesWhatATraceViewerReads) {
  const auto path = std::filesystem::temp_directory_path() / ("mla_timeline_" + std::to_string(getpid()) + ".json");
  Request request;
  request.line = 3;
  request.input_length = 10;
  Sequence finished, queued, later;
  for (Sequence* sequence : {&finished, &queued, &later}) sequence->request = &request;
  finished.admitted_ms = 1.0;
  finished.first_token_ms = 2.0;
  finished.finished_ms = 5.0;
  later.arrival_ms = 100.0;
  {
    Timeline timeline(path.string());
    Step step;
    step.prefill.push_back({.sequence = 0, .start = 0, .count = 10});
    const std::vector<Recorder::Event> phases = {{Phase::kGather, 0.001, 0.0005}};
    timeline.add_step(0, step, 1.0, 2.0, phases);
    const std::vector<Sequence> sequences = {finished, queued, later};
    timeline.finish(sequences, 6.0);
  }
  std::ifstream file(path);
  const Json document = Json::parse(file);
  std::vector<std::string> names;
  for (const Json& event : document["traceEvents"]) {
    if (event["ph"] != "X") continue;
    names.push_back(event["name"]);
    EXPECT_GE(event["dur"].get<double>(), 0.0);
    if (event["name"] == "gather") {
      EXPECT_EQ(event["ts"], 1000.0);
      EXPECT_EQ(event["dur"], 500.0);
    }
    if (event["name"] == "step") {
      EXPECT_EQ(event["args"]["prefill_tokens"], 10);
    }
  }
  EXPECT_EQ(names, (std::vector<std::string>{"step", "gather", "wait", "prefill", "decode", "wait"}));
  std::filesystem::remove(path);
  EXPECT_THROW(Timeline("/nonexistent/timeline.json"), UsageError);
}

}  // namespace
}  // namespace mla::cli::replay
