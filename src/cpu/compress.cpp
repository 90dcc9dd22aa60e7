// SPDX-License-Identifier: Apache-2.0
// compress pools groups of tokens into latents and appends these. It is bound by memory. First the groups that end are
// divided among the workers, then the requests, whose newest tokens are kept for later calls.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/cache_rows.h"
#include "cpu/operations.h"
#include "cpu/rotation.h"
#include "cpu/share.h"

namespace mla::cpu {
namespace {

using core::CompressArgs;

/// Makes the latents of one worker.
class Compressor {
 public:
  Compressor(const KernelSet& set, const CompressArgs& args, int64_t bytes)
      : set_(set),
        args_(args),
        plain_(set, args.cache, args.latent_dtype, args.latent_dtype, bytes),
        rotated_(set, args.cache, args.latent_dtype, bytes) {
    if (args.norm_weight != nullptr)
      set.floats->convert(args.norm_weight, args.norm_weight_dtype, norm_weight_, DType::kF32, args.d_latent);
  }

  void share_of_tokens(int64_t begin, int64_t end) {
    for (int32_t request = 0; request < args_.batch_size; ++request) {
      const int64_t first_token = args_.queries.begin(request), first = args_.first_position(request);
      const int64_t from = std::max({begin - first_token, -first, int64_t{0}});
      const int64_t to = std::min<int64_t>(end - first_token, args_.queries.len(request));
      for (int64_t last = (first + from + args_.ratio) / args_.ratio * args_.ratio - 1; last < first + to;
           last += args_.ratio)
        make(request, first, last);
    }
    plain_.finish();
    rotated_.finish();
  }

 private:
  /// Makes the latent of the group that ends at position `last`.
  void make(int32_t request, int64_t first, int64_t last) {
    const int64_t token = args_.queries.begin(request) + last - first;
    void* const latent = at(args_.latent, token * args_.latent_stride_token, args_.latent_dtype);
    alignas(64) float mean[kMaxLatent];
    if (args_.ratio == 1)
      set_.floats->convert(at(args_.kv, token * args_.kv_stride_token, args_.dtype), args_.dtype, mean, DType::kF32,
                           args_.d_latent);
    else
      pool(request, first, last, mean);
    const bool normalizes = args_.norm_weight != nullptr;
    const float factor = normalizes ? set_.rows->norm_factor(mean, args_.d_latent, args_.norm_eps) : 1.0F;
    set_.rows->scale_channels(mean, args_.d_latent, factor, normalizes ? norm_weight_ : nullptr, latent,
                              args_.latent_dtype);
    if (args_.to != CompressArgs::To::kLatents && args_.slot_mapping[token] >= 0)
      append(latent, last - args_.ratio + 1, args_.slot_mapping[token]);
  }

  void pool(int32_t request, int64_t first, int64_t last, float* mean) {
    PooledToken tokens[kPooledTokens];
    int32_t n = 0;
    bool none = true;
    const auto add = [&] {
      set_.rows->pool(tokens, n, args_.d_latent, none, &pool_);
      none = false;
      n = 0;
    };
    for (int64_t position = std::max<int64_t>(last - args_.span() + 1, 0); position <= last; ++position) {
      // Each token has a half for the group behind its own, and one for its own.
      const int32_t half = args_.overlap && position > last - args_.ratio ? args_.d_latent : 0;
      if (position >= first) {
        const int64_t token = args_.queries.begin(request) + position - first;
        tokens[n++] = {.kv = at(args_.kv, token * args_.kv_stride_token + half, args_.dtype),
                       .score = at(args_.score, token * args_.score_stride_token + half, args_.dtype),
                       .dtype = args_.dtype,
                       .bias = bias(position, half)};
      } else if (const float* const state = args_.state_of(request, position); state != nullptr) {
        tokens[n++] = {.kv = state + half, .score = state + args_.width() + half};
      }
      if (n == kPooledTokens) add();
    }
    if (n > 0) add();
    set_.rows->finish_pool(pool_, args_.d_latent, mean);
  }

  const float* bias(int64_t position, int32_t channel) const {
    if (args_.position_bias == nullptr) return nullptr;
    return args_.position_bias + position % args_.ratio * args_.position_bias_stride_position + channel;
  }

  void append(const void* latent, int64_t position, int64_t slot) const {
    const int32_t num_plain = args_.d_latent - args_.d_rotary;
    const void* const pe = at(latent, num_plain, args_.latent_dtype);
    const Rotation rotation = {
        .channels = args_.d_rotary,
        .cos_sin = args_.d_rotary > 0 ? args_.cos_sin + position * args_.cos_sin_stride_position : nullptr,
        .interleaved = args_.interleaved};
    if (args_.to == CompressArgs::To::kIndexer) return append_indexer(latent, rotation, slot);
    if (args_.d_rotary > 0) return rotated_.write(latent, pe, rotation, slot);
    const int64_t page = slot / args_.cache.page_size, offset = slot % args_.cache.page_size;
    plain_.write_ckv(latent, page, offset);
    if (args_.cache.d_kpe > 0)
      plain_.write_kpe(at(latent, args_.cache.d_ckv, args_.latent_dtype), page, offset, 0, args_.cache.d_kpe);
  }

  void append_indexer(const void* latent, const Rotation& rotation, int64_t slot) const {
    constexpr int32_t kChannels = kIndexerLayout.head_dim;
    alignas(64) float key[kChannels];
    set_.floats->convert(latent, args_.latent_dtype, key, DType::kF32, kChannels - rotation.channels);
    if (rotation.channels > 0)
      rotate_rounded(set_, at(latent, kChannels - rotation.channels, args_.latent_dtype), args_.latent_dtype, rotation,
                     key + kChannels - rotation.channels);
    write_indexer_key(*set_.rows, args_.indexer, slot, key, DType::kF32, args_.power_of_two_scales);
  }

  const KernelSet& set_;
  const CompressArgs& args_;
  CacheWriter plain_;
  RotatedWriter rotated_;
  Pool pool_;
  alignas(64) float norm_weight_[kMaxLatent];
};

/// Keeps the newest tokens of a request, as many as its state has room for.
void keep(const KernelSet& set, const CompressArgs& args, int32_t request) {
  const int64_t first = args.first_position(request), end = first + args.queries.len(request);
  const int32_t width = args.width();
  for (int64_t position = std::max({first, end - args.capacity(), int64_t{0}}); position < end; ++position) {
    float* const to = args.state_of(request, position);
    if (to == nullptr) continue;
    const int64_t token = args.queries.begin(request) + position - first;
    set.floats->convert(at(args.kv, token * args.kv_stride_token, args.dtype), args.dtype, to, DType::kF32, width);
    float* const scores = to + width;
    set.floats->convert(at(args.score, token * args.score_stride_token, args.dtype), args.dtype, scores, DType::kF32,
                        width);
    if (args.position_bias == nullptr) continue;
    const float* const bias = args.position_bias + position % args.ratio * args.position_bias_stride_position;
    for (int32_t c = 0; c < width; ++c) scores[c] += bias[c];
  }
}

}  // namespace

void run_compress(const KernelSet& set, const CompressArgs& args, core::ThreadPool& pool) {
  const int64_t bytes =
      args.num_tokens * args.width() * static_cast<int64_t>(size_of(args.dtype)) * (args.ratio > 1 ? 2 : 1);
  share(pool, args.num_tokens, bytes,
        [&](int64_t begin, int64_t end) { Compressor(set, args, bytes).share_of_tokens(begin, end); });
  if (args.appends()) run_append_rope(set, args.append, pool);
  if (args.state == nullptr) return;
  const int64_t kept = args.batch_size * std::min(args.capacity(), args.num_tokens) * args.width() * 8;
  share(pool, args.batch_size, kept, [&](int64_t begin, int64_t end) {
    for (int64_t request = begin; request < end; ++request) keep(set, args, static_cast<int32_t>(request));
  });
}

}  // namespace mla::cpu
