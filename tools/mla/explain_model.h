// SPDX-License-Identifier: Apache-2.0
// Says of every kind of a model's layers what runs each of its operations: `libmla explain --model NAME`.
#pragma once

#include <string>

#include "mla/output.h"

namespace mla::cli {

/// Holds the options of `libmla explain` that are about a whole model, as they were given.
struct ModelQuestion {
  std::string model, cache, tp, device, backend;
};

/// Prints the table and writes the JSON. Throws UsageError if something is missing, after both.
int explain_model(const ModelQuestion& question, const Output& output);

}  // namespace mla::cli
