// SPDX-License-Identifier: Apache-2.0
#include "mla/build.h"

#include "build_commit.h"
#include "build_options.h"

namespace mla::cli {

const Build& build() {
  static constexpr Build kBuild = {
      .commit = MLA_BUILD_COMMIT, .compiler = MLA_BUILD_COMPILER, .type = MLA_BUILD_TYPE, .options = MLA_BUILD_OPTIONS};
  return kBuild;
}

}  // namespace mla::cli
