// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <limits>

#include "mla/types.h"

namespace mla::core {

/// Says in which form lse is written.
struct LseForm {
  LseBase base = LseBase::kE;
  bool inf_without_keys = false;

  /// Returns the lse of a query that sees no key.
  constexpr float without_keys() const {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    return inf_without_keys ? kInfinity : -kInfinity;
  }
};

}  // namespace mla::core
