// SPDX-License-Identifier: Apache-2.0
// Holds what the checks of all operations begin and end with.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "kit/case_buffers.h"
#include "kit/check.h"
#include "kit/device.h"
#include "mla/backend.h"

namespace mla::kit {

inline Result<Context> reference_context() {
  return Context::create({.num_threads = 1, .affinity = {}, .backend = "reference", .device = "cpu"});
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

}  // namespace mla::kit
