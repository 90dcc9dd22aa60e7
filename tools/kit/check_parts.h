// SPDX-License-Identifier: Apache-2.0
// Holds what the checks of all operations begin and end with.
#pragma once

#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kit/case_buffers.h"
#include "kit/check.h"
#include "kit/device.h"
#include "mla/backend.h"

namespace mla::kit {

inline Result<Context> reference_context(int32_t p_run = 0) {
  return Context::create({.num_threads = 1, .affinity = {}, .backend = "reference", .device = "cpu", .p_run = p_run});
}

inline std::string row_of(const Context& context, const Problem& problem) {
  return explain(on_device(problem, context.device()), context.backend()).selected;
}

template <class Spec>
Outcome outcome_of(const Spec& spec, std::string_view backend) {
  return {.ok = false,
          .op = std::string(name(problem_of(spec).op)),
          .backend = std::string(backend),
          .spec = describe(spec),
          .failure = {},
          .error = {},
          .tolerance = {}};
}

inline Outcome failed(Outcome outcome, std::string failure) {
  outcome.ok = false;
  outcome.failure = std::move(failure);
  return outcome;
}

/// Runs an operation without a plan where the context computes. Returns what went wrong, stray writes into inputs
/// included, or an empty string.
template <class Case>
std::string run_direct(const Context& context, const Case& problem) {
  const Fingerprint inputs(buffers_of(problem), outputs_of(problem));
  const Result<DeviceImage> image = DeviceImage::create(context.device(), buffers_of(problem));
  if (!image.ok()) return image.status().message();
  if (const Status status = run(context, image->there(problem.params())); !status.ok()) return status.message();
  if (const Status status = image->fetch(); !status.ok()) return status.message();
  return inputs.holds() ? "" : "wrote into an input";
}

using Bytes = std::vector<std::byte>;

inline Bytes bytes_of(const std::vector<const Buffer*>& buffers) {
  Bytes bytes;
  for (const Buffer* buffer : buffers) bytes.insert(bytes.end(), buffer->bytes().begin(), buffer->bytes().end());
  return bytes;
}

inline void put_back(const Bytes& bytes, const std::vector<const Buffer*>& buffers) {
  size_t at = 0;
  for (const Buffer* buffer : buffers) {
    if (buffer->size() != 0) std::memcpy(buffer->data(), bytes.data() + at, buffer->size());
    at += buffer->size();
  }
}

/// Runs the reference over the outputs. `judge_it(given)` says what is wrong with the caller's results, whose bytes
/// `given` holds while the reference's stand in the case's buffers.
template <class Case, class Judge>
Outcome check_against_reference(const Case& problem, std::string_view backend, const Judge& judge_it) {
  const Outcome outcome = outcome_of(problem.spec, backend);
  const std::vector<const Buffer*> outputs = problem.outputs();
  for (const Buffer* buffer : outputs)
    if (!buffer->guards_intact()) return failed(outcome, "wrote outside the output");
  const Result<Context> reference = reference_context();
  if (!reference.ok()) return failed(outcome, "reference: " + reference.status().message());
  const Bytes given = bytes_of(outputs);
  problem.reset_outputs();
  const Status status = run(*reference, problem.params());
  std::string failure = status.ok() ? judge_it(given) : "reference: " + status.message();
  put_back(given, outputs);
  Outcome judged = failed(outcome, std::move(failure));
  judged.ok = judged.failure.empty();
  return judged;
}

/// Checks a problem of an operation that has no plan.
template <class Case, class Spec>
Outcome check_direct(const Context& context, const Spec& spec) {
  const std::string backend = row_of(context, problem_of(spec));
  const Case problem(spec);
  if (const std::string failure = run_direct(context, problem); !failure.empty())
    return failed(outcome_of(spec, backend), failure);
  return check_outputs(problem, backend);
}

}  // namespace mla::kit
