// SPDX-License-Identifier: Apache-2.0
// Holds what calls of FlashMLA's decode share: the plan of the first one.
#pragma once

#include <tvm/ffi/object.h>

#include <array>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "plan.h"

namespace mla::python::flash_mla {

/// Holds what calls that share a plan have in common, in the order of FlashMLASchedMeta.Config: b, s_q, h_q,
/// page_block_size, h_k, causal, is_fp8_kvcache, topk, extra_page_block_size, extra_topk, enable_batch_invariant. -1
/// stands for None.
using Config = std::array<int64_t, 11>;

class MetadataObj : public ffi::Object {
 public:
  struct Planned {
    ffi::ObjectPtr<PlanObj> plan;
    std::string operation;
    Config config;
  };

  std::optional<Planned> planned() const;
  /// Returns the plan, or null if there is none yet; raises ValueError if it was made for another configuration.
  ffi::ObjectPtr<PlanObj> plan_for(const Arguments& args, const Config& config) const;
  void remember(Planned planned) const;

  static constexpr bool _type_mutable = true;  // NOLINT(readability-identifier-naming): a name of apache-tvm-ffi
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("libmla.FlashMLASchedMeta", MetadataObj, ffi::Object);

 private:
  mutable std::mutex mutex_;
  mutable std::optional<Planned> planned_;
};

}  // namespace mla::python::flash_mla
