// SPDX-License-Identifier: Apache-2.0
#include "kit/buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

#include "mla/numeric.h"

namespace mla::kit {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kGuardBytes = 256;
constexpr uint8_t kGuardByte = 0xC3;

constexpr size_t kTableSize = size_t{1} << 20;
constexpr int64_t kChunk = 65536;  // longest run taken from the table at once

/// Returns a table of a million values of about N(0, 1), with room behind them for a chunk that starts at the last.
const std::vector<float>& normal_table() {
  static const std::vector<float> table = [] {
    std::vector<float> values(kTableSize + static_cast<size_t>(kChunk));
    Random random(0x5EED);
    for (float& value : values) {
      // The sum of eight uniform 16-bit numbers: bell-shaped, tails to 4.9 standard deviations.
      int64_t sum = 0;
      for (int draw = 0; draw < 2; ++draw) {
        const uint64_t bits = random.next();
        for (int part = 0; part < 4; ++part) sum += static_cast<int64_t>((bits >> (16 * part)) & 0xFFFF);
      }
      value = (static_cast<float>(sum) / 65535.0F - 4.0F) * 1.2247449F;  // variance of the sum: 8 / 12
    }
    return values;
  }();
  return table;
}

template <uint16_t (*convert)(float)>
const std::vector<uint16_t>& narrow_table() {
  static const std::vector<uint16_t> table = [] {
    std::vector<uint16_t> values;
    values.reserve(normal_table().size());
    for (float value : normal_table()) values.push_back(convert(value));
    return values;
  }();
  return table;
}

void copy_normal(void* data, DType dtype, int64_t offset, int64_t n, size_t from, float std) {
  const float* table = normal_table().data() + from;
  const auto bytes = static_cast<size_t>(n) * size_of(dtype);
  if (dtype == DType::kF32) {
    float* out = static_cast<float*>(data) + offset;
    for (int64_t i = 0; i < n; ++i) out[i] = table[i] * std;
    return;
  }
  if (dtype == DType::kE4M3) {
    uint8_t* out = static_cast<uint8_t*>(data) + offset;
    for (int64_t i = 0; i < n; ++i) out[i] = f32_to_e4m3(table[i] * std);
    return;
  }
  uint16_t* out = static_cast<uint16_t*>(data) + offset;
  if (std == 1.0F) {
    const auto& narrow = dtype == DType::kBF16 ? narrow_table<f32_to_bf16>() : narrow_table<f32_to_f16>();
    std::memcpy(out, narrow.data() + from, bytes);
  } else if (dtype == DType::kBF16) {
    for (int64_t i = 0; i < n; ++i) out[i] = f32_to_bf16(table[i] * std);
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = f32_to_f16(table[i] * std);
  }
}

template <class T>
Buffer copy_of(std::span<const T> values) {
  Buffer buffer(values.size_bytes());
  if (!values.empty()) std::memcpy(buffer.data(), values.data(), values.size_bytes());
  return buffer;
}

/// Asks for transparent huge pages for the inside of a large range, so that timings of random rows are not those of the
/// TLB. A refusal only costs speed.
void advise_huge_pages([[maybe_unused]] std::byte* memory, [[maybe_unused]] size_t size) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  const auto begin = (reinterpret_cast<uintptr_t>(memory) + kHugePage - 1) / kHugePage * kHugePage;
  const auto end = (reinterpret_cast<uintptr_t>(memory) + size) / kHugePage * kHugePage;
  if (begin < end) static_cast<void>(madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE));
#endif
}

}  // namespace

void Buffer::Free::operator()(std::byte* memory) const { ::operator delete (memory, std::align_val_t{kAlignment}); }

Buffer::Buffer(size_t size, size_t misalign)
    : memory_(
          static_cast<std::byte*>(::operator new (2 * kGuardBytes + size + kAlignment, std::align_val_t{kAlignment}))),
      data_(memory_.get() + kGuardBytes + misalign),
      size_(size) {
  advise_huge_pages(data_, size_);
  std::memset(memory_.get(), kGuardByte, static_cast<size_t>(data_ - memory_.get()));
  std::memset(data_ + size_, kGuardByte, kGuardBytes);
}

void Buffer::fill(uint8_t value) const {
  if (size_ != 0) std::memset(data_, value, size_);
}

bool Buffer::guards_intact() const {
  const auto intact = [](std::byte byte) { return byte == std::byte{kGuardByte}; };
  return data_ == nullptr ||
         (std::all_of(memory_.get(), data_, intact) && std::all_of(data_ + size_, data_ + size_ + kGuardBytes, intact));
}

std::span<std::byte> Buffer::with_guards() const {
  if (data_ == nullptr) return {};
  return {memory_.get(), static_cast<size_t>(data_ - memory_.get()) + size_ + kGuardBytes};
}

Buffer to_buffer(std::span<const int32_t> values) { return copy_of(values); }
Buffer to_buffer(std::span<const int64_t> values) { return copy_of(values); }
Buffer to_buffer(std::span<const float> values) { return copy_of(values); }

uint64_t Random::next() {
  state_ += 0x9E3779B97F4A7C15U;
  uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
  return z ^ (z >> 31);
}

int64_t Random::integer(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(next() % static_cast<uint64_t>(high - low + 1));
}

double Random::uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

uint64_t mix(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  uint64_t hash = 0;
  for (uint64_t part : {a, b, c, d}) hash = Random(hash ^ part).next();
  return hash;
}

void fill_normal(void* data, DType dtype, int64_t offset, int64_t n, uint64_t key, float std) {
  for (int64_t done = 0; done < n; done += kChunk) {
    const size_t from = mix(key, static_cast<uint64_t>(done)) % kTableSize;
    copy_normal(data, dtype, offset + done, std::min(kChunk, n - done), from, std);
  }
}

void store_element(void* data, DType dtype, int64_t index, float value) {
  switch (dtype) {
    case DType::kF32: static_cast<float*>(data)[index] = value; break;
    case DType::kBF16: static_cast<uint16_t*>(data)[index] = f32_to_bf16(value); break;
    case DType::kF16: static_cast<uint16_t*>(data)[index] = f32_to_f16(value); break;
    case DType::kE4M3: static_cast<uint8_t*>(data)[index] = f32_to_e4m3(value); break;
    default: break;
  }
}

double load_element(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kF32: return static_cast<double>(static_cast<const float*>(data)[index]);
    case DType::kBF16: return static_cast<double>(bf16_to_f32(static_cast<const uint16_t*>(data)[index]));
    case DType::kF16: return static_cast<double>(f16_to_f32(static_cast<const uint16_t*>(data)[index]));
    case DType::kE4M3: return static_cast<double>(e4m3_to_f32(static_cast<const uint8_t*>(data)[index]));
    case DType::kU8: return static_cast<double>(static_cast<const uint8_t*>(data)[index]);
    case DType::kI32: return static_cast<double>(static_cast<const int32_t*>(data)[index]);
    case DType::kI64: return static_cast<double>(static_cast<const int64_t*>(data)[index]);
    case DType::kE2M1:  // no element of a tensor: two share a byte
    case DType::kNone: break;
  }
  return std::nan("");
}

namespace {

/// Calls f(offset) for every run of elements along the innermost dimension; `offset` is the place of its first element,
/// in elements.
template <class F>
void for_each_row(const TensorView& view, const F& f) {
  const int outer = view.ndim - 1;
  if (view.numel() == 0) return;
  std::array<int64_t, kMaxDims> index = {};
  while (true) {
    int64_t offset = 0;
    for (int i = 0; i < outer; ++i) offset += index[static_cast<size_t>(i)] * view.stride[static_cast<size_t>(i)];
    f(offset);
    int dim = outer - 1;
    for (; dim >= 0; --dim) {
      if (++index[static_cast<size_t>(dim)] < view.shape[static_cast<size_t>(dim)]) break;
      index[static_cast<size_t>(dim)] = 0;
    }
    if (dim < 0) return;
  }
}

}  // namespace

std::vector<double> to_dense(const TensorView& view) {
  std::vector<double> dense(static_cast<size_t>(view.numel()));
  double* out = dense.data();
  const auto inner = static_cast<size_t>(view.ndim - 1);
  const DType dtype = view.dtype;
  const int64_t width = view.shape[inner], stride = view.stride[inner];
  for_each_row(view, [&](int64_t offset) {
    for (int64_t i = 0; i < width; ++i) out[i] = load_element(view.data, dtype, offset + i * stride);
    out += width;
  });
  return dense;
}

bool gaps_hold(const Buffer& buffer, const TensorView& view, uint8_t value) {
  const size_t element = size_of(view.dtype);
  const auto origin = static_cast<std::byte*>(view.data) - buffer.data();
  const auto inner = static_cast<size_t>(view.ndim - 1);
  const bool is_dense = view.stride[inner] == 1;  // a row then is one run of bytes
  const int64_t runs = is_dense ? 1 : view.shape[inner], stride = view.stride[inner];
  const size_t run_bytes = element * static_cast<size_t>(is_dense ? view.shape[inner] : 1);
  std::vector<std::byte> expected(buffer.size(), std::byte{value});
  for_each_row(view, [&](int64_t offset) {
    for (int64_t i = 0; i < runs; ++i) {
      const auto at = static_cast<size_t>(origin + (offset + i * stride) * static_cast<int64_t>(element));
      std::memcpy(expected.data() + at, buffer.data() + at, run_bytes);
    }
  });
  return buffer.size() == 0 || std::memcmp(expected.data(), buffer.data(), buffer.size()) == 0;
}

}  // namespace mla::kit
