// SPDX-License-Identifier: Apache-2.0
// append and append_rope write rows into the cache, as they are or with their rotary parts rotated.
#include "reference/cache_rows.h"
#include "reference/reference.h"
#include "reference/rotated.h"

namespace mla::reference {
namespace {

/// Writes `n` channels of a query, from element `offset` of q_out on.
template <class Source>
void write_query(const core::AppendRopeArgs& args, const Source& source, int32_t n, int64_t offset) {
  if (args.q_out_dtype != DType::kE4M3) return write_channels(source, n, args.q_out_dtype, offset, args.q_out);
  write_channels([&](int32_t c) { return source(c) / *args.q_scale; }, n, args.q_out_dtype, offset, args.q_out);
}

}  // namespace

void append(const core::AppendArgs& args) {
  for (int64_t token = 0; token < args.num_tokens; ++token) {
    if (args.slot_mapping[token] < 0) continue;
    const CacheRow row = CacheRow::at_slot(args.cache, args.slot_mapping[token]);
    write_ckv(row, Channels{args.ckv, args.dtype, token * args.ckv_stride_token});
    write_kpe(row, Channels{args.kpe, args.dtype, token * args.kpe_stride_token});
  }
}

void append_rope(const core::AppendRopeArgs& args) {
  const int32_t plain = args.cache.d_plain(), rotary = args.cache.d_rotary();
  for (int64_t token = 0; token < args.num_tokens; ++token) {
    const auto rotated = [&](const void* pe, DType dtype, int64_t first) {
      return Rotated{.pe = {pe, dtype, first},
                     .dim = rotary,
                     .cos_sin = args.cos_sin + args.positions[token] * args.cos_sin_stride_position,
                     .interleaved = args.interleaved};
    };
    for (int64_t head = 0; head < args.num_heads; ++head) {
      const int64_t out = token * args.q_out_stride_token + head * args.q_out_stride_head;
      const int64_t nope = token * args.q_nope_stride_token + head * args.q_nope_stride_head;
      const int64_t pe = token * args.q_pe_stride_token + head * args.q_pe_stride_head;
      write_query(args, Channels{args.q_nope, args.q_dtype, nope}, plain, out);
      write_query(args, rotated(args.q_pe, args.q_dtype, pe), rotary, out + plain);
    }
    if (args.slot_mapping[token] < 0) continue;
    const CacheRow row = CacheRow::at_slot(args.cache, args.slot_mapping[token]);
    write_rotated_row(row, {args.ckv, args.dtype, token * args.ckv_stride_token},
                      rotated(args.kpe, args.dtype, token * args.kpe_stride_token));
  }
}

}  // namespace mla::reference
