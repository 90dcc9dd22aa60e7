// SPDX-License-Identifier: Apache-2.0
// append_rope rotates and converts queries, and rotates, quantizes and appends keys, both normalized if asked.
#include "cpu/operations.h"
#include "cpu/rotation.h"
#include "cpu/share.h"

namespace mla::cpu {
namespace {

/// Makes rows of f32 out of two parts, and normalizes their first channels.
class RowNorm {
 public:
  RowNorm(const KernelSet& set, const void* weight, DType weight_dtype, int32_t channels, float epsilon)
      : set_(set), has_weight_(weight != nullptr), channels_(channels), epsilon_(epsilon) {
    if (has_weight_) set.floats->convert(weight, weight_dtype, weight_, DType::kF32, channels);
  }

  /// Writes `num_plain` channels of `plain` and `num_rotary` of `pe` to `row`.
  void make(const void* plain, int32_t num_plain, const void* pe, int32_t num_rotary, DType dtype, float* row) const {
    set_.floats->convert(plain, dtype, row, DType::kF32, num_plain);
    if (num_rotary > 0) set_.floats->convert(pe, dtype, row + num_plain, DType::kF32, num_rotary);
    const float factor = set_.rows->norm_factor(row, channels_, epsilon_);
    set_.rows->scale_channels(row, channels_, factor, has_weight_ ? weight_ : nullptr, row, DType::kF32);
  }

 private:
  const KernelSet& set_;
  bool has_weight_;
  int32_t channels_;
  float epsilon_;
  alignas(64) float weight_[core::kMaxNormChannels];
};

class QueryWriter {
 public:
  QueryWriter(const KernelSet& set, const core::AppendRopeArgs& args)
      : set_(set),
        args_(args),
        norm_(set, args.q_norm_weight, args.q_norm_weight_dtype, args.cache.d_plain() + args.cache.d_rotary(),
              args.norm_eps) {}

  void write(int64_t token, const Rotation& rotation) const {
    if (args_.num_heads == 0) return;
    const int32_t num_plain = args_.cache.d_plain();
    const auto write_plain = [&](int32_t head, const void* plain, const void*, DType dtype) {
      convert(plain, dtype, query(token, head, 0), num_plain);
    };
    if (rotation.channels == 0) return for_heads(token, write_plain);
    for_angles(rotation, [&](const Angles& angles) {
      for_heads(token, [&](int32_t head, const void* plain, const void* pe, DType dtype) {
        if (angles.first == 0) write_plain(head, plain, pe, dtype);
        rotate(set_, pe, dtype, rotation, angles, [&](const float* out, int32_t first, int32_t n) {
          convert(out, DType::kF32, query(token, head, num_plain + first), n);
        });
      });
    });
  }

 private:
  /// Calls f(head, plain channels, rotary ones, their type) for each query of a token, normalized if asked.
  template <class F>
  void for_heads(int64_t token, const F& f) const {
    alignas(64) float row[core::kMaxNormChannels];
    const int32_t num_plain = args_.cache.d_plain();
    for (int32_t head = 0; head < args_.num_heads; ++head) {
      const void* plain =
          at(args_.q_nope, token * args_.q_nope_stride_token + head * args_.q_nope_stride_head, args_.q_dtype);
      const void* pe = at(args_.q_pe, token * args_.q_pe_stride_token + head * args_.q_pe_stride_head, args_.q_dtype);
      if (!args_.q_norm) {
        f(head, plain, pe, args_.q_dtype);
        continue;
      }
      norm_.make(plain, num_plain, pe, args_.cache.d_rotary(), args_.q_dtype, row);
      f(head, row, row + num_plain, DType::kF32);
    }
  }
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
  RowNorm norm_;
};

class KeyWriter {
 public:
  KeyWriter(const KernelSet& set, const core::AppendRopeArgs& args, int64_t bytes)
      : args_(args),
        norm_(set, args.norm_weight, args.norm_weight_dtype, args.norm_channels, args.norm_eps),
        writer_(set, args.cache, normalizes() ? DType::kF32 : args.dtype, bytes) {}

  void write(int64_t token, const Rotation& rotation) const {
    if (args_.slot_mapping[token] < 0) return;
    const void* const plain = at(args_.ckv, token * args_.ckv_stride_token, args_.dtype);
    const void* const pe = at(args_.kpe, token * args_.kpe_stride_token, args_.dtype);
    if (!normalizes()) return writer_.write(plain, pe, rotation, args_.slot_mapping[token]);
    alignas(64) float row[core::kMaxNormChannels];
    const int32_t num_plain = args_.cache.d_plain();
    norm_.make(plain, num_plain, pe, rotation.channels, args_.dtype, row);
    writer_.write(row, row + num_plain, rotation, args_.slot_mapping[token]);
  }
  void finish() const { writer_.finish(); }

 private:
  bool normalizes() const { return args_.norm_weight != nullptr; }

  const core::AppendRopeArgs& args_;
  RowNorm norm_;
  RotatedWriter writer_;
};

}  // namespace

void run_append_rope(const KernelSet& set, const core::AppendRopeArgs& args, core::ThreadPool& pool) {
  const int64_t width = args.cache.d_ckv + args.cache.d_kpe;
  const int64_t bytes =
      args.num_tokens * width *
      (static_cast<int64_t>(size_of(args.dtype)) + args.num_heads * static_cast<int64_t>(size_of(args.q_dtype)));
  const QueryWriter queries(set, args);
  const KeyWriter keys(set, args, bytes);
  share(pool, args.num_tokens, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const Rotation rotation = {
          .channels = args.cache.d_rotary(), .cos_sin = args.angles(token), .interleaved = args.interleaved};
      keys.write(token, rotation);
      queries.write(token, rotation);
    }
    keys.finish();
  });
}

}  // namespace mla::cpu
