// SPDX-License-Identifier: Apache-2.0
// Keeps traces that outlive the process.
#pragma once

#include <gtest/gtest.h>

#include "kit/note.h"

/// Calls SCOPED_TRACE; the message is also printed when the test crashes, in whichever thread.
#define MLA_TRACE(message) \
  SCOPED_TRACE(message);   \
  mla::kit::note((testing::Message() << (message)).GetString())
