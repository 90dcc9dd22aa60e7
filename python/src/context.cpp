// SPDX-License-Identifier: Apache-2.0
#include "context.h"

#include <pthread.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/memory.h>
#include <tvm/ffi/reflection/registry.h>

#include <atomic>

namespace mla::python {
namespace {

/// Counts how often this process and its ancestors were forked since the library was loaded.
std::atomic<uint64_t> process_generation = 0;
/// Holds the context of calls that name none. It is never destroyed: a fork leaves its threads behind, and at the end
/// of the process they may not be joined any more.
std::atomic<const ffi::ObjectPtr<ContextObj>*> default_context = nullptr;

// Locks may be held by threads that do not exist in the new process: only atomics are touched.
void forked() {
  process_generation.fetch_add(1, std::memory_order_relaxed);
  default_context.store(nullptr, std::memory_order_relaxed);
}

void new_context(ffi::PackedArgs packed, ffi::Any* result) {
  Arguments args("Context", packed);
  ContextOptions options;
  options.num_threads = args.integer("num_threads");
  const auto affinity = args.any("affinity").try_cast<ffi::Array<int64_t>>();
  if (!affinity) args.fail("TypeError", "affinity", "a sequence of ints", "something else");
  for (const int64_t processor : *affinity) {
    if (processor != static_cast<int32_t>(processor))
      args.fail("ValueError", "affinity", "ints of 32 bits", std::to_string(processor));
    options.affinity.push_back(static_cast<int32_t>(processor));
  }
  options.backend = args.text("backend");
  options.device = args.text("device");
  args.end();
  *result = ffi::ObjectRef(ffi::make_object<ContextObj>(options));
}

void context_info(ffi::PackedArgs packed, ffi::Any* result) {
  Arguments args("Context", packed);
  const Context& context = context_or_default(args.object<ContextObj>("context", "a Context")).get();
  args.end();
  *result = ffi::Array<ffi::Any>{static_cast<int64_t>(context.num_threads()), ffi::String(context.backend()),
                                 ffi::String(context.device())};
}

TVM_FFI_STATIC_INIT_BLOCK() {
  pthread_atfork(nullptr, nullptr, forked);
  ffi::reflection::GlobalDef()
      .def_packed("libmla.context", new_context)
      .def_packed("libmla.context_info", context_info);
}

}  // namespace

ContextObj::ContextObj(const ContextOptions& options)
    : context_(std::make_unique<Context>(value_of(Context::create(options)))),
      generation_(process_generation.load(std::memory_order_relaxed)),
      emulated_(context_->device().starts_with("emulated")) {}

ContextObj::~ContextObj() {
  // Joining threads of another process would wait for ever.
  if (generation_ != process_generation.load(std::memory_order_relaxed)) static_cast<void>(context_.release());
}

const Context& ContextObj::get() const {
  if (generation_ != process_generation.load(std::memory_order_relaxed))
    raise("RuntimeError", "context: expected one that this process made, got one from before a fork");
  return *context_;
}

HostMemory ContextObj::take(size_t bytes) const {
  const std::lock_guard lock(mutex_);
  if (!free_.empty()) {
    HostMemory memory = std::move(free_.back());
    free_.pop_back();
    if (memory.span().size() >= bytes) return memory;
  }
  return HostMemory(bytes);
}

void ContextObj::put(HostMemory memory) const {
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(memory));
}

const ContextObj& context_or_default(const ContextObj* given) {
  if (given != nullptr) return *given;
  const auto* context = default_context.load(std::memory_order_acquire);
  if (context != nullptr) return **context;
  auto fresh = std::make_unique<const ffi::ObjectPtr<ContextObj>>(ffi::make_object<ContextObj>(ContextOptions{}));
  if (!default_context.compare_exchange_strong(context, fresh.get(), std::memory_order_acq_rel)) return **context;
  return **fresh.release();
}

}  // namespace mla::python
