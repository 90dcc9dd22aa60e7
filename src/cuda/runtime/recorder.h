// SPDX-License-Identifier: Apache-2.0
// Streams, events and graphs of emulated GPUs. What is enqueued happens at once, unless its stream is being captured:
// then it is recorded, and what a real capture refuses is refused. CUDA programming guide, "Stream Capture", with the
// thread-local mode.
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

/// What a stream was told to do, with a copy of all it was told.
using Work = std::function<Status()>;

/// What an emulated graph does, in an order that its captured streams allow.
struct RecordedGraph {
  std::vector<Work> work;
};

class Recorder;

struct RecordedStream;

/// One capture: from its beginning in a stream to its end there. Other streams may join by waiting for its events.
struct Capture {
  std::vector<Work> work;
  std::vector<RecordedStream*> streams;  // being captured
  bool ended = false;
  std::string broken;  // why it is lost, or empty
};

struct RecordedStream {
  std::shared_ptr<Capture> capture;  // being captured if not null
  bool origin = false;               // of that capture
  bool joined = true;                // the origin waits for all that this stream has recorded
};

struct RecordedEvent {
  std::shared_ptr<Capture> capture;  // recorded in one, if not null
  RecordedStream* stream = nullptr;  // where, if in a capture
  bool recorded = false;
  std::chrono::steady_clock::time_point time = {};
};

/// Captures end on the thread on which they began.
class Recorder {
 public:
  /// Does the work, or records it if the stream is being captured.
  Status enqueue(Stream stream, Work work);
  /// Whether work would be recorded now; an error if it would be neither done nor recorded.
  Result<bool> capturing(Stream stream);
  /// What waits, allocates or frees: an error on a thread that captures, and the end of its captures.
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
  /// Null with an error if the handle is none of this recorder's.
  RecordedStream* find(Stream stream, Status& error);
  RecordedEvent* find(Event event, Status& error);
  std::shared_ptr<RecordedGraph> find(Graph graph, Status& error);
  Status check_default_stream(Stream stream);

  std::mutex mutex_;
  std::vector<std::unique_ptr<RecordedStream>> streams_;
  std::vector<std::unique_ptr<RecordedEvent>> events_;
  std::vector<std::shared_ptr<RecordedGraph>> graphs_;
};

/// Of all emulated GPUs: a stream belongs to none of them.
Recorder& recorder();

}  // namespace mla::cuda
