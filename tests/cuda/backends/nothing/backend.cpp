// SPDX-License-Identifier: Apache-2.0
// Is the least that a backend may be: it has rows in all tables, and nothing of its own behind them. It takes two
// problems: top_k, with the kernel that belongs to no backend, and copy_pages, which it then has no kernel for.
#include "cuda/border/backend.h"

namespace mla::cuda::nothing {
namespace {

core::Reason refusal(const Problem& problem) {
  if (problem.op == Op::kTopK || problem.op == Op::kCopyPages) return {};
  return "has nothing of its own";
}

Numerics numerics(const Problem&) { return {}; }

}  // namespace

Backend backend();

Backend backend() {
  return {.name = "cuda_nothing",
          .kernels = "no kernels",
          .ops = kAllOps,
          .refusal = refusal,
          .numerics = numerics,
          .leaves = "nearly everything"};
}

}  // namespace mla::cuda::nothing
