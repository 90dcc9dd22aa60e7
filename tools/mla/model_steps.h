// SPDX-License-Identifier: Apache-2.0
// Says what the layers of a model ask of the library, step by step, and which backend does it: `libmla explain
// --model`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "mla/backend.h"
#include "mla/model.h"

namespace mla::cli {

/// Describes one call of the library that a layer needs, or work that the library has no operation for.
struct Step {
  std::string what = {};                ///< the operation's name, or that of the work: "compress"
  std::optional<Problem> problem = {};  ///< what the library is asked; nothing if it has no operation
  std::string lacks = {};               ///< then: what it would need
  std::string note = {};                ///< what the call has beside the problem: "window 128, sink"
};

/// Returns the steps of layers of a kind, in the order in which they come in prefill and then in decode. `tp` divides
/// the heads.
std::vector<Step> steps_of(const LayerKind& layer, const CachePair& caches, int64_t tp);

/// Says what a step gets: a backend, or the one reason why there is none.
struct Answer {
  std::string backend = {};
  std::string reason = {};
};

/// Asks the library on a device, which is named as asked_on() takes it. `force` is that of mla::explain().
Answer answer_of(const Step& step, const std::string& device, const std::string& force = {});

}  // namespace mla::cli
