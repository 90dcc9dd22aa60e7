// SPDX-License-Identifier: Apache-2.0
// append and append_rope write rows into the cache, as they are or with their rotary parts rotated.
#include "reference/cache_rows.h"
#include "reference/reference.h"

namespace mla::reference {
namespace {

/// Gives the channels of a rotary part, rotated by the angles of its token's position, in f32.
struct Rotated {
  Channels pe;
  int32_t dim;
  const float* cos_sin;  // dim / 2 cosines, then as many sines
  bool interleaved;

  /// Returns the product rounded to f32. It is computed in double, where it is exact, so that no compiler fuses it into
  /// the sum.
  static float product(float a, float b) { return static_cast<float>(static_cast<double>(a) * static_cast<double>(b)); }

  float operator()(int32_t c) const {
    const int32_t half = dim / 2;
    const int32_t angle = interleaved ? c / 2 : c % half;
    const float x = pe(interleaved ? 2 * angle : angle), y = pe(interleaved ? 2 * angle + 1 : angle + half);
    const float cos = cos_sin[angle], sin = cos_sin[half + angle];
    const bool is_x = interleaved ? c % 2 == 0 : c < half;
    return is_x ? product(x, cos) - product(y, sin) : product(x, sin) + product(y, cos);
  }
};

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
    const Channels ckv = {args.ckv, args.dtype, token * args.ckv_stride_token};
    const Rotated kpe = rotated(args.kpe, args.dtype, token * args.kpe_stride_token);
    // Rotary channels whose scale is chosen are rounded to bf16 before, as the formats' own writers do.
    const auto rounded = [&](int32_t c) { return bf16_to_f32(f32_to_bf16(kpe(c))); };
    if (args.cache.rotary_in_ckv > 0) {
      write_ckv(row, [&](int32_t c) { return c < plain ? ckv(c) : rounded(c - plain); });
      continue;
    }
    write_ckv(row, ckv);
    if (args.cache.writes_kpe_scale())
      write_kpe(row, rounded);
    else
      write_kpe(row, kpe);
  }
}

}  // namespace mla::reference
