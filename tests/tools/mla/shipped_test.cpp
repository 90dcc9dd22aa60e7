// SPDX-License-Identifier: Apache-2.0
#include "mla/shipped.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace mla {
namespace {

namespace fs = std::filesystem;

// A file that is installed as if this test were the program.
class Shipped : public testing::Test {
 protected:
  void SetUp() override {
    fs::create_directories(installed_.parent_path());
    std::ofstream(installed_) << "a file\n";
  }
  void TearDown() override { fs::remove_all(installed_.parent_path()); }

  const fs::path installed_ =
      fs::read_symlink("/proc/self/exe").parent_path().parent_path() / "share/libmla/shipped_test/cases.yaml";
};

TEST_F(Shipped, FilesAreFoundByTheirNamesInTheSources) {
  EXPECT_EQ(shipped("shipped_test/cases.yaml"), installed_.string());
}

TEST_F(Shipped, WhatIsThereGoesFirst) {
  const fs::path before = fs::current_path();
  const fs::path folder = fs::path(testing::TempDir()) / "shipped_here";
  fs::create_directories(folder / "shipped_test");
  std::ofstream(folder / "shipped_test/cases.yaml") << "another\n";
  fs::current_path(folder);
  EXPECT_EQ(shipped("shipped_test/cases.yaml"), "shipped_test/cases.yaml");
  fs::current_path(before);
  fs::remove_all(folder);
}

TEST_F(Shipped, OtherPathsStayAsTheyAre) {
  for (const char* path : {"", "shipped_test", "shipped_test/other.yaml", "/shipped_test/cases.yaml"})
    EXPECT_EQ(shipped(path), path);
}

}  // namespace
}  // namespace mla
