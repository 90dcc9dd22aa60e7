// SPDX-License-Identifier: Apache-2.0
#include "mla/values.h"

#include <cmath>
#include <cstdio>

#include "mla/output.h"
#include "mla/processors.h"
#include "tools/mla/expect_usage_error.h"

namespace mla::cli {
namespace {

using testing::ElementsAre;

TEST(ParseInt, TakesSuffixes) {
  EXPECT_EQ(parse_int("--n", "0", 0), 0);
  EXPECT_EQ(parse_int("--n", "4k", 0), 4096);
  EXPECT_EQ(parse_int("--n", "2M", 0), 2 * 1024 * 1024);
  EXPECT_EQ(parse_int("--n", "-3", -5), -3);
}

TEST(ParseInt, RefusesWithTheOptionName) {
  for (const char* text : {"", "k", "4kk", "four", "1.5", " 4", "99999999999999999999", "9223372036854775807k"})
    expect_usage_error([&] { parse_int("--heads", text, 0); }, {"--heads", "integer"});
  expect_usage_error([] { parse_int("--heads", "0", 1); }, {"--heads", "at least 1", "0"});
  expect_usage_error([] { parse_int("--heads", "9", 1, 8); }, {"--heads", "at most 8", "9"});
}

TEST(ParseIntList, TakesListsAndRanges) {
  EXPECT_THAT(parse_int_list("--n", "16,128", 1), ElementsAre(16, 128));
  EXPECT_THAT(parse_int_list("--n", "1k:8k:*2", 1), ElementsAre(1024, 2048, 4096, 8192));
  EXPECT_THAT(parse_int_list("--n", "1:9:+4", 1), ElementsAre(1, 5, 9));
  EXPECT_THAT(parse_int_list("--n", "1:10:4", 1), ElementsAre(1, 5, 9));
  EXPECT_THAT(parse_int_list("--n", "1:3,7", 1), ElementsAre(1, 2, 3, 7));
  EXPECT_THAT(parse_int_list("--n", "5:5:*2", 1), ElementsAre(5));
}

TEST(ParseIntList, RefusesBadRanges) {
  expect_usage_error([] { parse_int_list("--n", "1,,2", 1); }, {"--n", "commas"});
  expect_usage_error([] { parse_int_list("--n", "8:1", 1); }, {"--n", "backwards"});
  expect_usage_error([] { parse_int_list("--n", "1:8:*1", 1); }, {"--n", "step"});
  expect_usage_error([] { parse_int_list("--n", "1:8:0", 1); }, {"--n", "step"});
  expect_usage_error([] { parse_int_list("--n", "0:8:*2", 0); }, {"--n", "above 0"});
  expect_usage_error([] { parse_int_list("--n", "1:2:3:4", 1); }, {"--n", "range"});
  expect_usage_error([] { parse_int_list("--n", "1:900m", 1); }, {"--n", "too many"});
}

TEST(ParseProcessors, TakesNumbersAndRanges) {
  EXPECT_THAT(parse_processors("--processors", "8,0-3,5-5"), ElementsAre(8, 0, 1, 2, 3, 5));
  for (const char* text : {"", "0,,1", "1-", "-1", "0-3-5", "a", "0-b"})
    expect_usage_error([&] { parse_processors("--processors", text); }, {"--processors"});
  expect_usage_error([] { parse_processors("--processors", "3-1"); }, {"--processors", "at least 3", "1"});
  expect_usage_error([] { parse_processors("--processors", "0-3,2"); }, {"--processors", "once", "got 2 again"});
  expect_usage_error([] { parse_processors("--processors", "99999999"); }, {"--processors", "at most 1023"});
}

TEST(AffinityOf, IsTheFirstProcessors) {
  EXPECT_THAT(affinity_of("--processors", {4, 2, 6}, 2), ElementsAre(4, 2));
  EXPECT_THAT(affinity_of("--processors", {}, 2), ElementsAre());
  expect_usage_error([] { affinity_of("--processors", {4}, 2); },
                     {"--processors: expected 2 processors, one for each thread, got 1"});
}

TEST(ParseNames, ListTheChoices) {
  EXPECT_EQ(parse_op("--op", "gather"), Op::kGather);
  EXPECT_EQ(parse_cache("--cache", "fp8_ds_mla"), CacheFormat::kFP8DsMla);
  EXPECT_EQ(parse_float_dtype("--q-dtype", "f16"), DType::kF16);
  expect_usage_error([] { parse_op("--op", "dekode"); }, {"--op", "decode", "merge_states", "dekode"});
  expect_usage_error([] { parse_cache("--cache", "int4"); }, {"--cache", "bf16", "fp8_dsv4", "int4"});
  EXPECT_EQ(parse_float_dtype("--q-dtype", "e4m3", true), DType::kE4M3);
  expect_usage_error([] { parse_float_dtype("--q-dtype", "e4m3"); }, {"--q-dtype", "bf16, f16, f32"});
}

TEST(ParseDevice, TakesAnIndexOrAnEmulatedArchitecture) {
  EXPECT_EQ(parse_device("--device", "cpu"), "cpu");
  EXPECT_EQ(parse_device("--device", "cuda"), "cuda:0");
  EXPECT_EQ(parse_device("--device", "cuda:3"), "cuda:3");
  EXPECT_EQ(parse_device("--device", "cuda:03"), "cuda:3");
  EXPECT_EQ(parse_device("--device", "emulated:sm120"), "emulated:sm120");
  for (const char* text : {"", "tpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1k", "cpuu", "emulated", "emulated:90",
                           "emulated:sm", "emulated:sm9", "emulated:sm90a", "sm90"})
    expect_usage_error([&] { parse_device("--device", text); }, {"--device", "cuda:0", "emulated:sm90"});
}

TEST(ParseDevice, TakesAGpuThatNeedNotBeThere) {
  EXPECT_EQ(parse_device("--device", "sm120", true), "sm120");
  EXPECT_EQ(parse_device("--device", "cuda:1", true), "cuda:1");
  for (const char* text : {"sm", "sm9", "sm90a", "90"})
    expect_usage_error([&] { parse_device("--device", text, true); }, {"--device", "sm120"});
}

TEST(ParsePositive, NamesTheOptionAndTheUnit) {
  EXPECT_EQ(parse_positive("--min-time", "seconds", "0.25"), 0.25);
  for (const char* text : {"0", "-1", "nan", "", "1s", "1e999"})
    expect_usage_error([&] { parse_positive("--min-time", "seconds", text); },
                       {"--min-time: expected seconds above 0, got"});
  expect_usage_error([&] { parse_positive("--min-time", "seconds", "inf"); }, {"--min-time: expected at most"});
}

TEST(Counted, KnowsOneAndMany) {
  EXPECT_EQ(counted(1, "case"), "1 case");
  EXPECT_EQ(counted(0, "case"), "0 cases");
}

TEST(CheckBackendName, KnowsRowsAndFamilies) {
  for (const char* name : {"", "auto", "cpu", "cpu_avx2", "reference", "cuda", "cuda_portable"})
    check_backend_name("--backend", name);
  for (const char* name : {"cp", "cpu_", "cud", "cuda_", "cpu_avx3"})
    expect_usage_error([&] { check_backend_name("--backend", name); }, {"--backend", name, "cpu_avx2", "reference"});
}

TEST(HumanUnits, PickTheUnit) {
  EXPECT_EQ(human_bytes(640), "640 B");
  EXPECT_EQ(human_bytes(1.5 * 1024 * 1024), "1.5 MiB");
  EXPECT_EQ(human_seconds(31.2e-6), "31.2 us");
  EXPECT_EQ(human_seconds(4.5e-3), "4.50 ms");
  EXPECT_EQ(human_seconds(187), "3 min 07 s");
  EXPECT_EQ(progress_line("checking", 5, 20, 0.5), "checking [#######.......................] 5/20  500.00 ms");
  EXPECT_EQ(progress_line("checking", 5, 20, 4.0),
            "checking [#######.......................] 5/20  4.00 s, about 12 s left");
  EXPECT_THAT(progress_line("x", 1, 101, 2.0), testing::EndsWith("2.00 s, about 3 min 20 s left"));
  EXPECT_THAT(progress_line("x", 0, 20, 4.0), testing::EndsWith(" 0/20  4.00 s"));
  EXPECT_THAT(progress_line("x", 20, 20, 4.0), testing::EndsWith("#] 20/20  4.00 s"));
  EXPECT_THAT(progress_line("x", 3, 0, 4.0), testing::EndsWith(" 3/0  4.00 s"));
  EXPECT_EQ(human_count(950), "950");
  EXPECT_EQ(human_count(12345), "12.3 k");
  EXPECT_EQ(human_percent(0.931), "93.1 %");
}

std::string printed(void (Table::*print)(std::FILE*) const, const Table& table) {
  std::FILE* file = std::tmpfile();
  (table.*print)(file);
  std::string text(static_cast<size_t>(std::ftell(file)), '\0');
  std::rewind(file);
  text.resize(std::fread(text.data(), 1, text.size(), file));
  std::fclose(file);
  return text;
}

TEST(Table, AlignsQuotesAndFills) {
  Table table({"name", "n"});
  table.add_row({"a, \"b\"", "10"});
  table.add_row({"c"});
  EXPECT_EQ(printed(&Table::print, table), "name     n\n----------\na, \"b\"  10\nc\n");
  EXPECT_EQ(printed(&Table::print_csv, table), "name,n\n\"a, \"\"b\"\"\",10\nc,\n");
  EXPECT_EQ(printed(&Table::print_markdown, table), "| name | n |\n|---|---:|\n| a, \"b\" | 10 |\n| c |  |\n");
}

}  // namespace
}  // namespace mla::cli
