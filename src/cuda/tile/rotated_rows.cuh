// SPDX-License-Identifier: Apache-2.0
// One warp writes a row whose rotary channels it rotates. The rotation is in f32 with every product and sum rounded
// separately, as on the CPU.
#pragma once

#include "cuda/tile/cache_rows.cuh"

namespace mla::MLA_CUDA_NAMESPACE {

/// This is a source, in the sense of cache_rows.cuh, of rotary channels rotated by the angles of their token's
/// position. `pe` is the source of the channels themselves.
template <class Source>
struct Rotated {
  Source pe;
  int32_t dim;
  const float* cos_sin;  // dim / 2 cosines, then as many sines
  bool interleaved;
  bool inverse = false;  // turns by the negative angles

  static constexpr int kBatch = 1;
  struct Fetched {
    typename Source::Fetched own, partner;  // `partner` is not set where pairs are neighbouring channels
    Bits8 cos, sin;
    bool is_x;  // whether the lane's channels are x of their pairs, or y; only set with `partner`
  };

  static MLA_DEVICE float product(float a, float b) { return settle_nan(ptx::mul_rn(a, b), a, b); }
  /// A pair (x, y) is rotated into (x cos - y sin, x sin + y cos). Returns the one of the two that replaces `own`.
  MLA_DEVICE float turned(float own, float partner, float cos, float sin, bool own_is_x) const {
    const float a = product(own, cos), b = product(partner, inverse ? -sin : sin);
    return own_is_x ? settle_nan(ptx::add_rn(a, -b), a, b) : settle_nan(ptx::add_rn(b, a), b, a);
  }

  MLA_DEVICE float operator()(int32_t c) const {
    const int32_t half = dim / 2;
    const int32_t angle = interleaved ? c / 2 : c < half ? c : c - half;
    const bool is_x = interleaved ? c % 2 == 0 : c < half;
    const int32_t to_partner = (interleaved ? 1 : half) * (is_x ? 1 : -1);
    return turned(pe(c), pe(c + to_partner), cos_sin[angle], cos_sin[half + angle], is_x);
  }

  MLA_DEVICE int32_t vector_channels(int32_t n) const {
    const int32_t vectors = pe.vector_channels(n);
    return interleaved || dim / 2 % kVector == 0 ? vectors : 0;
  }

  MLA_DEVICE Fetched fetch(int32_t c) const {
    const int32_t half = dim / 2;
    Fetched fetched = {};
    fetched.own = pe.fetch(c);
    if (interleaved) {
      fetched.cos = load_four(cos_sin + c / 2);
      fetched.sin = load_four(cos_sin + half + c / 2);
    } else {
      const int32_t angle = c < half ? c : c - half;
      fetched.partner = pe.fetch(c < half ? c + half : angle);
      fetched.cos = load_bits8(reinterpret_cast<const std::byte*>(cos_sin + angle), 4);
      fetched.sin = load_bits8(reinterpret_cast<const std::byte*>(cos_sin + half + angle), 4);
    }
    fetched.is_x = c < half;
    return fetched;
  }

  MLA_DEVICE void decode(const Fetched& fetched, float (&values)[kVector]) const {
    float own[kVector], partner[kVector];
    pe.decode(fetched.own, own);
    if (interleaved) {
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        values[i] = turned(own[i], own[i ^ 1], angle(fetched.cos, i / 2), angle(fetched.sin, i / 2), i % 2 == 0);
      return;
    }
    pe.decode(fetched.partner, partner);
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      values[i] = turned(own[i], partner[i], angle(fetched.cos, i), angle(fetched.sin, i), fetched.is_x);
  }

 private:
  static MLA_DEVICE float angle(const Bits8& bits, int i) { return std::bit_cast<float>(bits.w[i]); }
  static MLA_DEVICE Bits8 load_four(const float* from) {
    Bits8 bits = {};
    if (is_aligned(from, 16)) {
      const ptx::Vec4 v = ptx::load_global(reinterpret_cast<const ptx::Vec4*>(from));
#pragma unroll
      for (int i = 0; i < 4; ++i) bits.w[i] = v.x[i];
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) bits.w[i] = std::bit_cast<uint32_t>(from[i]);
    }
    return bits;
  }
};

/// Gives rotary channels whose scale is chosen. They are rounded to bf16 before, as the formats' own writers do.
template <class Source>
struct RoundedRotated {
  const Rotated<Source>& rotated;

  MLA_DEVICE float operator()(int32_t c) const { return bf16_to_f32(f32_to_bf16(rotated(c))); }
};

/// This is a source, in the sense of cache_rows.cuh, of the channels of a row whose latent part ends with the rotary
/// ones.
template <class Source>
struct RowWithRotated {
  const Source& plain;
  const Rotated<Source>& rotated;
  int32_t num_plain;

  static constexpr int kBatch = 1;  // so that nothing is gained by loads apart from their conversion
  struct Fetched {
    float values[kVector];
  };

  MLA_DEVICE float operator()(int32_t c) const {
    return c < num_plain ? plain(c) : RoundedRotated<Source>{rotated}(c - num_plain);
  }
  /// Eight neighbours must be of one kind.
  MLA_DEVICE int32_t vector_channels(int32_t n) const {
    return num_plain % kVector == 0 && rotated.vector_channels(rotated.dim) == rotated.dim ? n / kVector * kVector : 0;
  }
  MLA_DEVICE Fetched fetch(int32_t c) const {
    Fetched fetched;
    if (c < num_plain) {
      plain.decode(plain.fetch(c), fetched.values);
    } else {
      rotated.decode(rotated.fetch(c - num_plain), fetched.values);
#pragma unroll
      for (int i = 0; i < kVector; ++i) fetched.values[i] = bf16_to_f32(f32_to_bf16(fetched.values[i]));
    }
    return fetched;
  }
  static MLA_DEVICE void decode(const Fetched& fetched, float (&values)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] = fetched.values[i];
  }
};

/// Writes a row whose latent part ends with the rotary channels.
template <bool kCommon, class Source>
MLA_DEVICE void write_joined_row(const CacheRow& row, const Source& plain, const Rotated<Source>& rotated) {
  write_groups<kCommon>(row, RowWithRotated<Source>{plain, rotated, row.cache.d_plain()});
}

/// Says where the parts of a row go whose rotary channels are one of their own, as which elements, and with which
/// scales unless those are chosen.
struct RowParts {
  std::byte* plain;
  DType plain_dtype;
  float plain_scale;
  std::byte* rotary;
  DType rotary_dtype;
  float rotary_scale;

  static MLA_DEVICE RowParts of(const CacheRow& row) {
    const core::Cache& cache = row.cache;
    return {.plain = row.of(cache.ckv),
            .plain_dtype = cache.ckv_dtype,
            .plain_scale = cache.writes_scales ? 1.0F : given_ckv_scale(row),
            .rotary = row.of(cache.kpe),
            .rotary_dtype = cache.kpe_dtype,
            .rotary_scale = given_kpe_scale(cache)};
  }
};

/// Writes a row whose rotary channels are a part of their own. `to` is the cache's `row`, in which scales may be
/// chosen; or, unless `to_cache`, a row elsewhere.
template <bool kCommon, class Source>
MLA_DEVICE void write_parts(const RowParts& to, bool to_cache, const CacheRow& row, const Source& plain,
                            const Rotated<Source>& rotated) {
  const core::Cache& cache = row.cache;
  const int32_t num_plain = cache.d_plain();
  if (to_cache && cache.writes_kpe_scale())
    write_scaled_kpe(row, RoundedRotated<Source>{rotated});
  else
    write_channels(rotated, rotated.dim, Encoder(to.rotary_dtype, to.rotary_scale), to.rotary);
  if (const std::byte* const from = as_stored(plain, to.plain_dtype); from != nullptr)
    copy_pieces({to.plain, from, num_plain * static_cast<int64_t>(size_of(to.plain_dtype))}, {});
  else if (to_cache && cache.writes_scales)
    write_groups<kCommon>(row, plain);
  else
    write_channels(plain, num_plain, Encoder(to.plain_dtype, to.plain_scale), to.plain);
}

template <class Source>
MLA_DEVICE void write_parted_row(const CacheRow& row, const Source& plain, const Rotated<Source>& rotated) {
  write_parts<true>(RowParts::of(row), true, row, plain, rotated);
}

}  // namespace mla::MLA_CUDA_NAMESPACE
