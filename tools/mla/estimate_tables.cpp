// SPDX-License-Identifier: Apache-2.0
// Prints what docs/estimate.md has of the model: its errors, its estimates, and what kernels execute.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "mla/estimate.h"
#include "mla/output.h"
#include "mla/step_table.h"

namespace mla::cli {
namespace {

std::string keys_text(int64_t keys) {
  return keys % 1024 == 0 ? fmt::format("{}k", keys / 1024) : fmt::format("{}", keys);
}

// "297", "63.4".
std::string time_text(double us) { return us < 100 ? fmt::format("{:.1f}", us) : fmt::format("{:.0f}", us); }

// "+2.7", "0.0", in per cent.
std::string signed_text(double error) {
  const double rounded = std::round(error * 1000) / 10;
  return rounded == 0 ? "0.0" : fmt::format("{:+.1f}", rounded);
}

std::string kernels_text(const MeasuredCase& measured) {
  return measured.kernels == 0 ? std::string(measured.backend)
                               : fmt::format("{}, sm{}", measured.backend, measured.kernels);
}

// "128 heads, q_len 2, sparse"
std::string heads_text(const MeasuredCase& measured) {
  return fmt::format("{} heads{}{}", measured.heads,
                     measured.q_len == 1 ? "" : fmt::format(", q_len {}", measured.q_len),
                     measured.op == Op::kDecodeSparse ? ", sparse" : "");
}

void print_errors(std::FILE* file) {
  struct Errors {
    int fitted = 0, others = 0;
    double of_fitted = 0, of_others = 0, sum_of_others = 0;
  };
  std::vector<std::pair<std::string, Errors>> all;
  for (const MeasuredCase& measured : measured_cases()) {
    const std::string kernels = kernels_text(measured);
    if (all.empty() || all.back().first != kernels) all.emplace_back(kernels, Errors{});
    Errors& errors = all.back().second;
    const double error = std::abs(error_of(measured));
    (measured.fitted ? errors.fitted : errors.others) += 1;
    double& largest = measured.fitted ? errors.of_fitted : errors.of_others;
    largest = std::max(largest, error);
    if (!measured.fitted) errors.sum_of_others += error;
  }
  Table table({"kernels", "fitted", "largest error", "others", "mean error", "largest error"});
  for (const auto& [kernels, errors] : all)
    table.add_row({kernels, fmt::format("{}", errors.fitted),
                   errors.fitted == 0 ? "-" : fmt::format("{:.1f} %", 100 * errors.of_fitted),
                   fmt::format("{}", errors.others),
                   fmt::format("{:.1f} %", 100 * errors.sum_of_others / errors.others),
                   fmt::format("{:.1f} %", 100 * errors.of_others)});
  table.print_markdown(file);
}

// Cases that differ in batch and keys alone share a line.
void print_cases(std::FILE* file) {
  std::vector<std::vector<std::string>> lines;
  for (const MeasuredCase& measured : measured_cases()) {
    const std::vector<std::string> key = {kernels_text(measured) + (measured.fitted ? " *" : ""),
                                          std::string(measured.gpu), fmt::format("`{}`", name(measured.cache)),
                                          heads_text(measured)};
    const std::vector<std::string> numbers = {fmt::format("{} of {}", measured.batch, keys_text(measured.keys)),
                                              fmt::format("{}", measured.us), time_text(estimate(measured).us),
                                              signed_text(error_of(measured))};
    if (lines.empty() || !std::equal(key.begin(), key.end(), lines.back().begin())) {
      lines.push_back(key);
      lines.back().insert(lines.back().end(), numbers.begin(), numbers.end());
    } else {
      for (size_t i = 0; i < numbers.size(); ++i) lines.back()[key.size() + i] += " / " + numbers[i];
    }
  }
  Table table({"kernels", "GPU", "cache", "heads", "batch of keys", "measured", "estimate", "error, %"}, 8);
  for (std::vector<std::string>& line : lines) table.add_row(std::move(line));
  table.print_markdown(file);
}

// Estimated times of cuda_portable on GPUs that nobody has timed, and their shares of the ceiling.
void print_estimates(std::FILE* file) {
  struct Work {
    CacheFormat cache;
    int32_t heads, batch, keys;
    bool e4m3 = false;
  };
  constexpr Work kWork[] = {
      {CacheFormat::kBF16, 128, 1, 32768},
      {CacheFormat::kBF16, 128, 64, 4096},
      {CacheFormat::kBF16, 128, 64, 8192},
      {CacheFormat::kBF16, 128, 128, 8192},
      {CacheFormat::kBF16, 64, 64, 8192},
      {CacheFormat::kBF16, 16, 1, 32768},
      {CacheFormat::kBF16, 16, 64, 4096},
      {CacheFormat::kBF16, 16, 64, 8192},
      {CacheFormat::kFP8DsMla, 128, 64, 8192},
      {CacheFormat::kFP8DsMla, 16, 64, 8192},
      {CacheFormat::kFP8DsMla, 128, 64, 8192, true},
      {CacheFormat::kFP8DsMla, 16, 64, 8192, true},
  };
  std::vector<std::string> header = {"cache", "work"};
  for (const GpuKind& gpu : gpu_kinds())
    if (!gpu.measured) header.push_back(fmt::format("{} (sm{})", gpu.name, gpu.arch));
  Table table(header, 2);
  for (const Work& work : kWork) {
    std::vector<std::string> cells = {fmt::format("`{}`{}", name(work.cache), work.e4m3 ? ", `cuda_fp8`" : ""),
                                      fmt::format("{} heads, {} of {}", work.heads, work.batch, keys_text(work.keys))};
    EstimatedWork asked{
        .problem = {}, .backend = work.e4m3 ? "cuda_fp8" : "cuda_portable", .batch = work.batch, .keys = work.keys};
    asked.problem.cache = work.cache;
    asked.problem.num_heads = work.heads;
    for (const GpuKind& gpu : gpu_kinds()) {
      if (gpu.measured) continue;
      const Estimate found = estimate(asked, gpu);
      cells.push_back(found.unknown.empty()
                          ? fmt::format("{} ({:.0f} %)", time_text(found.us), 100 * found.ceiling_us / found.us)
                          : "-");
    }
    table.add_row(std::move(cells));
  }
  table.print_markdown(file);
}

void print_steps(std::FILE* file) {
  constexpr std::pair<Kernel, std::string_view> kKernels[] = {{Kernel::kBf16, "`cuda_portable`, 16 bits"},
                                                              {Kernel::kQuantized, "`cuda_portable`, quantized"},
                                                              {Kernel::kCodes, "`cuda_portable`, `fp8` of one scale"},
                                                              {Kernel::kFp8, "`cuda_fp8`"}};
  constexpr int32_t kArchs[] = {80, 86, 89, 90, 100, 120};
  std::vector<std::string> header = {"kernel", "rows", "multiplies"};
  for (const int32_t arch : kArchs) header.push_back(fmt::format("sm{}", arch));
  header.emplace_back("sm120 on an H100");
  Table table(header);
  for (const auto& named : kKernels)
    for (const int32_t rows : {16, 32, 64}) {
      const Kernel kernel = named.first;
      const auto instructions = [kernel, rows](int32_t arch, int32_t on) -> std::string {
        for (const StepCount& count : kStepCounts)
          if (count.kernel == kernel && count.rows == rows && count.arch == arch && count.on == on)
            return fmt::format("{}", count.instructions);
        return "-";
      };
      std::vector<std::string> cells = {std::string(named.second), fmt::format("{}", rows), ""};
      for (const StepCount& count : kStepCounts)
        if (count.kernel == kernel && count.rows == rows) cells[2] = fmt::format("{}", count.multiplies + count.e4m3);
      if (cells[2].empty()) continue;
      for (const int32_t arch : kArchs) cells.push_back(instructions(arch, arch));
      cells.push_back(instructions(120, 90));
      table.add_row(std::move(cells));
    }
  table.print_markdown(file);
}

}  // namespace

void print_estimate_tables(std::FILE* file) {
  print_to(file, "**Errors** of the estimate, by kernels:\n\n");
  print_errors(file);
  print_to(file, "\n**Estimates** in us, and their share of the ceiling that the datasheet sets:\n\n");
  print_estimates(file);
  print_to(file, "\n**Instructions** of a warp in a step of {} keys, multiplies among them:\n\n", kStepKeys);
  print_steps(file);
  print_to(file, "\n**Cases** in us (*: a constant was fitted to it):\n\n");
  print_cases(file);
}

}  // namespace mla::cli
