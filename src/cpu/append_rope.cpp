// SPDX-License-Identifier: Apache-2.0
// append_rope rotates and converts queries, and rotates, quantizes and appends keys.
#include <algorithm>

#include "cpu/cache_rows.h"
#include "cpu/operations.h"
#include "cpu/share.h"
#include "mla/numeric.h"

namespace mla::cpu {
namespace {

constexpr int32_t kAngles = 128;  // angles that are rotated at a time

/// Channels that get scales of their own are all made before they are quantized: the latent ones of a row that end with
/// the rotary ones, or the rotary ones alone.
constexpr int32_t kMostJoined = [] {
  int32_t most = 0;
  for (CacheFormat format : kAllCacheFormats) {
    const KvLayout layout = kv_layout(format);
    if (layout.rotary_in_nope > 0) most = std::max(most, layout.nope_dim);
    if (layout.rope_scale_offset > 0) most = std::max(most, layout.rope_dim);
  }
  return most;
}();

/// Holds a token's angles first ... first + n - 1, as factors of each channel and of its partner, for the channels of n
/// pairs.
struct Angles {
  int32_t first, n;
  alignas(64) float own[2 * kAngles];
  alignas(64) float partner[2 * kAngles];

  Angles(const core::AppendRopeArgs& args, int64_t token, int32_t first_angle, int32_t count)
      : first(first_angle), n(count) {
    const float* cos = args.cos_sin + args.positions[token] * args.cos_sin_stride_position + first;
    const float* sin = cos + args.cache.d_rotary() / 2;
    const int32_t pair_stride = args.interleaved ? 2 : 1;
    const int32_t partner_stride = args.interleaved ? 1 : n;
    for (int32_t i = 0; i < n; ++i) {
      own[i * pair_stride] = own[i * pair_stride + partner_stride] = cos[i];
      partner[i * pair_stride] = -sin[i];
      partner[i * pair_stride + partner_stride] = sin[i];
    }
  }
};

class Rotator {
 public:
  Rotator(const KernelSet& set, const core::AppendRopeArgs& args, int64_t bytes)
      : set_(set),
        args_(args),
        joins_(args.cache.rotary_in_ckv > 0),
        collects_(joins_ || args.cache.writes_kpe_scale()),
        writer_(set, args.cache, joins_ ? DType::kF32 : args.dtype, DType::kF32, bytes) {}

  void share_of_tokens(int64_t begin, int64_t end) const {
    const int32_t num_plain = args_.cache.d_plain(), num_angles = args_.cache.d_rotary() / 2;
    alignas(64) float joined[kMostJoined];
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = args_.slot_mapping[token];
      const int64_t page = slot / args_.cache.page_size, offset = slot % args_.cache.page_size;
      const void* const plain = at(args_.ckv, token * args_.ckv_stride_token, args_.dtype);
      if (slot >= 0 && !joins_)
        writer_.write_ckv(plain, page, offset);
      else if (slot >= 0)
        set_.floats->convert(plain, args_.dtype, joined, DType::kF32, num_plain);
      for (int32_t head = 0; head < args_.num_heads; ++head) {
        const int64_t nope = token * args_.q_nope_stride_token + head * args_.q_nope_stride_head;
        write_query(at(args_.q_nope, nope, args_.q_dtype), args_.q_dtype, query(token, head, 0), num_plain);
      }
      for (int32_t first = 0; first < num_angles; first += kAngles) {
        const Angles angles(args_, token, first, std::min(kAngles, num_angles - first));
        for (int32_t head = 0; head < args_.num_heads; ++head) rotate_query(angles, token, head);
        if (slot >= 0 && !collects_) rotate_key(angles, token, page, offset);
        if (slot >= 0 && collects_) rotate_key(angles, token, joins_ ? joined + num_plain : joined);
      }
      if (slot >= 0 && joins_) writer_.write_ckv(joined, page, offset);
      if (slot >= 0 && collects_ && !joins_) writer_.write_kpe(joined, page, offset, 0, 2 * num_angles);
    }
    writer_.finish();
  }

 private:
  char* query(int64_t token, int32_t head, int32_t channel) const {
    const int64_t first = token * args_.q_out_stride_token + head * args_.q_out_stride_head;
    return at(args_.q_out, first + channel, args_.q_out_dtype);
  }

  void write_query(const void* from, DType dtype, void* to, int32_t n) const {
    if (args_.q_out_dtype == DType::kE4M3)
      set_.rows->quantize(from, dtype, *args_.q_scale, n, static_cast<uint8_t*>(to));
    else
      ElementCopier(set_, dtype, args_.q_out_dtype, 0).copy(from, to, n);
  }

  /// Rotates channels by these angles, and calls write(values, first channel, number of channels) with the results.
  template <class Write>
  void rotate(const void* pe, DType dtype, const Angles& angles, const Write& write) const {
    alignas(64) float out[2 * kAngles];
    const int32_t half = args_.cache.d_rotary() / 2;
    const int32_t first = args_.interleaved ? 2 * angles.first : angles.first;
    const void* x = at(pe, first, dtype);
    set_.rows->rotate(x, args_.interleaved ? nullptr : at(x, half, dtype), dtype, angles.own, angles.partner, angles.n,
                      out);
    if (args_.interleaved) return write(out, first, 2 * angles.n);
    write(out, first, angles.n);
    write(out + angles.n, half + first, angles.n);
  }

  void rotate_query(const Angles& angles, int64_t token, int32_t head) const {
    const int64_t pe = token * args_.q_pe_stride_token + head * args_.q_pe_stride_head;
    rotate(at(args_.q_pe, pe, args_.q_dtype), args_.q_dtype, angles, [&](const float* out, int32_t first, int32_t n) {
      write_query(out, DType::kF32, query(token, head, args_.cache.d_plain() + first), n);
    });
  }

  void rotate_key(const Angles& angles, int64_t token, int64_t page, int64_t offset) const {
    rotate(at(args_.kpe, token * args_.kpe_stride_token, args_.dtype), args_.dtype, angles,
           [&](const float* out, int32_t first, int32_t n) { writer_.write_kpe(out, page, offset, first, n); });
  }
  /// Writes the rotary channels, rounded to bf16, as the formats' own writers do before they quantize.
  void rotate_key(const Angles& angles, int64_t token, float* to) const {
    rotate(at(args_.kpe, token * args_.kpe_stride_token, args_.dtype), args_.dtype, angles,
           [&](const float* out, int32_t first, int32_t n) {
             for (int32_t i = 0; i < n; ++i) to[first + i] = bf16_to_f32(f32_to_bf16(out[i]));
           });
  }

  const KernelSet& set_;
  const core::AppendRopeArgs& args_;
  bool joins_;     // whether the cache's latent channels end with the rotary ones
  bool collects_;  // whether all rotary channels are made before one of them is quantized
  CacheWriter writer_;
};

}  // namespace

void run_append_rope(const KernelSet& set, const core::AppendRopeArgs& args, core::ThreadPool& pool) {
  const int64_t width = args.cache.d_ckv + args.cache.d_kpe;
  const int64_t bytes =
      args.num_tokens * width *
      (static_cast<int64_t>(size_of(args.dtype)) + args.num_heads * static_cast<int64_t>(size_of(args.q_dtype)));
  const Rotator rotator(set, args, bytes);
  share(pool, args.num_tokens, bytes, [&](int64_t begin, int64_t end) { rotator.share_of_tokens(begin, end); });
}

}  // namespace mla::cpu
