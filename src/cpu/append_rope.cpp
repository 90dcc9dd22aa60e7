// SPDX-License-Identifier: Apache-2.0
// append_rope rotates and converts queries, and rotates, quantizes and appends keys.
#include "cpu/operations.h"
#include "cpu/rotation.h"
#include "cpu/share.h"

namespace mla::cpu {
namespace {

class QueryWriter {
 public:
  QueryWriter(const KernelSet& set, const core::AppendRopeArgs& args) : set_(set), args_(args) {}

  void write(int64_t token, const Rotation& rotation) const {
    for (int32_t head = 0; head < args_.num_heads; ++head) {
      const int64_t nope = token * args_.q_nope_stride_token + head * args_.q_nope_stride_head;
      convert(at(args_.q_nope, nope, args_.q_dtype), args_.q_dtype, query(token, head, 0), args_.cache.d_plain());
    }
    if (args_.num_heads == 0) return;
    for_angles(rotation, [&](const Angles& angles) {
      for (int32_t head = 0; head < args_.num_heads; ++head) {
        const int64_t pe = token * args_.q_pe_stride_token + head * args_.q_pe_stride_head;
        rotate(set_, at(args_.q_pe, pe, args_.q_dtype), args_.q_dtype, rotation, angles,
               [&](const float* out, int32_t first, int32_t n) {
                 convert(out, DType::kF32, query(token, head, args_.cache.d_plain() + first), n);
               });
      }
    });
  }

 private:
  char* query(int64_t token, int32_t head, int32_t channel) const {
    const int64_t first = token * args_.q_out_stride_token + head * args_.q_out_stride_head;
    return at(args_.q_out, first + channel, args_.q_out_dtype);
  }
  void convert(const void* from, DType dtype, void* to, int32_t n) const {
    if (args_.q_out_dtype == DType::kE4M3)
      set_.rows->quantize(from, dtype, *args_.q_scale, n, static_cast<uint8_t*>(to));
    else
      ElementCopier(set_, dtype, args_.q_out_dtype, 0).copy(from, to, n);
  }

  const KernelSet& set_;
  const core::AppendRopeArgs& args_;
};

}  // namespace

void run_append_rope(const KernelSet& set, const core::AppendRopeArgs& args, core::ThreadPool& pool) {
  const int64_t width = args.cache.d_ckv + args.cache.d_kpe;
  const int64_t bytes =
      args.num_tokens * width *
      (static_cast<int64_t>(size_of(args.dtype)) + args.num_heads * static_cast<int64_t>(size_of(args.q_dtype)));
  const QueryWriter queries(set, args);
  const RotatedWriter keys(set, args.cache, args.dtype, bytes);
  share(pool, args.num_tokens, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const Rotation rotation = {.channels = args.cache.d_rotary(),
                                 .cos_sin = args.cos_sin + args.positions[token] * args.cos_sin_stride_position,
                                 .interleaved = args.interleaved};
      if (args.slot_mapping[token] >= 0)
        keys.write(at(args.ckv, token * args.ckv_stride_token, args.dtype),
                   at(args.kpe, token * args.kpe_stride_token, args.dtype), rotation, args.slot_mapping[token]);
      queries.write(token, rotation);
    }
    keys.finish();
  });
}

}  // namespace mla::cpu
