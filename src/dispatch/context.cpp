// SPDX-License-Identifier: Apache-2.0
// Implements the classes Context and Plan.
#include "dispatch/context.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <system_error>
#include <type_traits>

#include "core/format.h"
#include "dispatch/guard.h"
#include "dispatch/machine.h"

namespace mla {
namespace {

constexpr int32_t kMostThreads = 1024;

Status invalid(std::string_view field, std::string text) {
  return {StatusCode::kInvalidArgument, core::format("context: {}: {}", field, text)};
}

/// Builds what is built once per process, so that no `run` has to.
void build_tables() {
  isa_levels();
  for (Op op : kAllOps) backend_names(op);
}

/// Returns whether `force` names a row or family of any operation.
bool known_backend(std::string_view force) {
  for (Op op : kAllOps)
    for (const std::string& name : backend_names(op))
      if (dispatch::covers(force, name)) return true;
  return false;
}

}  // namespace

Result<Context> Context::create(const ContextOptions& options) {
  return dispatch::guarded([&]() -> Result<Context> {
    build_tables();
    const int32_t default_threads = options.affinity.empty()
                                        ? dispatch::usable_threads()
                                        : static_cast<int32_t>(std::min<size_t>(options.affinity.size(), INT32_MAX));
    const int32_t num_threads = options.num_threads == 0 ? default_threads : options.num_threads;
    if (num_threads < 0 || num_threads > kMostThreads)
      return invalid("num_threads", core::format("expected 0 to {}, got {}", kMostThreads, num_threads));
    if (!options.affinity.empty() && options.affinity.size() != static_cast<size_t>(num_threads))
      return invalid("affinity", core::format("expected {} entries, one for each thread, got {}", num_threads,
                                              options.affinity.size()));
    constexpr int32_t kRuns[] = {32, 64, 128};
    if (options.p_run != 0 && std::find(std::begin(kRuns), std::end(kRuns), options.p_run) == std::end(kRuns))
      return invalid("p_run", core::format("expected 0 or one of {}, got {}", fmt::join(kRuns, ", "), options.p_run));
    const dispatch::Forced force = dispatch::forced_backend(options.backend);
    if (!known_backend(force.backend))
      return invalid(force.source, core::format("expected one of {}, a family such as cpu, or auto, got \"{}\"",
                                                fmt::join(backend_names(Op::kDecode), ", "), force.backend));
    const Result<dispatch::DeviceChoice> choice = dispatch::choose_device(options.device, "context");
    if (!choice.ok()) return choice.status();
    if (choice->kind == dispatch::DeviceChoice::Kind::kCuda)
      if (const auto gpu = cuda::cuda_device(choice->index); !gpu.ok())
        return Status(StatusCode::kUnsupported, core::format("context: device: {}", gpu.status().message()));
    try {
      return Context(std::make_unique<Impl>(num_threads, options.affinity, force, *choice,
                                            options.p_run == 0 ? kRuns[0] : options.p_run));
    } catch (const std::system_error& error) {
      return Status(StatusCode::kInternal,
                    core::format("context: cannot start {} threads: {}", num_threads, error.what()));
    } catch (const core::PinningError& error) {
      return invalid("affinity", core::format("expected processors this process may use, got {} for worker {}",
                                              error.processor, error.worker));
    }
  });
}

Context::Context(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Context::Context(Context&&) noexcept = default;
Context& Context::operator=(Context&&) noexcept = default;
Context::~Context() = default;

bool Context::valid() const { return impl_ != nullptr; }
int32_t Context::num_threads() const { return impl_ != nullptr ? impl_->pool.size() : 0; }
const std::string& Context::backend() const {
  static const std::string none;
  return impl_ != nullptr ? impl_->backend : none;
}

const std::string& Context::device() const {
  static const std::string none;
  return impl_ != nullptr ? impl_->device : none;
}

Plan::Plan() = default;
Plan::Plan(Plan&&) noexcept = default;
Plan& Plan::operator=(Plan&&) noexcept = default;
Plan::~Plan() = default;
Plan::Plan(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

bool Plan::valid() const { return impl_ != nullptr; }
std::string_view Plan::backend() const {
  if (impl_ == nullptr) return {};
  return std::visit([](const auto* row) { return row->name; }, impl_->row);
}
std::string Plan::describe() const { return impl_ != nullptr ? impl_->summary.text() : std::string(); }
size_t Plan::num_tasks() const { return impl_ != nullptr ? impl_->summary.num_tasks : 0; }
size_t Plan::num_splits() const { return impl_ != nullptr ? impl_->summary.num_splits : 0; }

}  // namespace mla
