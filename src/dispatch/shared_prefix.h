// SPDX-License-Identifier: Apache-2.0
// Runs a decode whose neighbouring requests share their first pages (DecodeParams::shared_prefix) as four steps of rows
// that know nothing of it:
//
//   plan  find    which neighbours begin with the same pages (core::SharedPrefixArgs)
//   run   groups  every group is a request: all queries of its members, over the keys that they share
//         own     every request over the keys that are left
//         merge   of both partial states
#pragma once

#include <memory>

#include "dispatch/place.h"
#include "dispatch/select.h"
#include "dispatch/tables.h"

namespace mla::dispatch {

/// Returns a row that runs `args` in these steps, each by the row that is selected for it; null with the reason in
/// `error` if some step has none. `problem` is that of the decode, at `place`.
std::unique_ptr<const DecodeRow> shared_prefix_row(const core::DecodeArgs& args, const Problem& problem,
                                                   const Place& place, const Forced& forced, Status& error);

}  // namespace mla::dispatch
