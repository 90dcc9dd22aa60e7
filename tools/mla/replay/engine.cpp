// SPDX-License-Identifier: Apache-2.0
#include "mla/replay/engine.h"

#include "mla/replay/latent_engine.h"
#include "mla/replay/pooled_engine.h"

namespace mla::cli::replay {

std::unique_ptr<Engine> make_engine(const EngineOptions& options, const Context& context, const Context& reference,
                                    const std::atomic<bool>& stop) {
  if (options.layer.model.value_is_row) return std::make_unique<PooledEngine>(options, context, reference, stop);
  return std::make_unique<LatentEngine>(options, context, reference, stop);
}

int64_t memory_needed(const EngineOptions& options) {
  return options.layer.model.value_is_row ? PooledEngine::memory_needed(options) : LatentEngine::memory_needed(options);
}

}  // namespace mla::cli::replay
