// SPDX-License-Identifier: Apache-2.0
#include "mla/shipped.h"

#include <filesystem>
#include <system_error>

namespace mla {

std::string shipped(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (path.empty() || fs::path(path).is_absolute() || fs::exists(path, error)) return path;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  const fs::path installed = program.parent_path().parent_path() / "share" / "libmla" / path;
  return !error && fs::is_regular_file(installed, error) ? installed.string() : path;
}

}  // namespace mla
