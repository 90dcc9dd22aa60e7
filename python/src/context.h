// SPDX-License-Identifier: Apache-2.0
// Implements libmla.Context for Python: the library's context, and memory for the workspaces of calls without a plan.
#pragma once

#include <tvm/ffi/object.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "arguments.h"

namespace mla::python {

/// Holds memory whose pages are touched once and then kept: a call must not wait for the system to hand out zeroed
/// pages.
class HostMemory {
 public:
  static constexpr std::align_val_t kAlignment{64};

  HostMemory() = default;
  explicit HostMemory(size_t bytes) : data_(static_cast<std::byte*>(::operator new(bytes, kAlignment))), size_(bytes) {}
  std::span<std::byte> span() const { return {data_.get(), size_}; }

 private:
  struct Free {
    void operator()(std::byte* data) const { ::operator delete(data, kAlignment); }
  };
  std::unique_ptr<std::byte[], Free> data_;
  size_t size_ = 0;
};

class ContextObj : public ffi::Object {
 public:
  explicit ContextObj(const ContextOptions& options);
  ~ContextObj();

  /// Returns the library's context. Raises RuntimeError in a process that was forked from the one that made the
  /// context: its threads stayed behind.
  const Context& get() const;
  /// Returns whether the GPU is emulated: then the memory of tensors is the host's, whatever device they name.
  bool emulated() const { return emulated_; }

  /// Lends host memory for the time of one call.
  class Lease {
   public:
    Lease(const ContextObj& context, size_t bytes) : context_(context), memory_(context.take(bytes)) {}
    ~Lease() { context_.put(std::move(memory_)); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    std::span<std::byte> span() const { return memory_.span(); }

   private:
    const ContextObj& context_;
    HostMemory memory_;
  };

  static constexpr bool _type_mutable = true;  // NOLINT(readability-identifier-naming): a name of apache-tvm-ffi
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("libmla.Context", ContextObj, ffi::Object);

 private:
  HostMemory take(size_t bytes) const;
  void put(HostMemory memory) const;

  std::unique_ptr<Context> context_;
  uint64_t generation_;  // of the process that made the context
  bool emulated_;
  mutable std::mutex mutex_;
  mutable std::vector<HostMemory> free_;
};

/// Returns the context of a call: the given one, or the process's own if it is null.
const ContextObj& context_or_default(const ContextObj* given);

}  // namespace mla::python
