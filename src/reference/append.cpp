// SPDX-License-Identifier: Apache-2.0
// append and append_rope write rows into the cache, as they are or with their rotary parts rotated.
#include "reference/cache_rows.h"
#include "reference/normalized.h"
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

/// Holds the two parts of a query or of a key.
struct Row {
  Normalized plain, pe;

  Row(const Channels& plain_channels, const Channels& pe_channels) : plain{plain_channels}, pe{pe_channels} {}

  /// Normalizes the first n channels, which are num_plain plain ones, or these and all rotary ones.
  void normalize(const Channels& weight, int32_t num_plain, int32_t n, float epsilon) {
    const auto channel = [&](int32_t c) { return c < num_plain ? plain.x(c) : pe.x(c - num_plain); };
    plain.normalizes = true;
    plain.factor = norm_factor(channel, n, epsilon);
    plain.weight = weight;
    if (n == num_plain) return;
    pe.normalizes = true;
    pe.factor = plain.factor;
    pe.weight = weight;
    pe.weight.first += num_plain;
  }
};

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
    const auto rotated = [&](const Normalized& pe) {
      return Rotated<Normalized>{
          .pe = pe, .dim = rotary, .cos_sin = args.angles(token), .interleaved = args.interleaved};
    };
    for (int64_t head = 0; head < args.num_heads; ++head) {
      const int64_t out = token * args.q_out_stride_token + head * args.q_out_stride_head;
      const int64_t nope = token * args.q_nope_stride_token + head * args.q_nope_stride_head;
      const int64_t pe = token * args.q_pe_stride_token + head * args.q_pe_stride_head;
      Row row = {{args.q_nope, args.q_dtype, nope}, {args.q_pe, args.q_dtype, pe}};
      if (args.q_norm)
        row.normalize({args.q_norm_weight, args.q_norm_weight_dtype}, plain, plain + rotary, args.norm_eps);
      write_query(args, row.plain, plain, out);
      write_query(args, rotated(row.pe), rotary, out + plain);
    }
    if (args.slot_mapping[token] < 0) continue;
    Row row = {{args.ckv, args.dtype, token * args.ckv_stride_token},
               {args.kpe, args.dtype, token * args.kpe_stride_token}};
    if (args.norm_weight != nullptr)
      row.normalize({args.norm_weight, args.norm_weight_dtype}, plain, args.norm_channels, args.norm_eps);
    write_rotated_row(CacheRow::at_slot(args.cache, args.slot_mapping[token]), row.plain, rotated(row.pe));
  }
}

}  // namespace mla::reference
