// SPDX-License-Identifier: Apache-2.0
// Provides memory with guard zones, and the random values that fill it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "mla/types.h"

namespace mla::kit {

/// Owns `size` bytes, 64-byte aligned, between two guard zones. The bytes start uninitialized; the zones hold a
/// pattern, so that a write into them shows.
class Buffer {
 public:
  Buffer() = default;
  /// `misalign` moves the first byte that many bytes past the alignment (less than 64).
  explicit Buffer(size_t size, size_t misalign = 0);

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  std::span<std::byte> bytes() const { return {data_, size_}; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  void fill(uint8_t value) const;
  /// Returns false if anything was written just before or just behind the bytes.
  bool guards_intact() const;
  /// Returns the bytes with both guard zones.
  std::span<std::byte> with_guards() const;

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

/// Returns a buffer that holds a copy of `values`.
Buffer to_buffer(std::span<const int32_t> values);
Buffer to_buffer(std::span<const int64_t> values);
Buffer to_buffer(std::span<const float> values);

/// Generates repeatable random numbers (splitmix64): they are the same on every machine and standard library.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next();
  /// Returns a number in [low, high], both ends included.
  int64_t integer(int64_t low, int64_t high);
  double uniform();
  bool chance(double probability) { return uniform() < probability; }
  template <class T>
  const T& pick(std::span<const T> values) {
    return values[static_cast<size_t>(integer(0, static_cast<int64_t>(values.size()) - 1))];
  }

 private:
  uint64_t state_;
};

/// Returns a hash of up to four numbers, to seed things that must not depend on the order in which they are made.
uint64_t mix(uint64_t a, uint64_t b = 0, uint64_t c = 0, uint64_t d = 0);

/// Writes n values of about N(0, std^2), of any float type, to element `offset` of `data`. The values are a function of
/// `key` alone; they come from a table of a million, so filling runs at the speed of a copy where std is 1.
void fill_normal(void* data, DType dtype, int64_t offset, int64_t n, uint64_t key, float std = 1.0F);

/// Every float type reads a run of these bytes as NaN.
inline constexpr uint8_t kNanByte = 0xFF;

/// Rounds `value` to element `index` of `data`, of a float type.
void store_element(void* data, DType dtype, int64_t index, float value);

/// Returns element `index` of `data`, exactly.
double load_element(const void* data, DType dtype, int64_t index);

/// Returns the elements of `view` as dense doubles, row-major.
std::vector<double> to_dense(const TensorView& view);

/// Returns whether every byte of `buffer` that no element of `view` covers still is `value`.
bool gaps_hold(const Buffer& buffer, const TensorView& view, uint8_t value);

}  // namespace mla::kit
