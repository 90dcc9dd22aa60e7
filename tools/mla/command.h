// SPDX-License-Identifier: Apache-2.0
// Declares the subcommands of `mla`: each adds itself and its options to the application and returns what to do if it
// was chosen.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace mla::cli {

/// Returns the exit status: 0 success, 1 the work failed (a check, a replay), 2 unusable input.
using Action = std::function<int()>;

Action add_info(CLI::App& app);
Action add_explain(CLI::App& app);
Action add_run(CLI::App& app);
Action add_check(CLI::App& app);
Action add_bench(CLI::App& app);
Action add_replay(CLI::App& app);
Action add_quant_report(CLI::App& app);

}  // namespace mla::cli
