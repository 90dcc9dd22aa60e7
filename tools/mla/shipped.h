// SPDX-License-Identifier: Apache-2.0
// Finds the files that are installed with the program: case files and the sample of a trace.
#pragma once

#include <string>

namespace mla {

/// Returns where an input lies. A path that leads nowhere is looked for among the files that came with the program,
/// which have the names there that they have in the sources: bench/decode.yaml in share/libmla, beside the program's
/// bin. So the commands of the documentation run in any folder. A path that leads nowhere there either comes back as it
/// is.
std::string shipped(const std::string& path);

}  // namespace mla
