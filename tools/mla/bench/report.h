// SPDX-License-Identifier: Apache-2.0
// Writes measurements as a table, as CSV and as the JSON of docs/json.md.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "mla/bench/measure.h"
#include "mla/output.h"

namespace mla::bench {

/// Returns {"cpu", "threads", "isa", "gpus", "bf16_instruction", "f32_instruction"}.
cli::Json machine_json();

/// Returns all ceilings, the medians of this run's samples: of the CPU with the meter's thread count (null if nothing
/// ran there), and of the GPUs that something ran on.
cli::Json ceilings_json(CeilingMeter* meter, const Meters& meters);
void print_ceilings(CeilingMeter* meter, const Meters& meters, std::FILE* file);

cli::Json result_json(const Measurement& measurement);

/// Returns "84.5 %", with a mark if it is noisy; "-" if there is no share.
std::string share_text(const Measurement& measurement);

/// Returns one line: what was measured, how long it takes and its share.
std::string summary_line(const Measurement& measurement);

/// Returns the cases with what they need, measured or not.
cli::Json cases_json(const std::vector<CaseGroup>& groups);
void print_cases(const std::vector<CaseGroup>& groups, std::FILE* file);

void print_table(const std::vector<Measurement>& results, std::FILE* file);

inline constexpr const char* kNoisyRemark = "noisy: the ceiling was disturbed";

/// Writes one line per measurement, with the columns of the JSON.
void write_csv(const std::vector<Measurement>& results, const std::string& path);

}  // namespace mla::bench
