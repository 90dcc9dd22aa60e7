// SPDX-License-Identifier: Apache-2.0
// Makes the problems that `libmla explain` asks about, and says in words what they are.
#pragma once

#include <cstdint>
#include <string>

#include "mla/backend.h"
#include "mla/model.h"

namespace mla::cli {

/// Returns the problem that an operation usually is over caches of a format, of 128 heads and 576/512 where the format
/// does not say otherwise.
Problem usual_problem(Op op, CacheFormat cache);

/// Gives a problem the heads and widths of layers of that shape, `tp`th parts of the heads.
void set_shape(const AttentionShape& shape, int64_t tp, Problem& problem);

/// Returns whether the operation is one of the indexer, whose heads and widths are its own.
bool is_indexer(Op op);

/// Returns the problem as it is judged on a device: as kit::on_device() says. Of a GPU that need not be there, the
/// answer should not depend on this build.
Problem asked_on(Problem problem, const std::string& device);

/// Returns " (code: sm90)", or nothing where the problem's device has no code of GPUs.
std::string told_code(const Explanation& explanation);

/// Returns why no backend was selected, without the verdicts of all rows: for where a table has them.
std::string short_error(const Explanation& explanation);

/// Returns what of a problem its operation has: "cache bf16, queries bf16, 16 heads, head dims 576/512".
std::string describe(const Problem& problem);

}  // namespace mla::cli
