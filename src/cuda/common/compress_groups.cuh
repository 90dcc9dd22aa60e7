// SPDX-License-Identifier: Apache-2.0
// This says where the groups of compress lie in a batch, by lengths on the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/args.h"
#include "cuda/common/query_batch.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// Describes the new tokens of a request.
struct NewTokens {
  int32_t request;
  int64_t begin, end;  // tokens
  int64_t first;       // position of token `begin`

  static MLA_DEVICE NewTokens of(const core::CompressArgs& args, int32_t request) {
    const int64_t begin = args.queries.begin(request), len = args.queries.len(request);
    return {.request = request, .begin = begin, .end = begin + len, .first = args.first_position(request)};
  }

  MLA_DEVICE int64_t position(int64_t token) const { return first + token - begin; }
  MLA_DEVICE int64_t token(int64_t position) const { return begin + position - first; }
  /// Returns the position behind the last token.
  MLA_DEVICE int64_t end_position() const { return position(end); }
};

/// Finds the request that has a token. Returns whether there is one, as there is not in the padding of a captured
/// batch. All lanes of a warp call this.
MLA_DEVICE bool find_request(const core::CompressArgs& args, int64_t token, NewTokens& tokens) {
  // In a step of decode a request has one token. Then the first look finds it, in one access to memory.
  tokens = NewTokens::of(args, static_cast<int32_t>(std::min<int64_t>(token, args.batch_size - 1)));
  if (tokens.begin <= token && token < tokens.end) return true;
  const int32_t request =
      QueryBatch{.queries = args.queries, .kv_len = args.kv_len, .batch_size = args.batch_size}.request_of(token);
  if (request == args.batch_size) return false;
  tokens = NewTokens::of(args, request);
  return true;
}

/// Returns the position of the last token of the group that has `position`, which is not negative.
MLA_DEVICE int64_t last_of_group(const core::CompressArgs& args, int64_t position) {
  const auto ratio = static_cast<uint32_t>(args.ratio);
  return int64_t{static_cast<uint32_t>(position) / ratio} * ratio + ratio - 1;
}
/// Returns the position at which the request's first group with new tokens ends; it may be behind the last token.
MLA_DEVICE int64_t first_end(const core::CompressArgs& args, const NewTokens& tokens) {
  return last_of_group(args, std::max<int64_t>(tokens.first, 0));
}

/// Does what CompressArgs::state_of does, with divisions of 32 bits.
MLA_DEVICE float* state_of(const core::CompressArgs& args, int32_t request, int64_t position) {
  const auto at = static_cast<uint32_t>(position), size = static_cast<uint32_t>(args.block_size);
  const uint32_t column = at / size % static_cast<uint32_t>(args.num_columns);
  const int32_t block = args.state_table[request * args.state_table_stride_request + column];
  if (block < 0 || block >= args.num_blocks) return nullptr;
  return args.state + block * args.state_stride_block + int64_t{at % size} * args.state_stride_row;
}

/// Returns how many of the first groups of a request a kernel makes by request: those that may need its state.
constexpr int32_t groups_by_request(const core::CompressArgs& args) {
  return args.state == nullptr ? 0 : args.overlap ? 2 : 1;
}

/// Names a group by its request and the position of its last token; there is none if `last` is negative.
struct Group {
  NewTokens tokens = {};
  int64_t last = -1;
};

/// Of the `ratio` tokens from `token` on, at most one ends a group that is none of the first `left_out` of its request
/// (left_out is 0 only where each token is a group): the group has all of its tokens in the request of `token`. Returns
/// that group. All lanes of a warp call this.
MLA_DEVICE Group later_group(const core::CompressArgs& args, int64_t token, int32_t left_out) {
  NewTokens tokens;
  if (!find_request(args, token, tokens)) return {};
  const int64_t position = tokens.position(token);
  if (position < 0) return {};  // the first group of positions that exist ends behind these tokens
  const int64_t last = last_of_group(args, position);
  const bool later = last >= first_end(args, tokens) + int64_t{left_out} * args.ratio;
  return {.tokens = tokens, .last = later && tokens.token(last) < tokens.end ? last : -1};
}

}  // namespace mla::MLA_CUDA_NAMESPACE
