// SPDX-License-Identifier: Apache-2.0
#include "cuda/runtime/recorder.h"

#include <algorithm>
#include <utility>

#include "core/format.h"

namespace mla::cuda {
namespace {

/// Holds the captures that this thread has begun and not ended.
thread_local std::vector<std::shared_ptr<Capture>> captures_of_thread;

Status invalid(std::string text) { return {StatusCode::kInvalidArgument, std::move(text)}; }

/// Invalidates the captures of this thread, as CUDA does when a function is called that a capture forbids.
Status forbidden(const char* what) {
  Status status = invalid(core::format("{}: expected no capture on this thread, got one: it is lost", what));
  for (const auto& capture : captures_of_thread)
    if (capture->broken.empty()) capture->broken = what;
  return status;
}

template <class T>
T* find_in(const std::vector<std::unique_ptr<T>>& all, const void* handle) {
  const auto it = std::find_if(all.begin(), all.end(), [&](const auto& each) { return each.get() == handle; });
  return it != all.end() ? it->get() : nullptr;
}

}  // namespace

Recorder& recorder() {
  static Recorder instance;
  return instance;
}

RecordedStream* Recorder::find(Stream stream, Status& error) {
  const std::lock_guard lock(mutex_);
  RecordedStream* const found = find_in(streams_, stream.handle);
  if (found == nullptr) error = invalid("stream: expected a stream of an emulated GPU, got another pointer");
  return found;
}

RecordedEvent* Recorder::find(Event event, Status& error) {
  const std::lock_guard lock(mutex_);
  RecordedEvent* const found = find_in(events_, event.handle);
  if (found == nullptr) error = invalid("event: expected an event of an emulated GPU, got another pointer");
  return found;
}

std::shared_ptr<RecordedGraph> Recorder::find(Graph graph, Status& error) {
  const std::lock_guard lock(mutex_);
  for (const auto& each : graphs_)
    if (each.get() == graph.handle) return each;
  error = invalid("graph: expected a graph of an emulated GPU, got another pointer");
  return nullptr;
}

/// The default stream waits for all others, so nothing may enter it while some are captured.
Status Recorder::check_default_stream(Stream stream) {
  if (stream.handle != nullptr || captures_of_thread.empty()) return {};
  return forbidden("default stream");
}

Result<bool> Recorder::capturing(Stream stream) {
  Status status = check_default_stream(stream);
  if (!status.ok() || stream.handle == nullptr) return status.ok() ? Result<bool>(false) : status;
  const RecordedStream* const found = find(stream, status);
  if (found == nullptr) return status;
  return found->capture != nullptr;
}

Status Recorder::unsafe(const char* what) { return captures_of_thread.empty() ? Status() : forbidden(what); }

Status Recorder::enqueue(Stream stream, Work work) {
  const Result<bool> recording = capturing(stream);
  if (!recording.ok()) return recording.status();
  if (!*recording) return work();
  auto* const target = static_cast<RecordedStream*>(stream.handle);
  target->capture->work.push_back(std::move(work));
  target->joined = target->origin;
  return {};
}

Stream Recorder::create_stream() {
  const std::lock_guard lock(mutex_);
  streams_.push_back(std::make_unique<RecordedStream>());
  return {.handle = streams_.back().get()};
}

Status Recorder::destroy(Stream stream) {
  Status error;
  RecordedStream* const target = find(stream, error);
  if (target == nullptr) return error;
  if (target->capture != nullptr) {
    target->capture->broken = "destruction of a stream that is captured";
    std::erase(target->capture->streams, target);
    if (target->origin) {
      target->capture->ended = true;
      std::erase(captures_of_thread, target->capture);
    }
  }
  const std::lock_guard lock(mutex_);
  std::erase_if(streams_, [&](const auto& each) { return each.get() == target; });
  return {};
}

Status Recorder::synchronize(Stream stream) {
  if (stream.handle != nullptr) {
    Status error;
    RecordedStream* const target = find(stream, error);
    if (target == nullptr) return error;
    if (target->capture != nullptr) {
      target->capture->broken = "synchronize";
      return invalid("synchronize: expected a stream that is not captured, got one that is: its capture is lost");
    }
  }
  return unsafe("synchronize");
}

Event Recorder::create_event() {
  const std::lock_guard lock(mutex_);
  events_.push_back(std::make_unique<RecordedEvent>());
  return {.handle = events_.back().get()};
}

Status Recorder::destroy(Event event) {
  Status error;
  RecordedEvent* const target = find(event, error);
  if (target == nullptr) return error;
  const std::lock_guard lock(mutex_);
  std::erase_if(events_, [&](const auto& each) { return each.get() == target; });
  return {};
}

Status Recorder::record(Event event, Stream stream) {
  Status status = check_default_stream(stream);
  RecordedEvent* const target = status.ok() ? find(event, status) : nullptr;
  RecordedStream* const source = target != nullptr && stream.handle != nullptr ? find(stream, status) : nullptr;
  if (!status.ok()) return status;
  *target = {.capture = nullptr, .stream = nullptr, .recorded = true, .time = std::chrono::steady_clock::now()};
  if (source == nullptr || source->capture == nullptr) return {};
  target->capture = source->capture;
  target->stream = source;
  return {};
}

Status Recorder::wait(Event event, Stream stream) {
  Status status = check_default_stream(stream);
  RecordedEvent* const target = status.ok() ? find(event, status) : nullptr;
  RecordedStream* const waiter = target != nullptr && stream.handle != nullptr ? find(stream, status) : nullptr;
  if (!status.ok()) return status;
  if (target->capture == nullptr) {
    if (waiter == nullptr || waiter->capture == nullptr) return {};
    waiter->capture->broken = "wait for an event of outside";
    return invalid("wait: expected an event recorded in the capture, got one of outside: the capture is lost");
  }
  if (target->capture->ended)
    return invalid("wait: expected an event of a capture that goes on, got one that has ended");
  if (waiter == nullptr || (waiter->capture != nullptr && waiter->capture != target->capture)) {
    target->capture->broken = "wait of another stream";
    return invalid("wait: expected a stream of the event's capture or one not captured, got another: it is lost");
  }
  if (waiter->capture == nullptr) {
    waiter->origin = false;
    waiter->capture = target->capture;
    waiter->capture->streams.push_back(waiter);
  }
  waiter->joined = waiter->origin;
  const auto& streams = target->capture->streams;  // the event's stream may have been destroyed
  if (target->stream != waiter && std::find(streams.begin(), streams.end(), target->stream) != streams.end())
    target->stream->joined = true;
  return {};
}

Status Recorder::synchronize(Event event) {
  Status error;
  RecordedEvent* const target = find(event, error);
  if (target == nullptr) return error;
  if (target->capture != nullptr) {
    target->capture->broken = "synchronize";
    return invalid("synchronize: expected an event of outside of captures, got one of a capture: it is lost");
  }
  return unsafe("synchronize");
}

Result<float> Recorder::elapsed_ms(Event from, Event to) {
  Status error;
  const RecordedEvent* const first = find(from, error);
  const RecordedEvent* const last = first != nullptr ? find(to, error) : nullptr;
  if (!error.ok()) return error;
  for (const RecordedEvent* event : {first, last})
    if (!event->recorded || event->capture != nullptr)
      return invalid("elapsed_ms: expected events that were recorded outside of captures, got another");
  return std::chrono::duration<float, std::milli>(last->time - first->time).count();
}

Status Recorder::begin_capture(Stream stream) {
  if (stream.handle == nullptr) return invalid("begin_capture: expected a stream that was created, got the default");
  Status error;
  RecordedStream* const target = find(stream, error);
  if (target == nullptr) return error;
  if (target->capture != nullptr)
    return invalid("begin_capture: expected a stream that is not captured, got one that is");
  *target = {.capture = std::make_shared<Capture>(), .origin = true, .joined = true};
  target->capture->streams.push_back(target);
  captures_of_thread.push_back(target->capture);
  return {};
}

Result<Graph> Recorder::end_capture(Stream stream) {
  Status error;
  RecordedStream* const target = find(stream, error);
  if (target == nullptr) return error;
  const std::shared_ptr<Capture> capture = target->capture;
  if (capture == nullptr || !target->origin)
    return invalid("end_capture: expected the stream in which a capture began, got another");
  if (std::erase(captures_of_thread, capture) == 0)
    return invalid("end_capture: expected the thread on which the capture began, got another");
  capture->ended = true;
  bool joined = true;
  for (RecordedStream* each : capture->streams) {
    joined = joined && each->joined;
    *each = {};
  }
  if (!capture->broken.empty())
    return invalid(core::format("end_capture: the capture is lost by: {}", capture->broken));
  if (!joined) return invalid("end_capture: expected all streams of the capture to be waited for, got one that is not");
  const std::lock_guard lock(mutex_);
  graphs_.push_back(std::make_shared<RecordedGraph>(RecordedGraph{.work = std::move(capture->work)}));
  return Graph{.handle = graphs_.back().get()};
}

Status Recorder::launch(Graph graph, Stream stream) {
  Status error;
  std::shared_ptr<RecordedGraph> recorded = find(graph, error);
  if (recorded == nullptr) return error;
  return enqueue(stream, [recorded = std::move(recorded)]() -> Status {
    for (const Work& work : recorded->work)
      if (Status status = work(); !status.ok()) return status;
    return {};
  });
}

Status Recorder::destroy(Graph graph) {
  Status error;
  if (find(graph, error) == nullptr) return error;
  const std::lock_guard lock(mutex_);
  std::erase_if(graphs_, [&](const auto& each) { return each.get() == graph.handle; });
  return {};
}

}  // namespace mla::cuda
