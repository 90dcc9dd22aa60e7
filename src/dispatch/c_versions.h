// SPDX-License-Identifier: Apache-2.0
// Reads and fills structs of the C ABI, whose callers may have an older or a newer version of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string_view>

#include "core/format.h"
#include "mla/c_api.h"
#include "mla/status.h"

namespace mla::dispatch {

inline Status null_pointer(std::string_view where, std::string_view field) {
  return {StatusCode::kInvalidArgument, core::format("{}: {}: expected a pointer, got null", where, field)};
}

/// Says how many bytes a struct had in its first version.
template <class T>
inline constexpr size_t kFirstVersion = offsetof(T, stream);
template <>
inline constexpr size_t kFirstVersion<mla_decode_params> = offsetof(mla_decode_params, q_scale);
template <>
inline constexpr size_t kFirstVersion<mla_prefill_params> = offsetof(mla_prefill_params, options);
template <>
inline constexpr size_t kFirstVersion<mla_decode_sparse_params> = offsetof(mla_decode_sparse_params, topk_length_per);
template <>
inline constexpr size_t kFirstVersion<mla_append_params> = offsetof(mla_append_params, scales);
template <>
inline constexpr size_t kFirstVersion<mla_gather_params> = offsetof(mla_gather_params, scales);
template <>
inline constexpr size_t kFirstVersion<mla_context_options> = offsetof(mla_context_options, device);
template <>
inline constexpr size_t kFirstVersion<mla_problem> = offsetof(mla_problem, gpu_arch);
template <>
inline constexpr size_t kFirstVersion<mla_verdict> = offsetof(mla_verdict, p_run);

/// Checks that a caller's struct can be of some version, by its struct_size.
template <class T>
Status check_size(std::string_view where, const T& given) {
  constexpr size_t kLargest = 4096;
  if (given.struct_size >= kFirstVersion<T> && given.struct_size <= kLargest) return {};
  return {StatusCode::kInvalidArgument, core::format("{}: struct_size: expected {} to {} bytes, got {}", where,
                                                     kFirstVersion<T>, kLargest, given.struct_size)};
}

/// Copies a caller's struct, which has the size of the caller's version, into this version's. Fields that the caller's
/// version lacks become zero; fields that this version does not know must be zero.
template <class T>
Status read_struct(std::string_view where, const T* given, T& params) {
  if (given == nullptr) return null_pointer(where, "params");
  if (Status status = check_size(where, *given); !status.ok()) return status;
  const size_t size = given->struct_size;
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  if (size > sizeof(T) && std::any_of(bytes + sizeof(T), bytes + size, [](unsigned char byte) { return byte != 0; }))
    return {
        StatusCode::kInvalidArgument,
        core::format("{}: struct_size: expected only zeros after the {} bytes this version knows", where, sizeof(T))};
  std::memset(&params, 0, sizeof(T));
  std::memcpy(&params, given, std::min(size, sizeof(T)));
  return {};
}

/// Fills a caller's struct, which has the size of the caller's version. Fields that this version does not know become
/// zero.
template <class T>
Status write_struct(std::string_view where, T result, T* out) {
  if (out == nullptr) return null_pointer(where, "out");
  if (Status status = check_size(where, *out); !status.ok()) return status;
  result.struct_size = out->struct_size;
  std::memset(out, 0, result.struct_size);
  std::memcpy(out, &result, std::min(result.struct_size, sizeof(T)));
  return {};
}

}  // namespace mla::dispatch
