// SPDX-License-Identifier: Apache-2.0
#include "cuda/runtime/code.h"

#include <algorithm>

#include "cuda/built_archs.h"  // generated: MLA_FOR_EVERY_CUDA_ARCH, MLA_FOR_EVERY_EMULATED_ARCH

// Each architecture and machine has a ceiling_kernels() in its namespace: src/cuda/common/ceilings.cu is compiled for
// each.
#define MLA_DECLARE(space)                       \
  namespace mla::space {                         \
  const cuda::CeilingKernels& ceiling_kernels(); \
  }
#define MLA_DECLARE_CUDA(arch) MLA_DECLARE(sm##arch)
#define MLA_DECLARE_EMULATED(arch) MLA_DECLARE(emulated_sm##arch)
MLA_FOR_EVERY_CUDA_ARCH(MLA_DECLARE_CUDA)
MLA_FOR_EVERY_EMULATED_ARCH(MLA_DECLARE_EMULATED)

namespace mla::cuda {
namespace {

#define MLA_NUMBER(arch) arch,
// A list of architectures may be empty but an array must not, so that each ends in a 0 that does not count.
constexpr int32_t kBuilt[] = {MLA_FOR_EVERY_CUDA_ARCH(MLA_NUMBER) 0};
constexpr int32_t kEmulated[] = {MLA_FOR_EVERY_EMULATED_ARCH(MLA_NUMBER) 0};

}  // namespace

std::span<const int32_t> built_archs() { return std::span(kBuilt).first(std::size(kBuilt) - 1); }
std::span<const int32_t> emulated_archs() { return std::span(kEmulated).first(std::size(kEmulated) - 1); }

Profile profile() { return {.arch = MLA_PROFILE_ARCH, .gpu = MLA_PROFILE_GPU}; }

Code code_for(int32_t arch) {
  switch (arch_of_code(arch, built_archs())) {
#define MLA_CASE(arch) \
  case arch: return {arch, false, &mla::sm##arch::ceiling_kernels()};
    MLA_FOR_EVERY_CUDA_ARCH(MLA_CASE)
#undef MLA_CASE
    default: return {};
  }
}

Code emulated_code(int32_t arch) {
  const bool kindred = std::find(std::begin(kKindredArchs), std::end(kKindredArchs), arch) != std::end(kKindredArchs);
  const CodeChoice choice = choose_code(arch, emulated_archs());
  switch (kindred && !choice.by_driver ? choice.arch : arch) {
#define MLA_CASE(arch) \
  case arch: return {arch, true, &mla::emulated_sm##arch::ceiling_kernels()};
    MLA_FOR_EVERY_EMULATED_ARCH(MLA_CASE)
#undef MLA_CASE
    default: return {};
  }
}

}  // namespace mla::cuda
