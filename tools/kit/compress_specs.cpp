// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kit/random_parts.h"
#include "kit/spec_line.h"

namespace mla::kit {

int32_t CompressSpec::d_rotary() const {
  if (!rotary || to == To::kLatents) return 0;
  return to == To::kIndexer ? 64 : cache.d_rotary();
}

int32_t CompressSpec::num_columns() const {
  if (columns > 0) return columns;
  const int32_t longest = kv_len.empty() ? 0 : *std::max_element(kv_len.begin(), kv_len.end());
  const int32_t needed = ratio * (overlap ? 2 : 1) - 1;
  return (std::max(longest, needed) + block_size - 1) / block_size;
}

std::string describe(const CompressSpec& spec) {
  using Spec = CompressSpec;
  Line line(spec);
  line.always("seed", &Spec::seed)
      .always("q_len", &Spec::q_len)
      .always("kv_len", &Spec::kv_len)
      .always("ratio", &Spec::ratio)
      .always("overlap", &Spec::overlap)
      .always("dtype", &Spec::dtype)
      .always("latent_dtype", &Spec::latent_dtype)
      .append(describe(spec.cache))
      .append(spec.to == Spec::To::kCache     ? ""
              : spec.to == Spec::To::kIndexer ? "to=indexer"
                                              : "to=latents");
  return line.knob("indexer_format", &Spec::indexer_format)
      .knob("norm_dtype", &Spec::norm_dtype)
      .knob("bias", &Spec::bias)
      .knob("norm", &Spec::norm)
      .knob("score_std", &Spec::score_std)
      .knob("num_pages", &Spec::num_pages)
      .knob("rotary", &Spec::rotary)
      .knob("interleaved", &Spec::interleaved)
      .knob("block_size", &Spec::block_size)
      .knob("columns", &Spec::columns)
      .knob("missing_share", &Spec::missing_share)
      .knob("skip_share", &Spec::skip_share)
      .knob("omit_qo_indptr", &Spec::omit_qo_indptr)
      .knob("power_of_two_scales", &Spec::power_of_two_scales)
      .knob("row_extra", &Spec::row_extra)
      .knob("score_extra", &Spec::score_extra)
      .knob("bias_extra", &Spec::bias_extra)
      .knob("state_extra", &Spec::state_extra)
      .knob("state_block_extra", &Spec::state_block_extra)
      .knob("table_extra", &Spec::table_extra)
      .knob("latent_extra", &Spec::latent_extra)
      .knob("cos_sin_extra", &Spec::cos_sin_extra)
      .append(spec.append ? "append=(" + describe(*spec.append) + ")" : "")
      .take();
}

Problem problem_of(const CompressSpec& spec) {
  Problem problem = {.op = Op::kCompress,
                     .device = {},
                     .q_dtype = spec.dtype,
                     .cache = {},
                     .num_heads = 1,
                     .d_qk = spec.cache.d_qk,
                     .d_v = spec.cache.d_qk};
  if (spec.to != CompressSpec::To::kCache) return problem;
  problem.cache = spec.cache.format;
  problem.d_v = spec.cache.d_ckv();
  return problem;
}

Work work_of(const CompressSpec& spec) {
  const double token = spec.width() * bytes_of(spec.dtype) * (spec.ratio > 1 ? 2 : 1);
  double row = spec.cache.d_qk * bytes_of(spec.latent_dtype) + spec.d_rotary() * 4.0;
  if (spec.to == CompressSpec::To::kCache) row += (1 - spec.skip_share) * cache_row_bytes(spec.cache);
  if (spec.to == CompressSpec::To::kIndexer)
    row += (1 - spec.skip_share) * static_cast<double>(indexer_key_bytes(spec.indexer_format));
  const int64_t capacity = int64_t{spec.num_columns()} * spec.block_size;
  const int64_t span = spec.ratio * (spec.overlap ? 2 : 1);
  Work work = spec.append ? work_of(*spec.append) : Work();
  for (size_t request = 0; request < spec.kv_len.size(); ++request) {
    const int64_t kv_len = spec.kv_len[request], q_len = spec.q_len_of(request);
    const int64_t first = kv_len - q_len, begin = std::max<int64_t>(first, 0);
    work.bytes +=
        static_cast<double>(q_len) * token + static_cast<double>(kv_len / spec.ratio - begin / spec.ratio) * row;
    if (spec.ratio == 1) continue;
    const int64_t kept = std::min(capacity, kv_len - begin);
    const int64_t last = (begin + spec.ratio) / spec.ratio * spec.ratio - 1;  // where the first group ends
    const int64_t read = last < kv_len ? std::clamp<int64_t>(begin - (last - span + 1), 0, begin) : 0;
    work.bytes += static_cast<double>(kept + read) * spec.width() * 8.0;
  }
  return work;
}

namespace {

/// Returns what may be appended beside the latents: often what the kernel of their rows takes, a window of e4m3 rows.
AppendRopeSpec random_append_beside(const CompressSpec& compress) {
  Random random(mix(compress.seed, 0xBE51DE));
  const bool usual = random.chance(0.5);
  const CacheFormat format = usual ? pick(random, std::array{CacheFormat::kFP8DsV4, CacheFormat::kFP8DsV41})
                                   : random.pick(random.chance(0.7) ? tensor_formats() : std::span(kAllCacheFormats));
  AppendRopeSpec spec = random_append_rope_spec(random.next(), format);
  spec.num_tokens = static_cast<int32_t>(total_queries(compress));
  if (spec.num_tokens > 9) spec.num_heads = std::min(spec.num_heads, 2);
  spec.num_pages = std::max(spec.num_pages, spec.num_tokens / spec.cache.page_size + 1);
  if (!spec.cache.packed() && random.chance(0.7)) spec.cache.two_tensors = true;
  if (usual && random.chance(0.7)) {
    spec.dtype = DType::kBF16;
    spec.interleaved = true;
    spec.row_extra = spec.cos_sin_extra = 0;
  }
  return spec;
}

}  // namespace

CompressSpec random_compress_spec(uint64_t seed, CacheFormat format) {
  using To = CompressSpec::To;
  Random random(mix(seed, 0xC0389E55));
  CompressSpec spec;
  spec.seed = seed;
  spec.ratio = pick(random, std::array<int32_t, 8>{1, 2, 2, 3, 4, 4, 4, 128});
  spec.overlap = spec.ratio > 1 && (spec.ratio == 4 ? random.chance(0.8) : random.chance(0.2));
  spec.to = pick(random, std::array<To, 5>{To::kCache, To::kCache, To::kCache, To::kIndexer, To::kLatents});
  spec.cache = random_cache(random, format);
  divide(spec.cache);
  if (spec.to != To::kCache) {
    spec.cache = usual_cache(CacheFormat::kBF16);
    spec.cache.page_size = random_page_size(random);
    if (spec.to == To::kIndexer) spec.cache.page_stride_extra = random_extra(random);
    spec.cache.d_qk =
        spec.to == To::kIndexer ? kIndexerLayout.head_dim : pick(random, std::array<int32_t, 5>{512, 128, 64, 7, 130});
    spec.cache.d_v = spec.cache.d_qk;
  }
  const Batch batch = random_requests(random, 16, 64);
  spec.q_len = batch.q_len;
  spec.kv_len = batch.kv_len;
  spec.omit_qo_indptr = batch.omit_qo_indptr;
  if (!spec.q_len.empty() && random.chance(0.2)) {  // a prompt, or a piece of one
    spec.omit_qo_indptr = false;
    const auto request = static_cast<size_t>(random.integer(0, static_cast<int64_t>(spec.q_len.size()) - 1));
    spec.q_len[request] = static_cast<int32_t>(random.integer(0, std::min(spec.kv_len[request], 300)));
  }
  spec.dtype = random_float(random);
  spec.latent_dtype = random_float(random);
  spec.norm_dtype = random_float(random);
  spec.bias = spec.ratio > 1 && random.chance(0.6);
  spec.norm = random.chance(0.8);
  spec.score_std = pick(random, std::array<float, 4>{0.0F, 1.0F, 1.0F, 20.0F});
  spec.rotary = random.chance(0.8);
  spec.interleaved = random.chance(0.6);
  spec.block_size = pick(random, std::array<int32_t, 5>{1, 3, 4, 8, 64});
  const int32_t needed = std::max(spec.ratio * (spec.overlap ? 2 : 1) - 1, 1);
  spec.columns = random.chance(0.3)
                     ? 0
                     : (needed + spec.block_size - 1) / spec.block_size + static_cast<int32_t>(random.integer(0, 2));
  constexpr int32_t kLongestPaged = 400;  // tokens of a request whose state has room for all of them
  if (spec.columns == 0)
    for (int32_t& kv_len : spec.kv_len) kv_len = std::min(kv_len, kLongestPaged);
  spec.missing_share = pick(random, std::array<double, 3>{0.0, 0.0, 0.3});
  spec.skip_share = pick(random, std::array<double, 3>{0.0, 0.1, 0.9});
  spec.power_of_two_scales = random.chance(0.5);
  int64_t groups = 1;
  for (size_t i = 0; i < spec.kv_len.size(); ++i) groups += spec.q_len[i] / spec.ratio + 1;
  spec.num_pages = static_cast<int32_t>(groups / spec.cache.page_size + random.integer(1, 3));
  for (int64_t* extra : {&spec.row_extra, &spec.score_extra, &spec.bias_extra, &spec.state_extra,
                         &spec.state_block_extra, &spec.table_extra, &spec.latent_extra, &spec.cos_sin_extra})
    *extra = random_extra(random);
  if (spec.to == To::kIndexer && random.chance(0.5)) {
    spec.indexer_format = IndexerFormat::kMXFP4;
    spec.power_of_two_scales = true;
  }
  if (random.chance(0.5)) spec.append = random_append_beside(spec);
  return spec;
}

}  // namespace mla::kit
