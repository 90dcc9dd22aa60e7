// SPDX-License-Identifier: Apache-2.0
// This file has the streams, events and graphs of emulated GPUs. Enqueued work is done at once, unless its stream is
// being captured: then it is recorded, and what a real capture refuses is refused (CUDA programming guide, "Stream
// Capture", with the thread-local mode).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "mla/device.h"
#include "mla/status.h"

namespace mla::cuda {

/// A Work does what was enqueued in a stream; it holds copies of the arguments.
using Work = std::function<Status()>;

/// Holds the work of an emulated graph, in an order that the captured streams allow.
struct RecordedGraph {
  std::vector<Work> work;
};

class Recorder;

struct RecordedStream;

/// Describes one capture, which begins and ends in the same stream. Other streams join it by waiting for its events.
struct Capture {
  std::vector<Work> work;
  std::vector<RecordedStream*> streams;  // streams that are being captured
  bool ended = false;
  std::string broken;  // why the capture is lost; empty if it is not
};

struct RecordedStream {
  std::shared_ptr<Capture> capture;  // the capture that the stream is part of, or null
  bool origin = false;               // whether the capture began in this stream
  bool joined = true;                // whether the origin waits for all that this stream has recorded
};

struct RecordedEvent {
  std::shared_ptr<Capture> capture;  // the capture in which the event was recorded, or null
  RecordedStream* stream = nullptr;  // the captured stream in which it was recorded
  bool recorded = false;
  std::chrono::steady_clock::time_point time = {};
};

/// Records captures. A capture must end on the thread on which it began.
class Recorder {
 public:
  /// Does the work, or records it if the stream is being captured.
  Status enqueue(Stream stream, Work work);
  /// Returns whether work would be recorded now; an error if it would be neither done nor recorded.
  Result<bool> capturing(Stream stream);
  /// Must be called by functions that wait, allocate or free. On a thread that captures, it invalidates the captures
  /// and returns an error.
  Status unsafe(const char* what);

  Stream create_stream();
  Status destroy(Stream stream);
  Status synchronize(Stream stream);
  Event create_event();
  Status destroy(Event event);
  Status record(Event event, Stream stream);
  Status wait(Event event, Stream stream);
  Status synchronize(Event event);
  Result<float> elapsed_ms(Event from, Event to);
  Status begin_capture(Stream stream);
  Result<Graph> end_capture(Stream stream);
  Status launch(Graph graph, Stream stream);
  Status destroy(Graph graph);

 private:
  /// Return null and set `error` if the handle is none of this recorder's.
  RecordedStream* find(Stream stream, Status& error);
  RecordedEvent* find(Event event, Status& error);
  std::shared_ptr<RecordedGraph> find(Graph graph, Status& error);
  Status check_default_stream(Stream stream);

  std::mutex mutex_;
  std::vector<std::unique_ptr<RecordedStream>> streams_;
  std::vector<std::unique_ptr<RecordedEvent>> events_;
  std::vector<std::shared_ptr<RecordedGraph>> graphs_;
};

/// Returns the recorder of all emulated GPUs. A stream belongs to no particular one.
Recorder& recorder();

}  // namespace mla::cuda
