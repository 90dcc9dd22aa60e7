// SPDX-License-Identifier: Apache-2.0
// Holds a case with its memory, ready to run again and again.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "kit/cases.h"
#include "kit/device.h"
#include "kit/specs.h"
#include "mla/bench/cases.h"
#include "mla/plan.h"

namespace mla::bench {

/// Returns the bytes of all tensors of a case, the workspace apart.
int64_t memory_needed(const Case& one);

/// Throws UsageError if the cases together need more memory than there is.
void check_memory(const std::vector<Case>& cases);

class Workload {
 public:
  /// Allocates and fills everything, copies it to the case's device, plans, runs once, and copies the outputs back.
  /// Throws UsageError with the library's message.
  Workload(const Case& one, uint64_t seed);
  Workload(const Workload&) = delete;
  Workload& operator=(const Workload&) = delete;

  const Case& description() const { return case_; }
  const std::string& backend() const { return backend_; }
  /// Says how the backend computes.
  const Numerics& numerics() const { return numerics_; }
  const Context& context() const { return *context_; }
  /// Returns what the plan says of itself; empty for operations without one.
  const std::string& plan_text() const { return plan_text_; }
  /// Returns the work of a run: 2 flops per multiply-add of visible keys, and every byte read or written once.
  const kit::Work& work() const { return work_; }

  /// Runs the operation once, to its end. Throws UsageError if the library refuses.
  void run();

  /// Returns the GPU that computes, or null where the host's memory serves: on the CPU, in the emulator.
  const Gpu* gpu() const { return images_.front().gpu(); }
  bool emulated() const { return case_.device.starts_with("emulated"); }

  /// Makes one more copy of all memory on the GPU, so that runs can take turns.
  void add_copy();
  size_t num_copies() const { return images_.size(); }
  /// Returns the bytes of one copy.
  size_t copy_bytes() const;
  /// Puts a run over a copy into the stream.
  void enqueue(size_t copy, Stream stream);
  void enqueue_plan(Stream stream);
  bool has_plan() const { return plan_.valid(); }

  /// Names the memory to copy for an operation that only moves bytes: the real source and destination, as much as both
  /// hold. A copy between them leaves the outputs wrong until the next run. It is empty for all other operations.
  struct CopyPair {
    void* destination = nullptr;
    const void* source = nullptr;
    size_t bytes = 0;
  };
  CopyPair copy_pair();

  using Problem =
      std::variant<std::monostate, kit::DecodeCase, kit::DecodeSparseCase, kit::PrefillCase, kit::PrefillSparseCase,
                   kit::MergeCase, kit::AppendCase, kit::AppendRopeCase, kit::GatherCase, kit::CopyPagesCase,
                   kit::BlockTableToCsrCase, kit::PhysicalSlotsCase, kit::AppendIndexerCase, kit::IndexerLogitsCase,
                   kit::TopKCase, kit::IndexerTopKCase, kit::CompressCase, kit::FinishOutputCase>;
  const Problem& problem() const { return problem_; }

 private:
  /// Makes the problem of a spec; `finish` may change it before it is copied anywhere.
  template <class KitCase, class Spec>
  void make(const Spec& spec, void (*finish)(const Workload&, const KitCase&, uint64_t) = nullptr, uint64_t seed = 0);
  template <class KitCase>
  void plan_problem(const KitCase& problem);
  void make_problem(uint64_t seed);

  Case case_;
  std::unique_ptr<Context> context_;
  Problem problem_;
  kit::Buffer workspace_, copy_memory_;
  std::vector<kit::DeviceImage> images_;
  Plan plan_;
  std::vector<std::function<Status(Stream)>> runs_;  // over each copy
  std::function<Status(Stream)> enqueue_plan_;
  std::function<void()> add_copy_;
  std::function<Status()> fetch_;
  std::string backend_, plan_text_;
  Numerics numerics_;
  kit::Work work_;
};

}  // namespace mla::bench
