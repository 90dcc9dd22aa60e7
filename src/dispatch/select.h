// SPDX-License-Identifier: Apache-2.0
// Selects the row that runs a problem: the first one that the caller admits, that can run it, and that does not yield
// to another; if all of them yield, the first one. `explain` prints what the rows answer to the same question.
#pragma once

#include <cstdlib>
#include <span>
#include <string>
#include <string_view>

#include "core/implementation.h"
#include "mla/status.h"

namespace mla::dispatch {

/// Returns whether a forced name covers a row: "" and "auto" cover all rows, "cpu_avx2" covers one row, "cpu" a family.
inline bool covers(std::string_view force, std::string_view row) {
  if (force.empty() || force == "auto" || force == row) return true;
  return row.size() > force.size() && row.starts_with(force) && row[force.size()] == '_';
}

/// Returns whether some operation has a row of this name.
bool names_a_row(std::string_view force);

/// Says which rows of a table a forced name admits. The name of a row admits that row alone, even if names of other
/// rows begin with it ("cpu_avx512" and "cpu_avx512_bf16"). Where only other operations have the row ("cuda_sm90",
/// which writes no caches), its name admits its family.
template <class Row>
class Admitted {
 public:
  Admitted(std::span<const Row> rows, std::string_view force) : force_(force) {
    bool any = false;
    for (const Row& row : rows) {
      exact_ = exact_ || row.name == force;
      any = any || covers(force, row.name);
    }
    if (!any && names_a_row(force)) force_ = force.substr(0, force.find('_'));
  }
  bool operator()(const Row& row) const { return exact_ ? row.name == force_ : covers(force_, row.name); }

 private:
  std::string_view force_;
  bool exact_ = false;
};

/// Names a row or family that is forced ("" = none), and says where it was forced, for errors.
struct Forced {
  std::string_view backend = {};
  std::string_view source = "backend";
};

/// Returns what is forced: the caller's choice, else MLA_BACKEND, else nothing.
inline Forced forced_backend(std::string_view asked) {
  Forced forced{.backend = asked};
  if (asked.empty() || asked == "auto") {
    const char* from_environment = std::getenv("MLA_BACKEND");
    forced = {.backend = from_environment != nullptr ? from_environment : "", .source = "MLA_BACKEND"};
  }
  return forced.backend.empty() || forced.backend == "auto" ? Forced{} : forced;
}

/// Checks the counts of a problem that a caller describes to `explain`: each must be at least 1.
Status check_problem(const Problem& problem);

/// Returns the error for a forced name that admits no row: "decode: backend: expected one of cpu_avx2, reference, a
/// family such as cpu, or auto, got "foo"".
Status unknown_backend(Op op, const Forced& force, std::span<const std::string_view> names);
/// Returns the error for a problem that no admitted row can run: "decode: no backend can run this: cpu_avx2: <reason>;
/// reference: <reason>". `other` is a row that can run the problem and that the forced name does not admit; it is empty
/// if there is none. The error names it: "decode: backend: "cuda_sm90" cannot run this: cuda_sm90: <reason>; cuda_bulk
/// can".
Status unusable(Op op, const Forced& force, std::span<const BackendVerdict> refused, std::string_view other);

/// Returns the row that runs `problem`, or null with the reasons in `error`. Success allocates nothing.
template <class Row>
const Row* select(std::span<const Row> rows, const Problem& problem, const Forced& force, Status& error) {
  const Admitted<Row> admitted(rows, force.backend);
  const Row* first = nullptr;  // that can run it
  {
    const core::Reason::WithoutWords without_words;
    for (const Row& row : rows) {
      if (!admitted(row)) continue;
      const core::Verdict verdict = row.verdict(problem);
      if (verdict.usable && !verdict.yields) return &row;
      if (verdict.usable && first == nullptr) first = &row;
    }
  }
  if (first != nullptr) return first;

  std::vector<std::string_view> names;
  std::vector<BackendVerdict> refused;
  std::string_view other;
  for (const Row& row : rows) {
    names.push_back(row.name);
    const core::Verdict verdict = row.verdict(problem);
    if (admitted(row)) refused.push_back({std::string(row.name), false, verdict.reason.str(), {}});
    if (verdict.usable && other.empty()) other = row.name;
  }
  error = refused.empty() ? unknown_backend(problem.op, force, names) : unusable(problem.op, force, refused, other);
  return nullptr;
}

}  // namespace mla::dispatch
