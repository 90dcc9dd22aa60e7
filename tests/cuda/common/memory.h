// SPDX-License-Identifier: Apache-2.0
// Makes random problems of the writers and their kin in memory of their own, and runs the kernels of one emulated
// architecture over them against the reference, byte for byte.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "core/args.h"
#include "cuda/common/operations.h"
#include "emulator/test_queue.h"
#include "mla/numeric.h"

namespace mla::writers_test {

using namespace mla::MLA_CUDA_NAMESPACE;  // NOLINT(google-build-using-namespace): the machine under test

using emulated_test::TestQueue;

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int32_t integer(int32_t low, int32_t high) { return std::uniform_int_distribution<int32_t>(low, high)(engine_); }
  uint32_t bits() { return static_cast<uint32_t>(engine_()); }
  bool chance(int32_t one_in) { return integer(1, one_in) == 1; }
  template <class T>
  T of(std::initializer_list<T> choices) {
    return choices.begin()[integer(0, static_cast<int32_t>(choices.size()) - 1)];
  }
  /// Returns a number that is mostly ordinary; else anything that a float may be.
  float value() {
    if (!chance(24)) return std::normal_distribution<float>(0.0F, 1.0F)(engine_);
    switch (integer(0, 4)) {
      case 0: return std::bit_cast<float>(bits());
      case 1: return std::bit_cast<float>(0x7F800000U | (bits() & 0x80000000U));
      case 2: return std::bit_cast<float>(0x7F800000U | bits());  // mostly NaN
      case 3: return std::bit_cast<float>(bits() & 0x807FFFFFU);
      default: return chance(2) ? 0.0F : -0.0F;
    }
  }

 private:
  std::mt19937_64 engine_;
};

/// Holds the buffers of a problem, inputs and outputs alike.
class Memory {
 public:
  explicit Memory(Random& random) : random_(random) {}

  /// Makes random bytes, which begin `skew` bytes past a multiple of 64.
  std::byte* bytes(int64_t size, int64_t skew) {
    auto& buffer = buffers_.emplace_back(std::make_unique<Buffer>(static_cast<size_t>(size + skew) / 64 + 1));
    std::byte* base = buffer->data()->at + skew;
    for (Line& line : *buffer)
      for (std::byte& byte : line.at) byte = static_cast<std::byte>(random_.bits());
    return base;
  }
  template <class T>
  T* list(const std::vector<T>& values) {
    const auto size = static_cast<int64_t>(sizeof(T));
    std::byte* at = bytes(static_cast<int64_t>(values.size()) * size, random_.chance(2) ? size : 0);
    if (!values.empty()) std::memcpy(at, values.data(), values.size() * sizeof(T));
    return reinterpret_cast<T*>(at);
  }
  /// Makes `n` elements that may be anything a caller may hold.
  std::byte* elements(DType dtype, int64_t n, int64_t skew) {
    const auto size = static_cast<int64_t>(size_of(dtype));
    std::byte* base = bytes(n * size, skew * size);
    if (dtype == DType::kE4M3) return base;
    for (int64_t i = 0; i < n; ++i) {
      const float value = random_.value();
      if (dtype == DType::kF32)
        std::memcpy(base + 4 * i, &value, 4);
      else
        reinterpret_cast<uint16_t*>(base)[i] = dtype == DType::kF16 ? f32_to_f16(value) : f32_to_bf16(value);
    }
    return base;
  }

  std::vector<std::byte> copy() const {
    std::vector<std::byte> all;
    for (const auto& buffer : buffers_) all.insert(all.end(), begin(*buffer), begin(*buffer) + 64 * buffer->size());
    return all;
  }
  void assign(const std::vector<std::byte>& all) {
    size_t at = 0;
    for (auto& buffer : buffers_) {
      std::memcpy(buffer->data(), all.data() + at, 64 * buffer->size());
      at += 64 * buffer->size();
    }
  }

 private:
  struct alignas(64) Line {
    std::byte at[64];
  };
  using Buffer = std::vector<Line>;
  static const std::byte* begin(const Buffer& buffer) { return buffer.data()->at; }

  Random& random_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
};

/// Makes a cache of random bytes, with strides and addresses as odd as validation lets through.
inline core::Cache random_cache(Random& random, Memory& memory, CacheFormat format, int32_t d_ckv, int32_t d_kpe,
                                int64_t num_pages, int32_t page_size) {
  core::Cache cache = {
      .format = format, .num_pages = num_pages, .page_size = page_size, .d_ckv = d_ckv, .d_kpe = d_kpe};
  const KvLayout layout = kv_layout(format);
  const bool odd = random.chance(3);
  cache.power_of_two_scales = random.chance(2);
  if (layout.is_packed()) {
    cache.d_ckv = layout.nope_dim;
    cache.d_kpe = layout.rope_dim;
    const bool footer = layout.has_footer();
    const int64_t row = layout.row_bytes + (odd && !footer ? 2 * random.integer(1, 9) : 0);
    const int64_t page = page_size * row + (footer ? page_size * layout.scale_bytes_per_token : 0) +
                         (odd ? 2 * random.integer(0, 9) : 0);
    core::set_codecs(layout, cache);
    core::set_planes(layout, memory.bytes(num_pages * page, odd ? 2 * random.integer(0, 8) : 0), page, row, cache);
    cache.power_of_two_scales |= cache.scale_type != ScaleType::kF32;
    if (layout.nope.outer_scale && random.chance(2))
      cache.outer_scale = memory.list<float>({random.of({0.0037F, 0.5F})});
    for (int64_t token = 0; token < num_pages * page_size && cache.writes_kpe_scale(); ++token) {
      const float scale = std::ldexp(1.0F + static_cast<float>(random.integer(0, 7)) / 8.0F, random.integer(-20, 8));
      std::memcpy(cache.kpe_scales().row(token / page_size, token % page_size), &scale, 4);
    }
    for (int64_t token = 0; token < num_pages * page_size; ++token)
      for (int64_t g = 0; g < cache.num_scales; ++g) {
        std::byte* scales = cache.scales.row(token / page_size, token % page_size);
        if (cache.scale_type == ScaleType::kUE8M0) {
          if (scales[g] == std::byte{0xFF}) scales[g] = {};  // of two NaN, compilers may pass on either
          continue;
        }
        if (cache.scale_type == ScaleType::kE4M3) {
          if ((scales[g] & std::byte{0x7F}) == std::byte{0x7F}) scales[g] = {};
          continue;
        }
        const float scale = std::ldexp(1.0F + static_cast<float>(random.integer(0, 7)) / 8.0F, random.integer(-20, 8));
        std::memcpy(scales + 4 * g, &scale, 4);
      }
    return cache;
  }
  core::set_codecs(layout, cache);
  const auto element = static_cast<int64_t>(size_of(cache.ckv_dtype));
  const auto plane = [&](int64_t width) {
    const int64_t row = (width + (odd ? random.integer(0, 5) : 0)) * element;
    const int64_t page = row * page_size + (odd ? random.integer(0, 5) : 0) * element;
    return core::Plane{memory.bytes(num_pages * page, odd ? random.integer(0, 9) * element : 0), page, row};
  };
  if (random.chance(2)) {
    cache.ckv = plane(d_ckv + d_kpe);
    cache.kpe = {cache.ckv.base + d_ckv * element, cache.ckv.stride_page, cache.ckv.stride_token};
  } else {
    cache.ckv = plane(d_ckv);
    cache.kpe = plane(d_kpe);
  }
  if (d_kpe == 0) cache.kpe = {};
  if (!cache.is_quantized()) return cache;
  const auto scale = [&] {
    return std::ldexp(1.0F + static_cast<float>(random.integer(0, 7)) / 8.0F, random.integer(-12, 4));
  };
  if (d_ckv % kTensorScalesPerToken == 0 && random.chance(2)) core::set_token_scales(cache);
  const int64_t tokens = cache.writes_scales ? num_pages * page_size : 1;
  std::vector<float> scales;
  for (int64_t i = 0; i < tokens * cache.num_scales; ++i) scales.push_back(scale());
  cache.scales = {reinterpret_cast<std::byte*>(memory.list(scales)), cache.writes_scales ? page_size * int64_t{16} : 0,
                  cache.writes_scales ? 16 : 0};
  if (d_kpe > 0) cache.kpe_scale = memory.list<float>({scale()});
  return cache;
}

inline core::Cache random_cache(Random& random, Memory& memory, int32_t d_ckv, int32_t d_kpe, int64_t num_pages,
                                int32_t page_size) {
  const CacheFormat format = kAllCacheFormats[random.integer(0, static_cast<int>(std::size(kAllCacheFormats)) - 1)];
  return random_cache(random, memory, format, d_ckv, d_kpe, num_pages, page_size);
}

/// Returns one of the widths that take every path: rows of whole vectors, and not.
inline int32_t random_d_ckv(Random& random) { return random.of({512, 512, 64, 128, 8, 12, 100, 264, 576, 30}); }
inline int32_t random_d_kpe(Random& random) { return random.of({64, 64, 0, 16, 6, 10}); }

/// Runs both over the same bytes; what they leave must be the same everywhere.
template <class Reference, class Kernel>
void expect_same_bytes(Memory& memory, const Reference& reference, const Kernel& kernel) {
  const std::vector<std::byte> before = memory.copy();
  reference();
  const std::vector<std::byte> expected = memory.copy();
  memory.assign(before);
  const Status status = kernel();
  ASSERT_TRUE(status.ok()) << status.message();
  const std::vector<std::byte> actual = memory.copy();
  for (size_t i = 0; i < expected.size(); ++i)
    ASSERT_EQ(static_cast<int>(actual[i]), static_cast<int>(expected[i]))
        << "byte " << i << ", before " << static_cast<int>(before[i]);
}

}  // namespace mla::writers_test
