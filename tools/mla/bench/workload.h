// SPDX-License-Identifier: Apache-2.0
// A case with its memory, ready to run again and again.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "kit/cases.h"
#include "kit/specs.h"
#include "mla/bench/cases.h"
#include "mla/plan.h"

namespace mla::bench {

/// Bytes of all tensors of a case, the workspace apart.
int64_t memory_needed(const Case& one);

/// Throws UsageError if the cases together need more memory than there is.
void check_memory(const std::vector<Case>& cases);

class Workload {
 public:
  /// Allocates and fills everything, plans, and runs once. Throws UsageError with the library's message.
  Workload(const Case& one, uint64_t seed);
  Workload(const Workload&) = delete;
  Workload& operator=(const Workload&) = delete;

  const Case& description() const { return case_; }
  const std::string& backend() const { return backend_; }
  const Context& context() const { return *context_; }
  /// What the plan says of itself; empty for operations without one.
  const std::string& plan_text() const { return plan_text_; }
  /// 2 flops per multiply-add of visible keys; every byte read or written once.
  const kit::Work& work() const { return work_; }

  /// Runs the operation once. Throws UsageError if the library refuses.
  void run();

  /// Memory to copy for what only moves bytes: the real source and destination, as much as both hold. A copy between
  /// them leaves the outputs wrong until the next run. Empty for all other operations.
  struct CopyPair {
    void* destination = nullptr;
    const void* source = nullptr;
    size_t bytes = 0;
  };
  CopyPair copy_pair();

  using Problem = std::variant<std::monostate, kit::DecodeCase, kit::DecodeSparseCase, kit::PrefillCase,
                               kit::PrefillSparseCase, kit::MergeCase, kit::AppendCase, kit::AppendRopeCase,
                               kit::GatherCase, kit::CopyPagesCase, kit::BlockTableToCsrCase, kit::PhysicalSlotsCase,
                               kit::AppendIndexerCase, kit::IndexerLogitsCase, kit::TopKCase, kit::IndexerTopKCase>;
  const Problem& problem() const { return problem_; }

 private:
  template <class KitCase, class Spec>
  KitCase& make(const Spec& spec);
  void make_problem(uint64_t seed);

  Case case_;
  std::unique_ptr<Context> context_;
  Problem problem_;
  kit::Buffer workspace_, copy_memory_;
  Plan plan_;
  std::function<Status()> run_;
  std::string backend_, plan_text_;
  kit::Work work_;
};

}  // namespace mla::bench
