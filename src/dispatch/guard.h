// SPDX-License-Identifier: Apache-2.0
// No exception leaves the library.
#pragma once

#include <exception>
#include <new>
#include <string>

#include "mla/status.h"

namespace mla::dispatch {

/// Returns f(), or a kInternal status for the exception that f threw.
template <class F>
auto guarded(F&& f) noexcept -> decltype(f()) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kInternal, "out of memory");  // short enough for a std::string without allocation
  } catch (const std::exception& error) {
    try {
      return Status(StatusCode::kInternal, error.what());
    } catch (...) {
      return Status(StatusCode::kInternal, "out of memory");
    }
  } catch (...) {
    return Status(StatusCode::kInternal, "exception");
  }
}

}  // namespace mla::dispatch
