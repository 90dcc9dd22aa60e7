// SPDX-License-Identifier: Apache-2.0
// Keeps what the process is doing where a signal handler can read it: a test that crashes says which problem it was at.
#pragma once

#include <array>
#include <mutex>
#include <string_view>

namespace mla::kit {

/// Holds the latest note, ending in 0.
inline std::array<char, 2048> latest_note = {};

inline void note(std::string_view text) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  latest_note[text.copy(latest_note.data(), latest_note.size() - 1)] = 0;
}

}  // namespace mla::kit
