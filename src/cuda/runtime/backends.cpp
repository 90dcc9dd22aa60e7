// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "core/format.h"
#include "cuda/border/backend.h"
#include "cuda/built_backends.h"  // generated: MLA_FOR_EVERY_BACKEND, and what is compiled of each
#include "cuda/ptx/archs.h"

// Each backend has a namespace with its folder's name in mla::cuda, and one in the namespace of every architecture and
// machine.
#define MLA_DECLARE(folder, ...) \
  namespace mla::cuda::folder {  \
  Backend backend();             \
  }
#define MLA_DECLARE_OPERATIONS(space, folder) \
  namespace mla::space::folder {              \
  const cuda::Operations& operations();       \
  }
#define MLA_DECLARE_CUDA(folder, arch) MLA_DECLARE_OPERATIONS(sm##arch, folder)
#define MLA_DECLARE_EMULATED(folder, arch) MLA_DECLARE_OPERATIONS(emulated_sm##arch, folder)
MLA_FOR_EVERY_BACKEND(MLA_DECLARE)
MLA_FOR_EVERY_CUDA_BACKEND(MLA_DECLARE_CUDA)
MLA_FOR_EVERY_EMULATED_BACKEND(MLA_DECLARE_EMULATED)

namespace mla::cuda {
namespace {

struct Built {
  std::string_view folder;
  Backend::Compiled compiled;
};

#define MLA_BUILT_CUDA(folder, arch) {#folder, {arch, false, mla::sm##arch::folder::operations}},
#define MLA_BUILT_EMULATED(folder, arch) {#folder, {arch, true, mla::emulated_sm##arch::folder::operations}},
/// The last entry belongs to no backend: an array must not be empty.
constexpr Built kBuilt[] = {MLA_FOR_EVERY_CUDA_BACKEND(MLA_BUILT_CUDA)
                                MLA_FOR_EVERY_EMULATED_BACKEND(MLA_BUILT_EMULATED){"", {0, false, nullptr}}};

Backend complete(Backend backend, std::string_view folder, std::vector<int32_t> archs) {
  std::vector<int32_t> named = archs;
  for (const int32_t arch : kKindredArchs)
    if (std::find(archs.begin(), archs.end(), written_for(arch)) != archs.end()) named.push_back(arch);
  std::sort(named.begin(), named.end());
  for (const int32_t arch : named) backend.needs += core::format("{}sm{}", backend.needs.empty() ? "" : " or ", arch);
  if (!backend.gpus.empty()) backend.needs += core::format(" ({})", backend.gpus);
  backend.archs = std::move(archs);
  for (const Built& built : kBuilt)
    if (built.folder == folder) backend.compiled.push_back(built.compiled);
  return backend;
}

}  // namespace

bool Backend::has(Op op) const { return std::find(ops.begin(), ops.end(), op) != ops.end(); }

bool Backend::is_for(int32_t arch) const {
  return archs.empty() || std::find(archs.begin(), archs.end(), written_for(arch)) != archs.end();
}

const Operations* Backend::operations(int32_t arch, bool emulated) const {
  for (const Compiled& each : compiled)
    if (each.arch == arch && each.emulated == emulated) return &each.operations();
  return nullptr;
}

std::span<const Backend> backends() {
#define MLA_LIST(folder, ...) complete(folder::backend(), #folder, {__VA_ARGS__}),
  static const std::vector<Backend> all = {MLA_FOR_EVERY_BACKEND(MLA_LIST)};
  return all;
}

}  // namespace mla::cuda
