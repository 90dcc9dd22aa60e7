// SPDX-License-Identifier: Apache-2.0
// Measurements as a table, as CSV and as the JSON of docs/json.md.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "mla/bench/measure.h"
#include "mla/output.h"

namespace mla::bench {

/// {"cpu", "threads", "isa", "gpus", "bf16_instruction", "f32_instruction"}
cli::Json machine_json();

/// All ceilings with the meter's thread count, the medians of this run's samples.
cli::Json ceilings_json(CeilingMeter& meter);
void print_ceilings(CeilingMeter& meter, std::FILE* file);

cli::Json result_json(const Measurement& measurement);

void print_table(const std::vector<Measurement>& results, std::FILE* file);

/// One line per measurement, the columns of the JSON.
void write_csv(const std::vector<Measurement>& results, const std::string& path);

}  // namespace mla::bench
