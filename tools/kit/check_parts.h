// SPDX-License-Identifier: Apache-2.0
// What the checks of all operations begin and end with.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "kit/check.h"
#include "mla/backend.h"

namespace mla::kit {

inline Result<Context> reference_context() {
  return Context::create({.num_threads = 1, .affinity = {}, .backend = "reference"});
}

inline std::string row_of(const Context& context, const Problem& problem) {
  return explain(problem, context.backend()).selected;
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

}  // namespace mla::kit
