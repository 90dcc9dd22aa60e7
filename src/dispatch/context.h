// SPDX-License-Identifier: Apache-2.0
// Defines what a context and a plan hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/thread_pool.h"
#include "dispatch/place.h"
#include "dispatch/select.h"
#include "dispatch/tables.h"
#include "mla/plan.h"

namespace mla {

struct Context::Impl {
  Impl(int32_t num_threads, std::span<const int32_t> affinity, const dispatch::Forced& forced,
       const dispatch::DeviceChoice& device_choice, int32_t keys_of_run)
      : pool(num_threads, affinity),
        backend(forced.backend),
        source(forced.source),
        choice(device_choice),
        device(choice.text()),
        p_run(keys_of_run) {}

  dispatch::Forced forced() const { return {.backend = backend, .source = source}; }

  core::ThreadPool pool;
  std::mutex mutex;  // held while a backend computes or writes a workspace: it keeps counters there, and in the pool
  const std::string backend;
  const std::string_view source;  // points to a string literal
  const dispatch::DeviceChoice choice;
  const std::string device;
  const int32_t p_run;
};

struct Plan::Impl {
  Op op = Op::kDecode;
  std::variant<const dispatch::DecodeRow*, const dispatch::PrefillRow*, const dispatch::DecodeSparseRow*> row;
  std::unique_ptr<const dispatch::DecodeRow> made;  // `row`, where it is none of the table
  dispatch::Place place;
  int32_t num_threads = 1;
  std::vector<int64_t> planned;          // shape and options; `run` must get the same
  std::vector<int32_t> q_len;            // on the CPU, query tokens of every request; `run` must get the same
  std::vector<int32_t> kv_len;           // on the CPU, keys of every request; `run` must get the same
  uint64_t id = 0;                       // no other plan of the process has it
  std::byte* stamp = nullptr;            // where `run` must find the id again; null without a workspace, and on a GPU
  std::span<std::byte> given_workspace;  // what the caller gave
  std::span<std::byte> workspace;        // the backend's part of it, aligned
  core::PlanSummary summary;
};

}  // namespace mla
