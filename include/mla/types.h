// SPDX-License-Identifier: Apache-2.0
// This header defines element types, devices and the strided tensor view that every operation takes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>

namespace mla {

/// Names the element type of a tensor, or of a cache's rows. `kNone` marks a tensor that was not given; no tensor has
/// elements of kE2M1, which are half a byte.
enum class DType : uint8_t { kNone, kF32, kF16, kBF16, kE4M3, kU8, kI32, kI64, kE2M1 };

/// Names the kind of a device; the values are DLPack's (`DLDeviceType`).
enum class DeviceType : int32_t { kCpu = 1, kCuda = 2 };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int32_t index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

/// Holds the stream that orders the work of a GPU: a `cudaStream_t`, or a stream of mla/device.h; null is the default
/// stream. Operations on the CPU ignore it.
struct Stream {
  void* handle = nullptr;
};

/// Lists the attention operations and cache tools of the library.
enum class Op : uint8_t {
  kDecode,
  kPrefill,
  kMergeStates,
  kAppend,
  kGather,
  kDecodeSparse,
  kPrefillSparse,
  kAppendRope,
  kCopyPages,
  kBlockTableToCsr,
  kPhysicalSlots,
  kAppendIndexer,
  kIndexerLogits,
  kTopK,
  kIndexerTopK,
  kCompress,
  kFinishOutput
};

inline constexpr Op kAllOps[] = {
    Op::kDecode,        Op::kPrefill,    Op::kMergeStates, Op::kAppend,          Op::kGather,        Op::kDecodeSparse,
    Op::kPrefillSparse, Op::kAppendRope, Op::kCopyPages,   Op::kBlockTableToCsr, Op::kPhysicalSlots, Op::kAppendIndexer,
    Op::kIndexerLogits, Op::kTopK,       Op::kIndexerTopK, Op::kCompress,        Op::kFinishOutput};

/// Names the base of the logarithm in which `lse` is written. Partial states that are merged must have the same base.
enum class LseBase : uint8_t { kE, kTwo };

/// Names the arithmetic of attention and of the indexer: what AttentionOptions::compute and
/// IndexerLogitsParams::compute say. kDefault is kExact for attention, and kFP8 for the indexer.
enum class Compute : uint8_t { kDefault, kFP8, kExact };

inline constexpr Compute kAllComputes[] = {Compute::kDefault, Compute::kFP8, Compute::kExact};

/// Returns "f32", "f16", "bf16", "e4m3", "uint8", "int32" or "int64"; "none" for kNone.
std::string_view name(DType dtype);
/// Returns "decode", "prefill", "merge_states", "append", "gather", "decode_sparse", "prefill_sparse", "append_rope",
/// "copy_pages", "block_table_to_csr", "physical_slots", "append_indexer", "indexer_logits", "top_k",
/// "indexer_top_k", "compress" or "finish_output".
std::string_view name(Op op);
/// Returns "cpu" or "cuda".
std::string_view name(DeviceType type);
/// Returns "default", "fp8" or "exact".
std::string_view name(Compute compute);
/// Returns what has that name, if anything.
std::optional<Compute> parse_compute(std::string_view text);

/// Returns the bits of one element; 0 for kNone.
constexpr int32_t bits_of(DType dtype) {
  switch (dtype) {
    case DType::kNone: return 0;
    case DType::kE2M1: return 4;
    case DType::kE4M3:
    case DType::kU8: return 8;
    case DType::kF16:
    case DType::kBF16: return 16;
    case DType::kF32:
    case DType::kI32: return 32;
    case DType::kI64: return 64;
  }
  return 0;
}

/// Returns the bytes of one element of a tensor; 0 for kNone, and for kE2M1, of which a byte holds two.
constexpr size_t size_of(DType dtype) { return static_cast<size_t>(bits_of(dtype)) / 8; }

/// Returns the bytes of `n` contiguous elements; `n` must be even for kE2M1.
constexpr int64_t bytes_of(DType dtype, int64_t n) { return n * bits_of(dtype) / 8; }

inline constexpr int kMaxDims = 5;

/// Describes strided memory that the caller owns, in the manner of DLPack. The library never keeps a view past the
/// call. Strides are in elements, int64. `data` is not const for inputs either, but the library only reads them.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kNone;
  Device device = {};
  int32_t ndim = 0;
  std::array<int64_t, kMaxDims> shape = {};
  std::array<int64_t, kMaxDims> stride = {};

  /// Returns false for a default-constructed view, which stands for an optional tensor that is not given.
  constexpr bool given() const { return dtype != DType::kNone; }
  constexpr int64_t numel() const {
    uint64_t n = 1;
    for (int i = 0; i < ndim; ++i) n *= static_cast<uint64_t>(shape[static_cast<size_t>(i)]);
    return static_cast<int64_t>(n);
  }
};

/// Returns a row-major view of `data`. At most kMaxDims extents are taken. If the product of the extents does not fit
/// int64, the strides wrap around; the operations refuse such views.
inline TensorView contiguous(const void* data, DType dtype, std::initializer_list<int64_t> shape, Device device = {}) {
  TensorView view{.data = const_cast<void*>(data), .dtype = dtype, .device = device};
  for (int64_t extent : shape)
    if (view.ndim < kMaxDims) view.shape[static_cast<size_t>(view.ndim++)] = extent;
  uint64_t stride = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    view.stride[static_cast<size_t>(i)] = static_cast<int64_t>(stride);
    stride *= static_cast<uint64_t>(view.shape[static_cast<size_t>(i)]);
  }
  return view;
}

}  // namespace mla
