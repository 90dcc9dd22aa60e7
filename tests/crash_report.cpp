// SPDX-License-Identifier: Apache-2.0
// Is part of every GoogleTest program: one that dies of a signal or of a sanitizer's report says in which test, and
// what the test was doing (kit/note.h).
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <string>
#include <string_view>

#include "kit/note.h"

// A sanitizer ends its report with a signal, too. The names are the sanitizers'.
// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming)
extern "C" const char* __asan_default_options() { return "abort_on_error=1"; }
extern "C" const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)

namespace {

constexpr std::array kSignals = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};

std::array<struct sigaction, kSignals.size()> previous;
std::array<char, 512> current_test;

void print(std::string_view text) {
  if (write(STDERR_FILENO, text.data(), text.size()) < 0) return;  // there is nobody else to tell
}

void report() {
  if (current_test[0] == 0) return;
  print("\nCrashed in ");
  print(current_test.data());
  if (mla::kit::latest_note[0] != 0) {
    print(" while at ");
    print(mla::kit::latest_note.data());
  }
  print("\n");
  current_test[0] = 0;  // once
}

/// Reports, and leaves the rest to whoever handled the signal before, a sanitizer perhaps: a fault happens again on
/// return, any other signal is sent again.
void handle(int number, siginfo_t* info, void*) {
  report();
  for (size_t i = 0; i < kSignals.size(); ++i)
    if (kSignals[i] == number) sigaction(number, &previous[i], nullptr);
  if (info->si_code <= 0) raise(number);
}

class CurrentTest : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo& test) override {
    const std::string name = std::string(test.test_suite_name()) + "." + test.name();
    current_test[name.copy(current_test.data(), current_test.size() - 1)] = 0;
    mla::kit::note("");
  }
  void OnTestEnd(const testing::TestInfo&) override { current_test[0] = 0; }
};

[[maybe_unused]] const bool kInstalled = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new CurrentTest);
  struct sigaction action = {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO;
  for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &action, &previous[i]);
  return true;
}();

}  // namespace
