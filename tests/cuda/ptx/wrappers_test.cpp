// SPDX-License-Identifier: Apache-2.0
// Tests every wrapper of src/cuda/ptx against scalar code, on every emulated GPU of this build and, where there is one,
// on a GPU: the same kernels, the same inputs, the same expectations.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/built_archs.h"
#include "cuda/ptx/scaled_mma_cases.h"
#include "cuda/ptx/wrapper_cases.h"
#include "cuda/ptx/wrapper_kernels.h"
#include "cuda/runtime/device_runtime.h"
#include "cuda/runtime/emulated_queue.h"
#include "mla/numeric.h"
#include "trace.h"

#define X(arch) MLA_DECLARE_WRAPPER_KERNELS(sm##arch)
MLA_FOR_EVERY_CUDA_ARCH(X)
#undef X
#define X(arch) MLA_DECLARE_WRAPPER_KERNELS(emulated_sm##arch)
MLA_FOR_EVERY_EMULATED_ARCH(X)
#undef X

namespace mla::cuda {
namespace {

using Kernels = std::span<const WrapperKernel>;

Kernels emulated_kernels(int32_t arch) {
#define X(built) \
  if (arch == (built)) return emulated_sm##built::wrapper_kernels();
  MLA_FOR_EVERY_EMULATED_ARCH(X)
#undef X
  return {};
}

Kernels cuda_kernels([[maybe_unused]] int32_t arch) {
#define X(built) \
  if (arch == (built)) return sm##built::wrapper_kernels();
  MLA_FOR_EVERY_CUDA_ARCH(X)
#undef X
  return {};
}

/// Holds memory of a device, which it gives back at the end.
class DeviceWords {
 public:
  DeviceWords(DeviceRuntime& device, const std::vector<uint32_t>& words) : device_(device) {
    const Result<void*> memory = device.allocate(words.size() * 4);
    EXPECT_TRUE(memory.ok()) << memory.status().message();
    if (!memory.ok()) return;
    words_ = static_cast<uint32_t*>(*memory);
    EXPECT_TRUE(device.copy(words_, words.data(), words.size() * 4).ok());
  }
  ~DeviceWords() { EXPECT_TRUE(device_.free(words_).ok()); }
  DeviceWords(const DeviceWords&) = delete;
  DeviceWords& operator=(const DeviceWords&) = delete;
  uint32_t* get() const { return words_; }

 private:
  DeviceRuntime& device_;
  uint32_t* words_ = nullptr;
};

std::vector<uint32_t> compute(DeviceRuntime& device, const WrapperKernel& kernel, const std::vector<uint32_t>& in) {
  std::vector<uint32_t> out(kWrapperWords);
  const DeviceWords device_in(device, in);
  const DeviceWords device_out(device, out);
  Status status = device.with_queue({}, [&](Queue& queue) {
    return kernel.launch(queue, {device_in.get(), device_out.get()});
  });
  EXPECT_TRUE(status.ok()) << status.message();
  status = device.synchronize(Stream{});
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(device.copy(out.data(), device_out.get(), out.size() * 4).ok());
  return out;
}

/// Returns whether all numbers of a word agree. The sign of a NaN is nobody's business.
template <class Narrow>
bool all_agree(uint32_t got, uint32_t expected, float (*value)(Narrow)) {
  for (size_t i = 0; i < sizeof(uint32_t) / sizeof(Narrow); ++i) {
    const auto a = static_cast<Narrow>(got >> 8 * sizeof(Narrow) * i);
    const auto b = static_cast<Narrow>(expected >> 8 * sizeof(Narrow) * i);
    if (a != b && !(std::isnan(value(a)) && std::isnan(value(b)))) return false;
  }
  return true;
}

bool floats_agree(uint32_t got_bits, uint32_t expected_bits, Compare compare) {
  const auto got = std::bit_cast<float>(got_bits);
  const auto expected = std::bit_cast<float>(expected_bits);
  if (got_bits == expected_bits || (std::isnan(got) && std::isnan(expected))) return true;
  if (compare == Compare::kF32 || !std::isfinite(got) || !std::isfinite(expected)) return false;
  const double error = std::abs(double{got} - expected);
  if (compare == Compare::kF32Logarithm) return error <= 0x1p-20 * std::max(1.0, std::abs(double{expected}));
  // What rounds to the least normal number or below may be flushed.
  return error <= 0x1p-20 * std::abs(double{expected}) || std::max(std::abs(got), std::abs(expected)) <= 0x1p-126F;
}

bool agree(uint32_t got, uint32_t expected, Compare compare) {
  switch (compare) {
    case Compare::kBits: return got == expected;
    case Compare::kBf16: return all_agree<uint16_t>(got, expected, bf16_to_f32);
    case Compare::kF16: return all_agree<uint16_t>(got, expected, f16_to_f32);
    case Compare::kE4M3: return all_agree<uint8_t>(got, expected, e4m3_to_f32);
    default: return floats_agree(got, expected, compare);
  }
}

void compare(const std::vector<uint32_t>& got, const std::vector<uint32_t>& expected, const std::vector<uint32_t>& in,
             Compare how) {
  int32_t wrong = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (agree(got[i], expected[i], how) || ++wrong > 5) continue;
    ADD_FAILURE() << "word " << i << ": expected 0x" << std::hex << expected[i] << ", got 0x" << got[i] << ", in 0x"
                  << in[i] << " and 0x" << in[(i + 1) % in.size()];
  }
  EXPECT_EQ(wrong, 0);
}

/// Returns whether the code of an architecture, compiled for GPUs of `gpu`, has the instruction.
bool has_instruction(int32_t arch, int32_t gpu, std::string_view name) {
  if (name.starts_with("mma_mx") || name.starts_with("mma_nv")) return written_for(gpu) == 120;
  if (name.starts_with("wgmma")) return arch == 90;
  if (name == "registers") return arch == 90 || written_for(arch) == 100;
  if (name == "bulk_copies" || name == "copies_with_barriers" || name == "tensor_copies" || name == "clusters" ||
      name == "election" || name == "stmatrix")
    return arch >= 90;
  return name != "mma_e4m3" || arch >= 89;
}

/// Returns the table's kernel of the case, or null; it must be there if, and only if, the architecture has the
/// instruction.
const WrapperKernel* find(Kernels kernels, const WrapperCase& c, int32_t arch, int32_t gpu) {
  const std::string name = c.name;
  const auto kernel = std::find_if(kernels.begin(), kernels.end(),
                                   [&](const WrapperKernel& candidate) { return candidate.name == name; });
  EXPECT_EQ(kernel != kernels.end(), has_instruction(arch, gpu, name)) << name << " on sm" << arch;
  return kernel == kernels.end() ? nullptr : &*kernel;
}

class Wrappers : public testing::TestWithParam<WrapperCase> {};

TEST_P(Wrappers, MatchScalarCodeInTheEmulator) {
  const WrapperCase& c = GetParam();
  std::vector<uint32_t> in(kWrapperWords);
  std::vector<uint32_t> expected(kWrapperWords);
  c.fill(in);
  c.expect(in, expected);
  for (const int32_t arch : emulated_archs()) {
    MLA_TRACE("emulated sm" + std::to_string(arch));
    const WrapperKernel* const kernel = find(emulated_kernels(arch), c, arch, arch);
    if (kernel == nullptr) continue;
    const Result<DeviceRuntime*> device = emulated_device(arch);
    ASSERT_TRUE(device.ok()) << device.status().message();
    for (uint64_t seed = 0; seed < 3; ++seed) {
      emulator_seed() = seed;
      compare(compute(**device, *kernel, in), expected, in, c.compare);
    }
  }
}

std::string name_of(const testing::TestParamInfo<WrapperCase>& test) { return test.param.name; }
INSTANTIATE_TEST_SUITE_P(Ptx, Wrappers, testing::ValuesIn(wrapper_cases().begin(), wrapper_cases().end()), name_of);
INSTANTIATE_TEST_SUITE_P(BlockScales, Wrappers, testing::ValuesIn(scaled_mma_cases().begin(), scaled_mma_cases().end()),
                         name_of);

// The products of each form differ from one selector to the next, so that a wrong one of them shows.
TEST(ScaledMmaCases, EverySelectorIsSeen) {
  for (const WrapperCase& c : scaled_mma_cases()) {
    MLA_TRACE(c.name);
    std::vector<uint32_t> in(kWrapperWords);
    std::vector<uint32_t> out(kWrapperWords);
    c.fill(in);
    c.expect(in, out);
    std::set<std::vector<uint32_t>> products;
    size_t num = 0;
    for (auto at = out.begin(); at != out.end() && *std::max_element(at, at + 128) != 0; at += 128, ++num)
      products.emplace(at, at + 128);
    const std::string_view name = c.name;
    EXPECT_EQ(num, num_selectors(name.starts_with("mma_mxf8") ? 1 : name.starts_with("mma_mxf4") ? 2 : 4));
    if (!name.ends_with("extremes")) {
      EXPECT_EQ(products.size(), num);
    }
  }
}

TEST(WrappersOnAGpu, MatchScalarCodeAndTheEmulator) {
  if (num_cuda_devices() == 0) GTEST_SKIP() << "no GPU";
  const Result<DeviceRuntime*> device = cuda_device(0);
  ASSERT_TRUE(device.ok()) << device.status().message();
  const int32_t arch = (*device)->code().arch;
  const Result<DeviceRuntime*> emulated = emulated_device(arch);
  std::vector<WrapperCase> cases(wrapper_cases().begin(), wrapper_cases().end());
  cases.insert(cases.end(), scaled_mma_cases().begin(), scaled_mma_cases().end());
  for (const WrapperCase& c : cases) {
    MLA_TRACE(c.name);
    const WrapperKernel* const kernel = find(cuda_kernels(arch), c, arch, compiled_for(arch, profile()));
    if (kernel == nullptr) continue;
    std::vector<uint32_t> in(kWrapperWords);
    std::vector<uint32_t> expected(kWrapperWords);
    c.fill(in);
    c.expect(in, expected);
    const std::vector<uint32_t> out = compute(**device, *kernel, in);
    compare(out, expected, in, c.compare);
    if (emulated.ok())
      compare(out, compute(**emulated, *find(emulated_kernels(arch), c, arch, arch), in), in, c.compare);
  }
}

}  // namespace
}  // namespace mla::cuda
