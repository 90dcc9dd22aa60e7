// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace mla::cli::replay {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr const char* kGood = R"({"timestamp": 3, "input_length": 600, "output_length": 5, "hash_ids": [4, 9]})";

class TraceFile {
 public:
  explicit TraceFile(const std::string& text)
      : path_(std::filesystem::temp_directory_path() / ("mla_trace_test_" + std::to_string(getpid()) + ".jsonl")) {
    std::ofstream(path_, std::ios::binary) << text;
  }
  ~TraceFile() { std::filesystem::remove(path_); }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

std::string error_of(const std::string& line) {
  const auto request = parse_trace_line(line, 1);
  return request.ok() ? "no error" : request.status().message();
}

TEST(TraceLine, ReadsEveryField) {
  const auto request = parse_trace_line(kGood, 12);
  ASSERT_TRUE(request.ok()) << request.status().message();
  EXPECT_EQ(request->line, 12);
  EXPECT_EQ(request->arrival_ms, 3.0);
  EXPECT_EQ(request->input_length, 600);
  EXPECT_EQ(request->output_length, 5);
  EXPECT_THAT(request->hash_ids, ElementsAre(4, 9));
}

TEST(TraceLine, IgnoresOtherFieldsAndCarriageReturns) {
  const auto request = parse_trace_line(
      "{\"timestamp\": 0.5, \"input_length\": 512, \"output_length\": 0, \"hash_ids\": [0], \"x\": {}}\r", 1);
  ASSERT_TRUE(request.ok()) << request.status().message();
  EXPECT_EQ(request->arrival_ms, 0.5);
}

TEST(TraceLine, NamesTheFieldThatIsWrong) {
  EXPECT_EQ(error_of("not json"), "expected a JSON object, got text that is not JSON");
  EXPECT_EQ(error_of("[1, 2]"), "expected a JSON object, got an array of 2");
  EXPECT_EQ(error_of("7"), "expected a JSON object, got 7");
  EXPECT_THAT(error_of(R"({"input_length": 1, "output_length": 1, "hash_ids": [1]})"),
              AllOf(StartsWith("timestamp: expected"), HasSubstr("got no such field")));
  EXPECT_THAT(error_of(R"({"timestamp": 0, "output_length": 1, "hash_ids": [1]})"),
              AllOf(StartsWith("input_length: expected"), HasSubstr("got no such field")));
  EXPECT_THAT(error_of(R"({"timestamp": 0, "input_length": 1, "hash_ids": [1]})"),
              AllOf(StartsWith("output_length: expected"), HasSubstr("got no such field")));
  EXPECT_THAT(error_of(R"({"timestamp": 0, "input_length": 1, "output_length": 1})"),
              AllOf(StartsWith("hash_ids: expected"), HasSubstr("got no such field")));
}

TEST(TraceLine, RefusesValuesOutOfRange) {
  const auto line = [](const std::string& timestamp, const std::string& input, const std::string& output,
                       const std::string& ids) {
    return error_of("{\"timestamp\": " + timestamp + ", \"input_length\": " + input + ", \"output_length\": " + output +
                    ", \"hash_ids\": " + ids + "}");
  };
  EXPECT_EQ(line("0", "1", "1", "[0]"), "no error");
  EXPECT_THAT(line("-1", "1", "1", "[0]"), AllOf(StartsWith("timestamp"), HasSubstr("got -1")));
  EXPECT_THAT(line("\"0\"", "1", "1", "[0]"), AllOf(StartsWith("timestamp"), HasSubstr("got \"0\"")));
  EXPECT_THAT(line("1e300", "1", "1", "[0]"), StartsWith("timestamp"));
  EXPECT_THAT(line("0", "0", "1", "[]"),
              AllOf(StartsWith("input_length: expected an integer from 1"), HasSubstr("got 0")));
  EXPECT_THAT(line("0", "-5", "1", "[0]"), AllOf(StartsWith("input_length"), HasSubstr("got -5")));
  EXPECT_THAT(line("0", "1.5", "1", "[0]"), AllOf(StartsWith("input_length"), HasSubstr("got 1.5")));
  EXPECT_THAT(line("0", "99999999999999999999", "1", "[0]"), StartsWith("input_length"));
  EXPECT_THAT(line("0", "18446744073709551615", "1", "[0]"), StartsWith("input_length"));
  EXPECT_THAT(line("0", "16777217", "1", "[0]"), StartsWith("input_length"));
  EXPECT_THAT(line("0", "1", "-1", "[0]"),
              AllOf(StartsWith("output_length: expected an integer from 0"), HasSubstr("got -1")));
  EXPECT_THAT(line("0", "1", "true", "[0]"), AllOf(StartsWith("output_length"), HasSubstr("got true")));
  EXPECT_THAT(line("0", "513", "1", "[0]"),
              AllOf(HasSubstr("expected an array of 2 ids"), HasSubstr("got an array of 1")));
  EXPECT_THAT(line("0", "512", "1", "[0, 1]"),
              AllOf(HasSubstr("expected an array of 1 ids"), HasSubstr("got an array of 2")));
  EXPECT_THAT(line("0", "1", "1", "{}"), AllOf(StartsWith("hash_ids"), HasSubstr("got an object")));
  EXPECT_THAT(line("0", "513", "1", "[0, -3]"), AllOf(StartsWith("hash_ids[1]: expected"), HasSubstr("got -3")));
  EXPECT_THAT(line("0", "1", "1", "[\"a\"]"), StartsWith("hash_ids[0]"));
}

TEST(TraceLine, RefusesLinesThatAreTooLong) {
  EXPECT_THAT(error_of(std::string(kMaxLineBytes + 1, ' ')), HasSubstr("expected a line of at most"));
}

TEST(TraceFileTest, SortsByArrivalAndKeepsTheOrderOfEqualOnes) {
  const TraceFile file(
      "{\"timestamp\": 5, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [0]}\n"
      "{\"timestamp\": 2, \"input_length\": 2, \"output_length\": 1, \"hash_ids\": [0]}\n"
      "{\"timestamp\": 5, \"input_length\": 3, \"output_length\": 1, \"hash_ids\": [0]}\n \n\n");
  const auto requests = read_trace(file.path(), 0);
  ASSERT_TRUE(requests.ok()) << requests.status().message();
  ASSERT_EQ(requests->size(), 3U);
  EXPECT_EQ((*requests)[0].line, 2);
  EXPECT_EQ((*requests)[1].line, 1);
  EXPECT_EQ((*requests)[2].line, 3);
}

TEST(TraceFileTest, ReadsOnlyWhatIsAskedForAndALastLineWithoutEnd) {
  const TraceFile file(std::string(kGood) + "\nnot json");
  ASSERT_TRUE(read_trace(file.path(), 1).ok());
  const TraceFile one(kGood);
  const auto requests = read_trace(one.path(), 5);
  ASSERT_TRUE(requests.ok()) << requests.status().message();
  EXPECT_EQ(requests->size(), 1U);
}

TEST(TraceFileTest, ErrorsNameFileAndLine) {
  const auto error = [](const std::string& text) {
    const TraceFile file(text);
    const auto requests = read_trace(file.path(), 0);
    const std::string message = requests.ok() ? "no error" : requests.status().message();
    const size_t name = message.find(file.path());
    return name == 0 ? "FILE" + message.substr(file.path().size()) : message;
  };
  const std::string good = std::string(kGood) + "\n";
  EXPECT_EQ(error(good + good + "{\"timestamp\": 1}\n"),
            "FILE:3: input_length: expected an integer from 1 to 16777216, got no such field");
  EXPECT_EQ(error(good + "\n" + good), "FILE:2: expected a JSON object, got a blank line");
  EXPECT_EQ(error(good + "{\n"), "FILE:2: expected a JSON object, got text that is not JSON");
  EXPECT_EQ(error(""), "FILE: expected at least one request, got an empty file");
  EXPECT_EQ(error("\n\n"), "FILE: expected at least one request, got an empty file");
  EXPECT_THAT(error(good + std::string(kMaxLineBytes + 100, 'x') + "\n"),
              StartsWith("FILE:2: expected a line of at most"));
}

TEST(TraceFileTest, MissingFilesAndDirectories) {
  EXPECT_THAT(read_trace("/nonexistent/trace.jsonl", 0).status().message(),
              AllOf(HasSubstr("/nonexistent/trace.jsonl"), HasSubstr("cannot open")));
  EXPECT_THAT(read_trace(std::filesystem::temp_directory_path().string(), 0).status().message(),
              HasSubstr("got a directory"));
}

}  // namespace
}  // namespace mla::cli::replay
