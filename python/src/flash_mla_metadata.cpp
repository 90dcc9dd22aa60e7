// SPDX-License-Identifier: Apache-2.0
#include "flash_mla_metadata.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/memory.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <utility>

#include "flash_mla_caches.h"

namespace mla::python::flash_mla {
namespace {

enum class Kind : uint8_t { kCount, kOptionalCount, kBool };
struct ConfigField {
  const char* name;
  Kind kind;
};
constexpr ConfigField kConfig[] = {{"b", Kind::kCount},
                                   {"s_q", Kind::kCount},
                                   {"h_q", Kind::kCount},
                                   {"page_block_size", Kind::kCount},
                                   {"h_k", Kind::kCount},
                                   {"causal", Kind::kBool},
                                   {"is_fp8_kvcache", Kind::kBool},
                                   {"topk", Kind::kOptionalCount},
                                   {"extra_page_block_size", Kind::kOptionalCount},
                                   {"extra_topk", Kind::kOptionalCount},
                                   {"enable_batch_invariant", Kind::kBool}};
static_assert(std::size(kConfig) == std::tuple_size_v<Config>);

ffi::Any value_of_field(const ConfigField& field, int64_t value) {
  if (field.kind == Kind::kBool) return value != 0;
  if (field.kind == Kind::kOptionalCount && value < 0) return nullptr;
  return value;
}

std::string text_of_field(const ConfigField& field, int64_t value) {
  if (field.kind == Kind::kBool) return value != 0 ? "True" : "False";
  if (field.kind == Kind::kOptionalCount && value < 0) return "None";
  return std::to_string(value);
}

void new_metadata(ffi::PackedArgs packed, ffi::Any* result) {
  const Arguments args("FlashMLASchedMeta", packed);
  args.end();
  *result = ffi::ObjectRef(ffi::make_object<MetadataObj>());
}

/// Returns to Python the plan that metadata holds, the name of its operation, and the values of its configuration;
/// None if it holds no plan.
void metadata_info(ffi::PackedArgs packed, ffi::Any* result) {
  Arguments args("FlashMLASchedMeta", packed);
  const auto* const metadata = args.object<MetadataObj>("metadata", "a FlashMLASchedMeta");
  args.end();
  const std::optional<MetadataObj::Planned> planned = metadata == nullptr ? std::nullopt : metadata->planned();
  if (!planned) return;
  ffi::Array<ffi::Any> values;
  for (size_t i = 0; i < planned->config.size(); ++i)
    values.push_back(value_of_field(kConfig[i], planned->config.at(i)));
  *result = ffi::Array<ffi::Any>{ffi::ObjectRef(planned->plan), ffi::String(planned->operation), values};
}

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef()
      .def_packed("libmla.flash_mla_metadata", new_metadata)
      .def_packed("libmla.flash_mla_metadata_info", metadata_info);
}

}  // namespace

std::optional<MetadataObj::Planned> MetadataObj::planned() const {
  const std::lock_guard lock(mutex_);
  return planned_;
}

ffi::ObjectPtr<PlanObj> MetadataObj::plan_for(const Arguments& args, const Config& config) const {
  const std::lock_guard lock(mutex_);
  if (!planned_) return nullptr;
  if (planned_->config == config) return planned_->plan;
  size_t i = 0;
  while (planned_->config.at(i) == config.at(i)) ++i;
  const ConfigField& field = kConfig[i];
  refuse(args, "ValueError", "tile_scheduler_metadata",
         std::string("planned for ") + field.name + " " + text_of_field(field, planned_->config.at(i)) +
             ", used with " + text_of_field(field, config.at(i)) +
             "; calls that share it have equal shapes and lengths: take another one from get_mla_metadata");
}

void MetadataObj::remember(Planned planned) const {
  std::optional<Planned> before = std::move(planned);
  const std::lock_guard lock(mutex_);
  planned_.swap(before);  // what was there ends behind the lock
}

}  // namespace mla::python::flash_mla
