// SPDX-License-Identifier: Apache-2.0
// Tests random decode and prefill problems over every format and combination of options, against the textbook formula
// over rows that the tests' own unpacker reads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "problems.h"
#include "random_problems.h"
#include "test_cache.h"
#include "trace.h"

namespace mla::reference {
namespace {

TEST(ReferenceDecode, EveryFormatQueryTypeAndOptionByTheTextbook) {
  for (uint32_t seed = 0; seed < 120; ++seed) {
    MLA_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    const std::vector<Variant> variants = all_variants();
    const Variant variant = variants[seed % variants.size()];
    MLA_TRACE(testing::Message() << variant);
    const int32_t d_ckv = variant.d_ckv, d_kpe = variant.d_kpe, d_qk = d_ckv + d_kpe;
    const int32_t d_v = variant.format == CacheFormat::kFP8DsV4 ? d_qk : d_ckv;
    const int32_t heads = random.integer(1, 3), batch = random.integer(1, 3), page_size = random.of({1, 2, 5});
    const ContextParallel share = random.of<ContextParallel>(
        {{}, {.rank = 1, .world = 2, .interleave = 1}, {.rank = 0, .world = 3, .interleave = 2}});
    const int tree = random.integer(0, 3);  // 1: mask, 2: parents
    const bool causal = tree == 1 || tree == 2 || random.of({true, false});

    std::vector<int32_t> kv_len, qo_indptr = {0};
    for (int32_t b = 0; b < batch; ++b) {
      kv_len.push_back(random.integer(0, 12));
      qo_indptr.push_back(qo_indptr.back() + random.integer(0, 4));
    }
    const int32_t tokens = qo_indptr.back(), table_width = 12;
    TestCache cache(variant, batch * table_width, page_size);
    std::vector<int32_t> table(static_cast<size_t>(batch * table_width));
    for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
    std::shuffle(table.begin(), table.end(), random.engine());
    const auto slot_of = [&](int32_t b, int64_t local) {
      return table[static_cast<size_t>(b * table_width + local / page_size)] * page_size + local % page_size;
    };
    for (int64_t slot = 0; slot < cache.num_slots(); ++slot)
      cache.pack(slot, std::vector<float>(static_cast<size_t>(d_qk), kNan));
    for (int32_t b = 0; b < batch; ++b)
      for (int64_t j = 0; j < local_length(share, kv_len[static_cast<size_t>(b)]); ++j) {
        std::vector<float> row;
        for (int32_t c = 0; c < d_qk; ++c) row.push_back(random.normal());
        cache.pack(slot_of(b, j), row);
      }

    Tensor q(random.of({DType::kBF16, DType::kF16, DType::kF32, DType::kE4M3}), tokens * heads, d_ckv + 1);
    Tensor q_pe(q.dtype, tokens * heads, d_kpe + 2);
    q.fill(random, 0.3F);
    q_pe.fill(random, 0.3F);
    const auto query = [&](int64_t row, int32_t c) { return c < d_ckv ? q.at(row, c) : q_pe.at(row, c - d_ckv); };
    const float q_scale = 0.7F, o_scale = 0.05F;
    Tensor o(random.of({DType::kBF16, DType::kF16, DType::kF32, DType::kE4M3}), tokens * heads, d_v + 3);
    std::vector<float> lse(static_cast<size_t>(tokens * heads), kNan);
    const Options options(random, heads);
    std::vector<uint8_t> mask;
    std::vector<int32_t> parents;
    for (int32_t b = 0; b < batch; ++b)
      for (int32_t i = 0; i < qo_indptr[static_cast<size_t>(b) + 1] - qo_indptr[static_cast<size_t>(b)]; ++i) {
        parents.push_back(random.integer(-1, i - 1));
        for (int32_t j = 0; j < 4; ++j) mask.push_back(static_cast<uint8_t>(random.integer(0, 1)));
      }

    core::DecodeArgs args;
    args.batch_size = batch;
    args.num_tokens = tokens;
    args.num_heads = heads;
    args.d_qk = d_qk;
    args.d_v = d_v;
    args.q_dtype = q.dtype;
    args.q_scale = q.dtype == DType::kE4M3 ? &q_scale : nullptr;
    args.q_nope = q.bytes.data();
    args.q_pe = d_kpe > 0 ? q_pe.bytes.data() : nullptr;
    args.q_nope_stride_token = heads * q.width;
    args.q_nope_stride_head = q.width;
    args.q_pe_stride_token = heads * q_pe.width;
    args.q_pe_stride_head = q_pe.width;
    args.cache = cache.view();
    args.pages = {.page_size = page_size,
                  .batch_size = batch,
                  .table = table.data(),
                  .table_stride_request = table_width,
                  .kv_len = kv_len.data()};
    args.queries.indptr = qo_indptr.data();
    args.causal = causal;
    args.tree_mask = tree == 1 ? mask.data() : nullptr;
    args.tree_mask_stride_token = 4;
    args.tree_parents = tree == 2 ? parents.data() : nullptr;
    args.options = options.args;
    args.context_parallel = share;
    args.sm_scale = 0.2F;
    args.o_dtype = o.dtype;
    args.o_scale = o.dtype == DType::kE4M3 ? &o_scale : nullptr;
    args.o = o.bytes.data();
    args.o_stride_token = heads * o.width;
    args.o_stride_head = o.width;
    args.lse = lse.data();
    args.lse_stride_token = 1;
    args.lse_stride_head = tokens;
    run_in_workspace(args, decode);

    const double scale =
        static_cast<double>(args.sm_scale) * (q.dtype == DType::kE4M3 ? static_cast<double>(q_scale) : 1);
    for (int32_t b = 0; b < batch; ++b) {
      const int32_t begin = qo_indptr[static_cast<size_t>(b)], length = kv_len[static_cast<size_t>(b)];
      const int32_t q_len = qo_indptr[static_cast<size_t>(b) + 1] - begin;
      for (int32_t i = 0; i < q_len; ++i) {
        const int32_t token = begin + i, query_position = length - q_len + i;
        const auto sees = [&](int32_t position) {
          if (!owns(share, position)) return false;
          if (options.args.window_left >= 0 && position < query_position - options.args.window_left) return false;
          const int32_t draft = position - (length - q_len);
          if (draft >= 0 && tree == 1) return mask[static_cast<size_t>(token * 4 + draft)] != 0;
          if (draft >= 0 && tree == 2) {
            std::vector<int32_t> path = {i};
            while (path.back() >= 0) path.push_back(parents[static_cast<size_t>(begin + path.back())]);
            return std::count(path.begin(), path.end(), draft) > 0;
          }
          return !causal || position <= query_position;
        };
        std::vector<std::vector<float>> rows;
        std::vector<int32_t> positions;
        int64_t local = 0;
        for (int32_t position = 0; position < length; ++position) {
          if (!owns(share, position)) continue;
          if (sees(position)) {
            rows.push_back(cache.unpack(slot_of(b, local)));
            positions.push_back(position);
          }
          ++local;
        }
        for (int32_t h = 0; h < heads; ++h) {
          const int64_t row = token * heads + h;
          std::vector<double> scores;
          for (size_t n = 0; n < rows.size(); ++n) {
            double sum = 0;
            for (int32_t c = 0; c < d_qk; ++c)
              sum += query(row, c) * static_cast<double>(rows[n][static_cast<size_t>(c)]);
            scores.push_back(options.score(scale * sum, h, positions[n], query_position));
          }
          const Expected expected(scores);
          check_lse(lse[static_cast<size_t>(h * tokens + token)], expected);
          for (int32_t c = 0; c < d_v; ++c) {
            double value = expected.o([&](size_t n) { return static_cast<double>(rows[n][static_cast<size_t>(c)]); },
                                      options.sink(h));
            if (o.dtype == DType::kE4M3) value = std::clamp(value / static_cast<double>(o_scale), -448.0, 448.0);
            ASSERT_NEAR(o.at(row, c), value, tolerance(o.dtype, value)) << token << ' ' << h << ' ' << c;
          }
        }
      }
    }
  }
}

TEST(ReferencePrefill, EveryOptionByTheTextbook) {
  for (uint32_t seed = 0; seed < 60; ++seed) {
    MLA_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    const int32_t heads = random.integer(1, 3), d_qk = 7, d_v = 4;
    std::vector<int32_t> qo_indptr = {0}, kv_indptr = {0};
    for (int32_t b = 0; b < 3; ++b) {
      qo_indptr.push_back(qo_indptr.back() + random.integer(0, 70));
      kv_indptr.push_back(kv_indptr.back() + random.integer(0, 40));
    }
    Rows q(qo_indptr.back(), heads, d_qk, 1, random.engine()), k(kv_indptr.back(), heads, d_qk, 0, random.engine()),
        v(kv_indptr.back(), heads, d_v, 2, random.engine());
    const Options options(random, heads);
    std::vector<float> o(static_cast<size_t>(qo_indptr.back() * heads * d_v), kNan),
        lse(static_cast<size_t>(qo_indptr.back() * heads), kNan);
    core::PrefillArgs args = prefill_args(q, k, v, qo_indptr, kv_indptr);
    args.causal = random.of({true, false});
    args.options = options.args;
    args.sm_scale = 0.5F;
    set_outputs(args, o, lse);
    run_in_workspace(args, prefill);
    for (size_t b = 0; b < 3; ++b) {
      const int64_t q_len = qo_indptr[b + 1] - qo_indptr[b], kv_len = kv_indptr[b + 1] - kv_indptr[b];
      for (int64_t i = 0; i < q_len; ++i)
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t token = qo_indptr[b] + i, at = kv_len - q_len + i;
          std::vector<double> scores;
          std::vector<int64_t> keys;
          for (int64_t j = 0; j < kv_len; ++j) {
            if (args.causal && j > at) continue;
            if (options.args.window_left >= 0 && j < at - options.args.window_left) continue;
            double sum = 0;
            for (int64_t c = 0; c < d_qk; ++c) sum += q.at(token, h, c) * k.at(kv_indptr[b] + j, h, c);
            scores.push_back(options.score(0.5 * sum, h, j, at));
            keys.push_back(kv_indptr[b] + j);
          }
          const Expected expected(scores);
          const auto row = static_cast<size_t>(token * heads + h);
          check_lse(lse[row], expected);
          for (int64_t c = 0; c < d_v; ++c)
            ASSERT_NEAR(o[row * static_cast<size_t>(d_v) + static_cast<size_t>(c)],
                        expected.o([&](size_t n) { return v.at(keys[n], h, c); }, options.sink(h)), 1e-6);
        }
    }
  }
}

}  // namespace
}  // namespace mla::reference
