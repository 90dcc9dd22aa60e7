// SPDX-License-Identifier: Apache-2.0
// Traces that outlive the process.
#pragma once

#include <gtest/gtest.h>

#include "kit/note.h"

/// SCOPED_TRACE, whose message is also printed when the test crashes, in whichever thread.
#define MLA_TRACE(message) \
  SCOPED_TRACE(message);   \
  mla::kit::note((testing::Message() << (message)).GetString())
