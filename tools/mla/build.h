// SPDX-License-Identifier: Apache-2.0
// Says what this program was built of, and how.
#pragma once

#include <string_view>

namespace mla::cli {

struct Build {
  std::string_view commit;    ///< "1267e21a9f3b", with "-changed" behind it if files differed; empty if nobody knows
  std::string_view compiler;  ///< "GNU 12.2.0"
  std::string_view type;      ///< "Release"
  std::string_view options;   ///< "MLA_CUDA=AUTO MLA_EMULATED_AMX=ON ...", as CMake was told them
};

const Build& build();

}  // namespace mla::cli
