// SPDX-License-Identifier: Apache-2.0
// Tests packed bytes, bit for bit: quantizing append over everything that e4m3 and its scales can be, RoPE in the same
// pass, copies between formats, and the indexer's keys.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "backend_test.h"
#include "kit/paged_memory.h"
#include "turns.h"

namespace mla {
namespace {

using kit::AppendSpec;
using kit::PagedMemory;

constexpr CacheFormat kQuantized[] = {
    CacheFormat::kFP8,           CacheFormat::kFP8DsMla,  CacheFormat::kFP8DsV4,    CacheFormat::kFP8DsV41,
    CacheFormat::kFP4DsV41,      CacheFormat::kFP8Nope,   CacheFormat::kNvFP4DsMla, CacheFormat::kNvFP4DsMla416,
    CacheFormat::kNvFP4DsMla368, CacheFormat::kNvFP4DsV4, CacheFormat::kMxFP4DsV4};

class QuantizeTest : public BackendTest<Op::kAppend> {
 protected:
  /// Appends f32 `rows` to slots 0, 1, ... of a fresh cache, and expects the bytes that `PagedMemory` packs.
  void expect_packed(const kit::CacheSpec& cache, const std::vector<std::vector<float>>& rows) const {
    const auto tokens = static_cast<int64_t>(rows.size());
    const int64_t pages = (tokens + cache.page_size - 1) / cache.page_size;
    const PagedMemory memory = kit::make_pool(cache, pages), expected = kit::make_pool(cache, pages);
    for (const kit::Buffer* buffer : memory.written()) buffer->fill(kit::kUntouched);
    for (const kit::Buffer* buffer : expected.written()) buffer->fill(kit::kUntouched);
    std::vector<float> dense;
    std::vector<int64_t> slots;
    for (const std::vector<float>& row : rows) {
      expected.write_row(std::ssize(slots) / cache.page_size, std::ssize(slots) % cache.page_size, row);
      dense.insert(dense.end(), row.begin(), row.end());
      slots.push_back(std::ssize(slots));
    }
    AppendParams params;
    params.ckv = contiguous(dense.data(), DType::kF32, {tokens, cache.d_ckv()});
    params.ckv.stride[0] = cache.d_qk;
    if (cache.d_kpe() > 0) {
      params.kpe = contiguous(dense.data() + cache.d_ckv(), DType::kF32, {tokens, cache.d_kpe()});
      params.kpe.stride[0] = cache.d_qk;
    }
    params.slot_mapping = contiguous(slots.data(), DType::kI64, {tokens});
    params.cache = memory.cache;
    MLA_EXPECT_OK(run(context(), params));
    for (size_t i = 0; i < memory.written().size(); ++i)
      EXPECT_EQ(bits_of(*memory.written()[i]), bits_of(*expected.written()[i])) << name(cache.format);
  }

  static std::vector<kit::CacheSpec> caches() {
    std::vector<kit::CacheSpec> made;
    for (CacheFormat format : kQuantized)
      for (bool power_of_two : {false, true}) {
        if (power_of_two && is_in_turn(format) && format != CacheFormat::kFP8Nope) continue;  // they know no others
        made.push_back(kit::usual_cache(format));
        made.back().power_of_two_scales = power_of_two;
        made.back().page_size = 5;
        if (format != CacheFormat::kFP8) continue;
        made.push_back(made.back());
        made.back().token_scales = true;
      }
    return made;
  }
};
MLA_FOR_EVERY_ROW(QuantizeTest, Op::kAppend);

TEST_P(QuantizeTest, EveryCodeAndWhatLiesBetween) {
  // A group's largest value makes its scale 1 (448) or another; the others run over all codes, their midpoints and
  // their neighbours.
  std::vector<float> values;
  for (int code = 0; code < 0x7F; ++code) {
    const float value = e4m3_to_f32(static_cast<uint8_t>(code));
    const float next = code < 0x7E ? e4m3_to_f32(static_cast<uint8_t>(code + 1)) : 464.0F;
    const float middle = (value + next) / 2;
    for (float one : {value, middle, std::nextafter(middle, 0.0F), std::nextafter(middle, 1e9F)}) {
      values.push_back(one);
      values.push_back(-one);
    }
  }
  for (const kit::CacheSpec& cache : caches())
    for (float factor : {1.0F, 0x1p-7F, 3.0F, 0.018F}) {
      std::vector<std::vector<float>> rows;
      for (size_t first = 0; first < values.size(); first += 63) {
        std::vector<float> row;
        for (int32_t c = 0; c < cache.d_qk; ++c)
          row.push_back(c % 64 == 0 ? 448 * factor
                                    : values[(first + static_cast<size_t>(c % 64) - 1) % values.size()] * factor);
        rows.push_back(row);
      }
      expect_packed(cache, rows);
    }
}

TEST_P(QuantizeTest, EveryExponent) {
  // From subnormals to the largest float: every UE8M0 exponent that a scale can have, and the least one.
  for (const kit::CacheSpec& cache : caches()) {
    std::vector<std::vector<float>> rows;
    for (int exponent = -149; exponent <= 127; ++exponent)
      for (float mantissa : {1.0F, 1.75F, 1.7500001F, 1.99F}) {
        std::vector<float> row(static_cast<size_t>(cache.d_qk));
        kit::fill_normal(row.data(), DType::kF32, 0, cache.d_qk, static_cast<uint64_t>(exponent + 200), 0.1F);
        for (float& value : row) value = std::clamp(value, -1.0F, 1.0F) * std::ldexp(1.0F, exponent);
        for (size_t c = 3; c < row.size(); c += 64) row[c] = std::ldexp(mantissa, exponent);
        rows.push_back(row);
      }
    expect_packed(cache, rows);
  }
}

TEST_P(QuantizeTest, ZerosInfinitiesAndNan) {
  for (const kit::CacheSpec& cache : caches()) {
    const auto width = static_cast<size_t>(cache.d_qk);
    std::vector<std::vector<float>> rows = {std::vector<float>(width, 0.0F), std::vector<float>(width, -0.0F),
                                            std::vector<float>(width, kInfinity), std::vector<float>(width, kNan),
                                            std::vector<float>(width, std::numeric_limits<float>::max())};
    std::vector<float> mixed(width, 1.5F);
    for (size_t c = 0; c < width; c += 7) mixed[c] = c % 2 == 0 ? kInfinity : -kInfinity;
    for (size_t c = 3; c < width; c += 11) mixed[c] = kNan;
    rows.push_back(mixed);
    expect_packed(cache, rows);
  }
}

TEST_P(QuantizeTest, SpecialRowsOfEveryType) {
  uint64_t turn = 0;
  for (CacheFormat format : kQuantized)
    for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32})
      for (uint64_t seed = 1; seed <= 5; ++seed) {
        if (!has_turn(format, turn++)) continue;
        AppendSpec spec;
        spec.seed = seed;
        spec.cache = kit::usual_cache(format);
        spec.dtype = dtype;
        spec.special_share = 0.7;
        expect_ok(spec);
      }
}

TEST_P(QuantizeTest, TheNextPageAndThePadStayAsTheyWere) {
  AppendSpec spec;
  spec.cache = kit::usual_cache(CacheFormat::kFP8DsV4);
  spec.cache.padded_pages = true;
  spec.cache.page_size = 2;
  spec.cache.page_stride_extra = 64;
  spec.num_pages = 40;
  spec.num_tokens = 31;
  const kit::AppendCase problem(spec);
  MLA_EXPECT_OK(run(context(), problem.params()));
  const int64_t used = page_bytes(CacheFormat::kFP8DsV4, spec.cache.d_qk, 2, false);
  const int64_t stride = problem.memory.cache.kv.stride[0];
  for (int64_t page = 0; page < spec.num_pages; ++page)
    for (int64_t byte = used; byte < stride; ++byte)
      ASSERT_EQ(problem.memory.kv.data()[page * stride + byte], std::byte{kit::kUntouched}) << page << ' ' << byte;
  expect_ok(spec);
}

class AppendRopeTest : public BackendTest<Op::kAppendRope> {};
MLA_FOR_EVERY_ROW(AppendRopeTest, Op::kAppendRope);

TEST_P(AppendRopeTest, FormatsAndTypes) {
  uint64_t turn = 0;
  for (CacheFormat format : kAllCacheFormats)
    for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32})
      for (DType q_out : {DType::kBF16, DType::kF16, DType::kF32, DType::kE4M3})
        for (bool interleaved : {false, true}) {
          if (!has_turn(format, turn++)) continue;
          kit::AppendRopeSpec spec;
          spec.cache = kit::usual_cache(format);
          spec.dtype = spec.q_dtype = dtype;
          spec.q_out_dtype = q_out;
          spec.interleaved = interleaved;
          spec.max_positions = 200;
          spec.num_tokens = 9;
          expect_ok(spec);
        }
}

TEST_P(AppendRopeTest, KeysOnly) {
  for (CacheFormat format : kAllCacheFormats) {
    kit::AppendRopeSpec spec;
    spec.cache = kit::usual_cache(format);
    spec.num_heads = 0;
    expect_ok(spec);
  }
}

TEST_P(AppendRopeTest, PositionZeroTurnsNothing) {
  kit::AppendRopeSpec spec;
  spec.max_positions = 1;  // cos 1, sin 0
  spec.skip_share = 0;
  const kit::AppendRopeCase problem(spec);
  MLA_EXPECT_OK(run(context(), problem.params()));
  const auto* slots = problem.slot_mapping.as<int64_t>();
  for (int64_t t = 0; t < spec.num_tokens; ++t) {
    const PagedMemory::Row row = problem.memory.row(slots[t] / 64, slots[t] % 64);
    EXPECT_EQ(std::memcmp(row.kpe, problem.kpe_rows.data() + t * 64 * 2, 64 * 2), 0) << t;
    EXPECT_EQ(std::memcmp(row.ckv, problem.ckv_rows.data() + t * 512 * 2, 512 * 2), 0) << t;
    for (int64_t h = 0; h < spec.num_heads; ++h) {
      const std::byte* query = problem.q_out.data() + (t * spec.num_heads + h) * 576 * 2;
      EXPECT_EQ(std::memcmp(query, problem.q_nope.data() + (t * spec.num_heads + h) * 512 * 2, 512 * 2), 0);
      EXPECT_EQ(std::memcmp(query + 512 * 2, problem.q_pe.data() + (t * spec.num_heads + h) * 64 * 2, 64 * 2), 0);
    }
  }
}

TEST_P(AppendRopeTest, SkippedTokensStillTurnTheirQueries) {
  kit::AppendRopeSpec spec;
  spec.skip_share = 1;
  const kit::AppendRopeCase problem(spec);
  MLA_EXPECT_OK(run(context(), problem.params()));
  EXPECT_TRUE(all_bytes_are(problem.memory.kv, kit::kUntouched));
  expect_ok(spec);
}

TEST_P(AppendRopeTest, NormsOfEveryFormatAndType) {
  using Norm = kit::AppendRopeSpec::Norm;
  uint64_t turn = 0;
  for (CacheFormat format : kAllCacheFormats)
    for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32})
      for (Norm norm : {Norm::kNone, Norm::kLatent, Norm::kRow})
        for (bool interleaved : {false, true}) {
          if (!has_turn(format, turn++)) continue;
          kit::AppendRopeSpec spec;
          spec.cache = kit::usual_cache(format);
          spec.dtype = spec.q_dtype = dtype;
          spec.norm_dtype = turn % 2 == 0 ? DType::kF32 : DType::kBF16;
          spec.q_out_dtype = turn % 3 == 0 ? DType::kE4M3 : DType::kBF16;
          spec.norm = norm;
          spec.q_norm = true;
          spec.q_norm_weight = turn % 4 < 2;
          spec.special_share = norm != Norm::kNone && turn % 5 == 0 ? 0.5 : 0;
          spec.interleaved = interleaved;
          spec.max_positions = 200;
          spec.num_tokens = 9;
          expect_ok(spec);
        }
}

/// Returns x / sqrt(mean(x^2) + epsilon) * weight in double; `weight` is empty for 1.
std::vector<double> normalized(std::vector<double> x, const std::vector<double>& weight, double epsilon) {
  double squares = 0;
  for (double value : x) squares += value * value;
  const double root = std::sqrt(squares / static_cast<double>(x.size()) + epsilon);
  for (size_t c = 0; c < x.size(); ++c) x[c] *= (weight.empty() ? 1 : weight[c]) / root;
  return x;
}

/// Nothing turns here, so that the outputs are the norms: of queries over both parts, of keys over the latent channels
/// alone or over both. The sums of 576 squares, in 11 steps, and six more roundings lose at most 2^-20.
TEST_P(AppendRopeTest, NormsAreThoseOfDouble) {
  using Norm = kit::AppendRopeSpec::Norm;
  for (Norm norm : {Norm::kLatent, Norm::kRow})
    for (float epsilon : {1e-6F, 0.5F, 0.0F}) {
      kit::AppendRopeSpec spec;
      spec.cache.d_qk = 576;
      spec.num_tokens = 7;
      spec.dtype = spec.q_dtype = spec.q_out_dtype = DType::kF32;
      spec.norm = norm;
      spec.q_norm = spec.q_norm_weight = true;
      spec.max_positions = 1;  // cos 1, sin 0
      spec.skip_share = 0;
      const kit::AppendRopeCase problem(spec);
      AppendRopeParams p = problem.params();
      p.norm_eps = epsilon;
      MLA_EXPECT_OK(run(context(), p));
      const std::vector<double> q_nope = kit::to_dense(p.q_nope), q_pe = kit::to_dense(p.q_pe),
                                q_out = kit::to_dense(p.q_out), q_weight = kit::to_dense(p.q_norm_weight);
      for (int64_t row = 0; row < int64_t{spec.num_tokens} * spec.num_heads; ++row) {
        std::vector<double> x(q_nope.begin() + row * 512, q_nope.begin() + (row + 1) * 512);
        x.insert(x.end(), q_pe.begin() + row * 64, q_pe.begin() + (row + 1) * 64);
        const std::vector<double> want = normalized(x, q_weight, static_cast<double>(epsilon));
        for (size_t c = 0; c < 576; ++c)
          ASSERT_NEAR(q_out[static_cast<size_t>(row) * 576 + c], want[c], std::abs(want[c]) * 0x1p-20)
              << row << ' ' << c;
      }
      const std::vector<double> ckv = kit::to_dense(p.ckv), kpe = kit::to_dense(p.kpe),
                                weight = kit::to_dense(p.norm_weight);
      const auto* slots = problem.slot_mapping.as<int64_t>();
      for (int64_t t = 0; t < spec.num_tokens; ++t) {
        std::vector<double> latent(ckv.begin() + t * 512, ckv.begin() + (t + 1) * 512);
        std::vector<double> rotary(kpe.begin() + t * 64, kpe.begin() + (t + 1) * 64);
        if (norm == Norm::kRow) latent.insert(latent.end(), rotary.begin(), rotary.end());
        std::vector<double> want = normalized(latent, weight, static_cast<double>(epsilon));
        if (norm == Norm::kLatent) want.insert(want.end(), rotary.begin(), rotary.end());
        const PagedMemory::Row row = problem.memory.row(slots[t] / 64, slots[t] % 64);
        for (int64_t c = 0; c < 576; ++c) {
          const double got =
              c < 512 ? kit::load_element(row.ckv, DType::kBF16, c) : kit::load_element(row.kpe, DType::kBF16, c - 512);
          const double exact = want[static_cast<size_t>(c)];
          ASSERT_NEAR(got, exact, std::abs(exact) * (0x1p-8 + 0x1p-20)) << t << ' ' << c;  // bf16 keeps 8 bits
        }
      }
    }
}

TEST_P(AppendRopeTest, RandomProblems) {
  for (uint64_t seed = 23000; seed < 23030; ++seed)
    for (CacheFormat format : kAllCacheFormats)
      if (has_turn(format, seed)) expect_ok(kit::random_append_rope_spec(seed, format));
}

class CopyPagesTest : public BackendTest<Op::kCopyPages> {};
MLA_FOR_EVERY_ROW(CopyPagesTest, Op::kCopyPages);

TEST_P(CopyPagesTest, SplitsFooterPages) {
  for (bool padded : {false, true}) {
    kit::CopyPagesSpec spec;
    spec.num_tokens = 1024;
    spec.from = spec.to = kit::usual_cache(CacheFormat::kFP8DsV4);
    spec.from.page_size = 256;
    spec.to.page_size = 64;
    spec.from.padded_pages = spec.to.padded_pages = padded;
    const kit::CopyPagesCase problem(spec);
    MLA_EXPECT_OK(run(context(), problem.params()));
    const auto* from_pages = problem.from_pages.as<int32_t>();
    const auto* to_pages = problem.to_pages.as<int32_t>();
    for (int64_t token = 0; token < spec.num_tokens; ++token) {
      const PagedMemory::Row from = problem.from.row(from_pages[token / 256], token % 256);
      const PagedMemory::Row to = problem.to.row(to_pages[token / 64], token % 64);
      ASSERT_EQ(std::memcmp(from.ckv, to.ckv, 576), 0) << token;
      ASSERT_EQ(std::memcmp(from.scales, to.scales, 8), 0) << token;
    }
    expect_ok(spec);
  }
}

TEST_P(CopyPagesTest, EveryPairOfFormats) {
  size_t pair = 0;
  for (CacheFormat from : kAllCacheFormats)
    for (CacheFormat to : kAllCacheFormats) {
      kit::CopyPagesSpec spec;
      spec.from = kit::usual_cache(from);
      spec.to = kit::usual_cache(to);
      if (spec.from.packed() && spec.to.packed() &&
          (spec.from.d_ckv() != spec.to.d_ckv() || spec.from.d_kpe() != spec.to.d_kpe()))
        continue;
      if (spec.from.packed()) {
        spec.to.d_qk = spec.from.d_qk;
        spec.to.d_v = spec.to.packed() ? spec.to.d_v : spec.from.d_ckv();
      } else if (spec.to.packed()) {
        spec.from.d_qk = spec.to.d_qk;
        spec.from.d_v = spec.to.d_ckv();
      }
      constexpr int32_t kPageSizes[] = {16, 64, 256};
      ++pair;
      for (const int32_t page_size : kPageSizes) {
        const bool in_turn = is_in_turn(from) || is_in_turn(to);
        if (in_turn && page_size != kPageSizes[pair % std::size(kPageSizes)]) continue;
        spec.to.page_size = page_size;
        expect_ok(spec);
      }
    }
}

TEST_P(CopyPagesTest, QuantizedAndBackIsWhatTheFormatMeans) {
  // bf16 -> packed -> bf16: the rows of the packed cache as it reads.
  kit::CopyPagesSpec spec;
  spec.from = kit::usual_cache(CacheFormat::kBF16);
  spec.to = kit::usual_cache(CacheFormat::kFP8DsMla);
  const kit::CopyPagesCase quantize(spec);
  MLA_EXPECT_OK(run(context(), quantize.params()));
  const kit::PagedMemory back = kit::make_pool(spec.from, quantize.from.num_pages);
  CopyPagesParams params = quantize.params();
  params.from = quantize.to.cache;
  params.from_pages = quantize.params().to_pages;
  params.to = back.cache;
  params.to_pages = quantize.params().from_pages;
  MLA_EXPECT_OK(run(context(), params));
  const auto* from_pages = quantize.from_pages.as<int32_t>();
  const auto* to_pages = quantize.to_pages.as<int32_t>();
  for (int64_t token = 0; token < spec.num_tokens; ++token)
    ASSERT_EQ(back.read_row(from_pages[token / 64], token % 64),
              quantize.to.read_row(to_pages[token / 64], token % 64));
}

TEST_P(CopyPagesTest, RandomProblems) {
  for (uint64_t seed = 24000; seed < 24030; ++seed)
    for (CacheFormat from : kAllCacheFormats)
      if (has_turn(from, seed)) expect_ok(kit::random_copy_pages_spec(seed, from));
}

class AppendIndexerTest : public BackendTest<Op::kAppendIndexer> {};
MLA_FOR_EVERY_ROW(AppendIndexerTest, Op::kAppendIndexer);

TEST_P(AppendIndexerTest, TypesScalesAndPages) {
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32})
    for (bool power_of_two : {false, true})
      for (int32_t page_size : {1, 2, 64, 256})
        for (double special_share : {0.0, 1.0}) {
          kit::AppendIndexerSpec spec;
          spec.dtype = dtype;
          spec.power_of_two_scales = power_of_two;
          spec.page_size = page_size;
          spec.num_pages = 64 / page_size + 1;
          spec.special_share = special_share;
          spec.page_stride_extra = page_size == 2 ? 7 : 0;
          expect_ok(spec);
          if (!power_of_two) continue;
          spec.format = IndexerFormat::kMXFP4;
          expect_ok(spec);
        }
}

TEST_P(AppendIndexerTest, RandomProblems) {
  for (uint64_t seed = 25000; seed < 25040; ++seed) expect_ok(kit::random_append_indexer_spec(seed));
}

}  // namespace
}  // namespace mla
