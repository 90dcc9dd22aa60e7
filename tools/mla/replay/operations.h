// SPDX-License-Identifier: Apache-2.0
// Runs the library's operations where the layer computes: on the CPU in the host's memory, or on a GPU, real or
// emulated, whose memory holds the caches. Everything else is made on the host, and copied to the GPU and back around
// every call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kit/tensors.h"
#include "mla/device.h"
#include "mla/mla.h"
#include "mla/replay/recorder.h"

namespace mla::cli::replay {

inline TensorView ints(const std::vector<int32_t>& values) {
  return contiguous(values.data(), DType::kI32, {std::ssize(values)});
}

/// Returns `view` restricted to `count` entries of dimension `dim`, beginning with `begin`.
TensorView slice(TensorView view, int32_t dim, int64_t begin, int64_t count);

/// Owns memory of a GPU.
class GpuBuffer {
 public:
  GpuBuffer() = default;
  /// Allocates `bytes`; throws UsageError with the library's message if that fails.
  GpuBuffer(const Gpu& gpu, size_t bytes);
  GpuBuffer(GpuBuffer&& other) noexcept { swap(other); }
  GpuBuffer& operator=(GpuBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~GpuBuffer();

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void swap(GpuBuffer& other) {
    std::swap(gpu_, other.gpu_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }
  std::optional<Gpu> gpu_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

/// Runs operations by one context. Errors are the library's; throws UsageError if there is no such GPU or its memory
/// does not suffice. A recorder that is null records nothing.
class Operations {
 public:
  explicit Operations(const Context& context);

  const Context& context() const { return context_; }
  /// Returns the GPU, or null if the context computes in the host's memory.
  const Gpu* gpu() const { return gpu_ ? &*gpu_ : nullptr; }

  /// Runs an operation on tensors in the host's memory and caches where gpu() says. Its results are complete when it
  /// returns.
  template <class Params>
  Status run(const Params& params, Phase phase, Recorder* recorder) {
    return around(params, recorder, [&](const Params& here) {
      return timed(recorder, phase, [&] { return done(mla::run(context_, here)); });
    });
  }

  /// Does the same for an operation that has a plan.
  template <class Params>
  Status plan_and_run(const Params& params, Phase phase, Recorder* recorder) {
    return around(params, recorder, [&](const Params& here) {
      const auto planned = timed(recorder, Phase::kPlan, [&]() -> Result<Plan> {
        const auto bytes = workspace_size(context_, here);
        if (!bytes.ok()) return bytes.status();
        auto plan = mla::plan(context_, here, workspace(*bytes));
        if (plan.ok())
          if (Status status = done({}); !status.ok()) return status;
        return plan;
      });
      if (!planned.ok()) return planned.status();
      return timed(recorder, phase, [&] { return done(mla::run(context_, *planned, here)); });
    });
  }

 private:
  template <class Params, class Compute>
  Status around(const Params& params, Recorder* recorder, const Compute& compute) {
    if (!gpu_) return compute(params);
    Params there = params;
    std::vector<TensorView*> views;
    kit::for_each_tensor(there, [&](TensorView& view) { views.push_back(&view); });
    Status status = timed(recorder, Phase::kTransfer, [&] { return upload(views); });
    if (!status.ok()) return status;
    if (status = compute(there); !status.ok()) return status;
    return timed(recorder, Phase::kTransfer, [&] { return download(outputs(params), outputs(there)); });
  }

  template <class Params>
  static std::vector<TensorView> outputs(Params params) {
    std::vector<TensorView> views;
    kit::for_each_output(params, [&](TensorView& view) { views.push_back(view); });
    return views;
  }

  /// Waits for what a call has put into the GPU's stream, so that its time is the call's.
  Status done(const Status& status) const { return status.ok() && gpu_ ? gpu_->synchronize(Stream{}) : status; }
  std::span<std::byte> workspace(size_t bytes);
  /// Copies tensors of the host to the GPU and points the views at the copies. Outputs are copied too, since what an
  /// operation leaves alone must come back as it was.
  Status upload(std::span<TensorView* const> views);
  Status download(std::span<const TensorView> to, std::span<const TensorView> from) const;

  const Context& context_;
  std::optional<Gpu> gpu_;
  std::vector<std::byte> host_workspace_;  // both workspaces grow to the largest need
  GpuBuffer gpu_workspace_;
  GpuBuffer tensors_;
};

}  // namespace mla::cli::replay
